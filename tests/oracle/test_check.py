"""The whole check: right engines pass, wrong ones do not, and the report says what the error depends on."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import QUICK, Changed, Kept, answered, checked, checked_target, known_of, told
from faults import inject
from hypothesis import given
from hypothesis import strategies as st

import lfm2np
from lfm2np.commands.cli import main
from lfm2np.engine.loading import Model
from lfm2np.oracle.causes.groups import group_of
from lfm2np.oracle.check import check, judged
from lfm2np.oracle.check_report import report_of
from lfm2np.oracle.engines.file_target import Transcript
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import DEAD, Answer, Pair, Request, Trace, changed, failed, greedy
from lfm2np.oracle.engines.records_json import answer_as_json, checked_answer
from lfm2np.oracle.engines.target import Abilities, Played, TargetError
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.verdict import (
    LIMIT,
    SPREAD,
    WRONG,
    Position,
    Verdict,
    flip_probability,
    largest_error,
    position_verdict,
)
from lfm2np.oracle.report.as_json import as_json
from lfm2np.oracle.total import total
from lfm2np.oracle.workloads import DEFAULT_CASES, Writer, rounds

pytestmark = [pytest.mark.rounding, pytest.mark.usefixtures("without_constants")]

WIDE = {"wide-batches"}
BATCHES = {"neighbours", "families", "aborts", "large-steps", *WIDE}


# --- verdicts


@pytest.mark.parametrize(
    ("engine", "form", "cases"),
    [
        ("lfm2np.suite.adapters:own", "float32", ("short-prompts", "families")),
        ("engines:float32", "float32", QUICK),
        ("engines:bfloat16", "bfloat16", ("short-prompts",)),
    ],
)
def test_a_right_engine_is_right(model: Model, engine: str, form: str, cases: Sequence[str]) -> None:
    result = checked_target(model, Kept(engine, model.path), form, cases)
    assert result.total.verdict in (Verdict.EXACT, Verdict.TIE) and result.total.worst < LIMIT
    if "own" in engine:
        assert set(result.total.counts) == {"EXACT"} and (result.total.worst, result.total.flips) == (0.0, 0)
    else:
        assert 0.0 < result.total.rms < 2.0


def forgetting(request: Request, answer: Answer) -> Pair:
    """One log-probability of its prompt less."""
    few = [-1.0] * (len(request.prompt_token_ids) - 2)
    return request, checked_answer(request, {**answer_as_json(answer), "prompt_logprobs": few})


def other_token(request: Request, answer: Answer) -> Pair:
    return changed(request, max_tokens=1), Answer(((answer.ids[0] + 1) % 512,), (answer.logprobs or ())[:1])


DAMAGED: dict[str, tuple[Callable[[list[Pair]], list[Pair]], Verdict, str]] = {
    "tokens alone": (
        lambda pairs: [(request, replace(answer, logprobs=None, prompt_logprobs=None)) for request, answer in pairs],
        Verdict.INCONCLUSIVE,
        "no log-probabilities",
    ),
    "one without an answer": (
        lambda pairs: [*pairs[:-1], (pairs[-1][0], Answer(error="late"))],
        Verdict.INCONCLUSIVE,
        "no usable answer",
    ),
    "one without a token": (
        lambda pairs: [*pairs[:-1], (pairs[-1][0], Answer((), finish_reason="stop"))],
        Verdict.INCONCLUSIVE,
        "no usable answer, first short-prompts-10: finish_reason 'stop' after 0 tokens",
    ),
    "nothing": (lambda pairs: [], Verdict.INCONCLUSIVE, "nothing could be judged"),
    "one wrong token": (lambda pairs: [*pairs[:-1], other_token(*pairs[-1])], Verdict.BUG, "further behind"),
    "one that can't be": (
        lambda pairs: [*pairs[:-1], forgetting(*pairs[-1])],
        Verdict.BUG,
        "1 answer that no right engine gives, first of short-prompts-10: prompt_logprobs: ",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_not_wholly_right_and_there_is_not_right(model: Model, name: str) -> None:
    damage, verdict, words = DAMAGED[name]
    pairs = damage(told(model, "engines:float32"))
    total = judged(model, Abilities("damaged"), "float32", pairs, known=known_of(model)).total
    assert total.verdict is verdict and any(words in reason for reason in total.reasons), total.reasons
    assert total.unanswered == (("short-prompts-10",) if name.startswith("one without") else ()) or "be" in name
    if name == "one wrong token":
        assert total.first_wrong is not None and total.first_wrong.token_id == pairs[-1][1].ids[0]


def racing(model: Model, every: int) -> Changed:
    """Right, but for every `every`th request that it is ever given: a race that its own count makes the same again."""
    count = itertools.count(1)

    def raced(request: Request, answer: Answer) -> Answer:
        if next(count) % every or answer.logprobs is None:
            return answer
        return replace(answer, logprobs=tuple(logprob - 0.5 for logprob in answer.logprobs))

    return Changed(model, raced)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "cases", "fails"),
    [
        (9, ["short-prompts"], False),
        (4, ["short-prompts"], True),
        pytest.param(7, ["neighbours"], True, marks=pytest.mark.night),  # repeated beside others, and alone
    ],
)
def test_wrong_requests_that_are_right_when_repeated_are_reported_as_such(
    model: Model, every: int, cases: Sequence[str], fails: bool
) -> None:
    result = check(model, racing(model, every), "float32", at_once=4, cases=cases)
    first = result.total.causes[0]
    assert result.total.verdict is Verdict.BUG
    assert first.sure == "likely" and first.suspect.startswith("not deterministic"), result.total.causes
    failed, times = sum(repeat.failed for repeat in result.repeats), sum(repeat.times for repeat in result.repeats)
    assert f"and in {failed} of {times} repeats of {len(result.repeats)} of them" in result.total.reasons[0]
    assert (failed > 0) == fails
    written = as_json(report_of(result))["figures"]
    assert written["causes"][0]["suspect"] == first.suspect
    assert sum(repeat["times"] for repeat in written["repeats"]) == times


@pytest.mark.slow
def test_a_certain_cause_needs_no_repeats(model: Model) -> None:
    with inject("state-dropped-after-the-prompt"):
        target = PythonTarget("engines:float32", model.path)
        result = check(model, target, "float32", at_once=4, cases=("families",))
    assert result.total.causes[0].sure == "certain" and not result.repeats


@pytest.mark.slow
def test_one_error_beyond_a_format_that_fits_all_others_is_a_bug_and_no_other_format(model: Model) -> None:
    requests = [request for round_ in rounds(Writer(model.config, model.tokenizer, 3)) for request in round_.requests][
        :12
    ]
    with_truth = Kept("engines:bfloat16", model.path)
    pairs = answered(with_truth, requests)
    right = judge(model, "bfloat16", pairs)
    worst = next(one for one in right if one.is_new and one.error is not None and one.margin_ratio > 50)
    index = worst.row + 1 - len(worst.request.prompt_token_ids)
    place = requests.index(worst.request)
    logprobs = list(pairs[place][1].logprobs or ())
    logprobs[index] -= 30.0 * max(abs(one.error or 0.0) for one in right)
    pairs[place] = (requests[place], replace(pairs[place][1], logprobs=tuple(logprobs)))
    verdict = total(model, "bfloat16", pairs, judge(model, "bfloat16", pairs))
    assert verdict.verdict is Verdict.BUG
    assert "errs like" not in verdict.reasons[0]


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_normalisers_shift_is_forgiven_at_all_positions_together(model: Model, sign: float) -> None:
    """A log-softmax that adds V float32 terms one after another is off by up to V * 2**-25 at each token."""

    def shifted(by: float) -> Verdict:
        pairs = []
        for request, answer in exact:
            values = {
                name: tuple(min(0.0, value + by) for value in getattr(answer, name) or ())
                for name in ("logprobs", "prompt_logprobs")
            }
            pairs.append((request, replace(answer, top_logprobs=None, **values)))
        return judged(model, Abilities("shifted"), "float32", pairs, known=known_of(model)).total.verdict

    exact = told(model, "lfm2np.suite.adapters:own")
    most = math.ldexp(model.config.vocab_size, -25)
    assert shifted(sign * most) is Verdict.EXACT
    assert shifted(8.0 * sign * most) in WRONG


# --- the parts


FAR, NEAR = LIMIT * 1.01, LIMIT * 0.99


@pytest.mark.parametrize(
    ("is_new", "best", "gap", "error", "expected"),
    [
        (True, 1, 0.0, NEAR, Verdict.EXACT),
        (True, 1, 0.0, None, Verdict.EXACT),
        (True, 1, 0.0, -FAR, Verdict.DRIFT),
        (True, 2, NEAR, 0.0, Verdict.TIE),
        (True, 2, NEAR, FAR, Verdict.DRIFT),
        (True, 2, FAR, 0.0, Verdict.BUG),
        (False, 2, FAR, NEAR, Verdict.EXACT),
        (False, 2, FAR, FAR, Verdict.DRIFT),
        (False, 2, FAR, None, Verdict.INCONCLUSIVE),
    ],
)
def test_positions_verdicts(is_new: bool, best: int, gap: float, error: float | None, expected: Verdict) -> None:
    assert position_verdict(is_new, 1, best, gap, error) is expected


def position(margin: float, flip: bool) -> Position:
    request = greedy("a", (1,), 1, case="borders", tags={"length": 1})
    return Position(request, 0, True, int(flip), 0, 0.0, 0.0, margin, None, None, None, Verdict.EXACT)


@given(st.lists(st.tuples(st.floats(0, 6), st.lists(st.booleans(), min_size=1, max_size=3)), min_size=1, max_size=8))
def test_the_chance_of_so_many_flips_is_that_of_all_patterns_with_so_many(coins: list[tuple[float, list]]) -> None:
    """Copies of a request, which have the same context, flip together."""
    positions = [
        replace(position(margin, flip), context=None if len(copies) == 1 else index)
        for index, (margin, copies) in enumerate(coins)
        for flip in copies
    ]
    flips, chance = flip_probability(positions)
    chances = [0.5 * math.erfc(margin / (SPREAD * math.sqrt(2))) for margin, _ in coins]
    expected = sum(
        math.prod(p if flipped else 1 - p for p, flipped in zip(chances, pattern, strict=True))
        for pattern in itertools.product((False, True), repeat=len(coins))
        if sum(flipped * len(copies) for flipped, (_, copies) in zip(pattern, coins, strict=True)) >= flips
    )
    assert flips == sum(sum(copies) for _, copies in coins)
    assert chance == pytest.approx(expected, rel=1e-9)


def test_only_answers_to_the_same_tokens_have_the_same_context(model: Model) -> None:
    prompts = {"a": (9, 12), "copy": (9, 12), "other": (12, 9)}
    pairs = [(greedy(name, ids, 3), Answer((4, 5, 6), prompt_logprobs=(-3.0,))) for name, ids in prompts.items()]
    contexts: dict[str, list[int | None]] = {name: [] for name in prompts}
    for each in judge(model, "float32", pairs):
        contexts[each.request.request_id].append(each.context)
    assert contexts["a"] == contexts["copy"] and len({*contexts["a"], *contexts["other"]}) == 2 * 4


def test_the_worst_error_is_not_below_their_root_mean_square() -> None:
    """Errors within one unit of the logits have a size, but nothing beyond that unit: "RMS 0.68, worst 0"."""
    within = replace(position(4.0, False), error=1e-3, error_ratio=0.0, error_size=0.5)
    beyond = replace(within, error_ratio=-LIMIT * 1.5, error_size=LIMIT * 1.2)
    assert largest_error([within]) == 0.5 == group_of([within]).worst
    assert largest_error([within, beyond]) == LIMIT * 1.5
    assert largest_error([replace(beyond, error_ratio=1.0)]) == LIMIT and not group_of([within]).is_off


# --- what is asked


@pytest.mark.parametrize(("at_once", "left_out"), [(1, BATCHES), (2, WIDE), (8, WIDE), (16, set())])
def test_what_is_asked_fits_the_model_and_is_the_same_again(model: Model, at_once: int, left_out: set[str]) -> None:
    tiny = lfm2np.load(Path(__file__).parents[2] / "fixtures" / "torture" / "minimal_config")
    for subject in (model, tiny):
        tokenizer = subject.tokenizer if subject.has_tokenizer else None
        plan = list(rounds(Writer(subject.config, tokenizer, at_once)))
        assert plan == list(rounds(Writer(subject.config, tokenizer, at_once)))
        requests = [request for round_ in plan for request in round_.requests]
        assert len({request.request_id for request in requests}) == len(requests)
        for request in requests:
            assert all(0 <= token_id < subject.config.vocab_size for token_id in request.prompt_token_ids)
            assert request.max_tokens >= 1
            assert len(request.prompt_token_ids) + request.max_tokens <= subject.config.max_position_embeddings
            if request.prompt_text is not None:
                assert subject.tokenizer.encode(request.prompt_text) == list(request.prompt_token_ids)
        assert {request.case for request in requests} == set(DEFAULT_CASES) - left_out - (
            {"stops"} if tokenizer is None else set()
        )


class Ending(Kept):
    """The trace behind its third ends in another way."""

    def __init__(self, model: Model, end: Callable[[Trace], Played]) -> None:
        super().__init__("engines:float32", model.path)
        self.end, self.played = end, 0

    def play(self, trace: Trace) -> Played:
        self.played += 1
        return self.end(trace) if self.played == 4 else super().play(trace)


def as_a_server_that_died(trace: Trace) -> Played:
    return Played(tuple((failed("nobody answers", DEAD),) for _ in trace.requests))


def interrupted(trace: Trace) -> Played:
    raise KeyboardInterrupt


def test_an_engine_that_dies_leaves_word_of_what_was_received(model: Model, tmp_path: Path) -> None:
    """Pinned: as if there had never been a server."""
    path = tmp_path / "answers.jsonl"
    with pytest.raises(TargetError, match=r"nobody answers; lost: 3 answers received before; --save FILE"):
        check(model, Ending(model, as_a_server_that_died), "float32", cases=["short-prompts"])
    with pytest.raises(TargetError, match=f"3 answers received so far are in {path}: the same command goes on"):
        check(
            model, Ending(model, as_a_server_that_died), "float32", cases=["short-prompts"], transcript=Transcript(path)
        )


def test_a_check_that_broke_off_goes_on_where_it_was(model: Model, tmp_path: Path) -> None:
    path, target = tmp_path / "answers.jsonl", Ending(model, interrupted)
    with pytest.raises(KeyboardInterrupt), Transcript(path) as transcript:
        check(model, target, "float32", cases=["short-prompts"], transcript=transcript)
    with Transcript(path) as transcript:
        assert len(transcript.pairs()) == 3
        resumed = check(model, target, "float32", cases=["short-prompts"], transcript=transcript)
    assert target.played == 4 + (len(resumed.pairs) - 3)
    assert resumed.total == check(model, target, "float32", cases=["short-prompts"]).total


@pytest.mark.slow
def test_a_check_that_goes_on_says_that_answers_are_of_an_earlier_run(tmp_path: Path, capsys: Any) -> None:
    """Else those of an engine that was mended meanwhile are taken for its own."""
    path = tmp_path / "answers.jsonl"
    words = ["check", "lfm2np.suite.adapters:own", "--cases", "short-prompts", "--save", str(path), "--json"]
    assert main(words) == 0 and "earlier" not in json.loads(capsys.readouterr().out)["facts"]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # without the verdict
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["earlier"].startswith("10 answers of an earlier run in ")


@pytest.mark.night
def test_another_format_than_declared_is_named(model: Model) -> None:
    result = checked(model, "bfloat16", "float32")
    assert result.total.verdict is Verdict.DRIFT
    assert result.total.reasons == ("errs like bfloat16 everywhere: not the float32 that it declares",)
