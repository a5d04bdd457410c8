"""Calls of the engine and of the sampler that can't be right: see wrong_calls.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.engine.draft_model import ModelDrafter
from lfm2np.engine.drafters import Draft, DraftContext, NgramDrafter
from lfm2np.engine.engine import Engine
from lfm2np.engine.loading import load
from lfm2np.engine.sampling.choice import distribution, integer_weights, penalised, request_seed, uniform
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.sampling.stop_strings import StopChecker
from lfm2np.errors import CheckpointError, NumericsError, RequestError
from lfm2np.suite.strategies.tiny_models import TinyModel, loaded

Case = tuple[type[Exception], str, Callable[[], object]]


def own_engine(**options: Any) -> Engine:
    return Engine(loaded(TinyModel()), **options)


def lonely() -> Engine:
    engine = own_engine()
    engine.add_request("a", [3, 4])
    return engine


def several_samples() -> None:
    engine = own_engine()
    engine.add_request("a", [3, 4], SamplingParams(n=2))
    engine.fork("a", "b")


def too_large() -> None:
    own_engine(num_blocks=1, block_size=2).add_request("a", [3, 4, 5], SamplingParams(max_tokens=9))


def called_from_inside() -> None:
    """By a drafter, whose exceptions only cost its request's speed."""
    refused: list[RequestError] = []

    class Calling:
        is_random = False

        def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
            try:
                engine.abort("a")
            except RequestError as error:
                refused.append(error)
            return [Draft()] * len(contexts)

    engine = own_engine(drafter=Calling())
    engine.add_request("a", [3, 4], SamplingParams(temperature=0.0, max_tokens=4))
    engine.step()
    raise refused[0]


def other_tokens(text: str = "x") -> None:
    """A draft model whose tokenizer has another token at one id; one without a tokenizer is taken."""
    model, other = load(), load()
    ModelDrafter(model, loaded(TinyModel(vocab_size=model.config.vocab_size)))
    ModelDrafter(loaded(TinyModel(vocab_size=model.config.vocab_size)), model)
    other.tokenizer.token = lambda token_id: text if token_id == 5 else model.tokenizer.token(token_id)  # type: ignore[method-assign]
    ModelDrafter(model, other)


def overflowing_draft_model() -> None:
    """By a token that its engine overflows on; its next proposal is as if that had not been."""
    model = loaded(TinyModel(overflows=True, tied=False))
    drafter = ModelDrafter(model, model)
    good, bad = (DraftContext(str(ids), ids, 1, SamplingParams(), 0, 0, 2) for ids in ((3,), (3, 23)))
    (before,) = drafter.propose([good])
    try:
        drafter.propose([good, bad])
    finally:
        (after,) = drafter.propose([good])
        if before.token_ids != after.token_ids or len(after.token_ids) != 2:
            raise AssertionError(f"after a draft model that overflowed: {after.token_ids}, before {before.token_ids}")


def name_of_a_sample() -> None:
    engine = own_engine()
    engine.add_request("a#1", [3, 4])
    engine.add_request("a", [3, 4], SamplingParams(n=2))


def after_the_end(*pieces: str) -> None:
    """Text after a stop string, which is found without being told that it may be, or after the end."""
    checker = StopChecker("ab", False)
    outputs = [checker.push(piece) for piece in pieces]
    if not pieces:
        checker.finish()
    elif outputs[-1] != ("", "ab"):
        raise AssertionError(f"{pieces}: {outputs}")
    checker.push("c")


