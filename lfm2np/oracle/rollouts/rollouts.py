"""Rollouts judged: both sides against the exact log-probabilities, their difference in three parts, and its causes.

With t and s what trainer and sampler report of a token, and m what each means to report, exact:

    t - s = (t - m_trainer) - (s - m_sampler) + (m_trainer - m_sampler)

the trainer's error, the sampler's error, and what they mean by it (temperature, filters, penalties: scores.READINGS).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.work.place import Place
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.judge import FAR
from lfm2np.oracle.judging.noise import DRAWS
from lfm2np.oracle.judging.position import margins
from lfm2np.oracle.judging.scored import Known, add_noises
from lfm2np.oracle.judging.verdict import LIMIT, Verdict
from lfm2np.oracle.rollouts.causes import (
    AS_IT_IS,
    CHUNKED,
    HEAD,
    LEAST_OF_ALL,
    LEAST_OF_TOKENS,
    Explanation,
    Hypothesis,
    explanations,
    hypotheses_of,
    predictions_of,
    reading_words,
)
from lfm2np.oracle.rollouts.reported_side import SIDES, Fit, fit, predicted, spread_of, values_of
from lfm2np.oracle.rollouts.rollout import Rollout
from lfm2np.oracle.rollouts.scores import ALL_READINGS, OTHERS, Scores, ids_of, scores_of
from lfm2np.oracle.total import MOST_SIZE
from lfm2np.values import Progress

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
AUTO = "auto"
AUTO_FORMATS = ("float32", "float16", "bfloat16")  # the finest first
SCORING, JUDGING, EXPLAINING = "exact log-probabilities", "rounding errors", "hypotheses"
SCREENING, MOST_TRIED = 4, 4  # all hypotheses on a quarter of the tokens, then so many on all
LEAST_EXPLAINED = 0.8  # of the squared error, for a hypothesis to be named as the nearest
PERMUTATIONS, LEAST_CHANCE = 999, 0.01
MOST_REFINED = 64  # rollouts whose scale is estimated from all emulated engines once one of them is wrong
Shown = Callable[[str], Progress | None]


def no_progress(name: str) -> Progress | None:
    return None


@dataclass(frozen=True)
class Options:
    """formats   of sampler and trainer: a name of formats.py, or auto
    readings     what each side reports: see scores.READINGS; auto: the likeliest, unless the file says it
    cause_tokens about how many tokens, prompts included, the hypotheses are tried on
    chunks       sizes of chunks to try beside powers of two
    clip         [low, high] of the importance ratio trainer / sampler
    """

    formats: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(SIDES, AUTO))
    readings: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(SIDES, AUTO))
    cause_tokens: int = 4000
    chunks: Sequence[int] = ()
    clip: tuple[float, float] = (0.8, 1.2)
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Side:
    """What is said of one side. `fit` is None where it reported nothing.

    expected   the reading that it should have reported
    explained  the hypotheses that were tried, the likeliest first; empty where nothing had to be explained
    cause      the first of them if it is adequate and not the network as computed under the expected reading
    sample     which of the N tokens they were tried on
    choices    which of them the sampler can't have chosen: excluded by its filters, or not greedy
    """

    name: str
    verdict: Verdict
    reasons: tuple[str, ...]
    reported: Float64
    expected: str = "raw"
    fit: Fit | None = None
    explained: tuple[Explanation, ...] = ()
    cause: Explanation | None = None
    sample: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    choices: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False)
class Judged:
    """All rollouts. Arrays of N answer tokens, in the order of `scores`."""

    scores: Sequence[Scores]
    failed: Sequence[tuple[Rollout, str]]
    sides: Mapping[str, Side]
    options: Options
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

    def clipped(self, name: str | None = None, is_mended: bool = False) -> dict[str, float]:
        """Shares of the ratio trainer / sampler below and above the bounds: of all tokens, or of those that a side's
        cause was tried on, as they are or with that cause removed.
        """
        s, t = (self.sides[side].reported for side in SIDES)
        if name is not None:
            side = self.sides[name]
            shifts = side.cause.shifts if side.cause is not None and is_mended else 0.0
            s, t = s[side.sample], t[side.sample]
            s, t = (s - shifts, t) if name == SIDES[0] else (s, t - shifts)
        with np.errstate(invalid="ignore", over="ignore"):
            ratios = np.exp(t - s)
        ratios = ratios[~np.isnan(ratios)]
        count = max(1, len(ratios))
        low, high = self.options.clip
        return {
            "below": float(np.count_nonzero(ratios < low)) / count,
            "above": float(np.count_nonzero(ratios > high)) / count,
        }

    def reading_of(self, side: Side) -> str:
        """What a side does instead of what it should report, by its cause; "" for nothing."""
        assert side.cause is not None
        return longest_words(self.scores, side.expected, side.cause.fit.reading)

    def meaning_words(self) -> str:
        """How what the trainer reports differs from what the sampler reports."""
        return longest_words(self.scores, *(meant(self.sides[name]) for name in SIDES))


def cut(values: Any, scores: Sequence[Scores]) -> list[Any]:
    """[N] into those of each rollout."""
    return np.split(values, np.cumsum([len(each.entropy) for each in scores])[:-1]) if scores else []


def largest_by_rollout(values: Float64, scores: Sequence[Scores]) -> list[float]:
    """The largest size among the values [N] of each; 0 where all are NaN."""
    return [float(np.nanmax(np.abs(part), initial=0.0)) for part in cut(values, scores)]


def longest_words(scores: Sequence[Scores], expected: str, actual: str) -> str:
    """Of all requests' sampling parameters the fullest answer."""
    return max((reading_words(expected, actual, each.rollout.sampling) for each in scores), key=len, default="")


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
    sides = {name: judge.side(name) for name in SIDES}
    exact = {name: predicted(scores, meant(side)).logprobs if scores else np.zeros(0) for name, side in sides.items()}
    return Judged(scores, failed, sides, options, exact)


