"""An engine that reads a label of an LFM3's config.json otherwise, and is right under that reading.

Published configs label a partial rotation "default", under which transformers rotates the whole head: see
checkpoint/lfm3.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from lfm2np.checkpoint.config import reading_of
from lfm2np.checkpoint.lfm3 import READINGS
from lfm2np.checkpoint.loaded import LoadedModel, read_model
from lfm2np.oracle.causes.findings import CERTAIN, Suspicion, requests_of
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.position import is_wrong
from lfm2np.oracle.judging.scored import Pair
from lfm2np.oracle.judging.verdict import Position

MOST_JUDGED = 24  # wrong requests, the shortest, and as many others


def reading_cause(
    model: LoadedModel, format_name: str, pairs: Sequence[Pair], positions: Sequence[Position]
) -> Suspicion | None:
    """That the answers are right under the other reading; None if they are not, or there is only one."""
    if not model.config.is_rope_relabelled or not is_wrong(positions):
        return None
    wrong, asked = requests_of(positions)
    by_length = sorted(pairs, key=lambda pair: len(pair[0].prompt_token_ids))
    chosen = [pair for pair in by_length if pair[0].id in wrong][:MOST_JUDGED]
    chosen += [pair for pair in by_length if pair[0].id in asked and pair[0].id not in wrong][:MOST_JUDGED]
    reading = next(name for name in READINGS if name != model.rope)
    other = read_model(model.path, model.numerics.name, rope=reading)
    if is_wrong(judge(other, format_name, chosen)):
        return None
    where = f"right with --rope {reading}: {reading_of(other.config)}"
    return Suspicion(CERTAIN, where, "the engine reads the rotation's label otherwise", len(wrong), len(asked))
