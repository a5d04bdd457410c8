"""What makes an engine wrong everywhere, beside its format: answers that have nothing to do with the checkpoint, a
constant that is off, or a label of an LFM3's config.json that is read otherwise.

A constant may cause errors that look like a format's, or that a format hides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lfm2np.checkpoint.config_json import READINGS, reading_of
from lfm2np.checkpoint.loaded import LoadedModel, read_model
from lfm2np.oracle.causes.findings import CERTAIN, LIKELY, MOST_NAMES, Suspicion, requests_of
from lfm2np.oracle.engines.records import Pair
from lfm2np.oracle.judging.constants import ConstantSearch
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.position import is_wrong
from lfm2np.oracle.judging.scored import Evidence, usable
from lfm2np.oracle.judging.verdict import Position

LEAST_REPORTED = 16  # log-probabilities
MOST_SAME = 0.5  # of the new tokens: a small vocabulary and text that repeats itself make some the same by chance
SUSPECT = "lfm2np vet names the checkpoint; or a wrong operator, behind which nothing is right (--locate says which)"
MOST_LEFT = 0.1  # of the error, by the constant that is its cause
NEARLY = 0.9  # as much as the first explains: another may be it as well
MOST_JUDGED = 24  # wrong requests, the shortest, and as many others


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


def constant_cause(search: ConstantSearch | None, is_wrong: bool) -> Suspicion | None:
    """The constant that explains most: of errors beyond the format, at most positions nearly all, or all but noise.

    Less is no cause: along a direction that makes logits smaller there is much of whatever makes an engine unsure.
    """
    possible = [] if search is None else [constant for constant in search.found if constant.is_plausible]
    if not possible:
        return None
    first = possible[0]
    if is_wrong and first.left > MOST_LEFT:
        return None
    alike = [constant.words for constant in possible if constant.explained >= NEARLY * first.explained]
    words = f"wrong everywhere by a little, as if {' or '.join(alike[:MOST_NAMES])}"
    suspect = "a constant, and no number format (--locate says where)"
    return Suspicion(CERTAIN if is_wrong else LIKELY, words, suspect, first.explained)


def reading_cause(
    model: LoadedModel, format_name: str, pairs: Sequence[Pair], positions: Sequence[Position]
) -> Suspicion | None:
    """That the answers are right under the other reading; None if they are not, or there is only one.

    Published configs label a partial rotation "default", under which transformers rotates the whole head: see
    checkpoint/config_json.py.
    """
    if not model.config.is_rope_relabelled or not is_wrong(positions):
        return None
    wrong, asked = requests_of(positions)
    by_length = sorted(pairs, key=lambda pair: len(pair[0].prompt_token_ids))
    chosen = []
    for some in (set(wrong), set(asked) - set(wrong)):
        chosen += [pair for pair in by_length if pair[0].request_id in some][:MOST_JUDGED]
    reading = next(name for name in READINGS if name != model.rope)
    other = read_model(model.path, model.numerics.name, rope=reading)
    if is_wrong(judge(other, format_name, chosen)):
        return None
    where = f"right with --rope {reading}: {reading_of(other.config)}"
    return Suspicion(CERTAIN, where, "the engine reads the rotation's label otherwise")
