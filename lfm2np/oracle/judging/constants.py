"""Constants that are slightly wrong: an error too small to see at any position, but with the same sign at each.

The rounding of a format is as large, but differs from position to position and engine to engine. A constant moves each
token's log-probability in a direction that the network determines, computed by changing the constant a little. How much
of a direction is in an engine's errors is their projection on it, weighted by the format's noise; how much of it right
engines have by accident, emulated engines show (noise.py): as at a single position, LIMIT times as much is the most
that the format explains. Over some thousand positions that shows an error of a tenth of the noise.

Source: the matched filter (North 1943): for a known signal in noise, no other linear measure sees less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics, numerics_named
from lfm2np.checkpoint.files import read_tensors
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.oracle.judging.allowed import most_shift
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import noise_item, noise_of, said_by
from lfm2np.oracle.judging.scored import Evidence, spoken, truths_of, usable
from lfm2np.oracle.judging.truth import Truth
from lfm2np.oracle.judging.verdict import LIMIT, Position, size_of
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import parameter_count
from lfm2np.truth.weights import AttentionWeights, LayerWeights, ModelWeights
from lfm2np.values import Progress

Float64 = NDArray[np.float64]
STEP = 2.0**-6  # of itself, by which a constant is changed,
STEP_OF_EPS = 1.0  # and norm_eps, of which less does nothing that float32 shows
CAP = 128.0  # of logits, whose effect a soft cap's is measured by
RIGHT = tuple(range(8, 32))  # emulated engines that show what is an accident
CONSTANTS_END = 2.0**-18  # a share that no constant need be closer to
ALIKE = 3.0  # how much larger the errors of right engines may be along a direction, as they are not independent
LEAST = 256  # positions with a log-probability
PART = 0.2  # of the tokens, that are tried first
MOST_PRODUCTS = 10**12  # of a search that was not requested: a minute
PATIENCE = 10  # times as many, where the engine is wrong anyway
MOST_OFF = 0.5  # of itself, by which a constant may be off to be the cause
HALF = 0.5  # of the errors' squares, from which a constant of a wrong engine is measured again,
TIMES = 3  # so often
SOFT_CAP, EPS = "a soft cap of logits", "norm_eps"
Change = Callable[[ModelWeights, ModelConfig], tuple[ModelWeights, ModelConfig]]


@dataclass(frozen=True)
class Direction:
    """One constant; `change` makes it larger by `step` of itself."""

    name: str
    change: Change
    step: float
    arithmetic: Callable[[Any], Any] | None = None  # what is changed in it, if anything is


@dataclass(frozen=True)
class Constant:
    """How much of a direction is in the errors.

    share      the constant is larger by so much of itself; of a soft cap, (CAP / cap)**2
    sure       times what is seen by accident
    explained  share of the errors' squares that this explains
    left       share of the error, beyond the noise, that it leaves at most positions that are off by more than the
               format explains (else of all): of medians, since in a mixture of experts some tokens are off by more, as
               they go elsewhere
    """

    name: str
    share: float
    sure: float
    explained: float
    left: float = math.inf

    @property
    def is_plausible(self) -> bool:
        """None is below 0, and a large change of any but eps is no slip of a constant."""
        if self.name == SOFT_CAP:
            return self.share > 0.0
        return self.share > -1.0 and (self.name == EPS or abs(self.share) <= MOST_OFF)

    @property
    def words(self) -> str:
        if self.name == SOFT_CAP:
            return f"there is a soft cap of logits at about {cap_of(self.share):.3g}"
        if self.share >= 1.0:
            return f"{self.name} is about {1.0 + self.share:.2g} times as large"
        way = "larger" if self.share > 0.0 else "smaller"
        return f"{self.name} is {way} by about {100.0 * abs(self.share):.2g} %"


@dataclass(frozen=True)
class ConstantSearch:
    """`found`: constants that show, the best explanation first; `least`: shares from which each would show."""

    found: tuple[Constant, ...]
    least: Mapping[str, float]

    @property
    def would_show(self) -> str:
        """By how much each constant would have to be off to show, in words."""
        return ", ".join(f"{name} {amount(name, share)}" for name, share in self.least.items())


def cap_of(share: float) -> float:
    return CAP / math.sqrt(share)


def amount(name: str, share: float) -> str:
    if name == SOFT_CAP:
        return f"at {cap_of(share):.3g}"
    return f"by {100.0 * share:.2g} %" if share < 1.0 else f"by {share:.2g} times"


def directions(config: ModelConfig, share: float | None = None) -> Iterator[Direction]:
    """Constants of the whole network, changed by a step, or by `share` of themselves."""
    step, of_eps, of_cap = (STEP, STEP_OF_EPS, 1.0) if share is None else (share, share, share)
    yield Direction(EPS, of_config(norm_eps=config.norm_eps * (1.0 + of_eps)), of_eps)
    yield Direction("rope_theta", of_config(rope_theta=config.rope_theta * (1.0 + step)), step)
    yield Direction("the scale of attention", with_scaled_queries(1.0 + step), step)
    if config.mixture is not None and config.sparse_layers:
        scale = config.mixture.routed_scaling_factor * (1.0 + step)
        yield Direction(
            "the scale of routing", of_config(mixture=replace(config.mixture, routed_scaling_factor=scale)), step
        )
    yield Direction(SOFT_CAP, of_config(), of_cap, partial(SoftCapped, cap=cap_of(abs(of_cap))))


def of_config(**fields: Any) -> Change:
    return lambda weights, config: (weights, replace(config, **fields))


def with_scaled_queries(factor: float) -> Change:
    def scaled(layer: LayerWeights) -> LayerWeights:
        if not isinstance(layer.operator, AttentionWeights):
            return layer
        return replace(layer, operator=replace(layer.operator, q_norm=layer.operator.q_norm * np.float32(factor)))

    return lambda weights, config: (replace(weights, layers=tuple(map(scaled, weights.layers))), config)


class SoftCapped:
    """An arithmetic in which logits [T, V] are cap * tanh(logits / cap) before anything is computed of them."""

    def __init__(self, numerics: Numerics, cap: float = CAP) -> None:
        self._numerics, self._cap = numerics, np.float32(cap)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._numerics, name)

    def log_softmax(self, logits: Any) -> Float64:
        return self._numerics.log_softmax(self._cap * np.tanh(logits / self._cap))


# --- what an engine's errors hold of them


@dataclass(frozen=True, eq=False)
class Reported:
    """N log-probabilities reported of the tokens themselves, one truth's after another's."""

    truths: Sequence[Truth]
    at: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]  # of each truth: among its known rows, and its columns
    errors: Float64  # [N] nats
    scales: Float64  # [N] nats
    bits: int  # of the format

    def gathered(self, by_truth: Iterable[NDArray[Any]]) -> Float64:
        """[N] of each truth's values [R, J] at its known rows."""
        return np.concatenate([values[at] for values, at in zip(by_truth, self.at, strict=True)])


