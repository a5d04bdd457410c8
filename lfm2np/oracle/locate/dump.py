"""A file of activations, as an engine's author writes it: read, and checked against the shapes that the config
implies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors
from safetensors import SafetensorError
from safetensors.numpy import save

from lfm2np.checkpoint.stored import widen
from lfm2np.errors import DumpError
from lfm2np.oracle.locate.operations import Operation, operations, window_of
from lfm2np.oracle.locate.patterns import TOKEN, Context, Steps
from lfm2np.oracle.locate.spread import PRECISIONS, Array
from lfm2np.truth.config import ModelConfig
from lfm2np.values import plain, show

IDS, STEPS = "token_ids", "steps"
CHECKSUM = "lfm2np.file_sha256"  # in the metadata of what is recorded here: of the file with zeros in its place
BLANK = "0" * 64
WHOLE = {f"{sign}{bits}": f"<{sign.lower()}{bits // 8}" for sign in "IU" for bits in (8, 16, 32, 64)}
STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # little-endian, whatever the machine's own order
REAL = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FRAMEWORKS = ("np", "pt", "mlx", "tf", "flax")  # what packages that write safetensors put there
MOST_LISTED = 8
Entry = tuple[str, tuple[int, ...], bytes]  # of a safetensors file: dtype, shape, content


@dataclass(frozen=True, eq=False)
class Dump:
    """The dumped tensors of one sequence.

    tensors    by the names of operations.py, each [rows, width] float64; tensors with a row per token may hold the last
               rows only: `lm_head`, or those after a cached prefix
    stored     the format that each was stored in; whole numbers have none
    unknown    names without a meaning here, which are ignored
    sizes      rows of each step up to the last token; empty: one step
    format     what the engine declares that it computes in
    """

    token_ids: Array  # [T] int64
    tensors: Mapping[str, Array]
    stored: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    format: str | None = None

    @property
    def steps(self) -> Steps:
        return Steps(len(self.token_ids), self.sizes or (len(self.token_ids),))


def read_dump(path: Path, config: ModelConfig) -> Dump:
    """The file's tensors. DumpError names file, tensor and expectation."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as problem:
        raise DumpError(f"{path}: cannot be read: {problem}") from None
    return parse_dump(content, str(path), config)


def content_of(tensors: Mapping[str, Array], format: str | None = None) -> bytes:
    """A safetensors file of them, and what the engine computes in; with its checksum."""
    content = save(dict(tensors), {**({"format": format} if format else {}), CHECKSUM: BLANK})
    return content.replace(BLANK.encode(), hashlib.sha256(content).hexdigest().encode(), 1)


def parse_dump(content: bytes, source: str, config: ModelConfig) -> Dump:
    """The content of a file; errors begin with `source`."""
    try:
        entries = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except SafetensorError as problem:
        raise DumpError(f"{source}: not a sound safetensors file ({len(content)} bytes): {problem}") from None
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = header.get("__metadata__", {})
    if (stated := metadata.get(CHECKSUM)) is not None:
        expected = hashlib.sha256(content.replace(stated.encode(), BLANK.encode(), 1)).hexdigest()
        if stated != expected:
            stated = f"{CHECKSUM} {show(stated)} in its metadata, expected {expected}"
            raise DumpError(f"{source}: {stated}: changed since it was written")
    format = metadata.get("format")
    if format not in (None, *PRECISIONS, *FRAMEWORKS):
        raise DumpError(f"{source}: format {show(format)} in its metadata, expected one of {', '.join(PRECISIONS)}")
    stored = {name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in entries}
    dump = make_dump(stored, source, config, format if format in PRECISIONS else None)
    if stated is None:
        require_placed_logits(dump, source)
    return dump


def require_placed_logits(dump: Dump, source: str) -> None:
    """DumpError for a row of logits a step that are not the last rows: a recorder has left out those before."""
    count, ends = len(dump.tensors.get("lm_head", ())), dump.steps.ends
    if len(ends) == count and ends[0] != len(dump.token_ids) - count + 1:
        sizes, total = shortened(dump.steps.sizes), len(dump.token_ids)
        raise DumpError(
            f"{source}: lm_head: {count} rows for steps of {sizes} are ambiguous: of each step the last, or the "
            f"last {count} of T={total}; expected all rows, or those of the last steps alone"
        )


def make_dump(entries: Mapping[str, Entry], source: str, config: ModelConfig, format: str | None) -> Dump:
    known = {operation.name: operation for operation in operations(config)}
    unknown = [plain(name) for name in sorted(entries) if name not in known and name not in (IDS, STEPS)]
    if IDS not in entries:
        raise DumpError(f"{source}: no tensor {IDS}, expected the whole numbers [T] that the engine ran on")
    ids = read_ids(entries[IDS], f"{source}: {IDS}", config)
    if unknown and len(unknown) == len(entries) - 1:
        raise DumpError(
            f"{source}: none of its {len(unknown)} names is known ({shortened(unknown)}): "
            f"expected {', '.join(list(known)[:2])}, ..."
        )
    sizes = read_steps(entries[STEPS], f"{source}: {STEPS}", len(ids)) if STEPS in entries else ()
    steps = Steps(len(ids), sizes or (len(ids),))
    tensors: dict[str, Array] = {}
    stored: dict[str, str] = {}
    for name, operation in known.items():
        if name in entries:
            entry, what = entries[name], f"{source}: {name}"
            values = read_numbers(entry, what, WHOLE if operation.is_choice else STORED).astype(np.float64)
            tensors[name] = as_rows(values, operation, steps, config, what)
            stored |= {} if operation.is_choice else {name: REAL[entry[0]]}
    return Dump(ids, tensors, stored, tuple(unknown), sizes, format)


