"""The cells of the table: one kind of step at one size."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lfm2np.errors import RequestError

PREFILL, DECODE = "prefill", "decode"
NAME = re.compile(r"(prefill)-()([1-9]\d{0,6})|(decode)-([1-9]\d{0,4})x([1-9]\d{0,6})")


@dataclass(frozen=True)
class Cell:
    """A step that reads the prompt of one request, or one that gives each of `requests` its next token.

    context  tokens of a request: of the prompt, or those before the next token (the first `context` are cached)
    """

    kind: str
    requests: int
    context: int

    @property
    def name(self) -> str:
        return f"prefill-{self.context}" if self.kind == PREFILL else f"decode-{self.requests}x{self.context}"

    @property
    def num_tokens(self) -> int:
        """Tokens that one step computes."""
        return self.context if self.kind == PREFILL else self.requests

    @property
    def longest(self) -> int:
        """Positions of a request that attention sees."""
        return self.context if self.kind == PREFILL else self.context + 1


def cell_named(name: str) -> Cell:
    """The cell of that name; RequestError for another."""
    match = NAME.fullmatch(name)
    if not match:
        raise RequestError(f"cell {name[:40]!r}: expected prefill-TOKENS or decode-REQUESTSxCONTEXT")
    kind, requests, context = (part for part in match.groups() if part is not None)
    return Cell(kind, int(requests or 1), int(context))


def cells_named(names: str) -> list[Cell]:
    return list(dict.fromkeys(cell_named(name.strip()) for name in names.split(",")))


CELLS = cells_named(
    "prefill-128,prefill-512,decode-1x128,decode-5x128,decode-16x128,decode-64x128,"
    "decode-1x1024,decode-5x1024,decode-16x1024,decode-64x1024"
)
QUICK = cells_named("prefill-128,decode-1x128,decode-16x128")
