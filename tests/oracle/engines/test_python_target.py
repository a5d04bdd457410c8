"""package.module:factory, with lfm2np's own engine and with small ones that go wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from answering import answers_to

import lfm2np
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.protocol import LEVELS, missing
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import (
    FAILED,
    HANG,
    IMPOSSIBLE,
    NO_ABORT,
    NO_ANSWER,
    Answer,
    Request,
    Trace,
    changed,
    failed,
    greedy,
)
from lfm2np.oracle.engines.target import Target, TargetError
from lfm2np.suite.properties import driver

REQUESTS = [greedy(name, (1, 2, 3), 4) for name in ("a", "b", "c")]


def target_of(name: str, **options: Any) -> PythonTarget:
    return PythonTarget(f"{__name__}:{name}", "model", **options)


# --- engines


class Counting:
    """Level a: the tokens are 0, 1, 2, ...; what was asked of the class is kept for the tests."""

    num_engines = 0
    batches: list[list[Request]] = []  # noqa: RUF012

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        type(self).num_engines += 1

    def generate(self, requests: Sequence[Request]) -> list[list[Answer]]:
        self.batches.append(list(requests))
        return [[Answer(tuple(range(request.params.max_tokens or 0)), finish_reason="length")] for request in requests]


class Scoring(Counting):
    def score(self, token_ids: Sequence[int]) -> Any:
        if 99 in token_ids:
            raise ValueError("99 has no score")
        return -np.arange(1.0, len(token_ids))


class Raising(Counting):
    """Can't take 66; the user's 67 and sys.exit's 68; and 70 only alone."""

    def generate(self, requests: Sequence[Request]) -> list[list[Answer]]:
        for request in requests:
            if 66 in request.prompt_token_ids:
                raise ValueError("66 is\ntoo much")
            if 67 in request.prompt_token_ids:
                raise KeyboardInterrupt
            if 68 in request.prompt_token_ids:
                sys.exit("68")
            if 70 in request.prompt_token_ids and len(requests) > 1:
                raise IndexError("70 wants to be alone")
        return super().generate(requests)


def saying(says: Callable[[Sequence[Request], list[list[Answer]]], Any]) -> PythonTarget:
    """An engine that returns this, of the requests and what it would answer."""

    class Saying(Counting):
        def generate(self, requests: Sequence[Request]) -> Any:
            return says(requests, super().generate(requests))

    return PythonTarget(Saying, "model")


class Stepping:
    """Level c, one token a step for each request. 66 can't be added, 69 breaks the third step, 71 never ends."""

    num_engines = 0

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        type(self).num_engines += 1
        self.steps = 0
        self.running: dict[str, tuple[Request, list[int]]] = {}

    def add(self, request: Request) -> None:
        if 66 in request.prompt_token_ids:
            raise RequestError("66 is too much")
        self.running[request.request_id] = (request, [])

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def step(self) -> dict[str, list[Answer]]:
        self.steps += 1
        results = {}
        for name, (request, tokens) in list(self.running.items()):
            if 69 in request.prompt_token_ids and len(tokens) == 2:
                raise RuntimeError("a bug at the third token")
            tokens.append(np.int64(len(tokens)))  # type: ignore[arg-type]
            is_done = len(tokens) == request.params.max_tokens and 71 not in request.prompt_token_ids
            results[name] = [
                Answer(
                    tuple(tokens),
                    finish_reason="length" if is_done else None,
                    logprobs=tuple(np.float32(-1) for _ in tokens),
                )
            ]
            if is_done:
                del self.running[name]
        return results

    def abort(self, request_id: str) -> Any:
        del self.running[request_id]


class Named(Stepping):
    """Has other things under the names of optional methods: its convolution states, counters, flags."""

    state = np.zeros((4, 3))
    metrics, verify, encode = {"cached_tokens": 3}, False, "utf-8"
    score = fork = preempt = close = None


# --- an engine that is right


