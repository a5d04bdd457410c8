"""The tensors of a file that make one quantised matrix: taken by what they are, checked, and left out of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.layout import require_shape
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.errors import CheckpointError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import Dim, layout_of
from lfm2np.truth.weights import EMBEDDING, HEAD

Dims = tuple[Dim, Dim]
INTEGERS = ("I32", "I64")


class Parts:
    """The tensors of one module with a matrix by what they are, and which of them were used.

    name    ours of the module
    module  the file's, which messages use
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], name: str, module: str, source: str):
        self.tensors, self.name, self.module, self.source = tensors, name, module, source
        self.used: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """By which config.json may name it: the file's, and transformers' where it renames what the file has."""
        return self.module, self.module.replace("self_attn.gate_proj", "self_attn.g_proj")

    def take(self, part: str, key: str, dtypes: Iterable[str], dims: tuple[Dim, ...] | None = None) -> StoredTensor:
        """The tensor that `key` of config.json asks for. CheckpointError if it is missing, of another type or shape."""
        if part not in self:
            raise CheckpointError(f"{self.source}: missing {self.called(part)}, expected it from {key} (config.json)")
        stored = self[part]
        self.used.add(f"{self.name}.{part}")
        if stored.dtype not in dtypes:
            raise stored.wrong(f"dtype {stored.dtype}, expected {' or '.join(dtypes)} from {key} (config.json)")
        if dims is not None and not (dims[0][0] == len(dims) == 1 and stored.shape == ()):  # one number has no axis
            require_shape(stored, dims)
        return stored

    def groups_of_columns(self, part: str, key: str, columns: Dim, last: int) -> NDArray[np.int64]:
        """The group of each column, 0 to `last`."""
        stored = self.take(part, key, INTEGERS, (columns,))
        groups = stored.array.astype(np.int64)
        for bad in np.flatnonzero((groups < 0) | (groups > last))[:1]:
            raise stored.wrong(f"group {int(groups[bad])} of column {int(bad)}, expected 0 to {last}")
        return groups

    def __contains__(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.tensors

    def __getitem__(self, part: str) -> StoredTensor:
        return self.tensors[f"{self.name}.{part}"]

    def called(self, part: str) -> str:
        return f"{self.module}.{part}"

    def wrong(self, part: str, text: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self.called(part)}: {text}")


def parts_of(weights: Iterable[str], tensors: Mapping[str, StoredTensor], source: str) -> dict[str, Parts]:
    """By `weights`, which are ours."""
    called = {name.rpartition(".")[0]: tensor.name.rpartition(".")[0] for name, tensor in tensors.items()}
    modules = {weight: weight.removesuffix(".weight") for weight in weights}
    return {weight: Parts(tensors, name, called.get(name, name), source) for weight, name in modules.items()}


def matrices(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, source: str
) -> Iterator[tuple[str, Parts, tuple[Dim, ...]]]:
    """Our name of each matrix, its parts and dimensions. A tied head counts if the file has one."""
    layout = {name: dims for name, dims in layout_of(config).items() if len(dims) == 2}
    if any(name.startswith(HEAD) for name in tensors):
        layout[HEAD] = layout[EMBEDDING]
    for name, parts in parts_of(layout, tensors, source).items():
        yield name, parts, layout[name]


def with_matrices(
    tensors: Mapping[str, StoredTensor],
    config: ModelConfig,
    source: str,
    read: Callable[[Parts, Dims], StoredTensor | None],
) -> dict[str, StoredTensor]:
    """What is no part of a matrix that `read` puts together keeps its name."""
    joined = dict(tensors)
    for name, parts, (rows, columns) in matrices(tensors, config, source):
        matrix = read(parts, (rows, columns))
        if matrix is not None:
            for used in parts.used:
                del joined[used]
            joined[name] = matrix
    return joined


def packed_dim(dim: Dim, bits: int, key: str) -> Dim:
    """Of a row of codes in 32-bit words; `key` says how many bits each has."""
    return -(-bits * dim[0] // 32), f"{dim[1]}*{key}/32"
