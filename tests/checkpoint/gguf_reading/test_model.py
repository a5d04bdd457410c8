"""A model from a GGUF file: that of a checkpoint with the same numbers, bit for bit, no weight rounded on the way; what
commands say of it, and how it judges: noise, operations and vectors are those of its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks_drawn import quantised_tensors, random_rows
from builders import raw_config, raw_mixture, safetensors_bytes, stored
from gguf_file import Tensor, gguf_bytes, model_keys, model_tensors
from truths import truth_of
from vocabularies import keys_of, write_directory, write_file

import lfm2np
from lfm2np.arithmetic import NAMES, exact
from lfm2np.checkpoint.config_json import load_config, parse_config
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.gguf.ggml_types import QUANTISED, values_of
from lfm2np.checkpoint.stored import widen
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import joined, stored_rows
from lfm2np.commands.cli import main
from lfm2np.engine.loading import Model
from lfm2np.engine.work.place import model_of, source_of
from lfm2np.errors import CheckpointError
from lfm2np.oracle.judging.emulate import emulated
from lfm2np.oracle.judging.noise import noise_of
from lfm2np.oracle.judging.verdict import LIMIT, root_mean_square
from lfm2np.oracle.locate.spread import PRECISIONS, as_kept
from lfm2np.oracle.vectors.golden import make, model_facts, verify
from lfm2np.truth import reference
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import matrix_parts

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[3] / "fixtures"
TRAINED = FIXTURES / "trained"
# GGUF has no place for biases of convolutions, routers without one, factors of the experts' outputs; none for LFM3.
NOT_IN_GGUF = ("all_convolution", "biased_two_taps", "moe_one_expert", "moe_fused_no_bias", "moe_near_ties")
NOT_IN_GGUF += ("moe_all_experts", "moe_one_a_token")
TORTURE = sorted(path for path in (FIXTURES / "torture").iterdir() if not path.name.startswith("lfm3"))
CONVERTIBLE = [TRAINED, *(path for path in TORTURE if path.name not in NOT_IN_GGUF)]
PROMPT = [1, 2, 3, 5, 8, 13]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 40}  # whole blocks of 32 and of 256
RAW = {"lfm2": raw_config(**WIDE), "lfm2_moe": raw_mixture(**WIDE, moe_intermediate_size=256)}
CONFIG = parse_config(RAW["lfm2"], "config.json")
LARGER = parse_config(raw_config(**WIDE | {"vocab_size": 300}), "config.json")
IDS = tuple(int(integer) for integer in np.random.default_rng(3).integers(8, 300, 40))


def write_model(path: Path, tensors: Mapping[str, Tensor], config: ModelConfig = CONFIG) -> Path:
    path.write_bytes(gguf_bytes(model_keys(config), tensors))
    return path


def same_numbers(directory: Path, path: Path, dtype: str) -> Path:
    """A checkpoint's as GGUF; BF16 only where that rounds nothing."""
    config = load_config(directory)
    tensors = open_checkpoint(directory, config)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        values = widen(tensors[name].values, tensors[name].dtype)
        is_short = not np.any(values.view(np.uint32) & 0xFFFF)
        kind, _, content = stored(values, "BF16" if dtype == "BF16" and is_short and len(shape) == 2 else "F32")
        return Tensor(kind, shape, content)

    return write_model(path, model_tensors(config, made), config)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("directory", CONVERTIBLE, ids=lambda path: path.name)
def test_the_same_numbers_give_the_same_bits(directory: Path, dtype: str, tmp_path: Path):
    expected, actual = lfm2np.load(directory), lfm2np.load(same_numbers(directory, tmp_path / "x.gguf", dtype))
    # Of several ids that end a sequence GGUF tells the first.
    assert actual.config == replace(expected.config, eos_token_ids=expected.config.eos_token_ids[:1])
    prompt = [token % actual.config.vocab_size for token in PROMPT]
    assert actual.logits(prompt).tobytes() == expected.logits(prompt).tobytes()


