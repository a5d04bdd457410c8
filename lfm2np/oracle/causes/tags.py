"""The tags by which split.py splits positions, with words for their levels and what a wrong level points to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lfm2np.oracle.judging.processors import FILTERS
from lfm2np.oracle.judging.verdict import Position
from lfm2np.oracle.workloads import CASES, option_of

EDGES = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)
PERIODS = (8, 16, 32, 64, 128, 256, 512, 2048, 8192)  # of blocks and chunks
IDS = tuple(2**power for power in range(7, 17))
MOST_FIRST = 2  # rows in which attention and rotation can hardly be wrong
Tokens = Sequence[int]  # of a position's sequence, as far as they are known


class Sides(NamedTuple):
    """What follows "wrong" or "right" for the positions at a level, or from an edge on ({}), and for all others; and
    what is suspected if they are wrong ("": it is never said)."""

    there: str
    suspect: str
    elsewhere: str = "elsewhere"
    suspect_elsewhere: str = ""


@dataclass(frozen=True)
class Tag:
    """Something that is known of each position: a number if it has edges, where it may be cut beside where wrong
    positions begin and end; else a level. Levels without words are never named."""

    level: Callable[[Position, Tokens], str | int]
    levels: Mapping[str, Sides]  # of a number ""
    edges: Sequence[int] = ()
    early: str = ""  # the suspect from an edge of at most MOST_FIRST on

    def sides(self, level: str | int) -> Sides:
        """In words; `level` is the edge of a number."""
        if not self.edges:
            return self.levels[str(level)]
        words = self.levels[""]
        suspect = self.early if self.early and int(level) <= MOST_FIRST else words.suspect
        return Sides(words.there.format(level), suspect, words.elsewhere.format(level), words.suspect_elsewhere)


def number(level: Callable[[Position, Tokens], int], edges: Sequence[int], *words: str, early: str = "") -> Tag:
    return Tag(level, {"": Sides(*words)}, edges, early)


def phase_of(position: Position) -> str:
    """Of the token that is predicted there. The first new one is of prefill, too."""
    index = position.row + 1 - len(position.request.prompt_token_ids)
    return "prompt" if index < 0 else "decode" if index else "first"


def end_of(position: Position) -> str:
    """Whether the token that is predicted there is the last that was asked for."""
    request = position.request
    return "last" if position.row + 2 == len(request.prompt_token_ids) + request.max_tokens else ""


def place_of(position: Position) -> str:
    """Its request's place in its trace."""
    if not position.request.tags.get("beside"):
        return "alone"
    return "later" if position.request.tags.get("place") else "first"


def seen_of(position: Position) -> int:
    """Tokens of its prompt that a cache may have; prompts that are scored leave no hit."""
    return 0 if position.request.is_scored else int(position.request.tags.get("seen", 0))


def period(row: int) -> int:
    """The largest power of two that divides a row; 0 for row 0, which is at no border."""
    return row & -row


