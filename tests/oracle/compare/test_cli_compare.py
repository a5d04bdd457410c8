"""`lfm2np compare` as it is called: what it prints, writes and refuses, and how it goes on where it broke off."""

from __future__ import annotations

import json
import warnings
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
from sides import LINES, MOE, TRAINED, figures, refused, written

import lfm2np
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.text.tokenizer import load_tokenizer
from lfm2np.commands.cli import main
from lfm2np.oracle.compare.sequences import cut_at_lines, text_ids

pytestmark = pytest.mark.slow


# --- what it prints


def test_a_checkpoint_against_itself_costs_exactly_nothing(files: Path, capsys: pytest.CaptureFixture[str]):
    (comparison,) = figures(capsys, MOE, MOE, "--requests", files / "r.jsonl")["quantised"]
    assert set(comparison["kl"].values()) == {0.0}
    assert comparison["mismatches"] == {"count": 0, "clear": 0, "agreement": 1.0}
    assert comparison["perplexities"][0]["ratio"] == 1.0


def test_several_are_rows_of_one_table_and_each_is_what_it_is_alone(files: Path, tmp_path: Path, capsys: Any):
    """Files of one name are shown by their paths."""
    (odd := tmp_path / "x\u202ey").mkdir()
    paths = [files / "trained-Q8_0.gguf", files / "trained-Q4_0.gguf", odd / "trained-Q8_0.gguf"]
    paths[2].write_bytes(paths[0].read_bytes())
    both = figures(capsys, TRAINED, *paths, "--requests", files / "r.jsonl")
    (alone,) = figures(capsys, TRAINED, paths[1], "--requests", files / "r.jsonl")["quantised"]
    assert both["quantised"][1] == alone
    page = files / "page.html"
    options = ["--requests", str(files / "r.jsonl"), "--report", str(page)]
    assert main(["compare", str(TRAINED), *map(str, paths), *options]) == 0
    said = capsys.readouterr().out
    assert f"digest     {both['digest']}" in said and "4 requests (17 positions)" in said
    rows = [line.split()[:2] for line in said.splitlines() if "trained-Q" in line and "requests" not in line.split()[1]]
    names = [str(paths[0]), "trained-Q4_0.gguf", str(paths[2]).replace("\u202e", "<U+202E>")]
    assert rows[-3:] == [[names[0], "8.58"], [names[1], "4.59"], [names[2], "8.58"]]
    read = page.read_text(encoding="utf-8")
    assert all(text in read for text in (both["digest"], "trained-Q4_0.gguf", "Perplexity")) and "\u202e" not in read