@pytest.mark.rounding
@pytest.mark.parametrize(("dtype", "kind"), [("Q6_K", "lfm2"), ("MXFP4", "lfm2_moe")])  # of which float32 loses nothing
def test_quantised_weights_are_float32_weights_of_the_same_values(dtype: str, kind: str, tmp_path: Path):
    config = parse_config(RAW[kind], "config.json")
    path = write_model(tmp_path / "x.gguf", quantised_tensors(config, dtype), config)
    tensors = {}
    for name, tensor in read_tensors(path, read_config(path)).items():
        tensors[name] = stored(widen(tensor.values, tensor.dtype).astype(np.float32), "F32")
    (tmp_path / "config.json").write_text(json.dumps(RAW[kind]))
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    for numerics in NAMES:
        actual, expected = lfm2np.load(path, numerics), lfm2np.load(tmp_path, numerics)
        assert actual.logits(PROMPT).tobytes() == expected.logits(PROMPT).tobytes(), numerics


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", ["Q4_0", "Q5_1", "Q4_K", "IQ4_XS"])
def test_a_quantised_model_is_the_float64_one_nearly_and_streamed_exactly(dtype: str, tmp_path: Path):
    path = write_model(tmp_path / "x.gguf", quantised_tensors(CONFIG, dtype, seed=3))
    model = lfm2np.load(path)
    logits, wide = model.logits(PROMPT), lfm2np.load(path, "float64").logits(PROMPT)
    assert np.isfinite(logits).all() and np.abs(logits - wide).max() < 1e-4 * np.abs(wide).max()
    assert lfm2np.load(path, weights="streamed").logits(PROMPT).tobytes() == logits.tobytes()
    completion = model.generate(PROMPT, max_tokens=3)
    assert len(completion.token_ids) == 3 and completion.text is None


@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_grids_of_a_product_hold_every_bit_of_its_weights(dtype: str, tmp_path: Path):
    """The slices of a prepared weight add up to it, by fractions, whatever its scales are."""
    path = write_model(tmp_path / "x.gguf", quantised_tensors(CONFIG, dtype, seed=4, exponents=(1, 12)))
    tensors = read_tensors(path, CONFIG)
    for tensor in tensors.values():
        assert not any(array.flags.owndata or array.flags.writeable for array in tensor.arrays), "read when needed"
    for names in list(matrix_parts(CONFIG))[:3]:
        weight = joined(tensors, names)
        matrix = exact.prepare_matrix(weight, "w")
        assert matrix.grid is not None
        slices = matrix.values.reshape(matrix.grid.slices, *weight.shape)
        for row in (0, len(weight) - 1):
            scaled = np.ldexp(weight[row], -matrix.grid.columns)
            parts = [[Fraction(v) for v in rows[row].tolist()] for rows in slices]
            assert [sum(terms) for terms in zip(*parts, strict=True)] == [Fraction(v) for v in scaled.tolist()]


