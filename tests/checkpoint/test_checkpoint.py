"""Weight files of LFM2s, dense and sparse: what is read is what was stored, and everything else is refused by name."""

from __future__ import annotations

import functools
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import (
    Stored,
    raw_mixture,
    safetensors_bytes,
    stored,
    stored_weights,
    tiny_config,
    with_header,
    write_checkpoint,
    write_shards,
)
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.arithmetic import numerics_named
from lfm2np.checkpoint.config_json import parse_config
from lfm2np.checkpoint.names import FUSED
from lfm2np.checkpoint.stored import DTYPES, StoredTensor, require_finite, widen
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.errors import CheckpointError, Lfm2npError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import expected_tensors

CONFIG = tiny_config()
MIXTURE = parse_config(raw_mixture(), "config.json")  # layer 0 dense; N 4, K 2, X 6, D 16
EMBEDDING, NORM, TAPS = "model.embed_tokens.weight", "model.embedding_norm.weight", "model.layers.0.conv.conv.weight"
SPARSE, DENSE = "model.layers.1.feed_forward.", "model.layers.0.feed_forward."
EXPERTS = f"{SPARSE}experts."
Tensors = dict[str, Stored]
Change = Callable[[Tensors], object]
every_dtype = pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])


# --- what is read


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    content = safetensors_bytes(stored_weights(CONFIG, "F32"))
    (length,) = struct.unpack("<Q", content[:8])
    odd = with_header(content[8 : 8 + length] + b" " * (3 - length % 2), content[8 + length :])
    (tmp_path / "model.safetensors").write_bytes(odd)
    tensor = open_checkpoint(tmp_path, CONFIG)[NORM]
    assert widen(tensor.values, tensor.dtype).astype("<f4").tobytes() == stored_weights(CONFIG, "F32")[NORM][2]


def test_widened_values_are_the_callers_and_of_known_dtypes() -> None:
    singles = np.ones(3, np.float32)
    assert not np.shares_memory(widen(singles, "F32"), singles)
    with pytest.raises(CheckpointError, match="dtype 'F64'"):
        widen(singles, "F64")


@every_dtype
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_the_first_value_that_is_not_finite_is_named(dtype: str, value: float) -> None:
    array = np.ones((700, 1600), np.float32)  # more than one chunk
    array[698, 3] = array[699, 0] = value
    kind, shape, content = stored(array, dtype)
    tensor = StoredTensor("w", kind, np.frombuffer(content, DTYPES[kind]).reshape(shape), "a.safetensors")
    with pytest.raises(CheckpointError, match=r"^a\.safetensors: w: -?(nan|inf) at index \(698, 3\)"):
        require_finite(tensor)
    largest = np.full((2, 2), 65504 if dtype == "F16" else 3.3e38, np.float32)
    kind, shape, content = stored(largest, dtype)
    require_finite(StoredTensor("w", kind, np.frombuffer(content, DTYPES[kind]).reshape(shape)))


def test_a_tied_checkpoint_may_repeat_the_embedding_as_its_head(tmp_path: Path) -> None:
    single(lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING]}))(tmp_path)
    assert "lm_head.weight" not in open_checkpoint(tmp_path, CONFIG)


def test_shards_give_the_same_tensors_as_one_file_which_wins_over_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path, shards())
    tensors = open_checkpoint(tmp_path, CONFIG)
    expected = {name: content for name, (_, _, content) in stored_weights(CONFIG).items()}
    assert {name: tensor.values.tobytes() for name, tensor in tensors.items()} == expected
    assert tensors[EMBEDDING].source == str(tmp_path / "a.safetensors")
    write_checkpoint(tmp_path, CONFIG)
    (tmp_path / INDEX).write_text("{}")
    assert open_checkpoint(tmp_path, CONFIG)[EMBEDDING].source == str(tmp_path / "model.safetensors")


