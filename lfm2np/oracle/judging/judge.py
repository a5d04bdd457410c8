"""From what an engine said to judged positions: scores it in exact arithmetic, under the noise of its format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.judging.emulate import format_named
from lfm2np.oracle.judging.noise import DRAWS, Ids, Noise, Spoken, Truth, flip_chance, loosened, noise_of, spoken_truths
from lfm2np.oracle.judging.routes import OWN, RouteDifference, as_key, difference, margins, swapped
from lfm2np.oracle.judging.verdict import LIMIT, WRONG, Position, Verdict, position_verdict, tie_chance
from lfm2np.oracle.targets.records import Answer, Ask
from lfm2np.progress import Progress
from lfm2np.work.place import Place

FLOAT32_BITS = 24
MOST_REROUTED, MOST_CHANGES, MOST_TRIES = 16, 4, 8  # answers, routes of one, and near ties tried for each: see rerouted
FLOAT32_UNITS = 4  # mlx-lm, right in all else, is off by up to 3 where a token is all but certain
Pair = tuple[Ask, Answer]


@dataclass(frozen=True, eq=False)
class Scored:
    """One sequence under the oracle: the truth, and the noise of one format.

    In a mixture of experts the noise is of engines that take the truth's routes. `loose` is that of engines that choose
    their own: of an answer that tells none, in a format in which near ties are no exception. `margins` [T, L] are how
    far each route is from a tie, in units of its noise.
    """

    truth: Truth
    noise: Noise
    loose: Noise | None = None
    margins: NDArray[np.float64] | None = None


@dataclass(eq=False)
class Known:
    """What was computed before, so that another format, or another engine that says the same, costs little; and where
    the rest is computed."""

    truths: dict[Spoken, Truth] = field(default_factory=dict)
    noises: dict[tuple[str, Spoken], Noise] = field(default_factory=dict)
    loose: dict[tuple[str, Spoken], Noise] = field(default_factory=dict)  # of engines with routes of their own
    place: Place = field(default_factory=Place)


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
    untold = [one for one in every if layers and not one.spoken.routes and form.bits < FLOAT32_BITS]
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


def add_noises(
    model: LoadedModel,
    format_name: str,
    truths: Sequence[Truth],
    known: Known,
    draws: int,
    progress: Progress | None = None,
    own_routes: bool = False,
) -> None:
    """Those that are not known yet."""
    noises = known.loose if own_routes else known.noises
    new = [one for one in truths if (format_name, one.spoken) not in noises]
    made = noise_of(model, new, format_name, draws, place=known.place, progress=progress, own_routes=own_routes)
    for truth, own in zip(new, made, strict=True):
        noises[format_name, truth.spoken] = own


def scored_as(model: LoadedModel, truth: Truth, noise: Noise, loose: Noise | None = None) -> Scored:
    if truth.preferred is None or noise.squares is None or model.config.mixture is None:
        return Scored(truth, noise)
    count = model.config.mixture.num_experts_per_tok
    return Scored(truth, noise, loose, margins(truth.preferred, noise.squares, count))


def spoken(ask: Ask, answer: Answer) -> Spoken:
    ids = (*ask.prompt_token_ids, *(answer.token_ids or ()))
    return Spoken(ids, as_key(answer.routes, len(ids) - 1))


def truths_of(
    model: LoadedModel, pairs: Sequence[Pair], known: Known, progress: Progress | None = None
) -> dict[Spoken, Truth]:
    """By sequence; those that are the beginning of another share its truth, since the arithmetic is causal.

    Where routes are told, only the same sequence with the same routes shares it.
    """
    wanted: dict[Spoken, dict[int, set[int]]] = {}
    for ask, answer in pairs:
        rows = wanted.setdefault(spoken(ask, answer), {})
        for row, token_id in enumerate(spoken(ask, answer).token_ids[1:]):
            rows.setdefault(row, set()).add(token_id)
        for index, top in enumerate(answer.top_logprobs or ()):
            rows[len(ask.prompt_token_ids) - 1 + index].update(top)
    whole = {Spoken(ids): [Spoken(one) for one in of] for ids, of in whole_sequences(untold_of(wanted)).items()}
    whole |= {one: [one] for one in wanted if one.routes}
    missing: dict[Spoken, dict[int, list[int]]] = {}
    for one, of in whole.items():
        rows = {}
        for part in of:
            for row, tokens in wanted[part].items():
                rows.setdefault(row, set()).update(tokens)
        if one not in known.truths or not known.truths[one].covers(rows):
            missing[one] = {row: sorted(tokens) for row, tokens in rows.items()}
    for truth in spoken_truths(model, missing, known.place, progress):
        known.truths[truth.spoken] = truth
    for noises in (known.noises, known.loose):
        for key in [key for key in noises if key[1] in missing]:
            del noises[key]  # it is of other columns
    return {part: known.truths[one] for one, of in whole.items() for part in of}


def untold_of(wanted: Iterable[Spoken]) -> list[Ids]:
    return [one.token_ids for one in wanted if not one.routes]


def whole_sequences(sequences: Iterable[Ids]) -> dict[Ids, list[Ids]]:
    """Those that are no other's beginning, each with all that are its beginning, itself included."""
    whole: dict[Ids, list[Ids]] = {}
    for ids in sorted(sequences, reverse=True):  # a sequence comes right after those that begin with it
        last = next(reversed(whole), None)
        if last is not None and last[: len(ids)] == ids:
            whole[last].append(ids)
        else:
            whole[ids] = [ids]
    return whole


