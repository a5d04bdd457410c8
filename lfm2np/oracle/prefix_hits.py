"""Whether the prefix cache hit, as the engine's own counter says (Answer.cached_tokens), and whether hits are right.

A prompt that was asked before is no proof: engines that never hit, for want of a setting or because blocks are longer
than prompts, answer it as they did the first time. So requests that repeat a prefix are counted, which of them hit, and
which hits are wrong. Some servers leave the counter out where it is 0: it counts as reported if any answer has it.
Counts that cannot be are named, and then no count is believed.

Where no answer has it, a server's own counter may show that there were hits in a round of requests
(Answer.round_cached_tokens), not whose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.engine.uncached import common_prefix
from lfm2np.oracle.causes.findings import (
    ALONE_CHANCE,
    CERTAIN,
    GUESS,
    LIKELY,
    MOST_CAUSES,
    PURE,
    SURE_CHANCE,
    Suspicion,
)
from lfm2np.oracle.causes.split import so_unlike
from lfm2np.oracle.engines.records import Pair, Request
from lfm2np.oracle.judging.verdict import Position
from lfm2np.oracle.report.report import plural

LEAST = 16  # tokens of a repeated prefix: vLLM's block
SUSPECT = "hits without the state that belongs to them, or on blocks that changed"
NOT_REPORTED = "hits are not reported"


@dataclass(frozen=True)
class PrefixHits:
    """repeated  requests that begin like an earlier one, LEAST tokens or more; longest: the most of them
    hit        of those, how many the engine took tokens of from its cache
    reported   whether any answer says how many tokens came from there
    hits, misses  ids of all requests that say so, whether they repeat a prefix or not
    repeating  ids of those that repeat a prefix
    server     prompt tokens from the cache by the server's own counter, of all rounds; None: it has none
    impossible what of the counts cannot be, in words; "": nothing
    """

    repeated: int
    longest: int
    hit: int
    reported: bool
    hits: frozenset[str]
    misses: frozenset[str]
    repeating: frozenset[str]
    server: int | None
    impossible: str

    @property
    def is_hit(self) -> bool:
        """Whether the cache was used at all, by an answer's count or the server's."""
        return not self.impossible and bool(self.hit if self.reported else self.server)

    def words(self, wrong: frozenset[str] = frozenset()) -> str:
        """For the report; `wrong` are ids of wrong requests. Empty if no request repeats a prefix."""
        if self.impossible:
            return self.impossible
        if not self.repeated:
            return ""
        if not self.reported and self.server is None:
            return f"{NOT_REPORTED}: {self.repeated} requests repeat a prefix"
        if not self.reported and self.server:
            wrong_ones = len(self.repeating & wrong)
            right = f"{wrong_ones} of them wrong" if wrong_ones else "all right"
            hits = f"{self.server} prompt tokens came from the cache, by the server's counter of all requests"
            return f"{hits}: {self.repeated} requests repeat a prefix, {right}"
        if not self.is_hit:
            return f"never hit in {self.repeated} requests that repeat a prefix of up to {self.longest} tokens"
        wrong_hits = sorted(self.hits & wrong)
        right = f"wrong in {len(wrong_hits)} of all {len(self.hits)} hits" if wrong_hits else "all right"
        return f"{self.hit} of {self.repeated} hit, {right}"

    def figures(self, wrong: frozenset[str]) -> dict[str, Any]:
        hits = {"hits": sorted(self.hits), "wrong": sorted(self.hits & wrong)}
        return {
            name: getattr(self, name) for name in ("repeated", "longest", "hit", "reported", "server", "impossible")
        } | hits


def prefix_hits(pairs: Sequence[Pair]) -> PrefixHits:
    """What the answers say of the cache."""
    told = [pair for pair in pairs if pair[1].error is None or pair[1].is_refuted]
    counts = {request.request_id: answer.cached_tokens for request, answer in told}
    repeats = {request.request_id: seen_of(request) for request, _ in pairs if request.request_id in counts}
    repeats = {name: seen for name, seen in repeats.items() if seen >= LEAST}
    hits = frozenset(name for name, count in counts.items() if count)
    says_zero = 0 in counts.values()  # then no number is no 0
    misses = frozenset(name for name, count in counts.items() if count == 0 or (count is None and not says_zero))
    reported = any(count is not None for count in counts.values())
    rounds = [answer.round_cached_tokens for _, answer in pairs if answer.round_cached_tokens is not None]
    return PrefixHits(
        repeated=len(repeats),
        longest=max(repeats.values(), default=0),
        hit=len(hits & repeats.keys()),
        reported=reported,
        hits=hits,
        misses=misses,
        repeating=frozenset(repeats),
        server=sum(rounds) if rounds else None,
        impossible=impossible_counts([pair for pair in pairs if pair[0].params.n == 1]),  # a count may be of n together
    )


def impossible_counts(pairs: Sequence[Pair]) -> str:
    """Counts above a prompt's length; else hits of LEAST tokens or more that no request of the check can have left.

    Requests that were in flight together may take tokens of each other, in any order.
    """
    counts = [(request, answer.cached_tokens or 0) for request, answer in pairs if answer.error is None]
    if above := [pair for pair in counts if pair[1] > len(pair[0].prompt_token_ids)]:
        request, count = above[0]
        first = f"first {request.request_id}: {count} of {len(request.prompt_token_ids)}"
        where = f"in {plural(len(above), 'request')}, {first}"
        return f"not believed: the engine reports more cached tokens than the prompt has {where}"
    hits = [(request, count) for request, count in counts if count >= LEAST and "order" in request.tags]
    rounds: dict[int, list[Request]] = {}
    for request, _ in pairs if hits else ():
        rounds.setdefault(round_of(request), []).append(request)
    unshared = [request.request_id for request, count in hits if count > shared(request, rounds[round_of(request)])]
    if unshared:
        where = f"{len(unshared)} of {len(hits)} hits are longer than what any request shares, first {unshared[0]}"
        return f"not believed: {where}; a wrong count, or left by an earlier check (start the engine anew)"
    return ""


def shared(request: Request, company: Sequence[Request]) -> int:
    """The longest prefix that an earlier request has, or another of its round, which are the company."""
    others = (other for other in company if other is not request)
    prefixes = (common_prefix(request.prompt_token_ids, other.prompt_token_ids) for other in others)
    return max(int(request.tags.get("seen", 0)), *prefixes, 0)


def round_of(request: Request) -> int:
    """The order of the first request of its round: see workloads.noted."""
    return int(request.tags.get("order", 0)) - int(request.tags.get("place", 0))


def seen_of(request: Request) -> int:
    """Tokens that the cache may have of a request that was sent to hit. Where log-probabilities of the prompt are
    requested, an engine has to compute it anew."""
    return int(request.tags.get("seen", 0)) if request.tags.get("prefix") == "warm" and not request.is_scored else 0


def wrong_requests(pairs: Sequence[Pair], positions: Sequence[Position]) -> frozenset[str]:
    """Ids of those with a wrong position, or an answer that no right engine gives."""
    refuted = {request.request_id for request, answer in pairs if answer.is_refuted}
    return frozenset(refuted | {position.request.request_id for position in positions if position.is_wrong})


def with_hits(causes: Sequence[Suspicion], pairs: Sequence[Pair], positions: Sequence[Position]) -> list[Suspicion]:
    """The causes, and that hits are wrong: in the first place unless another is surer, or less of an accident."""
    cause = hit_cause(prefix_hits(pairs), wrong_requests(pairs, positions))
    if cause is None or (cause.sure == GUESS and not any(position.is_wrong for position in positions)):
        return list(causes)  # an ending, a text or a seed may be wrong in many hits by accident
    is_first = not causes or rank(cause) <= rank(causes[0])
    ordered = [cause, *causes] if is_first else [causes[0], cause, *causes[1:]]
    return ordered[:MOST_CAUSES]


def rank(cause: Suspicion) -> tuple[int, float]:
    """The surest first, then the least of an accident."""
    return (CERTAIN, LIKELY, GUESS).index(cause.sure), 1.0 if cause.chance is None else cause.chance


def hit_cause(seen: PrefixHits, wrong: frozenset[str]) -> Suspicion | None:
    """None if no hit is wrong, or as many of the others are."""
    hits, others = len(seen.hits), len(seen.misses)
    wrong_hits, others_wrong = len(seen.hits & wrong), len(wrong - seen.hits)
    chance = so_unlike(wrong_hits, hits, min(others, others_wrong), others)
    if not wrong_hits or not others or (others_wrong and chance >= ALONE_CHANCE):
        return None
    if others_wrong or chance >= ALONE_CHANCE:
        sure = GUESS
    else:
        sure = CERTAIN if chance < SURE_CHANCE and wrong_hits >= PURE * hits else LIKELY
    right = f"right in all {others} others" if not others_wrong else f"and in {others_wrong} of {others} others"
    where = f"wrong in {wrong_hits} of {hits} requests that hit the prefix cache, {right}"
    return Suspicion(sure, where, SUSPECT, chance=chance)
