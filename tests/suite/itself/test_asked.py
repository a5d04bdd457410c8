"""Every relation holds on an engine that only rounds, and is broken by a bug of its kind and by no other's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from pretend_engine import VOCAB, Bug, Circumstances, Pretend

from lfm2np.errors import InconclusiveError
from lfm2np.oracle.engines.records import BROKEN, DEAD, IMPOSSIBLE, REFUSED, Answer, Request, Trace, failed
from lfm2np.oracle.engines.target import Answers, Played, TargetError, Trouble
from lfm2np.oracle.report.as_text import as_text
from lfm2np.oracle.report.report import OPEN
from lfm2np.suite.itself.asked import Asking
from lfm2np.suite.itself.invariance_report import report_of
from lfm2np.suite.itself.questions import Sizes
from lfm2np.suite.itself.relations import NAMES, RELATIONS, piece_of
from lfm2np.suite.itself.rounding_spread import Outcome

pytestmark = pytest.mark.slow

SIZES = Sizes(block=4, chunk=12, slots=4, longest=96, vocab=VOCAB)


def asking(player: Pretend, format_name: str = "float32", sizes: Pretend | None = None, **fields: object) -> Asking:
    players = {"": player, "sizes": sizes or player}
    return Asking(players, player.probe(), SIZES, format_name, **fields)  # type: ignore[arg-type]


def outcomes(checked: Asking) -> dict[str, Outcome]:
    return {held.relation.name: held.outcome for held in checked.held}


def broken(checked: Asking) -> set[str]:
    return {held.relation.name for held in checked.broken}


def test_an_engine_whose_bits_never_change_has_equal_bits_under_every_relation() -> None:
    checked = asking(Pretend()).run()
    assert outcomes(checked) == dict.fromkeys(NAMES, Outcome.EQUAL)
    assert not checked.spread.is_measured
    for held in checked.held:
        assert held.score is not None and held.score.positions == held.score.equal > 0
        assert held.score.largest == held.score.kl == held.score.flips == 0


@pytest.mark.parametrize(("format_name", "noise"), [("float32", 1e-6), ("float16", 5e-3), ("bfloat16", 0.05)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.night) for seed in (1, 2))])
def test_an_engine_that_rounds_is_within_its_spread(format_name: str, noise: float, seed: int) -> None:
    checked = asking(Pretend(noise), format_name, seed=seed).run()
    assert broken(checked) == set()
    assert checked.spread.is_measured and noise / 3 < checked.spread.nats < 3 * noise
    assert outcomes(checked)["batch"] is Outcome.WITHIN


def seldom(now: Circumstances) -> bool:
    return now.sent.prompt_token_ids[-1] % 2 == 0


BUGS: dict[str, tuple[Bug, set[str]]] = {  # and the relations that it breaks
    "place": (lambda now, position: now.place == 1 and now.beside > 0, {"batch", "neighbours", "warm-batch"}),
    "decode": (lambda now, position: position > 0, {"decode", "score", "prefixes", "samples", "warm-batch"}),
    "scores": (lambda now, position: position < 0, {"score", "samples"}),
    "stream": (lambda now, position: now.sent.streamed and position == 1, {"stream"}),
    "cached": (lambda now, position: now.cached > 0 and position == 0, {"warm", "prefixes", "warm-batch", "evicted"}),
    "odd hits": (lambda now, position: now.cached % 4 == 3, {"prefixes"}),
    "branches": (lambda now, position: now.shared > 1 and not now.sent.cold, {"branches"}),
    "short after long": (lambda now, position: now.after > len(now.sent.prompt_token_ids) + 20, {"reuse"}),
    "beside aborts": (lambda now, position: now.aborted_beside > 0, {"aborts"}),
    "arrives late": (lambda now, position: now.waits_for_tokens and seldom(now), {"chunks"}),
    "beside sampled": (
        lambda now, position: now.place == 1 and now.beside == 2 and not now.sent.params.temperature and seldom(now),
        {"mixed"},
    ),
    "waits": (lambda now, position: now.place >= 8, {"burst", "aborts"}),
    "many": (lambda now, position: now.number > 300, {"later"}),
    "counts": (lambda now, position: now.number % 4 == 3, {"repeat", "order", "twins"}),
    "other sizes": (lambda now, position: True, {"sizes"}),
}
OTHER_BUGS: dict[str, tuple[dict[str, Any], set[str]]] = {  # by fields of Pretend
    "seeds without effect": ({"takes_seeds": False}, {"seeds"}),
    "a stop string left in the text": ({"late_stop": 1}, {"stop"}),
    "not the likeliest token": ({"second_at": 2}, {"greedy"}),
    "samples with the same random numbers": ({"shares_noise": True}, {"samples"}),
}
EVERY_BUG = {**{name: ({"bug": bug}, broken) for name, (bug, broken) in BUGS.items()}, **OTHER_BUGS}


@pytest.mark.parametrize("name", EVERY_BUG)
@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.night), 1e-6])
def test_a_bug_breaks_its_relations(name: str, noise: float) -> None:
    fields, expected = EVERY_BUG[name]
    wrong = Pretend(noise, size=0.1, **fields)
    chosen = [each for each in RELATIONS if name == "many" or each.name in {*expected, "repeat"}]
    checked = (asking(Pretend(noise), sizes=wrong) if name == "other sizes" else asking(wrong)).run(chosen)
    assert broken(checked) == expected, outcomes(checked)
    held = checked.broken[0]
    assert held.broken is not None and held.broken.trace is not None and held.rounds[0] == 2


def test_every_relation_is_broken_by_some_bug() -> None:
    assert set().union(*(expected for _, expected in EVERY_BUG.values())) == set(NAMES)


def test_a_wrong_answer_that_is_the_same_everywhere_is_not_seen() -> None:
    assert broken(asking(Pretend(1e-6, lambda now, position: True)).run()) == set()


def test_what_is_seen_once_is_said_but_does_not_break() -> None:
    checked = asking(Pretend(1e-6, lambda now, position: now.number == 120, 0.5)).run()  # of `stop`
    once = [held for held in checked.held if held.outcome is Outcome.ONCE]
    assert broken(checked) == set() and len(once) == 1 and once[0].rounds == (1, 3) and once[0].broken is not None


@pytest.mark.parametrize("at_end", [True, False])
def test_a_stop_string_has_no_blanks_at_its_ends_and_no_broken_character(at_end: bool) -> None:
    assert [piece_of(text, at_end) for text in ("", "  ", "\ufffd\ufffd")] == [None] * 3
    piece = piece_of("one two\ufffd three", at_end)
    assert piece is not None and piece == piece.strip() and "\ufffd" not in piece


def test_equal_bits_can_be_demanded() -> None:
    tiny = Pretend(0.0, lambda now, position: now.cached > 0, 1e-7)
    chosen = [each for each in RELATIONS if each.name in ("warm", "prefixes")]
    assert broken(asking(tiny).run(chosen)) == set()
    assert broken(asking(tiny, is_bitwise=True).run(chosen)) == {"warm", "prefixes"}


def test_two_engines() -> None:
    def compared(first: Pretend, second: Pretend) -> Outcome:
        return asking(first, other=asking(second)).run([]).held[-1].outcome

    assert compared(Pretend(), Pretend()) is Outcome.EQUAL
    assert compared(Pretend(1e-6), Pretend(1e-6, salt=1)) is Outcome.WITHIN
    assert compared(Pretend(1e-6), Pretend(1e-6, lambda now, position: position == 3, 0.01)) is Outcome.BROKEN


def test_what_is_not_reported_is_not_judged() -> None:
    checked = asking(Pretend(tells_logprobs=False, noise=1e-6)).run()
    assert outcomes(checked)["score"] is Outcome.NOT_ASKED
    assert broken(checked) == set()


def test_other_tokens_without_a_log_probability_leave_the_verdict_open() -> None:
    bug: Bug = lambda now, position: now.cached > 0 and position == 0  # noqa: E731
    report = report_of(asking(Pretend(0.0, bug, 5.0, tells_logprobs=False)).run())
    assert (report.verdict, report.exit_code) == ("INCONCLUSIVE", OPEN)
    words = {finding.where: finding.words for finding in report.findings if finding.kind == "not judged"}
    assert "prefixes" in words and words["warm"].startswith("prompt of ") and " instead of " in words["warm"]


class Curt(Pretend):
    """Reports the log-probabilities of the tokens that it chose alone."""

    def answer(self, now: Circumstances, sample: int) -> Answer:
        return replace(super().answer(now, sample), top_logprobs=None)


@pytest.mark.parametrize(("format_name", "noise"), [("float32", 1e-6), ("float16", 5e-3), ("bfloat16", 0.05)])
def test_near_ties_of_an_engine_that_reports_chosen_tokens_alone_are_explained(format_name: str, noise: float) -> None:
    checked = asking(Curt(noise), format_name).run()
    assert broken(checked) == set()
    assert [name for name, shown in outcomes(checked).items() if shown is Outcome.UNKNOWN] == ["greedy"]
    flips = sum(held.score.flips for held in checked.held if held.score is not None)
    assert flips > 9 or format_name != "bfloat16"


class Withholds(Curt):
    """Beside others it gives other tokens, and no numbers."""

    logprob: float | None = None

    def answer(self, now: Circumstances, sample: int) -> Answer:
        answer = super().answer(now, sample)
        others = tuple((token + 1) % VOCAB for token in answer.token_ids or ())
        logprobs = None if self.logprob is None else (self.logprob,) * len(others)
        return replace(answer, token_ids=others, logprobs=logprobs, text=None) if now.beside else answer


class Insists(Withholds):
    """It is nearly certain of the tokens that it chose: no difference of what both runs report."""

    logprob = -0.001


class SecondBest(Pretend):
    """Beside others it takes the second best token, and reports the right numbers."""

    def answer(self, now: Circumstances, sample: int) -> Answer:
        self.second_at = 1 if now.beside else None
        return super().answer(now, sample)


@pytest.mark.parametrize("engine", [Withholds, Insists, SecondBest])
@pytest.mark.parametrize(("format_name", "noise"), [("float32", 1e-6), ("bfloat16", 0.05)])
def test_other_tokens_beside_others_break_whatever_is_reported(
    engine: type[Pretend], format_name: str, noise: float
) -> None:
    chosen = [relation for relation in RELATIONS if relation.name in ("batch", "decode", "twins", "burst")]
    assert broken(asking(engine(noise), format_name).run(chosen)) == {"batch", "twins", "burst"}


FORMATS = {  # the noise of an engine, its declared format, nats that a batch adds, and the format that is named
    "another format everywhere": (0.002, "float32", 0.0, "if the engine computes in float16, --format float16"),
    "a bug beside others, of float16's size": (1e-6, "float32", 0.005, ""),
    "right in bfloat16": (0.03, "bfloat16", 0.0, ""),
    "right in float32": (1e-6, "float32", 0.0, ""),
    "a bug beside others, under float16": (1e-6, "float16", 0.02, "--format float32 judges by that, float16 by more"),
    "a bug that changes tokens": (1e-6, "float32", 2.0, ""),
}


@pytest.mark.parametrize("name", FORMATS)
def test_another_format_is_named_only_if_all_that_changes_the_order_of_sums_moves_logits_as_it_does(name: str) -> None:
    """A bug as large as float16's rounding is no reason to declare float16; declared, that is said to hide it."""
    noise, declared, leak, named = FORMATS[name]
    checked = asking(Pretend(noise, lambda now, position: now.beside > 0, leak), declared).run()
    hints = [step for step in report_of(checked).next_steps if "float" in step]
    assert len(hints) == bool(named) and all(hint.endswith(named) or f"{named};" in hint for hint in hints), hints
    assert bool(checked.broken) == (declared == "float32" and not name.startswith("right"))


