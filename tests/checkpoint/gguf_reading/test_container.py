"""The container, read strictly: what lies in it is told in one line that names the file, the thing and the value."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf_file import ARRAY, BOOL, STRING, U32, Tensor, gguf_bytes, header, info, padded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lfm2np.checkpoint.gguf.container import open_container
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.errors import CheckpointError

TENSORS = {
    "a": Tensor("F32", (2, 3), np.arange(6, dtype="<f4").tobytes()),
    "b": Tensor("Q8_0", (3, 64), bytes(range(204))),
    "c": Tensor("BF16", (4,), bytes(8)),
    "d": Tensor("F16", (2, 1, 2), np.arange(4, dtype="<f2").tobytes()),
}
KEYS = {
    "general.architecture": (STRING, "lfm2"),
    "n": (U32, 7),
    "f": (6, 0.5),
    "yes": (BOOL, True),
    "big": (10, 2**63),
    "less": (11, -1),
    "list": (ARRAY, 5, [1, -2]),
    "floats": (ARRAY, 12, [0.1]),
    "truths": (ARRAY, BOOL, [True, False]),
    "words": (ARRAY, STRING, ["ab", "", b"\xff"]),
}
WHOLE = gguf_bytes(KEYS, TENSORS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.gguf"


def refused(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"^{path}: .*{re.escape(message)}.*\Z"):
        open_container(path)


def test_without_the_package_a_quantised_tensor_names_the_extra(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(path, WHOLE, "b: Q8_0 needs the extra `gguf`, pip install 'lfm2np[gguf]'")
    path.write_bytes(gguf_bytes(KEYS, {name: TENSORS[name] for name in "acd"}))
    assert open_container(path).tensors.keys() == set("acd")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_what_was_written_is_read(path: Path, version: int, alignment: int):
    path.write_bytes(gguf_bytes({**KEYS, "general.alignment": (U32, alignment)}, TENSORS, alignment, version))
    container = open_container(path)
    assert container.path == path
    assert {name: (tensor.dtype, tensor.shape, bytes_in(tensor)) for name, tensor in container.tensors.items()} == {
        name: (tensor.dtype, tensor.shape, tensor.content) for name, tensor in TENSORS.items()
    }
    [blocks] = container.tensors["b"].arrays
    assert blocks.shape == (3, 68) and not blocks.flags.writeable
    assert {name: (key.kind, key.value) for name, key in container.keys.items() if name != "general.alignment"} == {
        "general.architecture": ("string", "lfm2"),
        "n": ("uint32", 7),
        "f": ("float32", 0.5),
        "yes": ("bool", True),
        "big": ("uint64", 2**63),
        "less": ("int64", -1),
        "list": ("array of int32", [1, -2]),
        "floats": ("array of float64", [0.1]),
        "truths": ("array of bool", [True, False]),
        "words": ("array of string", ["ab", "", "\udcff"]),
    }


@pytest.mark.slow
def test_a_file_cut_anywhere_is_refused(path: Path):
    """The last tensor ends in a number that is not 0; what follows is padding."""
    last = len(WHOLE.rstrip(b"\0")) - 1
    for end in (*range(0, last, 3), last):
        path.write_bytes(WHOLE[:end])
        with pytest.raises(CheckpointError, match=r"^.*x\.gguf: [^\n]*$"):
            open_container(path)


def test_what_stands_behind_the_last_tensor_is_left_alone(path: Path):
    path.write_bytes(WHOLE + b"more")
    assert open_container(path).tensors.keys() == TENSORS.keys()


def start(tensors: int, keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)


def one_key(*kinds: int, content: bytes = bytes(99)) -> bytes:
    """The key k: its type; of an array the type of its values, and how many."""
    form = "<I" if len(kinds) == 1 else "<IIQ"
    return start(0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack(form, *kinds) + content


def one_info(*given: bytes) -> bytes:
    return padded(header({}, given)) + bytes(4096)


def alignment(kind: int, value: int) -> bytes:
    return gguf_bytes({"general.alignment": (kind, value)}, {})


TWICE = struct.pack("<Q", 1) + b"k" + struct.pack("<IB", 0, 1)
WRONG = {
    "splits": (gguf_bytes({"split.count": (2, 3)}, {}), "split.count: 3 (uint16), expected 1: `llama-gguf-split"),
    "nothing": (b"", "0 bytes, expected a GGUF file"),
    "magic": (b"GGML" + WHOLE[4:], "begins with b'GGML', expected b'GGUF'"),
    "version": (gguf_bytes({}, {}, version=1), "GGUF version 1, expected 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + WHOLE[8:], "GGUF version 50331648 (a big-endian file), expected"),
    "many tensors": (start(2**63, 0), "name of tensor 0: length: 8 bytes from byte 24 on"),
    "many keys": (start(0, 2**64 - 1), "key 0: length: 8 bytes from byte 24 on"),
    "key's length": (
        start(0, 1) + struct.pack("<Q", 2**62),
        f"key 0: {2**62} bytes from byte 32 on, expected at most the 0 that are left",
    ),
    "key twice": (start(0, 2) + 2 * TWICE, "key 'k': stands twice, expected one name"),
    "no key": (gguf_bytes({"": (U32, 1)}, {}), "key '': empty, expected one name"),
    "kind": (one_key(13), "k: value of type 13, expected 0 to 12"),
    "array in array": (one_key(9, 9, 1), "k: value of type 9, expected 0 to 12 (arrays not in arrays)"),
    "array's length": (
        one_key(9, 4, 2**62),
        f"k: {2**62} values: {2**64} bytes from byte 49 on, expected at most the 9",
    ),
    "bool": (one_key(7, content=b"\2"), "k: the bool 2, expected 0 or 1"),
    "bool in an array": (one_key(9, 7, 2, content=b"\1\7"), "k: the bool 7, expected 0 or 1"),
    "alignment": (alignment(U32, 24), "general.alignment: 24 (uint32), expected a uint32"),
    "alignment's kind": (alignment(10, 32), "general.alignment: 32 (uint64), expected"),
    "no alignment": (alignment(U32, 0), "general.alignment: 0 (uint32), expected"),
    "name twice": (one_info(info("a", (1,), 0, 0), info("a", (1,), 0, 32)), "tensor 1, 'a': stands twice, expected"),
    "long name": (one_info(info("n" * 64, (1,), 0, 0)), f"tensor 0, '{'n' * 64}': 64 characters, expected"),
    "no name": (one_info(info("", (1,), 0, 0)), "tensor 0, '': 0 characters, expected"),
    "no dimensions": (one_info(info("a", (), 0, 0)), "a: 0 dimensions, expected 1 to 4"),
    "dimensions": (one_info(info("a", (1,) * 5, 0, 0)), "a: 5 dimensions, expected 1 to 4"),
    "empty": (one_info(info("a", (2, 0), 0, 0)), "a: shape (2, 0), expected sizes from 1 to 2**40"),
    "overflow": (one_info(info("a", (2**63, 4), 0, 0)), f"a: shape ({2**63}, 4), expected sizes from 1 to 2**40"),
    "product": (one_info(info("a", (2**39,) * 4, 0, 0)), f"a: F32 in bytes 96 to {96 + 4 * 2**156}, expected"),
    "no blocks": (one_info(info("a", (8, 48), 8, 0)), "a: Q8_0 with rows of 48, expected a multiple of its block, 32"),
    "unread type": (one_info(info("a", (256,), 16, 0)), "a: type 16 (IQ2_XXS) is not read, expected one of F32, F16, "),
    "unknown type": (one_info(info("a", (256,), 77, 0)), "a: type 77 is not read, expected one of F32, F16, BF16"),
    "overlap": (
        one_info(info("a", (16,), 0, 0), info("b", (16,), 0, 32)),
        "b: offset 32, expected 64, behind the tensor before it, padded to 32 bytes",
    ),
    "offset": (one_info(info("a", (8,), 0, 2**64 - 32)), f"a: offset {2**64 - 32}, expected 0, behind the tensor"),
    "gap": (one_info(info("a", (8,), 0, 0), info("b", (8,), 0, 64)), "b: offset 64, expected 32, behind the tensor"),
    "short": (
        padded(header({}, [info("a", (8,), 0, 0)])) + bytes(31),
        "a: F32 in bytes 64 to 96, expected at most 95, the file's size (truncated)",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_lies_is_told(path: Path, what: str):
    refused(path, *WRONG[what])


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255), also=st.lists(st.integers(0, 255), max_size=12))
def test_a_damaged_file_is_refused_or_read_and_nothing_else(path: Path, at: int, byte: int, also: list[int]):
    """No other error, no allocation by what a broken length says."""
    damaged = bytearray(WHOLE)
    damaged[at : at + 1 + len(also)] = bytes([byte, *also])
    path.write_bytes(damaged)
    try:
        container = open_container(path)
    except CheckpointError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
    else:
        assert all(tensor.values.nbytes <= len(damaged) for tensor in container.tensors.values())


def test_a_file_that_is_not_there_or_no_file_is_told(path: Path):
    with pytest.raises(CheckpointError, match=r"x\.gguf: does not exist$"):
        open_container(path)
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"x\.gguf: not a regular file$"):
        open_container(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_container(path / ("n" * 300 + ".gguf"))


def bytes_in(tensor: StoredTensor) -> bytes:
    return b"".join(array.tobytes() for array in tensor.arrays)