LEAK = "requests of a batch read or write each other's rows, blocks or slots, or are preempted and resumed wrongly"
FREED = "memory of a cancelled request that is freed too early"
START = "the start of a sequence: zeros before the first token, prompts below L"
POSITIONS = "attention or rotation of positions (or a convolution that forgets the tokens before)"
BORDER = "the border of a block or chunk; if the next position is right, only what is reported of it"
NO_BORDER = "all but the border of a block or chunk"
VOCABULARY = "rows of the embedding or the head, or ids that are cut to fewer bits"
NEW = "only what is reported of new tokens, unless the engine scores prompts in a run of its own"
DECODE = "what prefill leaves behind is not what decode expects"
BEHIND = "something that earlier requests leave behind: slots that change places, memory, counters"
FIRST = "what is kept or reported of a prompt's last position"
TAGS: dict[str, Tag] = {  # of equally good ones the first is named
    "phase": Tag(
        lambda position, _: phase_of(position),
        {
            "decode": Sides("in decode", DECODE, "in prefill", "only prompts are wrong"),
            "prompt": Sides("at the prompts' own tokens", "only what is reported of prompts", "at new tokens", NEW),
            "first": Sides("at the first new token", FIRST, "at all other tokens", "all but a prompt's last position"),
        },
    ),
    "company": Tag(
        lambda position, _: place_of(position),
        {
            "alone": Sides("alone", "what no batch has", "only beside other requests", LEAK),
            "first": Sides("first of a batch", LEAK, "alone or later in a batch"),
            "later": Sides("later in a batch", LEAK, "alone or first of a batch", LEAK),
        },
    ),
    "beginning": number(
        lambda position, _: seen_of(position),
        EDGES[4:],
        "in prompts whose first {} tokens were asked before",
        "a prefix hit without the state that belongs to it, or blocks that changed",
        "in prompts whose first {} tokens are new",
        "what is not found in a cache",
    ),
    "prefix": Tag(
        lambda position, _: str(position.request.tags.get("prefix", "cold")),
        {  # of "warm" and "shared" the number above says more
            "twin": Sides(
                "in prompts that repeat blocks of an earlier one after another beginning",
                "the prefix cache takes blocks without what stands before them",
                "in all other prompts",
            ),
        },
    ),
    "options": Tag(
        lambda position, _: option_of(position.request),
        {
            "samples": Sides(
                "in requests for several samples (n > 1)", "samples of one request that share keys or state"
            ),
            "sampled": Sides("in sampled requests", "what is done to logits before a token is drawn"),
            "stream": Sides("in streamed requests", "log-probabilities of other tokens than the event's"),
            "": Sides(
                "in plain greedy requests",
                "what only these do",
                "in all that are sampled, streamed or have options (n, stop, filters, penalties)",
            ),
        },
    ),
    "temperature": Tag(  # streamed or not
        lambda position, _: "other" if position.request.params.temperature not in (0.0, 1.0) else "",
        {
            "other": Sides(
                "in requests at a temperature other than 0 and 1", "log-probabilities that are not of the raw logits"
            ),
        },
    ),
    "penalties": Tag(
        lambda position, _: "any" if set(position.request.processors) - set(FILTERS) else "",
        {
            "any": Sides(
                "in requests with penalties or biases",
                "log-probabilities that are not of the raw logits, or penalties that outlive their request",
            ),
        },
    ),
    "abort": Tag(
        lambda position, _: str(position.request.tags.get("abort", "none")),
        {
            "none": Sides(
                "before any cancelled request",
                "what no cancelled request has",
                "beside or after cancelled requests",
                FREED,
            ),
            "beside": Sides("beside cancelled requests", FREED, "before any cancelled request or after", FREED),
            "after": Sides("after cancelled requests", FREED, "before and beside cancelled requests", FREED),
        },
    ),
    "end": Tag(
        lambda position, _: end_of(position),
        {"last": Sides("at the last token of an answer", "what is done or reported when a request ends", "before it")},
    ),
    "row": number(
        lambda position, _: position.row,
        EDGES,
        *("from position {} on", "state, positions, or the border of a window, block or chunk"),
        *("before position {}", START),
        early=POSITIONS,
    ),
    "prompt length": number(
        lambda position, _: len(position.request.prompt_token_ids),
        EDGES[1:],
        *("in prompts of {} tokens or more", "tokens, blocks or chunks of a prompt are mixed up"),
        *("in prompts of fewer than {} tokens", START),
    ),
    "largest token id": number(
        lambda position, tokens: max(tokens[: position.row + 1]),
        IDS,
        *("once a token id is {} or more", VOCABULARY, "while token ids are below {}", VOCABULARY),
    ),
    "predicted token id": number(
        lambda position, _: position.token_id,
        IDS,
        *("where the predicted token's id is {} or more", VOCABULARY),
        *("where the predicted token's id is below {}", VOCABULARY),
    ),
    "last of a block": number(
        lambda position, _: period(position.row + 1),
        PERIODS,
        *("at the last position of each {}", BORDER, "elsewhere than at the last position of each {}", NO_BORDER),
    ),
    "first of a block": number(
        lambda position, _: period(position.row),
        PERIODS,
        *("at the first position of each {}", BORDER, "elsewhere than at the first position of each {}", NO_BORDER),
    ),
    "order": number(
        lambda position, _: int(position.request.tags.get("order", 0)),
        EDGES[:1],
        "in requests after the first {}",
        BEHIND,
        *("in the first {} requests", "what only a fresh engine has"),
    ),
    "case": Tag(
        lambda position, _: position.request.case,
        {name: Sides(f"in the case {name}", case.suspect) for name, case in CASES.items()},
    ),
}
