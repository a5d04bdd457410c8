"""The factors by which regions.py cuts positions, with words for their levels and what a wrong level points to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.factors import abort_of, phase_of, place_of
from lfm2np.oracle.judging.verdict import Position

EDGES = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)
PERIODS = (8, 16, 32, 64, 128, 256, 512, 2048, 8192)
IDS = tuple(2**power for power in range(7, 17))
Mask = NDArray[np.bool_]  # [positions]
Level = Callable[[Position, Sequence[int]], str | int]  # of a position, and the tokens of its sequence


def options_of(position: Position) -> str:
    request = position.request
    special = {
        "samples": request.params.n > 1,
        "stream": request.streamed,
        "temperature": request.params.temperature not in (0.0, 1.0),
    }
    return next((name for name, is_there in special.items() if is_there), "none")


def period(row: int) -> int:
    """The largest power of two that divides a row; 0 for row 0, which is at no border."""
    return row & -row


@dataclass(frozen=True)
class Scale:
    """The levels of a factor, the simplest first. It may be cut anywhere; a region is one side of a cut.

    words, suspects  by level; for a number, of what is below an edge and from it on
    edges            where a number may be cut, beside where wrong positions begin and end; empty: no number
    preposition      stands before the words in "wrong ..., right ..."
    unions           of several levels' words, joined by "or": how they are said together
    """

    level: Level
    words: Mapping[str, str]
    suspects: Mapping[str, str]
    edges: Sequence[int] = ()
    preposition: str = ""
    unions: Mapping[str, str] = field(default_factory=dict)


LEAK = "requests of a batch read or write each other's rows, blocks or slots, or are preempted and resumed wrongly"
FREED = "memory of a cancelled request that is freed too early"
START = "the start of a sequence: zeros before the first token, prompts below L"
POSITIONS = "attention or rotation of positions (or a convolution that forgets the tokens before)"
MIXED = "rows of a step are mixed up, or tokens of a prompt see later ones"
BORDER = "the border of a block or chunk; if the next position is right, only what is reported of it"
VOCABULARY = "rows of the embedding or the head, or ids that are cut to fewer bits"
SCALES: dict[str, Scale] = {
    "phase": Scale(
        lambda position, _: phase_of(position),
        {"prefill": "prefill", "decode": "decode"},
        {"prefill": "only prompts are wrong", "decode": "what prefill leaves behind is not what decode expects"},
        preposition="in ",
    ),
    "place": Scale(
        lambda position, _: place_of(position),
        {"alone": "alone", "first": "first of a batch", "later": "later in a batch"},
        {"alone": "what only a batch has", "first": LEAK, "later": LEAK},
        unions={"first of a batch or later in a batch": "only beside other requests"},
    ),
    "beginning": Scale(
        lambda position, _: (
            0 if position.request.is_scored else int(position.request.tags.get("seen", 0))
        ),  # those leave no hit
        {"below": "prompts whose first {} tokens are new", "from": "prompts whose first {} tokens were asked before"},
        {
            "below": "what is not found in a cache",
            "from": "a prefix hit without the state that belongs to it, or blocks that changed",
        },
        EDGES[4:],
        "in ",
    ),
    "options": Scale(
        lambda position, _: options_of(position),
        {
            "none": "requests without these options",
            "samples": "requests for several samples (n > 1)",
            "temperature": "requests at a temperature other than 0 and 1",
            "stream": "streamed requests",
        },
        {
            "none": "what no such request has",
            "samples": "samples of one request that share keys or state",
            "temperature": "log-probabilities that are not of the raw logits",
            "stream": "log-probabilities of other tokens than the event's",
        },
        preposition="in ",
    ),
    "twin": Scale(
        lambda position, _: "twin" if position.request.tags.get("prefix") == "twin" else "other",
        {"other": "all other prompts", "twin": "prompts that repeat blocks of an earlier one after another beginning"},
        {"other": "what no such prompt has", "twin": "the prefix cache takes blocks without what stands before them"},
        preposition="in ",
    ),
    "abort": Scale(
        lambda position, _: abort_of(position),
        {
            "none": "before any cancelled request",
            "beside": "beside cancelled requests",
            "after": "after cancelled requests",
        },
        {"none": "what no cancelled request has", "beside": FREED, "after": FREED},
    ),
    "row": Scale(
        lambda position, _: position.row,
        {"below": "before position {}", "from": "from position {} on"},
        {"below": START, "from": "state, positions, or the border of a window, block or chunk"},
        EDGES,
    ),
    "length": Scale(
        lambda position, _: len(position.request.prompt_token_ids),
        {"below": "prompts of fewer than {} tokens", "from": "prompts of {} tokens or more"},
        {"below": START, "from": "tokens, blocks or chunks of a prompt are mixed up"},
        EDGES[1:],
        "in ",
    ),
    "slot": Scale(
        lambda position, _: int(position.request.tags.get("place", 0)),
        {"below": "in the first {} requests of a batch", "from": "after the first {} requests of a batch"},
        {"below": LEAK, "from": LEAK},
        EDGES[1:5],
    ),
    "together": Scale(
        lambda position, _: int(position.request.tags.get("together", 1)),
        {"below": "fewer than {} requests together", "from": "{} requests or more together"},
        {"below": "what only a small batch has", "from": "a batch that is too large for a buffer, or its rows"},
        EDGES[1:5],
        "with ",
    ),
    "tenant": Scale(
        lambda position, _: str(position.request.tags.get("tenant", "later")),
        {"first": "the first requests of their slots", "later": "requests whose slot was used before"},
        {"first": "what only a fresh slot has", "later": "state or memory of a slot's previous tenant"},
        preposition="in ",
    ),
    "token": Scale(
        lambda position, tokens: max(tokens[: position.row + 1]),
        {"below": "while token ids are below {}", "from": "once a token id is {} or more"},
        {"below": VOCABULARY, "from": VOCABULARY},
        IDS,
    ),
    "predicted": Scale(
        lambda position, _: position.token_id,
        {"below": "where the predicted token's id is below {}", "from": "where the predicted token's id is {} or more"},
        {"below": VOCABULARY, "from": VOCABULARY},
        IDS,
    ),
    "last": Scale(
        lambda position, _: period(position.row + 1),
        {"below": "except at the last position of each {}", "from": "at the last position of each {}"},
        {"below": "all but the last position of a block or chunk", "from": BORDER},
        PERIODS,
    ),
    "first": Scale(
        lambda position, _: period(position.row),
        {"below": "except at the first position of each {}", "from": "at the first position of each {}"},
        {"below": "all but the first position of a block or chunk", "from": BORDER},
        PERIODS,
    ),
    "order": Scale(
        lambda position, _: int(position.request.tags.get("order", 0)),
        {"below": "the first {} requests", "from": "requests after the first {}"},
        {
            "below": "what only a fresh engine has",
            "from": "something that earlier requests leave behind: slots that change places, memory, counters",
        },
        EDGES[:1],
        "in ",
    ),
}


@dataclass(frozen=True, eq=False)
class Choice:
    """Some levels of one factor, in words; `mask` marks the positions at them."""

    factor: str
    words: str
    suspect: str
    mask: Mask
    edge: int = 0  # of a number: where it is cut
    is_above: bool = False  # and that it is what lies above
    rest: tuple[Choice, ...] = ()  # the factor's other levels, each by itself

    @property
    def where(self) -> str:
        """As it follows "wrong" or "right"."""
        return SCALES[self.factor].preposition + self.words


def numbers_cut(name: str, levels: Sequence[str | int], wrong: Mask) -> list[Choice]:
    """Both sides of each edge: the scale's edges, and where wrong positions begin and end."""
    scale, numbers = SCALES[name], np.array(levels, np.int64)
    at = numbers[wrong]
    edges = [*scale.edges, *([round_edge(numbers, int(at.min())), int(at.max()) + 1] if len(at) else [])]
    choices = []
    for edge in dict.fromkeys(edges):
        below, above = (
            Choice(name, scale.words[side].format(edge), scale.suspects[side], mask, edge, side == "from")
            for side, mask in (("below", numbers < edge), ("from", numbers >= edge))
        )
        choices += [replace(below, rest=(above,)), replace(above, rest=(below,))]
    return choices


