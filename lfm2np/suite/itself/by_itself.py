"""Judges the answers to a trace by what the same engine, or another, answers to each of its requests alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from lfm2np.oracle.engines.records import Answer
from lfm2np.suite.fuzz.finding import DIFFERS, Finding, trouble_finding
from lfm2np.suite.fuzz.played import Played, Player, Reply, Trouble
from lfm2np.suite.fuzz.right import Right
from lfm2np.suite.fuzz.trace import Sent, Trace
from lfm2np.suite.itself.pairs import Pair, compared, lead, reported, scored, unit, without
from lfm2np.suite.itself.relations import in_turn
from lfm2np.suite.itself.rounding_spread import Spread, beyond

KEPT = 256  # answers alone that are kept from trace to trace
ANY = 1e9  # nats: a bound where no log-probability was reported; a script has it as JSON, which knows no infinity


@dataclass
class ByItself:
    """`player` answers alone. `spread` as measured before; `is_same`: it is the engine that is judged.

    with_scores  it reports log-probabilities of prompts, so an answer is also held against its own tokens as a prompt
    """

    player: Player
    spread: Spread
    vocab_size: int
    is_same: bool = True
    with_scores: bool = False
    is_bitwise: bool = False
    is_certain: ClassVar = False  # a spread is an estimate: what is near its limit may be beyond it by chance
    ends: Collection[int] = ()
    known: dict[Sent, Reply] = field(default_factory=dict)

    @property
    def expected(self) -> str:
        who = "this engine's own answer to the same request" if self.is_same else "the other engine's answer"
        return (
            f"What is expected is {who}, alone and without a cached prefix. Between two such answers one logit differs "
            f"by {self.spread.nats:.2g} nat (root mean square, as measured on this engine)."
        )

    def with_stops(self, trace: Trace) -> Trace:
        """As it is: no text is known."""
        return trace

    def finding(self, trace: Trace, played: Played) -> Finding | None:
        if (trouble := trouble_finding(played)) is not None:
            return trouble
        self.known = {} if len(self.known) > KEPT else {k: v for k, v in self.known.items() if v.trouble is None}
        judged = [sent for sent, reply in zip(trace.requests, played.replies, strict=True) if reply.answers]
        self.ask([alone(sent) for sent in judged if sent.samples == 1])
        pairs: dict[int, Pair] = {}
        for index, (sent, reply) in enumerate(zip(trace.requests, played.replies, strict=True)):
            if sent.samples > 1 or not reply.answers:
                continue
            pair = pairs[index] = self.pair(sent, reply)
            if (again := self.trouble_alone(sent, reply)) is not None:
                return Finding(again.kind, f"request {index}, asked again alone: {again.what}", index)
            if (what := self.wrong(pair)) is not None:
                pair = pairs[index] = self.pair_again(sent, reply)
                what = self.wrong(pair)
            if what is not None:
                return Finding(DIFFERS, f"request {index}: {what}", index, seen=reply.answers[0])
        return self.together(trace, played, pairs)

    def together(self, trace: Trace, played: Played, pairs: dict[int, Pair]) -> Finding | None:
        """Of answers each of which may be right: other tokens may be near ties, but not so many of them."""
        open_ones = [index for index, pair in pairs.items() if any(each.is_open for each in pair.positions)]
        if not open_ones or self.wrong(joined(pairs)) is None:
            return None
        again = {index: self.pair_again(trace.requests[index], played.replies[index]) for index in open_ones}
        if (what := self.wrong(joined(pairs | again))) is None:
            return None
        first = open_ones[0]
        return Finding(DIFFERS, f"request {first}: {what}", first, seen=played.replies[first].answers[0])

    def wrong(self, pair: Pair) -> str | None:
        worst = beyond(self.spread, pair.positions, self.is_bitwise)
        return pair.fault or (worst.what if worst else None)

    def pair_again(self, sent: Sent, reply: Reply) -> Pair:
        """With what it is held against asked for again: the answer alone may have been the wrong one, and is kept."""
        for kept in (alone(sent), self.whole(sent, reply)):
            self.known.pop(kept, None)
        self.ask([alone(sent)])
        return self.pair(sent, reply)

    def trouble_alone(self, sent: Sent, reply: Reply) -> Trouble | None:
        """Of the requests that it is held against: an engine may hang there, too."""
        asked = (self.known.get(alone(sent)), self.known.get(self.whole(sent, reply)))
        return next((each.trouble for each in asked if each is not None and each.trouble is not None), None)

    def whole(self, sent: Sent, reply: Reply) -> Sent:
        """The answer's tokens as a prompt."""
        return Sent(sent.prompt + (reply.answers[0].token_ids or ()), cold=True, scored=True)

    def pair(self, sent: Sent, reply: Reply) -> Pair:
        """The answer against the one alone; then, if it may be, against its own tokens as a prompt."""
        reference, answer = self.known[alone(sent)], reply.answers[0]
        if reference.trouble is not None or not reference.answers:
            why = reference.trouble.what if reference.trouble else "no answer"
            return Pair((), f"alone it is not answered: {why}")
        most = len(answer.token_ids or ()) if reply.left else None
        is_drawn = bool(sent.temperature)
        pair = compared(reference.answers[0], answer, most=most, is_whole=not reply.left, is_drawn=is_drawn)
        if pair.fault or not (self.with_scores and self.is_same and answer.token_ids):
            return pair
        whole = self.whole(sent, reply)
        self.ask([whole])
        replies = self.known[whole].answers
        if not replies or replies[0].prompt_logprobs is None:
            return pair
        positions = scored(answer, replies[0].prompt_logprobs, len(sent.prompt)).positions
        return Pair((*pair.positions, *positions))

    def right(self, sent: Sent, seen: Answer | None) -> list[Right]:
        """Of the answer alone, within the limit of the spread."""
        if sent.samples > 1 or sent.temperature:
            return []
        self.ask([alone(sent)])
        answers = self.known[alone(sent)].answers[:1]
        return [self.right_token(answer, index) for answer in answers for index in range(len(answer.token_ids or ()))]

    def right_token(self, answer: Answer, index: int) -> Right:
        token, logprobs = (answer.token_ids or ())[index], reported(answer, index)
        if token not in logprobs:
            return Right(token, 0.0, ANY, False)
        others = without(logprobs, token)
        bound = max(self.spread.limit * unit(logprobs[token], others), 1e-9)
        decided = lead(logprobs, token) > math.sqrt(2.0) * self.spread.limit
        return Right(token, logprobs[token], bound, decided)

    def alone(self, sent: Sent) -> Sent | None:
        """The request that gives what is expected; None where another engine does."""
        return alone(sent) if self.is_same else None

    def ask(self, sents: list[Sent]) -> None:
        """One after another; what was asked before is known."""
        new = [sent for sent in dict.fromkeys(sents) if sent not in self.known]
        if new:
            replies = self.player.play(in_turn(new)).replies
            self.known.update(zip(new, replies, strict=True))


def alone(sent: Sent) -> Sent:
    return replace(sent, after=None, after_tokens=None, pause=0, abort_after=None, cold=True, streamed=False)


def joined(pairs: Mapping[int, Pair]) -> Pair:
    """All of a trace."""
    fault = next((pair.fault for pair in pairs.values() if pair.fault is not None), None)
    return Pair(tuple(each for pair in pairs.values() for each in pair.positions), fault)