@pytest.mark.slow
def test_own_engine_says_what_the_reference_computes_beside_one_that_is_cancelled() -> None:
    model = lfm2np.load()
    target: Target = PythonTarget("lfm2np.suite.adapters:own", model.path)
    abilities = target.probe()
    assert (abilities.tells_logprobs, abilities.tells_prompt_logprobs, abilities.can_abort) == (True, True, True)
    requests = [
        greedy("plain", (1, 9, 30), 9),
        greedy("scored", (5, 6, 7, 8), 4, prompt_logprobs=0),
        greedy("cut", (1, 9, 30), 9, abort_after=3),
        greedy("at once", (1,), 1, abort_after=0),
    ]
    *whole, cut, at_once = answers_to(target, requests)
    for request, answer in zip(requests, whole, strict=False):
        assert answer.error is None and answer.num_tokens == request.max_tokens
        scores = model.score((*request.prompt_token_ids, *answer.ids))
        prompt, new = scores[: len(request.prompt_token_ids) - 1], scores[len(request.prompt_token_ids) - 1 :]
        assert [entry.rank for entry in new] == [1] * request.max_tokens
        assert answer.logprobs == tuple(entry.logprob for entry in new)
        assert answer.prompt_logprobs == (tuple(entry.logprob for entry in prompt) if request.is_scored else None)
    assert (cut.token_ids, cut.finish_reason) == (whole[0].ids[:3], "abort")
    assert (at_once.token_ids, at_once.finish_reason) == ((), "abort")
    target.close()
    target.close()


@pytest.mark.slow
def test_no_hypothesis_is_needed() -> None:
    modules = ("oracle.engines.protocol", "suite.adapters", "oracle.engines.python_target")
    modules += ("oracle.engines.exec_target", "oracle.engines.file_target", "oracle.engines.transformers_target")
    modules += ("oracle.engines.exec_server",)
    script = "import sys\nfor name in ('hypothesis', 'pytest', 'torch', 'transformers'): sys.modules[name] = None\n"
    script += "".join(f"import lfm2np.{name}\n" for name in modules)
    subprocess.run([sys.executable, "-c", script], check=True)


# --- what an engine has


def test_score_gives_prompt_logprobs_where_answers_have_none() -> None:
    target = target_of("Scoring")
    assert target.probe().tells_prompt_logprobs and not target.probe().tells_logprobs
    requests = [
        greedy("wanted", (1, 2, 3), 1, prompt_logprobs=0),
        greedy("short", (1,), 1, prompt_logprobs=0),
        greedy("bad", (1, 99), 1, prompt_logprobs=0),
        REQUESTS[0],
    ]
    wanted, short, bad, unwanted = answers_to(target, requests)
    assert wanted.prompt_logprobs == (-1.0, -2.0)
    assert (short.prompt_logprobs, unwanted.prompt_logprobs) == (None, None)
    assert bad == failed("score(): ValueError: 99 has no score")


def test_requests_have_ids_of_their_own_and_none_is_put_that_can_not_be_aborted() -> None:
    target = target_of("Counting", at_once=2)
    target.probe()
    Counting.batches.clear()
    *kept, cut = answers_to(target, [*REQUESTS, REQUESTS[0], changed(REQUESTS[1], abort_after=1)])
    assert [len(batch) for batch in Counting.batches] == [2, 2]
    requests = [request for batch in Counting.batches for request in batch]
    assert len({request.request_id for request in requests}) == 4
    assert all(request.params.temperature == 0.0 and request.params.ignore_eos for request in requests)
    assert [answer.error for answer in (*kept, cut)] == [None] * 4 + [NO_ABORT]


def raising(model: str, sizes: dict[str, Any]) -> Any:
    raise OSError("no such model")


NO_ENGINES: dict[str, tuple[Any, str]] = {
    "it raises": (raising, "OSError: no such model"),
    "no method": (lambda *_: object(), "expected generate"),
    "no such name": (f"{__name__}:Nothing", "can't be imported"),
    "no factory": (f"{__name__}:REQUESTS", "list, expected a factory"),
    "no method, a name": (
        lambda *_: SimpleNamespace(generate=True),
        r"SimpleNamespace: expected generate\(\), or add\(\) and step\(\)",
    ),
    "no sizes": (
        type("Unsized", (Stepping,), {"sizes": (16, 64)}),
        r"sizes \(16, 64\): expected a mapping by names among block_size, ",
    ),
}