def test_a_page_that_cannot_be_written_costs_no_figure(files: Path, capsys: Any):
    """What shows only when it is written: after it is printed."""
    (full := files / "full.html").symlink_to("/dev/full")
    words = (TRAINED, files / "trained-Q8_0.gguf", "--requests", files / "r.jsonl", "--report", full)
    assert main(["compare", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert "digest     " in said.out and f"{full}: can't be written: " in said.err


# --- where it is computed


def test_it_goes_on_where_it_broke_off_and_workers_find_the_same(files: Path, tmp_path: Path, capsys: Any):
    path, kept = files / "trained-Q8_0.gguf", tmp_path / "kept.jsonl"
    options = [TRAINED, path, "--requests", files / "r.jsonl", "--save", kept]
    expected = figures(capsys, *options)
    lines = kept.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    kept.write_text("".join(lines[:-2]))
    assert figures(capsys, *options)["digest"] == expected["digest"]
    assert sorted(kept.read_text().splitlines(keepends=True)) == sorted(lines)
    kept.unlink()
    again = figures(capsys, *options, "--workers", 1, "--weights", "streamed")
    assert again["quantised"] == expected["quantised"]
    assert main(["score", "--model", str(TRAINED), "--merge", str(kept), "-o", str(tmp_path / "merged.jsonl")]) == 0


# --- what it refuses


def test_what_is_another_network_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "feed-forward: mixture of experts, expected dense, as " in refused(capsys, TRAINED, MOE)
    assert "draft: hidden_size: 64, expected 128, as " in refused(capsys, TRAINED, TRAINED.parent / "draft")
    base, other = (write_model(tmp_path / name) for name in ("base", "other"))
    raw = json.loads((other / "config.json").read_text())
    theta = {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}
    for fields, message in (({"norm_eps": 0.5}, "norm_eps: 0.5, expected 1e-05"), (theta, "rope_theta: 7.0")):
        (other / "config.json").write_text(json.dumps({**raw, **fields}))
        assert message in refused(capsys, base, other)


def test_tokens_of_other_names_are_named_in_a_line_of_any_length(files: Path, tmp_path: Path, capsys: Any):
    base, other = (write_model(tmp_path / name) for name in ("base", "other"))
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"<|pad|>"', json.dumps("<|" + "pad" * 300 + "|>")))
    line = refused(capsys, base, other)
    assert "token 0: '<|padpad" in line and line.endswith(f"'<|pad|>', as {base} has it") and len(line) < 600
    content = (files / "trained-Q8_0.gguf").read_bytes()
    assert content.count(b"<|fim_pre|>") == 1  # in the file's own table
    (tmp_path / "x.gguf").write_bytes(content.replace(b"<|fim_pre|>", b"<|fim_prx|>"))
    assert "token 3: '<|fim_prx|>', expected '<|fim_pre|>', as " in refused(capsys, TRAINED, tmp_path / "x.gguf")


def test_a_scale_that_is_no_number_is_refused_before_it_is_used(files: Path, tmp_path: Path, capsys: Any):
    content = (files / "trained-Q4_0.gguf").read_bytes()
    path = files / "trained-Q4_0.gguf"
    [blocks] = read_tensors(path, read_config(path))["model.layers.1.feed_forward.w1.weight"].arrays
    block = blocks.tobytes()[:18]
    assert content.count(block) == 1
    path = tmp_path / "x.gguf"
    path.write_bytes(content.replace(block, b"\x00\x7c" + block[2:]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for both in ((TRAINED, path), (path, TRAINED)):
            line = refused(capsys, *both, "--requests", files / "r.jsonl", code=3)
            assert "x.gguf: " in line and "Q4_0 with the scale inf in block 0 of row 0" in line


def test_what_cannot_be_scored_is_named(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    both = TRAINED, files / "trained-Q8_0.gguf"
    (empty := tmp_path / "empty").write_text("")
    long = written(tmp_path / "long.jsonl", [LINES[0], {"prompt_token_ids": [5] * 1025}])
    twice = written(tmp_path / "twice.jsonl", [LINES[0], LINES[0]])
    for options, message in (
        (("--requests", empty), "no requests, expected one JSON object a line"),
        (("--text", empty), "0 tokens, expected a text with at least one to score"),
        (("--requests", long), "line 2: 1025 tokens: expected at most max_position"),
        (("--text", long, "--window", 1025), "--window 1025: expected 2 to "),
        (("--window", 7), "--window goes with --text"),
        ((), "nothing to score: expected --requests or --text"),
        (("--requests", twice), "two requests have one request_id: 'add'"),
    ):
        assert message in refused(capsys, *both, *options)


# --- texts


def test_a_text_longer_than_the_tokenizer_takes_is_cut_at_ends_of_lines():
    model = lfm2np.load(TRAINED)
    assert list(cut_at_lines("ab\ncd\n\nefghijk\nl", 4)) == ["ab\n", "cd\n\n", "efgh", "ijk\n", "l"]
    text = "add: 34 + 58 -> 92\n" * 4000
    assert len(text) > model.tokenizer.most_characters
    tokenizer = load_tokenizer(TRAINED, model.config)
    line = tokenizer.encode_more("add: 34 + 58 -> 92\n")
    assert text_ids(tokenizer, text) == line * 4000


# --- where numbers overflow: what is named, and that nothing else is lost


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_what_overflows_is_named_and_costs_the_others_nothing(order: tuple[int, int], tmp_path: Path, capsys: Any):
    """A sequence of one checkpoint, then all of them. In `bad` whatever has token 7 overflows, in `good` nothing."""
    sides = [write_model(tmp_path / name) for name in ("base", "bad", "good")]
    for directory in sides:
        (directory / "config.json").write_text(json.dumps(raw_config(tie_word_embeddings=False)))
    weights = stored_weights(tiny_config(tie_word_embeddings=False))
    (sides[0] / "model.safetensors").write_bytes(safetensors_bytes(weights))
    weights["lm_head.weight"] = stored(np.eye(*weights["lm_head.weight"][1], dtype=np.float32), "BF16")
    (sides[2] / "model.safetensors").write_bytes(safetensors_bytes(weights))
    overflowing_at_token_seven(sides[1])
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