def fused(tensors: Tensors, layer: int = 1, keep: bool = False) -> None:
    """Joins the experts of a layer as transformers holds them; `keep` leaves the single ones there."""
    prefix = f"model.layers.{layer}.feed_forward.experts."
    parts = {
        which: [array_of(tensors[f"{prefix}{e}.{which}.weight"]) for e in range(4)] for which in ("w1", "w2", "w3")
    }
    dtype = tensors[f"{prefix}0.w1.weight"][0]
    gate_up = np.stack([np.concatenate(both) for both in zip(parts["w1"], parts["w3"], strict=True)])
    for name in [name for name in tensors if name.startswith(prefix) and not keep]:
        del tensors[name]
    for name, values in ((FUSED[0], gate_up), (FUSED[1], np.stack(parts["w2"]))):
        tensors[prefix + name] = (dtype, values.shape, values.tobytes())


def array_of(tensor: Stored) -> np.ndarray:
    return np.frombuffer(tensor[2], DTYPES[tensor[0]]).reshape(tensor[1])


@every_dtype
@pytest.mark.parametrize("layers", [(), (1,), (2,), (1, 2)])
def test_tensors_are_views_of_the_file_and_fused_experts_the_single_ones(
    tmp_path: Path, layers: tuple[int, ...], dtype: str
) -> None:
    """Layer by layer: a checkpoint may have both kinds."""
    tensors = stored_weights(MIXTURE, dtype)
    expected = dict(tensors)
    for layer in layers:
        fused(tensors, layer)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    joined = open_checkpoint(tmp_path, MIXTURE)
    assert list(joined) == list(expected_tensors(MIXTURE))
    for name, tensor in joined.items():
        assert (tensor.name, tensor.dtype, tensor.shape, tensor.values.tobytes()) == (name, *expected[name])
        assert type(tensor.values) is np.ndarray
        assert not tensor.values.flags.writeable and not tensor.values.flags.owndata


# --- what is refused


def shards() -> dict[str, Tensors]:
    items = list(stored_weights(CONFIG).items())
    return {"a.safetensors": dict(items[:5]), "b.safetensors": dict(items[5:])}


def single(*changes: Change, config: ModelConfig = CONFIG) -> Callable[[Path], None]:
    """A single file whose tensors were changed."""

    def write(directory: Path) -> None:
        tensors = stored_weights(config)
        for change in changes:
            change(tensors)
        (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))

    return write


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """A single file whose bytes were changed."""
    return lambda directory: (directory / "model.safetensors").write_bytes(change(sound_file()))


