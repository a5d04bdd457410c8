"""Dumps as files: shapes, dtypes and names as engines write them, files that can't be, and the command."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import PLAIN, SCALED, SPARSE, Stored, mixture, safetensors_bytes, stored
from dumps import SIX, checkpoint, recorded_under, six_heads, six_heads_with_all, stored_dump, written

from lfm2np.arithmetic.ieee import FLOAT32
from lfm2np.checkpoint.config_json import load_config
from lfm2np.commands.cli import locate as cli_locate
from lfm2np.commands.cli.program import build_parser
from lfm2np.errors import DumpError, InconclusiveError, Lfm2npError, ProofError
from lfm2np.oracle.locate.dump import Dump, read_dump
from lfm2np.oracle.locate.locate import locate
from lfm2np.oracle.locate.operations import LAYER

pytestmark = pytest.mark.rounding

# --- files as engines write them


def read(file: Path) -> Dump:
    config, _ = checkpoint(SIX)
    return read_dump(file, config)


def reshaped(name: str, values: np.ndarray) -> np.ndarray:
    """As transformers' hooks have them: a batch, heads apart, the convolution's channels first and padded."""
    if name.endswith(".conv.conv"):
        return np.concatenate([values, np.full((2, values.shape[1]), 7.0, np.float32)]).T[None]
    if name.endswith("_layernorm"):
        return values.reshape(1, len(values), -1, 10)
    return values[None]


def test_shapes_of_transformers_are_read_as_rows(tmp_path: Path) -> None:
    recorded = six_heads()
    tensors = stored_dump({name: reshaped(name, values) for name, values in recorded.items()})
    dump = read(written(tmp_path, tensors))
    for name, values in dump.tensors.items():
        assert np.array_equal(values, recorded[name]), name
    assert np.array_equal(dump.token_ids, recorded["token_ids"])


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_every_dtype_is_read_and_is_the_default_format(tmp_path: Path, dtype: str) -> None:
    config, tensors = checkpoint(SIX)
    dump = read(written(tmp_path, stored_dump(six_heads(), dtype)))
    report = locate(tensors, config, dump)
    assert report.format == {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    assert report.findings == () or dtype == "BF16"  # `stored` cuts: one spread of a rounding and nearly one more


@pytest.mark.parametrize("hidden", [-np.inf, 7.0, np.nan])
def test_scores_of_positions_that_a_row_does_not_see_are_the_engines_own(tmp_path: Path, hidden: float) -> None:
    config, tensors = checkpoint(SIX)
    recorded = dict(six_heads_with_all())
    later = np.triu(np.ones((12, 12), bool), 1)[:, None].repeat(6, 1).reshape(12, -1)
    for name in [name for name in recorded if name.endswith(".scores")]:
        recorded[name] = np.where(later, hidden, recorded[name])
    dump = read(written(tmp_path, stored_dump(recorded)))
    report = locate(tensors, config, dump, "float32")
    assert report.findings == () and max(check.error for check in report.checks) < 0.7


@pytest.mark.parametrize("dtype", ["I32", "U32", "U16", "I64"])
def test_token_ids_may_be_any_whole_numbers(tmp_path: Path, dtype: str) -> None:
    ids = six_heads()["token_ids"].tolist()
    tensors = stored_dump(six_heads()) | {"token_ids": whole(*ids, dtype=dtype, shape=(1, len(ids)))}
    assert read(written(tmp_path, tensors)).token_ids.tolist() == ids


@pytest.mark.parametrize(("dtype", "shape"), [("I64", (24, 3)), ("U8", (1, 24, 3))])
def test_a_mixtures_tensors_are_read_by_engines_shapes(tmp_path: Path, dtype: str, shape: Any) -> None:
    """Experts apart, ids of any whole numbers; attention's scores are not a router's."""
    directory = mixture(SCALED)
    config, tensors = checkpoint(directory)
    recorded = recorded_under(directory, FLOAT32)
    outputs = recorded[f"{SPARSE}.expert_outputs"].reshape(24, 3, 32)
    ids = recorded[f"{SPARSE}.experts_chosen"]
    renamed = stored_dump({name: value for name, value in recorded.items() if not name.endswith("_chosen")})
    renamed[f"{SPARSE}.expert_outputs"] = stored(outputs, "F32")
    renamed[f"{SPARSE}.experts_chosen"] = whole(*ids.ravel().astype(int), dtype=dtype, shape=shape)
    dump = read_dump(written(tmp_path, renamed), config)
    assert np.array_equal(dump.tensors[f"{SPARSE}.experts_chosen"], ids)
    assert np.array_equal(dump.tensors[f"{SPARSE}.scores"], recorded[f"{SPARSE}.scores"])
    report = locate(tensors, config, dump)
    assert (report.findings, report.format, report.narrower) == ((), "float32", None)


# --- files that can't be


IDS: Stored = ("I64", (2,), np.array([1, 2], "<i8").tobytes())
NORM = "model.layers.0.operator_norm"


def zeros(*shape: int, dtype: str = "F32") -> Stored:
    return stored(np.zeros(shape, np.float32), dtype)


def whole(*numbers: int, dtype: str = "I64", shape: tuple[int, ...] | None = None) -> Stored:
    values = np.array(numbers, f"<{dtype[0].lower()}{int(dtype[1:]) // 8}")
    return dtype, shape or values.shape, values.tobytes()


CONV, KEYS, STATE = "model.layers.0.conv.conv", "model.layers.1.self_attn.keys_read", "model.layers.0.conv.state"
REFUSED: list[tuple[dict[str, Stored], str]] = [
    ({"token_ids": zeros(2)}, "token_ids: dtype F32, expected whole numbers"),
    ({"token_ids": ("I64", (0,), b"")}, r"shape \(0,\), expected \(T,\) or \(1, T\) with at least one"),
    ({"token_ids": whole(1, 101)}, "101 at 1, expected ids below vocab_size"),
    ({"token_ids": whole(-1, 1)}, "-1 at 0, expected ids below"),
    ({"token_ids": ("U8", (1025,), bytes(1025))}, "1025 tokens, expected at most max_position_embeddings=1024"),
    ({NORM: zeros(3, 48)}, r"shape \(3, 48\), expected \[2, 48\] for T=2"),
    ({NORM: zeros(2, 2, 48)}, r"shape \(2, 2, 48\), expected"),
    ({NORM: zeros(2, 48, dtype="I8")}, "dtype I8, expected numbers of F64, F32, F16, BF16"),
    ({CONV: zeros(48, 5)}, r"shape \(48, 5\), expected \[2, 48\] or \[48, 4\]"),
    ({"a": zeros(1), "b": zeros(1)}, r"none of its 2 names is known \(a, b\): expected model.emb"),
    ({"steps": whole(1, 2), NORM: zeros(2, 48)}, "steps: 1, 2, 3 in sum, expected .* in sum at most T=2"),
    ({"steps": whole(2, 0)}, "steps: 2, 0, 2 in sum, expected rows of each step, each at least 1"),
    ({"steps": whole(1), NORM: zeros(3, 48)}, r"expected \[1, 48\] for T=2 in steps of 1 rows"),
    ({"steps": whole(1, 1), KEYS: zeros(2, 20)}, r"expected \[3, 20\] for T=2 in steps of 1, 1 rows"),
    ({"steps": whole(1, 1), STATE: zeros(1, 96)}, r"expected \[2, 96\]"),
    ({"token_ids": whole(1, 2, 3), "steps": whole(1, 2), "lm_head": zeros(2, 101)}, "lm_head: 2 rows .* are ambiguous"),
]


@pytest.mark.parametrize(("tensors", "fragment"), REFUSED)
def test_a_dump_that_cannot_be_is_an_error_that_says_why(tmp_path: Path, tensors: Any, fragment: str) -> None:
    with pytest.raises(DumpError, match=fragment):
        read(written(tmp_path, {"token_ids": IDS, **tensors}))


def test_a_dump_without_tokens_and_one_with_other_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="no tensor token_ids, expected the whole numbers"):
        read(written(tmp_path, {NORM: zeros(2, 48)}))
    name, config = f"{SPARSE}.experts_chosen", checkpoint(mixture(PLAIN))[0]
    for content, expected in (
        (zeros(2, 3), "dtype F32, expected whole numbers"),
        (whole(*[0] * 6, shape=(2, 3)), r"shape \(2, 3\), expected \[2, 2\]"),
    ):
        with pytest.raises(DumpError, match=f"{name}: {expected}"):
            read_dump(written(tmp_path, {"token_ids": IDS, name: content}), config)


UNSOUND = (b"", b"nothing", b"\xff" * 64, safetensors_bytes({"token_ids": IDS})[:-3])


def test_a_file_that_is_no_safetensors_or_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "dump.safetensors"
    for content in UNSOUND:
        file.write_bytes(content)
        with pytest.raises(DumpError, match="not a sound safetensors file"):
            read(file)
    for place in ("missing", ".", "nul\0"):
        with pytest.raises(DumpError, match="cannot be read"):
            read(tmp_path / place)


# --- the command


def command(capsys: pytest.CaptureFixture[str], *arguments: str, as_object: bool = False) -> tuple[int, str, str]:
    """Exit code, what it printed, and the error's text."""
    model = [] if "--model" in arguments else ["--model", str(SIX)]
    words = ["locate", *model, *arguments, *(["--json"] if as_object else [])]
    code, message = 0, ""
    try:
        cli_locate.run(build_parser("locate").parse_args(words))
    except Lfm2npError as error:
        code, message = error.exit_code, str(error)
    return code, capsys.readouterr().out, message