ENGINE: tuple[Case, ...] = (
    (RequestError, "request id 'a#1' is already in use", name_of_a_sample),
    (RequestError, "text after a stop string or finish: the stream has ended", after_the_end),
    (RequestError, "text after a stop string or finish: the stream has ended", lambda: after_the_end("a", "bc")),
    (RequestError, "stop ('',): expected strings of at least one character", lambda: StopChecker(("",), False)),
    (RequestError, "stop (1,): expected strings of at least one", lambda: StopChecker((1,), False)),  # type: ignore[arg-type]
    (
        CheckpointError,
        "vocab_size 24, expected 20 as in",
        lambda: ModelDrafter(loaded(TinyModel()), loaded(TinyModel(vocab_size=20))),
    ),
    (
        RequestError,
        "draft sampling 'some': expected one of greedy, random",
        lambda: ModelDrafter(loaded(TinyModel()), loaded(TinyModel()), "some"),
    ),
    (
        CheckpointError,
        "vocab_size 20, expected 24 as in",
        lambda: ModelDrafter(loaded(TinyModel(vocab_size=20)), loaded(TinyModel())),
    ),
    (CheckpointError, "expected 'x' as in", other_tokens),
    (CheckpointError, "expected '!' as in", lambda: other_tokens("!")),
    (RequestError, "draft model: ", overflowing_draft_model),
    (RequestError, "num_blocks 0: expected a whole number, at least 1", lambda: own_engine(num_blocks=0)),
    (
        RequestError,
        "priority 'x': expected a whole number",
        lambda: own_engine().add_request("a", [3], priority="x"),  # type: ignore[arg-type]
    ),
    (RequestError, "request id 'a': not known, or finished", lambda: own_engine().abort("a")),
    (RequestError, "request id '': expected a string that is not empty", lambda: own_engine().add_request("", [3])),
    (RequestError, "request id 'a': not running, can't be preempted", lambda: lonely().preempt("a")),
    (RequestError, "request id 'a' is already in use", lambda: lonely().fork("a", "a")),
    (RequestError, "request id 'a': 2 samples, expected 1 to fork", several_samples),
    (RequestError, "request id 'a' is already in use", lambda: lonely().add_request("a", [3])),
    (RequestError, "request 'a': 3 prompt tokens and max_tokens=9 need 6 blocks of 2; the pool has 1", too_large),
    (RequestError, "abort(): called from inside a step; wait until it is over", called_from_inside),
    (RequestError, "shortest n-gram 0: expected a whole number, at least 1", lambda: NgramDrafter(4, 0)),
    (RequestError, "longest n-gram 1: expected a whole number, at least 2", lambda: NgramDrafter(1, 2)),
    (
        RequestError,
        "num_speculative_tokens 0: expected a whole number, at least 1",
        lambda: own_engine(num_speculative_tokens=0),
    ),
    (RequestError, "drafter object: it has no is_random", lambda: own_engine(drafter=object())),
)


def sampled(row: NDArray[Any], **params: Any) -> None:
    if distribution(ROW[:1], SamplingParams(), (0,), (), ()).tolist() != [2**45]:
        raise AssertionError("the only token of a vocabulary is not certain")
    if len(distribution(np.zeros(2**17, np.float32), SamplingParams(), (0,), (), ())) != 2**17:
        raise AssertionError("the largest vocabulary is not taken")
    distribution(row, SamplingParams(**params), (1,), (), (2,))


ROW = np.zeros(5, np.float32)
SAMPLING: tuple[Case, ...] = (
    (NumericsError, "logits: float32 of shape (1, 5), expected float32 or", lambda: sampled(ROW.reshape(1, 5))),
    (
        NumericsError,
        "logits: NaN or infinite, expected finite numbers",
        lambda: sampled(np.full(5, np.nan, np.float32)),
    ),
    (RequestError, "banned_token_ids 5: expected a token id, 0 to 4", lambda: sampled(ROW, banned_token_ids=[5])),
    (
        RequestError,
        "leave no token to choose from, expected at least one",
        lambda: sampled(ROW, banned_token_ids=[0, 1, 2, 3, 4]),
    ),
    (NumericsError, "logits: int64 of shape (4,), expected float32 or", lambda: sampled(np.zeros(4, np.int64))),
    (NumericsError, "logits: NaN or infinite, expected finite", lambda: sampled(np.array([0.0, -np.inf], np.float32))),
    (
        RequestError,
        "eos_token_ids 7: expected a token id, 0 to 4",
        lambda: distribution(ROW, SamplingParams(min_tokens=1), (0,), (), (7,)),
    ),
    (RequestError, "processed logits: all -inf, expected at least", lambda: integer_weights(np.full(5, -np.inf))),
    (NumericsError, "logits: float32 of shape (0,), expected float32 or", lambda: sampled(ROW[:0])),
    (
        RequestError,
        "prompt_ids -1: expected a token id, 0 to 5",
        lambda: penalised(np.zeros(6, np.float32), SamplingParams(repetition_penalty=2.0), (0, 3, -1, 9), ()),
    ),
    (
        RequestError,
        "output_ids -1: expected a token id, 0 to 4",
        lambda: penalised(ROW, SamplingParams(presence_penalty=1.0), (0,), (3, -1)),
    ),
    (RequestError, "banned_token_ids 7: expected a token id, 0 to 4", lambda: sampled(ROW, banned_token_ids=[7])),
    (NumericsError, "logits: float32 of shape (), expected float32 or", lambda: sampled(ROW[0].reshape(()))),
    (NumericsError, "logits: float32 of shape (131073,), expected", lambda: sampled(np.zeros(2**17 + 1, np.float32))),
    (RequestError, "seed -1: expected a whole number, 0 to", lambda: uniform(-1, 0, 0)),
    (RequestError, "sample_index -1: expected a whole number, 0 to", lambda: uniform(0, -1, 0)),
    (RequestError, "position -1: expected a whole number, 0 to", lambda: uniform(0, 0, -1)),
    (RequestError, "purpose -1: expected a whole number, 0 to", lambda: uniform(0, 0, 0, -1)),
    (RequestError, "engine_seed -1: expected a whole", lambda: request_seed(SamplingParams(), -1, "a")),
    (RequestError, "request_id 1: expected a string", lambda: request_seed(SamplingParams(), 0, 1)),  # type: ignore[arg-type]
)
