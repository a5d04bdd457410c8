"""From an engine's answers to judged positions: scored in exact arithmetic, within the noise of its format.

Two of eight emulated engines decide most positions. Each square of a scale is a sum of mean squares over engines
(noise.py); a mean over two of them is at most four times that over all, so their scale is at most twice that of all
eight. What is beyond the limit under all eight is therefore beyond half of it under two, and only answers with such
positions are judged again, by all. What all positions say together: see check.judged.

In a mixture of experts without reported routes near ties are tried as an explanation of a wrong answer (near_ties.py).
Formats in which they are everywhere have a second noise besides, which covers other routes (position.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.engines.records import Pair
from lfm2np.oracle.judging.formats import Format, format_named
from lfm2np.oracle.judging.near_ties import explained
from lfm2np.oracle.judging.noise import DRAWS, FIRST, at_least, rerouted_spread
from lfm2np.oracle.judging.position import is_wrong, judged
from lfm2np.oracle.judging.scored import Known, Scored, add_noises, spoken, truths_of, usable
from lfm2np.oracle.judging.truth import Truth
from lfm2np.oracle.judging.verdict import LIMIT, Position
from lfm2np.values import Progress

FAR = 5.0  # errors beyond LIMIT * FAR count as wrong in a wrong engine: two emulated ones may underestimate the scale


def judge(
    model: LoadedModel,
    format_name: str,
    pairs: Sequence[Pair],
    progress: Progress | None = None,
    known: Known | None = None,
    draws: Sequence[int] | None = None,
    explains: bool = True,
) -> list[Position]:
    """All positions that the answers allow to judge, in the order of the requests.

    By the FIRST emulated engines where these decide, else by all DRAWS; or by `draws` alone. Errors beyond LIMIT * FAR
    count as wrong without more engines, once all engines found one such answer wrong.

    explains  try near ties where a mixture's answer is wrong, which takes seconds an answer
    """
    known = Known() if known is None else known
    pairs = usable(pairs)
    truths = truths_of(model, pairs, known, progress)
    of_answers = [truths[spoken(request, answer)] for request, answer in pairs]
    form, layers = format_named(format_name), model.config.sparse_layers
    without_routes = [truth for truth in of_answers if layers and not truth.spoken.routes and not form.is_fine]
    if without_routes:
        return judged_by_share(model, form, pairs, of_answers, without_routes, known, progress, explains)

    def scored_by(truth: Truth) -> Scored:
        return Scored(truth, known.noises[format_name, truth.spoken])

    def judge_by(draws: Sequence[int], indices: Sequence[int]) -> list[list[Position]]:
        add_noises(model, format_name, [of_answers[index] for index in indices], known, draws, progress)
        return [judged(*pairs[index], scored_by(of_answers[index]), form.bits, layers) for index in indices]

    far = math.inf if layers else LIMIT * FAR
    by_answer = judge_by(draws, range(len(pairs))) if draws else by_enough_engines(len(pairs), judge_by, far)
    if layers and explains:
        by_answer = explained(model, format_name, pairs, by_answer, list(map(scored_by, of_answers)), known)
    return [position for positions in by_answer for position in positions]


def by_enough_engines(
    count: int, judge_by: Callable[[Sequence[int], Sequence[int]], list[list[Position]]], far: float
) -> list[list[Position]]:
    """The positions of `count` answers: by the FIRST engines where these decide, else by all; judge_by(draws, indices).

    far  units of the noise: larger errors count as wrong, once one such answer is wrong by all engines
    """
    by_answer = judge_by(FIRST, range(count))
    sizes = list(map(worst_of, by_answer))
    doubtful = [index for index, size in enumerate(sizes) if LIMIT / 2.0 < size <= far]
    others = sorted((index for index, size in enumerate(sizes) if size > far), key=lambda index: sizes[index])
    for index, positions in zip(doubtful, judge_by(DRAWS, doubtful), strict=True):
        by_answer[index] = positions
    while others and not any(is_wrong(by_answer[index]) for index in doubtful):
        doubtful = [others.pop()]
        (by_answer[doubtful[0]],) = judge_by(DRAWS, doubtful)
    return by_answer


def judged_by_share(
    model: LoadedModel,
    form: Format,
    pairs: Sequence[Pair],
    of_answers: Sequence[Truth],
    without_routes: Sequence[Truth],
    known: Known,
    progress: Progress | None,
    explains: bool,
) -> list[Position]:
    """For a mixture of experts in a format where near ties are everywhere, if routes are not reported: the share of
    engines with other routes counts, so all are emulated, once with the truth's routes and once with their own.
    """
    add_noises(model, form.name, of_answers, known, DRAWS, progress)
    distinct = list(dict.fromkeys(without_routes))
    add_noises(model, form.name, distinct, known, DRAWS, progress, own_routes=True)
    own = [known.loose[form.name, truth.spoken] for truth in distinct]
    least = rerouted_spread(own)
    loose = {truth: at_least(noise, least) for truth, noise in zip(distinct, own, strict=True)}
    scored = [Scored(truth, known.noises[form.name, truth.spoken], loose.get(truth)) for truth in of_answers]
    by_answer = [
        judged(*pair, of, form.bits, model.config.sparse_layers) for pair, of in zip(pairs, scored, strict=True)
    ]
    if explains:
        by_answer = explained(model, form.name, pairs, by_answer, scored, known, least)
    return [position for positions in by_answer for position in positions]


def worst_of(positions: Sequence[Position]) -> float:
    """The largest difference in an answer, in units of the noise: of a log-probability, a token or a route."""
    errors = [abs(position.error_ratio or 0.0) for position in positions]
    gaps = [position.gap_ratio for position in positions if position.is_new and position.token_id != position.best]
    routes = [position.route.ratio for position in positions if position.route is not None]
    return max((*errors, *gaps, *routes), default=0.0)