@dataclass
class Changed(Pretend):
    """What it answers to a request is changed."""

    change: Callable[[Request, Answers], Answers] = lambda sent, answers: answers

    def play(self, trace: Trace) -> Played:
        return Played(tuple(map(self.change, trace.requests, super().play(trace).answers)))


UNDEFINED = (failed("logprobs[0] nan: expected a finite number", IMPOSSIBLE),)  # as players refuse it


@pytest.mark.parametrize("longest", [0, 8])
def test_an_impossible_answer_alone_is_wrong_and_not_unanswered(longest: int) -> None:
    engine = Changed(1e-6, change=lambda sent, answers: UNDEFINED if len(sent.prompt_token_ids) > longest else answers)
    checked = asking(engine).run()
    report = report_of(checked)
    assert report.verdict == "BROKEN" and report.findings[0].where == "alone" and not checked.unanswered
    assert "logprobs[0] nan: expected a finite number" in report.findings[0].words
    assert len(checked.held) == (1 if longest == 0 else 1 + len(RELATIONS))


def test_an_impossible_answer_to_a_sampled_question_alone_breaks_its_relations() -> None:
    def change(sent: Request, answers: Answers) -> Answers:
        return UNDEFINED if sent.is_sampled and len(sent.prompt_token_ids) > 8 else answers

    checked = asking(Changed(1e-6, change=change)).run()
    assert report_of(checked).verdict == "BROKEN" and not checked.unanswered
    assert {each.relation.samples > 0 for each in checked.broken} == {True}
    assert "logprobs[0] nan: expected a finite number" in report_of(checked).findings[0].words


