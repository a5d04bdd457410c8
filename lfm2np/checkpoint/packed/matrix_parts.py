"""The tensors of a file that make one quantised matrix: taken by what they are, checked, and left out of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.layout import require_shape
from lfm2np.checkpoint.packed.rows import packed_words
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.errors import CheckpointError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import Dim, layout_of
from lfm2np.truth.weights import EMBEDDING, HEAD

Dims = tuple[Dim, Dim]
INTEGERS = ("I32", "I64")


class Module(NamedTuple):
    """A module with a matrix: our name of it, and the file's, which messages use."""

    name: str
    called: str

    @property
    def names(self) -> tuple[str, ...]:
        """By which config.json may name it: the file's, and transformers' where it renames what the file has."""
        return self.called, self.called.replace("self_attn.gate_proj", "self_attn.g_proj")


def modules_of(names: Iterable[str], tensors: Mapping[str, StoredTensor]) -> list[Module]:
    """The modules of `names`, which are ours of weights."""
    called = {name.rpartition(".")[0]: tensor.name.rpartition(".")[0] for name, tensor in tensors.items()}
    modules = [name.removesuffix(".weight") for name in names]
    return [Module(module, called.get(module, module)) for module in modules]


class Parts:
    """The tensors of one module by what they are, and which of them were used."""

    def __init__(self, tensors: Mapping[str, StoredTensor], module: Module, source: str):
        self.tensors, self.module, self.source = tensors, module, source
        self.used: set[str] = set()

    def take(self, part: str, key: str, dtypes: tuple[str, ...], dims: tuple[Dim, ...] | None = None) -> StoredTensor:
        """The tensor that `key` of config.json asks for. CheckpointError if it is missing, of another type or shape."""
        if part not in self:
            raise CheckpointError(f"{self.source}: missing {self.called(part)}, expected it from {key} (config.json)")
        stored = self[part]
        self.used.add(f"{self.module.name}.{part}")
        if stored.dtype not in dtypes:
            raise stored.wrong(f"dtype {stored.dtype}, expected {' or '.join(dtypes)} from {key} (config.json)")
        if dims is not None:
            require_shape(stored, dims)
        return stored

    def take_number(self, part: str, key: str, dtypes: tuple[str, ...], strategy: str) -> StoredTensor:
        """The same of a tensor with one number, of shape () or (1,)."""
        stored = self.take(part, key, dtypes)
        if stored.shape != ():
            require_shape(stored, ((1, strategy),))
        return stored

    def __contains__(self, part: str) -> bool:
        return f"{self.module.name}.{part}" in self.tensors

    def __getitem__(self, part: str) -> StoredTensor:
        return self.tensors[f"{self.module.name}.{part}"]

    def called(self, part: str) -> str:
        return f"{self.module.called}.{part}"

    def wrong(self, part: str, text: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self.called(part)}: {text}")


def with_matrices(
    tensors: Mapping[str, StoredTensor],
    config: ModelConfig,
    source: str,
    read: Callable[[Parts, Dims], StoredTensor | None],
) -> dict[str, StoredTensor]:
    """What is no part of a matrix that `read` puts together keeps its name."""
    joined = dict(tensors)
    for module, dims in matrices(tensors, config):
        parts = Parts(tensors, module, source)
        matrix = read(parts, dims)
        if matrix is not None:
            for name in parts.used:
                del joined[name]
            joined[f"{module.name}.weight"] = matrix
    return joined


def matrices(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> Iterator[tuple[Module, Dims]]:
    """A tied head counts if the file has one."""
    layout = layout_of(config)
    if any(name.startswith(HEAD) for name in tensors):
        layout[HEAD] = layout[EMBEDDING]
    weights = {name: (dims[0], dims[1]) for name, dims in layout.items() if len(dims) == 2}
    yield from zip(modules_of(weights, tensors), weights.values(), strict=True)


def packed_dim(dim: Dim, bits: int, key: str) -> Dim:
    """Of a row of codes in 32-bit words; `key` says how many bits each has."""
    return packed_words(bits, dim[0]), f"{dim[1]}*{key}/32"


def groups_of_columns(parts: Parts, part: str, key: str, columns: Dim, last: int) -> NDArray[np.int64]:
    """The group of each column, 0 to `last`."""
    stored = parts.take(part, key, INTEGERS, (columns,))
    groups = stored.array.astype(np.int64)
    for bad in np.flatnonzero((groups < 0) | (groups > last))[:1]:
        raise stored.wrong(f"group {int(groups[bad])} of column {int(bad)}, expected 0 to {last}")
    return groups
