"""`lfm2np compare` where numbers overflow: what is named, and that nothing else is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import raw_config, safetensors_bytes, stored, stored_weights, tiny_config, write_model
from sides import VALIDATOR, figures, refused, written

from lfm2np.commands.cli import main


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
    assert main(["compare", str(base), str(other), "--requests", requests, "--json"]) == 4
    said = capsys.readouterr()
    report = json.loads(said.out)["figures"]
    (failure,) = report["failed"]
    assert failure.startswith(f"requests 1: {other}: a logit in compared row 1 is not finite") and failure in said.err
    assert (report["quantised"][0]["failed"], report["quantised"][0]["positions"]) == (1, 2)
    seven = written(tmp_path / "seven.jsonl", [{"prompt_token_ids": [7]}])
    line = refused(capsys, base, other, "--requests", seven, code=4)
    assert f"no sequence can be computed, requests 0: {other}: a logit in compared row 0 is not finite" in line


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
    line = refused(capsys, base, other, "--requests", requests, code=4)
    assert f"requests 0: {base}: a logit in compared row 0 is not finite" in line


def three_sides(tmp_path: Path) -> list[Path]:
    """A base, another in which whatever has token 7 overflows, and one of other numbers in which nothing does."""
    base, bad, good = (write_model(tmp_path / name) for name in ("base", "bad", "good"))
    for directory in (base, bad, good):
        (directory / "config.json").write_text(json.dumps(raw_config(tie_word_embeddings=False)))
    weights = stored_weights(tiny_config(tie_word_embeddings=False))
    (base / "model.safetensors").write_bytes(safetensors_bytes(weights))
    shape = weights["lm_head.weight"][1]
    weights["lm_head.weight"] = stored(np.eye(*shape, dtype=np.float32), "BF16")
    (good / "model.safetensors").write_bytes(safetensors_bytes(weights))
    overflowing_at_token_seven(bad)
    return [base, bad, good]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_checkpoint_that_overflows_everywhere_costs_the_others_nothing(
    order: tuple[int, int], tmp_path: Path, capsys: Any
):
    sides = three_sides(tmp_path)
    seven = written(tmp_path / "seven.jsonl", [{"prompt_token_ids": [7]}])
    both = written(tmp_path / "both.jsonl", [{"prompt_token_ids": [7]}, {"prompt_token_ids": [5, 3, 9]}])
    options = ["--requests", both]
    (alone,) = figures(capsys, sides[0], sides[2], *options)["quantised"]
    paths = [sides[number] for number in order]
    report = figures(capsys, sides[0], *paths, *options, code=4)
    assert [f"{list(error.path)}: {error.message}" for error in VALIDATOR.iter_errors(report)] == []
    good, bad = (report["quantised"][order.index(number)] for number in (2, 1))
    assert good == alone and (bad["positions"], bad["failed"]) == (3, 1)
    report = figures(capsys, sides[0], *paths, "--requests", seven, code=4)
    assert [f"{list(error.path)}: {error.message}" for error in VALIDATOR.iter_errors(report)] == []
    bad = report["quantised"][order.index(1)]
    assert (bad["positions"], bad["failed"], bad["perplexities"]) == (0, 1, [])
    assert set(bad["kl"].values()) == {None} and bad["mismatches"]["agreement"] is None
    assert [message.split(": a logit")[0] for message in report["failed"]] == [f"requests 0: {sides[1]}"]


def scaled(directory: Path, head: float, norm: float) -> None:
    """The tiny model with its head times one number and a last norm of another."""
    weights = stored_weights(tiny_config(tie_word_embeddings=False))
    for name, factor in (("lm_head.weight", head), ("model.embedding_norm.weight", norm)):
        _, shape, content = weights[name]
        wide = (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        wide = np.ones_like(wide) if name == "model.embedding_norm.weight" else wide
        weights[name] = stored(wide * np.float32(factor), "BF16")
    (directory / "config.json").write_text(json.dumps(raw_config(tie_word_embeddings=False)))
    (directory / "model.safetensors").write_bytes(safetensors_bytes(weights))


def test_a_perplexity_beyond_float64_is_null(tmp_path: Path, capsys: Any):
    base, other = (write_model(tmp_path / name) for name in ("base", "other"))
    scaled(base, 1.0, 1.0)
    scaled(other, 2.0**30, 1.0)
    requests = written(tmp_path / "r.jsonl", [{"prompt_token_ids": [1, 2], "completion_token_ids": [5, 7, 9]}])
    options = ["--requests", requests]
    report = figures(capsys, base, other, *options)
    assert [f"{list(error.path)}: {error.message}" for error in VALIDATOR.iter_errors(report)] == []
    (perplexity,) = report["quantised"][0]["perplexities"]
    assert perplexity["base"] > 1.0 and (perplexity["quantised"], perplexity["ratio"]) == (None, None)
    assert main(["compare", str(base), str(other), *options]) == 0
    said = capsys.readouterr().out
    (row,) = (line.split() for line in said.splitlines() if line.startswith("other "))
    assert row[-2:] == ["-", "-"]
    (row,) = (line.split() for line in said.splitlines() if line.startswith("requests "))
    assert row[-1] == "-"
