"""From what an engine said to judged positions: scores it in exact arithmetic, under the noise of its format.

Two of eight engines that could be tell most positions. Each square of a scale is a sum of mean squares over engines
(noise.py), and a mean over some of them is at most as many times that over all as they are fewer: the scale of two is
at most sqrt(8 / 2) times that of all eight. So what is beyond the limit under all is beyond half of it under two, and
only such positions are judged again, by all. They decide: nothing is called wrong, and nothing right, that all eight
would not. Where a position is wrong under all the engine is, and the others need not be judged again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.judging.answer import is_wrong, judged
from lfm2np.oracle.judging.formats import Format, format_named
from lfm2np.oracle.judging.noise import DRAWS, FIRST_DRAWS, loosened
from lfm2np.oracle.judging.rerouted import rerouted
from lfm2np.oracle.judging.scored import Known, Pair, Scored, add_noises, scored_as, spoken, truths_of
from lfm2np.oracle.judging.truth import Truth
from lfm2np.oracle.judging.verdict import LIMIT, Position
from lfm2np.progress import Progress

MOST_REROUTED = 16  # answers for which near ties are tried


def judge(
    model: LoadedModel,
    format_name: str,
    pairs: Sequence[Pair],
    progress: Progress | None = None,
    known: Known | None = None,
    first: Sequence[int] = FIRST_DRAWS,
) -> list[Position]:
    """All positions that the answers allow to judge, in the order of the asks.

    By the `first` of DRAWS where these tell, by all where they do not.
    """
    known = Known() if known is None else known
    usable = [(ask, answer) for ask, answer in pairs if answer.error is None and answer.token_ids]
    truths = truths_of(model, usable, known, progress)
    of_answers = [truths[spoken(ask, answer)] for ask, answer in usable]
    form, layers = format_named(format_name), model.config.sparse_layers
    untold = [one for one in of_answers if layers and not one.spoken.routes and not form.is_fine]
    if untold:
        return judged_by_share(model, form, usable, of_answers, untold, known, progress)
    add_noises(model, format_name, of_answers, known, first, progress)
    found = [judged_alone(model, form, pair, truth, known) for pair, truth in zip(usable, of_answers, strict=True)]
    for doubtful in in_doubt(found, math.sqrt(len(DRAWS) / len(first))):
        add_noises(model, format_name, [of_answers[index] for index in doubtful], known, DRAWS, progress)
        for index in doubtful:
            found[index] = judged_alone(model, form, usable[index], of_answers[index], known)
        if not layers and any(is_wrong(found[index]) for index in doubtful):
            break  # of a mixture other routes may explain it, and then the others count
    left = MOST_REROUTED
    for index, (pair, truth) in enumerate(zip(usable, of_answers, strict=True)):
        if layers and pair[1].routes is None and left and is_wrong(found[index]):
            left -= 1
            scored = scored_by(model, form, truth, known)
            found[index] = rerouted(model, form.name, pair, scored, found[index], known, DRAWS)
    return [one for positions in found for one in positions]


def judged_by_share(
    model: LoadedModel,
    form: Format,
    usable: Sequence[Pair],
    of_answers: Sequence[Truth],
    untold: Sequence[Truth],
    known: Known,
    progress: Progress | None,
) -> list[Position]:
    """Of a mixture of experts whose near ties are everywhere, and of which routes are not told: what share of engines
    goes elsewhere counts, so that all are asked, once with the truth's routes and once with their own."""
    add_noises(model, form.name, of_answers, known, DRAWS, progress)
    own = list(dict.fromkeys(untold))
    add_noises(model, form.name, own, known, DRAWS, progress, own_routes=True)
    loose = dict(zip(own, loosened([known.loose[form.name, one.spoken] for one in own]), strict=True))
    positions = []
    for (ask, answer), truth in zip(usable, of_answers, strict=True):
        scored = scored_as(model, truth, known.noises[form.name, truth.spoken], loose.get(truth))
        positions += judged(ask, answer, scored, form.bits, model.config.sparse_layers)
    return smoothed(positions, len(DRAWS))


def judged_alone(model: LoadedModel, form: Format, pair: Pair, truth: Truth, known: Known) -> list[Position]:
    return judged(*pair, scored_by(model, form, truth, known), form.bits, model.config.sparse_layers)


def scored_by(model: LoadedModel, form: Format, truth: Truth, known: Known) -> Scored:
    return scored_as(model, truth, known.noises[form.name, truth.spoken])


def in_doubt(found: Sequence[Sequence[Position]], factor: float) -> Iterable[list[int]]:
    """Which answers are to be judged again: the worst by itself if it is wrong, then all others that may be.

    factor  by which a scale may be too large: 1 where all engines were asked
    """
    worst = [max(map(difference, positions), default=0.0) for positions in found]
    doubtful = [index for index, one in enumerate(worst) if factor > 1.0 and one > LIMIT / factor]
    if any(is_wrong(found[index]) for index in doubtful):
        first = max(doubtful, key=lambda index: worst[index])
        yield [first]
        doubtful.remove(first)
    if doubtful:
        yield doubtful


def difference(position: Position) -> float:
    """The largest of a position, in units of the noise."""
    gap = position.gap_ratio if position.is_new and position.token_id != position.best else 0.0
    route = position.route.ratio if position.route is not None else 0.0
    return max(abs(position.error_ratio or 0.0), gap, route)


def smoothed(positions: Sequence[Position], draws: int) -> list[Position]:
    """Few engines were drawn: each chance as if one more engine had had that of all positions together."""
    rate = math.fsum(one.route_chance for one in positions) / max(1, len(positions))
    return [replace(one, route_chance=(draws * one.route_chance + rate) / (draws + 1)) for one in positions]
