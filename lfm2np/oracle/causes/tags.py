"""The tags by which split.py splits positions, with words for their levels and what a wrong level points to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lfm2np.oracle.judging.verdict import Position
from lfm2np.oracle.workloads import CASES

EDGES = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)
PERIODS = (8, 16, 32, 64, 128, 256, 512, 2048, 8192)  # of blocks and chunks
IDS = tuple(2**power for power in range(7, 17))
MOST_FIRST = 2  # rows in which attention and rotation can hardly be wrong
MOST_NAMED = 2  # levels in one line
BELOW, FROM = "below", "from"  # sides of an edge
Tokens = Sequence[int]  # of a position's sequence, as far as they are known
Side = tuple[str, str]  # what follows "wrong" or "right", and what is suspected if it is wrong; "": it is never said


@dataclass(frozen=True)
class Tag:
    """Something that is known of each position.

    sides  by level; of a number, those below an edge and from it on, with {} for the edge
    edges  where a number may be cut, beside where wrong positions begin and end; empty: no number
    early  the suspect from an edge of at most MOST_FIRST on
    """

    level: Callable[[Position, Tokens], str | int]
    sides: Mapping[str, Side]
    edges: Sequence[int] = ()
    early: str = ""

    def known(self, position: Position, tokens: Tokens) -> str | int:
        """The level, or the first that has words: requests of a file may have others."""
        level = self.level(position, tokens)
        return level if self.edges or level in self.sides else next(iter(self.sides))

    def side(self, level: str, edge: int = 0) -> Side:
        words, suspect = self.sides[level]
        return words.format(edge), self.early if self.early and level == FROM and edge <= MOST_FIRST else suspect

    def together(self, levels: Sequence[str]) -> Side:
        """Several levels; too many to name all have no suspect."""
        words = list(dict.fromkeys(self.sides[level][0] for level in levels))
        if len(words) > MOST_NAMED:
            return "elsewhere", ""
        return " or ".join(words), self.sides[levels[-1]][1] if levels else ""


def note(name: str, otherwise: str | int = 0) -> Callable[[Position, Tokens], str | int]:
    """What workloads.py notes of a request."""
    return lambda position, _: position.request.tags.get(name, otherwise)


def number(
    level: Callable[[Position, Tokens], str | int],
    below: Side,
    start: Side,
    edges: Sequence[int],
    early: str = "",
) -> Tag:
    return Tag(level, {BELOW: below, FROM: start}, edges, early)


def phase_of(position: Position) -> str:
    return "decode" if position.row >= len(position.request.prompt_token_ids) else "prefill"


def new_token_of(position: Position) -> int:
    """The index of the token that is predicted there; below 0 in the prompt."""
    return position.row + 1 - len(position.request.prompt_token_ids)


def place_of(position: Position) -> str:
    """Its request's place in its round."""
    if not position.request.tags.get("beside"):
        return "alone"
    return "later" if position.request.tags.get("place") else "first"