def read_ids(entry: Entry, what: str, config: ModelConfig) -> Array:
    """[T] or [1, T] whole numbers in the vocabulary."""
    ids, most = read_whole(entry, what, "T"), config.max_position_embeddings
    wrong = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if wrong.size:
        value = int(ids[wrong[0]])
        raise DumpError(f"{what}: {value} at {int(wrong[0])}, expected ids below vocab_size={config.vocab_size}")
    if len(ids) > most:
        raise DumpError(f"{what}: {len(ids)} tokens, expected at most max_position_embeddings={most}")
    return ids.astype(np.int64)


def read_steps(entry: Entry, what: str, tokens: int) -> tuple[int, ...]:
    """[S] rows of each step, no more than there are tokens."""
    sizes = [int(size) for size in read_whole(entry, what, "S")]
    if min(sizes) < 1 or sum(sizes) > tokens:
        added = f"{shortened(sizes)}, {sum(sizes)} in sum"
        raise DumpError(f"{what}: {added}, expected rows of each step, each at least 1, in sum at most T={tokens}")
    return tuple(sizes)


def shortened(items: Sequence[object]) -> str:
    """The first few, and how many more."""
    more = f" and {len(items) - MOST_LISTED} more" if len(items) > MOST_LISTED else ""
    return ", ".join(map(str, items[:MOST_LISTED])) + more


def read_whole(entry: Entry, what: str, letter: str) -> Array:
    """[n] or [1, n] whole numbers of any width."""
    shape, values = entry[1], read_numbers(entry, what, WHOLE)
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != 1) or 0 in shape:
        raise DumpError(f"{what}: shape {shape}, expected ({letter},) or (1, {letter}) with at least one number")
    return values.reshape(-1)


def read_numbers(entry: Entry, what: str, known: Mapping[str, str]) -> Array:
    """Of one of the known dtypes, whose table says their byte order; bfloat16 is the upper half of a float32."""
    dtype, shape, content = entry
    if dtype not in known:
        kind = "whole numbers" if known is WHOLE else "numbers"
        raise DumpError(f"{what}: dtype {dtype}, expected {kind} of {', '.join(known)}")
    values = np.frombuffer(content, known[dtype]).reshape(shape)
    return np.asarray(widen(values, dtype)) if dtype == "BF16" else values


def as_rows(values: Array, operation: Operation, steps: Steps, config: ModelConfig, what: str) -> Array:
    """[rows, width] from what engines dump: with a batch of one, separate heads, or a convolution's channels first.

    Conv1d's output is [D, T + L - 1], as it pads both ends: the first T columns count.
    """
    width = operation.width * (steps.tokens if operation.by_position else 1)
    is_convolution = operation.name.endswith(".conv.conv") and len(steps.sizes) == 1 and steps.first == 0
    padded = steps.tokens + config.conv_L_cache - 1
    rows: Sequence[int] = (steps.count(operation.per),)
    if operation.name == "lm_head":
        rows = range(1, steps.tokens + 1)
    elif operation.per == TOKEN:
        rows = steps.tokens, steps.tokens - steps.first
    for array in (values, values[0]) if values.ndim > 1 and len(values) == 1 else (values,):
        if array.ndim > 1 and len(array) in rows and array[0].size == width:
            return causal(array.reshape(len(array), width), operation, steps.tokens, config)
        if is_convolution and array.ndim == 2 and len(array) == width and array.shape[1] in (steps.tokens, padded):
            return np.ascontiguousarray(array[:, : steps.tokens].T)
    expected = [f"[{rows[-1]}, {width}]", *([f"[{width}, {padded}]"] if is_convolution else [])]
    counted = ""
    if len(steps.sizes) > 1 or steps.first or operation.per != TOKEN:
        counted = f" in {STEPS} of {shortened(steps.sizes)} rows, {sum(steps.sizes)} in sum"
    if isinstance(operation.per, Context) and operation.per.window is not None:
        counted += f": what each step sees, from {operation.per.window - 1} positions before its first on"
    raise DumpError(f"{what}: shape {values.shape}, expected {' or '.join(expected)} for T={steps.tokens}{counted}")


def causal(rows: Array, operation: Operation, tokens: int, config: ModelConfig) -> Array:
    """Attention's scores where a row sees nothing become 0: engines put anything there."""
    if operation.layer is None or not operation.name.endswith(".self_attn.scores"):
        return rows
    behind = np.arange(tokens - len(rows), tokens)[:, None] - np.arange(tokens)
    seen = (behind >= 0) & (behind < (window_of(config, operation.layer) or tokens))
    return np.where(seen[:, None], rows.reshape(len(rows), -1, tokens), 0.0).reshape(rows.shape)


def default_format(dump: Dump) -> str:
    """The declared format; else the coarsest that any tensor is stored in; float32 for none, and for float64."""
    if dump.format is not None:
        return dump.format
    precisions = [PRECISIONS[dtype] for dtype in dump.stored.values() if dtype in PRECISIONS]
    return max(precisions, key=lambda precision: precision.unit).name if precisions else "float32"