def reported_logprobs(evidence: Evidence) -> Reported | None:
    """None if fewer than LEAST were reported."""
    pairs = usable(evidence.pairs)  # without refuted answers
    truths = truths_of(evidence.model, pairs, evidence.known)
    of_request = {request.request_id: truths[spoken(request, answer)] for request, answer in pairs}
    by_truth: dict[Truth, list[Position]] = {}
    for position in evidence.positions:
        if position.error is not None and position.scale > 0.0 and position.request.request_id in of_request:
            by_truth.setdefault(of_request[position.request.request_id], []).append(position)
    reported = [position for of in by_truth.values() for position in of]
    if len(reported) < LEAST:
        return None
    at = [
        (
            np.searchsorted(truth.known_rows, [each.row for each in of]),
            np.array([truth.at(each.row, each.token_id) for each in of]),
        )
        for truth, of in by_truth.items()
    ]
    errors, scales = np.array([(each.error, each.scale) for each in reported], np.float64).T
    return Reported(list(by_truth), at, errors, scales, format_named(evidence.format_name).bits)


def effects(model: LoadedModel, reported: Reported, progress: Progress | None) -> dict[str, Float64]:
    """By direction: its effect on each log-probability [N], relative to a change of the constant by itself.

    `progress(done, total)` counts directions.
    """
    changes = list(directions(model.config))
    effects_by_name = {}
    for done, (name, effect) in enumerate(effects_of(model, reported, changes)):
        effects_by_name[name] = effect
        if progress:
            progress(done + 1, len(changes))
    return effects_by_name