class Poisoned(Pretend):
    """Answers nothing after the first batch."""

    is_broken = False

    def play(self, trace: Trace) -> Played:
        if self.is_broken:
            return Played(((failed("HTTP 500"),),) * len(trace.requests))
        self.is_broken = is_batch(trace)
        return super().play(trace)


def test_an_engine_that_answers_no_more_breaks_the_relation_in_which_that_shows() -> None:
    checked = asking(Poisoned()).run()
    assert checked.broken[0].relation.name == "batch" and checked.broken[0].broken is not None
    assert "HTTP 500; since then no question was answered" in checked.broken[0].broken.what


@dataclass
class Dies(Pretend):
    when: Callable[[Trace], bool] = lambda trace: True

    def play(self, trace: Trace) -> Played:
        if not self.when(trace):
            return super().play(trace)
        broken = (failed("the connection broke", BROKEN),)
        return Played((broken,) * len(trace.requests), Trouble(DEAD, "no connection any more"))


def is_batch(trace: Trace) -> bool:
    return len(trace.requests) > 1 and all(sent.after is None for sent in trace.requests)


def test_an_engine_that_dies_while_the_spread_is_measured() -> None:
    checked = asking(Dies(when=is_batch)).run()
    (held,) = checked.broken
    assert held.relation.name == "batch" and held.broken is not None and held.broken.trace is not None
    assert {each.why for each in checked.held if each is not held} == {"the engine is gone"}


