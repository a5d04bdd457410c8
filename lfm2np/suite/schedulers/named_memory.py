"""A memory of names: what each place holds is known by name, so that a wrong place is a wrong name.

A **prefix** is the name of a sequence of tokens: equal numbers, equal sequences (and equal salts). A cell holds the
prefix that ends with its token, as keys and values of a deeper layer depend on all tokens before them. A state holds
the prefix of all tokens that went into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.protocol import Copy

ZEROS = 0  # the state before any token


@dataclass(frozen=True)
class Written:
    """What a place holds, and who wrote it when: only `prefix` decides whether it is right."""

    prefix: int
    position: int  # of a state: the number of tokens
    token: int
    request_id: str
    step: int


@dataclass(eq=False)
class Names:
    """Prefixes, numbered as they come."""

    number_of: dict[tuple[int, int], int] = field(default_factory=dict)
    salts: dict[str, int] = field(default_factory=dict)

    def root(self, salt: str) -> int:
        """The prefix of no tokens, a negative number: what is computed under another salt is another thing."""
        return self.salts.setdefault(salt, -1 - len(self.salts))

    def after(self, prefix: int, token: int) -> int:
        return self.number_of.setdefault((prefix, token), 1 + len(self.number_of))


@dataclass(eq=False)
class Memory:
    """Blocks of P cells by (memory, block), states by (memory, slot)."""

    block_size: int  # P
    blocks: dict[tuple[str, int], list[Written | None]] = field(default_factory=dict)
    states: dict[tuple[str, int], Written | None] = field(default_factory=dict)

    def read(self, memory: str, place: int) -> Written | None:
        block, offset = divmod(place, self.block_size)
        cells = self.blocks.get((memory, block))
        return cells[offset] if cells else None

    def write(self, memory: str, place: int, written: Written) -> None:
        block, offset = divmod(place, self.block_size)
        self.blocks.setdefault((memory, block), [None] * self.block_size)[offset] = written

    def copy(self, copies: Sequence[Copy]) -> None:
        """One after another, so that a later one may reuse the source of an earlier one."""
        for each in copies:
            memory = each.destination[0]
            if memory in STATES:
                self.states[each.destination] = None if each.source is None else self.states.get(each.source)
                if each.source is None:
                    self.states[each.destination] = Written(ZEROS, 0, -1, "", -1)
            else:
                cells = None if each.source is None else self.blocks.get(each.source)
                self.blocks[each.destination] = list(cells) if cells else [None] * self.block_size


STATES = ("state", "checkpoint", "host state")
BLOCKS = ("block", "window block", "host block", "host window block")