def round_edge(numbers: NDArray[np.int64], edge: int) -> int:
    """The roundest number that cuts as `edge` does: above the next lower number."""
    lower = numbers[numbers < edge]
    least = int(lower.max()) + 1 if len(lower) else edge
    return max(range(least, edge + 1), key=lambda number: ((number & -number), number)) if least > 0 else edge


def levels_cut(name: str, levels: Sequence[str | int]) -> list[Choice]:
    """Both sides of each cut of levels that are not numbers, and each level by itself."""
    scale, names = SCALES[name], np.array(levels)
    each = [Choice(name, scale.words[level], scale.suspects[level], names == level) for level in scale.words]
    there = [choice for choice in each if choice.mask.any()]
    choices = []
    for cut in range(1, len(there)):
        choices += [joined(there[:cut], there[cut:]), joined(there[cut:], there[:cut])]
    for index in range(1, len(there) - 1):
        others = [*there[:index], *there[index + 1 :]]
        choices += [joined(others, [there[index]]), joined([there[index]], others)]
    return choices


def either(choices: Sequence[Choice]) -> str:
    """Levels of one factor together, in words."""
    words = " or ".join(choice.words for choice in choices)
    return SCALES[choices[0].factor].unions.get(words, words)


def joined(some: Sequence[Choice], rest: Sequence[Choice]) -> Choice:
    words = either(some)
    mask = np.logical_or.reduce([choice.mask for choice in some])
    return Choice(some[0].factor, words, some[-1].suspect, mask, rest=tuple(rest))
