"""The tensors of a file that make one quantised matrix: taken by what they are, checked, and left out of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.layout import experts_of, require_shape, whole_dims
from lfm2np.checkpoint.names import plan_of
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.errors import CheckpointError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import Dim

Dims = tuple[Dim, ...]
INTEGERS = ("I32", "I64")


class Parts:
    """The tensors of one module by what they are, and which of them were used.

    name    of the module among `tensors`
    module  the file's, which messages use: that of a model that also sees has a prefix
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], name: str, module: str, source: str):
        self.tensors, self.name, self.module, self.source = tensors, name, module, source
        self.used: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """By which config.json may name it: the file's, and transformers' where it renames what the file has."""
        return self.module, self.module.replace("self_attn.gate_proj", "self_attn.g_proj")

    def take(self, part: str, key: str, dtypes: Iterable[str], dims: Dims | None = None) -> StoredTensor:
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


def modules(tensors: Mapping[str, StoredTensor], source: str, config: ModelConfig) -> Iterator[tuple[str, Parts, Dims]]:
    """Of each module that the file should have: our name of its weight (the first of several), parts, dimensions."""
    called = {name.rpartition(".")[0]: tensor.name.rpartition(".")[0] for name, tensor in tensors.items()}
    seen, experts = set[str](), experts_of(config)
    for name, (place, dims) in plan_of(tensors, config).items():
        module, _, kind = place.name.rpartition(".")
        if kind not in ("bias", "expert_bias") and module not in seen:
            seen.add(module)
            yield name, Parts(tensors, module, called.get(module, module), source), whole_dims(place, dims, experts)


Read = Callable[[Parts, Dims], StoredTensor | None]


def with_matrices(
    tensors: Mapping[str, StoredTensor], source: str, config: ModelConfig, read: Read
) -> dict[str, StoredTensor]:
    """With one tensor for the parts of each matrix that `read` puts together; it returns None for what is plain."""
    joined = dict(tensors)
    for _, parts, dims in modules(tensors, source, config):
        matrix = read(parts, dims)
        if matrix is not None:
            for used in parts.used:
                del joined[used]
            joined[f"{parts.name}.weight"] = matrix
    return joined


def packed_dim(dim: Dim, bits: int, key: str) -> Dim:
    """Of a row of codes in 32-bit words; `key` says how many bits each has."""
    return -(-bits * dim[0] // 32), f"{dim[1]}*{key}/32"
