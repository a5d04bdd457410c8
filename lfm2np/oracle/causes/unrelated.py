"""Answers that have nothing to do with the checkpoint: those of another one, of another tokenizer or prompt."""

from __future__ import annotations

import math

from lfm2np.oracle.causes.findings import LIKELY, Suspicion, requests_of
from lfm2np.oracle.judging.scored import Evidence, usable

LEAST_REPORTED = 16  # log-probabilities
MOST_SAME = 0.5  # of the new tokens: a small vocabulary and text that repeats itself make some the same by chance
SUSPECT = "lfm2np vet names the checkpoint; or a wrong operator, behind which nothing is right (--locate says which)"


def unrelated_cause(evidence: Evidence) -> Suspicion | None:
    """That every request is wrong, most greedy tokens are not the oracle's, and its log-probabilities say nothing of
    the engine's.

    They say nothing if their distances from the engine's are no smaller than those from one number, the mean: the sum
    of squares of errors is at least that around the mean. An operator that is wrong in one layer, or weights that are
    off by a third, leave a quarter of it or less. Likely, not certain: an operator behind which nothing is right looks
    the same.
    """
    wrong, asked = requests_of(evidence.positions)
    same = [position.token_id == position.best for position in evidence.positions if position.is_new]
    reported = [
        value
        for _, answer in usable(evidence.pairs)
        for value in (*(answer.logprobs or ()), *(answer.prompt_logprobs or ()))
    ]
    if len(wrong) < len(asked) or len(reported) < LEAST_REPORTED or sum(same) > MOST_SAME * len(same):
        return None
    mean = math.fsum(reported) / len(reported)
    errors = math.fsum((position.error or 0.0) ** 2 for position in evidence.positions)
    if errors < math.fsum((value - mean) ** 2 for value in reported):
        return None
    where = (
        f"wrong everywhere, {sum(same)} of {len(same)} new tokens are the oracle's, and log-probabilities have nothing"
    )
    where += " in common: these look like answers of another checkpoint, tokenizer or prompt"
    return Suspicion(LIKELY, where, SUSPECT)
