"""Files and hashes are little-endian, and read and written the same by a machine of either byte order.

What fails on a big-endian machine is a view of bytes in the machine's own order. It fails here, too, as soon as that
is not the order of the file: so the tests read files of the other order, with the tables of dtypes turned around.
`tests/machines.py` runs on a big-endian machine.
"""

import ast
import base64
import json
import math
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.stored import DTYPES, StoredTensor, require_finite, widen
from lfm2np.engine.loading import load
from lfm2np.engine.work.results_file import decoded, encoded
from lfm2np.errors import CheckpointError
from lfm2np.oracle.locate import dump
from scheduler.checksum import json_sha256

pytestmark = pytest.mark.slow

TOP = Path(__file__).parents[2]
FORMS = {"BF16": "f", "F16": "e", "F32": "f", "F64": "d"}  # as struct names them; BF16 is the upper half of a float32
WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}  # bytes
in_either_order = pytest.mark.parametrize("order", ["little", "big"])


def number(dtype: str, bits: int) -> float:
    """By the standard library alone."""
    if dtype == "BF16":
        return number("F32", bits << 16)
    return struct.unpack(f"<{FORMS[dtype]}", bits.to_bytes(WIDTHS[dtype], "little"))[0]


def patterns(dtype: str) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 256 ** WIDTHS[dtype] - 1), min_size=1, max_size=20)


def by_hand(bits: list[int], width: int, order: str) -> bytes:
    return b"".join(bit.to_bytes(width, order) for bit in bits)


def same(actual: list[float], expected: list[float]) -> bool:
    """Which NaN it is a conversion may change."""
    pairs = zip(actual, expected, strict=True)
    return all(
        struct.pack("<d", value) == struct.pack("<d", other) or (value != value and other != other)
        for value, other in pairs
    )


def test_the_tables_of_dtypes_are_little_endian_and_complete():
    for kind in (kind for table in (DTYPES, dump.STORED, dump.WHOLE) for kind in table.values()):
        assert np.dtype(kind).newbyteorder("<") == np.dtype(kind)
    assert dump.STORED.keys() == dump.REAL.keys() == FORMS.keys()


# --- reading


@in_either_order
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_weights_written_by_hand_are_read_and_what_is_not_finite_is_found(dtype: str, order: str, data: st.DataObject):
    bits = data.draw(patterns(dtype))
    expected = [number(dtype, bit) for bit in bits]
    kind = DTYPES[dtype] if order == "little" else DTYPES[dtype].newbyteorder(">")
    values = np.frombuffer(by_hand(bits, WIDTHS[dtype], order), kind)
    wide = widen(values, dtype)
    assert wide.dtype.isnative and same(wide.tolist(), expected)
    bad = [index for index, value in enumerate(expected) if not math.isfinite(value)]
    if not bad:
        require_finite(StoredTensor("w", dtype, values))
        return
    with pytest.raises(CheckpointError, match=rf"^w: {expected[bad[0]]} at index \({bad[0]},\)"):
        require_finite(StoredTensor("w", dtype, values))


def turned_around(directory: Path, target: Path) -> Path:
    """A copy whose weights are big-endian, under the same headers."""
    shutil.copytree(directory, target)
    for path in target.glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        body = bytearray(content[start:])
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                span = slice(*entry["data_offsets"])
                body[span] = np.frombuffer(body[span], f"u{WIDTHS[entry['dtype']]}").byteswap().tobytes()
        path.write_bytes(content[:start] + body)
    return target


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("name", "numerics"),
    [("sharded_mixed_types", "exact"), ("sharded_mixed_types", "float32"), ("moe_published", "exact")],
)
def test_a_checkpoint_in_the_other_order_gives_the_same_bits(tmp_path, monkeypatch, name: str, numerics: str):
    prompt, directory = [1, 2, 3, 5, 8, 13], TOP / "fixtures" / "torture" / name
    expected = load(directory, numerics).logits(prompt).tobytes()
    turned = turned_around(directory, tmp_path / "turned")
    for dtype, kind in list(DTYPES.items()):
        monkeypatch.setitem(DTYPES, dtype, kind.newbyteorder(">"))
    for where in ("resident", "streamed"):
        assert load(turned, numerics, weights=where).logits(prompt).tobytes() == expected, where


@pytest.mark.parametrize("dtype", dump.WHOLE)
def test_token_ids_written_by_hand_are_read(dtype: str):
    width, config = int(dtype[1:]) // 8, load_config(TOP / "fixtures" / "trained")
    largest = min(config.vocab_size, 2 ** (8 * width - (dtype[0] == "I"))) - 1
    content = by_hand([largest, 1], width, "little")
    assert dump.read_ids((dtype, (2,), content), "ids", config).tolist() == [largest, 1]


