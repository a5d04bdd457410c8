"""Answers that ended early: fewer tokens than requested, without a stop string.

Some servers stop at an end-of-sequence token although ignore_eos was requested. The missing tokens are requested again,
with the prompt and the answer so far as the prompt; what can't be requested again counts as not tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lfm2np.checkpoint.tokenizer import Tokenizer
from lfm2np.oracle.judging.scored import Pair
from lfm2np.oracle.targets.records import SAMPLED, Ask
from lfm2np.oracle.workloads import text_of

MOST_TIMES = 4  # that one request is continued
CONTINUES = "continues"  # the factor of such a request: the id of the one that ended early


@dataclass(frozen=True)
class EarlyEnds:
    """Answers that ended early, the tokens that are missing, and those of them that no continuation has."""

    answers: int
    tokens: int
    lost: int


def missing_tokens(pair: Pair) -> int:
    """How many an answer with some tokens lacks."""
    ask, answer = pair
    if answer.error is not None or not answer.token_ids or ask.stop or answer.finish_reason == "abort":
        return 0
    return max(0, ask.max_tokens - len(answer.token_ids))


def continuations(pairs: Sequence[Pair], tokenizer: Tokenizer | None, takes_token_ids: bool) -> tuple[Ask, ...]:
    """Requests for the missing tokens; none for sampled answers, as a seed would start again."""
    asks = []
    for ask, answer in pairs:
        missing, ids = missing_tokens((ask, answer)), (*ask.prompt_token_ids, *(answer.token_ids or ()))
        text = text_of(tokenizer, ids) if tokenizer is not None and missing else None
        if missing and SAMPLED not in ask.factors and (takes_token_ids or text is not None):
            factors = {**ask.factors, "length": len(ids), "prefix": "warm", "seen": len(ids), CONTINUES: ask.id}
            name = f"{ask.id}+{len(ids) - len(ask.prompt_token_ids)}"
            asks.append(Ask(name, ask.case, ids, missing, text, prompt_logprobs=False, factors=factors))
    return tuple(
        replace(ask, factors={**ask.factors, "beside": len(asks) > 1, "place": place}) for place, ask in enumerate(asks)
    )


def without_vain(pairs: Sequence[Pair]) -> list[Pair]:
    """Without continuations that brought no token: those tokens are lost, but no answer is missing."""
    return [
        (ask, answer) for ask, answer in pairs if CONTINUES not in ask.factors or answer.token_ids or answer.refuted
    ]


def early_ends(pairs: Sequence[Pair]) -> EarlyEnds:
    first = [missing_tokens(pair) for pair in pairs if CONTINUES not in pair[0].factors]
    continued = {ask.factors.get(CONTINUES) for ask, _ in pairs}
    lost = sum(missing_tokens(pair) for pair in pairs if pair[0].id not in continued)
    return EarlyEnds(sum(map(bool, first)), sum(first), lost)
