"""A verdict covers what was tested, and the report says what was not: what is not seen is never right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engines import Changed, Kept, checked, checked_right, checked_target, planted
from faults import inject

from lfm2np.engine.loading import Model
from lfm2np.oracle.agreement import seed_mismatches
from lfm2np.oracle.check import check, judged
from lfm2np.oracle.check_report import exit_code, report_of
from lfm2np.oracle.coverage import EarlyEnds, early_ends, not_tested
from lfm2np.oracle.engines.file_target import Transcript
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Request, failed, greedy
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging.verdict import WRONG, Position, Verdict
from lfm2np.oracle.report.as_text import as_text

pytestmark = [pytest.mark.rounding, pytest.mark.slow]


def without_new_logprobs(request: Request, answer: Answer) -> Answer:
    return replace(answer, logprobs=None, top_logprobs=None)


def test_decodes_of_which_no_log_probability_is_reported_are_not_right(model: Model) -> None:
    """An engine that reports only those of prompts, and is wrong in decodes, was EXACT with exit code 0."""
    result = checked_target(model, Changed(model, without_new_logprobs), cases=("short-prompts", "families"))
    assert result.total.verdict is Verdict.INCONCLUSIVE
    assert "the case families" in result.total.reasons[0] and "decode" in result.total.reasons[0]
    assert exit_code(result.total.verdict) == 2


def test_a_case_that_is_inconclusive_makes_the_whole_so_unless_something_is_wrong(model: Model) -> None:
    def silent_in_batches(request: Request, answer: Answer) -> Answer:
        return (
            without_new_logprobs(request, replace(answer, prompt_logprobs=None)) if request.tags["beside"] else answer
        )

    silent = Changed(model, silent_in_batches)
    result = checked_target(model, silent)
    assert result.total.verdict is Verdict.INCONCLUSIVE
    assert result.total.reasons == ("no log-probability was reported in the case neighbours",)
    shown = as_text(report_of(result)).splitlines()
    (line,) = (line for line in shown if line.startswith("not tested errors in "))
    assert shown.index("because    " + result.total.reasons[0]) == 1 < shown.index(line)
    assert "positions (no log-probability)" in line

    def wrong_too(request: Request, answer: Answer) -> Answer:
        if request.request_id != "short-prompts-1":
            return without_new_logprobs(request, replace(answer, prompt_logprobs=None))
        return replace(answer, logprobs=tuple(logprob - 3.0 for logprob in answer.logprobs or ()))

    assert checked_target(model, Changed(model, wrong_too)).total.verdict is Verdict.BUG


def ends_after(count: int) -> Callable[[Request, Answer], Answer]:
    """As a server that takes some token for an end, though it was to go on."""

    def change(request: Request, answer: Answer) -> Answer:
        tops = None if answer.top_logprobs is None else answer.top_logprobs[:count]
        logprobs = None if answer.logprobs is None else answer.logprobs[:count]
        ids = None if answer.token_ids is None else answer.token_ids[:count]
        reason = "stop" if len(answer.token_ids or ()) > count else "length"
        return replace(answer, token_ids=ids, logprobs=logprobs, top_logprobs=tops, finish_reason=reason)

    return change


def test_tokens_missing_after_an_early_end_are_requested_again(model: Model) -> None:
    whole = checked_target(model, Kept("engines:float32", model.path), cases=("short-prompts",))
    result = checked_target(model, Changed(model, ends_after(6)), cases=("short-prompts",))
    assert result.total.verdict is Verdict.EXACT
    assert sum(position.is_new for position in result.positions) == sum(position.is_new for position in whole.positions)
    assert early_ends(result.pairs) == EarlyEnds(10, 100, 0)
    assert not any("ending early" in words for words in result.not_tested)
    assert "early ends 10 answers, 100 tokens short: 100 of them came in follow-up requests" in as_text(
        report_of(result)
    )


def test_a_continuation_that_is_refused_is_lost_and_no_request_without_an_answer(model: Model, tmp_path: Path) -> None:
    """Also where the answers are read from a file."""

    def refusing(request: Request, answer: Answer) -> Answer:
        return failed("no prompts with this token") if "+" in request.request_id else ends_after(6)(request, answer)

    with Transcript(tmp_path / "answers.jsonl") as transcript:
        target = Changed(model, refusing)
        result = check(model, target, "float32", cases=("short-prompts",), transcript=transcript)
    recorded = judged(model, result.abilities, "float32", Transcript(tmp_path / "answers.jsonl").pairs())
    for report in (result, recorded):
        assert report.total.verdict is Verdict.EXACT and not report.total.unanswered
        assert early_ends(report.pairs) == EarlyEnds(10, 100, 100)
        assert "100 of 100 tokens that 10 answers left out by ending early" in report.not_tested


def test_slots_from_eight_on_that_share_memory_are_seen(model: Model) -> None:
    """8 requests at once were the most; now 16, and the report says so."""
    with inject(planted("lfm2np.engine.cache:commit", "entry.slot for", "entry.slot % 8 for")):
        target = PythonTarget("engines:float32", model.path)
        result = checked_target(model, target, cases=("short-prompts", "wide-batches"), at_once=None)
    assert result.total.verdict is Verdict.BUG
    assert {position.request.case for position in result.positions if position.verdict in WRONG} == {"wide-batches"}
    few = checked_right(model, "float32")  # 4 at once
    assert "batches of more than 6" in few.not_tested and any("wide-batches" in words for words in few.not_tested)


# --- stop strings and seeds


STOPS_AND_SEEDS = {
    "stop-string-only-at-the-end-of-a-token": ("stops seeds", "where a text is cut at a stop string"),
    "request-seed-ignored": ("seeds", "seed 1: other tokens than the same request before"),
    "noise-of-the-batch-row": ("seeds", "other tokens than the same request before, beside others in"),
}


@pytest.mark.parametrize("fault", STOPS_AND_SEEDS)
def test_a_wrong_stop_string_or_seed_is_wrong_with_its_cause(model: Model, fault: str) -> None:
    cases, words = STOPS_AND_SEEDS[fault]
    with inject(fault):
        result = checked(model, "float32", cases=cases.split(), at_once=8)
    assert result.total.verdict is Verdict.BUG
    assert any(words in reason for reason in result.total.reasons), result.total.reasons
    assert not any(position.verdict in WRONG for position in result.positions)


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_right_stop_strings_and_seeds_are_right(model: Model, form: str) -> None:
    result = checked_target(model, Kept(f"engines:{form}", model.path), form, ("stops", "seeds"), at_once=8)
    assert result.total.verdict in (Verdict.EXACT, Verdict.TIE)
    assert sum(request.stop is not None for request, _ in result.pairs) == 3
    assert not {"stop strings", "seeds"} & set(result.not_tested)


def test_an_engine_that_refuses_stop_strings_and_seeds_is_right_and_they_are_not_tested(model: Model) -> None:
    def poor(request: Request, answer: Answer) -> Answer:
        return answer if request.params.seed is None and request.stop is None else failed("greedy only")

    result = checked_target(model, Changed(model, poor), cases=("stops", "seeds"))
    assert result.total.verdict is Verdict.EXACT
    assert {"stop strings", "seeds"} <= set(result.not_tested)


def test_preemption_is_not_denied_where_it_may_have_happened(model: Model) -> None:
    """No engine's counters are read, so only one request at a time is never preempted for sure."""
    alone, beside = checked_right(model, "float32"), Abilities("in batches", at_once=8)
    words = not_tested(beside, alone.pairs, (), 0, alone.positions)[-1]
    assert "preempted" in words and "unless" in words
    words = not_tested(replace(beside, at_once=1), alone.pairs, (), 0, alone.positions)[-1]
    assert "preempted" in words and "unless" not in words