def test_a_product_of_types_side_by_side_holds_them_all(tmp_path: Path):
    """Queries, keys and values are one product, and llama.cpp's mixes give them different formats."""
    tensors = quantised_tensors(CONFIG, "Q4_K", seed=5)
    values = random_rows("Q6_K", (128, 256), 6, (8, 11))
    tensors["blk.1.attn_v.weight"] = Tensor("Q6_K", (128, 256), values.tobytes())
    tensors["blk.1.attn_k.weight"] = Tensor("F32", (128, 256), np.ones((128, 256), "<f4").tobytes())
    path = write_model(tmp_path / "x.gguf", tensors)
    stored_tensors = read_tensors(path, CONFIG)
    names = tuple(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
    weight = joined(stored_tensors, names)
    assert weight.dtype == np.float64
    assert np.array_equal(weight[384:], values_of(values, "Q6_K")) and np.all(weight[256:384] == 1.0)
    rows = stored_rows(stored_tensors, names)
    assert rows.shape == weight.shape and rows.dtype == np.float64
    for piece in (slice(0, 10), slice(250, 400), slice(260, 270), slice(500, 512)):
        assert np.array_equal(rows[piece], weight[piece]) and rows[piece].dtype == np.float64
    assert lfm2np.load(path).logits(PROMPT).tobytes() == lfm2np.load(path, weights="streamed").logits(PROMPT).tobytes()


def test_the_embedding_is_rounded_to_float32_once_and_to_no_less():
    """As activations of exact arithmetic are; the head, of the same tensor, keeps every bit."""
    wide = values_of(random_rows("Q4_K", (4, 256), 7), "Q4_K")
    embedded = exact.embed(wide)
    assert embedded.dtype == np.float32 and np.array_equal(embedded, wide.astype(np.float32))
    assert not np.array_equal(embedded, wide)


@pytest.mark.parametrize("dtype", ["F32", "Q4_K"])
def test_queries_keys_and_values_may_be_one_tensor(dtype: str, tmp_path: Path):
    """As the converter's --fuse-qkv writes them."""
    tensors = quantised_tensors(CONFIG, dtype)
    expected = lfm2np.load(write_model(tmp_path / "x.gguf", tensors)).logits(PROMPT)
    parts = [tensors.pop(f"blk.1.attn_{part}.weight") for part in "qkv"]
    rows = sum(tensor.shape[0] for tensor in parts)
    fused = Tensor(dtype, (rows, 256), b"".join(tensor.content for tensor in parts))
    path = write_model(tmp_path / "x.gguf", tensors | {"blk.1.attn_qkv.weight": fused})
    assert lfm2np.load(path).logits(PROMPT).tobytes() == expected.tobytes()
    short = Tensor(dtype, (rows - 1, 256), fused.content[: -len(fused.content) // rows])
    both = {"blk.1.attn_qkv.weight": fused, "blk.1.attn_q.weight": parts[0]}
    for changes, named in (
        ({"blk.1.attn_qkv.weight": short}, rf"blk\.1\.attn_qkv\.weight: shape \({rows - 1}, 256\), expected "),
        (both, r"missing 2 of the .* blk\.1\.attn_k\."),
    ):
        with pytest.raises(CheckpointError, match=named):
            lfm2np.load(write_model(tmp_path / "x.gguf", tensors | changes))


# --- what the command line says of it, and which commands take one


def write(path: Path, dtype: str, **changes: Tensor) -> Path:
    return write_model(path, quantised_tensors(CONFIG, dtype, exponents=(8, 11)) | changes)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line on stderr of a command that fails."""
    assert main([*arguments]) != 0
    return capsys.readouterr().err.splitlines()[-1]


def test_info_tells_types_and_that_nothing_is_rounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path / "x.gguf", "Q4_K")
    lines = said(capsys, "info", "--model", str(path)).splitlines()
    assert f"{'tensors':<30}13 Q4_K, 8 F32" in lines and f"{'model':<30}{path}" in lines
    assert f"{'weights that grids round':<30}none: exact arithmetic holds every bit of every matrix" in lines
    report: dict[str, Any] = json.loads(said(capsys, "info", "--json", "--model", str(path)))
    assert report["types"] == {"Q4_K": 13, "F32": 8}
    assert all(bound["rounded_weights"] == 0 == bound["largest_rounding"] for bound in report["bounds"])
    assert {bound["slices"] for bound in report["bounds"]} == {2}


def test_info_tells_how_much_the_grids_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """float32 weights, whose second slice ends at 36 bits."""
    values = np.ones((256, 256), "<f4")
    values[3, 5:8] = 3 * 2.0**-37, 2.0**-40, 0.0
    ones = {"blk.0.shortconv.out_proj.weight": Tensor("F32", (256, 256), values.tobytes())}
    values[3, 9] += 2.0**-23  # more than 11 bits: two slices
    path = write(tmp_path / "x.gguf", "Q8_0", **ones)
    short = json.loads(said(capsys, "info", "--json", "--model", str(path)))["bounds"][1]
    assert (short["slices"], short["rounded_weights"]) == (1, 2)
    assert short["largest_rounding"] == 3 * 2.0**-38  # of 2, the power of two above 1
    ones = {"blk.0.shortconv.out_proj.weight": Tensor("F32", (256, 256), values.tobytes())}
    path = write(tmp_path / "x.gguf", "Q8_0", **ones)
    fine = json.loads(said(capsys, "info", "--json", "--model", str(path)))["bounds"][1]
    assert (fine["slices"], fine["rounded_weights"], fine["largest_rounding"]) == (2, 2, 2.0**-38)
    lines = said(capsys, "info", "--model", str(path)).splitlines()
    summary = "2 of 862,208, by less than 2**-37 of the largest in their row (exact)"
    assert f"{'weights that grids round':<30}{summary}" in lines


def test_experts_count_as_the_matrices_that_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = parse_config(RAW["lfm2_moe"], "config.json")
    path = write_model(tmp_path / "x.gguf", quantised_tensors(config, "Q6_K"), config)
    report = json.loads(said(capsys, "info", "--json", "--model", str(path)))
    assert report["types"]["Q6_K"] == 1 + 8 + 3 + 2 * 4 * 3  # embedding, operators, a dense layer, two of 4 experts


@pytest.mark.rounding
def test_commands_take_a_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(write(tmp_path / "x.gguf", "IQ4_XS"))
    digest = said(capsys, "info", "--digest", "--model", path).strip()
    assert digest == lfm2np.load(path).digest() and len(bytes.fromhex(digest)) == 32
    assert json.loads(said(capsys, "info", "--digest", "--json", "--model", path))["sha256"] == digest
    arguments = ["--model", path, "--prompt-ids", "1,2,3"]
    assert json.loads(said(capsys, "generate", *arguments, "--max-tokens", "2", "--json"))["model"] == path
    assert json.loads(said(capsys, "score", *arguments, "--json"))["model"] == path
    dump = str(tmp_path / "dump.safetensors")
    said(capsys, "record", "lfm2np:", *arguments, "--max-tokens", "2", "-o", dump)
    assert "nothing" in said(capsys, "locate", dump, "--model", path).lower()


@pytest.mark.rounding
def test_the_small_engine_runs_a_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """That of the tutorial, which rounds the weights to float32."""
    path = str(write(tmp_path / "x.gguf", "Q4_K"))
    printed = said(capsys, "check", "lfm2np.teaching.tutorial:right", "--model", path, "--cases", "short-prompts")
    assert printed.startswith("verdict") and "BUG" not in printed and "DRIFT" not in printed


RECORDED = {"record": ("--prompt-ids", "1,2", "-o", "x"), "check": ("--cases", "short-prompts")}


def test_what_a_gguf_cannot_do_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(write(tmp_path / "x.gguf", "Q8_0"))
    for command in ("record", "check"):
        line = told(capsys, command, "transformers:", *RECORDED[command], "--model", path)
        assert path in line and "a checkpoint directory, not " in line and line.endswith("(transformers:DIR)")
    assert "TokenizerError" in (line := told(capsys, "generate", "--model", path, "--prompt", "a"))
    assert line.endswith(
        "no tables of a tokenizer in it and no tokenizer.json beside it; name a directory that has one"
    )
    missing = str(tmp_path / "y.gguf")
    assert told(capsys, "info", "--model", missing) == (
        f"lfm2np: CheckpointError: {missing}: not a directory, expected one with config.json and model.safetensors, "
        "or a GGUF file"
    )


# --- judging with it


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    return write_model(path, quantised_tensors(LARGER, "Q4_K", exponents=(4, 7)), LARGER)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return lfm2np.load(path)


@pytest.mark.rounding
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_right_engine_of_quantised_weights_is_about_as_far_off_as_its_format_says(
    path: Path, model: Model, name: str
) -> None:
    """Its weights rounded once to the format: with those of float32 or bfloat16 engines begin."""
    engine, truth = lfm2np.load(path, name), truth_of(model, IDS, {})
    (noise,) = noise_of(model, [truth], name)
    rows = reference.logits(engine.weights, engine.config, engine.numerics, IDS[:-1])
    errors = np.take_along_axis(engine.numerics.log_softmax(rows), truth.columns, axis=1) - truth.logprobs
    ratios = np.ravel((errors / noise.scales(truth))[:, ::8]).tolist()
    assert 0.1 < root_mean_square(ratios) < 2.5 and max(map(abs, ratios)) < LIMIT


@pytest.mark.rounding
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_engines_that_could_be_compute_in_float32_whatever_their_weights_come_as(name: str) -> None:
    for draw in range(8):
        weight, engine = np.random.default_rng(draw).normal(size=(6, 64)), emulated(name, 1, draw)
        assert engine.prepare_matrix(weight, "model.layers.0.conv.in_proj.weight").values.dtype == np.float32
        assert engine.embed(weight).dtype == np.float32


def test_what_float32_loses_of_a_weight_counts_as_the_engine_s() -> None:
    """Of float64 weights; those that float32 holds lose nothing in it."""
    weight = np.array([1.0 + 2.0**-30, 0.5, -(1.0 + 2.0**-26)])
    assert as_kept(weight, PRECISIONS["float32"]).spread.tolist() == [2.0**-30, 0.0, 2.0**-26]


def test_a_link_to_a_file_of_another_name_is_a_gguf_to_workers_too(path: Path, model: Model, tmp_path: Path) -> None:
    """As download caches have them: x.gguf is a link to a file that is called by its hash."""
    stored = tmp_path / "0f3a"
    stored.write_bytes(path.read_bytes())
    (tmp_path / "x.gguf").symlink_to(stored)
    linked = lfm2np.load(tmp_path / "x.gguf")
    again = model_of(source_of(linked))
    assert again.path == linked.path
    logits = reference.logits(again.weights, again.config, again.numerics, IDS)
    assert logits.tobytes() == linked.logits(IDS).tobytes() == model.logits(IDS).tobytes()


@pytest.mark.rounding
def test_vectors_of_quantised_weights_with_the_file_s_own_tokenizer(tmp_path: Path) -> None:
    keys = keys_of(write_directory(tmp_path / "hf", "lfm2"))
    models = [lfm2np.load(write_file(tmp_path / f"{dtype}.gguf", keys, dtype)) for dtype in ("Q4_0", "Q8_0")]
    vector_set = make(models[0], only=("short-2-text", "border-15"))
    assert vector_set["vectors"][0]["prompt_text"] is not None and vector_set["model"]["name"] == "Q4_0.gguf"
    assert verify(models[0], vector_set) == []
    assert {mismatch.what.partition(".")[0] for mismatch in verify(models[1], vector_set)} == {"model"}


def test_vectors_name_the_file_by_its_hash(path: Path, model: Model) -> None:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    facts = model_facts(model)
    assert facts["config_sha256"] == sha256 and facts["weights"] == {"x.gguf": sha256}
