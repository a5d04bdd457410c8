"""What a check tested and what it did not: a verdict covers nothing else.

A kind of position is a phase, alone or in a batch, and whether the prompt's beginning was seen before: ("decode",
"batches", "after a prefix"). Errors that change no token show in log-probabilities only. So a tested case or kind
without any reported log-probability leaves the whole check inconclusive. What was never requested is listed only.

Some servers stop at an end-of-sequence token although ignore_eos was requested. The missing tokens are requested again,
with the prompt and the answer so far as the prompt; what can't be requested again counts as not tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from lfm2np.checkpoint.text.tokenizer import Tokenizer, text_of
from lfm2np.oracle.engines.records import Pair, Request, greedy
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging.verdict import Position
from lfm2np.oracle.prefix_hits import prefix_hits
from lfm2np.oracle.workloads import CASES, DEFAULT_CASES

Kind = tuple[str, str, str]
AFTER = ("warm", "shared")  # of the tag "prefix": the prompt begins like one that was asked before, or beside it
NEVER_ASKED = "top_p, penalties"
OPTIONS = {  # cases that an engine may be unable to take, and what of a request they need
    "samples": "several samples (n > 1)",
    "temperatures": "temperatures other than 0 and 1",
    "streams": "streamed answers (stream: true)",
}

MOST_TIMES = 4  # that one request is continued
CONTINUES = "continues"  # the tag of such a request: the id of the one that ended early


def kind(request: Request, is_decode: bool) -> Kind:
    return (
        "decode" if is_decode else "prefill",
        "batches" if request.tags.get("beside") else "alone",
        "after a prefix" if request.tags.get("prefix") in AFTER else "without a prefix",
    )


def unseen(pairs: Sequence[Pair], positions: Sequence[Position]) -> list[str]:
    """Requested cases and kinds of position without any reported log-probability; in words.

    The first new token belongs to prefill: a server that reports no log-probabilities of prompts is judged there.
    """
    reported = [position for position in positions if position.error_ratio is not None]
    seen_cases = {position.request.case for position in reported}
    silent = [case for case in dict.fromkeys(request.case for request, _ in pairs) if case not in seen_cases]
    asked = {
        kind(request, is_decode)
        for request, _ in pairs
        for is_decode in (False, request.max_tokens > 1 and not request.stop)
    }
    seen = {kind(position.request, position.row >= len(position.request.prompt_token_ids)) for position in reported}
    words = [f"the case{'s' * (len(silent) > 1)} {', '.join(silent)}"] if silent else []
    return words + [", ".join(levels) for levels in smallest(asked - seen, asked)]


def smallest(missing: set[Kind], asked: set[Kind]) -> Iterator[tuple[str, ...]]:
    """The missing kinds by as few levels as possible: ("decode",) if nothing of that phase was seen."""
    left = set(missing)
    for count in (1, 2, 3):
        for levels in sorted({levels for unseen_kind in missing for levels in combinations(unseen_kind, count)}):
            group = {asked_kind for asked_kind in asked if set(levels) <= set(asked_kind)}
            if group <= missing and group & left:
                left -= group
                yield levels


def largest_batch(abilities: Abilities, pairs: Sequence[Pair]) -> int:
    """The most requests that were in flight together, limited by what adapter and engine take at once."""
    places = [int(request.tags.get("place") or 0) for request, _ in pairs if request.tags.get("beside")]
    most = abilities.at_once if abilities.slots is None else min(abilities.at_once, abilities.slots)
    return min(most, 1 + max(places, default=0))


def not_tested(
    abilities: Abilities, pairs: Sequence[Pair], not_put: Sequence[str], left: int, positions: Sequence[Position]
) -> list[str]:
    """What this check does not cover, in words: not wanted, not possible, or not answered."""
    batch, early = largest_batch(abilities, pairs), early_ends(pairs)
    silent = sum(position.error_ratio is None for position in positions)
    asked = {request.case for request, _ in pairs}
    possible = [name for name in DEFAULT_CASES if abilities.at_once > 1 or not CASES[name].needs_batches]
    cases = [name for name in possible if name not in {*asked, "stops", "seeds", *OPTIONS}]
    lines = []
    if left:
        lines.append(f"{left} requests after one that is certainly wrong")
    if not_put:
        lines.append(f"{len(not_put)} requests whose token ids no text encodes to")
    if early.lost:
        lines.append(f"{early.lost} of {early.tokens} tokens that {early.answers} answers left out by ending early")
    if silent and silent < len(positions):
        lines.append(f"errors in {silent} of {len(positions)} positions (no log-probability)")
    if cases:
        lines.append(f"case{'s' * (len(cases) > 1)} {', '.join(cases)}")
    lines.append(f"batches of more than {batch}" if batch > 1 else "batches")
    if not abilities.can_abort:
        lines.append("cancelled requests")
    if not any(request.stop for request, _ in pairs):
        lines.append("stop strings")
    if (hits := prefix_hits(pairs)).repeated and not hits.is_hit:
        lines.append(f"the prefix cache ({hits.words()})")
    if "seeds" not in asked:
        lines.append("seeds")
    lines += [words for case, words in OPTIONS.items() if case not in asked]
    if any(answer.token_ids for _, answer in pairs) and not any(answer.text for _, answer in pairs):
        lines.append("texts")
    # No engine's counters of preemptions are read; one that takes several requests may run out of blocks or slots.
    unless = ", unless the engine preempted some by itself" if batch > 1 else ""
    return [*lines, NEVER_ASKED, f"preempted requests{unless} (lfm2np fuzz)"]


# --- answers that ended early: fewer tokens than requested, without a stop string


@dataclass(frozen=True)
class EarlyEnds:
    """Answers that ended early, the tokens that are missing, and those of them that no continuation has."""

    answers: int
    tokens: int
    lost: int


def missing_tokens(pair: Pair) -> int:
    """How many an answer with some tokens lacks."""
    request, answer = pair
    if answer.error is not None or not answer.token_ids or request.stop or answer.finish_reason != "stop":
        return 0
    return max(0, request.max_tokens - len(answer.token_ids))


def continuations(pairs: Sequence[Pair], tokenizer: Tokenizer | None, takes_token_ids: bool) -> tuple[Request, ...]:
    """Requests for the missing tokens, whose place is not yet noted; none for sampled answers, as a seed would start
    again."""
    requests = []
    for request, answer in pairs:
        missing, ids = missing_tokens((request, answer)), (*request.prompt_token_ids, *(answer.token_ids or ()))
        text = text_of(tokenizer, ids) if tokenizer is not None and missing else None
        if missing and not request.is_sampled and (takes_token_ids or text is not None):
            seen = {"length": len(ids), "prefix": "warm", "seen": len(ids), CONTINUES: request.request_id}
            name = f"{request.request_id}+{len(ids) - len(request.prompt_token_ids)}"
            requests.append(greedy(name, ids, missing, prompt_text=text, tags={**request.tags, **seen}))
    return tuple(requests)


def without_vain(pairs: Sequence[Pair]) -> list[Pair]:
    """Without continuations that brought no token: those tokens are lost, but no answer is missing."""
    return [
        (request, answer)
        for request, answer in pairs
        if CONTINUES not in request.tags or answer.token_ids or answer.is_refuted
    ]


def early_ends(pairs: Sequence[Pair]) -> EarlyEnds:
    first = [missing_tokens(pair) for pair in pairs if CONTINUES not in pair[0].tags]
    continued = {request.tags.get(CONTINUES) for request, _ in pairs}
    lost = sum(missing_tokens(pair) for pair in pairs if pair[0].request_id not in continued)
    return EarlyEnds(sum(map(bool, first)), sum(first), lost)
