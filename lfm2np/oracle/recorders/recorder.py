"""What an engine's author calls to write a dump that `lfm2np locate` reads: NumPy and safetensors alone.

    with Recorder("dump.safetensors") as recorder:
        recorder.step([5, 6, 7])                    # the prompt's tokens, in one step
        recorder.keep("model.layers.0.conv.in_proj", rows)      # [3, 3 * D], where the engine has them
        ...
        recorder.step([39])                         # the next step, of one token
        recorder.keep("model.layers.0.conv.state", state)       # [1, L - 1, D], what this step started from
        ...

Of a ragged batch keep the rows of one request: `recorder.keep(name, rows[start:stop])`. Names and shapes are those of
docs/engine/7-locate.md; other names work with `lfm2np locate --names FILE`. The dump may be incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from lfm2np.errors import DumpError
from lfm2np.oracle.locate.dump import CHECKSUM, IDS, STEPS, dump_sha256
from lfm2np.oracle.locate.spread import PRECISIONS
from lfm2np.whole_file import write_whole

Array = NDArray[Any]
KINDS = "fiub"  # of numbers that can be kept: real, whole, truth values


class Recorder:
    """Tensors of one request, step by step; `save` writes them all, as the end of a `with` block does.

    path     the file to write; None: `tensors()` alone
    format   what the engine computes in (float32, float16, bfloat16, q8), where the arrays kept are wider
    prefix   tokens before the first step that came from a cache
    """

    def __init__(self, path: str | Path | None = None, format: str | None = None, prefix: Sequence[int] = ()) -> None:
        if format is not None and format not in PRECISIONS:
            raise DumpError(f"format {format!r}: expected one of {', '.join(PRECISIONS)}")
        self.path, self.format = path, format
        self.token_ids = [int(token_id) for token_id in prefix]
        self.sizes: list[int] = []
        self._kept: dict[str, list[Array]] = {}
        self._in_step: set[str] = set()

    def step(self, token_ids: Sequence[int]) -> None:
        """Begins a step with these tokens; what is kept from now on belongs to it."""
        if len(token_ids) == 0:
            raise DumpError(f"step {len(self.sizes)}: no tokens, expected at least one")
        self.token_ids += [int(token_id) for token_id in token_ids]
        self.sizes.append(len(token_ids))
        self._in_step.clear()

    def keep(self, name: str, values: Any) -> None:
        """A tensor of this step, its rows first: [t, ...] for t tokens; copied. DumpError if it was kept already."""
        if not self.sizes:
            raise DumpError(f"{name}: kept before the first step, expected step(token_ids) first")
        if name in self._in_step or name in (IDS, STEPS):
            raise DumpError(f"{name}: kept already in step {len(self.sizes) - 1}, expected once a step")
        array = np.array(values)
        if array.dtype.kind not in KINDS or array.ndim == 0:
            raise DumpError(f"{name}: {array.dtype} {array.shape}, expected numbers with a row for each token")
        self._in_step.add(name)
        self._kept.setdefault(name, []).append(array)

    def tensors(self) -> dict[str, Array]:
        """All that was kept, the steps' rows one after another."""
        joined = {IDS: np.array(self.token_ids, np.int64), STEPS: np.array(self.sizes, np.int64)}
        for name, parts in self._kept.items():
            shapes = {part.shape[1:] for part in parts}
            if len(shapes) > 1:
                raise DumpError(f"{name}: rows of shapes {sorted(shapes)} in different steps, expected one")
            joined[name] = np.ascontiguousarray(np.concatenate(parts))  # safetensors writes the memory as it lies
        return joined

    def content(self) -> bytes:
        """The file."""
        return content_of(self.tensors(), self.format)

    def save(self) -> None:
        """Writes the file, whole or not at all."""
        if self.path is None:
            raise DumpError("a recorder without a path: expected Recorder(path)")
        write_whole(self.path, self.content())

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.save()


def content_of(tensors: Mapping[str, Array], format: str | None = None) -> bytes:
    """A safetensors file of them, and what the engine computes in; with its checksum."""
    metadata = {"format": format} if format else {}
    return save(dict(tensors), {**metadata, CHECKSUM: dump_sha256(save(dict(tensors), metadata))})
