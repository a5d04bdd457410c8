"""llama.cpp's activations, in process: llama-cpp-python's low-level interface and the graph's evaluation callback.

Every node that is one of our tensors is read right after it was computed, so nothing of the graph is fused, as it may
be without a callback. All requests run in one batch, which llama.cpp splits into micro-batches; each with rows of the
request is a step. Logits are requested for all rows, so that the last layer computes all of them. Flash attention is
off, as it has no scores, and the cache has the format that is computed in.

Not recorded: a merged projection of queries, keys and values (LFM2's GGUF has three). The scores are llama.cpp's
products times the scale that its softmax applies.

The library is what llama-cpp-python was built with, or what LLAMA_CPP_LIB_PATH names.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.files import read_config
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.recorders.engine_versions import require_format, require_model_type, require_request, require_version
from lfm2np.oracle.recorders.llama_cpp_batches import (
    LOOKS_AT,
    OUTPUTS,
    Cells,
    Row,
    place_of,
    sequence_tensors,
    split_equal,
)
from lfm2np.oracle.recorders.llama_cpp_nodes import BF16, F16, F32, Library, Source, Tensor, known_as
from lfm2np.oracle.recorders.recorder import Recorder
from lfm2np.truth.config import ModelConfig

Array = NDArray[Any]
VERSIONS = ("0.3.36",)  # of llama-cpp-python, and of llama.cpp in it:
COMMITS = ("0c1e570",)
FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}  # general.file_type of the GGUF
QUANTISED = "q8"  # the format of a file of any other type: products with its weights have inputs of 8 bits
FORMATS = (*FILE_TYPES, QUANTISED)
CACHE_TYPES = {"float32": F32, "float16": F16, "bfloat16": BF16, QUANTISED: F32}
CONTEXT = 256  # llama.cpp rounds a sequence's context up to a multiple


def record(
    model: Path,
    prompts: Sequence[Sequence[int]],
    request: int,
    max_tokens: int,
    format: str,
    gguf: Path,
    ubatch: int = 512,
    unified: bool = False,
) -> Recorder:
    """Request number `request` of prompts that are decoded together, greedily, `max_tokens` tokens each.

    gguf     the checkpoint as GGUF, of the type `format`; `q8`: with quantised weights
    ubatch   most rows of a micro-batch (n_ubatch)
    unified  one cache for all sequences (kv_unified)
    """
    config = read_config(model)
    require_model_type(config, "llama.cpp")
    require_request(prompts, request, max_tokens, config)
    tokens = max(map(len, prompts)) + max_tokens
    num_rows = sum(map(len, prompts))
    with closing(Session(model, gguf, format, len(prompts), tokens, num_rows, ubatch, unified)) as session:
        recorder = Recorder(format=format)
        total = len(prompts[request]) + max_tokens - 1
        rows = [Row(number, at, token) for number, ids in enumerate(prompts) for at, token in enumerate(ids)]
        for _ in range(max_tokens):
            logits = session.decode(rows)
            session.keep(recorder, request, total)
            last = {row.sequence: index for index, row in enumerate(rows)}
            rows = [Row(sequence, rows[at].position + 1, int(np.argmax(logits[at]))) for sequence, at in last.items()]
        return recorder


def format_of(file_type: int) -> str:
    """What llama.cpp computes in, with the weights of such a file."""
    return next((name for name, number in FILE_TYPES.items() if number == file_type), QUANTISED)


def loaded() -> tuple[Any, Library]:
    """llama-cpp-python's low-level interface, made silent, and the library behind it."""
    require_version("llama_cpp_python", VERSIONS)
    try:
        from llama_cpp import _logger, llama_cpp
    except Exception as problem:  # the package is there, its library may not be
        raise TargetError(f"llama_cpp_python: {problem}") from None
    _logger.logger.setLevel(logging.CRITICAL)
    library = Library(llama_cpp._lib)
    if not library.commit.startswith(COMMITS):
        raise TargetError(f"llama.cpp: commit {library.commit}, expected {' or '.join(COMMITS)}")
    return llama_cpp, library