def judged(ask: Ask, answer: Answer, scored: Scored, bits: int, layers: Sequence[int] = ()) -> list[Position]:
    """The tokens of one answer, and those of its prompt if their log-probabilities or routes are told.

    `layers` are the numbers of the sparse ones.
    """
    start = len(ask.prompt_token_ids)
    told = None if answer.routes is None else np.asarray(answer.routes[: len(scored.truth.best)], np.int64)
    positions = []
    prompt = answer.prompt_logprobs or ([None] * (start - 1) if told is not None else [])
    for row, logprob in enumerate(prompt):
        one = judged_token(ask, row, ask.prompt_token_ids[row + 1], False, {}, logprob, scored, bits)
        positions.append(with_route(one, scored, told, layers))
    for index, token_id in enumerate(answer.token_ids or ()):
        logprob = None if answer.logprobs is None else answer.logprobs[index]
        tops = {} if answer.top_logprobs is None else answer.top_logprobs[index]
        one = judged_token(ask, start - 1 + index, token_id, True, tops, logprob, scored, bits)
        positions.append(with_route(one, scored, told, layers))
    return positions


def judged_token(
    ask: Ask,
    row: int,
    token_id: int,
    is_new: bool,
    tops: Mapping[int, float],
    logprob: float | None,
    scored: Scored,
    bits: int,
) -> Position:
    """As if its routes were the oracle's; if it is wrong then, and they need not be, under other routes' noise."""
    values = {**tops, **({} if logprob is None else {token_id: logprob})}
    strict = position(ask, row, token_id, is_new, values, logprob, scored.truth, scored.noise, bits)
    if scored.loose is None:
        return strict
    columns = [scored.truth.at(row, one) for one in {**values, token_id: 0.0}]
    chance = share_beyond(scored, row, columns, bits)
    loose = position(ask, row, token_id, is_new, values, logprob, scored.truth, scored.loose, bits)
    if strict.verdict not in WRONG:
        return replace(strict, error_size=loose.error_size, route_chance=chance)
    if loose.verdict in WRONG:
        return replace(loose, route_chance=chance)
    return replace(loose, verdict=Verdict.ROUTE, is_rerouted=True, route_chance=chance)