def test_the_command_says_that_nothing_exceeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, stored_dump(six_heads()))
    code, text, _ = command(capsys, str(file))
    assert code == 0
    assert text.startswith("verdict    nothing exceeds its bound\n")
    assert "dump       12 tokens, float32\nchecked    63 tensors against their inputs; " in text
    code, text, _ = command(capsys, str(file), as_object=True)
    answer = json.loads(text)
    assert (code, answer["figures"]["conclusive"], answer["findings"]) == (0, True, [])
    assert len(answer["figures"]["checks"]) == 63


def test_the_command_names_the_first_wrong_tensor_and_the_others(tmp_path: Path, capsys: Any) -> None:
    recorded = {name: head.copy() for name, head in six_heads().items()}
    recorded["model.layers.1.self_attn.attended"][5:, 10:20] *= 1.5
    recorded["model.layers.3.ffn_norm"][0, 0] = np.nan
    for part in ("k_layernorm", "k_rotated"):
        del recorded[f"model.layers.1.self_attn.{part}"]
    file = written(tmp_path, stored_dump(recorded))
    code, text, message = command(capsys, str(file))
    assert code == ProofError.exit_code == 1
    assert message.startswith("WRONG: model.layers.1.self_attn.attended: ")
    for line in (
        "first wrong tensor  model.layers.1.self_attn.attended (layer 1)",
        "operation           causal attention",
        "rows                from row 5 on, right for rows 0 to 4",
        "channels            head 1 of 6",
        "or before it, in    model.layers.1.self_attn.k_layernorm, model.layers.1.self_attn.k_rotated"
        " (not dumped: dump them to tell)",
        "           model.layers.3.ffn_norm: not what its inputs make: only the first row, 0; channel 0 of 48",
    ):
        assert line in text.splitlines()
    code, text, _ = command(capsys, str(file), as_object=True)
    assert code == 1
    assert [finding["evidence"]["error"] for finding in json.loads(text)["findings"]][-1] == "inf"


