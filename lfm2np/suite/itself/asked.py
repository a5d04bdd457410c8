"""Plays every relation on an engine, and judges what came: the check of an engine against itself, or another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lfm2np.errors import InconclusiveError
from lfm2np.oracle.engines.records import DEAD, REFUSED, Pair, Request, Trace, changed
from lfm2np.oracle.engines.target import Abilities, Answers, Played, Target, TargetError
from lfm2np.oracle.engines.validate import validate
from lfm2np.suite.itself import relations
from lfm2np.suite.itself.pairs import Compared, Comparison, compared, likeliest, scored, stopped
from lfm2np.suite.itself.questions import Sizes, questions
from lfm2np.suite.itself.relations import LIKELIEST, NEEDS, OTHER, QUESTION, RELATIONS, SCORED, START, Relation
from lfm2np.suite.itself.rounding_spread import (
    Outcome,
    Score,
    Spread,
    beyond,
    outcome,
    score_of,
    spread_of,
    words_of,
)
from lfm2np.values import Progress

OUT_OF_TIME = "out of time"
NOTHING = Score(0, 0, 0, None, None, None)
ROUNDS, NEEDED = 3, 2  # of other tokens each: a relation is broken if it looks so in two of at most three


class Seen(NamedTuple):
    """A position, and the request of a trace that asked for it."""

    compared: Compared
    trace: Trace
    request: int


@dataclass(frozen=True)
class Broken:
    """Where a relation is broken: its trace, and which request of it."""

    what: str
    trace: Trace | None = None
    request: int | None = None


@dataclass(frozen=True)
class Held:
    """What came of one relation, in its first round.

    rounds  in how many it looked broken, and how many there were
    broken  what is wrong, also if it was seen once
    why     it was not asked, not judged, or judged only in part
    """

    relation: Relation
    outcome: Outcome
    score: Score | None = None
    rounds: tuple[int, int] = (0, 0)
    broken: Broken | None = None
    why: str = ""


@dataclass(frozen=True)
class Checked:
    """Of one engine.

    is_bitwise  equal bits were demanded
    unanswered  what came instead of an answer to a question alone; such a question is not asked again
    """

    engine: str
    format_name: str
    is_bitwise: bool
    spread: Spread
    held: tuple[Held, ...]
    requests: int
    tokens: int
    seconds: float
    traces: int = 0
    unanswered: tuple[str, ...] = ()

    @property
    def broken(self) -> list[Held]:
        return [each for each in self.held if each.outcome is Outcome.BROKEN]


@dataclass
class Round:
    """One relation, asked once: positions of each pair of answers, and the first fault that no rounding explains."""

    pairs: list[list[Seen]] = field(default_factory=list)
    fault: Broken | None = None
    unmet: str = ""  # a request beside the questions that was refused, so that its trace says nothing

    @property
    def positions(self) -> list[Seen]:
        return [seen for pair in self.pairs for seen in pair]

    def take(self, pair: Comparison, trace: Trace, request: int) -> None:
        if pair.fault is not None and self.fault is None:
            self.fault = Broken(f"{where(trace, request)}: {pair.fault}", trace, request)
        self.pairs.append([Seen(each, trace, request) for each in pair.positions])


@dataclass
class Asking:
    """One engine, asked under relations.

    players  by Relation.player: "" is the engine itself; others where they can be had
    until    time.monotonic() after which no further relation is begun
    """

    players: Mapping[str, Target]
    abilities: Abilities
    sizes: Sizes
    format_name: str
    seed: int = 0
    is_bitwise: bool = False
    until: float = math.inf
    report: Progress = lambda done, total: None
    requests: int = 0
    tokens: int = 0
    traces: int = 0
    unanswered: list[str] = field(default_factory=list)
    gone: Broken | None = None  # the trace at which the engine died
    died_in: str = ""  # the relation that measures the spread in which it did
    first: list[Pair] = field(default_factory=list)  # the questions of the first round
    others: dict[int, list[Pair]] = field(default_factory=dict)  # those of further rounds, by number
    rounds: dict[str, Round] = field(default_factory=dict)  # the first of each relation that was asked

    def run(self, chosen: Sequence[Relation] = RELATIONS) -> Checked:
        """InconclusiveError if no question is answered, TargetError if the engine is gone."""
        began = time.monotonic()
        spread = self.begin()
        held = []
        for done, relation in enumerate(chosen):
            self.report(done, len(chosen))
            held.append(self.ask(relation, spread))
        self.report(len(chosen), len(chosen))
        name = self.abilities.engine
        counts = (self.requests, self.tokens, time.monotonic() - began, self.traces)
        unanswered = tuple(dict.fromkeys(self.unanswered))
        return Checked(name, self.format_name, self.is_bitwise, spread, tuple(held), *counts, unanswered)

    def begin(self) -> Spread:
        """The spread, from the relations that measure it."""
        self.first = self.alone(0)
        noise: dict[str, list[list[float]]] = {"batch": [], "other": []}
        for relation in RELATIONS:
            if relation.measures:
                try:
                    self.rounds[relation.name] = self.round(relation, self.first, 0)
                except TargetError:
                    self.died_in = relation.name
                    break
                noise[relation.measures] += noise_of(self.rounds[relation.name])
        return spread_of(noise["batch"], noise["other"], self.format_name)

    def ask(self, relation: Relation, spread: Spread) -> Held:
        """Judged; if it looks broken, asked again, mostly with other tokens. After `begin`. An engine that dies breaks
        the relation."""
        if self.gone is not None and relation.name == self.died_in:
            return Held(relation, Outcome.BROKEN, NOTHING, (1, 1), self.gone)
        if self.gone is not None and relation.name not in self.rounds:
            return Held(relation, Outcome.NOT_ASKED, why="the engine is gone")
        try:
            return self.answered(relation, spread)
        except TargetError:
            return Held(relation, Outcome.BROKEN, NOTHING, (1, 1), self.gone)
        except InconclusiveError as error:  # it answered before
            return Held(relation, Outcome.BROKEN, NOTHING, (1, 1), Broken(str(error)))

    def answered(self, relation: Relation, spread: Spread) -> Held:
        if lacks := self.lacks(relation):
            return Held(relation, Outcome.NOT_ASKED, why="; ".join(NEEDS[need] for need in lacks))
        if relation.name not in self.rounds:
            if time.monotonic() > self.until:
                return Held(relation, Outcome.NOT_ASKED, why=OUT_OF_TIME)
            self.rounds[relation.name] = self.round(relation, self.first, 0)
        first = self.rounds[relation.name]

        def is_wrong(number: int) -> bool:
            if number not in self.others and not relation.keeps:
                self.others[number] = self.alone(number)
            alone = self.first if relation.keeps else self.others[number]
            return self.wrong(self.round(relation, alone, number), spread) is not None

        wrong = self.wrong(first, spread)
        if wrong is not None and self.gone is not None:
            return Held(relation, Outcome.ONCE, score_of_round(first), (1, 1), wrong)
        return judged(relation, first, wrong, spread, is_wrong)

    def lacks(self, relation: Relation) -> list[str]:
        """What of the relation's needs the engine does not take."""
        abilities = self.abilities
        takes = {
            "scored": abilities.tells_prompt_logprobs,
            "streamed": abilities.is_streaming,
            "aborts": abilities.can_abort,
            "seeds": abilities.takes_sampling and abilities.takes_seeds,
            "samples": abilities.takes_samples,
            "stops": abilities.takes_stops,
        }
        return [need for need in relation.needs if not takes.get(need, need in self.players)]

    def wrong(self, round_: Round, spread: Spread) -> Broken | None:
        if round_.fault is not None:
            return round_.fault
        positions = round_.positions
        worst = beyond(spread, [seen.compared for seen in positions], self.is_bitwise)
        if worst is None:
            return None
        seen = positions[worst.index]
        return Broken(f"{where(seen.trace, seen.request)}: {worst.what}", seen.trace, seen.request)

    def alone(self, round_: int, samples: int = 0) -> list[Pair]:
        """The questions of a round on an idle engine, one after another; those that were answered.

        samples  0: greedily; 1: with a seed; more: so many answers to each
        """
        asked = questions(self.sizes, self.seed * ROUNDS + round_)
        if samples:
            drawn = {"temperature": relations.TEMPERATURE, "seed": relations.SEED, "n": samples}
            asked = [changed(question, **drawn) for question in asked]
        played = self.play(relations.in_turn(asked))
        answered: list[Pair] = []
        for question, answers in zip(asked, played.answers, strict=True):
            valid = [validate(question, answer) for answer in answers]
            usable = [answer for answer in valid if answer.error is None and answer.token_ids]
            answered += [(question, answer) for answer in usable]
            if not usable:
                why = next((answer.error for answer in valid if answer.error), "no token ids were reported")
                self.unanswered.append(f"a prompt of {len(question.prompt_token_ids)} tokens alone: {why}")
        if not answered:
            raise InconclusiveError(f"no question was answered: {self.unanswered[-1]}")
        return answered

    def round(self, relation: Relation, alone: Sequence[Pair], number: int) -> Round:
        if relation.samples:
            alone = self.alone(number, relation.samples)
        round_ = Round()
        for trace in relation.build(alone, self.sizes):
            played = self.play(trace, relation.player)
            if unmet := refused(trace, played):
                round_.unmet = unmet
                continue
            for index, request in enumerate(trace.requests):
                if QUESTION in request.tags:
                    first = alone[request.tags[QUESTION]]
                    round_.take(
                        compared_with(first, request, played.answers[index], bool(relation.samples)), trace, index
                    )
            if played.trouble is not None and round_.fault is None:
                round_.fault = Broken(played.trouble.what, trace)
        return round_

    def play(self, trace: Trace, player: str = "") -> Played:
        played = self.players[player].play(trace)
        self.traces += 1
        self.requests += len(trace.requests)
        self.tokens += sum(answer.num_tokens for answers in played.answers for answer in answers)
        is_dead = all(answer.kind == DEAD for answers in played.answers for answer in answers)
        if is_dead or (played.trouble is not None and played.trouble.kind == DEAD):
            why = played.trouble.what if played.trouble is not None else str(played.answers[0][0].error)
            self.gone = Broken(why, trace)
            raise TargetError(why)
        return played


