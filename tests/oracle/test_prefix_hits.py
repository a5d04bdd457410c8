"""A prefix cache is tested where the engine says that it hit; a hit that is wrong is called that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from engines import Changed, checked_target, own
from faults import inject
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.engine.loading import Model
from lfm2np.oracle.check_report import report_of
from lfm2np.oracle.engines.named import target_named
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Request, Trace, greedy, refuted
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.prefix_hits import SUSPECT, hit_cause, prefix_hits, with_hits
from lfm2np.oracle.report.as_json import as_json
from lfm2np.oracle.workloads import noted

pytestmark = [pytest.mark.rounding, pytest.mark.usefixtures("without_constants"), pytest.mark.slow]

CASES = ("short-prompts", "hits")
Change = Callable[[Request, Answer], Answer]


def off_behind_a_border(request: Request, answer: Answer) -> Answer:
    """Where what a hit leaves to compute is one whole block."""
    if answer.cached_tokens != len(request.prompt_token_ids) - 16:
        return answer
    return replace(answer, logprobs=tuple(logprob - 1.0 for logprob in answer.logprobs or ()))


def no_token_behind_a_hit(request: Request, answer: Answer) -> Answer:
    return replace(answer, token_ids=(10**6, *answer.ids[1:])) if answer.cached_tokens else answer


WAYS: dict[str, tuple[str | Change, str, Verdict]] = {  # a fault or a change, how the report's line begins, the verdict
    "right": (lambda request, answer: answer, "12 of 13 hit, all right", Verdict.EXACT),
    "never hits": (
        "prompts-are-never-published",
        "never hit in 13 requests that repeat a prefix of up to 264 tokens",
        Verdict.EXACT,
    ),
    "silent": (
        lambda request, answer: replace(answer, cached_tokens=None),
        "hits are not reported: 13 requests repeat a prefix",
        Verdict.EXACT,
    ),
    "other state": ("prefix-hit-without-its-state", "9 of 13 hit, wrong in 9 of all 9 hits", Verdict.BUG),
    "border": (off_behind_a_border, "12 of 13 hit, wrong in 2 of all 12 hits", Verdict.BUG),
    "refuted": (no_token_behind_a_hit, "12 of 13 hit, wrong in 12 of all 12 hits", Verdict.BUG),
    "evicted": ("evicted-key-still-leads-to-its-block", "12 of 13 hit, wrong in 6 of all 12 hits", Verdict.BUG),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_report_says_how_many_hit_and_whether_they_are_right(model: Model, way: str) -> None:
    """Of our own engine; with a fault it has 32 blocks, so that some are evicted."""
    wrong, line, verdict = WAYS[way]
    if isinstance(wrong, str):
        with inject(wrong):
            target = PythonTarget(own("float32", num_blocks=32), model.path, at_once=1)
            result = checked_target(model, target, cases=CASES, at_once=1)
    else:
        result = checked_target(model, Changed(model, wrong, at_once=1), cases=CASES, at_once=1)
    report = report_of(result)
    assert report.facts["prefix cache"].startswith(line), report.facts
    assert result.total.verdict is verdict
    words = f"the prefix cache ({report.facts['prefix cache']})"
    assert (words in report.not_tested) == (way in ("never hits", "silent"))
    causes = [cause for cause in result.total.causes if cause.suspect == SUSPECT]
    assert len(causes) == (verdict is Verdict.BUG)
    for cause in causes:
        assert "requests that hit the prefix cache, right in all" in cause.where
        assert any(cause.line in finding.words for finding in report.findings)
    hits = as_json(report)["figures"]["prefix_hits"]
    assert hits["repeated"] == 13 and hits["reported"] == (way != "silent")
    assert bool(hits["wrong"]) == (verdict is Verdict.BUG) and set(hits["wrong"]) <= set(hits["hits"])
    if way == "other state":
        assert result.total.causes[0] is causes[0] and causes[0].sure == "likely"


def test_a_whole_case_of_certain_hits_makes_a_certain_cause() -> None:
    """Of 24 hits all are wrong, of 130 others none; the same of half of all: an accident."""
    names = [str(number) for number in range(154)]
    pairs = [(greedy(name, (1,), 1), Answer((1,), cached_tokens=16 * (int(name) < 24))) for name in names]
    seen = prefix_hits(pairs)
    cause = hit_cause(seen, frozenset(names[:24]))
    assert cause is not None and cause.sure == "certain" and "in 24 of 24 requests that hit" in cause.where
    assert hit_cause(seen, frozenset(names[::2])) is None and hit_cause(seen, frozenset(names[24:])) is None
    few = hit_cause(seen, frozenset(names[:1]))
    assert few is not None and few.sure == "a guess"


def test_counts_that_cannot_be_are_named_and_not_believed() -> None:
    """Prompts of 4, 40 and 40 tokens: the third repeats the second's first 32; the fourth runs beside one like it."""
    prompts = [(1, 2, 3, 4), (5,) * 40, (5,) * 32 + (6,) * 8, (7,) * 40, (7,) * 40]
    alone, together = ([greedy(f"r{at}", prompts[at], 1) for at in some] for some in ((0, 1, 2), (3, 4)))
    plan = noted([*(Trace((request,)) for request in alone), Trace(tuple(together))])
    requests = [request for trace in plan for request in trace.requests]

    def words(*counts: int) -> str:
        answers = [Answer((1,), cached_tokens=count) for count in counts]
        seen = prefix_hits(list(zip(requests, answers, strict=True)))
        assert not (seen.impossible and seen.is_hit)
        return seen.impossible

    assert words(0, 0, 32, 32, 0) == words(0, 3, 16, 0, 0) == ""
    assert "reports more cached tokens than the prompt has in 1 request, first r0: 16 of 4" in words(16, 16, 16, 16, 0)
    assert "1 of 4 hits are longer than what any request shares, first r1" in words(0, 16, 16, 16, 16)
    assert "first r2" in words(0, 0, 33, 0, 0)


