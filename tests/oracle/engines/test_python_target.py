"""package.module:factory, with lfm2np's own engine and with small ones that go wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lfm2np
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.protocol import Completion, Request
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import NO_ABORT, Answer, Ask
from lfm2np.oracle.engines.target import Target, TargetError

ASKS = [Ask(name, "case", (1, 2, 3), 4) for name in ("a", "b", "c")]


def target_of(name: str, **options: Any) -> PythonTarget:
    return PythonTarget(f"{__name__}:{name}", "model", **options)


# --- engines


class Counting:
    """Level a: the tokens are 0, 1, 2, ...; what was asked of the class is kept for the tests."""

    num_engines = 0
    batches: list[list[Request]] = []  # noqa: RUF012

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        type(self).num_engines += 1

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        self.batches.append(list(requests))
        return [[Completion(tuple(range(request.params.max_tokens or 0)), "length")] for request in requests]


class Scoring(Counting):
    def score(self, token_ids: Sequence[int]) -> Any:
        if 99 in token_ids:
            raise ValueError("99 has no score")
        return -np.arange(1.0, len(token_ids))


class Terse(Counting):
    """Takes no wish for log-probabilities."""

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        if any(
            request.params.logprobs is not None or request.params.prompt_logprobs is not None for request in requests
        ):
            raise ValueError("no log-probabilities")
        return super().generate(requests)


class Raising(Counting):
    """Can't take 66; the user's 67 and sys.exit's 68; and 70 only alone."""

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
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


class Odd(Counting):
    """Its completions are what no completion should be, by the first token of the prompt."""

    def generate(self, requests: Sequence[Request]) -> Any:
        kinds: dict[int, Any] = {
            1: [Completion((1,), logprobs=(float("nan"),))],
            2: [],
            3: [Completion((1,), logprobs=(-1.0, -1.0))],
            4: [Completion(("one",))],  # type: ignore[arg-type]
            5: [Completion((1,), "error")],
            6: None,
            7: [Completion((-1,))],
        }
        return [kinds.get(request.prompt_token_ids[0], [Completion((1,), "length")]) for request in requests]


class Short(Counting):
    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        return super().generate(requests)[:1]


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

    def step(self) -> dict[str, list[Completion]]:
        self.steps += 1
        results = {}
        for name, (request, tokens) in list(self.running.items()):
            if 69 in request.prompt_token_ids and len(tokens) == 2:
                raise RuntimeError("a bug at the third token")
            tokens.append(np.int64(len(tokens)))  # type: ignore[arg-type]
            is_done = len(tokens) == request.params.max_tokens and 71 not in request.prompt_token_ids
            results[name] = [
                Completion(tuple(tokens), "length" if is_done else None, tuple(np.float32(-1) for _ in tokens))
            ]
            if is_done:
                del self.running[name]
        return results

    def abort(self, request_id: str) -> Any:
        del self.running[request_id]


def failing(model: str, sizes: dict[str, Any]) -> Any:
    raise OSError("no such model")


def empty(model: str, sizes: dict[str, Any]) -> Any:
    return object()


# --- an engine that is right


def test_own_engine_says_what_the_reference_computes() -> None:
    model = lfm2np.load()
    target: Target = PythonTarget("lfm2np.suite.adapters:own", model.path)
    abilities = target.probe()
    assert (abilities.tells_logprobs, abilities.tells_prompt_logprobs, abilities.can_abort) == (True, True, True)
    asks = [Ask(f"ask {n}", "case", tuple(range(5, 6 + n)), 3 + n, prompt_logprobs=n % 2 == 1) for n in range(4)]
    for ask, answer in zip(asks, target.answer(asks), strict=True):
        assert answer.error is None and answer.token_ids is not None and len(answer.token_ids) == ask.max_tokens
        scores = model.score((*ask.prompt_token_ids, *answer.token_ids))
        prompt, new = scores[: len(ask.prompt_token_ids) - 1], scores[len(ask.prompt_token_ids) - 1 :]
        assert [entry.rank for entry in new] == [1] * ask.max_tokens
        assert answer.logprobs == tuple(entry.logprob for entry in new)
        assert answer.prompt_logprobs == (tuple(entry.logprob for entry in prompt) if ask.prompt_logprobs else None)
    target.close()
    target.close()


