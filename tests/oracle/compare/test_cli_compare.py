"""`lfm2np compare` as it is called: what it prints, writes and refuses, and how it goes on where it broke off."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import write_model
from jsonschema import Draft202012Validator
from sides import LINES, MOE, SCHEMA, TRAINED, VALIDATOR, figures, quantised, refused, written

import lfm2np
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.text.tokenizer import load_tokenizer
from lfm2np.commands.cli import main
from lfm2np.oracle.compare.sequences import cut_at_lines, text_ids


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    for directory, name in ((TRAINED, "Q4_0"), (TRAINED, "Q8_0"), (MOE, "Q4_0")):
        quantised(directory, name, folder)
    written(folder / "r.jsonl", LINES)
    return folder


# --- what it prints


def changed(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each place of the object without a name, or with a value that is nowhere one."""
    here = value
    for step in place:
        here = here[step]
    for key in here if isinstance(here, dict) else range(len(here[:1])) if isinstance(here, list) else ():
        for wrong in ("gone", "other"):
            variant = copy.deepcopy(value)
            holder = variant
            for step in place:
                holder = holder[step]
            if wrong == "other":
                holder[key] = {"no": ["value"]}
            elif isinstance(key, str):
                del holder[key]
            else:
                continue
            yield (*place, key), variant
        yield from changed(value, (*place, key))


def test_the_schema_is_that_of_what_is_printed(files: Path, capsys: pytest.CaptureFixture[str]):
    Draft202012Validator.check_schema(SCHEMA)
    short = written(files / "odd.jsonl", [{"prompt_token_ids": [1, 20, 21, 22, 23]}, LINES[0]])
    dense = figures(capsys, TRAINED, files / "trained-Q4_0.gguf", TRAINED, "--requests", short)
    sparse = figures(capsys, MOE, files / "moe-Q4_0.gguf", "--requests", short)
    for report in (dense, sparse):
        assert [f"{list(error.path)}: {error.message}" for error in VALIDATOR.iter_errors(report)] == []
    assert sparse["quantised"][0]["listed_mismatches"]
    tried = 0
    for place, wrong in changed(sparse):
        assert not VALIDATOR.is_valid(wrong), place
        tried += 1
    assert tried > 50 and not VALIDATOR.is_valid({**dense, "more": 1})


def test_a_checkpoint_against_itself_costs_exactly_nothing(files: Path, capsys: pytest.CaptureFixture[str]):
    (comparison,) = figures(capsys, MOE, MOE, "--requests", files / "r.jsonl")["quantised"]
    assert set(comparison["kl"].values()) == {0.0}
    assert comparison["mismatches"] == {"count": 0, "clear": 0, "agreement": 1.0}
    assert comparison["perplexities"][0]["ratio"] == 1.0


def test_several_are_rows_of_one_table_and_each_is_what_it_is_alone(files: Path, capsys: pytest.CaptureFixture[str]):
    paths = [files / f"trained-{name}.gguf" for name in ("Q8_0", "Q4_0")]
    both = figures(capsys, TRAINED, *paths, "--requests", files / "r.jsonl")
    (alone,) = figures(capsys, TRAINED, paths[1], "--requests", files / "r.jsonl")["quantised"]
    assert both["quantised"][1] == alone
    page = files / "page.html"
    options = ["--requests", str(files / "r.jsonl"), "--html", str(page)]
    assert main(["compare", str(TRAINED), *map(str, paths), *options]) == 0
    said = capsys.readouterr().out
    assert f"digest     {both['digest']}" in said and "4 requests (17 positions)" in said
    rows = [line for line in said.splitlines() if line.startswith("trained-Q")]
    assert [row.split()[0] for row in rows] == ["trained-Q8_0.gguf", "trained-Q4_0.gguf"]
    read = page.read_text(encoding="utf-8")
    assert all(text in read for text in (both["digest"], "trained-Q4_0.gguf", "Token mismatches"))
    assert "default-src &#x27;none&#x27;" in read and not re.search(r"<(script|link|img)\b|(src|href)=\"[^#]", read)


def test_foreign_names_do_nothing_in_the_page(files: Path, tmp_path: Path):
    path = tmp_path / "<script>alert(1)<\u202e.gguf"
    path.write_bytes((files / "trained-Q8_0.gguf").read_bytes())
    requests = written(tmp_path / "r.jsonl", [{**LINES[1], "request_id": "<img src=x>"}])
    page = tmp_path / "page.html"
    arguments = ["compare", str(TRAINED), str(path), "--requests", requests, "--html", str(page)]
    assert main(arguments) == 0
    read = page.read_text(encoding="utf-8")
    assert "<script" not in read and "<img" not in read and "\u202e" not in read and "&lt;script&gt;" in read