SERVED = f"exec:{sys.executable} -m lfm2np.oracle.engines.exec_server lfm2np.suite.adapters:own_float32"


def test_a_process_reports_its_hits(model: Model) -> None:
    target = target_named(SERVED, model.path, model.config.vocab_size, model.tokenizer, "float32")
    try:
        result = checked_target(model, target, cases=("hits",), at_once=1)
    finally:
        target.close()
    assert report_of(result).facts["prefix cache"].endswith("of 13 hit, all right")
    assert result.total.verdict is Verdict.EXACT


@given(st.lists(st.one_of(st.none(), st.integers(0, 40)), min_size=1, max_size=8))
def test_no_number_is_a_zero_only_where_no_zero_is_reported(counts: list[int | None]) -> None:
    """vLLM leaves a counter of 0 out; a Python engine may not know the count of some requests."""
    pairs = [
        (greedy(str(index), (1,) * 40, 1, tags={"prefix": "warm", "seen": 40}), Answer((1,), cached_tokens=count))
        for index, count in enumerate(counts)
    ]
    seen = prefix_hits(pairs)
    assert seen.hits == {str(index) for index, count in enumerate(counts) if count}
    unknown = {str(index) for index, count in enumerate(counts) if count is None}
    assert seen.misses & unknown == (set() if 0 in counts else unknown)
    assert seen.reported == any(count is not None for count in counts)
    assert (seen.hit, seen.repeated, seen.longest) == (len(seen.hits), len(counts), 40)


def test_what_a_round_with_an_impossible_answer_took_from_the_cache_counts() -> None:
    answer = refuted(Answer((10**6,), round_cached_tokens=7), "token 1000000")
    assert prefix_hits([(greedy("a", (1, 2), 1), answer)]).server == 7


def test_answers_that_are_impossible_alone_make_no_guess_of_hits() -> None:
    """That seeds are ignored shows in repeated prompts, which are hits in a right cache."""
    pairs = [
        (greedy(str(index), (1, 2), 1), replace(answer, cached_tokens=16 * (index % 2 or index >= 30)))
        for index, answer in enumerate([Answer((1,))] * 30 + [refuted(Answer((1,)), "seed 1: other tokens")] * 3)
    ]
    assert with_hits([], pairs, []) == []
