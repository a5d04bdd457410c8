"""The whole: a plan, rounds of questions, their answers under every hypothesis, and the verdict."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Protocol

from lfm2np.errors import RequestError, TokenizerError
from lfm2np.oracle.targets.target import TargetError
from lfm2np.oracle.vet.betting import Ledger, Standing
from lfm2np.oracle.vet.hypotheses import Hypotheses
from lfm2np.oracle.vet.likelihoods import Likelihoods, Scorer, tolerance_of
from lfm2np.oracle.vet.plan import Plan
from lfm2np.oracle.vet.questions import Question
from lfm2np.oracle.vet.replies import Reply, ReplyFile
from lfm2np.oracle.vet.token_ids import LeftOut, Tokens, tokens_of
from lfm2np.progress import ProgressOf
from lfm2np.work.place import Place

SCORING, PLANNING = "scoring", "planning"  # stages that progress reports
ROUND = 8  # questions between two looks at the evidence
MOST_SILENT = 4  # rounds without a usable answer


class Outcome(StrEnum):
    ACCEPTED = "accepted"
    NONE = "none of these"
    UNDECIDED = "undecided"


class Asks(Protocol):
    def ask(self, questions: Sequence[Question]) -> list[Reply]: ...


@dataclass(frozen=True)
class Bounds:
    """When to stop: answer tokens, and a cost by the prices of a million tokens."""

    tokens: int = 4000
    cost: float | None = None
    prompt_price: float = 0.0
    answer_price: float = 0.0

    def cost_of(self, prompt_tokens: float, answer_tokens: float) -> float:
        return (prompt_tokens * self.prompt_price + answer_tokens * self.answer_price) / 1e6


@dataclass(eq=False)
class Vetted:
    """The result so far. left_out: answers that say nothing, counted by why."""

    hypotheses: Hypotheses
    plan: Plan | None
    alpha: float
    bounds: Bounds
    spreads: Sequence[float]
    standings: list[Standing]
    num_answers: int = 0
    num_tokens: int = 0  # judged
    num_reported: int = 0
    answer_tokens: int = 0  # paid for
    prompt_tokens: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    more_prompt: Counter[int] = field(default_factory=Counter)  # tokens by which the server's count exceeds the claim's
    stopped: str = ""

    @property
    def left(self) -> list[int]:
        """Hypotheses that are not rejected."""
        return [number for number, standing in enumerate(self.standings) if standing.rejected is None]

    @property
    def outcome(self) -> Outcome:
        if not self.left:
            return Outcome.NONE
        same = all(self.hypotheses.is_alike(self.left[0], number) for number in self.left)
        rivals = any(not self.hypotheses.is_alike(self.left[0], number) for number in range(len(self.standings)))
        fits = any(self.standings[number].fits is not None for number in self.left)
        return Outcome.ACCEPTED if same and rivals and fits and self.num_tokens else Outcome.UNDECIDED

    @property
    def accepted(self) -> int | None:
        """Of those that are left and differ only in their sampling, the one with the least against it."""
        if self.outcome is not Outcome.ACCEPTED:
            return None
        return min(self.left, key=lambda number: self.standings[number].capital)

    @property
    def exit_code(self) -> int:
        if self.outcome is Outcome.UNDECIDED:
            return 1 if not any(map(self.hypotheses.is_claimed, self.left)) else 2
        return 0 if self.accepted is not None and self.hypotheses.is_claimed(self.accepted) else 1

    @property
    def cost(self) -> float:
        return self.bounds.cost_of(self.prompt_tokens, self.answer_tokens)


@dataclass(eq=False)
class Session:
    """One run. decided: whether it stops when the verdict stands; else it uses all that it may."""

    hypotheses: Hypotheses
    plan: Plan | None
    alpha: float
    bounds: Bounds
    spreads: Sequence[float]
    places: Sequence[Place] | None = None
    use_logprobs: bool = True
    progress: ProgressOf | None = None
    scorer: Scorer = field(init=False)
    ledger: Ledger = field(init=False)
    result: Vetted = field(init=False)

    def __post_init__(self) -> None:
        claim = self.hypotheses.claim.model
        self.scorer = Scorer(self.hypotheses, self.places)
        self.ledger = Ledger(self.hypotheses, claim.config.vocab_size, self.spreads)
        standings = self.ledger.standings(self.alpha)
        self.result = Vetted(self.hypotheses, self.plan, self.alpha, self.bounds, self.spreads, standings)

    def take(self, replies: Sequence[Reply]) -> None:
        """Judges some replies, and says what stands now."""
        result, usable = self.result, []
        for reply in replies:
            result.prompt_tokens += reply.prompt_tokens or 0
            result.answer_tokens += reply.num_tokens if reply.error is None else 0
            self._compare_prompts(reply)
            try:
                usable.append((reply.question, self._tokens(reply)))
            except LeftOut as why:
                result.left_out[str(why)] += 1
        shown = partial(self.progress, SCORING) if self.progress else None
        scored = self.scorer.score(usable, list(map(tolerance_of, self.spreads)), self.use_logprobs, shown)
        for (_, tokens), likelihoods in zip(usable, scored, strict=True):
            if not isinstance(likelihoods, Likelihoods):
                result.left_out[likelihoods] += 1
                continue
            self.ledger.add(likelihoods)
            result.num_answers += 1
            result.num_tokens += len(tokens)
            result.num_reported += sum(value is not None for value in tokens.logprobs) if self.use_logprobs else 0
        result.standings = self.ledger.standings(self.alpha)

    def _tokens(self, reply: Reply) -> Tokens:
        model = self.hypotheses.claim.model
        tokens = tokens_of(reply, model.tokenizer, model.config.eos_token_ids)
        return tokens if self.use_logprobs else Tokens(tokens.token_ids, (None,) * len(tokens))

    def _compare_prompts(self, reply: Reply) -> None:
        """Servers count in ways of their own: a hint at another layout, and no evidence."""
        if reply.prompt_tokens is not None:
            with contextlib.suppress(RequestError, TokenizerError):
                expected = self.scorer.prompts(reply.question)[self.scorer.pairs.index((0, 0))]
                self.result.more_prompt[reply.prompt_tokens - len(expected)] += 1

    def is_over(self) -> bool:
        """Whether the verdict stands, or the bounds are reached; the reason is then in the result."""
        result = self.result
        if result.outcome is not Outcome.UNDECIDED:
            result.stopped = "decided"
        elif result.answer_tokens >= self.bounds.tokens:
            result.stopped = f"{self.bounds.tokens} tokens"
        elif self.bounds.cost is not None and result.cost >= self.bounds.cost:
            result.stopped = f"a cost of {self.bounds.cost:g}"
        elif self._is_as_close_as_it_gets():
            result.stopped = "what is left can't be told apart with the tokens that are left"
        return bool(result.stopped)

    def _is_as_close_as_it_gets(self) -> bool:
        """Whether the plan needs more tokens than there may be for every pair of what is left."""
        left = self.result.left
        if self.plan is None or len(left) == len(self.result.standings):
            return False
        table = self.plan.reported if self.result.num_reported else self.plan.tokens
        pairs = [(a, b) for a, b in itertools.permutations(left, 2) if not self.hypotheses.is_alike(a, b)]
        return bool(pairs) and all(table[pair] > 4 * self.bounds.tokens for pair in pairs)


def vetted(
    session: Session, questions: Iterator[Question], provider: Asks | None, recorded: ReplyFile | None, keep: bool
) -> Vetted:
    """Answers that are recorded first, then those that a provider gives to new questions, until it is over.

    keep  whether new answers are appended to the file
    """
    replies = list(recorded.replies) if recorded is not None else []
    for start in range(0, len(replies), ROUND):
        session.take(replies[start : start + ROUND])
        if session.is_over():
            return session.result
    asked = {str(reply.question.as_json()) for reply in replies}
    silent = 0
    while provider is not None and not session.is_over():
        new = list(itertools.islice((q for q in questions if str(q.as_json()) not in asked), ROUND))
        if not new:
            session.result.stopped = "no questions left"
            break
        got = provider.ask(new)
        if keep and recorded is not None:
            recorded.append(got)
        before = session.result.num_answers
        session.take(got)
        silent = 0 if session.result.num_answers > before else silent + 1
        if silent == MOST_SILENT:
            why = session.result.left_out.most_common(1)[0][0]
            if not session.result.num_answers:
                raise TargetError(f"no usable answer to {MOST_SILENT * ROUND} questions: {why}")
            session.result.stopped = f"no usable answers any more: {why}"
            break
    if not session.result.stopped:
        session.result.stopped = "no answers left"
    return session.result


def chosen(questions: Iterator[Question], plan: Plan | None) -> Iterator[Question]:
    """Those of the kinds that the plan found telling."""
    return questions if plan is None else (question for question in questions if question.kind in plan.kinds)


def require_same_vocabulary(hypotheses: Hypotheses) -> None:
    """RequestError for the first id that means something else."""
    claim = hypotheses.claim
    for candidate in hypotheses.candidates[1:]:
        size, expected = candidate.model.config.vocab_size, claim.model.config.vocab_size
        if size != expected:
            raise RequestError(
                f"candidate {candidate.name}: vocab_size {size}, expected {expected}, as {claim.name} has"
            )
        ours, theirs = claim.model.tokenizer, candidate.model.tokenizer
        for token_id in range(expected):
            if ours.token(token_id) != theirs.token(token_id):
                raise RequestError(
                    f"candidate {candidate.name}: token {token_id} is {theirs.token(token_id)!r}, expected "
                    f"{ours.token(token_id)!r}, as {claim.name} has it"
                )
