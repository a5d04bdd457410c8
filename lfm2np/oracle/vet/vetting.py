"""The whole: a plan, rounds of questions, their answers under every hypothesis, and the verdict."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

from lfm2np.engine.work.place import Place
from lfm2np.errors import RequestError, TokenizerError
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.vet.asking import Provider
from lfm2np.oracle.vet.betting import Ledger, Standing
from lfm2np.oracle.vet.hypotheses import Hypotheses
from lfm2np.oracle.vet.likelihoods import Likelihoods, Scorer
from lfm2np.oracle.vet.provider_answers import Reply, ReplyFile
from lfm2np.oracle.vet.questions import Question
from lfm2np.oracle.vet.token_ids import LeftOut, Tokens, tokens_of
from lfm2np.oracle.vet.token_plan import Plan
from lfm2np.values import ProgressOf

SCORING, PLANNING = "scoring", "planning"  # stages that progress reports
ROUND = 8  # questions between two looks at the evidence
MOST_SILENT = 4  # rounds without a usable answer


class Outcome(StrEnum):
    ACCEPTED = "accepted"
    NONE = "none of these"
    UNDECIDED = "undecided"


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
    plan: Plan
    alpha: float
    bounds: Bounds
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
        rivals = self.hypotheses.rivals(self.left[0])
        are_rejected = bool(rivals) and set(rivals).isdisjoint(self.left)
        fits = any(self.standings[number].fits is not None for number in self.left)
        return Outcome.ACCEPTED if are_rejected and fits and self.num_tokens else Outcome.UNDECIDED

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


class Session:
    """One run."""

    def __init__(
        self,
        hypotheses: Hypotheses,
        plan: Plan,
        alpha: float,
        bounds: Bounds,
        places: Sequence[Place] | None = None,
        use_logprobs: bool = True,
        progress: ProgressOf | None = None,
    ) -> None:
        self.scorer = Scorer(hypotheses, places)
        self.ledger = Ledger(hypotheses, hypotheses.claim.model.config.vocab_size, plan.spreads)
        self.result = Vetted(hypotheses, plan, alpha, bounds, self.ledger.standings(alpha))
        self._use_logprobs, self._progress = use_logprobs, progress

    def take(self, replies: Sequence[Reply]) -> None:
        """Judges some replies, and says what stands now."""
        result, usable = self.result, []
        for reply in replies:
            result.prompt_tokens += reply.prompt_tokens or 0
            result.answer_tokens += reply.num_tokens if reply.error is None else 0
            self._compare_prompts(reply)
            try:
                usable.append((reply.question, self.tokens_of(reply)))
            except LeftOut as why:
                result.left_out[str(why)] += 1
        shown = partial(self._progress, SCORING) if self._progress else None
        scored = self.scorer.score(usable, result.plan.spreads, shown)
        for (_, tokens), likelihoods in zip(usable, scored, strict=True):
            if not isinstance(likelihoods, Likelihoods):
                result.left_out[likelihoods] += 1
                continue
            self.ledger.add(likelihoods)
            result.num_answers += 1
            result.num_tokens += len(tokens)
            result.num_reported += sum(value is not None for value in tokens.logprobs)
        result.standings = self.ledger.standings(result.alpha)

    def tokens_of(self, reply: Reply) -> Tokens:
        model = self.result.hypotheses.claim.model
        tokens = tokens_of(reply, model.tokenizer, model.config.eos_token_ids)
        return tokens if self._use_logprobs else replace(tokens, logprobs=(None,) * len(tokens))

    def _compare_prompts(self, reply: Reply) -> None:
        """Servers count in ways of their own: a hint at another layout, and no evidence."""
        if reply.prompt_tokens is not None:
            with contextlib.suppress(RequestError, TokenizerError):
                expected = self.scorer.prompts(reply.question)[0]
                self.result.more_prompt[reply.prompt_tokens - len(expected)] += 1

    def is_over(self) -> bool:
        """Whether the verdict stands, or the bounds are reached; the reason is then in the result."""
        result = self.result
        if result.outcome is not Outcome.UNDECIDED:
            result.stopped = "decided"
        elif result.answer_tokens >= result.bounds.tokens:
            result.stopped = f"{result.bounds.tokens} tokens"
        elif result.bounds.cost is not None and result.cost >= result.bounds.cost:
            result.stopped = f"a cost of {result.bounds.cost:g}"
        elif self._is_as_close_as_it_gets():
            result.stopped = "what is left can't be told apart with the tokens that are left"
        return bool(result.stopped)

    def _is_as_close_as_it_gets(self) -> bool:
        """Whether the plan needs more tokens than there may be for every pair of what is left."""
        result, left = self.result, self.result.left
        if len(left) == len(result.standings):
            return False
        table = result.plan.reported if result.num_reported else result.plan.tokens
        pairs = [(true, other) for true in left for other in result.hypotheses.rivals(true) if other in left]
        return bool(pairs) and all(table[pair] > 4 * result.bounds.tokens for pair in pairs)


def vetted(
    session: Session, questions: Iterator[Question], provider: Provider | None, recorded: ReplyFile | None, keep: bool
) -> Vetted:
    """Answers that are recorded first, then those that a provider gives to new questions, until it is over.

    keep  whether new answers are appended to the file
    """
    result = session.result
    replies = list(recorded.replies) if recorded is not None else []
    for start in range(0, len(replies), ROUND):
        session.take(replies[start : start + ROUND])
        if session.is_over():
            return result
    asked = {str(reply.question.as_json()) for reply in replies}
    silent = 0
    while provider is not None and not session.is_over():
        new = list(itertools.islice((q for q in questions if str(q.as_json()) not in asked), ROUND))
        if not new:
            result.stopped = "no questions left"
            break
        answered = provider.ask(new)
        if keep and recorded is not None:
            recorded.append(answered)
        before = result.num_answers
        session.take(answered)
        silent = 0 if result.num_answers > before else silent + 1
        if silent == MOST_SILENT:
            why = result.left_out.most_common(1)[0][0]
            if not result.num_answers:
                raise TargetError(f"no usable answer to {MOST_SILENT * ROUND} questions: {why}")
            result.stopped = f"no usable answers any more: {why}"
            break
    result.stopped = result.stopped or "no answers left"
    return result


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