def with_json(**fields: object) -> Callable[[Path], object]:
    """A single file that says something else of one tensor."""

    def rewrite(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        header[NORM] = header[NORM] | fields if fields else list(header[NORM].values())
        return with_header(json.dumps(header).encode(), content[8 + length :])

    return with_bytes(rewrite)


def with_index(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    """Shards whose index was changed."""

    def write(directory: Path) -> None:
        index = write_shards(directory, shards())
        parsed = json.loads(index.read_text())
        change(parsed["weight_map"])
        index.write_text(json.dumps(parsed))

    return write


def with_shards(change: Callable[[dict[str, Tensors]], object]) -> Callable[[Path], None]:
    """Shards whose content was changed under an unchanged index."""

    def write(directory: Path) -> None:
        changed, text = shards(), write_shards(directory, shards()).read_text()
        change(changed)
        write_shards(directory, changed).write_text(text)

    return write


def put(name: str, values: np.ndarray | list[float], dtype: str = "F32") -> Change:
    return lambda tensors: tensors.update({name: stored(np.asarray(values, np.float32), dtype)})


def without(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


def renamed(tensors: Tensors) -> None:
    tensors["model.layers.0.conv.conv.wieght"] = tensors.pop(TAPS)


def only(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(b"x")


ENTRY = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
UNSOUND, INDEX = "not a sound safetensors file", "model.safetensors.index.json"
REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (lambda d: shutil.rmtree(d), "does not exist, expected a directory"),
    (lambda d: (shutil.rmtree(d), d.write_bytes(b"")), "is a file, expected a directory"),
    (lambda d: None, "no weights, expected model.safetensors"),
    (only("pytorch_model.bin"), "only pytorch_model.bin: pickles can run code and are not read"),
    (only("consolidated.pt"), "only consolidated.pt: pickles"),
    (lambda d: (d / "model.safetensors").mkdir(), "not a regular file"),
    (lambda d: (d / "model.safetensors").symlink_to(d / "gone"), "not a regular file"),
    (with_bytes(lambda c: c[:7]), "7 bytes, expected at least the 8"),
    (with_bytes(lambda c: c[:100]), "truncated or not safetensors"),
    (with_bytes(lambda c: c[:-1]), UNSOUND),
    (with_bytes(lambda c: c + b"x"), UNSOUND),
    (with_bytes(lambda c: struct.pack("<Q", 2**64 - 1) + c[8:]), "header of 18446744073709551615 bytes, expected at"),
    (with_bytes(lambda c: struct.pack("<Q", 0) + c[8:]), "header: not JSON"),
    (with_bytes(lambda c: with_header(b"[]", b"")), "expected an object"),
    (with_bytes(lambda c: with_header(b"{" + ENTRY + b"," + ENTRY + b"}", bytes(4))), "the key 'a' stands twice"),
    (with_json(data_offsets=[0, 2**62]), UNSOUND),
    (with_json(data_offsets=[-1, 31]), UNSOUND),
    (with_json(shape=[2**62, 2**62]), UNSOUND),
    (with_json(shape=[16] + [1] * 64), f"{NORM}: 65 dimensions, expected at most 8"),
    (with_json(dtype="BF17"), UNSOUND),
    (with_json(), f"{NORM}: ['BF16', [16], "),
    (single(put(NORM, np.ones(16), "F64")), f"{NORM}: dtype F64, expected one of BF16, F16, F32"),
    (single(without(NORM)), f"missing 1 of the 21 tensors: {NORM}"),
    (single(lambda t: t.clear()), "missing 21 of the 21 tensors: model.embed_tokens.weight, "),
    (single(renamed), f"missing 1 of the 21 tensors: {TAPS}"),
    (single(put("model.layers.2.ffn_norm.weight", np.ones(16))), "1 unexpected beside the 21 tensors: model.layers.2."),
    (single(*(put(f"x{i}", [1.0]) for i in range(7))), "7 unexpected beside the 21 tensors: x0, x1, x2, x3, x4, ..."),
    (single(put("a\nb", [1.0])), r"'a\nb'"),
    (single(put(TAPS, np.ones((16, 1, 4)))), f"{TAPS}: shape (16, 1, 4), expected (16, 1, 3) from conv_L_cache=3"),
    (single(put(TAPS, np.ones((16, 3)))), "expected (16, 1, 3) from hidden_size=16, depthwise=1, conv_L_cache=3"),
    (single(put(EMBEDDING, np.ones((301, 16)))), "shape (301, 16), expected (300, 16) from vocab_size=300"),
    (single(put("model.layers.1.self_attn.k_proj.weight", np.ones((16, 16)))), "from num_key_value_heads*head_dim=8"),
    (single(put("lm_head.weight", np.ones((300, 16)))), "lm_head.weight differs from model.embed_tokens.weight"),
    (single(put("lm_head.weight", np.ones((3, 16)))), "lm_head.weight: shape (3, 16)"),
    (with_index(lambda m: m.update(ghost="c.safetensors")), "names the shard 'c.safetensors', which does not exist"),
    *(
        (
            with_index(lambda m, bad=bad: m.update({NORM: bad})),
            f"{bad!r}, expected the plain name of a .safetensors file",
        )
        for bad in ("../a.safetensors", "/etc/a.safetensors", "x\\a.safetensors", "pytorch_model.bin", 3)
    ),
    (with_index(lambda m: m.update({NORM: "a.safetensors"})), f"b.safetensors: holds {NORM}, expected it in a.safeten"),
    (with_index(lambda m: m.pop(NORM)), f"b.safetensors: holds {NORM}, expected it in no shard"),
    (with_index(lambda m: m.update(ghost="a.safetensors")), "ghost should be in a.safetensors, which does not hold it"),
    (with_index(lambda m: m.clear()), "weight_map: {}, expected an object"),
    (lambda d: (d / INDEX).write_text('{"weight_map": ["a.b"]}'), "weight_map: ['a.b'], expected an object"),
    (lambda d: (d / INDEX).write_text('{"weight_map": {"a": "a", "a": "b"}}'), "the key 'a' stands twice"),
    (with_shards(lambda s: s["b.safetensors"].update(s["a.safetensors"])), f"b.safetensors: holds {EMBEDDING}, expec"),
    (with_shards(lambda s: s["a.safetensors"].pop(EMBEDDING)), f"{EMBEDDING} should be in a.safetensors, which does"),
]


def expert_number(number: int) -> Change:
    """One expert more."""
    shapes = {"w1": (6, 16), "w2": (16, 6), "w3": (6, 16)}
    return lambda tensors: [put(f"{EXPERTS}{number}.{w}.weight", np.ones(s))(tensors) for w, s in shapes.items()]


GATE_UP, DOWN = EXPERTS + FUSED[0], EXPERTS + FUSED[1]
ONE_NAN = np.where(np.arange(4 * 16 * 6).reshape(4, 16, 6) == 200, np.nan, 1.0)
BY_EXPERTS = "num_hidden_layers=3, layer_types[1]="
GATE, BIAS = f"{SPARSE}gate.weight", f"{SPARSE}expert_bias"
FIRST, LAST = EXPERTS + "0.{}.weight", EXPERTS + "3.{}.weight"
REFUSED_MIXTURES: list[tuple[list[Change], str]] = [
    ([without(LAST.format("w2"))], f"missing 1 of the 51 tensors: {LAST.format('w2')} (the first of shape (16, 6)"),
    ([without(*map(LAST.format, ("w1", "w2", "w3")))], f"w3.weight (the first of shape (6, 16); {BY_EXPERTS}"),
    ([expert_number(4)], f"3 unexpected beside the 51 tensors: {EXPERTS}4.w1.weight, "),
    ([expert_number(10**30)], BY_EXPERTS),
    ([put(FIRST.format("w2"), np.ones((6, 16)))], "(16, 6) from hidden_size=16, moe_intermediate_size=6"),
    ([put(FIRST.format("w3"), np.full((6, 16), np.inf))], f"{FIRST.format('w3')}: inf at index (0, 0), expected finit"),
    ([put(GATE, np.ones((5, 16)))], f"{GATE}: shape (5, 16), expected (4, 16) from num_experts=4"),
    ([put(f"{SPARSE}gate.bias", np.ones(4))], f"1 unexpected beside the 51 tensors: {SPARSE}gate.bias"),
    ([without(BIAS)], f"missing 1 of the 51 tensors: {BIAS} (the first of shape (4,); {BY_EXPERTS}"),
    ([put(BIAS, np.ones(5))], f"{BIAS}: shape (5,), expected (4,) from num_experts=4"),
    ([put(BIAS, [1.0, np.nan, 0.0, 0.0])], f"{BIAS}: nan at index (1,), expected finite numbers"),
    ([put(f"{SPARSE}w1.weight", np.ones((24, 16)))], f"{SPARSE}w1.weight (the first of shape (24, 16); {BY_EXPERTS}"),
    ([put(f"{DENSE}experts.{FUSED[0]}", np.ones((4, 12, 16)))], f"experts.{FUSED[0]} (the first of shape (4, 12, 16)"),
    ([lambda t: fused(t, keep=True)], f"12 unexpected beside the 41 tensors: {EXPERTS}0.w1.weight, "),
    ([fused, put(f"{EXPERTS}7.w2.weight", np.ones((16, 6)))], f"1 unexpected beside the 41 tensors: {EXPERTS}7.w2"),
    ([fused, without(DOWN)], f"missing 1 of the 41 tensors: {DOWN} (the first of shape (4, 16, 6); "),
    ([fused, without(GATE_UP)], f"missing 1 of the 41 tensors: {GATE_UP} (the first of shape (4, 12, 16); "),
    ([fused, put(GATE_UP, np.ones((5, 12, 16)))], f"{GATE_UP}: shape (5, 12, 16), expected (4, 12, 16) from num_expe"),
    ([fused, put(GATE_UP, np.ones((4, 16, 12)))], "(4, 12, 16) from 2*moe_intermediate_size=12, hidden_size=16"),
    ([fused, put(DOWN, np.ones((4, 16, 7)))], "expected (4, 16, 6) from moe_intermediate_size=6"),
    ([fused, put(DOWN, ONE_NAN)], f"{DOWN}[2]: {EXPERTS}2.w2.weight: nan at index (1, 2), expected finite numbers"),
]


NO_BIAS = parse_config(raw_mixture(use_expert_bias=False), "config.json")
UNTIED = tiny_config(tie_word_embeddings=False)
OF_ANOTHER_CONFIG: list[tuple[ModelConfig, Callable[[Path], object], str]] = [
    # a bias that transformers would ignore, and choose other experts than the model was trained with
    (NO_BIAS, single(config=MIXTURE), "2 unexpected ... (the first of shape (4,); ... use_expert_bias=false)"),
    (CONFIG, single(put(GATE, np.ones((4, 16)))), "gate.weight (the first of shape (4, 16); ... _type=lfm2)"),
    (UNTIED, single(), "missing 1 of the 22 tensors: lm_head.weight"),
]
WRONG = [(CONFIG, write, named) for write, named in REFUSED] + OF_ANOTHER_CONFIG
WRONG += [(MIXTURE, single(*changes, config=MIXTURE), named) for changes, named in REFUSED_MIXTURES]


@pytest.mark.parametrize(("config", "write", "named"), WRONG, ids=[named[:60] for *_, named in WRONG])
def test_a_corrupt_checkpoint_is_refused_in_one_line_by_the_name_of_its_file(
    tmp_path: Path, config: ModelConfig, write: Callable[[Path], object], named: str
) -> None:
    """What is no number when weights are prepared, all else at once; experts before any is chosen."""
    directory = tmp_path / "model"
    directory.mkdir()
    write(directory)
    pattern = ".*".join(map(re.escape, named.split(" ... ")))
    with pytest.raises(CheckpointError, match=rf"^{directory}.*{pattern}.*\Z"):
        tensors = open_checkpoint(directory, config)
        if "expected finit" in named:
            prepare_weights(tensors, config, numerics_named("exact"))


@functools.cache
def sound_file() -> bytes:
    return safetensors_bytes(stored_weights(CONFIG))


@pytest.mark.slow
@given(
    edits=st.lists(st.tuples(st.integers(0, 2**16) | st.integers(0, 300), st.integers(0, 255)), max_size=4),
    keep=st.none() | st.integers(0, 2**16),
)
def test_a_damaged_weight_file_opens_or_raises_our_error(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], keep: int | None
) -> None:
    content = bytearray(sound_file())
    for position, byte in edits:
        content[position % len(content)] = byte
    directory = tmp_path_factory.mktemp("checkpoint")
    (directory / "model.safetensors").write_bytes(content[:keep])
    try:
        for tensor in open_checkpoint(directory, CONFIG).values():
            require_finite(tensor)
    except Lfm2npError as error:
        assert str(directory) in str(error)