def effects_of(model: LoadedModel, reported: Reported, changes: Iterable[Direction]) -> Iterator[tuple[str, Float64]]:
    """In float32, whose noise is far smaller."""
    numerics = numerics_named("float32")
    weights = prepare_weights(read_tensors(model.path, model.config), model.config, numerics)
    items = [noise_item(truth) for truth in reported.truths]

    def logprobs(weights: ModelWeights, config: ModelConfig, numerics: Any) -> Float64:
        said = said_by(replace(model, config=config), weights, numerics, items)
        return reported.gathered(each["logprobs"] for each in said)

    base = logprobs(weights, model.config, numerics)
    for direction in changes:
        other = numerics if direction.arithmetic is None else direction.arithmetic(numerics)
        changed = logprobs(*direction.change(weights, model.config), other)
        yield direction.name, (changed - base) / direction.step


def search_constants(evidence: Evidence, is_wrong: bool, is_wanted: bool) -> ConstantSearch | None:
    """How much of each direction is in the errors judged under this format; None if that takes too long and was not
    requested (`is_wanted`), if nothing is off or too little is reported, or if the errors are those of other experts.

    A part of the answers decides whether all are needed: of an engine that is not wrong anyway (`is_wrong`) only if
    more of a direction than half the limit is in that part.
    """
    model = evidence.model
    lacks_routes = model.config.sparse_layers and any(a.token_ids and a.routes is None for _, a in evidence.pairs)
    if size_of(evidence.positions) == 0.0 or (lacks_routes and not format_named(evidence.format_name).is_fine):
        return None
    passes = sum(1 for _ in directions(model.config)) + 1
    products = passes * parameter_count(model.config, active=True) * len(evidence.positions)
    if not is_wanted and products > MOST_PRODUCTS * (PATIENCE if is_wrong else 1):
        return None
    reported = reported_logprobs(evidence)
    if reported is None:
        return None
    projections: list[Projection] = []
    for part in dict.fromkeys([reported] if is_wrong else [densest(reported), reported]):
        effects_by_name = effects(model, part, evidence.progress)
        projections = [Projection(name, effect, part) for name, effect in effects_by_name.items() if effect.any()]
        if not any(projection.size > LIMIT / 2.0 for projection in projections):
            break
    least = {each.name: LIMIT * ALIKE / each.power + each.allowance for each in projections}
    suspects = [projection for projection in projections if projection.size > LIMIT]
    found = shown(evidence, suspects) if suspects else []
    if is_wrong:
        found = [measured(model, constant, reported) if constant.explained >= HALF else constant for constant in found]
    return ConstantSearch(tuple(sorted(found, key=lambda constant: -constant.explained)), least)


def measured(model: LoadedModel, constant: Constant, reported: Reported) -> Constant:
    """By its effect where it is off by as much as it seems: errors are not linear in it, and what is no error of this
    constant but by accident looks like it does not grow like it."""
    for _ in range(TIMES):
        if not constant.is_plausible:
            break
        changed = [each for each in directions(model.config, constant.share) if each.name == constant.name]
        ((name, effect),) = effects_of(model, reported, changed)
        projection = Projection(name, effect, reported)
        constant = replace(projection.explained(projection.share(reported.errors)), sure=constant.sure)
    return constant


