"""Runs that the page shows, made here and now: an engine, its trace, and the detail of every step."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from lfm2np.arithmetic import Numerics
from lfm2np.engine.engine import Engine
from lfm2np.engine.loading import Model
from lfm2np.engine.outputs import RequestOutput
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.teaching.drawings.runs.detail import Detail


@dataclass(frozen=True)
class Coming:
    request_id: str
    prompt: str | Sequence[int]
    params: SamplingParams
    arrival: int = 0


class DetailedTrace:
    """Adds a line of detail after each step's line of an engine's trace. The engine must run `model`.

    words  of the vocabulary, for a model without a tokenizer
    """

    def __init__(self, model: Model, words: Sequence[str] = ()) -> None:
        self._detail = Detail(model.weights, model.numerics)
        self._words = words
        self._told: set[int] = set()
        self._original = model
        self.model = replace(model, numerics=cast(Numerics, self._detail), weights=self._detail.weights)

    def step(self, engine: Engine) -> list[RequestOutput]:
        requests = dict(engine.scheduler.requests)
        self._detail.taken()
        outputs = engine.step()
        operations = self._detail.taken()
        ids = {*range(len(self._words)), *(token_id for request in requests.values() for token_id in request.token_ids)}
        ids -= self._told
        self._told |= ids
        if engine.trace is not None:
            engine.trace.detail(operations, texts(self._original, self._words, sorted(ids)))
        return outputs


def texts(model: Model, words: Sequence[str], ids: Sequence[int]) -> Mapping[int, str]:
    """Of tokens: the words given, or the tokenizer's entries; nothing where there is neither."""
    if words:
        return {token_id: words[token_id] for token_id in ids}
    if not model.has_tokenizer:
        return {}
    by_id = {}
    for token_id in ids:
        text = model.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        by_id[token_id] = text or model.tokenizer.token(token_id) or str(token_id)  # special tokens add no text
    return by_id


def played(
    engine: Engine, coming: Sequence[Coming], step: Callable[[], list[RequestOutput]]
) -> Iterator[list[RequestOutput]]:
    """Until all requests have come and ended: what comes out of each step."""
    left, number = list(coming), 0
    while left or engine.has_unfinished:
        for request in [request for request in left if request.arrival <= number]:
            left.remove(request)
            engine.add_request(request.request_id, request.prompt, request.params)
        yield step()
        number += 1


def recorded(model: Model, coming: Sequence[Coming], words: Sequence[str] = (), **options: Any) -> list[str]:
    """The lines of a trace with detail, of these requests on a fresh engine."""
    file = io.StringIO()
    detailed = DetailedTrace(model, words)
    engine = Engine(detailed.model, trace=file, **options)
    for _ in played(engine, coming, partial(detailed.step, engine)):
        pass
    if engine.trace is not None:
        engine.trace.end()
    return file.getvalue().splitlines()
