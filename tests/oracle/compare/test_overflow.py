"""`lfm2np compare` where numbers overflow: what is named, and that nothing else is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    overflowing_at_token_seven,
    raw_config,
    safetensors_bytes,
    stored,
    stored_weights,
    tiny_config,
    write_model,
)
from sides import figures, refused, written

from lfm2np.commands.cli import main


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
def test_what_overflows_is_named_and_costs_the_others_nothing(order: tuple[int, int], tmp_path: Path, capsys: Any):
    """A sequence of one checkpoint, then all of them."""
    sides = three_sides(tmp_path)
    seven, both = [{"prompt_token_ids": [7]}], [{"prompt_token_ids": [7]}, {"prompt_token_ids": [5, 3, 9]}]
    options = ["--requests", written(tmp_path / "both.jsonl", both)]
    (alone,) = figures(capsys, sides[0], sides[2], *options)["quantised"]
    paths = [sides[number] for number in order]
    report = figures(capsys, sides[0], *paths, *options, code=4)
    good, bad = (report["quantised"][order.index(number)] for number in (2, 1))
    assert good == alone and (bad["positions"], bad["failed"]) == (3, 1)
    options = ["--requests", written(tmp_path / "seven.jsonl", seven)]
    report = figures(capsys, sides[0], *paths, *options, code=4)
    bad = report["quantised"][order.index(1)]
    assert (bad["positions"], bad["failed"], bad["perplexities"]) == (0, 1, [])
    assert set(bad["kl"].values()) == {None} and bad["mismatches"]["agreement"] is None
    (failure,) = report["failed"]
    assert failure.startswith(f"requests 0: {sides[1]}: a logit in compared row 0 is not finite")
    assert f"no sequence can be computed, {failure}" in refused(capsys, sides[0], sides[1], *options, code=4)
    assert failure in refused(capsys, sides[1], sides[0], *options, code=4)


def test_a_perplexity_beyond_float64_is_null(tmp_path: Path, capsys: Any):
    """The other's head is 2**30 times the base's."""
    base, other = (write_model(tmp_path / name) for name in ("base", "other"))
    for directory, factor in ((base, 1.0), (other, 2.0**30)):
        weights = stored_weights(tiny_config(tie_word_embeddings=False))
        _, shape, content = weights["lm_head.weight"]
        wide = (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        weights["lm_head.weight"] = stored(wide * np.float32(factor), "BF16")
        (directory / "config.json").write_text(json.dumps(raw_config(tie_word_embeddings=False)))
        (directory / "model.safetensors").write_bytes(safetensors_bytes(weights))
    requests = written(tmp_path / "r.jsonl", [{"prompt_token_ids": [1, 2], "completion_token_ids": [5, 7, 9]}])
    report = figures(capsys, base, other, "--requests", requests)
    (perplexity,) = report["quantised"][0]["perplexities"]
    assert perplexity["base"] > 1.0 and (perplexity["quantised"], perplexity["ratio"]) == (None, None)
    assert main(["compare", str(base), str(other), "--requests", requests]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[-2:] for row in rows if row[:2] == ["other", "requests"]] == [["-", "-"]]