def test_own_engine_cancels_midway_and_its_neighbour_does_not_notice() -> None:
    target = PythonTarget("lfm2np.suite.adapters:own", lfm2np.trained_fixture())
    asks = [Ask("cut", "case", (1, 9, 30), 9), Ask("whole", "case", (1, 9, 30), 9), Ask("at once", "case", (1,), 1)]
    cut, whole, at_once = target.answer(asks, aborted=["cut", "at once"])
    assert whole.token_ids is not None and len(whole.token_ids) == 9
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:3], "abort")
    assert (at_once.token_ids, at_once.finish_reason) == ((), "abort")
    assert target.answer(asks[1:2]) == [whole]


def test_no_hypothesis_is_needed() -> None:
    modules = ("oracle.engines.protocol", "suite.adapters", "oracle.engines.python_target")
    modules += ("oracle.engines.exec_target", "oracle.engines.file_target", "oracle.engines.transformers_target")
    modules += ("oracle.example_engine",)
    script = "import sys\nfor name in ('hypothesis', 'pytest', 'torch', 'transformers'): sys.modules[name] = None\n"
    script += "".join(f"import lfm2np.{name}\n" for name in modules)
    subprocess.run([sys.executable, "-c", script], check=True)


# --- what an engine has


def test_score_gives_prompt_logprobs_where_completions_have_none() -> None:
    target = target_of("Scoring")
    assert target.probe().tells_prompt_logprobs and not target.probe().tells_logprobs
    asks = [
        Ask("wanted", "case", (1, 2, 3), 1, prompt_logprobs=True),
        Ask("short", "case", (1,), 1, prompt_logprobs=True),
        Ask("bad", "case", (1, 99), 1, prompt_logprobs=True),
        ASKS[0],
    ]
    wanted, short, bad, unwanted = target.answer(asks)
    assert wanted.prompt_logprobs == (-1.0, -2.0)
    assert (short.prompt_logprobs, unwanted.prompt_logprobs) == (None, None)
    assert bad == Answer("bad", error="score(): ValueError: 99 has no score")


def test_wishes_that_an_engine_refuses_are_given_up() -> None:
    abilities = target_of("Terse").probe()
    assert not abilities.tells_logprobs and not abilities.tells_prompt_logprobs
    assert target_of("Terse").answer(ASKS[:1]) == [Answer("a", (0, 1, 2, 3), finish_reason="length")]


def test_asks_are_greedy_and_have_ids_of_their_own() -> None:
    target = target_of("Counting", at_once=2)
    target.probe()
    Counting.batches.clear()
    target.answer([*ASKS, ASKS[0]])
    assert [len(batch) for batch in Counting.batches] == [2, 2]
    requests = [request for batch in Counting.batches for request in batch]
    assert len({request.request_id for request in requests}) == 4
    assert all(request.params.temperature == 0.0 and request.params.ignore_eos for request in requests)
    assert [request.params.max_tokens for request in requests] == [4] * 4


def test_without_steps_an_aborted_ask_is_not_put() -> None:
    target = target_of("Counting")
    Counting.batches.clear()
    kept, cut, other = target.answer(ASKS, aborted=["b"])
    assert (kept.error, cut.error, other.error) == (None, NO_ABORT, None)
    assert [len(batch) for batch in Counting.batches] == [1, 2]  # the first is the probe


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("failing", "OSError: no such model"),
        ("empty", "expected generate"),
        ("Nothing", "can't be imported"),
        ("ASKS", "list, expected a factory"),
    ],
)
def test_a_factory_that_makes_no_engine_is_a_target_error(name: str, error: str) -> None:
    with pytest.raises(TargetError, match=error):
        target_of(name).probe()


def test_a_size_is_checked() -> None:
    with pytest.raises(RequestError, match="size 'blocks'"):
        target_of("Counting", sizes={"blocks": 3})


