"""nano.py as an engine for `lfm2np check` and the property suite: right, and with one bug.

    lfm2np check lfm2np.teaching.tutorial:right
    lfm2np check lfm2np.teaching.tutorial:wrong

The bug is typical of hybrids: the state for the next step is taken from this step's tokens alone, with zeros before
them. After a prompt that is right; after a step of one token the token before it is forgotten. The tutorial is
docs/engine/1-tutorial.md. Requests, answers and what each method is for: oracle/engines/protocol.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.oracle.recorders import Recorder
from lfm2np.teaching import nano

SIZES = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "prefix_caching")


class Shown(nano.Engine):
    """Shows a recorder what is computed of one request, and counts the tokens that came from the cache."""

    recorder = Recorder()
    recorded: nano.Sequence | None = None
    rows: slice | None = None  # those of `recorded` in the step, if it has any
    num_cached_tokens = 0

    def admit(self) -> nano.Sequence:
        sequence = super().admit()
        self.num_cached_tokens += sequence.num_computed_tokens
        return sequence

    def forward(self, chunks: list[nano.Chunk]) -> nano.Array:
        self.rows = None
        for chunk in chunks:
            if chunk.sequence is self.recorded:
                self.rows = chunk.rows
                self.recorder.step(chunk.sequence.token_ids[chunk.start : chunk.stop], chunk.start)
        return super().forward(chunks)

    def linear(self, x: nano.Array, name: str) -> nano.Array:
        product = super().linear(x, name)
        if self.rows:
            self.recorder.keep("lm_head" if name == "model.embed_tokens" else name, product[self.rows])
        return product

    def convolve(self, chunk: nano.Chunk, number: int, new: nano.Array, taps: nano.Array) -> nano.Array:
        state = self.states[chunk.sequence.slot, number].copy()
        mixed = super().convolve(chunk, number, new, taps)
        if chunk.sequence is self.recorded:
            name = f"model.layers.{self.config.layers_of('conv')[number]}.conv"
            for part, rows in {"u": new, "state": state[None], "conv": mixed}.items():
                self.recorder.keep(f"{name}.{part}", rows)
        return mixed


class Wrong(Shown):
    """With the bug."""

    def state_after(self, state: nano.Array, new: nano.Array) -> nano.Array:
        return super().state_after(np.zeros_like(state), new)


def right(model: str, sizes: dict[str, Any]) -> Adapter:
    return Adapter(Shown(model, **{name: size for name, size in sizes.items() if name in SIZES}))


def wrong(model: str, sizes: dict[str, Any]) -> Adapter:
    return Adapter(Wrong(model, **{name: size for name, size in sizes.items() if name in SIZES}))


class Adapter:
    """Levels a to c of the protocol, and some of d."""

    lacks = frozenset({"sampling", "samples", "processors", "stop-strings", "priorities", "salts", "overflow"})
    lacks |= {"mixture-of-experts", "lfm3"}

    def __init__(self, engine: Shown) -> None:
        self.engine = engine
        self.sizes = {name: getattr(engine, name) for name in ("block_size", "max_num_batched_tokens", "max_model_len")}
        self.sizes["max_num_seqs"] = len(engine.states)

    def generate(self, requests: Sequence[Request]) -> list[list[Answer]]:
        sequences = [self.add(request) for request in requests]
        while self.has_unfinished:
            self.step()
        return [answers(sequence) for sequence in sequences]

    def score(self, token_ids: Sequence[int]) -> list[float]:
        recorder = Recorder()
        self.record([token_ids], 0, 1, recorder)
        logits = recorder.tensors()["lm_head"].astype(np.float64)  # [T, V]
        logits -= logits.max(axis=1, keepdims=True)
        scores = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return [float(row[token]) for row, token in zip(scores, token_ids[1:], strict=False)]

    def add(self, request: Request) -> nano.Sequence:
        params = request.params
        stops = (*params.stop_token_ids, *(() if params.ignore_eos else self.engine.config.eos_token_ids))
        most = self.engine.max_model_len if params.max_tokens is None else params.max_tokens
        return self.engine.add(request.request_id, request.prompt_token_ids, most, stops)

    def step(self) -> dict[str, list[Answer]]:
        return {sequence.request_id: answers(sequence) for sequence in self.engine.step()}

    def abort(self, request_id: str) -> list[Answer]:
        sequence = self.engine.unfinished[request_id]
        self.engine.finish(sequence, "abort")
        return answers(sequence)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.engine.unfinished)

    def preempt(self, request_id: str) -> None:
        sequence = self.engine.unfinished[request_id]
        if sequence.slot is None:
            raise RequestError(f"request {request_id!r}: it waits, expected one that runs")
        self.engine.preempt(sequence)

    def state(self) -> dict[str, int]:
        engine = self.engine
        blocks = {"free_blocks": len(engine.blocks.free), "num_blocks": len(engine.block_states)}
        return {**blocks, "free_slots": len(engine.free_slots), "num_slots": len(engine.states)}

    def metrics(self) -> dict[str, int]:
        return {"cached_tokens": self.engine.num_cached_tokens}

    def record(self, prompts: Sequence[Sequence[int]], request: int, max_tokens: int, recorder: Recorder) -> None:
        """All prompts together, one of them for `lfm2np record` and `check --locate`; without the prefix cache."""
        engine = self.engine
        engine.recorder, engine.prefix_caching, before = recorder, False, engine.prefix_caching
        sequences = [engine.add(str(index), tuple(prompt), max_tokens) for index, prompt in enumerate(prompts)]
        engine.recorded = sequences[request]
        while engine.unfinished:
            engine.step()
        engine.recorded, engine.prefix_caching = None, before


def answers(sequence: nano.Sequence) -> list[Answer]:
    return [Answer(tuple(sequence.new_token_ids), tuple(sequence.logprobs), finish_reason=sequence.finish_reason)]