def test_the_command_calls_too_little_inconclusive(tmp_path: Path, capsys: Any) -> None:
    ids = {"token_ids": stored_dump(six_heads())["token_ids"]}
    code, _, message = command(capsys, str(written(tmp_path, ids)))
    assert (code, InconclusiveError.exit_code) == (2, 2)
    assert "no tensor behind model.embed_tokens is dumped" in message
    logits = ids | {"lm_head": stored_dump(six_heads())["lm_head"]}
    code, _, message = command(capsys, str(written(tmp_path, logits)), "--format", "bfloat16")
    assert code == 2
    assert "too little is dumped before lm_head to judge it" in message


def test_the_command_warns_of_unknown_names_and_refuses_bad_files(tmp_path: Path, capsys: Any) -> None:
    file = written(tmp_path, stored_dump(six_heads()) | {"model.layers.0.mystery": zeros(1)})
    with pytest.warns(UserWarning, match="1 unknown names: model.layers.0.mystery"):
        assert command(capsys, str(file))[0] == 0
    assert command(capsys, str(tmp_path / "nothing"))[0] == 3
    assert command(capsys, str(file), "--model", str(tmp_path / "nothing"))[0] == 3


def test_logits_of_the_last_token_alone_are_judged(tmp_path: Path) -> None:
    config, tensors = checkpoint(SIX)
    recorded = six_heads() | {"lm_head": six_heads()["lm_head"][-1:].copy()}
    assert locate(tensors, config, read(written(tmp_path, stored_dump(recorded)))).findings == ()
    recorded["lm_head"][0, 5] += 1.0
    (finding,) = locate(tensors, config, read(written(tmp_path, stored_dump(recorded)))).findings
    assert (finding.row, finding.channel, finding.rows) == (11, 5, "the last row, 11")


# --- the writers of fixtures/dumps, compiled where there is a compiler; names on the page


TOP = Path(__file__).parents[3]
PAGE = (TOP / "docs" / "engine" / "7-locate.md").read_text(encoding="utf-8")
COMPILERS = {
    "main.cpp": ("g++", "-std=c++11", "-Wall", "-Werror"),
    "dump.rs": ("rustc", "--edition=2021", "-D", "warnings"),
}


@pytest.mark.slow
@pytest.mark.parametrize("source", COMPILERS)
def test_the_writer_compiles_and_writes_a_dump(source: str, tmp_path: Path) -> None:
    command = COMPILERS[source]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    subprocess.run([*command, TOP / "fixtures" / "dumps" / source, "-o", "writer"], cwd=tmp_path, check=True)
    subprocess.run([tmp_path / "writer"], cwd=tmp_path, check=True)
    dump = read_dump(tmp_path / "dump.safetensors", load_config(TOP / "fixtures" / "trained"))
    assert (dump.token_ids.tolist(), dump.sizes, dump.format, dump.unknown) == ([5, 6, 7], (2, 1), "float32", ())
    assert dump.stored == {"model.layers.0": "float32"}
    assert np.array_equal(dump.tensors["model.layers.0"], np.full((3, 128), 0.5))


def test_the_page_lists_every_name_that_a_dump_may_have() -> None:
    listed = re.sub(r"\[.*", "", PAGE.partition("## The dump")[2].partition("## Recorded")[0])
    words = {word.rstrip(",").rpartition(".")[2] for line in listed.splitlines() for word in line.split()}
    assert {part.rpartition(".")[2] for part in {name for name, *_ in LAYER}} <= words
