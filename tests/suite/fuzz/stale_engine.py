"""nano.py with a small pool that preempts; it reports no sizes.

`factory` has a bug: a request that is resumed begins with the convolution state that it had when it was preempted.
"""

from __future__ import annotations

from typing import Any

from lfm2np.teaching import nano
from lfm2np.teaching.tutorial import Adapter, Shown

SIZES: dict[str, Any] = {"block_size": 16, "num_blocks": 64, "max_num_batched_tokens": 64, "prefix_caching": False}


class Stale(Shown):
    def __init__(self, model: str, **sizes: Any) -> None:
        super().__init__(model, **sizes)
        self.stale: dict[str, nano.Array] = {}

    def preempt(self, sequence: nano.Sequence) -> None:
        self.stale[sequence.request_id] = self.states[sequence.slot].copy()
        super().preempt(sequence)

    def admit(self) -> nano.Sequence:
        sequence = super().admit()
        if sequence.request_id in self.stale:
            self.states[sequence.slot] = self.stale.pop(sequence.request_id)
        return sequence


class Silent(Adapter):
    def __init__(self, engine: Shown) -> None:
        super().__init__(engine)
        self.sizes = {}


def factory(model: str, sizes: dict[str, Any]) -> Silent:
    return Silent(Stale(model, **SIZES))


def right(model: str, sizes: dict[str, Any]) -> Silent:
    return Silent(Shown(model, **SIZES))
