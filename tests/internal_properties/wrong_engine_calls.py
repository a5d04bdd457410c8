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
from lfm2np.engine.proposals import usable
from lfm2np.engine.sampling.choice import distribution, integer_weights, penalised, request_seed, uniform
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.sampling.stop_strings import StopChecker
from lfm2np.errors import RequestError
from lfm2np.suite.strategies.tiny_models import TinyModel, loaded

Cases = tuple[tuple[str, Callable[[], object]], ...]  # what the error says, and the call


def own_engine(**options: Any) -> Engine:
    return Engine(loaded(TinyModel()), **options)


def lonely(**params: Any) -> Engine:
    engine = own_engine()
    engine.add_request("a", [3, 4], SamplingParams(**params))
    return engine


def added(request_id: str = "a", prompt: Any = (3,), sizes: Any = None, **options: Any) -> None:
    own_engine(**(sizes or {})).add_request(request_id, prompt, **options)


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


def draft_model(size: int = 24, own_size: int = 24, *sampling: Any) -> None:
    ModelDrafter(loaded(TinyModel(vocab_size=size)), loaded(TinyModel(vocab_size=own_size)), *sampling)


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


def used(ids: Sequence[Any], *weights: NDArray[Any], is_random: bool = True) -> None:
    """Where two drafts were asked for; weights of as much as there may be are taken."""
    context = DraftContext("a", (3,), 1, SamplingParams(), 0, 0, 2)
    usable(Draft((3,), (weighed(7, 2**62 - 23),)), context, True, 24)
    usable(Draft(tuple(ids), weights or None), context, is_random, 24)


def weighed(token_id: int, weight: int) -> NDArray[Any]:
    weights = np.ones(24, np.int64)
    weights[token_id] = weight
    return weights


def name_of_a_sample() -> None:
    """A name is free once the request has ended, all its samples, and not before."""
    engine = own_engine(max_num_seqs=1)  # so that one sample ends after the other
    engine.add_request("a", [3, 4], SamplingParams(n=3, max_tokens=2, ignore_eos=True))
    while engine.has_unfinished:
        try:
            engine.add_request("a#1", [3, 4])
        except RequestError:
            engine.step()
        else:
            raise AssertionError("a request is named like a sample of another")
    if engine.knows("a#1"):
        raise AssertionError("a request has ended, and a sample of it is known")
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


def sampled(row: NDArray[Any], **params: Any) -> None:
    if distribution(ROW[:1], SamplingParams(), (0,), (), ()).tolist() != [2**45]:
        raise AssertionError("the only token of a vocabulary is not certain")
    if len(distribution(np.zeros(2**17, np.float32), SamplingParams(), (0,), (), ())) != 2**17:
        raise AssertionError("the largest vocabulary is not taken")
    distribution(row, SamplingParams(**params), (1,), (), (2,))


