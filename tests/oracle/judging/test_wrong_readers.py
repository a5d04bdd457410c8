"""A wrong reading of quantised weights is a bug, not the format: an engine in llama.cpp's arithmetic that reads a file
in the wrong way, against the oracle that reads it in the right one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from builders import raw_config
from gguf_file import Tensor, gguf_bytes, model_keys, model_tensors
from q8_engine import q8_engine
from wrong_readers import MINIMUM, SCALE, patched

import lfm2np
from lfm2np.checkpoint.config_json import parse_config
from lfm2np.checkpoint.gguf.ggml_types import QUANTISED, Bytes
from lfm2np.engine.loading import Model
from lfm2np.oracle.engines.records import Answer, Pair, greedy
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.total import Total, total

AS_LLAMA_CPP = "q8 kv:float32"
LENGTHS = (3, 24)
FORMATS = {"Q8_0": SCALE, "Q4_0": SCALE, "Q4_1": MINIMUM, "Q5_1": MINIMUM, "Q4_K": MINIMUM}


def blocks_of(dtype: str, shape: tuple[int, int], random: np.random.Generator) -> Bytes:
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


def write_model(path: Path, dtype: str) -> Path:
    """Two layers, as wide as blocks allow."""
    width = 2 * QUANTISED[dtype].weights if dtype != "Q4_K" else 256
    raw = raw_config(hidden_size=width, intermediate_size=width, vocab_size=64)
    config, random = parse_config(raw, "config.json"), np.random.default_rng(22)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 2:
            return Tensor(dtype, shape, blocks_of(dtype, (shape[0], shape[1]), random).tobytes())
        return Tensor("F32", shape, random.normal(1.0, 0.1, shape).astype("<f4").tobytes())

    path.write_bytes(gguf_bytes(model_keys(config), model_tensors(config, made)))
    return path


def said(model: Model) -> list[Pair]:
    """What the engine says of each prompt and of one token behind it."""
    random, pairs = np.random.default_rng(3), []
    for length in LENGTHS:
        ids = tuple(int(integer) for integer in random.integers(8, model.config.vocab_size, length))
        logprobs = model.numerics.log_softmax(model.logits(ids))
        best = int(np.argmax(logprobs[-1]))
        prompt_logprobs = tuple(float(logprobs[row, token]) for row, token in enumerate(ids[1:]))
        request = greedy(f"of {length}", ids, 1, case="short-prompts", prompt_logprobs=0, tags={"length": length})
        pairs.append((request, Answer((best,), (float(logprobs[-1, best]),), prompt_logprobs=prompt_logprobs)))
    return pairs


def judged(right: Path, format_name: str, pairs: list[Pair]) -> Total:
    model = lfm2np.load(right)
    return total(model, format_name, pairs, judge(model, format_name, pairs))


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", FORMATS)
def test_another_scale_or_no_minimum_is_a_bug(dtype: str, tmp_path: Path) -> None:
    right, reader = write_model(tmp_path / "right.gguf", dtype), FORMATS[dtype]
    changed = patched(right, tmp_path / "wrong.gguf", reader)
    assert changed
    baseline = judged(right, AS_LLAMA_CPP, said(q8_engine(right)))
    assert baseline.verdict in ("EXACT", "TIE") and baseline.worst < LIMIT
    result = judged(right, AS_LLAMA_CPP, said(q8_engine(tmp_path / "wrong.gguf")))
    assert result.verdict == "BUG" and result.worst > 2 * LIMIT
