"""What an engine's author calls to write a dump that `lfm2np locate` reads: NumPy and safetensors alone.

    with Recorder("dump.safetensors") as recorder:
        recorder.step([5, 6, 7])                    # the prompt's tokens, in one step
        recorder.keep("model.layers.0.conv.in_proj", rows)      # [3, 3 * D], where the engine has them
        ...
        recorder.step([39], start=3)                # the next step: one token, at position 3 of the request
        recorder.keep("model.layers.0.conv.state", state)       # [1, L - 1, D], what this step started from
        ...

Of a ragged batch keep the rows of one request: `recorder.keep(name, rows[start:stop])`. Names and shapes are those of
docs/engine/7-locate.md. The dump may be incomplete. Where a step begins before the end of the last one (a preempted
request is computed again), the last computation counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.errors import DumpError
from lfm2np.oracle.locate.dump import IDS, STEPS, content_of
from lfm2np.oracle.locate.spread import PRECISIONS
from lfm2np.system import write_whole

Array = NDArray[Any]
KINDS = "fiub"  # of numbers that can be kept: real, whole, truth values
LOGITS, STATE = "lm_head", ".conv.state"


@dataclass
class Step:
    """The tokens of a step from position `start` on, and what is kept of it."""

    start: int
    count: int
    tensors: dict[str, Array] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.count

    def cut(self, end: int) -> None:
        """Drops the rows from position `end` on, which are computed again: always the last of a tensor's."""
        gone = self.end - end
        self.count -= gone
        self.tensors = {
            name: rows if name.endswith(STATE) else rows[: max(0, len(rows) - gone)]
            for name, rows in self.tensors.items()
        }


class Recorder:
    """Tensors of one request, step by step; `save` writes them all, as the end of a `with` block does.

    path     the file to write; None: `tensors()` alone
    format   what the engine computes in (float32, float16, bfloat16, q8), where the arrays kept are wider
    prefix   tokens before the first step that came from a cache
    prompt   of the request, if known: where the first step starts within it, the tokens before are the prefix
    until    a position: what comes after the step that computes it is not kept
    """

    def __init__(
        self,
        path: str | Path | None = None,
        format: str | None = None,
        prefix: Sequence[int] = (),
        until: int | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        if format is not None and format not in PRECISIONS:
            raise DumpError(f"format {format!r}: expected one of {', '.join(PRECISIONS)}")
        self.path, self.format, self.until = path, format, until
        self.token_ids = [int(token_id) for token_id in prefix]
        self._prompt = [int(token_id) for token_id in prompt]
        self._steps: list[Step] = []
        self._is_over = False  # what `until` names has been computed

    @property
    def sizes(self) -> list[int]:
        """Rows of each step."""
        return [step.count for step in self._steps]

    def step(self, token_ids: Sequence[int], start: int | None = None) -> None:
        """Begins a step with these tokens of the request; what is kept from now on belongs to it.

        start   position of the first; None: the one after the last. What earlier steps computed from there on is
                dropped: the caches now hold what is computed again, and later steps read that
        """
        if not self.token_ids and start is not None and 0 < start <= len(self._prompt):
            self.token_ids = self._prompt[:start]
        known = len(self.token_ids)
        if len(token_ids) == 0:
            raise DumpError(f"step {len(self._steps)}: no tokens, expected at least one")
        self._is_over |= bool(self._steps) and self.until is not None and known > self.until
        if self._is_over:
            return
        if start is not None and not 0 <= start <= known:
            hit = "; of a prefix hit name the tokens before it: Recorder(prefix=...)"
            words = f"start={start} after {known} tokens, expected at most {known}{hit}"
            raise DumpError(f"step {len(self._steps)}: {words}")
        first = known if start is None else int(start)
        while self._steps and self._steps[-1].start >= first:
            self._steps.pop()
        if self._steps and self._steps[-1].end > first:
            self._steps[-1].cut(first)
        self.token_ids[first:] = [int(token_id) for token_id in token_ids]
        self._steps.append(Step(first, len(token_ids)))

    def keep(self, name: str, values: Any) -> None:
        """A tensor of this step, its rows first: [t, ...] for t tokens; copied. DumpError if it was kept already."""
        if not self._steps:
            raise DumpError(f"{name}: kept before the first step, expected step(token_ids) first")
        if self._is_over:
            return
        step = self._steps[-1]
        if name in step.tensors or name in (IDS, STEPS):
            raise DumpError(f"{name}: kept already in step {len(self._steps) - 1}, expected once a step")
        array = np.array(values)
        if array.dtype.kind not in KINDS or array.ndim == 0:
            raise DumpError(f"{name}: {array.dtype} {array.shape}, expected numbers with a row for each token")
        is_row = name.endswith(STATE) or (name == LOGITS and array.ndim == 2)  # of as many numbers as there are tokens
        if len(array) == 1 < step.count and array.shape[1:2] == (step.count,) and not is_row:
            array = array[0]  # a batch of one
        if name == LOGITS and len(array) > step.count:
            words = f"{len(array)} rows in a step of {step.count} tokens, expected at most {step.count}, the last ones"
            raise DumpError(f"{name}: {words}")
        step.tensors[name] = array

    def tensors(self) -> dict[str, Array]:
        """All that was kept, the steps' rows one after another; of the logits those that reach to the last token."""
        joined = {IDS: np.array(self.token_ids, np.int64), STEPS: np.array(self.sizes, np.int64)}
        for name in dict.fromkeys(name for step in self._steps for name in step.tensors):
            parts = self._parts(name)
            shapes = {part.shape[1:] for part in parts}
            if len(shapes) > 1:
                raise DumpError(f"{name}: rows of shapes {sorted(shapes)} in different steps, expected one")
            if parts:
                joined[name] = np.ascontiguousarray(np.concatenate(parts))  # safetensors writes memory as it lies
        return joined

    def _parts(self, name: str) -> list[Array]:
        """Of each step; of logits those that are followed by no step or row without."""
        if name != LOGITS:
            return [step.tensors[name] for step in self._steps if name in step.tensors]
        parts: list[Array] = []
        for step in reversed(self._steps):
            if name not in step.tensors:
                break
            parts.insert(0, step.tensors[name])
            if len(parts[0]) < step.count:
                break
        return parts

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
