"""From what an engine said to judged positions: scores it in exact arithmetic, under the noise of its format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.judging.answer import is_wrong, judged
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import DRAWS, loosened
from lfm2np.oracle.judging.rerouted import rerouted
from lfm2np.oracle.judging.scored import Known, Pair, add_noises, scored_as, spoken, truths_of
from lfm2np.oracle.judging.verdict import Position
from lfm2np.progress import Progress

MOST_REROUTED = 16  # answers for which near ties are tried


def judge(
    model: LoadedModel,
    format_name: str,
    pairs: Sequence[Pair],
    progress: Progress | None = None,
    known: Known | None = None,
    draws: int = DRAWS,
) -> list[Position]:
    """All positions that the answers allow to judge, in the order of the asks; by so many engines that could be."""
    known = Known() if known is None else known
    usable = [(ask, answer) for ask, answer in pairs if answer.error is None and answer.token_ids]
    truths = truths_of(model, usable, known, progress)
    every = list(dict.fromkeys(truths.values()))
    add_noises(model, format_name, every, known, draws, progress)
    form, layers = format_named(format_name), model.config.sparse_layers
    untold = [one for one in every if layers and not one.spoken.routes and not form.is_fine]
    add_noises(model, format_name, untold, known, draws, progress, own_routes=True)
    loose = dict(zip(untold, loosened([known.loose[format_name, one.spoken] for one in untold]), strict=True))
    positions, left = [], MOST_REROUTED
    for ask, answer in usable:
        truth = truths[spoken(ask, answer)]
        scored = scored_as(model, truth, known.noises[format_name, truth.spoken], loose.get(truth))
        found = judged(ask, answer, scored, form.bits, layers)
        if layers and answer.routes is None and scored.loose is None and left and is_wrong(found):
            left -= 1
            found = rerouted(model, format_name, (ask, answer), scored, found, known, draws)
        positions += found
    return smoothed(positions, draws) if untold else positions


def smoothed(positions: Sequence[Position], draws: int) -> list[Position]:
    """Few engines were drawn: each chance as if one more engine had had that of all positions together."""
    rate = math.fsum(one.route_chance for one in positions) / max(1, len(positions))
    return [replace(one, route_chance=(draws * one.route_chance + rate) / (draws + 1)) for one in positions]