def test_draws_that_rounding_explains_are_no_mismatch() -> None:
    """Of 8 repeats of two tokens each, in a format that turns every fourth draw."""

    def mismatches(count: int, scale: float) -> int:
        alone = {"length": 2, "beside": False}
        requests = [
            greedy(str(i), (1, i % 8), 2, case="seeds", seed=i % 8, temperature=1.0, tags=alone) for i in range(16)
        ]
        pairs = [(request, Answer((3, int(8 <= i < 8 + count)))) for i, request in enumerate(requests)]
        at = Position(requests[0], 1, False, 3, 3, 0.0, 0.0, 4.0, None, None, None, Verdict.EXACT, scale=scale)
        positions = [replace(at, request=request, row=row) for request in requests for row in (1, 2)]
        return len(seed_mismatches(pairs, positions))

    assert mismatches(4, 0.06) == 0 == mismatches(1, 1e-5)
    assert mismatches(8, 0.03) == 8 and mismatches(3, 1e-5) == 3


def test_a_first_draw_that_rounding_turned_is_one_draw() -> None:
    """All copies of its request differ from it; those of three such draws are beyond accident."""

    def mismatches(count: int, copies: int) -> int:
        requests = [
            greedy(f"{copy}.{seed}", (1, seed), 2, case="seeds", seed=seed, temperature=1.0)
            for copy in range(copies)
            for seed in range(count)
        ]
        pairs = [(request, Answer((3, int(index >= count)))) for index, request in enumerate(requests)]
        at = Position(requests[0], 1, False, 3, 3, 0.0, 0.0, 4.0, None, None, None, Verdict.EXACT, scale=1e-3)
        return len(
            seed_mismatches(pairs, [replace(at, request=request, row=row) for request in requests for row in (1, 2)])
        )

    assert mismatches(1, 200) == 0
    assert mismatches(3, 5) == 12


def test_seeds_in_a_file_that_does_not_say_who_was_beside_whom_are_compared() -> None:
    """A file of answers need not have that factor; it ended in KeyError."""
    requests = [
        greedy(f"s{index}", (1, 2), 2, case="seeds", seed=7, temperature=1.0, tags={"length": 2}) for index in range(12)
    ]
    pairs = [(request, Answer((3, 4 if index else 5))) for index, request in enumerate(requests)]
    assert seed_mismatches(pairs, []) == {}  # nothing is known of rounding there, so it explains all
