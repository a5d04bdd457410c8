"""A trace that is handed over, compared with the engine's own answers to its requests alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from pretend_engine import Bug, Pretend

from lfm2np.oracle.engines.records import Trace, changed, failed, greedy
from lfm2np.oracle.engines.target import Played
from lfm2np.suite.itself.by_itself import ByItself
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


@pytest.mark.parametrize(
    ("bug", "is_bitwise", "expected"),
    [
        (None, False, None),
        (lambda now, position: now.beside > 0 and now.place == 2 and not position, False, "request 3: a"),
        (lambda now, position: now.cached == 3 and position == 1, False, "request 1: a"),
        (lambda now, position: bool(now.sent.params.temperature) and now.beside > 0, False, "request 2: a"),
        (None, True, "request 0: "),
    ],
)
def test_the_first_request_that_differs_is_named(bug: Bug | None, is_bitwise: bool, expected: str | None) -> None:
    player = Pretend(1e-6, bug, 0.1)
    finding = ByItself(player, SPREAD, is_bitwise).finding(TRACE, player.play(TRACE))
    assert (None if finding is None else finding.what[: len(expected or "")]) == expected
    assert finding is None or finding.kind == "differs"


def test_an_aborted_answer_is_compared_as_far_as_it_came_and_troubles_come_first() -> None:
    player = Pretend()
    whole = player.play(Trace((SENT,))).answers[0][0]
    cut = replace(whole, token_ids=(whole.token_ids or ())[:2], logprobs=(whole.logprobs or ())[:2], top_logprobs=None)
    judge, trace = ByItself(player, SPREAD), Trace((replace(SENT, abort_after=2),))
    assert judge.finding(trace, Played(((replace(cut, is_aborted=True),),))) is None
    wrong = replace(cut, logprobs=((cut.logprobs or (0.0,))[0] - 0.1, *(cut.logprobs or ())[1:]))
    assert judge.finding(trace, Played(((replace(wrong, is_aborted=True),),))) is not None
    assert judge.finding(Trace((SENT,)), Played(((cut,),))) is not None  # not aborted, and too short
    finding = judge.finding(Trace((SENT,)), Played(((failed("HTTP 500"),),)))
    assert finding is not None and (finding.kind, finding.request) == ("5xx", 0)


def test_what_is_expected_is_the_answer_alone_within_its_bounds() -> None:
    player = Pretend()
    judge = ByItself(player, SPREAD)
    right = judge.right(replace(SENT, after=None, streamed=True), None)
    answer = player.play(Trace((judge.alone(SENT),))).answers[0][0]
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
    assert judge.alone(replace(SENT, after=0, abort_after=1)) == judge.alone(SENT)
    count = player.number
    judge.right(SENT, None)
    assert player.number == count  # an answer alone is asked for once