@pytest.mark.parametrize("name", NO_ENGINES)
def test_a_factory_that_makes_no_engine_is_an_error(name: str) -> None:
    factory, error = NO_ENGINES[name]
    with pytest.raises(RequestError if name == "no sizes" else TargetError, match=error):
        PythonTarget(factory, "model").probe()


def test_a_size_is_checked_and_a_model_may_be_a_path() -> None:
    with pytest.raises(RequestError, match="size 'blocks'"):
        target_of("Counting", sizes={"blocks": 3})
    assert PythonTarget(f"{__name__}:Counting", Path("model")).probe().engine == f"{__name__}:Counting (Counting)"


def test_an_attribute_that_only_has_the_name_of_an_optional_method_is_none() -> None:
    """Pinned: state(): TypeError: 'numpy.ndarray' object is not callable, of a right engine."""
    target, requests = target_of("Named"), [changed(REQUESTS[0], prompt_logprobs=0), REQUESTS[1]]
    assert not target.probe().tells_prompt_logprobs
    played = target.play(Trace(tuple(requests)))
    assert played.trouble is None
    assert [answer.token_ids for (answer,) in played.answers] == [(0, 1, 2, 3)] * 2
    target.close()
    engine = Named("model", {})
    assert [name for name in LEVELS if missing(engine, (name,)) is None] == ["steps"]
    why = "the engine has no state(): its attribute state, of type ndarray, can't be called"
    assert missing(engine, ("state",)) == why
    assert driver.cached_tokens(engine) is None


# --- what goes wrong


def test_generate_that_raises_for_one_request_is_put_the_others_again() -> None:
    target = target_of("Raising")
    before = Raising.num_engines
    requests = [REQUESTS[0], greedy("bad", (66,), 2), REQUESTS[1], greedy("exits", (68,), 2)]
    good, bad = Answer((0, 1, 2, 3), finish_reason="length"), failed("ValueError: 66 is too much")
    assert answers_to(target, requests) == [good, bad, good, failed("SystemExit: 68")]
    assert answers_to(target, requests[1:2]) == [bad]
    assert Raising.num_engines > before + 1  # one that raised may hold what it was given
    with pytest.raises(KeyboardInterrupt):  # which is the user's
        answers_to(target, [greedy("x", (67,), 2)])


def test_generate_that_fails_for_several_is_an_error_of_all() -> None:
    lonely = [greedy("x", (70,), 2), REQUESTS[0]]
    expected = "put together with 1 others: IndexError: 70 wants to be alone"
    assert answers_to(target_of("Raising"), lonely) == [failed(expected)] * 2
    assert answers_to(target_of("Raising"), lonely[:1]) == [Answer((0, 1), finish_reason="length")]
    short, silent = saying(lambda requests, right: right[:1]), saying(lambda requests, right: None)
    assert answers_to(short, REQUESTS) == [failed("1 answers to 3 requests")] * 3
    with pytest.raises(TargetError, match=f"TypeError: NoneType, {A_LIST}"):
        silent.probe()


A_LIST = "expected for each request a list of its n Answers"
ODD: list[tuple[Any, str, str]] = [  # what no engine should give for a request
    ([Answer((1,), logprobs=(float("nan"),))], "logprobs[0] nan", IMPOSSIBLE),
    ([], "0 samples, expected 1", IMPOSSIBLE),
    ([Answer((1,), logprobs=(-1.0, -1.0))], "2 entries for 1", NO_ANSWER),
    ([Answer(("one",))], "token_ids[0] 'one'", NO_ANSWER),  # type: ignore[arg-type]
    ([Answer((1,), finish_reason="error")], "finish_reason error", FAILED),
    (None, f"no answers: TypeError: NoneType, {A_LIST}", NO_ANSWER),
    ([Answer((-1,))], "token_ids[0] -1", IMPOSSIBLE),
    (Answer((1,)), f"no answers: TypeError: Answer, {A_LIST}", NO_ANSWER),
    ([{"token_ids": (1,)}], "no answer: dict, expected an Answer, or what has its fields", NO_ANSWER),
]