class Session:
    """A loaded model with a context; keeps the micro-batches and tensors of the last `decode`."""

    def __init__(
        self,
        model: Path,
        gguf: Path,
        format: str,
        sequences: int,
        tokens: int,
        rows: int,
        ubatch: int,
        unified: bool = False,
    ) -> None:
        """`tokens`: most of a sequence; `rows`: most of a batch."""
        require_format(format, FORMATS)
        self.api, self._library = loaded()
        config = read_config(model)
        if len(set(config.layer_types)) == 1:
            raise TargetError(f"{model}: {config.layer_types[0]} layers alone, expected both kinds: llama.cpp aborts")
        self._sequences, self._ubatch, self._unified = sequences, ubatch, unified
        self._cells: dict[tuple[int, int], int] = {}  # by sequence and position
        self._batches: list[tuple[list[Row], dict[str, Any]]] = []
        self._graphs: list[dict[str, Any]] = []
        self._nodes: dict[int, str] = {}  # of the graph that runs: which of our tensors each is
        self._problem: BaseException | None = None
        self.api.llama_backend_init()
        self._model = self.api.llama_model_load_from_file(str(gguf).encode(), self.api.llama_model_default_params())
        if not self._model:
            raise TargetError(f"{gguf}: llama.cpp can't load it, expected a GGUF file of {model}")
        self._require_same(config, gguf, format)
        self.context = self.api.llama_init_from_model(self._model, self._settings(format, tokens, rows))
        if not self.context:
            raise TargetError(f"{gguf}: llama.cpp makes no context of {sequences} sequences of {tokens} tokens")

    def _settings(self, format: str, tokens: int, rows: int) -> Any:
        each = -(-tokens // CONTEXT) * CONTEXT
        settings = self.api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = each * self._sequences, self._sequences
        settings.n_batch = settings.n_outputs_max_per_seq = max(rows, self._sequences)
        settings.n_ubatch = self._ubatch = min(self._ubatch, settings.n_batch)
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k = settings.type_v = CACHE_TYPES[format]
        settings.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.kv_unified = self._unified
        self._callback = self.api.ggml_backend_sched_eval_callback(self._evaluated)
        settings.cb_eval = self._callback
        return settings

    def _require_same(self, config: ModelConfig, gguf: Path, format: str) -> None:
        """TargetError for a GGUF of another model or type."""
        vocabulary = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self._model))
        for what, actual, expected in (
            ("layers", self.api.llama_model_n_layer(self._model), config.num_hidden_layers),
            ("hidden size", self.api.llama_model_n_embd(self._model), config.hidden_size),
            ("vocabulary", vocabulary, config.vocab_size),
        ):
            if actual != expected:
                raise TargetError(f"{gguf}: {what} {actual}, expected {expected}")
        stored = int(self._fact("general.file_type") or 0)
        if format_of(stored) != format:
            wanted = FILE_TYPES.get(format, "that of quantised weights")
            raise TargetError(
                f"{gguf}: general.file_type {stored}, expected {wanted} for {format}; this is recorded in "
                f"--format {format_of(stored)}"
            )

    def _fact(self, key: str) -> str:
        """A value of the GGUF's header; "" if it is not there."""
        text = ctypes.create_string_buffer(256)
        self.api.llama_model_meta_val_str(self._model, key.encode(), text, len(text))
        return text.value.decode()

    @property
    def memory(self) -> Any:
        return self.api.llama_get_memory(self.context)

    def decode(self, rows: Sequence[Row]) -> Array:
        """Rows of sequences, those of each together. Logits of all rows [rows, V]."""
        batch = self.api.llama_batch_init(len(rows), 0, 1)
        for index, row in enumerate(rows):
            batch.token[index], batch.pos[index] = row.token, row.position
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, row.sequence, 1
        batch.n_tokens = len(rows)
        self._graphs.clear()
        status = self.api.llama_decode(self.context, batch)
        self.api.llama_batch_free(batch)
        if self._problem is not None:
            raise self._problem
        if status != 0:
            raise TargetError(f"llama_decode: {status} for {len(rows)} rows, expected 0")
        splits = split_equal(rows, self._ubatch, not self._unified)
        self._batches = list(zip(splits, self._graphs, strict=True))
        logits: dict[Row, Array] = {}
        for split, graph in self._batches:
            require_split(split, graph)
            self._cells |= zip(((row.sequence, row.position) for row in split), map(int, graph["cells"]), strict=True)
            logits |= zip(split, graph["lm_head"], strict=True)
        return np.stack([logits[row] for row in rows])

    def keep(self, recorder: Recorder, sequence: int, total: int) -> None:
        """Records the sequence's rows of the last `decode`, step by step; `total`: the rows of all its steps."""
        for rows, graph in self._batches:
            place = place_of(rows, sequence)
            if place is not None:
                request_rows = rows[place.start : place.stop]
                cells = [self._cells[sequence, position] for position in range(request_rows[-1].position + 1)]
                recorder.step([row.token for row in request_rows])
                for name, values in sequence_tensors(graph, place, cells, total):
                    recorder.keep(name, values)

    def close(self) -> None:
        self.api.llama_free(self.context)
        self.api.llama_model_free(self._model)

    def _evaluated(self, pointer: int, asks: bool, data: int | None) -> bool:
        """Called with each node before it is computed, and afterwards if that was requested."""
        try:
            tensor = ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents
            if asks:
                return self._wants(pointer, tensor)
            self._graphs[-1] |= self._taken(self._nodes[pointer], tensor)
        except BaseException as problem:  # it can't pass through C
            self._problem = problem
            return False
        return True

    def _wants(self, pointer: int, tensor: Any) -> bool:
        sources = []
        for source in (source.contents for source in tensor.src[:2] if source):
            known = self._nodes.get(ctypes.addressof(source))
            sources.append(Source(leaf=source.name.decode()) if known is None else Source(known))
            if sources[-1].leaf == OUTPUTS:
                self._graphs[-1][OUTPUTS] = self._library.numbers(source).reshape(-1)
        known, is_computed = known_as(self._library.op(tensor), sources)
        if known == "model.embed_tokens":  # a graph begins
            self._nodes.clear()
            self._graphs.append({})
        self._nodes[pointer] = known
        return bool(known) and is_computed

    def _taken(self, name: str, tensor: Any) -> dict[str, Any]:
        """What is read at this node, of it and of its inputs."""
        numbers = self._library.numbers
        first, second = sources_of(tensor)
        prefix, _, part = name.rpartition(".")
        if part == "cells":
            return {"cells": numbers(second).reshape(-1)}
        values = numbers(tensor)
        if part == "state":  # the concatenation of the state and u, by channel
            return {name: values[0, ..., : first.ne[0]].swapaxes(1, 2)}
        if part == "scores":
            return {name: values, f"{prefix}.keys": numbers(first), f"{prefix}.{LOOKS_AT}": looked_at(first)}
        if part == "weights":
            scale = np.frombuffer(bytes(tensor.op_params), np.float32)[0]
            return {name: values, f"{prefix}.scores": self._graphs[-1][f"{prefix}.scores"] * np.float64(scale)}
        if part == "mixed":
            return {f"{prefix}.values": numbers(first).swapaxes(2, 3)}
        if name == "model.embed_tokens":
            return {name: values[0, 0], "tokens": numbers(second).reshape(-1)}
        rows = {name: values.reshape(len(self._graphs[-1]["tokens"]), -1)}
        return rows | {"positions": numbers(second).reshape(-1)} if part.endswith("_rotated") else rows


def sources_of(tensor: Any) -> list[Any]:
    """The first two tensors that a node reads; None where it reads fewer."""
    return [source.contents if source else None for source in tensor.src[:2]]


def looked_at(keys: Any) -> Cells:
    """From a view of the cache's keys: ggml's axes are E, cells, heads, streams."""
    size = keys.nb[1]
    return Cells(keys.view_offs // size, keys.nb[3] // size, keys.ne[3], keys.ne[1])


def require_split(rows: Sequence[Row], graph: dict[str, Any]) -> None:
    """TargetError if llama.cpp evaluated other rows, or the last layer has them in another order."""
    for what, expected in (
        ("tokens", [row.token for row in rows]),
        ("positions", [row.position for row in rows]),
        (OUTPUTS, list(range(len(rows)))),
    ):
        actual = graph[what].tolist() if what in graph else expected
        if actual != expected:
            raise TargetError(f"llama.cpp: {what} {actual} of a micro-batch, expected {expected}")
