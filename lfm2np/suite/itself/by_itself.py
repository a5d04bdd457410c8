"""Judges the answers to a trace by what the same engine, or another, answers to each of its requests alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lfm2np.oracle.engines.records import IMPOSSIBLE, Answer, Request, Trace
from lfm2np.oracle.engines.target import Played, Target
from lfm2np.oracle.engines.validate import validate
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.suite.fuzz.judge import DIFFERS, Finding, Judge, Right, right_token, trouble_finding, trouble_of
from lfm2np.suite.fuzz.trace import in_turn
from lfm2np.suite.itself.pairs import Compared, Comparison, allowed_by, compared, reported, scored
from lfm2np.suite.itself.relations import whole
from lfm2np.suite.itself.rounding_spread import Spread, beyond

KEPT = 256  # answers alone that are kept from trace to trace
LEAST = 1e-10  # nats of a spread: bits that never moved may still do so once
ANY = 1e9  # nats: a bound where no log-probability was reported; a script has it as JSON, which knows no infinity


@dataclass
class ByItself(Judge):
    """`player` answers alone. `spread` as measured before; `is_same`: it is the engine that is judged.

    with_scores  it reports log-probabilities of prompts, so an answer is also compared with its own tokens as a prompt
    """

    player: Target
    spread: Spread
    vocab_size: int
    is_same: bool = True
    with_scores: bool = False
    is_bitwise: bool = False
    is_certain = False  # a spread is an estimate: what is near its limit may be beyond it by chance
    known: dict[Request, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        who = "this engine's own answer to the same request" if self.is_same else "the other engine's answer"
        self.expected = (
            f"What is expected is {who}, alone and without a cached prefix. Between two such answers one logit differs "
            f"by {self.spread.nats:.2g} nat (root mean square, as measured on this engine)."
        )

    def finding(self, trace: Trace, played: Played) -> Finding | None:
        if (trouble := trouble_finding(trace, played)) is not None:
            return trouble
        self.known = {} if len(self.known) > KEPT else {k: v for k, v in self.known.items() if v.error is None}
        asked = list(zip(trace.requests, played.answers, strict=True))
        judged = {
            index: (request, answers[0])
            for index, (request, answers) in enumerate(asked)
            if request.params.n == 1 and answers[0].token_ids is not None
        }
        finding = self.differing(judged)
        if finding is None or finding.kind != DIFFERS:
            return finding
        for request, answer in judged.values():  # the answers alone may have been the wrong ones: they are asked again
            for kept in (alone(request), whole(request, answer)):
                self.known.pop(kept, None)
        return self.differing(judged)

    def differing(self, judged: Mapping[int, tuple[Request, Answer]]) -> Finding | None:
        """The first answer that is not as alone; or, of answers each of which may be right, too many other tokens."""
        self.ask([alone(request) for request, _ in judged.values()])
        positions: list[Compared] = []
        first_open: int | None = None
        for index, (request, answer) in judged.items():
            valid = validate(request, answer)
            if valid.error is not None:
                return Finding(IMPOSSIBLE, f"request {index}: {valid.error}", index, seen=answer)
            pair = self.pair(request, answer)
            if (again := self.trouble_alone(request, answer)) is not None:
                return Finding(again[0], f"request {index}, asked again alone: {again[1]}", index)
            if (what := self.wrong(pair)) is not None:
                return Finding(DIFFERS, f"request {index}: {what}", index, seen=answer)
            positions += pair.positions
            if first_open is None and any(each.is_open for each in pair.positions):
                first_open = index
        if first_open is None or (what := self.wrong(Comparison(tuple(positions)))) is None:
            return None
        return Finding(DIFFERS, f"request {first_open}: {what}", first_open, seen=judged[first_open][1])

    def wrong(self, pair: Comparison) -> str | None:
        what, _ = beyond(self.spread, pair.positions, self.is_bitwise) or (None, 0)
        return pair.fault or what

    def trouble_alone(self, request: Request, answer: Answer) -> tuple[str, str] | None:
        """Of the requests that it is compared with: an engine may hang there, too."""
        for kept in (alone(request), whole(request, answer)):
            if kept in self.known and (why := trouble_of([self.known[kept]])) is not None:
                return why
        return None

    def pair(self, request: Request, answer: Answer) -> Comparison:
        """The answer against the one alone; then, if it may be, against its own tokens as a prompt."""
        reference = self.known[alone(request)]
        if reference.token_ids is None:
            return Comparison((), f"alone it is not answered: {reference.error or 'no answer'}")
        most = answer.num_tokens if answer.is_aborted else None
        pair = compared(reference, answer, most=most, is_whole=not answer.is_aborted, is_drawn=request.is_sampled)
        if pair.fault or not (self.with_scores and self.is_same and answer.token_ids):
            return pair
        prompt = whole(request, answer)
        self.ask([prompt])
        logprobs = self.known[prompt].prompt_logprobs
        if logprobs is None:
            return pair
        return Comparison((*pair.positions, *scored(answer, logprobs, len(request.prompt_token_ids)).positions))

    def right(self, request: Request, seen: Answer | None) -> list[Right]:
        """Of the answer alone, within the limit of the spread."""
        if request.is_sampled:
            return []
        self.ask([alone(request)])
        answer = self.known[alone(request)]
        return [self.right_at(answer, index) for index in range(answer.num_tokens)]

    def right_at(self, answer: Answer, index: int) -> Right:
        token, logprobs = (answer.token_ids or ())[index], reported(answer, index)
        if token not in logprobs:
            return Right(token, 0.0, ANY, False)
        return right_token(token, allowed_by(logprobs, token, max(self.spread.limit / LIMIT, LEAST)), False)

    def alone(self, request: Request) -> Request | None:
        """The request that gives what is expected; None where another engine does."""
        return alone(request) if self.is_same else None

    def ask(self, requests: list[Request]) -> None:
        """One after another; what was asked before is known."""
        new = [request for request in dict.fromkeys(requests) if request not in self.known]
        if new:
            answers = self.player.play(in_turn(new)).answers
            self.known.update(zip(new, (first for first, *_ in answers), strict=True))


def alone(request: Request) -> Request:
    plain = replace(request, after=None, after_tokens=None, pause=0, abort_after=None, cold=True, streamed=False)
    return replace(plain, request_id="", tags={})
