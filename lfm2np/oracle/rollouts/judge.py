"""Rollouts judged: both sides against the exact log-probabilities, their difference in three parts, and its causes.

With t and s what trainer and sampler report of a token, and m what each means to report, exact:

    t - s = (t - m_trainer) - (s - m_sampler) + (m_trainer - m_sampler)

the trainer's error, the sampler's error, and what they mean by it (temperature, filters, penalties: exact.READINGS).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import Place
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.judge import FAR
from lfm2np.oracle.judging.noise import DRAWS, allowed_by
from lfm2np.oracle.judging.scored import Known, add_noises
from lfm2np.oracle.judging.verdict import LIMIT, Verdict
from lfm2np.oracle.rollouts.exact import (
    AT,
    READINGS,
    SIDES,
    Scores,
    by_rollout,
    ids_of,
    is_unstated,
    joined,
    params_of,
    scores_of,
)
from lfm2np.oracle.rollouts.fits import Fit, fit, noises_of
from lfm2np.oracle.rollouts.hypotheses import (
    AS_IT_IS,
    CHUNKED,
    HEAD,
    Explanation,
    Hypothesis,
    always,
    explanations,
    hypotheses_of,
    longest_words,
    predictions_of,
    temperature_hypothesis,
)
from lfm2np.oracle.rollouts.rollout import Rollout
from lfm2np.oracle.rollouts.temperature import differs, fitted_temperature
from lfm2np.values import Progress

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
AUTO = "auto"
AUTO_FORMATS = ("float32", "float16", "bfloat16")  # the finest first
SCORING, JUDGING, EXPLAINING = "exact log-probabilities", "rounding errors", "hypotheses"
FITTING = 0.25  # of the tokens that hypotheses are tried on, for a temperature
LEAST_EXPLAINED = 0.8  # of the squared error, for a hypothesis to be named as the nearest
LEAST_OF_ALL = 20.0  # nats in all by which an error must beat the network without it where that explains all, too;
LEAST_OF_TOKENS = 0.5  # of each token for the head's precision, which rounds all of them
MOST_REFINED = 64  # rollouts whose scale is estimated from all emulated engines
LEAST_STALE = 0.5  # of the sequences from some step on that must be further off
Shown = Callable[[str], Progress | None]


def no_progress(name: str) -> Progress | None:
    return None


@dataclass(frozen=True)
class Options:
    """formats   of sampler and trainer: a name of formats.py, or auto
    readings     what each side reports: see exact.READINGS; auto: the likeliest, unless the file says it
    cause_tokens about how many tokens, prompts included, formats, readings and hypotheses are chosen by
    chunks       sizes of chunks to try beside powers of two
    """

    formats: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(SIDES, AUTO))
    readings: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(SIDES, AUTO))
    cause_tokens: int = 2000
    chunks: Sequence[int] = ()
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Side:
    """What is said of one side. `fit` is None where it reported nothing.

    expected   the reading that it should have reported
    explained  the hypotheses that were tried, the likeliest first; empty where nothing had to be explained
    cause      in words, if a hypothesis or a reading explains what is wrong
    choices    which of the N tokens the sampler can't have chosen: excluded by its filters, or not greedy
    """

    name: str
    verdict: Verdict
    reasons: tuple[str, ...]
    reported: Float64
    expected: str = "raw"
    fit: Fit | None = None
    explained: tuple[Explanation, ...] = ()
    cause: str | None = None
    choices: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def is_unexplained(self) -> bool:
        return self.verdict is Verdict.BUG and self.cause is None

    @property
    def reading(self) -> str:
        """That it reports."""
        return self.expected if self.fit is None else self.fit.reading


@dataclass(frozen=True, eq=False)
class Judged:
    """All rollouts. Arrays of N answer tokens, in the order of `scores`."""

    scores: Sequence[Scores]
    failed: Sequence[tuple[Rollout, str]]
    sides: Mapping[str, Side]
    exact: Mapping[str, Float64]  # m of each side

    @property
    def parts(self) -> dict[str, Float64]:
        """t - s and its three parts; NaN where one side reported nothing, or a value is infinite."""
        s, t = (self.sides[side].reported for side in SIDES)
        m_s, m_t = (self.exact[side] for side in SIDES)
        with np.errstate(invalid="ignore"):
            columns = {"difference": t - s, "trainer": t - m_t, "sampler": m_s - s, "meaning": m_t - m_s}
            bad = ~np.isfinite(sum(columns.values()))
        return {name: np.where(bad, np.nan, values) for name, values in columns.items()}

    def meaning_words(self) -> str:
        """How what the trainer reports differs from what the sampler reports."""
        return longest_words(self.scores, *(self.sides[name].reading for name in SIDES))


def judge_rollouts(
    model: LoadedModel,
    rollouts: Sequence[Rollout],
    options: Options,
    place: Place | None = None,
    shown: Shown = no_progress,
    previous: LoadedModel | None = None,
    beside: Sequence[Rollout] | None = None,
) -> Judged:
    """Each side judged, and explained where it is wrong.

    beside    all rollouts of the file, where `rollouts` are a sample of them: what stood beside each
    previous  the checkpoint of the step before
    """
    known = Known(place=place or Place())
    scores, failed = scores_of(model, rollouts, known.place, shown(SCORING))
    judge = Judge(model, scores, options, known, shown, previous, beside or rollouts)
    sides = judge.of_one_temperature({name: judge.side(name) for name in SIDES})
    exact = {name: joined(each.views[side.reading].logprobs for each in judge.scores) for name, side in sides.items()}
    return Judged(judge.scores, failed, sides, exact)


@dataclass(eq=False)
class Judge:
    """What judging a side needs; `known` keeps rounding errors that were computed."""

    model: LoadedModel
    scores: Sequence[Scores]
    options: Options
    known: Known
    shown: Shown
    previous: LoadedModel | None
    beside: Sequence[Rollout]

    def side(self, name: str) -> Side:
        reported = joined(each.reported(name) for each in self.scores)
        if np.isnan(reported).all():
            return Side(name, Verdict.INCONCLUSIVE, ("no log-probabilities were reported",), reported)
        is_auto = self.options.formats[name] == AUTO
        formats = AUTO_FORMATS if is_auto else (self.options.formats[name],)
        stated = self.stated_reading(name)
        readings = READINGS if stated == AUTO else (stated,)
        some = self.sample(known_rollouts(reported, self.scores))
        fits = [self.likeliest(some, reported, each, readings) for each in formats]
        if stated == AUTO and is_unstated(self.scores[0].rollout.sampling) and not any(each.is_right for each in fits):
            fitted = [f"tempered{AT}{temperature:g}" for _, temperature in self.temperatures(reported)]
            rollouts = [each.rollout for each in self.scores]
            self.scores, _ = scores_of(self.model, rollouts, self.known.place, None, [*self.scores[0].views, *fitted])
            fits = [self.likeliest(some, reported, each, (*readings, *fitted)) for each in formats]
        best = max(fits, key=lambda each: (each.is_right, each.log_likelihood))
        judged = self.of_all(reported, best.format_name, best.reading)
        choices = self.wrong_choices(best.format_name) if name == SIDES[0] else np.zeros(0, np.int64)
        side = self.decided(name, reported, best.reading if stated == AUTO else stated, judged, choices)
        if len(choices) and judged.is_right:
            return side  # nothing that a log-probability could explain
        if judged.is_right and (not is_auto or judged.format_name == AUTO_FORMATS[0]):
            return side
        return self.explained(side, stated == AUTO)

    def of_one_temperature(self, sides: dict[str, Side]) -> dict[str, Side]:
        """Where one was fitted that the file does not state: the finer side's for both, if it explains both."""
        for name, other in (SIDES, SIDES[::-1]):
            side, reading = sides[name], sides[other].reading
            if side.verdict is Verdict.EXACT and side.fit is not None and AT in reading and reading != side.reading:
                fit_of_all = self.of_all(side.reported, side.fit.format_name, reading)
                if fit_of_all.is_right:
                    return {**sides, name: self.decided(name, side.reported, reading, fit_of_all, side.choices)}
        return sides

    def stated_reading(self, name: str) -> str:
        """Of the options, else of the file if all its lines agree, else auto."""
        if self.options.readings[name] != AUTO:
            return self.options.readings[name]
        field_name = "logprobs_mode" if name == SIDES[0] else "trainer_logprobs_mode"
        modes = {getattr(each.rollout, field_name) for each in self.scores}
        return modes.pop() if len(modes) == 1 else AUTO

    def sample(self, first: Sequence[int], share: float = 1.0) -> list[int]:
        """Rollouts of about as many tokens as hypotheses are tried on, or a share of them: those of `first`, up to half
        of the tokens, then drawn ones.
        """
        count = self.options.cause_tokens * share
        drawn = np.random.default_rng(self.options.seed).permutation(len(self.scores)).tolist()
        chosen: list[int] = []
        tokens = 0
        for most, indices in ((count / 2.0, first), (count, drawn)):
            for index in indices:
                size = len(ids_of(self.scores[index].rollout))
                if index not in chosen and (tokens + size <= most or not chosen):
                    chosen.append(index)
                    tokens += size
        return sorted(chosen)

    def parts(self, values: Float64, indices: Sequence[int]) -> list[Float64]:
        """Of [N] those of some rollouts."""
        cut = by_rollout(values, self.scores)
        return [cut[index] for index in indices]

    # --- which format and reading

    def likeliest(
        self,
        indices: Sequence[int],
        reported: Float64,
        format_name: str,
        readings: Sequence[str],
        far: float = LIMIT * FAR,
    ) -> Fit:
        """Of these rollouts under one of the readings: by two emulated engines, by all where that leaves it in doubt.

        The scale by two is at most twice that by all (judging/judge.py). A rollout with errors beyond `far` counts as
        wrong.
        """
        scores, values = [self.scores[index] for index in indices], self.parts(reported, indices)

        def best() -> Fit:
            noises = noises_of(format_name, self.model, scores, self.known, self.shown(JUDGING))
            fits = [fit(values, scores, noises, reading) for reading in readings]
            return max(fits, key=lambda each: (each.is_right, -np.count_nonzero(each.wrong), each.log_likelihood))

        result = best()
        worst = largest(result.ratios, scores)
        doubtful = [index for index, size in enumerate(worst) if LIMIT / 2.0 < size <= far]
        if not doubtful:
            return result
        doubtful.sort(key=lambda index: -worst[index])
        truths = [scores[index].truth for index in doubtful[:MOST_REFINED]]
        add_noises(self.model, format_name, truths, self.known, DRAWS)
        return best()

    def of_all(self, reported: Float64, format_name: str, reading: str) -> Fit:
        return self.likeliest(range(len(self.scores)), reported, format_name, [reading], math.inf)

    def temperatures(self, reported: Float64) -> list[tuple[str, float]]:
        """By reading, the temperature that brings the exact values nearest to a side's, if the file states another."""
        some = self.sample(known_rollouts(reported, self.scores), FITTING)
        scores, values = [self.scores[index] for index in some], joined(self.parts(reported, some))

        def logprobs_at(name: str, temperatures: Sequence[float]) -> Float64:
            readings = [f"{name}{AT}{temperature!r}" for temperature in temperatures]
            plain = Hypothesis(AS_IT_IS, variants=always({}))
            (found,) = predictions_of(self.model, scores, [plain], readings, None, self.known.place)
            return np.array([joined(each.views[reading].logprobs for each in found or ()) for reading in readings])

        samplings = [each.rollout.sampling for each in scores]
        has_filters = any(params_of("processed", each) != params_of("tempered", each) for each in samplings)
        fitted = []
        for name in ("tempered", "processed") if has_filters else ("tempered",):
            temperature = fitted_temperature(values, partial(logprobs_at, name))
            if all(differs(temperature, each) for each in {1.0, *(each.temperature for each in samplings)}):
                fitted.append((name, temperature))
        return fitted

    # --- what is wrong

    def wrong_choices(self, format_name: str) -> Int64:
        """[N'] tokens that a right sampler of this format can't have chosen."""
        impossible = []
        for each in self.scores:
            is_greedy = each.rollout.sampling.temperature == 0.0
            excluded = np.isneginf(each.views["processed"].high[-1])
            wrong = self.not_greedy(each, format_name) if is_greedy else excluded
            impossible.append(wrong & np.array(each.rollout.is_sampled))
        return np.flatnonzero(joined(impossible))

    def not_greedy(self, scores: Scores, format_name: str) -> NDArray[np.bool_]:
        """[R] tokens further behind the greedy one than the format explains; only without penalties."""
        if params_of("processed", scores.rollout.sampling) != SamplingParams():
            return np.zeros(scores.size, np.bool_)
        noise = self.known.noises[format_name, scores.truth.spoken]
        allowed = allowed_by(scores.truth, noise, format_named(format_name).bits)
        rows = range(scores.truth.first + scores.rows.start, scores.truth.first + scores.rows.stop)
        leads = [allowed[row].leads[column] for row, column in zip(rows, scores.columns, strict=True)]
        return np.array(leads) > LIMIT

    def decided(self, name: str, reported: Float64, expected: str, judged: Fit, choices: Int64) -> Side:
        """Before anything is explained."""
        wrong, count = int(np.count_nonzero(judged.wrong)), int(np.count_nonzero(judged.reported))
        reasons = []
        if len(choices):
            reasons.append(f"{len(choices)} tokens that its sampling parameters exclude")
        if wrong:
            reasons.append(f"{wrong} of {count} log-probabilities are further off than {judged.format_name} explains")
        elif not judged.is_right:
            reasons.append(f"errors are {judged.rms:.3g} times what {judged.format_name} explains on the average")
        if reasons:
            return Side(name, Verdict.BUG, tuple(reasons), reported, expected, judged, choices=choices)
        why = [f"all {count} log-probabilities are within what {judged.format_name} explains"]
        if AT in judged.reading:
            why.append(longest_words(self.scores, "tempered", judged.reading))
        return Side(name, Verdict.EXACT, tuple(why), reported, expected, judged, choices=choices)

    def explained(self, side: Side, is_free: bool) -> Side:
        """With the hypotheses tried; `is_free`: whether any reading may be the side's. Of a side that is right in a
        coarse format only errors in the network that the format may hide, and not those of chunks, which are many.
        """
        assert side.fit is not None
        worst = largest(side.fit.sizes, self.scores)
        some = self.sample(sorted(range(len(worst)), key=lambda index: -worst[index]))
        readings = [*dict.fromkeys((side.expected, *READINGS))]
        hypotheses = hypotheses_of(self.model, self.beside, self.options.chunks, self.previous)
        if side.verdict is Verdict.EXACT:
            readings = [side.expected]
            hypotheses = [each for each in hypotheses if each.is_of_network and each.name != CHUNKED]
        hypotheses += [temperature_hypothesis(*each) for each in self.temperatures(side.reported)]
        explained = self.tried(side, some, hypotheses, readings)
        actual = explained[0].fit.reading
        if is_free and side.verdict is not Verdict.EXACT and actual in readings and actual != side.expected:
            side = replace(side, expected=actual, fit=self.of_all(side.reported, explained[0].fit.format_name, actual))
            explained = self.tried(side, some, hypotheses, readings)
        return self.with_cause(replace(side, explained=tuple(explained)))

    def tried(
        self, side: Side, indices: Sequence[int], hypotheses: Sequence[Hypothesis], readings: Sequence[str]
    ) -> list[Explanation]:
        """On these rollouts, in any of the formats, under these readings, the likeliest first."""
        assert side.fit is not None
        scores, values = [self.scores[index] for index in indices], self.parts(side.reported, indices)
        names = dict.fromkeys((side.fit.format_name, *AUTO_FORMATS))
        for name in names:
            self.likeliest(indices, side.reported, name, [side.expected])  # with as many engines as it takes
        formats = [noises_of(name, self.model, scores, self.known) for name in names]
        predictions = predictions_of(
            self.model, scores, hypotheses, readings, self.previous, self.known.place, self.shown(EXPLAINING)
        )
        return explanations(values, side.expected, scores, hypotheses, predictions, formats, readings)

    def with_cause(self, side: Side) -> Side:
        """With the verdict and reasons that its explanations lead to."""
        assert side.fit is not None
        best = side.explained[0]
        plain = next(each for each in side.explained if not each.is_error)
        gain = LEAST_OF_TOKENS * np.count_nonzero(best.fit.reported) if best.hypothesis.name == HEAD else LEAST_OF_ALL
        if side.verdict is Verdict.EXACT and best.fit.log_likelihood < plain.fit.log_likelihood + gain:
            best = plain
        reading = longest_words(self.scores, side.expected, best.fit.reading) if not best.hypothesis.readings else ""
        words = ", ".join(filter(None, [best.words, reading]))
        if best.is_error and best.is_adequate:
            hidden = f"hidden within {side.fit.format_name}: {best.fit.format_name} with this error is likelier"
            more = side.reasons if side.verdict is Verdict.BUG else (hidden,)
            return replace(side, verdict=Verdict.BUG, cause=words, reasons=(words, *more))
        if side.verdict is not Verdict.BUG:
            return side
        if not best.is_error and best.fit.is_right and reading:
            return replace(side, cause=words, reasons=(words, *side.reasons))
        if not best.is_error and best.fit.is_right and not len(side.choices):
            why = f"errs like {best.fit.format_name} everywhere, not like {side.fit.format_name}"
            return replace(side, verdict=Verdict.DRIFT, reasons=(why, *side.reasons))
        if stale := self.stale_words(side.fit):
            return replace(side, reasons=(stale, *side.reasons))
        nearest = f"; nearest: {words}, {best.explained:.0%} of the squared error"
        unexplained = "unexplained" + (nearest if words and best.explained >= LEAST_EXPLAINED else "")
        return replace(side, reasons=(unexplained, *side.reasons))

    def stale_words(self, of_all: Fit) -> str:
        """That all sequences up to some training step are right, and most of those after it further off than any of
        them; "" if it is not so.
        """
        cut = zip(self.scores, by_rollout(of_all.wrong, self.scores), largest(of_all.sizes, self.scores), strict=True)
        known = [(each.rollout.step, part.any(), size) for each, part, size in cut if each.rollout.step is not None]
        first_wrong = min((step for step, is_wrong, _ in known if is_wrong), default=None)
        if first_wrong is None or first_wrong == min(step for step, _, _ in known):
            return ""
        before = [size for step, _, size in known if step < first_wrong]
        after = [size for step, _, size in known if step >= first_wrong]
        further = sum(size > max(before) for size in after)
        if further < LEAST_STALE * len(after):
            return ""
        hint = "" if self.previous is not None else "; --previous DIR would tell by the weights of the step before"
        where = f"{further} of {len(after)} sequences from step {first_wrong} on are further off than any before"
        return f"stale weights: no format explains the errors, and {where}{hint}"


def known_rollouts(reported: Float64, scores: Sequence[Scores]) -> list[int]:
    return [index for index, part in enumerate(by_rollout(reported, scores)) if np.isfinite(part).any()]


def largest(values: Float64, scores: Sequence[Scores]) -> list[float]:
    """Of each rollout the largest size among the values [N]; 0 where all are NaN."""
    return [float(np.nanmax(np.abs(part), initial=0.0)) for part in by_rollout(values, scores)]
