"""Exact log-probabilities of an answer's tokens under every hypothesis, and what rounding a right provider may add.

A candidate whose cache is coarser than all else is computed by an emulated engine that rounds keys and values so, all
else in float32: what it rounds, any such engine rounds alike. Those numbers are not the same bits everywhere. Where all
else is as coarse, no two engines round the cache alike: then it is only a larger rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import Place, Work, compute
from lfm2np.errors import NumericsError, RequestError, TokenizerError
from lfm2np.oracle.judging.allowed import resolution
from lfm2np.oracle.judging.formats import KV, format_named
from lfm2np.oracle.judging.noise import FIRST, engine_of, noise_of
from lfm2np.oracle.judging.truth import Spoken, Truth, num_fed_tokens
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.judging.views import VIEWS, view_items, view_of
from lfm2np.oracle.vet.hypotheses import Candidate, Hypotheses
from lfm2np.oracle.vet.questions import Question
from lfm2np.oracle.vet.token_ids import LeftOut, Tokens
from lfm2np.values import Progress

Float64 = NDArray[np.float64]
ROUNDED_VIEWS = Work("views-rounded", view_items, num_fed_tokens, is_exact=False)
CACHE_DRAW = 1  # the emulated engine that stands for all with such a cache
DRAWS = FIRST  # emulated engines that give the rounding error of each token
WARMER = (0.5, 0.7, 0.85, 1.2, 1.4, 2.0)  # factors of the temperature: ways to sample that nobody claims
RAW = SamplingParams()
IMPLAUSIBLE = math.log(1e-3)  # of a token of a text, under every hypothesis
LEAST_SCALE = 1e-3  # nats: what servers round log-probabilities to, or lose when they sum in float32


@dataclass(frozen=True, eq=False)
class Likelihoods:
    """One answer of R tokens under H hypotheses, P pairs of a candidate and a rendering, W factors of the temperature.

    logprobs  [H, R] nats, -inf where filters exclude the token
    loose     [H, R] if filters keep all that they may keep by a rounding error
    upper     [H, R] the most that a right engine may give it: filters that keep or drop a token by a rounding error
    squares   [H, R] sum of p^2 before filters
    warmer    [H, W, R] logprobs at other temperatures
    raw       [P, R] before temperature and filters
    scales    [P, R] standard deviation of the rounding error of `raw`, None where nothing was reported
    reported  [R] NaN where nothing was reported
    certain   [R] whether the server named the token
    """

    token_ids: NDArray[np.int64]
    before: tuple[int, int]  # the prompt's last two tokens as sent
    logprobs: Float64
    loose: Float64
    upper: Float64
    squares: Float64
    warmer: Float64
    raw: Float64
    scales: Float64 | None
    reported: Float64
    certain: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.token_ids)


def network_of(candidate: Candidate) -> LoadedModel:
    """What computes a candidate: exact arithmetic, or an emulated engine with its cache."""
    if not candidate.has_coarse_cache:
        return candidate.model
    numerics, weights = engine_of(candidate.model, f"float32{KV}{candidate.kv}", 0, CACHE_DRAW)
    return replace(candidate.model, numerics=numerics, weights=weights)


class Scorer:
    """Computes answers under all hypotheses; places: where and with which record, by candidate."""

    def __init__(self, hypotheses: Hypotheses, places: Sequence[Place] | None = None) -> None:
        self.hypotheses = hypotheses
        self.networks = [network_of(candidate) for candidate in hypotheses.candidates]
        self._places = places or [Place() for _ in hypotheses.candidates]
        self.pairs = hypotheses.pairs

    def prompts(self, question: Question) -> list[list[int]]:
        """Ids of a question by pair, the claim's first. RequestError or TokenizerError where it can't be laid out."""
        known: dict[tuple[str | None, int], list[int]] = {}  # candidates with one template lay it out alike
        prompts = []
        for number, layout in self.pairs:
            tokenizer = self.hypotheses.candidates[number].model.tokenizer
            key = tokenizer.chat.template, layout
            if key not in known:
                known[key] = self.hypotheses.renderings[layout].ids(tokenizer, question)
            prompts.append(known[key])
        return prompts

    def score(
        self,
        answers: Sequence[tuple[Question, Tokens]],
        spreads: Sequence[float],
        progress: Progress | None = None,
    ) -> list[Likelihoods | str]:
        """Of each answer its likelihoods, or why there are none; spreads: tau of logits, by candidate."""
        results: dict[int, Likelihoods | str] = {}
        prompts: dict[int, list[list[int]]] = {}  # of usable answers
        for index, (question, tokens) in enumerate(answers):
            try:
                ids = self.prompts(question)
                self._require_room(ids, len(tokens))
                prompts[index] = ids
            except (RequestError, TokenizerError, LeftOut) as problem:
                results[index] = str(problem)
        by_pair = []
        for place, (number, _) in enumerate(self.pairs):

            def show(done: int, total: int, place: int = place) -> None:
                if progress:
                    progress(place * total + done, len(self.pairs) * total)

            sequences = [(ids[place], answers[index][1]) for index, ids in prompts.items()]
            by_pair.append(self._views(number, sequences, tolerance_of(spreads[number]), show))
        for (index, ids), *views in zip(prompts.items(), *by_pair, strict=True):
            failed: str | None = next((view["error"] for view in views if "error" in view), None)
            results[index] = failed or as_far_as_plausible(self._joined(answers[index][1], ids, views))
        return [results[index] for index in range(len(answers))]

    def views(self) -> list[dict[str, Any]]:
        """Raw, then each sampling, then each sampling at other temperatures."""
        warmer = [
            replace(sampling, temperature=sampling.temperature * factor)
            for sampling in self.hypotheses.samplings
            for factor in WARMER
        ]
        return [view_of(params) for params in (RAW, *self.hypotheses.samplings, *warmer)]

    def _require_room(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        for (number, _), ids in zip(self.pairs, prompts, strict=True):
            if len(ids) + count > self.hypotheses.candidates[number].model.config.max_position_embeddings:
                raise LeftOut("answers that the context does not hold")

    def _views(
        self,
        number: int,
        sequences: Sequence[tuple[Sequence[int], Tokens]],
        tolerance: float,
        progress: Progress,
    ) -> list[dict[str, Any]]:
        candidate, network = self.hypotheses.candidates[number], self.networks[number]
        items: list[dict[str, Any]] = [
            {
                "token_ids": [*prompt, *tokens.token_ids],
                "start": len(prompt),
                "views": self.views(),
                "tolerances": [tolerance],
                "columns": any(value is not None for value in tokens.logprobs),
            }
            for prompt, tokens in sequences
        ]
        work, place = (VIEWS, self._places[number]) if not candidate.has_coarse_cache else (ROUNDED_VIEWS, Place())
        results: list[dict[str, Any]] = compute(work, network, items, place, progress)
        wanted = [index for index, result in enumerate(results) if "truth" in result]
        truths = [
            Truth(
                spoken=Spoken(tuple(items[index]["token_ids"])),
                vocab_size=candidate.model.config.vocab_size,
                **results[index]["truth"],
            )
            for index in wanted
        ]
        try:
            scales = rounding_scales(candidate, truths, [items[index]["start"] for index in wanted])
        except NumericsError:  # the format can't hold the numbers: reported log-probabilities say nothing
            return results
        for index, scale in zip(wanted, scales, strict=True):
            results[index]["scales"] = scale
        return results

    def _joined(self, tokens: Tokens, prompts: Sequence[Sequence[int]], views: Sequence[dict[str, Any]]) -> Likelihoods:
        at = []  # of each hypothesis its pair's results, and where these have its sampling, and warmer ones
        for each in self.hypotheses.each:
            first = 1 + len(self.hypotheses.samplings) + each.sampling * len(WARMER)
            at.append((views[self.pairs.index(each.pair)], 1 + each.sampling, slice(first, first + len(WARMER))))
        reported = np.array([np.nan if value is None else value for value in tokens.logprobs])
        has_scales = all("scales" in view for view in views)
        return Likelihoods(
            np.array(tokens.token_ids, np.int64),
            (prompts[0][-2] if len(prompts[0]) > 1 else -1, prompts[0][-1]),
            np.stack([view["logprobs"][number] for view, number, _ in at]),
            np.stack([view["low"][number, 0] for view, number, _ in at]),
            np.stack([view["high"][number, 0] for view, number, _ in at]),
            np.stack([view["squares"][number] for view, number, _ in at]),
            np.stack([view["logprobs"][warmer] for view, _, warmer in at]),
            np.stack([view["logprobs"][0] for view in views]),
            np.stack([view["scales"] for view in views]) if has_scales else None,
            reported if has_scales else np.full(len(tokens), np.nan),
            np.full(len(tokens), tokens.are_certain),
        )


def as_far_as_plausible(answer: Likelihoods) -> Likelihoods | str:
    """Tokens of a text up to the first that no hypothesis finds plausible: there the model said other tokens.

    Such tokens are as rare under each hypothesis as under another, so no side gains by leaving them out.
    """
    implausible = np.flatnonzero(~answer.certain & (answer.logprobs.max(axis=0) < IMPLAUSIBLE))
    if not len(implausible):
        return answer
    if implausible[0] == 0:
        return "texts that no hypothesis gives with such tokens"
    rows = slice(0, int(implausible[0]))
    arrays: dict[str, Any] = {
        name: value[..., rows] for name, value in vars(answer).items() if isinstance(value, np.ndarray)
    }
    return replace(answer, **arrays)


def tolerance_of(spread: float) -> float:
    """Of logits, up to which filters may keep or drop a token; a power of two, as results are kept by it."""
    return float(2.0 ** math.ceil(math.log2(LIMIT * max(spread, 1e-6))))


def rounding_scales(candidate: Candidate, truths: Sequence[Truth], starts: Sequence[int]) -> list[Float64]:
    """[R] of each answer: the spread of its tokens' raw log-probabilities in the candidate's format, nats.

    Without its cache's where that is no coarser: candidates that differ in nothing but the size of errors, which a few
    emulated engines don't give to a few per cent, must not be told apart by it.
    """
    form = format_named(candidate.format_name if candidate.has_coarse_cache else candidate.base_format)
    scales = []
    noises = noise_of(candidate.model, truths, form.name, DRAWS)
    for truth, noise, start in zip(truths, noises, starts, strict=True):
        cells = cells_of(truth, start)
        unit = resolution(truth.largest[cells[0]], form.bits)
        rounding = unit / 2.0 * (1.0 - np.exp(truth.logprobs[cells]))
        scales.append(np.hypot(np.hypot(noise.scales(truth)[cells], rounding), LEAST_SCALE))
    return scales


def cells_of(truth: Truth, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of a truth's arrays that predict the tokens from `start` on."""
    rows = range(start - 1, len(truth.token_ids) - 1)
    columns = [truth.at(row, truth.token_ids[row + 1]) for row in rows]
    return np.array(rows) - truth.first, np.array(columns)