def compared_with(alone: Pair, request: Request, answers: Answers, is_drawn: bool) -> Comparison:
    """The answer to a request against the one alone."""
    answer = validate(request, answers[0])
    if answer.error is not None or len(answers) > 1:
        return Comparison((), answer.error or f"{len(answers)} samples, expected 1")
    if answer.token_ids is None:
        return Comparison((), None if request.streamed else "no answer")
    question, first = alone
    if request.stop is not None:
        return stopped(first, answer, request.stop, request.max_tokens)
    if request.tags.get(LIKELIEST):
        return likeliest(answer)
    if request.tags.get(SCORED):
        logprobs = answer.prompt_logprobs
        return Comparison(()) if logprobs is None else scored(first, logprobs, len(question.prompt_token_ids))
    start = request.tags.get(START, 0)
    is_whole = not start and request.max_tokens == question.max_tokens
    return compared(first, answer, start, None if is_whole else request.max_tokens, is_whole, is_drawn)


def refused(trace: Trace, played: Played) -> str:
    """The first request beside the questions that the engine refused, mostly as it is too long; an engine in Python
    ends such a request when it is added."""
    for request, (answer, *_) in zip(trace.requests, played.answers, strict=True):
        if answer.error is None or answer.is_aborted or QUESTION in request.tags:
            continue
        if answer.kind == REFUSED or (answer.sent is not None and answer.sent == answer.ended):
            count = len(request.prompt_token_ids)
            return f"{count} tokens and {request.max_tokens} more (see --max-model-len): {answer.error}"
    return ""


