"""nano.py behind the protocol of `lfm2np check` and the property suite, right and with one bug; see docs/engine/1-tutorial.md.

    lfm2np check lfm2np.teaching.tutorial:wrong
    lfm2np check lfm2np.teaching.tutorial:right

The bug is typical of hybrids: the convolutions' state for the next step is taken from this step's tokens alone, with
zeros before them. After a prompt that is right; after a step of one token the token before it is forgotten. oracle/engines/
protocol.py says what each method is for: an adapter to another engine has some of the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.oracle.recorders import Recorder
from lfm2np.teaching.nano import Array, Chunk, Engine
from lfm2np.teaching.nano import Sequence as Running

SIZES = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "prefix_caching")


class Shown(Engine):
    """nano's engine, which shows a recorder what it computes of one request."""

    recorder: Recorder | None = None
    recorded: Running | None = None  # the request
    rows = slice(0)  # its rows of the step

    def forward(self, chunks: list[Chunk]) -> Array:
        self.rows = slice(0)
        for chunk in chunks:
            if self.recorder is not None and chunk.sequence is self.recorded:
                self.rows = chunk.rows
                self.recorder.step(chunk.sequence.token_ids[chunk.start : chunk.stop], chunk.start)
                for number, layer in enumerate(self.config.layers_of("conv")):
                    self.recorder.keep(f"model.layers.{layer}.conv.state", self.states[[chunk.sequence.slot], number])
        return super().forward(chunks)

    def linear(self, x: Array, name: str) -> Array:
        product = super().linear(x, name)
        if self.recorder is not None and self.rows.stop:
            self.recorder.keep("lm_head" if name == "model.embed_tokens" else name, product[self.rows])
        return product


class Wrong(Shown):
    def state_after(self, state: Array, new: Array) -> Array:
        """Of this step alone."""
        return super().state_after(np.zeros_like(state), new)


def right(model: str, sizes: dict[str, Any]) -> Adapter:
    return Adapter(Shown(model, **{name: sizes[name] for name in SIZES if name in sizes}))


def wrong(model: str, sizes: dict[str, Any]) -> Adapter:
    return Adapter(Wrong(model, **{name: sizes[name] for name in SIZES if name in sizes}))


class Adapter:
    """Levels a to c, and two methods of level d."""

    lacks = frozenset({"sampling", "samples", "processors", "stop-strings", "priorities", "salts"})
    lacks |= {"mixture-of-experts", "lfm3", "overflow", "policy", "watermark", "num_host_blocks", "drafter"}

    def __init__(self, engine: Shown) -> None:
        self.engine = engine
        self.sizes = {name: getattr(engine, name) for name in ("block_size", "max_num_batched_tokens", "max_model_len")}
        self.sizes["max_num_seqs"] = len(engine.states)

    def generate(self, requests: Sequence[Request]) -> list[list[Answer]]:
        running = [self.add(request) for request in requests]
        while self.engine.unfinished:
            self.engine.step()
        return [answers(sequence) for sequence in running]

    def score(self, token_ids: Sequence[int]) -> list[float]:
        recorder = Recorder()
        self.record([token_ids], 0, 1, recorder)
        rows = recorder.tensors()["lm_head"].astype(np.float64)  # [T, V]
        scores = rows - np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        ...

    def add(self, request: Request) -> Running:
        params = request.params
        stops = params.stop_token_ids + (() if params.ignore_eos else self.engine.config.eos_token_ids)
        return self.engine.add(request.request_id, request.prompt_token_ids, params.max_tokens or 1, stops)

    def step(self) -> dict[str, list[Answer]]:
        return {sequence.request_id: answers(sequence) for sequence in self.engine.step()}

    def abort(self, request_id: str) -> list[Answer]:
        sequence = self.engine.unfinished[request_id]
        self.engine.finish(sequence, "abort")
        return answers(sequence)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.engine.unfinished)
