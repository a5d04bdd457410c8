"""Weight files: what is read is what was stored, and everything else is refused by name."""

from __future__ import annotations

import functools
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from builders import (
    Stored,
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

from lfm2np.checkpoint.stored import DTYPES, StoredTensor, require_finite, widen
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.errors import CheckpointError, Lfm2npError
from lfm2np.truth.layers import expected_tensors, parameter_count

CONFIG = tiny_config()
EMBEDDING = "model.embed_tokens.weight"
TAPS = "model.layers.0.conv.conv.weight"
NORM = "model.embedding_norm.weight"


def test_the_tied_model_of_sixteen_layers_has_148_tensors() -> None:
    config = tiny_config(num_hidden_layers=16, layer_types=None, full_attn_idxs=[2, 5, 8, 10, 12, 14])
    assert len(expected_tensors(config)) == 148
    assert "lm_head.weight" not in expected_tensors(config)


def test_expected_shapes_follow_the_config() -> None:
    shapes = expected_tensors(tiny_config(head_dim=6, conv_L_cache=4, conv_bias=True, tie_word_embeddings=False))
    assert shapes["model.layers.0.conv.in_proj.weight"] == (48, 16)
    assert shapes["model.layers.0.conv.in_proj.bias"] == (48,)
    assert shapes[TAPS] == (16, 1, 4)
    assert shapes["model.layers.0.conv.conv.bias"] == shapes["model.layers.0.conv.out_proj.bias"] == (16,)
    assert shapes["model.layers.0.feed_forward.w2.weight"] == (16, 24)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (24, 16)
    assert shapes["model.layers.1.self_attn.v_proj.weight"] == (12, 16)
    assert shapes["model.layers.1.self_attn.out_proj.weight"] == (16, 24)
    assert shapes["model.layers.1.self_attn.k_layernorm.weight"] == (6,)
    assert shapes["lm_head.weight"] == (300, 16)


def test_an_untied_head_counts_its_own_parameters() -> None:
    assert parameter_count(tiny_config(tie_word_embeddings=False)) - parameter_count(CONFIG) == 300 * 16


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_tensor_is_read_as_it_was_stored(tmp_path: Path, dtype: str) -> None:
    written = write_checkpoint(tmp_path, CONFIG, dtype)
    tensors = open_checkpoint(tmp_path, CONFIG)
    assert list(tensors) == list(expected_tensors(CONFIG))
    for name, tensor in tensors.items():
        assert (tensor.name, tensor.dtype, tensor.values.shape) == (name, dtype, written[name][1])
        assert tensor.values.tobytes() == written[name][2]
        assert not tensor.values.flags.writeable
        assert type(tensor.values) is np.ndarray
        wide = widen(tensor.values, tensor.dtype)
        assert (wide.dtype, wide.shape) == (np.float32, tensor.values.shape)
        require_finite(tensor)


def test_the_library_s_own_files_are_read(tmp_path: Path) -> None:
    arrays = {n: np.random.default_rng(1).random(s, np.float32) for n, s in expected_tensors(CONFIG).items()}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    tensors = open_checkpoint(tmp_path, CONFIG)
    assert all(np.array_equal(tensors[name].values, array) for name, array in arrays.items())


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    content = safetensors_bytes(stored_weights(CONFIG, "F32"))
    (length,) = struct.unpack("<Q", content[:8])
    odd = with_header(content[8 : 8 + length] + b" " * (3 - length % 2), content[8 + length :])
    (tmp_path / "model.safetensors").write_bytes(odd)
    tensor = open_checkpoint(tmp_path, CONFIG)[NORM]
    assert widen(tensor.values, tensor.dtype).astype("<f4").tobytes() == stored_weights(CONFIG, "F32")[NORM][2]


@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=50))
def test_widening_bfloat16_keeps_every_bit(bits: list[int]) -> None:
    wide = widen(np.array(bits, np.uint16), "BF16")
    assert wide.view(np.uint32).tolist() == [b << 16 for b in bits]


def test_widening_float16_is_exact_and_float32_is_a_copy() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    assert np.array_equal(widen(halves, "F16").astype(np.float16).view(np.uint16), halves.view(np.uint16))
    singles = np.ones(3, np.float32)
    assert not np.shares_memory(widen(singles, "F32"), singles)
    with pytest.raises(CheckpointError, match="dtype 'F64'"):
        widen(singles, "F64")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
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
    tensors = stored_weights(CONFIG)
    tensors["lm_head.weight"] = tensors[EMBEDDING]
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    assert "lm_head.weight" not in open_checkpoint(tmp_path, CONFIG)


def test_shards_give_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    split = shards()
    write_shards(tmp_path, split)
    tensors = open_checkpoint(tmp_path, CONFIG)
    assert {n: t.values.tobytes() for n, t in tensors.items()} == {
        n: c for n, (_, _, c) in stored_weights(CONFIG).items()
    }
    assert tensors[EMBEDDING].source == str(tmp_path / "a.safetensors")