# --- what goes wrong


def test_generate_that_raises_for_one_ask_is_put_the_others_again() -> None:
    target = target_of("Raising")
    before = Raising.num_engines
    asks = [ASKS[0], Ask("bad", "case", (66,), 2), ASKS[1], Ask("exits", "case", (68,), 2)]
    answers = target.answer(asks)
    assert answers[0].token_ids == answers[2].token_ids == (0, 1, 2, 3)
    assert answers[1] == Answer("bad", error="ValueError: 66 is too much")
    assert answers[3] == Answer("exits", error="SystemExit: 68")
    assert Raising.num_engines > before + 1  # one that raised may hold what it was given


def test_generate_that_raises_only_for_several_is_an_error_of_all() -> None:
    lonely = [Ask("x", "case", (70,), 2), ASKS[0]]
    target = target_of("Raising")
    expected = "put together with 1 others: IndexError: 70 wants to be alone"
    assert target.answer(lonely) == [Answer(ask.id, error=expected) for ask in lonely]
    assert target.answer(lonely[:1]) == [Answer("x", (0, 1), finish_reason="length")]


def test_an_interrupt_is_the_users() -> None:
    with pytest.raises(KeyboardInterrupt):
        target_of("Raising").answer([Ask("x", "case", (67,), 2)])


def test_an_invalid_completion_is_an_error() -> None:
    asks = [Ask(str(first), "case", (first,), 1) for first in (0, 1, 2, 3, 4, 5, 6, 7, 8)]
    answers = target_of("Odd").answer(asks)
    assert [answer.error is None for answer in answers] == [True, *[False] * 7, True]
    assert all(answer == Answer(answer.id, error=answer.error) for answer in answers[1:-1])
    expected = ["finite", "no completion", "2 entries for 1", "no completion", "finish_reason error", "no completion"]
    for answer, error in zip(answers[1:], [*expected, "token_ids[0] -1"], strict=False):
        assert answer.error is not None and error in answer.error


def test_another_number_of_answers_is_an_error_of_all() -> None:
    assert target_of("Short").answer(ASKS) == [Answer(ask.id, error="1 answers to 3 requests") for ask in ASKS]


def test_an_ask_that_cannot_be_added_harms_no_other() -> None:
    bad, good = target_of("Stepping").answer([Ask("bad", "case", (66,), 2), ASKS[0]], aborted=["bad"])
    assert bad == Answer("bad", error="RequestError: 66 is too much")
    assert good == Answer("a", (0, 1, 2, 3), (-1.0,) * 4, finish_reason="length")


def test_if_abort_returns_nothing_the_last_completion_counts() -> None:
    cut, good = target_of("Stepping").answer([Ask("cut", "case", (5,), 9), ASKS[0]], aborted=["cut"])
    assert cut == Answer("cut", (0, 1, 2), (-1.0,) * 3, finish_reason="abort")
    assert good.token_ids == (0, 1, 2, 3)


def test_a_step_that_raises_is_an_error_of_the_unfinished_and_the_next_ask_gets_a_new_engine() -> None:
    target = target_of("Stepping")
    target.probe()
    before = Stepping.num_engines
    done, *lost = target.answer([Ask("done", "case", (5,), 2), Ask("bad", "case", (69,), 5), ASKS[0]])
    assert done.token_ids == (0, 1)
    assert [answer.error for answer in lost] == ["step(): RuntimeError: a bug at the third token"] * 2
    assert target.answer(ASKS[:1])[0].token_ids == (0, 1, 2, 3)
    assert Stepping.num_engines == before + 1


def test_an_engine_that_never_ends_is_given_up() -> None:
    done, lost = target_of("Stepping").answer([ASKS[0], Ask("endless", "case", (71,), 2)])
    assert done.token_ids == (0, 1, 2, 3)
    assert lost.error is not None and lost.error.startswith("not finished after")


def test_the_model_directory_may_be_a_path() -> None:
    assert PythonTarget(f"{__name__}:Counting", Path("model")).probe().engine == f"{__name__}:Counting (Counting)"