def densest(reported: Reported) -> Reported:
    """Of some sequences: those with the most log-probabilities a token, with PART of the tokens or a little more, and
    LEAST log-probabilities.

    A pass costs as much as its tokens, and shows by the square root of its log-probabilities: a fifth of a check's
    tokens, from prompts whose log-probabilities are reported, has 0.55 to 0.85 of the power of all.
    """
    counts = np.array([len(rows) for rows, _ in reported.at])
    tokens = np.array([len(truth.token_ids) for truth in reported.truths])
    order = np.argsort(-counts / tokens, kind="stable")
    enough = (np.cumsum(tokens[order]) > PART * tokens.sum()) & (np.cumsum(counts[order]) >= LEAST)
    chosen = np.sort(order[: np.argmax(enough) + 1])  # the last sum is always enough
    values = np.isin(np.repeat(np.arange(len(counts)), counts), chosen)
    if values.all():
        return reported
    truths, at = ([of[index] for index in chosen] for of in (reported.truths, reported.at))
    return replace(reported, truths=truths, at=at, errors=reported.errors[values], scales=reported.scales[values])


@dataclass(frozen=True, eq=False)
class Projection:
    """The errors along a direction; its effect [N] as of `effects`, not all 0."""

    name: str
    effect: Float64
    reported: Reported

    @cached_property
    def weighted(self) -> Float64:
        return self.effect / self.reported.scales**2

    @cached_property
    def power(self) -> float:
        """One over the share that errors of the noise's size, independent of each other, have by accident."""
        return math.sqrt(float(self.weighted @ self.effect))

    def share(self, errors: Float64) -> float:
        """How much of the direction is in errors [N]."""
        return float(self.weighted @ errors) / self.power**2

    @property
    def size(self) -> float:
        return abs(self.share(self.reported.errors)) * self.power

    @property
    def allowance(self) -> float:
        """The share that a right library may have: constants are float32, or of the format and rounded twice, and the
        sum of exponentials may be float32 (allowed.py).

        A soft cap is no constant that is rounded. Without the second the attention of vLLM 0.32.0 in bfloat16, right
        at each position, has a scale that seems smaller by 0.59 %.
        """
        shift = most_shift(self.reported.truths[0].vocab_size)
        rounding = CONSTANTS_END if self.name == SOFT_CAP else max(CONSTANTS_END, 2.0**-self.reported.bits)
        return rounding + shift * float(np.abs(self.weighted).sum()) / self.power**2

    def fitted(self, others: Sequence[Float64]) -> Constant:
        """Compared with how much is in the errors of right engines, [N] each."""
        shares = [self.share(errors) for errors in others]
        mean, share = math.fsum(shares) / len(shares), self.share(self.reported.errors)
        spread = max(float(np.std(shares, ddof=1)), 1.0 / self.power) * math.sqrt(1.0 + 1.0 / len(shares))
        beyond = max(0.0, abs(share - mean) - self.allowance)
        return replace(self.explained(share), share=share - mean, sure=beyond / spread)

    def explained(self, share: float) -> Constant:
        """By how much of the direction; how sure that is is not known."""
        errors = self.reported.errors / self.reported.scales
        left = errors - share * self.effect / self.reported.scales
        off = np.abs(errors) > LIMIT  # else a bug of few positions would leave nothing at most of them
        rest, all_ = (float(np.median(np.abs(some[off] if off.any() else some))) for some in (left, errors))
        of_median = max(0.0, rest - 1.0) / max(1.0, all_)
        return Constant(self.name, share, 0.0, 1.0 - float(left @ left) / float(errors @ errors), of_median)


def shown(evidence: Evidence, suspects: Sequence[Projection]) -> list[Constant]:
    """Those that right engines hardly ever have by accident."""
    reported = suspects[0].reported
    noises = noise_of(evidence.model, reported.truths, evidence.format_name, RIGHT, place=evidence.known.place)
    others = [
        reported.gathered(of.errors[index, truth.stored] for of, truth in zip(noises, reported.truths, strict=True))
        for index in range(len(RIGHT))
    ]
    return [constant for suspect in suspects if (constant := suspect.fitted(others)).sure > LIMIT]