def test_an_invalid_answer_is_an_error_of_its_request_alone() -> None:
    """By the first token of its prompt; the first and the last are right."""
    given = {number: row[0] for number, row in enumerate(ODD, 1)}

    def says(requests: Sequence[Request], right: list[list[Answer]]) -> list[Any]:
        return [given.get(each.prompt_token_ids[0], some) for each, some in zip(requests, right, strict=True)]

    requests = [greedy(str(number), (number,), 1) for number in range(len(ODD) + 2)]
    first, *odd, last = answers_to(saying(says), requests)
    assert first == last == Answer((0,), finish_reason="length")
    for answer, (_, error, kind) in zip(odd, ODD, strict=True):
        assert answer.error is not None and error in answer.error
        assert answer == failed(answer.error, kind)


def test_who_cannot_be_added_harms_no_other_and_if_abort_returns_nothing_the_last_answer_counts() -> None:
    requests = [greedy("bad", (66,), 2, abort_after=1), greedy("cut", (5,), 9, abort_after=3), REQUESTS[0]]
    bad, cut, good = answers_to(target_of("Stepping"), requests)
    assert bad == failed("RequestError: 66 is too much")
    assert cut == Answer((0, 1, 2), (-1.0,) * 3, finish_reason="abort", is_aborted=True)
    assert good == Answer((0, 1, 2, 3), (-1.0,) * 4, finish_reason="length")


def test_a_step_that_raises_is_an_error_of_the_unfinished_and_the_next_request_gets_a_new_engine() -> None:
    target = target_of("Stepping")
    target.probe()
    before = Stepping.num_engines
    done, *lost = answers_to(target, [greedy("done", (5,), 2), greedy("bad", (69,), 5), REQUESTS[0]])
    assert done.token_ids == (0, 1)
    assert lost == [failed("step(): RuntimeError: a bug at the third token")] * 2
    assert answers_to(target, REQUESTS[:1])[0].token_ids == (0, 1, 2, 3)
    assert Stepping.num_engines == before + 1


def test_an_engine_that_never_ends_is_given_up() -> None:
    done, lost = answers_to(target_of("Stepping"), [REQUESTS[0], greedy("endless", (71,), 2)])
    assert done.token_ids == (0, 1, 2, 3)
    assert lost.kind == HANG and str(lost.error).startswith("not finished after")


@pytest.mark.parametrize(
    ("way", "tells_logprobs", "is_refuted"), [("nan", True, True), ("refused", False, False), ("empty", False, False)]
)
def test_what_an_engine_refuses_is_not_wished_for_and_impossible_numbers_are_no_refusal(
    way: str, tells_logprobs: bool, is_refuted: bool
) -> None:
    """Else an engine whose log-probabilities are all NaN would be one that reports none."""

    def telling(requests: Sequence[Request], right: list[list[Answer]]) -> list[list[Answer]]:
        """nan: those that are wanted are no numbers; refused: takes no wish for them; empty: none of prompts."""
        (wanted,) = {(each.params.logprobs, each.params.prompt_logprobs) != (None, None) for each in requests}
        if way == "refused" and wanted:
            raise ValueError("no log-probabilities")
        nans = {"logprobs": (float("nan"),) * right[0][0].num_tokens} if way == "nan" and wanted else {}
        return [[replace(answer, prompt_logprobs=() if way == "empty" else None, **nans)] for (answer,) in right]

    target = saying(telling)
    abilities = target.probe()
    assert (abilities.tells_logprobs, abilities.tells_prompt_logprobs) == (tells_logprobs, way == "nan")
    answers = answers_to(target, [REQUESTS[0], changed(REQUESTS[1], prompt_logprobs=0)])
    assert [answer.is_refuted for answer in answers] == [is_refuted] * 2
    assert all(is_refuted or answer == Answer((0, 1, 2, 3), finish_reason="length") for answer in answers)
