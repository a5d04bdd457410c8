"""Constants that are slightly wrong: an error too small to see at any position, but with the same sign at each.

The rounding of a format is as large, but differs from position to position and engine to engine. A constant moves each
token's log-probability in a direction that the network determines, computed by changing the constant a little. How much
of a direction is in an engine's errors is their projection on it, weighted by the format's noise; how much of it right
engines have by accident, emulated engines show (noise.py). Over some thousand positions that shows an error of a tenth
of the noise.

Source: the matched filter (North 1943): for a known signal in noise, no other linear measure sees less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics, numerics_named
from lfm2np.checkpoint.files import read_tensors
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.oracle.judging.allowed import most_shift
from lfm2np.oracle.judging.noise import noise_item, noise_of, said_by
from lfm2np.oracle.judging.scored import Evidence, spoken, truths_of, usable
from lfm2np.oracle.judging.truth import Truth
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import parameter_count
from lfm2np.truth.weights import AttentionWeights, LayerWeights, ModelWeights, ShortConvWeights
from lfm2np.values import Progress

Float64 = NDArray[np.float64]
STEP = 2.0**-6  # of itself, by which a constant is changed,
STEP_OF_EPS = 1.0  # and norm_eps, of which less does nothing that float32 shows
RIGHT = tuple(range(8, 32))  # emulated engines that show what is an accident
SEEN = 8.0  # standard deviations of theirs: by Student's t of 23 degrees an accident of 4e-8
CONSTANTS_END = 2.0**-18  # a share that no constant need be closer to
ALIKE = 3.0  # how much larger the errors of right engines may be along a direction, as they are not independent
WORTH = 5.0  # standard deviations of independent noise, from which RIGHT engines are emulated
LEAST = 256  # positions with a log-probability
MOST_PRODUCTS = 10**12  # of a search that was not requested: a minute
Change = Callable[[ModelWeights, ModelConfig], tuple[ModelWeights, ModelConfig]]


@dataclass(frozen=True)
class Direction:
    """One constant; `change` makes it larger by `step` of itself."""

    name: str
    change: Change
    step: float = STEP
    arithmetic: Callable[[Any], Any] | None = None  # what is changed in it, if anything is


@dataclass(frozen=True)
class Constant:
    """How much of a direction is in the errors.

    share      the constant is larger by so much of itself
    sure       times what is seen by accident
    explained  share of the errors' squares that this explains
    """

    name: str
    share: float
    sure: float
    explained: float

    @property
    def words(self) -> str:
        if self.share >= 1.0:
            return f"{self.name} is about {1.0 + self.share:.2g} times as large"
        way = "larger" if self.share > 0.0 else "smaller"
        return f"{self.name} is {way} by about {100.0 * abs(self.share):.2g} %"


@dataclass(frozen=True)
class ConstantSearch:
    """`found`: constants that show, the best explanation first; `least`: relative errors from which each would show."""

    found: tuple[Constant, ...]
    least: Mapping[str, float]


def directions(config: ModelConfig, every: bool) -> Iterator[Direction]:
    """Constants of the whole network; with `every` also those of each layer."""
    yield Direction("norm_eps", of_config("norm_eps", STEP_OF_EPS), STEP_OF_EPS)
    yield Direction("norm_eps of queries and keys", lambda w, c: (w, c), STEP_OF_EPS, OtherEps)
    yield Direction("rope_theta", of_config("rope_theta", STEP))
    yield Direction("the scale of attention", in_layers(scaled_queries))
    yield Direction("the last norm's weight", lambda w, c: (replace(w, final_norm=larger(w.final_norm)), c))
    for index, kind in enumerate(config.layer_types if every else ()):
        yield Direction(f"layer {index}'s operator_norm", in_layers(scaled_norm("operator_norm"), index))
        yield Direction(f"layer {index}'s ffn_norm", in_layers(scaled_norm("ffn_norm"), index))
        for tap in range(config.conv_L_cache if kind == "conv" else 0):
            yield Direction(f"tap {tap} of layer {index}'s convolution", in_layers(scaled_tap(tap), index))


class OtherEps:
    """An arithmetic whose norms of heads [T, heads, E] have a larger eps."""

    def __init__(self, numerics: Numerics) -> None:
        self._numerics = numerics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._numerics, name)

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return self._numerics.rms_norm(x, weight, eps * (1.0 + STEP_OF_EPS) if x.ndim == 3 else eps)


def of_config(field: str, step: float) -> Change:
    return lambda weights, config: (weights, replace(config, **{field: getattr(config, field) * (1.0 + step)}))


def larger(values: Any) -> Any:
    return values * np.float32(1.0 + STEP)


def in_layers(change: Callable[[LayerWeights], LayerWeights], index: int | None = None) -> Change:

    def changed(weights: ModelWeights, config: ModelConfig) -> tuple[ModelWeights, ModelConfig]:
        layers = tuple(change(layer) if index in (None, at) else layer for at, layer in enumerate(weights.layers))
        return replace(weights, layers=layers), config

    return changed


def scaled_queries(layer: LayerWeights) -> LayerWeights:
    if not isinstance(layer.operator, AttentionWeights):
        return layer
    return replace(layer, operator=replace(layer.operator, q_norm=larger(layer.operator.q_norm)))


def scaled_norm(field: str) -> Callable[[LayerWeights], LayerWeights]:
    return lambda layer: replace(layer, **{field: larger(getattr(layer, field))})


def scaled_tap(tap: int) -> Callable[[LayerWeights], LayerWeights]:
    def changed(layer: LayerWeights) -> LayerWeights:
        assert isinstance(layer.operator, ShortConvWeights)
        taps = layer.operator.taps.copy()
        taps[:, tap] = larger(taps[:, tap])
        return replace(layer, operator=replace(layer.operator, taps=taps))

    return changed


# --- what an engine's errors hold of them


@dataclass(frozen=True, eq=False)
class Reported:
    """Log-probabilities reported of the tokens themselves: N places in truths, errors and noise."""

    truths: Sequence[Truth]
    at: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]  # of each truth: places, rows, columns
    errors: Float64  # [N] nats
    scales: Float64  # [N] nats

    def gathered(self, of: Callable[[int, NDArray[np.int64], NDArray[np.int64]], Any]) -> Float64:
        """[N] values of `of(index of a truth, rows, columns)`."""
        values = np.zeros(len(self.errors))
        for index, (places, rows, columns) in enumerate(self.at):
            values[places] = of(index, rows, columns)
        return values


def reported_logprobs(evidence: Evidence) -> Reported | None:
    """None if fewer than LEAST were reported."""
    pairs = usable(evidence.pairs)
    truths = truths_of(evidence.model, pairs, evidence.known)
    of_request = {
        request.request_id: truths[spoken(request, answer)] for request, answer in pairs
    }  # without refuted answers
    reported = [
        position
        for position in evidence.positions
        if position.error is not None and position.scale > 0.0 and position.request.request_id in of_request
    ]
    if len(reported) < LEAST:
        return None
    by_truth: dict[Truth, list[int]] = {}
    for index, position in enumerate(reported):
        by_truth.setdefault(of_request[position.request.request_id], []).append(index)
    at = []
    for truth, places in by_truth.items():
        rows = [reported[place].row for place in places]
        columns = [truth.at(row, reported[place].token_id) for row, place in zip(rows, places, strict=True)]
        at.append((np.array(places), np.array(rows), np.array(columns)))
    scales = np.array([position.scale for position in reported])
    return Reported(list(by_truth), at, np.array([position.error for position in reported], np.float64), scales)


def cost(model: LoadedModel, num_tokens: int, every: bool) -> int:
    passes = sum(1 for _ in directions(model.config, every)) + 1
    return passes * parameter_count(model.config, active=True) * num_tokens


def effects(model: LoadedModel, reported: Reported, every: bool, progress: Progress | None) -> dict[str, Float64]:
    """By direction: its effect on each log-probability [N], relative to a change of the constant by itself.

    In float32, whose noise is far smaller. `progress(done, total)` counts directions.
    """
    numerics = numerics_named("float32")
    weights = prepare_weights(read_tensors(model.path, model.config), model.config, numerics)
    items = [noise_item(truth) for truth in reported.truths]

    def logprobs(weights: ModelWeights, config: ModelConfig, numerics: Any) -> Float64:
        said = [result["logprobs"] for result in said_by(replace(model, config=config), weights, numerics, items)]

        def of(index: int, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Any:
            return said[index][np.searchsorted(reported.truths[index].known_rows, rows), columns]

        return reported.gathered(of)

    base = logprobs(weights, model.config, numerics)
    effects_by_name, changes = {}, list(directions(model.config, every))
    for done, direction in enumerate(changes):
        other = numerics if direction.arithmetic is None else direction.arithmetic(numerics)
        changed = logprobs(*direction.change(weights, model.config), other)
        effects_by_name[direction.name] = (changed - base) / direction.step
        if progress:
            progress(done + 1, len(changes))
    return effects_by_name


def search_constants(evidence: Evidence, every: bool) -> ConstantSearch | None:
    """How much of each direction is in the errors judged under this format; None if too few were reported."""
    reported = reported_logprobs(evidence)
    if reported is None:
        return None
    suspects, least = {}, {}
    for name, effect in effects(evidence.model, reported, every, evidence.progress).items():
        weighted = effect / reported.scales**2
        power = math.sqrt(float(weighted @ effect))
        if power > 0.0:
            least[name] = SEEN * ALIKE / power + allowance(effect, reported)
            if abs(float(weighted @ reported.errors)) > WORTH * power:
                suspects[name] = effect
    constants = shown(evidence, reported, suspects) if suspects else []
    return ConstantSearch(tuple(constants), least)


def shown(evidence: Evidence, reported: Reported, suspects: Mapping[str, Float64]) -> list[Constant]:
    """Those that right engines hardly ever have by accident."""
    noises = noise_of(evidence.model, reported.truths, evidence.format_name, RIGHT, place=evidence.known.place)

    def errors_of(number: int) -> Float64:
        return reported.gathered(
            lambda index, rows, columns: noises[index].errors[number, rows - reported.truths[index].first, columns]
        )

    others = [errors_of(number) for number in range(len(RIGHT))]
    constants = [fit_direction(name, effect, reported, others) for name, effect in suspects.items()]
    sure = [constant for constant in constants if constant.sure > SEEN]
    return sorted(sure, key=lambda constant: -constant.explained)


def allowance(effect: Float64, reported: Reported) -> float:
    """The share that a right library may have: constants are float32, and so may be the sum of exponentials
    (allowed.py).
    """
    weights = effect / reported.scales**2
    shift = most_shift(reported.truths[0].vocab_size)
    return CONSTANTS_END + shift * float(np.abs(weights).sum()) / float(weights @ effect)


def fit_direction(name: str, effect: Float64, reported: Reported, others: Sequence[Float64]) -> Constant:
    """How much of a direction is in the errors, compared with how much is in those of right engines."""
    weighted = effect / reported.scales**2
    power = float(weighted @ effect)
    shares = [float(weighted @ errors) / power for errors in others]
    mean = math.fsum(shares) / len(shares)
    spread = math.sqrt(math.fsum((share - mean) ** 2 for share in shares) / (len(shares) - 1))
    spread = max(spread, 1.0 / math.sqrt(power)) * math.sqrt(1.0 + 1.0 / len(shares))
    share = float(weighted @ reported.errors) / power
    beyond = max(0.0, abs(share - mean) - allowance(effect, reported))
    left = reported.errors - share * effect
    explained = 1.0 - float(np.sum((left / reported.scales) ** 2) / np.sum((reported.errors / reported.scales) ** 2))
    return Constant(name, share - mean, beyond / spread, explained)
