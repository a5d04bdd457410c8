"""Plays every relation on an engine, and judges what came: the check of an engine against itself, or another."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lfm2np.errors import InconclusiveError
from lfm2np.oracle.engines.records import DEAD, REFUSED, Pair, Request, Trace, changed
from lfm2np.oracle.engines.target import Abilities, Answers, Played, Target, TargetError
from lfm2np.oracle.engines.validate import validate
from lfm2np.oracle.report.report import plural
from lfm2np.suite.fuzz.trace import in_turn
from lfm2np.suite.itself.pairs import Compared, Comparison, compared, likeliest, scored, stopped
from lfm2np.suite.itself.questions import Sizes, questions
from lfm2np.suite.itself.relations import (
    ALONE,
    LIKELIEST,
    NEEDS,
    OTHER,
    QUESTION,
    RELATIONS,
    SCORED,
    SEED,
    START,
    TEMPERATURE,
    Relation,
)
from lfm2np.suite.itself.rounding_spread import Outcome, Score, Spread, beyond, outcome, score_of, spread_of, words_of
from lfm2np.suite.itself.samples import samples_alike
from lfm2np.values import Progress

OUT_OF_TIME, INTERRUPTED = "out of time", "interrupted"
SEE = " (see --max-model-len)"  # of a request that may be too long
ROUNDS, NEEDED = 3, 2  # of other tokens each: a relation is broken if it looks so in two of at most three


class Broken(NamedTuple):
    """What is wrong, and the trace that shows it."""

    what: str
    trace: Trace | None = None


@dataclass(frozen=True)
class Held:
    """What came of one relation, in its first round.

    rounds  in how many it looked broken, and how many there were
    broken  what is wrong, also if it was seen once
    why     it was not asked, not judged, or judged only in part
    """

    relation: Relation
    outcome: Outcome
    score: Score = field(default_factory=Score)
    rounds: tuple[int, int] = (0, 0)
    broken: Broken | None = None
    why: str = ""


@dataclass
class Round:
    """One relation, asked once: each comparison with its trace and its request in words, and the first fault that no
    rounding explains."""

    pairs: list[tuple[Comparison, Trace, str]] = field(default_factory=list)
    fault: Broken | None = None
    unmet: str = ""  # a request beside the questions that was refused, so that its trace says nothing

    @property
    def positions(self) -> list[Compared]:
        return [each for pair, _, _ in self.pairs for each in pair.positions]

    def wrong(self, spread: Spread, is_bitwise: bool) -> Broken | None:
        worst = beyond(spread, self.positions, is_bitwise)
        if self.fault is not None or worst is None:
            return self.fault
        what, index = worst
        places = [(trace, words) for pair, trace, words in self.pairs for _ in pair.positions]
        return Broken(f"{places[index][1]}: {what}", places[index][0])

    def noise(self) -> Iterator[list[float]]:
        """Of equal tokens: another token is what the spread is to judge, and may be off by any amount."""
        for pair, _, _ in self.pairs:
            yield [value for each in pair.positions if not each.is_flip for value in each.noise]

    def first_flip(self) -> str:
        """Where tokens differ of which no log-probability says by how much."""
        for pair, _, words in self.pairs:
            for each in pair.positions:
                if each.is_flip and (each.is_open or each.difference is None):
                    return f"{words}: {words_of(each)}, by unknown nats"
        return "nothing was reported that could be compared"


@dataclass
class Asking:
    """One engine, asked under relations.

    players     by Relation.player: "" is the engine itself; others where they can be had
    other       another engine, whose answers alone are compared with this one's, under the larger spread
    is_bitwise  equal bits are demanded
    until       time.monotonic() after which no further relation is begun
    unanswered  what came instead of an answer to a question alone; such a question is not asked again
    refuted     the first answer to a question alone that no right engine gives
    """

    players: Mapping[str, Target]
    abilities: Abilities
    sizes: Sizes
    format_name: str
    seed: int = 0
    is_bitwise: bool = False
    other: Asking | None = None
    until: float = math.inf
    report: Progress = lambda done, total: None
    spread: Spread = field(init=False)
    held: list[Held] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0
    traces: int = 0
    seconds: float = 0.0
    unanswered: list[str] = field(default_factory=list)
    refuted: Broken | None = None
    gone: Broken | None = None  # the trace at which the engine died
    is_interrupted: bool = False
    known: dict[int, list[Pair]] = field(default_factory=dict)  # the questions with their answers alone, by round
    rounds: dict[str, Round] = field(default_factory=dict)  # the first of each relation that measures the spread

    @property
    def widest(self) -> Spread:
        """The larger of both engines'."""
        spreads = [self.spread, *([] if self.other is None else [self.other.spread])]
        return max(spreads, key=lambda spread: spread.nats)

    @property
    def broken(self) -> list[Held]:
        return [each for each in self.held if each.outcome is Outcome.BROKEN]

    def run(self, chosen: Sequence[Relation] = RELATIONS) -> Asking:
        """Itself. InconclusiveError if no question is answered, TargetError if the engine is gone. An engine that gives
        only impossible answers to the questions alone is asked nothing else: there is nothing to compare with."""
        began = time.monotonic()
        self.begin()
        if self.refuted is not None:
            self.held.append(Held(ALONE, Outcome.BROKEN, rounds=(1, 1), broken=self.refuted))
        chosen = [*chosen, *([] if self.other is None else [OTHER])] if self.known[0] else []
        for done, relation in enumerate(chosen):
            self.report(done, len(chosen))
            try:
                self.held.append(self.ask(relation))
            except KeyboardInterrupt:
                if not self.broken:
                    raise
                self.is_interrupted = True
                self.held += [Held(each, Outcome.NOT_ASKED, why=INTERRUPTED) for each in chosen[done:]]
                break
        self.report(len(chosen), len(chosen))
        self.seconds = time.monotonic() - began
        return self

    def begin(self) -> None:
        """The spread, from the relations that measure it; the other engine's too."""
        if self.other is not None:
            self.other.begin()
            self.players = {**self.players, OTHER.player: self.other.players[""]}
        self.known[0], self.refuted = self.alone(0)
        if not self.known[0]:
            self.spread = spread_of((), (), self.format_name)
            return
        noise: dict[str, list[list[float]]] = {"batch": [], "other": []}
        for relation in (each for each in RELATIONS if each.measures):
            try:
                self.rounds[relation.name] = self.round(relation, 0)
            except TargetError:
                self.rounds[relation.name] = Round(fault=self.gone)
                break
            noise[relation.measures] += self.rounds[relation.name].noise()
        self.spread = spread_of(noise["batch"], noise["other"], self.format_name)

    def ask(self, relation: Relation) -> Held:
        """An engine that dies breaks the relation."""
        why = self.lacks(relation) if self.known[0] else "no answer alone to compare with"
        if not why and relation.name not in self.rounds:
            why = "the engine is gone" if self.gone else OUT_OF_TIME if time.monotonic() > self.until else ""
        if why:
            return Held(relation, Outcome.NOT_ASKED, why=why)
        try:
            return self.judged(relation)
        except TargetError:
            return Held(relation, Outcome.BROKEN, rounds=(1, 1), broken=self.gone)
        except InconclusiveError as error:  # it answered before
            return Held(relation, Outcome.BROKEN, rounds=(1, 1), broken=Broken(str(error)))

    def judged(self, relation: Relation) -> Held:
        """By the first round; if something looks broken there, by others, mostly of other tokens."""
        spread = self.widest if relation is OTHER else self.spread
        first = self.round(relation, 0)
        if first.fault is not None and first.fault is self.gone:
            raise TargetError(first.fault.what)
        score = score_of([pair.positions for pair, _, _ in first.pairs])
        wrong = first.wrong(spread, self.is_bitwise)
        if wrong is None:
            shown = outcome(first.positions, spread, relation.samples == 1)
            why = f"a request beside the questions was refused: {first.unmet}" if first.unmet else ""
            why = why or (first.first_flip() if shown is Outcome.UNKNOWN else "")
            return Held(relation, shown, score, (0, 1), why=why)
        count = asked = 1
        while count < NEEDED and asked < (1 if self.gone else ROUNDS):
            try:
                count += self.round(relation, asked).wrong(spread, self.is_bitwise) is not None
            except InconclusiveError as error:  # it answered before
                wrong, count = wrong._replace(what=f"{wrong.what}; since then {error}"), NEEDED
            asked += 1
        return Held(relation, Outcome.BROKEN if count >= NEEDED else Outcome.ONCE, score, (count, asked), wrong)

    def lacks(self, relation: Relation) -> str:
        """What of the relation's needs the engine does not take."""
        missing = [need for need in relation.needs if not getattr(self.abilities, need)]
        missing += [] if relation.player in self.players else [relation.player]
        return "; ".join(dict.fromkeys(NEEDS[need] for need in missing))

    def alone(self, round_: int, samples: int = 0) -> tuple[list[Pair], Broken | None]:
        """The questions of a round on an idle engine, one after another: those that were answered, and the first answer
        that no right engine gives. InconclusiveError if there is neither.

        samples  0: greedily; 1: with a seed; more: so many answers to each
        """
        asked = questions(self.sizes, self.seed * ROUNDS + round_)
        if samples:
            asked = [changed(question, temperature=TEMPERATURE, seed=SEED, n=samples) for question in asked]
        answered, unanswered = list[Pair](), list[Pair]()
        for question, answers in zip(asked, self.play(in_turn(asked)).answers, strict=True):
            valid = [validate(question, answer) for answer in answers]
            usable = [answer for answer in valid if answer.error is None and answer.token_ids]
            answered += [(question, answer) for answer in usable]
            unanswered += [] if usable else [(question, valid[0])]
        refuted: Broken | None = None
        longest = max((question.num_tokens for question, _ in answered), default=0)
        for question, answer in unanswered:
            if answer.is_refuted:
                what = f"prompt of {plural(len(question.prompt_token_ids), 'token')}: {answer.error}"
                refuted = refuted or Broken(what, Trace((question,)))
                continue
            hint = SEE if question.num_tokens > longest else ""
            why = answer.error or "no token ids were reported"
            self.unanswered.append(f"a prompt of {plural(len(question.prompt_token_ids), 'token')} alone{hint}: {why}")
        if not answered and refuted is None:
            raise InconclusiveError(f"no question was answered: {self.unanswered[-1]}")
        return answered, refuted

    def round(self, relation: Relation, number: int) -> Round:
        if number == 0 and relation.name in self.rounds:
            return self.rounds[relation.name]
        refuted: Broken | None = None
        if relation.samples:
            alone, refuted = self.alone(number, relation.samples)
        else:
            alone, refuted = self.greedy(0 if relation.keeps else number)
        if relation.samples > 1 and refuted is None:
            refuted = self.alike(alone, number)
        round_ = Round(fault=refuted)
        for trace in relation.build(alone, self.sizes) if alone else ():
            played = self.play(trace, relation.player)
            if unmet := refused(trace, played):
                round_.unmet = unmet
                continue
            for index, (request, answers) in enumerate(zip(trace.requests, played.answers, strict=True)):
                if QUESTION in request.tags:
                    pair = compared_with(alone[request.tags[QUESTION]], request, answers, bool(relation.samples))
                    if pair.fault is not None and round_.fault is None:
                        round_.fault = Broken(f"{where(trace, index)}: {pair.fault}", trace)
                    round_.pairs.append((pair, trace, where(trace, index)))
            if played.trouble is not None and round_.fault is None:
                round_.fault = Broken(played.trouble.what, trace)
        return round_

    def greedy(self, round_: int) -> tuple[list[Pair], Broken | None]:
        """As `alone`; what is known is not asked again."""
        refuted: Broken | None = None
        if round_ not in self.known:
            self.known[round_], refuted = self.alone(round_)
        return self.known[round_], refuted

    def alike(self, alone: Sequence[Pair], round_: int) -> Broken | None:
        """Samples that repeat each other."""
        found = samples_alike(alone, self.greedy(round_)[0], self.spread.nats)
        if found is None:
            return None
        question, words = found
        return Broken(f"prompt of {plural(len(question.prompt_token_ids), 'token')}: {words}", Trace((question,)))

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
            return f"{count} tokens and {request.max_tokens} more{SEE}: {answer.error}"
    return ""


def where(trace: Trace, request: int) -> str:
    start = trace.requests[request].tags.get(START, 0)
    of = f", which holds {start} tokens of an answer" if start else ""
    count, total = len(trace.requests[request].prompt_token_ids), len(trace.requests)
    return f"prompt of {count} tokens{of}, request {request} of {total}"
