"""For the tests of an LFM2 engine, in its own repository: an answer is right, or the assertion says why it is a bug.

lfm2np.testing.assert_right(prompt_ids, token_ids, logprobs, format="bfloat16", model="path/to/LFM2-350M")
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import lru_cache
from pathlib import Path
from typing import Any

from lfm2np.engine.loading import Model
from lfm2np.engine.teacher_forcing import scorable
from lfm2np.errors import RequestError
from lfm2np.oracle.api import exact_model
from lfm2np.oracle.causes.findings import EVERYWHERE
from lfm2np.oracle.check import fitting, judged
from lfm2np.oracle.engines.records import greedy
from lfm2np.oracle.engines.records_json import checked_answer
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.verdict import LIMIT, WRONG, Position
from lfm2np.values import show

load_once = lru_cache(maxsize=4)(exact_model)


def assert_right(
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    logprobs: Sequence[float] | None = None,
    format: str = "bfloat16",
    model: Model | str | Path | None = None,
) -> None:
    """AssertionError unless a right engine may answer the prompt so, greedily, computing in this format.

    token_ids  the new tokens; each is judged behind those before it
    logprobs   natural logarithms, one for each of them; without any, errors that change no token are not seen
    format     as of `lfm2np check --format`, also with that of the cache: "bfloat16 kv:float8"
    model      a checkpoint's path, which is loaded once, or a model loaded under `exact`; None: the trained fixture
    errors     RequestError for prompts, lengths, values of another kind and formats that can't be; those of lfm2np.load
    """
    __tracebackhide__ = True
    if not isinstance(format, str):
        raise RequestError(f"format {show(format)}: expected text")
    format_named(format)
    oracle = load_once(model)
    prompt, tokens = plain("prompt_ids", prompt_ids, token_of), plain("token_ids", token_ids, token_of)
    if not prompt or not tokens:
        raise RequestError(f"{len(prompt)} prompt_ids and {len(tokens)} token_ids: expected at least one each")
    scorable(prompt + [0] * len(tokens), oracle.config)  # which ids are no tokens, the answer's check says
    request = greedy("assert_right", prompt, len(tokens))
    fields = {"token_ids": tokens, "logprobs": None if logprobs is None else plain("logprobs", logprobs, float)}
    answer = fitting(request, checked_answer(request, fields), oracle.config)
    advice = f"what it depends on: lfm2np check ENGINE --model {oracle.path} --format '{format}'"
    if answer.error is not None:
        is_wrong = answer.is_refuted or -math.inf in (fields["logprobs"] or ())  # of the token that it chose
        raise AssertionError(f"BUG, not rounding: {answer.error}\n{advice}") if is_wrong else RequestError(answer.error)
    total = judged(oracle, Abilities("assert_right"), format, [(request, answer)]).total
    if total.verdict in WRONG:
        reasons = [reason for reason in total.reasons if EVERYWHERE not in reason]  # one answer can't show that
        first = [wrong_words(total.first_wrong, format)] if total.first_wrong else []
        raise AssertionError("\n".join([f"{total.verdict}, not rounding: {'; '.join(reasons)}", *first, advice]))


def wrong_words(at: Position, format: str) -> str:
    """Where an answer is wrong first, and by how much."""
    unit = f"times the rounding error of {format}, which explains {LIMIT:g}"
    behind = f"the exact best is {at.best}, {at.gap:.3g} nats ahead: {at.gap_ratio:.3g} {unit}"
    if at.token_id == at.best:
        behind = f"its log-probability is off by {at.error or 0.0:.3g} nats: {abs(at.error_ratio or 0.0):.3g} {unit}"
    position = at.row + 1
    return f"token_ids[{position - len(at.request.prompt_token_ids)}] (position {position}) is {at.token_id}; {behind}"


def token_of(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("true and false are no token ids")
    return operator.index(value)


def plain(name: str, values: Iterable[Any], kind: Callable[[Any], Any]) -> list[Any]:
    """Python's numbers for those of NumPy, PyTorch and others; RequestError for anything else and for sets."""
    if isinstance(values, str | bytes | Set | Mapping):
        raise RequestError(f"{name} {show(values)}: expected a list of numbers")
    try:
        return list(map(kind, values))
    except (TypeError, ValueError) as problem:
        raise RequestError(f"{name} {show(values)}: {problem}") from None