def options_of(position: Position) -> str:
    request = position.request
    special = {
        "samples": request.params.n > 1,
        "stream": request.streamed,
        "temperature": request.params.temperature not in (0.0, 1.0),
        "sampled": request.is_sampled,
    }
    return next((name for name, is_there in special.items() if is_there), "none")


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
TAGS: dict[str, Tag] = {  # of equally good ones the first is named
    "phase": Tag(
        lambda position, _: phase_of(position),
        {
            "prefill": ("in prefill", "only prompts are wrong"),
            "decode": ("in decode", "what prefill leaves behind is not what decode expects"),
        },
    ),
    "token": Tag(
        lambda position, _: "prompt" if new_token_of(position) < 0 else "new",
        {
            "prompt": ("at the prompts' own tokens", "only what is reported of prompts"),
            "new": ("at new tokens", "only what is reported of new tokens"),
        },
    ),
    "first token": Tag(
        lambda position, _: "other" if new_token_of(position) else "first",
        {
            "first": ("at the first new token", "what is kept or reported of a prompt's last position"),
            "other": ("at all other tokens", "all but a prompt's last position"),
        },
    ),
    "company": Tag(
        lambda position, _: "beside others" if position.request.tags.get("beside") else "alone",
        {"alone": ("alone", "what no batch has"), "beside others": ("only beside other requests", LEAK)},
    ),
    "place": Tag(
        lambda position, _: place_of(position),
        {
            "alone": ("alone", "what no batch has"),
            "first": ("first of a batch", LEAK),
            "later": ("later in a batch", LEAK),
        },
    ),
    "beginning": number(
        # those that are scored leave no hit
        lambda position, _: 0 if position.request.is_scored else int(position.request.tags.get("seen", 0)),
        ("in prompts whose first {} tokens are new", "what is not found in a cache"),
        (
            "in prompts whose first {} tokens were asked before",
            "a prefix hit without the state that belongs to it, or blocks that changed",
        ),
        EDGES[4:],
    ),
    "prefix": Tag(
        note("prefix", "cold"),
        {
            **dict.fromkeys(("cold", "warm", "shared"), ("in all other prompts", "")),  # "beginning" says more
            "twin": (
                "in prompts that repeat blocks of an earlier one after another beginning",
                "the prefix cache takes blocks without what stands before them",
            ),
        },
    ),
    "options": Tag(
        lambda position, _: options_of(position),
        {
            "none": ("in requests without these options", "what no such request has"),
            "samples": ("in requests for several samples (n > 1)", "samples of one request that share keys or state"),
            "sampled": ("in sampled requests", "what is done to logits before a token is drawn"),
            "temperature": (
                "in requests at a temperature other than 0 and 1",
                "log-probabilities that are not of the raw logits",
            ),
            "stream": ("in streamed requests", "log-probabilities of other tokens than the event's"),
        },
    ),
    "abort": Tag(
        note("abort", "none"),
        {
            "none": ("before any cancelled request", "what no cancelled request has"),
            "beside": ("beside cancelled requests", FREED),
            "after": ("after cancelled requests", FREED),
        },
    ),
    "row": number(
        lambda position, _: position.row,
        ("before position {}", START),
        ("from position {} on", "state, positions, or the border of a window, block or chunk"),
        EDGES,
        POSITIONS,
    ),
    "prompt length": number(
        lambda position, _: len(position.request.prompt_token_ids),
        ("in prompts of fewer than {} tokens", START),
        ("in prompts of {} tokens or more", "tokens, blocks or chunks of a prompt are mixed up"),
        EDGES[1:],
    ),
    "largest token id": number(
        lambda position, tokens: max(tokens[: position.row + 1]),
        ("while token ids are below {}", VOCABULARY),
        ("once a token id is {} or more", VOCABULARY),
        IDS,
    ),
    "predicted token id": number(
        lambda position, _: position.token_id,
        ("where the predicted token's id is below {}", VOCABULARY),
        ("where the predicted token's id is {} or more", VOCABULARY),
        IDS,
    ),
    "last of a block": number(
        lambda position, _: period(position.row + 1),
        ("except at the last position of each {}", NO_BORDER),
        ("at the last position of each {}", BORDER),
        PERIODS,
    ),
    "first of a block": number(
        lambda position, _: period(position.row),
        ("except at the first position of each {}", NO_BORDER),
        ("at the first position of each {}", BORDER),
        PERIODS,
    ),
    "order": number(
        note("order"),
        ("in the first {} requests", "what only a fresh engine has"),
        (
            "in requests after the first {}",
            "something that earlier requests leave behind: slots that change places, memory, counters",
        ),
        EDGES[:1],
    ),
    "case": Tag(
        lambda position, _: position.request.case,
        {"": ("elsewhere", ""), **{name: (f"in the case {name}", case.suspect) for name, case in CASES.items()}},
    ),
}