ROW = np.zeros(5, np.float32)
IN_USE = "request id 'a' is already in use"
TOO_LARGE = "request 'a': 3 prompt tokens and max_tokens=9 need 6 blocks of 2; the pool has 1"
REPEATED, PRESENT = SamplingParams(repetition_penalty=2.0), SamplingParams(presence_penalty=1.0)
REQUESTS: Cases = (
    ("request id 'a#1' is already in use", name_of_a_sample),
    ("text after a stop string or finish", after_the_end),
    ("text after a stop string or finish", lambda: after_the_end("a", "bc")),
    ("stop ('',): expected strings of at least one character", lambda: StopChecker(("",), False)),
    ("stop ('a', ''): expected strings of", lambda: StopChecker(("a", ""), False)),
    ("stop (1,): expected strings of at least one", lambda: StopChecker((1,), False)),  # type: ignore[arg-type]
    ("draft sampling 'some': expected one of greedy, random", lambda: draft_model(24, 24, "some")),
    ("draft model: ", overflowing_draft_model),
    ("3 tokens, expected at most 2", lambda: used([3] * 3)),
    ("4 tokens, expected at most 3", lambda: used([3] * 4, *[weighed(3, 1)] * 4)),
    ("ids[0]: 1.5, expected", lambda: used([1.5])),
    ("ids[0]: 24, expected 0 to vocab_size-1=23", lambda: used([24])),
    ("1 distributions, expected none, as it is not random", lambda: used([3], weighed(3, 1), is_random=False)),
    ("1 distributions, expected 2", lambda: used([3, 3], weighed(3, 1))),
    ("weights float64 (24,), expected int64 (24,) >= 0", lambda: used([3], weighed(3, 1).astype(np.float64))),
    ("weights int64 (23,), expected int64 (24,) >= 0", lambda: used([3], weighed(3, 1)[1:])),
    ("weights int64 (24,), expected int64 (24,) >= 0", lambda: used([3], weighed(5, -1))),
    ("weight of token 3 is 0, or all sum to more than 2**62", lambda: used([3], weighed(3, 0))),
    ("weight of token 3 is 0, or all sum to more than 2**62", lambda: used([3], weighed(7, 2**62 - 22))),
    ("num_blocks 0: expected a whole number, at least 1", lambda: own_engine(num_blocks=0)),
    ("num_speculative_tokens 0: expected a whole", lambda: own_engine(num_speculative_tokens=0)),
    ("drafter object: it has no is_random", lambda: own_engine(drafter=object())),
    ("none, expected at least one", lambda: added(prompt=[])),
    ("prompt of 97 tokens", lambda: added(prompt=[3] * 97)),
    ("ids[1]: 24, expected 0 to vocab_size-1=23", lambda: added(prompt=[1, 24])),
    ("stop_token_ids 24: expected", lambda: added(params=SamplingParams(stop_token_ids=[24]))),
    (TOO_LARGE, lambda: added("a", [3, 4, 5], {"num_blocks": 1, "block_size": 2}, params=SamplingParams(max_tokens=9))),
    ("priority 'x': expected a whole number", lambda: added(priority="x")),
    ("priority True: expected a whole number", lambda: added(priority=True)),
    ("cache_salt: 3", lambda: added(cache_salt=3)),
    ("cache_salt: lone surrogate", lambda: added(cache_salt="\ud800")),
    ("request id '': expected a string that is not empty", lambda: added("")),
    (IN_USE, lambda: lonely().add_request("a", [3])),
    (IN_USE, lambda: lonely().fork("a", "a")),
    ("request id 'b': not known, or finished", lambda: lonely().fork("b", "c")),
    ("request id 'a': 2 samples, expected 1 to fork", lambda: lonely(n=2).fork("a", "b")),
    ("request id 'a': not known, or finished", lambda: own_engine().abort("a")),
    ("request id 'b': not known, or finished", lambda: lonely().preempt("b")),
    ("request id 'a': not running, can't be preempted", lambda: lonely().preempt("a")),
    (
        "abort(): called from inside a step; wait until it is over: an LLM or engine is for one thread",
        called_from_inside,
    ),
    ("shortest n-gram 0: expected a whole number, at least 1", lambda: NgramDrafter(4, 0)),
    ("longest n-gram 1: expected a whole number, at least 2", lambda: NgramDrafter(1, 2)),
    ("banned_token_ids 5: expected a token id, 0 to 4", lambda: sampled(ROW, banned_token_ids=[5])),
    ("banned_token_ids 7: expected a token id, 0 to 4", lambda: sampled(ROW, banned_token_ids=[7])),
    ("leave no token to choose from", lambda: sampled(ROW, banned_token_ids=[0, 1, 2, 3, 4])),
    ("eos_token_ids 7: expected", lambda: distribution(ROW, SamplingParams(min_tokens=1), (0,), (), (7,))),
    ("processed logits: all -inf, expected at least", lambda: integer_weights(np.full(5, -np.inf))),
    ("prompt_ids -1: expected a token id, 0 to 5", lambda: penalised(np.zeros(6, "f"), REPEATED, (0, 3, -1, 9), ())),
    ("output_ids -1: expected a token id, 0 to 4", lambda: penalised(ROW, PRESENT, (0,), (3, -1))),
    ("seed -1: expected a whole number, 0 to", lambda: uniform(-1, 0, 0)),
    ("sample_index -1: expected a whole number, 0 to", lambda: uniform(0, -1, 0)),
    ("position -1: expected a whole number, 0 to", lambda: uniform(0, 0, -1)),
    ("purpose -1: expected a whole number, 0 to", lambda: uniform(0, 0, 0, -1)),
    ("engine_seed -1: expected a whole", lambda: request_seed(SamplingParams(), -1, "a")),
    ("request_id 1: expected a string", lambda: request_seed(SamplingParams(), 0, 1)),  # type: ignore[arg-type]
)
CHECKPOINTS: Cases = (
    ("vocab_size 24, expected 20 as in", lambda: draft_model(24, 20)),
    ("vocab_size 20, expected 24 as in", lambda: draft_model(20, 24)),
    ("expected 'x' as in", other_tokens),
    ("expected '!' as in", lambda: other_tokens("!")),
)
NUMERICS: Cases = (
    ("float32 of shape (1, 5), expected float32 or", lambda: sampled(ROW.reshape(1, 5))),
    ("float32 of shape (0,), expected float32 or", lambda: sampled(ROW[:0])),
    ("float32 of shape (), expected float32 or", lambda: sampled(ROW[0].reshape(()))),
    ("float32 of shape (131073,), expected", lambda: sampled(np.zeros(2**17 + 1, np.float32))),
    ("int64 of shape (4,), expected float32 or", lambda: sampled(np.zeros(4, np.int64))),
    ("logits: NaN or infinite, expected finite numbers", lambda: sampled(np.full(5, np.nan, np.float32))),
    ("logits: NaN or infinite, expected finite", lambda: sampled(np.array([0.0, -np.inf], np.float32))),
)
