"""A file of activations, as an engine's author writes it: read, and checked against the shapes that the config
implies.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors import SafetensorError

from lfm2np.checkpoint.stored import widen
from lfm2np.checkpoint.strict_json import read_object
from lfm2np.errors import DumpError
from lfm2np.oracle.locate.operations import OPTIONAL, Operation, operations, window_of
from lfm2np.oracle.locate.patterns import TOKEN, Context, Steps
from lfm2np.oracle.locate.spread import PRECISIONS
from lfm2np.truth.config import ModelConfig
from lfm2np.values import plain, show
from scheduler.checksum import json_sha256

Array = NDArray[Any]
IDS, STEPS = "token_ids", "steps"
CHECKSUM = "lfm2np.sha256"  # in a file's metadata: what is recorded here has it
WHOLE = {f"{sign}{bits}": f"<{sign.lower()}{bits // 8}" for sign in "IU" for bits in (8, 16, 32, 64)}
REAL = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # little-endian, whatever the machine's own order
PARTS = """
operator_norm conv.in_proj conv.u conv.conv conv.gated conv.out_proj post_operator_norm residual ffn_norm post_ffn_norm
self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.g_proj self_attn.q_layernorm self_attn.k_layernorm
self_attn.q_rotated self_attn.k_rotated self_attn.attended self_attn.gate self_attn.gated self_attn.out_proj
feed_forward.w1 feed_forward.w3 feed_forward.gated feed_forward.w2 feed_forward.gate feed_forward.scores
feed_forward.experts_chosen feed_forward.expert_weights feed_forward.expert_outputs feed_forward.mixed
"""  # of a layer of any model of this family
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


def read_dump(path: Path, config: ModelConfig, names: Mapping[str, str] | None = None) -> Dump:
    """The file's tensors; `names` maps the engine's names to ours. DumpError names file, tensor and expectation."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as problem:
        raise DumpError(f"{path}: cannot be read: {problem}") from None
    return parse_dump(content, str(path), config, names)


def parse_dump(content: bytes, source: str, config: ModelConfig, names: Mapping[str, str] | None = None) -> Dump:
    """The content of a file; errors begin with `source`."""
    try:
        entries = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except SafetensorError as problem:
        raise DumpError(f"{source}: not a sound safetensors file ({len(content)} bytes): {problem}") from None
    metadata = header_of(content).get("__metadata__", {})
    if CHECKSUM in metadata and metadata[CHECKSUM] != (expected := dump_sha256(content)):
        stated = f"{CHECKSUM} {show(metadata[CHECKSUM])} in its metadata, expected {expected}"
        raise DumpError(f"{source}: {stated}: changed since it was written")
    stored = {name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in entries}
    format = declared_format(metadata.get("format"), source)
    dump = make_dump(stored, source, config, names or {})
    if CHECKSUM not in metadata:
        require_placed_logits(dump, source)
    return replace(dump, format=format)


def require_placed_logits(dump: Dump, source: str) -> None:
    """DumpError for a row of logits a step that are not the last rows: a recorder has left out those before."""
    count, ends = len(dump.tensors.get("lm_head", ())), dump.steps.ends
    if len(ends) == count and ends[0] != len(dump.token_ids) - count + 1:
        sizes, total = shortened(dump.steps.sizes), len(dump.token_ids)
        raise DumpError(
            f"{source}: lm_head: {count} rows for steps of {sizes} are ambiguous: of each step the last, or the "
            f"last {count} of T={total}; expected all rows, or those of the last steps alone"
        )


def header_of(content: bytes) -> dict[str, Any]:
    """Of a sound safetensors file: see https://github.com/huggingface/safetensors, "Format"."""
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


def dump_sha256(content: bytes) -> str:
    """The checksum of a sound safetensors file: of its header without the checksum, and its data.

    The SHA-256 of [header, SHA-256 of everything after the header] as JSON, as in scheduler/checksum.py.
    """
    header = header_of(content)
    metadata = {name: value for name, value in header.pop("__metadata__", {}).items() if name != CHECKSUM}
    data = content[8 + int.from_bytes(content[:8], "little") :]
    return json_sha256([{**header, "__metadata__": metadata}, hashlib.sha256(data).hexdigest()])


def declared_format(name: Any, source: str) -> str | None:
    """`format` of the file's metadata."""
    if name is not None and name not in PRECISIONS and name not in FRAMEWORKS:
        raise DumpError(f"{source}: format {show(name)} in its metadata, expected one of {', '.join(PRECISIONS)}")
    return name if name in PRECISIONS else None