def position(
    ask: Ask,
    row: int,
    token_id: int,
    is_new: bool,
    values: Mapping[int, float],
    logprob: float | None,
    truth: Truth,
    noise: Noise,
    bits: int,
) -> Position:
    """One token under one noise. `values` are the log-probabilities told there, `logprob` its own."""
    unit = resolution(float(truth.largest[row]), bits)
    own, best = truth.at(row, token_id), truth.at(row, int(truth.best[row]))
    told = [(truth.at(row, one), value) for one, value in values.items()]
    raw = [value - float(truth.logprobs[row, column]) for column, value in told]
    scales = [noise.scale(truth, row, column) for column, _ in told]
    errors = without_normaliser(raw, scales, unit, truth.vocab_size)
    gap = float(truth.logprobs[row, best] - truth.logprobs[row, own])
    gap_ratio = max(0.0, gap - unit) / noise.gap_scale(row, own, best) if own != best else 0.0
    ratio = max((beyond(one, unit) / scale for one, scale in zip(errors, scales, strict=True)), key=abs, default=None)
    sizes = [abs(error) / math.hypot(scale, unit / 2.0) for error, scale in zip(raw, scales, strict=True)]
    return Position(
        ask=ask,
        row=row,
        is_new=is_new,
        token_id=token_id,
        best=int(truth.best[row]),
        gap=gap,
        gap_ratio=gap_ratio,
        margin_ratio=margin_ratio(truth, noise, row, best, unit),
        error=None if logprob is None else logprob - float(truth.logprobs[row, own]),
        error_ratio=ratio,
        error_size=max(sizes, default=None),
        verdict=position_verdict(is_new, token_id, int(truth.best[row]), gap_ratio, ratio),
        flip_chance=flip_chance(truth, noise, row, best, unit) if is_new else None,
    )


def share_beyond(scored: Scored, row: int, columns: Sequence[int], bits: int) -> float:
    """Of the engines with routes of their own, those that one of these columns would show to have others."""
    assert scored.loose is not None
    unit = resolution(float(scored.truth.largest[row]), bits)
    limits = [unit + LIMIT * scored.noise.scale(scored.truth, row, column) for column in columns]
    return float(np.mean(np.any(np.abs(scored.loose.errors[:, row, columns]) > limits, axis=1)))


def smoothed(positions: Sequence[Position], draws: int) -> list[Position]:
    """Few engines were drawn: each chance as if one more engine had had that of all positions together."""
    rate = math.fsum(one.route_chance for one in positions) / max(1, len(positions))
    return [replace(one, route_chance=(draws * one.route_chance + rate) / (draws + 1)) for one in positions]


def with_route(one: Position, scored: Scored, told: NDArray[np.int64] | None, layers: Sequence[int]) -> Position:
    """The position with what its routes [L, K] tell, where they are told, and the chance that they are others."""
    if scored.margins is None or scored.loose is not None:
        return one
    chance = 1.0 - math.prod(1.0 - tie_chance(margin) for margin in scored.margins[one.row])
    if told is None:
        return replace(one, route_chance=chance)
    assert scored.truth.preferred is not None and scored.noise.squares is not None
    known = [index for index in range(len(layers)) if told[one.row, index, 0] != OWN]
    route = difference(
        scored.truth.preferred[one.row][known],
        told[one.row][known],
        scored.noise.squares[one.row][known],
        [layers[index] for index in known],
    )
    verdict = position_verdict(one.is_new, one.token_id, one.best, one.gap_ratio, one.error_ratio, bool(known), route)
    return replace(one, route=route, is_rerouted=route is not None, route_chance=chance, verdict=verdict)


def is_wrong(positions: Sequence[Position]) -> bool:
    return any(one.verdict in WRONG for one in positions)


def rerouted(
    model: LoadedModel,
    format_name: str,
    pair: Pair,
    scored: Scored,
    positions: list[Position],
    known: Known,
    draws: int,
) -> list[Position]:
    """An answer that errs, if what it says is explained by one near-tied route changed, or by a few one after another.

    A change is of one token at one layer: its last expert for the first that was not chosen. It explains an error if
    the exact network with it, all that later tokens inherit included, says what the engine says up to there and
    beyond. At most MOST_CHANGES, of MOST_TRIES near ties each; otherwise the positions are as they were.
    """
    ask, answer = pair
    layers, bits = model.config.sparse_layers, format_named(format_name).bits
    found, changes = positions, dict[int, RouteDifference]()
    for _ in range(MOST_CHANGES):
        first = min(one.row for one in found if one.verdict in WRONG)
        for row, index in near_ties(scored, first, max(changes, default=0))[:MOST_TRIES]:
            route, key = change(scored, row, index, layers[index])
            truth = spoken_truth(model, Spoken(scored.truth.token_ids, key), pair, known)
            (noise,) = noise_of(model, [truth], format_name, draws, place=known.place)
            other = scored_as(model, truth, noise)
            again = judged(ask, answer, other, bits, layers)
            if first < min((one.row for one in again if one.verdict in WRONG), default=len(truth.best)):
                scored, found = other, again
                changes[first] = route
                break
        else:
            return positions
        if not is_wrong(found):
            return [
                replace(one, route=changes[one.row], is_rerouted=True, verdict=Verdict.ROUTE)
                if one.row in changes
                else one
                for one in found
            ]
    return positions