def where(trace: Trace, request: int) -> str:
    start = trace.requests[request].tags.get(START, 0)
    of = f", which holds {start} tokens of an answer" if start else ""
    count, total = len(trace.requests[request].prompt_token_ids), len(trace.requests)
    return f"prompt of {count} tokens{of}, request {request} of {total}"


def first_flip(round_: Round) -> str:
    """Where tokens differ of which no log-probability says by how much."""
    for seen in round_.positions:
        if seen.compared.is_flip and (seen.compared.is_open or seen.compared.difference is None):
            return f"{where(seen.trace, seen.request)}: {words_of(seen.compared)}, by unknown nats"
    return "nothing was reported that could be compared"


def noise_of(round_: Round) -> Iterator[list[float]]:
    """Of equal tokens: another token is what the spread is to judge, and may be off by any amount."""
    for pair in round_.pairs:
        yield [value for seen in pair if not seen.compared.is_flip for value in seen.compared.noise]


def judged(
    relation: Relation, first: Round, wrong: Broken | None, spread: Spread, is_wrong: Callable[[int], bool]
) -> Held:
    """`wrong`: what looks broken in the first round. `is_wrong(number)`: whether something does so in another."""
    if wrong is None:
        shown = outcome([seen.compared for seen in first.positions], spread, relation.samples == 1)
        why = f"a request beside the questions was refused: {first.unmet}" if first.unmet else ""
        why = why or (first_flip(first) if shown is Outcome.UNKNOWN else "")
        return Held(relation, shown, score_of_round(first), (0, 1), why=why)
    count, asked = 1, 1
    while count < NEEDED and asked < ROUNDS:
        try:
            count += is_wrong(asked)
        except InconclusiveError as error:  # it answered before
            wrong, count = replace(wrong, what=f"{wrong.what}; since then {error}"), NEEDED
        asked += 1
    shown = Outcome.BROKEN if count >= NEEDED else Outcome.ONCE
    return Held(relation, shown, score_of_round(first), (count, asked), wrong)


def score_of_round(round_: Round) -> Score:
    return score_of([[seen.compared for seen in pair] for pair in round_.pairs])


def between(first: Asking, second: Asking, spreads: tuple[Spread, Spread]) -> Held:
    """Two engines' answers alone to the same questions, under the larger of their spreads: do they differ by more than
    each from itself?"""
    spread = max(spreads, key=lambda each: each.nats)

    def round_of(number: int) -> Round:
        here, there = first.alone(number), dict(second.alone(number))
        round_, trace = Round(), relations.in_turn([question for question, _ in here])
        for index, (question, answer) in enumerate(here):
            other = there.get(question)
            missing = Comparison((), "the other engine does not answer")
            round_.take(missing if other is None else compared(answer, other), trace, index)
        return round_

    opening = round_of(0)
    wrong = first.wrong(opening, spread)
    return judged(OTHER, opening, wrong, spread, lambda number: first.wrong(round_of(number), spread) is not None)
