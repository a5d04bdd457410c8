"""A drawn trace, judged by the engine's own answers to its requests alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from pretend_engine import VOCAB, Bug, Circumstances, Pretend

from lfm2np.oracle.engines.records import DEAD, HANG, Answer, Trace, changed, failed, greedy
from lfm2np.oracle.engines.target import LEAK, Played, Trouble
from lfm2np.suite.fuzz.campaign import Campaign
from lfm2np.suite.fuzz.draw_traces import Around
from lfm2np.suite.itself.by_itself import ByItself, alone
from lfm2np.suite.itself.pairs import allowed_by
from lfm2np.suite.itself.rounding_spread import Spread

SPREAD = Spread(1e-6, True, 300.0)
SENT = greedy("", (8, 9, 10), 6)
TRACE = Trace(
    (
        SENT,
        greedy("", (8, 9, 10, 11), 4, after=0),
        greedy("", (9,), 3, temperature=1.0, seed=5),
        replace(SENT, cold=True),
    )
)


def judged(bug: Bug | None = None, trace: Trace = TRACE, noise: float = 1e-6, **fields: bool) -> str | None:
    """What is wrong with the answers to a trace, or None."""
    player = Pretend(noise, bug, 0.1)
    finding = ByItself(player, SPREAD, VOCAB, **fields).finding(trace, player.play(trace))
    assert finding is None or (finding.kind, finding.request is not None) == ("differs", True)
    return None if finding is None else finding.what


def test_a_right_engine_is_right() -> None:
    assert judged() is None
    assert judged(noise=0.0, is_bitwise=True) is None


@pytest.mark.parametrize(
    ("bug", "request_"),
    [
        (lambda now, position: now.beside > 0 and now.place == 2 and not position, 3),
        (lambda now, position: now.cached == 3 and position == 1, 1),
        (lambda now, position: bool(now.sent.params.temperature) and now.beside > 0 and position < 2, 2),
    ],
)
def test_the_first_request_that_differs_is_named(bug: Bug, request_: int) -> None:
    assert (judged(bug) or "").startswith(f"request {request_}: a")


def test_bits_may_be_demanded() -> None:
    assert "have other bits" in (judged(is_bitwise=True) or "")


def test_what_is_wrong_by_decode_alone_shows_in_its_scores() -> None:
    wrong: Bug = lambda now, position: position == 3  # noqa: E731
    assert judged(wrong) is None
    assert (judged(wrong, with_scores=True) or "").startswith("request 0: a log-probability at output token 3")


def test_an_answer_that_was_left_is_compared_as_far_as_it_came() -> None:
    player = Pretend()
    whole = player.play(Trace((SENT,))).answers[0][0]
    cut = replace(whole, token_ids=(whole.token_ids or ())[:2], logprobs=(whole.logprobs or ())[:2], top_logprobs=None)
    judge, trace = ByItself(player, SPREAD, VOCAB), Trace((replace(SENT, abort_after=2),))
    assert judge.finding(trace, Played(((replace(cut, is_aborted=True),),))) is None
    wrong = replace(cut, logprobs=((cut.logprobs or (0.0,))[0] - 0.1, *(cut.logprobs or ())[1:]))
    assert judge.finding(trace, Played(((replace(wrong, is_aborted=True),),))) is not None
    assert judge.finding(Trace((SENT,)), Played(((cut,),))) is not None  # not left, and too short


def test_troubles_come_first() -> None:
    judge = ByItself(Pretend(), SPREAD, VOCAB)
    for trouble in (Trouble(DEAD, "gone"), Trouble(LEAK, "slots")):
        finding = judge.finding(Trace((SENT,)), Played(((Answer(),),), trouble))
        assert finding is not None and (finding.kind, finding.what) == (trouble.kind, trouble.what)
    finding = judge.finding(Trace((SENT,)), Played(((failed("HTTP 500"),),)))
    assert finding is not None and (finding.kind, finding.request) == ("5xx", 0)


def test_an_engine_that_hangs_when_it_is_asked_alone_is_a_finding() -> None:
    class Hangs(Pretend):
        def play(self, trace: Trace) -> Played:
            hung = (failed("no complete answer", HANG),)
            pairs = zip(trace.requests, super().play(trace).answers, strict=True)
            return Played(tuple(hung if sent.is_scored else answers for sent, answers in pairs))

    player = Hangs()
    judge = ByItself(player, SPREAD, VOCAB, with_scores=True)
    trace = Trace((SENT,))
    for _ in range(2):  # it is not taken for known
        finding = judge.finding(trace, player.play(trace))
        assert finding is not None and (finding.kind, finding.request) == (HANG, 0)
        assert finding.what == "request 0, asked again alone: no complete answer"


def test_what_is_expected_is_the_answer_alone_within_its_bounds() -> None:
    player = Pretend()
    judge = ByItself(player, SPREAD, VOCAB)
    right = judge.right(replace(SENT, after=None, streamed=True), None)
    answer = player.play(Trace((alone(SENT),))).answers[0][0]
    assert [(token.token_id, token.logprob) for token in right] == list(
        zip(answer.token_ids or (), answer.logprobs or (), strict=True)
    )
    tops = (answer.top_logprobs or ())[0]
    others = [value for token, value in tops.items() if token != right[0].token_id]
    reported = {**tops, right[0].token_id: right[0].logprob}
    allowed = allowed_by(reported, right[0].token_id)
    assert right[0].bound == pytest.approx(300e-6 * allowed.scales[allowed.at(right[0].token_id)])
    assert right[0].decided == (right[0].logprob - max(others) > math.sqrt(2) * 300e-6)
    assert judge.right(changed(SENT, temperature=1.0), None) == []
    assert judge.alone(replace(SENT, after=0, abort_after=1)) == alone(SENT)
    assert ByItself(player, SPREAD, VOCAB, is_same=False).alone(SENT) is None


def test_an_answer_alone_is_asked_for_once() -> None:
    player = Pretend()
    judge = ByItself(player, SPREAD, VOCAB)
    played = player.play(TRACE)
    judge.finding(TRACE, played)
    count = player.number
    judge.finding(TRACE, played)
    assert player.number == count


def test_what_was_seen_once_and_in_no_replay_is_counted_and_is_no_finding() -> None:
    around = Around(4, 12, 4, 40, tuple(range(8, VOCAB)))

    def failures(bug: Bug) -> tuple[int, int]:
        player = Pretend(0.0, bug, 0.1)
        campaign = Campaign(ByItself(player, SPREAD, VOCAB), player, around, is_live=False)
        return len(list(campaign.run(0, 20, None))), campaign.counts.once

    wrong: list[int] = []

    def once(now: Circumstances, position: int) -> bool:
        if not wrong and now.beside > 0:
            wrong.append(now.number)
        return now.number in wrong

    assert failures(once) == (0, 1) and len(wrong) == 1
    assert failures(lambda now, position: now.beside > 0 and now.place > 0) == (1, 0)