def test_without_anything_to_score_the_texts_of_check_are_and_it_says_so(files: Path, capsys: Any):
    assert main(["compare", str(TRAINED), str(files / "trained-Q8_0.gguf")]) == 0
    assert "10 texts of lfm2np check (" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_costs_no_figure(files: Path, tmp_path: Path, capsys: Any):
    """A folder that is not there is refused before anything is computed; what shows only then, after it is printed."""
    both = TRAINED, files / "trained-Q8_0.gguf"
    options = ["--requests", files / "r.jsonl"]
    line = refused(capsys, "missing", "missing.gguf", "--html", tmp_path / "no" / "page.html")
    assert line.endswith(f"--html {tmp_path / 'no' / 'page.html'}: {tmp_path / 'no'}: no such directory")
    assert main(["compare", *map(str, (*both, *options)), "--html", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "digest     " in said.out and f"{tmp_path}: can't be written: " in said.err


def test_two_files_of_one_name_are_shown_by_their_paths(files: Path, tmp_path: Path, capsys: Any):
    (odd := tmp_path / "x\u202ey").mkdir()
    paths = [files / "trained-Q8_0.gguf", odd / "trained-Q8_0.gguf", files / "trained-Q4_0.gguf"]
    paths[1].write_bytes(paths[0].read_bytes())
    assert main(["compare", str(TRAINED), *map(str, paths), "--requests", str(files / "r.jsonl")]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "trained-Q" in line.split(" ")[0]]
    assert rows == [str(paths[0]), str(paths[1]).replace("\u202e", "<U+202E>"), "trained-Q4_0.gguf"]


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
    assert main(["merge", "--model", str(TRAINED), str(kept), "-o", str(tmp_path / "merged.jsonl")]) == 0


# --- what it refuses


def test_what_is_another_network_is_named(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "feed-forward: mixture of experts, expected dense, as " in refused(capsys, TRAINED, MOE)
    assert "draft: hidden_size: 64, expected 128, as " in refused(capsys, TRAINED, TRAINED.parent / "draft")
    base = write_model(tmp_path / "base")
    other = write_model(tmp_path / "other")
    raw = json.loads((other / "config.json").read_text())
    for name, value, message in (
        ("layer_types", list(reversed(raw["layer_types"])), "layer_types[0]"),
        ("norm_eps", 0.5, "norm_eps: 0.5"),
        ("rope_theta", 7.0, "rope_theta: 7.0"),
    ):
        more = {"rope_parameters": {"rope_theta": value, "rope_type": "default"}} if name == "rope_theta" else {}
        (other / "config.json").write_text(json.dumps({**raw, name: value, **more}))
        assert message in refused(capsys, base, other, code=2 if name != "layer_types" else 3) or name == "layer_types"
    (other / "config.json").write_text(json.dumps(raw))
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"<|pad|>"', '"<|pod|>"'))
    assert "token 0: '<|pod|>', expected '<|pad|>', as " in refused(capsys, base, other)


def test_the_tokens_of_a_file_s_own_tables_are_compared(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (alone := tmp_path / "alone").mkdir()
    content = (files / "trained-Q8_0.gguf").read_bytes()
    assert content.count(b"<|fim_pre|>") == 1
    (alone / "x.gguf").write_bytes(content.replace(b"<|fim_pre|>", b"<|fim_prx|>"))
    assert "token 3: '<|fim_prx|>', expected '<|fim_pre|>', as " in refused(capsys, TRAINED, alone / "x.gguf")


def test_a_scale_that_is_no_number_is_refused_before_it_is_used(files: Path, tmp_path: Path, capsys: Any):
    content = (files / "trained-Q4_0.gguf").read_bytes()
    path = files / "trained-Q4_0.gguf"
    block = read_tensors(path, read_config(path))["model.layers.1.feed_forward.w1.weight"].values.tobytes()[:18]
    assert content.count(block) == 1
    path = tmp_path / "x.gguf"
    path.write_bytes(content.replace(block, b"\x00\x7c" + block[2:]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for both in ((TRAINED, path), (path, TRAINED)):
            line = refused(capsys, *both, code=3)
            assert "x.gguf: " in line and "Q4_0 with the scale inf in block 0 of row 0" in line


def test_a_token_of_any_length_is_reported_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base, other = (write_model(tmp_path / name) for name in ("base", "other"))
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"<|pad|>"', json.dumps("<|" + "pad" * 300 + "|>")))
    line = refused(capsys, base, other)
    assert "token 0: '<|padpad" in line and len(line) < 600


def test_what_cannot_be_scored_is_named(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    both = TRAINED, files / "trained-Q8_0.gguf"
    empty = tmp_path / "empty"
    empty.write_text("")
    long = written(tmp_path / "long.jsonl", [LINES[0], {"prompt_token_ids": [5] * 1025}])
    assert "no requests, expected one JSON object a line" in refused(capsys, *both, "--requests", empty)
    assert "0 tokens, expected a text with at least one to score" in refused(capsys, *both, "--text", empty)
    assert "line 2: 1025 tokens: expected at most max_position" in refused(capsys, *both, "--requests", long)
    assert "--window 1025: expected 2 to " in refused(capsys, *both, "--text", long, "--window", 1025)
    assert "--window goes with --text" in refused(capsys, *both, "--window", 7)
    twice = written(tmp_path / "twice.jsonl", [LINES[0], LINES[0]])
    assert "two requests have one request_id: 'add'" in refused(capsys, *both, "--requests", twice)


# --- texts


def test_a_text_longer_than_the_tokenizer_takes_is_cut_at_ends_of_lines():
    model = lfm2np.load(TRAINED)
    assert list(cut_at_lines("ab\ncd\n\nefghijk\nl", 4)) == ["ab\n", "cd\n\n", "efgh", "ijk\n", "l"]
    text = "add: 34 + 58 -> 92\n" * 4000
    assert len(text) > model.tokenizer.most_characters
    tokenizer = load_tokenizer(TRAINED, model.config)
    line = tokenizer.encode_more("add: 34 + 58 -> 92\n")
    assert text_ids(tokenizer, text) == line * 4000