def test_the_single_file_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert len(open_checkpoint(tmp_path, CONFIG)) == len(expected_tensors(CONFIG))


def shards() -> dict[str, dict[str, Stored]]:
    tensors = stored_weights(CONFIG)
    names = list(tensors)
    return {
        "a.safetensors": {n: tensors[n] for n in names[:5]},
        "b.safetensors": {n: tensors[n] for n in names[5:]},
    }


def single(change: Callable[[dict[str, Stored]], object]) -> Callable[[Path], None]:
    """A single file whose tensors were changed."""

    def write(directory: Path) -> None:
        tensors = stored_weights(CONFIG)
        change(tensors)
        (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))

    return write


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """A single file whose bytes were changed."""

    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(change(safetensors_bytes(stored_weights(CONFIG))))

    return write


def with_json(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Path], None]:
    """A single file whose header was changed."""

    def rewrite(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header)
        return with_header(json.dumps(header).encode(), content[8 + length :])

    return with_bytes(rewrite)


def with_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    """Shards whose index was changed."""

    def write(directory: Path) -> None:
        index = write_shards(directory, shards())
        parsed = json.loads(index.read_text())
        change(parsed["weight_map"])
        index.write_text(json.dumps(parsed))

    return write


def with_index_text(text: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        write_shards(directory, shards()).write_text(text)

    return write


def with_shards(change: Callable[[dict[str, dict[str, Stored]]], object]) -> Callable[[Path], None]:
    """Shards whose content was changed under an unchanged index."""

    def write(directory: Path) -> None:
        index = write_shards(directory, shards())
        changed = shards()
        change(changed)
        text = index.read_text()
        write_shards(directory, changed)
        index.write_text(text)

    return write


def put(name: str, values: np.ndarray, dtype: str = "BF16") -> Callable[[dict[str, Stored]], object]:
    return lambda tensors: tensors.__setitem__(name, stored(values, dtype))


def only(name: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / name).write_bytes(b"x")

    return write


def duplicate_header_key(content: bytes) -> bytes:
    return with_header(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    )


def rename(tensors: dict[str, Stored]) -> None:
    tensors["model.layers.0.conv.conv.wieght"] = tensors.pop(TAPS)


CORRUPT = [
    (lambda d: shutil.rmtree(d), "does not exist, expected a directory"),
    (lambda d: (shutil.rmtree(d), d.write_bytes(b"")), "is a file, expected a directory"),
    (lambda d: None, "no weights, expected model.safetensors"),
    (only("pytorch_model.bin"), "only pytorch_model.bin: pickles can run code and are not read"),
    (only("consolidated.pt"), "only consolidated.pt: pickles"),
    (lambda d: (d / "model.safetensors").mkdir(), "not a regular file"),
    (lambda d: (d / "model.safetensors").symlink_to(d / "gone"), "not a regular file"),
    (with_bytes(lambda c: b""), "0 bytes, expected at least the 8"),
    (with_bytes(lambda c: c[:7]), "7 bytes, expected at least the 8"),
    (with_bytes(lambda c: c[:8]), "truncated or not safetensors"),
    (with_bytes(lambda c: c[:100]), "truncated or not safetensors"),
    (with_bytes(lambda c: c[:-1]), "not a sound safetensors file"),
    (with_bytes(lambda c: c + b"x"), "not a sound safetensors file"),
    (with_bytes(lambda c: struct.pack("<Q", 2**40) + c[8:]), "header of 1099511627776 bytes, expected at most"),
    (with_bytes(lambda c: struct.pack("<Q", 2**64 - 1) + c[8:]), "header of 18446744073709551615 bytes"),
    (with_bytes(lambda c: struct.pack("<Q", 0) + c[8:]), "header: not JSON"),
    (with_bytes(lambda c: b"PK\x03\x04" + bytes(100)), "truncated or not safetensors"),
    (with_bytes(lambda c: with_header(b"[]", b"")), "expected an object"),
    (with_bytes(lambda c: with_header(b"\xff" * 9, b"")), "not UTF-8"),
    (with_bytes(duplicate_header_key), "the key 'a' stands twice"),
    (with_json(lambda h: h[NORM].update(data_offsets=[0, 32])), "not a sound safetensors file"),
    (with_json(lambda h: h[NORM].update(data_offsets=[0, 2**62])), "not a sound safetensors file"),
    (with_json(lambda h: h[NORM].update(data_offsets=[-1, 31])), "not a sound safetensors file"),
    (with_json(lambda h: h[NORM].update(shape=[2**62, 2**62])), "not a sound safetensors file"),
    (with_json(lambda h: h[NORM].update(shape=[16] + [1] * 64)), f"{NORM}: 65 dimensions, expected at most 8"),
    (with_json(lambda h: h[NORM].update(dtype="BF17")), "not a sound safetensors file"),
    (with_json(lambda h: h.update({NORM: list(h[NORM].values())})), f"{NORM}: ['BF16', [16], "),
    (single(put(NORM, np.ones(16), "F64")), f"{NORM}: dtype F64, expected one of BF16, F16, F32"),
    (single(put(NORM, np.ones(16), "I8")), f"{NORM}: dtype I8"),
    (single(put(NORM, np.ones(16), "F8_E4M3")), f"{NORM}: dtype F8_E4M3"),
    (single(lambda t: t.pop(NORM)), f"missing 1 of the 21 tensors: {NORM}"),
    (single(lambda t: t.clear()), "missing 21 of the 21 tensors: model.embed_tokens.weight, "),
    (single(rename), f"missing 1 of the 21 tensors: {TAPS}"),
    (
        single(put("model.layers.2.ffn_norm.weight", np.ones(16))),
        "1 unexpected beside the 21 tensors: model.layers.2.ffn_norm.weight",
    ),
    (
        single(lambda t: [put(f"x{i}", np.ones(1))(t) for i in range(7)]),
        "7 unexpected beside the 21 tensors: x0, x1, x2, x3, x4, ...",
    ),
    (single(put("a\nb", np.ones(1))), r"'a\nb'"),
    (single(put("", np.ones(1))), "1 unexpected beside the 21 tensors"),
    (
        single(put(TAPS, np.ones((16, 1, 4)))),
        f"{TAPS}: shape (16, 1, 4), expected (16, 1, 3) from conv_L_cache=3",
    ),
    (single(put(TAPS, np.ones((16, 3)))), "expected (16, 1, 3) from hidden_size=16, depthwise=1, conv_L_cache=3"),
    (single(put(EMBEDDING, np.ones((301, 16)))), "shape (301, 16), expected (300, 16) from vocab_size=300"),
    (
        single(put("model.layers.1.self_attn.k_proj.weight", np.ones((16, 16)))),
        "expected (8, 16) from num_key_value_heads*head_dim=8",
    ),
    (single(put("model.layers.0.feed_forward.w1.weight", np.ones((32, 16)))), "from feed_forward_size=24"),
    (single(put("lm_head.weight", np.ones((300, 16)))), "lm_head.weight differs from model.embed_tokens.weight"),
    (single(put("lm_head.weight", np.ones((3, 16)))), "lm_head.weight: shape (3, 16)"),
    (with_index(lambda m: m.update(ghost="c.safetensors")), "names the shard 'c.safetensors', which does not exist"),
    (with_index(lambda m: m.update({NORM: "../a.safetensors"})), "'../a.safetensors', expected the plain name"),
    (with_index(lambda m: m.update({NORM: "/etc/a.safetensors"})), "expected the plain name"),
    (with_index(lambda m: m.update({NORM: "x\\a.safetensors"})), "expected the plain name"),
    (with_index(lambda m: m.update({NORM: "pytorch_model.bin"})), "expected the plain name of a .safetensors file"),
    (with_index(lambda m: m.update({NORM: 3})), "3, expected the plain name"),
    (
        with_index(lambda m: m.update({NORM: "a.safetensors"})),
        f"b.safetensors: holds {NORM}, expected it in a.safetensors",
    ),
    (with_index(lambda m: m.pop(NORM)), f"b.safetensors: holds {NORM}, expected it in no shard"),
    (with_index(lambda m: m.update(ghost="a.safetensors")), "ghost should be in a.safetensors, which does not hold it"),
    (with_index(lambda m: m.clear()), "weight_map: {}, expected an object"),
    (with_index_text("[]"), "expected an object"),
    (with_index_text('{"weight_map": ["a.safetensors"]}'), "weight_map: ['a.safetensors']"),
    (with_index_text('{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}'), "the key 'a' stands twice"),
    (
        with_shards(lambda s: s["b.safetensors"].update(s["a.safetensors"])),
        f"b.safetensors: holds {EMBEDDING}, expected",
    ),
    (
        with_shards(lambda s: s["a.safetensors"].pop(EMBEDDING)),
        f"{EMBEDDING} should be in a.safetensors, which does not",
    ),
    (
        with_shards(lambda s: s["a.safetensors"].update({NORM: s["b.safetensors"].pop(NORM)})),
        f"a.safetensors: holds {NORM}, expected",
    ),
]


@pytest.mark.parametrize(("corrupt", "fragment"), CORRUPT)
def test_a_corrupt_checkpoint_is_refused_by_the_name_of_its_file(
    tmp_path: Path, corrupt: Callable[[Path], object], fragment: str
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    corrupt(directory)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory, CONFIG)
    assert fragment in str(caught.value)
    assert str(caught.value).startswith(str(directory))
    assert "\n" not in str(caught.value)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    with pytest.raises(CheckpointError, match=r"missing 1 of the 22 tensors: lm_head\.weight"):
        open_checkpoint(tmp_path, tiny_config(tie_word_embeddings=False))


@functools.cache
def sound_file() -> bytes:
    return safetensors_bytes(stored_weights(CONFIG))


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
