"""Where a wrong request first goes wrong: plain data for reports, found by recorders/locating.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cause:
    """One wrong request, run again with its activations recorded."""

    recorder: str  # the target that was recorded
    ask: str  # id of the request
    prompts: tuple[tuple[int, ...], ...]  # what ran together,
    request: int  # which of them it is,
    max_tokens: int  # and how far it ran
    beside: bool  # whether it has to run beside the others to be wrong
    finding: Mapping[str, Any] | None  # the first wrong tensor: the fields of locate.Finding; None: nothing was wrong
    lines: tuple[str, ...]  # in words

    @property
    def reason(self) -> str | None:
        """One line for a verdict."""
        if self.finding is None:
            return None
        where = "" if self.finding["layer"] is None else f"layer {self.finding['layer']}, "
        return f"first wrong operation: {where}{self.finding['operation']} ({self.finding['name']})"
