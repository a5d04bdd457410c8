"""`lfm2np compare` where numbers overflow: what is named, and that nothing else is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import raw_config, safetensors_bytes, stored, stored_weights, tiny_config, write_model
from sides import refused, written

from lfm2np.cli import main


def overflowing_at_token_seven(directory: Path) -> None:
    """Only its embedding makes a state that lies in one dimension, and there one row of the head is near the end."""
    tensors = stored_weights(tiny_config(tie_word_embeddings=False))
    for name, token_id, value in (("model.embed_tokens.weight", 7, 1e4), ("lm_head.weight", 290, 1e38)):
        kind, shape, content = tensors[name]
        row = stored(np.eye(1, shape[1], dtype=np.float32) * value, "BF16")[2]
        tensors[name] = kind, shape, content[: token_id * len(row)] + row + content[(token_id + 1) * len(row) :]
    tensors["model.embedding_norm.weight"] = stored(np.ones(16, np.float32), "BF16")
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))


def test_a_sequence_that_overflows_is_named_and_the_others_are_shown(tmp_path: Path, capsys: Any):
    base, other = (write_model(tmp_path / name) for name in ("base", "other"))
    for directory in (base, other):
        (directory / "config.json").write_text(json.dumps(raw_config(tie_word_embeddings=False)))
    weights = stored_weights(tiny_config(tie_word_embeddings=False))
    (base / "model.safetensors").write_bytes(safetensors_bytes(weights))
    overflowing_at_token_seven(other)
    requests = written(tmp_path / "r.jsonl", [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [5, 7]}])
    for by in ("none", "layer"):
        assert main(["compare", str(base), str(other), "--requests", requests, "--by", by, "--json"]) == 4
        said = capsys.readouterr()
        found = json.loads(said.out)
        (failure,) = found["failed"]
        assert failure.startswith("requests 1: a logit in compared row 1 is not finite") and failure in said.err
        assert (found["quantised"][0]["failed"], found["quantised"][0]["positions"]) == (1, 2)
    seven = written(tmp_path / "seven.jsonl", [{"prompt_token_ids": [7]}])
    line = refused(capsys, base, other, "--requests", seven, "--by", "none", code=4)
    assert "other: no sequence can be computed, requests 0: a logit in compared row 0 is not finite" in line
    line = refused(capsys, other, base, "--requests", seven, "--max-tokens", 2, code=4)
    assert "overflow exact" in line


def test_a_base_whose_logits_overflow_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """All its states are finite, as is the other network."""
    base, other = (write_model(tmp_path / name) for name in ("base", "other"))
    weights = stored_weights(tiny_config())
    for name, factor in (("model.embed_tokens.weight", 2.0**66), ("model.embedding_norm.weight", 2.0**62)):
        kind, shape, content = weights[name]
        assert kind == "BF16"
        wide = (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
        weights[name] = stored(wide.reshape(shape) * np.float32(factor), "BF16")
    (base / "model.safetensors").write_bytes(safetensors_bytes(weights))
    requests = written(tmp_path / "r.jsonl", [{"prompt_token_ids": [1, 2]}])
    line = refused(capsys, base, other, "--requests", requests, "--by", "none", code=4)
    assert "a logit in compared row 0 is not finite" in line