def make_dump(entries: Mapping[str, Entry], source: str, config: ModelConfig, names: Mapping[str, str]) -> Dump:
    known = {operation.name: operation for operation in operations(config)}
    require_meanings(names, known)
    given: dict[str, str] = {}  # by meaning, the name in the file
    unknown = []
    for name in sorted(entries):
        meaning = names.get(name, name)
        if meaning not in (IDS, STEPS) and meaning not in known:
            unknown.append(plain(name))
        elif meaning in given:
            raise DumpError(f"{source}: {plain(name)} and {plain(given[meaning])} both mean {meaning}: expected one")
        else:
            given[meaning] = name
    if IDS not in given:
        raise DumpError(f"{source}: no tensor {IDS}, expected the whole numbers [T] that the engine ran on")
    ids = read_ids(entries[given[IDS]], f"{source}: {plain(given[IDS])}", config)
    if unknown and len(given) == 1:
        raise DumpError(
            f"{source}: none of its {len(unknown)} names is known ({shortened(unknown)}): "
            f"expected {', '.join(list(known)[:2])}, ..., or --names to say what they mean"
        )
    sizes = read_steps(entries[given[STEPS]], f"{source}: {plain(given[STEPS])}", len(ids)) if STEPS in given else ()
    steps = Steps(len(ids), sizes or (len(ids),))
    tensors, stored = {}, {}
    for meaning, name in given.items():
        if meaning not in (IDS, STEPS):
            what, is_choice = f"{source}: {plain(name)}", known[meaning].is_choice
            values = read_numbers(entries[name], what, WHOLE if is_choice else STORED).astype(np.float64)
            tensors[meaning] = as_rows(values, known[meaning], steps, config, what)
            if not is_choice:
                stored[meaning] = REAL[entries[name][0]]
    return Dump(ids, tensors, stored, tuple(unknown), sizes)


def read_names(path: Path, config: ModelConfig) -> dict[str, str]:
    """A JSON object of the engine's names to ours; "{layer}" in both stands for every layer's number."""
    meanings: dict[str, str] = {}
    for name, meaning in read_object(path, DumpError).items():
        if not isinstance(meaning, str):
            raise DumpError(f"{path}: {plain(name)}: {show(meaning)}, expected the name of a tensor")
        if ("{layer}" in name) != ("{layer}" in meaning):
            raise DumpError(f"{path}: {plain(name)}: {show(meaning)}, expected {{layer}} in both or in neither")
        layers = range(config.num_hidden_layers) if "{layer}" in name else (0,)
        for layer in layers:
            meanings[name.replace("{layer}", str(layer))] = meaning.replace("{layer}", str(layer))
    return meanings


def require_meanings(names: Mapping[str, str], known: Mapping[str, Operation]) -> None:
    """DumpError for a meaning that no model of this family has; one of the other layer type is allowed."""
    forms = {re.sub(r"\.\d+", ".{layer}", name) for name in known} | {IDS, STEPS}
    forms |= {f"model.layers.{{layer}}.{part}" for part in (*PARTS.split(), *OPTIONAL)}
    for name, meaning in names.items():
        if re.sub(r"\.\d+", ".{layer}", meaning) not in forms:
            raise DumpError(f"--names: {plain(name)}: {show(meaning)}, expected one of {', '.join(sorted(forms))}")


def read_ids(entry: Entry, what: str, config: ModelConfig) -> Array:
    """[T] or [1, T] whole numbers in the vocabulary."""
    ids = read_whole(entry, what, "T")
    wrong = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if wrong.size:
        value = int(ids[wrong[0]])
        raise DumpError(f"{what}: {value} at {int(wrong[0])}, expected ids below vocab_size={config.vocab_size}")
    if len(ids) > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise DumpError(f"{what}: {len(ids)} tokens, expected at most max_position_embeddings={most}")
    return ids.astype(np.int64)


def read_steps(entry: Entry, what: str, tokens: int) -> tuple[int, ...]:
    """[S] rows of each step, no more than there are tokens."""
    sizes = [int(size) for size in read_whole(entry, what, "S")]
    if min(sizes) < 1:
        raise DumpError(f"{what}: {min(sizes)}, expected rows of each step, at least 1")
    if sum(sizes) > tokens:
        added = f"{shortened(sizes)}, {sum(sizes)} in sum"
        raise DumpError(f"{what}: {added}, expected rows of each step, in sum at most T={tokens}")
    return tuple(sizes)