def near_ties(scored: Scored, last: int, first: int = 0) -> list[tuple[int, int]]:
    """Rows and sparse layers whose route a right engine may have taken otherwise, the nearest tie first."""
    assert scored.margins is not None
    window = scored.margins[first : last + 1]
    near = np.argwhere(window <= LIMIT)
    return [(first + int(row), int(layer)) for row, layer in near[np.argsort(window[tuple(near.T)], kind="stable")]]


def change(scored: Scored, row: int, index: int, layer: int) -> tuple[RouteDifference, bytes]:
    """That one route changed, and all routes to be told: those before it as they were, those behind it chosen anew."""
    truth, near = scored.truth, scored.margins
    assert truth.routes is not None and truth.preferred is not None and near is not None
    own, scores = truth.routes[row, index], truth.preferred[row, index]
    routes = np.full_like(truth.routes, OWN)
    routes[:row] = truth.routes[:row]
    routes[row, :index] = truth.routes[row, :index]
    routes[row, index] = swapped(scores, own)
    (left,), (taken,) = np.setdiff1d(own, routes[row, index]), np.setdiff1d(routes[row, index], own)
    difference = RouteDifference(layer, int(taken), int(left), float(near[row, index]))
    return difference, as_key(routes, len(routes))


def spoken_truth(model: LoadedModel, one: Spoken, pair: Pair, known: Known) -> Truth:
    ask, answer = pair
    start = len(ask.prompt_token_ids) - 1
    wanted = {row: {token} for row, token in enumerate(one.token_ids[1:])}
    for index, top in enumerate(answer.top_logprobs or ()):
        wanted[start + index].update(top)
    rows = {row: sorted(tokens) for row, tokens in wanted.items()}
    return spoken_truths(model, {one: rows}, known.place)[0]


def resolution(largest: float, bits: int) -> float:
    """What rounding the logits themselves may do: one unit in the last place of the largest in the format, and a few of
    float32, in which log-probabilities are computed: they are the difference of a logit and a sum of exponentials."""
    exponent = math.frexp(largest)[1]
    return math.ldexp(1.0, exponent - bits) + FLOAT32_UNITS * math.ldexp(1.0, exponent - 24)


def without_normaliser(
    errors: Sequence[float], scales: Sequence[float], unit: float, vocab_size: int
) -> Sequence[float]:
    """The errors of one position without what a sum of exponentials in float32 may add to all of them.

    Added one after another, terms below 2**-25 of the sum are lost, at most vocab_size of them: log-probabilities of
    llama.cpp and mlx-lm are off by as much, all of a position by the same. So with several told one shift can't hide
    the others; of all shifts that large the one that leaves the least is taken off.
    """
    if not errors:
        return errors
    most = most_shift(vocab_size)

    def left(shift: float) -> float:
        return max(abs(beyond(one - shift, unit)) / scale for one, scale in zip(errors, scales, strict=True))

    shift = min((0.0, *(min(most, max(-most, one)) for one in errors)), key=left)
    return [one - shift for one in errors]


def most_shift(vocab_size: int) -> float:
    """Nats: see without_normaliser."""
    return math.ldexp(vocab_size, -25)


def beyond(error: float, unit: float) -> float:
    """What is left of an error, with its sign, behind one unit of the logits."""
    return math.copysign(max(0.0, abs(error) - unit), error)


def margin_ratio(truth: Truth, noise: Noise, row: int, best: int, unit: float) -> float:
    """How far the runner-up of the greedy token is behind, in units of the noise."""
    logprobs = truth.logprobs[row].copy()
    logprobs[best] = -np.inf
    runner_up = int(np.argmax(logprobs))
    gap = float(truth.logprobs[row, best] - logprobs[runner_up])
    return max(0.0, gap - unit) / noise.gap_scale(row, best, runner_up)