# --- writing: what a machine of the other order has in memory

FINITE = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20)


@pytest.mark.parametrize("kind", ["f4", "f8", "i8"])
@given(values=FINITE)
def test_results_of_either_order_are_the_same_line_and_hash(values: list[float], kind: str):
    numbers = [int(value) % 2**63 if math.isfinite(value) else 0 for value in values] if kind == "i8" else values
    little, big = (encoded({"a": np.array(numbers, order + kind)}) for order in "<>")
    assert little == big and json_sha256(little) == json_sha256(big)
    form = {"f4": "f", "f8": "d", "i8": "q"}[kind]
    assert base64.b64decode(big["a"]["base64"]) == struct.pack(f"<{len(numbers)}{form}", *numbers)
    again = decoded(big, "here")["a"]
    assert again.dtype.isnative and again.tolist() == numbers


# --- the source: every place where bytes become numbers in an order that the expression itself does not name

NATIVE = {  # why that is right
    "marks in another engine's tensors, written and read by this process": {
        "self.cache.cache_allocators[FULL]._copy_view.view(-1)",
        "tensor.view(torch.int16)",
        "tensor.view(torch.int16).view(-1, size // 2)",
    },
    "numbers that this process computed, all in its own order": {
        "(values.astype(np.uint32) << np.uint32(16)).view(np.float32)",
        "shifted.view(np.int64)",
        "weight[rows].view(np.uint32)",
        "weight.view(np.uint32)",
        "np.full(LANES, 512, np.uint32).view(np.float32)",
        "(subnormal * np.float32(0.5)).view(np.uint32)",
        "x.reshape(-1).view(np.uint32)",
        "output.reshape(-1).view(np.uint32)",
        "weights.view(np.uint32)",
        "near.view(np.uint32)",
        "(bits.astype(np.uint32) | np.uint32(1)).view(np.float32)",
        "np.frombuffer(answer.logits[position], row.dtype)",
    },
    "the order of a table of dtypes, or of the array itself": {
        "data[begin:end].view(known[dtype])",
        "header.content[begin:begin + size].view(numbers)",
        "np.frombuffer(content, known[dtype])",
        "np.frombuffer(content, STORED[kind])",
        "np.frombuffer(base64.b64decode(value['base64'], validate=True), value['dtype'])",
        "chunk.view(np.dtype(np.uint16).newbyteorder(chunk.dtype.byteorder))",
    },
    "memory of llama.cpp, in this process and in its own order": {
        "np.frombuffer(bytes(tensor.op_params), np.float32)",
        "ctypes.cast(pointer, ctypes.POINTER(Tensor))",
    },
    "shapes of PyTorch's tensors": {
        "flat_query.view(query.shape)",
        "flat_key.view(key.shape)",
        "query.clone().view(shape)",
        "key.clone().view(shape)",
        "q.view(tokens, HEADS, DIM)",
    },
}
READERS = ("view", "frombuffer", "fromfile", "memmap", "cast", "pack", "unpack", "unpack_from", "iter_unpack")
ANY_READER = re.compile(rf"\b(?:{'|'.join(READERS)})\b")


def calls_of_unnamed_order(source: str) -> set[str]:
    """Calls of READERS, but of single bytes, of which no argument is a text that begins with "<" or ">"."""
    calls = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS:
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            if {"np.uint8", "np.ndarray"} & set(map(ast.unparse, arguments)):
                continue
            given = [arg.values[0] if isinstance(arg, ast.JoinedStr) else arg for arg in node.args]
            texts = [str(argument.value) for argument in given if isinstance(argument, ast.Constant)]
            if not any(text.startswith(("<", ">")) for text in texts):
                calls.add(ast.unparse(node))
    return calls


def test_no_bytes_are_read_in_the_machines_own_order():
    files = [path for folder in ("lfm2np", "scheduler", "fixtures") for path in (TOP / folder).rglob("*.py")]
    sources = [source for path in files if ANY_READER.search(source := path.read_text())]
    actual = set().union(*map(calls_of_unnamed_order, sources))
    assert actual == set().union(*NATIVE.values())


@pytest.mark.parametrize(
    "source", ["np.frombuffer(x, np.float32)", "x.view('u2')", "struct.unpack('Q', x)", "np.memmap(x, 'f4')"]
)
def test_such_a_reading_is_seen(source: str):
    assert calls_of_unnamed_order(f"y = [{source}]") == {source}