def meant(side: Side) -> str:
    """The reading that a side reports."""
    return side.expected if side.fit is None else side.fit.reading


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
        reported = values_of(self.scores, name)
        if np.isnan(reported).all():
            return Side(name, Verdict.INCONCLUSIVE, ("no log-probabilities were reported",), reported)
        is_auto = self.options.formats[name] == AUTO
        formats = AUTO_FORMATS if is_auto else (self.options.formats[name],)
        stated = self.stated_reading(name)
        best, likeliest = self.likeliest(reported, formats, ALL_READINGS if stated == AUTO else (stated,))
        expected = best.reading if stated == AUTO else stated
        judged = self.judged(reported, best.format_name, best.reading)
        choices = self.wrong_choices(best.format_name) if name == SIDES[0] else np.zeros(0, np.int64)
        side = self.decided(name, reported, expected, judged, choices)
        if len(choices) and judged.is_right:
            return side  # nothing that a log-probability could explain
        fits_best = judged.is_right and best is likeliest
        if fits_best and (not is_auto or judged.format_name == AUTO_FORMATS[0]):
            return side
        return self.explained(side, fits_best, stated == AUTO)

    def stated_reading(self, name: str) -> str:
        """Of the options, else of the file if all its lines agree, else auto."""
        if self.options.readings[name] != AUTO:
            return self.options.readings[name]
        modes = {mode_of(each.rollout, name) for each in self.scores}
        return modes.pop() if len(modes) == 1 else AUTO

    def sample(self, most: int, first: Sequence[int] = ()) -> list[int]:
        """Rollouts of about so many tokens: those of `first`, up to half of the tokens, then drawn ones."""
        drawn = np.random.default_rng(self.options.seed).permutation(len(self.scores)).tolist()
        chosen: list[int] = []
        tokens = 0
        for most_tokens, indices in ((most // 2, first), (most, drawn)):
            for index in indices:
                size = len(ids_of(self.scores[index].rollout))
                if index not in chosen and (tokens + size <= most_tokens or not chosen):
                    chosen.append(index)
                    tokens += size
        return sorted(chosen)

    def part(self, values: Any, indices: Sequence[int]) -> Any:
        """Of [N] those of some rollouts."""
        ends = np.cumsum([0, *(len(each.entropy) for each in self.scores)])
        return np.concatenate([values[ends[index] : ends[index + 1]] for index in indices])

    def likeliest(self, reported: Float64, formats: Sequence[str], readings: Sequence[str]) -> tuple[Fit, Fit]:
        """On a sample, the format and reading that what was reported is most like: of those that explain all of it, if
        any do, and of all.
        """
        indices = self.sample(self.options.cause_tokens // SCREENING)
        part, values = [self.scores[index] for index in indices], self.part(reported, indices)
        if np.isnan(values).all():
            part, values = list(self.scores), reported
        fits = [self.best_reading(part, values, format_name, readings) for format_name in formats]
        likeliest = max(fits, key=lambda each: each.log_likelihood)
        return max(fits, key=lambda each: (each.is_right, each.log_likelihood)), likeliest

    def best_reading(self, scores: Sequence[Scores], values: Float64, format_name: str, readings: Sequence[str]) -> Fit:
        """That leaves the fewest tokens wrong; of several the likeliest. By one emulated engine, by all where that is
        in doubt.
        """
        best = self.least_wrong(scores, values, format_name, readings)
        worst = largest_by_rollout(best.ratios, scores)
        doubtful = [index for index, size in enumerate(worst) if size > LIMIT / math.sqrt(len(DRAWS))]
        if best.is_right or max(worst) > LIMIT * FAR:
            return best
        truths = [scores[index].truth for index in doubtful[:MOST_REFINED]]
        add_noises(self.model, format_name, truths, self.known, DRAWS)
        return self.least_wrong(scores, values, format_name, readings)

    def least_wrong(self, scores: Sequence[Scores], values: Float64, format_name: str, readings: Sequence[str]) -> Fit:
        spread = spread_of(self.model, scores, format_name, self.known)
        fits = [fit(values, predicted(scores, reading), spread, reading) for reading in readings]
        tight = [
            each for each in fits if each.reading not in OTHERS or each.rms <= MOST_SIZE
        ]  # temperatures fit freely
        return min(tight or fits, key=lambda each: (np.count_nonzero(each.wrong), -each.log_likelihood))

    def judged(self, reported: Float64, format_name: str, reading: str) -> Fit:
        """All tokens; rollouts in doubt by all emulated engines (see judge.py)."""
        values = predicted(self.scores, reading)
        spread = spread_of(self.model, self.scores, format_name, self.known, self.shown(JUDGING))
        result = fit(reported, values, spread, reading)
        worst = largest_by_rollout(result.ratios, self.scores)
        doubtful = [index for index, size in enumerate(worst) if size > LIMIT / math.sqrt(len(DRAWS))]
        doubtful.sort(key=lambda index: -worst[index])
        for chosen in (doubtful[:1], doubtful[1:MOST_REFINED], doubtful[MOST_REFINED:]):
            if not chosen or (chosen == doubtful[MOST_REFINED:] and result.wrong.any()):
                break
            truths = [self.scores[index].truth for index in chosen]
            add_noises(self.model, format_name, truths, self.known, DRAWS)
            spread = spread_of(self.model, self.scores, format_name, self.known)
            result = fit(reported, values, spread, reading)
        return result

    def wrong_choices(self, format_name: str) -> Int64:
        """[N'] tokens that a right sampler of this format can't have chosen."""
        chosen: list[int] = []
        first = 0
        for each in self.scores:
            sampled = np.array(each.rollout.is_sampled, np.bool_)
            if each.rollout.sampling.temperature == 0.0:
                impossible = self.not_greedy(each, format_name)
            else:
                impossible = np.isneginf(each.high[each.numbers["processed"], -1])
            chosen += (first + np.flatnonzero(sampled & impossible)).tolist()
            first += len(each.entropy)
        return np.array(chosen, np.int64)

    def not_greedy(self, scores: Scores, format_name: str) -> NDArray[np.bool_]:
        """[R] tokens further behind the greedy one than the format explains; only without penalties."""
        if scores.numbers["processed"] != scores.numbers["raw"]:
            return np.zeros(len(scores.entropy), np.bool_)
        noise = self.known.noises[format_name, scores.truth.spoken]
        allowed = margins(scores.truth, noise, format_named(format_name).bits)
        tokens = np.array(scores.rollout.token_ids, np.int64)
        columns = np.argmax(scores.truth.columns[scores.rows] == tokens[:, None], axis=1)
        ratios = np.take_along_axis(allowed.gap_ratios[scores.rows], columns[:, None], axis=1)[:, 0]
        return np.asarray(ratios > LIMIT)

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
        why += [f"{judged.reading}, which the file does not say"] if judged.reading in OTHERS else []
        return Side(name, Verdict.EXACT, tuple(why), reported, expected, judged, choices=choices)

    def explained(self, side: Side, quick: bool, is_free: bool) -> Side:
        """With the hypotheses tried.

        quick    not those of chunks, which are many
        is_free  whether any reading may be the side's
        """
        assert side.fit is not None
        worst = largest_by_rollout(side.fit.sizes, self.scores)
        order = sorted(range(len(worst)), key=lambda index: -worst[index])
        indices = self.sample(self.options.cause_tokens // (SCREENING if quick else 1), order)
        readings = [side.expected] if quick else list(dict.fromkeys((side.expected, *ALL_READINGS)))
        tried = hypotheses_of(self.model, self.beside, self.options.chunks, self.previous)
        tried = [each for each in tried if not quick or each.name != CHUNKED]
        few = self.sample(self.options.cause_tokens // SCREENING, order)
        if len(tried) > MOST_TRIED and len(few) < len(indices):
            likely = [each.hypothesis for each in self.tried(side, few, tried, readings)[:MOST_TRIED]]
            tried = [each for each in tried if each in likely or each.name == AS_IT_IS]
        explained = self.tried(side, indices, tried, readings)
        if is_free and side.verdict is not Verdict.EXACT and explained[0].fit.reading != side.expected:
            best = explained[0].fit
            fit_of_all = self.judged(side.reported, best.format_name, best.reading)
            side = replace(side, expected=best.reading, fit=fit_of_all)
            explained = self.tried(side, indices, tried, readings)
        side = self.in_its_format(side, indices)
        tokens = self.part(np.arange(len(side.reported)), indices)
        return self.with_cause(replace(side, explained=tuple(explained), sample=tokens))

    def in_its_format(self, side: Side, indices: Sequence[int]) -> Side:
        """A side that was wrong in the likeliest format, if it is right in another: on these rollouts, then on all."""
        if side.verdict is not Verdict.BUG or len(side.choices) or self.options.formats[side.name] != AUTO:
            return side
        assert side.fit is not None
        part, values = [self.scores[index] for index in indices], self.part(side.reported, indices)
        for name in AUTO_FORMATS:
            if name != side.fit.format_name and self.best_reading(part, values, name, [side.expected]).is_right:
                fit_of_all = self.judged(side.reported, name, side.expected)
                if fit_of_all.is_right:
                    return self.decided(side.name, side.reported, side.expected, fit_of_all, side.choices)
        return side

    def growth(self, side: Side) -> str:
        """That errors grow with the training step, if they do: the chance that an order of the rollouts drawn at random
        ranks them so by step (Spearman); "" if it is not small.
        """
        assert side.fit is not None
        known = [index for index, each in enumerate(self.scores) if each.rollout.step is not None]
        steps = np.array([self.scores[index].rollout.step for index in known], np.float64)
        if len(set(steps.tolist())) < 2:
            return ""
        parts = cut(np.minimum(side.fit.sizes, LIMIT**3), self.scores)
        sizes = np.array([np.nanmean(parts[index]) if np.isfinite(parts[index]).any() else 0.0 for index in known])
        ranks = [np.unique(values, return_inverse=True)[1].astype(np.float64) for values in (steps, sizes)]
        steps, sizes = (rank - rank.mean() for rank in ranks)
        rng = np.random.default_rng(self.options.seed)
        drawn = np.array([float(steps @ rng.permutation(sizes)) for _ in range(PERMUTATIONS)])
        chance = (1 + np.count_nonzero(drawn >= float(steps @ sizes))) / (1 + PERMUTATIONS)
        if chance > LEAST_CHANCE:
            return ""
        hint = "" if self.previous is not None else "; --previous DIR would tell by the weights of the step before"
        return f"stale weights: no format explains the errors, and they grow with the step (p = {chance:.2g}){hint}"

    def tried(
        self, side: Side, indices: Sequence[int], hypotheses: Sequence[Hypothesis], readings: Sequence[str]
    ) -> list[Explanation]:
        """On these rollouts, in any of the formats, under these readings, the likeliest first."""
        assert side.fit is not None
        part, values = [self.scores[index] for index in indices], self.part(side.reported, indices)
        names = dict.fromkeys((side.fit.format_name, *AUTO_FORMATS))
        for name in names:
            self.best_reading(part, values, name, [side.expected])  # with as many emulated engines as it takes
        spreads = [spread_of(self.model, part, name, self.known) for name in names]
        predictions = predictions_of(
            self.model, part, hypotheses, readings, self.previous, self.known.place, self.shown(EXPLAINING)
        )
        return explanations(values, side.expected, hypotheses, predictions, spreads, readings)

    def with_cause(self, side: Side) -> Side:
        """With the verdict and reasons that its explanations lead to."""
        assert side.fit is not None
        best = side.explained[0]
        plain = next(each for each in side.explained if each.hypothesis.name == AS_IT_IS)
        tokens = np.count_nonzero(best.fit.reported)
        gain = LEAST_OF_TOKENS * tokens if best.hypothesis.name == HEAD else LEAST_OF_ALL
        if side.verdict is Verdict.EXACT and best.fit.log_likelihood < plain.fit.log_likelihood + gain:
            best = plain
        is_error = best.hypothesis.name != AS_IT_IS
        reading = longest_words(self.scores, side.expected, best.fit.reading)
        if is_error and best.is_adequate:
            hidden = f"hidden within {side.fit.format_name}: {best.fit.format_name} with this error is likelier"
            more = side.reasons if side.verdict is Verdict.BUG else (hidden,)
            return replace(side, verdict=Verdict.BUG, cause=best, reasons=(cause_words(best, reading), *more))
        if side.verdict is not Verdict.BUG:
            return side
        if not is_error and best.fit.is_right and reading:
            return replace(side, cause=best, reasons=(reading, *side.reasons))
        if not is_error and best.fit.is_right and not len(side.choices):
            words = f"errs like {best.fit.format_name} everywhere, not like {side.fit.format_name}"
            return replace(side, verdict=Verdict.DRIFT, reasons=(words, *side.reasons))
        if grows := self.growth(side):
            return replace(side, reasons=(grows, *side.reasons))
        nearest = f"; nearest: {cause_words(best, reading)}, {best.explained:.0%} of the squared error"
        unexplained = "unexplained" + (nearest if (is_error or reading) and best.explained >= LEAST_EXPLAINED else "")
        return replace(side, reasons=(unexplained, *side.reasons))


def cause_words(explanation: Explanation, reading: str) -> str:
    hypothesis = explanation.hypothesis
    words = [] if hypothesis.name == AS_IT_IS else [f"{hypothesis.name} ({hypothesis.detail})"]
    return ", ".join([*words, *([reading] if reading else [])])


def mode_of(rollout: Rollout, side: str) -> str:
    return rollout.logprobs_mode if side == "sampler" else rollout.trainer_logprobs_mode
