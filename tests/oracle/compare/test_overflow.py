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
from lfm2np.oracle.compare.comparison_report import ratio_cell


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
        report = json.loads(said.out)["figures"]
        (failure,) = report["failed"]
        assert (
            failure.startswith(f"requests 1: {other}: a logit in compared row 1 is not finite") and failure in said.err
        )
        assert (report["quantised"][0]["failed"], report["quantised"][0]["positions"]) == (1, 2)
    seven = written(tmp_path / "seven.jsonl", [{"prompt_token_ids": [7]}])
    line = refused(capsys, base, other, "--requests", seven, "--by", "none", code=4)
    assert f"no sequence can be computed, requests 0: {other}: a logit in compared row 0 is not finite" in line
    line = refused(capsys, other, base, "--requests", seven, "--max-tokens", 2, code=4)
    assert f"{other}: " in line and "overflow exact" in line


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


@pytest.mark.parametrize("by", ["none", "layer", "tensor"])
def test_a_comparison_without_a_computed_sequence_says_so(by: str, tmp_path: Path, capsys: Any):
    base, bad, _ = three_sides(tmp_path)
    seven = written(tmp_path / "seven.jsonl", [{"prompt_token_ids": [7]}])
    line = refused(capsys, base, bad, "--requests", seven, "--by", by, code=4)
    assert f"no sequence can be computed, requests 0: {bad}: a logit in compared row 0 is not finite" in line


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_checkpoint_that_overflows_everywhere_costs_the_others_nothing(
    order: tuple[int, int], tmp_path: Path, capsys: Any
):
    sides = three_sides(tmp_path)
    seven = written(tmp_path / "seven.jsonl", [{"prompt_token_ids": [7]}])
    page = tmp_path / "page.html"
    options = ["--requests", seven, "--max-tokens", "3", "--html", str(page)]
    (alone,) = figures(capsys, sides[0], sides[2], *options)["quantised"]
    paths = [sides[number] for number in order]
    report = figures(capsys, sides[0], *paths, *options, code=4)
    assert [f"{list(error.path)}: {error.message}" for error in VALIDATOR.iter_errors(report)] == []
    good, bad = (report["quantised"][order.index(number)] for number in (2, 1))
    assert good == alone and good["greedy"]["requests"] == 1
    assert (bad["positions"], bad["failed"], bad["greedy"], bad["layers"]) == (0, 2, None, [])
    assert set(bad["kl"].values()) == {None} and bad["flips"]["agreement"] is None
    assert all(part["kl"] is None for part in bad["parts"] if part["changed"])
    assert [message.split(": a logit")[0] for message in report["failed"]] == [
        f"{n} 0: {sides[1]}" for n in ("requests", "greedy")
    ]
    assert main(["compare", *map(str, (sides[0], *paths)), *options]) == 4
    said = capsys.readouterr()
    assert f"2 sequences can't be computed, first requests 0: {sides[1]}: a logit" in said.err
    lines = [line.split() for line in said.out.splitlines()]
    (differ,) = (line for line in lines if line[:3] == ["answers", "that", "differ"])
    assert "-" in differ and str(good["greedy"]["diverged"]) in differ
    (embedding,) = (line for line in lines if line[:2] == ["final", "norm"] and len(line) == 4)
    assert embedding[1 + order.index(1) + 1] == "-"
    assert page.read_text().count("<svg") == 1


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


@pytest.mark.parametrize("by", ["layer", "tensor"])
def test_a_part_that_overflows_alone_is_null_and_all_else_is_reported(by: str, tmp_path: Path, capsys: Any):
    """Powers of two: both have the same logits; only the norm of one with the head of the other overflows."""
    base, other = (write_model(tmp_path / name) for name in ("base", "other"))
    scaled(base, 2.0**100, 2.0**-100)
    scaled(other, 2.0**-40, 2.0**40)
    requests = written(tmp_path / "r.jsonl", [{"prompt_token_ids": [1, 2, 5]}])
    page = tmp_path / "page.html"
    options = ["--requests", requests, "--by", by, "--html", str(page)]
    report = figures(capsys, base, other, *options)
    assert [f"{list(error.path)}: {error.message}" for error in VALIDATOR.iter_errors(report)] == []
    (comparison,) = report["quantised"]
    assert (comparison["failed"], comparison["positions"], set(comparison["kl"].values())) == (0, 3, {0.0})
    norm, head = (part for part in comparison["parts"] if part["changed"])
    assert (norm["kl"], norm["largest"], norm["flips"]) == (None, None, None) and head["kl"] >= 0.0
    assert main(["compare", str(base), str(other), *options]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(norm["name"])]
    assert rows[-1][-1] == "-" and page.exists()


def test_a_perplexity_beyond_float64_is_null(tmp_path: Path, capsys: Any):
    base, other = (write_model(tmp_path / name) for name in ("base", "other"))
    scaled(base, 1.0, 1.0)
    scaled(other, 2.0**30, 1.0)
    requests = written(tmp_path / "r.jsonl", [{"prompt_token_ids": [1, 2], "completion_token_ids": [5, 7, 9]}])
    options = ["--requests", requests, "--by", "none"]
    report = figures(capsys, base, other, *options)
    assert [f"{list(error.path)}: {error.message}" for error in VALIDATOR.iter_errors(report)] == []
    (perplexity,) = report["quantised"][0]["perplexities"]
    assert perplexity["base"] > 1.0 and (perplexity["quantised"], perplexity["ratio"]) == (None, None)
    assert main(["compare", str(base), str(other), *options]) == 0
    said = capsys.readouterr().out
    (row,) = (line.split() for line in said.splitlines() if line.startswith("other "))
    assert row[-2:] == ["-", "-"]
    (row,) = (line.split() for line in said.splitlines() if line.startswith("requests: base "))
    assert row[-1] == "-"


def test_a_ratio_has_six_digits_where_it_is_large():
    assert [ratio_cell(value) for value in (1.00002, 999.0, 12345678.0, None)] == [
        "1.00002",
        "999.00000",
        "1.23457e+07",
        "-",
    ]