def shortened(items: Sequence[object]) -> str:
    """The first few, and how many more."""
    more = f" and {len(items) - MOST_LISTED} more" if len(items) > MOST_LISTED else ""
    return ", ".join(map(str, items[:MOST_LISTED])) + more


def read_whole(entry: Entry, what: str, letter: str) -> Array:
    """[n] or [1, n] whole numbers of any width."""
    shape, values = entry[1], read_numbers(entry, what, WHOLE)
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != 1) or 0 in shape:
        noun = "token" if letter == "T" else "step"
        raise DumpError(f"{what}: shape {shape}, expected ({letter},) or (1, {letter}) with at least one {noun}")
    return values.reshape(-1)


def read_numbers(entry: Entry, what: str, known: Mapping[str, str]) -> Array:
    """Of one of the known dtypes, whose table says their byte order; bfloat16 is the upper half of a float32."""
    dtype, shape, content = entry
    if dtype not in known:
        expected = f"whole numbers ({', '.join(WHOLE)})" if known is WHOLE else f"one of {', '.join(REAL)}"
        raise DumpError(f"{what}: dtype {dtype}, expected {expected}")
    values = np.frombuffer(content, known[dtype]).reshape(shape)
    return np.asarray(widen(values, dtype)) if dtype == "BF16" else values


def as_rows(values: Array, operation: Operation, steps: Steps, config: ModelConfig, what: str) -> Array:
    """[rows, width] from what engines dump: with a batch of one, separate heads, or a convolution's channels first.

    Conv1d's output is [D, T + L - 1], as it pads both ends: the first T columns count.
    """
    width = operation.width * (steps.tokens if operation.by_position else 1)
    is_convolution = operation.name.endswith(".conv.conv") and len(steps.sizes) == 1 and steps.first == 0
    padded = steps.tokens + config.conv_L_cache - 1
    rows = allowed_rows(operation, steps)
    for array in (values, values[0]) if values.ndim > 1 and len(values) == 1 else (values,):
        if array.ndim > 1 and len(array) in rows and array[0].size == width:
            return causal(array.reshape(len(array), width), operation, steps.tokens, config)
        if is_convolution and array.ndim == 2 and len(array) == width and array.shape[1] in (steps.tokens, padded):
            return np.ascontiguousarray(array[:, : steps.tokens].T)
    expected = [f"[{rows[-1]}, {width}]", *([f"[{width}, {padded}]"] if is_convolution else [])]
    raise DumpError(
        f"{what}: shape {values.shape}, expected {' or '.join(expected)} for T={steps.tokens} tokens"
        + counted_by(operation, steps)
    )


def counted_by(operation: Operation, steps: Steps) -> str:
    """The steps, and the window, that an operation's rows are counted by, in words."""
    words = ""
    if len(steps.sizes) > 1 or steps.first or operation.per != TOKEN:
        words = f" in {STEPS} of {shortened(steps.sizes)} rows"
    if steps.first:
        words += f", {sum(steps.sizes)} in sum"
    if isinstance(operation.per, Context) and operation.per.window is not None:
        words += f": what each step sees, from {operation.per.window - 1} positions before its first on"
    return words


def allowed_rows(operation: Operation, steps: Steps) -> Sequence[int]:
    if operation.name == "lm_head":
        return range(1, steps.tokens + 1)
    if operation.per == TOKEN:
        return steps.tokens, steps.tokens - steps.first
    return (steps.count(operation.per),)


def causal(rows: Array, operation: Operation, tokens: int, config: ModelConfig) -> Array:
    """Attention's scores where a row sees nothing become 0: engines put anything there."""
    if operation.layer is None or not operation.name.endswith(".self_attn.scores"):
        return rows
    window = window_of(config, operation.layer) or tokens
    behind = np.arange(tokens - len(rows), tokens)[:, None] - np.arange(tokens)
    seen = (behind >= 0) & (behind < window)
    return np.where(seen[:, None], rows.reshape(len(rows), -1, tokens), 0.0).reshape(rows.shape)


def default_format(dump: Dump) -> str:
    """The declared format; else the coarsest that any tensor is stored in; float32 for none, and for float64."""
    if dump.format is not None:
        return dump.format
    precisions = [PRECISIONS[dtype] for dtype in dump.stored.values() if dtype in PRECISIONS]
    return max(precisions, key=lambda precision: precision.unit).name if precisions else "float32"