def test_an_engine_that_dies_breaks_the_relation_and_what_came_before_stays() -> None:
    checked = asking(Dies(when=lambda trace: any(sent.streamed for sent in trace.requests))).run()
    (held,) = checked.broken
    assert held.relation.name == "stream" and held.broken is not None and held.broken.what == "no connection any more"
    after = [each for each in checked.held if each.why == "the engine is gone"]
    assert after and all(each.outcome is Outcome.NOT_ASKED for each in after)
    assert outcomes(checked)["repeat"] is Outcome.EQUAL
    assert "stream: no connection any more" in as_text(report_of(checked))


def test_relations_after_the_time_are_not_begun() -> None:
    checked = asking(Pretend(), until=0.0).run()
    named = {held.relation.name: held.why for held in checked.held if held.outcome is Outcome.NOT_ASKED}
    assert named == dict.fromkeys([each.name for each in RELATIONS if not each.measures], "out of time")


def test_a_question_that_is_not_answered_alone_is_said() -> None:
    refused = (failed("HTTP 500"),)
    engine = Changed(change=lambda sent, answers: refused if len(sent.prompt_token_ids) == 1 else answers)
    checked = asking(engine).run()
    assert set(checked.unanswered) == {"a prompt of 1 token alone: HTTP 500"}
    assert broken(checked) == set()
    report = report_of(checked)
    assert (report.verdict, report.exit_code) == ("INCONCLUSIVE", OPEN)
    assert report.findings[0].words == "not answered: a prompt of 1 token alone: HTTP 500"
    assert report.figures["unanswered"] == ["a prompt of 1 token alone: HTTP 500"]


def test_a_question_that_is_too_long_is_said_in_one_short_line_with_the_option() -> None:
    """Pinned: 1,045 characters of ids."""

    def narrow(sent: Request, answers: Answers) -> Answers:
        refused = (failed(f"prompt {list(sent.prompt_token_ids)} is too long"),)
        return answers if sent.num_tokens <= 40 else refused

    line = max(asking(Changed(change=narrow)).run().unanswered, key=len)
    assert "tokens alone (see --max-model-len): prompt [" in line and line.endswith(" numbers] is too long")
    assert len(line) < 200, line


def test_an_engine_that_answers_nothing_is_inconclusive_and_one_that_is_gone_is_an_error() -> None:
    with pytest.raises(InconclusiveError, match="HTTP 400: no"):
        asking(Changed(change=lambda sent, answers: (failed("HTTP 400: no", REFUSED),))).run()
    with pytest.raises(TargetError, match="no connection any more"):
        asking(Dies()).run()


def test_a_refused_request_beside_the_questions_breaks_nothing() -> None:
    """As an engine in Python does: a request that is too long ends when it is added."""
    refused = (replace(failed("RequestError: too long"), sent=3.0, ended=3.0),)
    short = Changed(1e-6, change=lambda sent, answers: refused if len(sent.prompt_token_ids) > 45 else answers)
    checked = asking(short).run()
    named = {held.relation.name: held.why for held in checked.held if "too long" in held.why}
    assert broken(checked) == set()
    assert "--max-model-len" in named["evicted"] and outcomes(checked)["evicted"] is Outcome.UNKNOWN
