"""A wrong reading of quantised weights is a bug, not the format: an engine that computes as llama.cpp does, with weights
that are another's, against the oracle with the right ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from arithmetic import q8_engine
from builders import raw_config
from gguf_bytes import Tensor, gguf_bytes, model_keys, model_tensors
from wrong_readers import MINIMUM, SCALE, Reader, patched

import lfm2np
from lfm2np.checkpoint.config import parse_config
from lfm2np.checkpoint.gguf.blocks import Bytes
from lfm2np.checkpoint.gguf.formats import QUANTISED
from lfm2np.oracle.judging.formats import with_kv
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.scored import Pair
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.targets.records import Answer, Ask
from lfm2np.oracle.total import Total, total

AS_LLAMA_CPP = with_kv("q8", "float32")
LENGTHS = (3, 24)
FORMATS = {"Q8_0": SCALE, "Q4_0": SCALE, "Q4_1": MINIMUM, "Q5_1": MINIMUM, "Q4_K": MINIMUM}


def blocks_of(dtype: str, shape: tuple[int, int], random: np.random.Generator) -> Bytes:
    """Random codes and scales that differ twofold between blocks; where there is a minimum, one of half the range.

    Weights deviate by about 1 / sqrt(inputs), so that activations stay near 1.
    """
    kind, codes = QUANTISED[dtype], {"Q8_0": 127, "Q4_0": 8, "Q4_1": 15, "Q5_1": 31, "Q4_K": 15 * 48}[dtype]
    made = random.integers(0, 256, (shape[0], shape[1] // kind.weights, kind.size), np.uint8)
    scale = random.uniform(1, 2, made.shape[:2]) / codes / np.sqrt(shape[1])
    minimum = {"Q4_1": -scale * 7.5, "Q5_1": -scale * 15.5, "Q4_K": scale * 7.5}.get(dtype)
    for at, values in zip(kind.halves, (scale, minimum), strict=False):
        assert values is not None
        made[..., at : at + 2] = values.astype("<f2")[..., None].view(np.uint8)
    return made


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


def said(engine: Path) -> list[Pair]:
    """What the engine says of each prompt and of one token behind it."""
    model, random, pairs = q8_engine(engine), np.random.default_rng(3), []
    for length in LENGTHS:
        ids = tuple(int(one) for one in random.integers(8, model.config.vocab_size, length))
        found = model.numerics.log_softmax(model.logits(ids))
        best = int(np.argmax(found[-1]))
        told = tuple(float(found[row, token]) for row, token in enumerate(ids[1:]))
        ask = Ask(f"of {length}", "short-prompts", ids, 1, prompt_logprobs=True, factors={"length": length})
        pairs.append((ask, Answer(ask.id, (best,), (float(found[-1, best]),), prompt_logprobs=told)))
    return pairs


def judged(right: Path, pairs: list[Pair]) -> Total:
    model = lfm2np.load(right)
    positions = judge(model, AS_LLAMA_CPP, pairs)
    return total(model, AS_LLAMA_CPP, pairs, positions)


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_wrong_reader_is_called_wrong_and_a_right_one_right(dtype: str, tmp_path: Path) -> None:
    right, reader = write_model(tmp_path / "right.gguf", dtype), FORMATS[dtype]
    changed = patched(right, tmp_path / "wrong.gguf", reader)
    assert changed
    own = judged(right, said(right))
    assert own.verdict in ("EXACT", "TIE") and own.worst < LIMIT
    found = judged(right, said(tmp_path / "wrong.gguf"))
    assert found.verdict == "BUG"
    assert found.worst > 2 * LIMIT
