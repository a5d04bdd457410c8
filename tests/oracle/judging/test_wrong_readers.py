"""A wrong reading of quantised weights is a bug, not the format: an engine in llama.cpp's arithmetic that reads a file
in the wrong way, against the oracle that reads it in the right one.

The engine rounds each row of a product's inputs to Q8_0, with K-quants to Q8_K; then integers are multiplied and added,
which rounds nothing. The roundings are written again here: an engine that shared those of
lfm2np/oracle/judging/formats.py would share their mistakes, and be called right.
Sources: quantize_row_q8_0_ref and quantize_row_q8_K_ref of ggml-quants.c, vec_dot_type of ggml-cpu.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import raw_config
from gguf_file import Tensor, gguf_bytes, model_keys, model_tensors

import lfm2np
from lfm2np.arithmetic.ieee import Ieee, unchanged
from lfm2np.checkpoint.config_json import parse_config
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.gguf.ggml_types import QUANTISED, Bytes
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.engine.loading import Model
from lfm2np.oracle.engines.records import Answer, Pair, greedy
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.total import Total, total

pytestmark = [pytest.mark.usefixtures("without_constants"), pytest.mark.slow]
AS_LLAMA_CPP = "q8 kv:float32"


@dataclass(frozen=True)
class Q8(Ieee):
    """Inputs of products in 8 bits, in blocks of so many."""

    block: int = 32

    def linear(self, x: Any, matrix: Any, bias: Any = None) -> Any:
        return super().linear(q8_k(x) if self.block == 256 else q8_0(x), matrix, bias)


def q8_0(x: Any) -> Any:
    """Steps of 1/127 of a block's largest, ties away from zero; the scale is kept as float16."""
    blocks = np.ascontiguousarray(x, np.float32).reshape(len(x), -1, 32)
    step = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    scaled = blocks * np.divide(1, step, out=np.zeros_like(step), where=step != 0)
    codes = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled)
    return (codes * step.astype(np.float16).astype(np.float32)).reshape(x.shape)


def q8_k(x: Any) -> Any:
    """Steps of -1/127 of the number that is largest in size, ties to even; the scale is a float32."""
    blocks = np.ascontiguousarray(x, np.float32).reshape(len(x), -1, 256)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), axis=-1)
    inverse = np.divide(-127, largest, out=np.zeros_like(largest), where=largest != 0)
    codes = np.minimum(np.rint(blocks * inverse), 127)
    return (codes * np.divide(1, inverse, out=np.zeros_like(inverse), where=inverse != 0)).reshape(x.shape)


def neighbours_scale(blocks: Bytes) -> None:
    """d stands in a block's first two bytes: that of the next block of its row, of the last that before it."""
    blocks[..., :2] = np.concatenate([blocks[:, 1:, :2], blocks[:, -2:-1, :2]], axis=1)


def without_minimum(blocks: Bytes) -> None:
    """dmin of Q4_K, m of Q4_1 and Q5_1: the two bytes behind d."""
    blocks[..., 2:4] = 0


READERS: dict[str, Callable[[Bytes], None]] = {"Q8_0": neighbours_scale, "Q4_0": neighbours_scale}
READERS |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K"), without_minimum)


def blocks_of(dtype: str, shape: tuple[int, ...], random: np.random.Generator) -> Bytes:
    """Random codes and scales that differ twofold between blocks; where there is a minimum, one of half the range.

    Weights deviate by about 1 / sqrt(inputs), so that activations stay near 1.
    """
    kind, codes = QUANTISED[dtype], {"Q8_0": 127, "Q4_0": 8, "Q4_1": 15, "Q5_1": 31, "Q4_K": 15 * 48}[dtype]
    blocks = random.integers(0, 256, (shape[0], shape[1] // kind.weights, kind.size), np.uint8)
    scale = random.uniform(1, 2, blocks.shape[:2]) / codes / np.sqrt(shape[1])
    minimum = {"Q4_1": -scale * 7.5, "Q5_1": -scale * 15.5, "Q4_K": scale * 7.5}.get(dtype)
    for at, values in zip(kind.halves, (scale, minimum), strict=False):
        assert values is not None
        blocks[..., at : at + 2] = values.astype("<f2")[..., None].view(np.uint8)
    return blocks


def write_model(path: Path, dtype: str, read_as: Callable[[Bytes], None] = lambda blocks: None) -> Path:
    """Two layers, as wide as blocks allow, as a reader sees the file."""
    width = 2 * QUANTISED[dtype].weights if dtype != "Q4_K" else 256
    raw = raw_config(hidden_size=width, intermediate_size=width, vocab_size=64)
    config, random = parse_config(raw, "config.json"), np.random.default_rng(22)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) != 2:
            return Tensor("F32", shape, random.normal(1.0, 0.1, shape).astype("<f4").tobytes())
        blocks = blocks_of(dtype, shape, random)
        read_as(blocks)
        return Tensor(dtype, shape, blocks.tobytes())

    path.write_bytes(gguf_bytes(model_keys(config), model_tensors(config, made)))
    return path


def said(path: Path, dtype: str) -> list[Pair]:
    """What the engine says of each prompt and of one token behind it."""
    config, numerics = read_config(path), Q8("q8", np.float32, 4, unchanged, QUANTISED[dtype].weights)
    model = Model(path, config, numerics, prepare_weights(read_tensors(path, config), config, numerics))
    random, pairs = np.random.default_rng(3), []
    for length in (3, 24):
        ids = tuple(int(integer) for integer in random.integers(8, config.vocab_size, length))
        logprobs = numerics.log_softmax(model.logits(ids))
        best = int(np.argmax(logprobs[-1]))
        prompt_logprobs = tuple(float(logprobs[row, token]) for row, token in enumerate(ids[1:]))
        request = greedy(f"of {length}", ids, 1, case="short-prompts", prompt_logprobs=0, tags={"length": length})
        pairs.append((request, Answer((best,), (float(logprobs[-1, best]),), prompt_logprobs=prompt_logprobs)))
    return pairs


def judged(right: Path, pairs: list[Pair]) -> Total:
    model = lfm2np.load(right)
    return total(model, AS_LLAMA_CPP, pairs, judge(model, AS_LLAMA_CPP, pairs))


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", READERS)
def test_another_scale_or_no_minimum_is_a_bug(dtype: str, tmp_path: Path) -> None:
    right = write_model(tmp_path / "right.gguf", dtype)
    wrong = write_model(tmp_path / "wrong.gguf", dtype, READERS[dtype])
    baseline = judged(right, said(right, dtype))
    assert baseline.verdict in ("EXACT", "TIE") and baseline.worst < LIMIT
    result = judged(right, said(wrong, dtype))
    assert result.verdict == "BUG" and result.worst > 2 * LIMIT
