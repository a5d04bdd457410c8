"""Rollouts judged: each side against the exact log-probabilities that it means to report (temperature, filters,
penalties: exact.READINGS), and what explains its errors.

What explains a side is looked for in this order, and the first that does is named:

1. formats, the finest first: an error of a fine format's network comes before a coarse format that would hide it;
2. within a format the network as computed, if it explains all positions, else what explains most (Fit.rank), provided
   that it leaves at most MOST_LEFT of those that are wrong as computed;
3. of equals the simplest: as hypotheses.py and exact.READINGS have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import Place
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.judge import FAR
from lfm2np.oracle.judging.noise import DRAWS, allowed_by
from lfm2np.oracle.judging.scored import Known, add_noises
from lfm2np.oracle.judging.verdict import LIMIT, Verdict, root_mean_square
from lfm2np.oracle.rollouts.exact import (
    AT,
    READINGS,
    SIDES,
    Fit,
    Scores,
    by_rollout,
    is_unstated,
    joined,
    noises_of,
    params_of,
    scales_of,
    scores_of,
)
from lfm2np.oracle.rollouts.hypotheses import (
    AS_COMPUTED,
    CHUNKED,
    Hypothesis,
    explanations,
    hypotheses_of,
    longest_words,
    other_temperatures,
    prediction_of,
)
from lfm2np.oracle.rollouts.rollout import Rollout
from lfm2np.values import Progress

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
AUTO = "auto"
AUTO_FORMATS = ("float32", "float16", "bfloat16")  # the finest first
SCORING, JUDGING, EXPLAINING = "exact log-probabilities", "rounding errors", "hypotheses"
FITTING = 0.25  # of the tokens that hypotheses are tried on, for a temperature
MOST_LEFT = 0.1  # of the positions that are wrong as computed, for a hypothesis to explain them
LEAST_FITTED = 8  # reported log-probabilities, for a temperature that the file does not state
LEAST_NEAREST = 0.8  # of them explained, for it to be named as the nearest
LEAST_WRONG = 8  # of them, for a side that a coarser format explains
LEAST_GAIN = 50.0  # of Fit.left, within one format: more than the square of what one position of a right engine has, 6
MOST_REFINED = 64  # rollouts whose scale is estimated from all emulated engines
LEAST_EVEN = 24  # tokens before and after, for a coarse format to be missed in one of the two
LEAST_PART = 0.1  # of the errors after: a format's own are as large everywhere, in units of its noise
PLACES = (8, 16, 32, 64, 128, 256, 512, 1024)  # tokens of an answer, after which errors may begin
SEEN = 1e-4  # nats of noise, where an error of a coarse format shows
LEAST_STALE = 0.5  # of the sequences from some step on that must be further off
Shown = Callable[[str], Progress | None]


def no_progress(name: str) -> Progress | None:
    return None


@dataclass(frozen=True)
class Options:
    """formats   of sampler and trainer: a name of formats.py, or auto
    cause_tokens about how many tokens, prompts included, formats, readings and hypotheses are chosen by
    chunks       sizes of chunks to try beside powers of two
    """

    formats: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(SIDES, AUTO))
    cause_tokens: int = 2000
    chunks: Sequence[int] = ()
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Side:
    """What is said of one side. `fit` is None where it reported nothing.

    expected   the reading that it should have reported
    explained  the hypotheses that were tried, what explains most first; empty where nothing had to be explained
    cause      in words, if a hypothesis or a reading explains what is wrong
    choices    which of the N tokens the sampler can't have chosen: excluded by its filters, or not greedy
    """

    name: str
    verdict: Verdict
    reasons: tuple[str, ...]
    reported: Float64
    expected: str = "raw"
    fit: Fit | None = None
    explained: tuple[Fit, ...] = ()
    cause: str | None = None
    choices: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def reading(self) -> str:
        """That it reports."""
        return self.expected if self.fit is None else self.fit.reading

    @property
    def plain(self) -> Fit:
        """Of what was tried the network as computed."""
        return next(each for each in self.explained if not each.is_error)

    def share(self, tried: Fit) -> float:
        """Of the positions that are wrong as computed those that it leaves within Allowed."""
        return max(0.0, 1.0 - tried.num_wrong / self.plain.num_wrong) if self.plain.num_wrong else 0.0

    def gains(self, tried: Fit) -> bool:
        """Whether it leaves less than the network as computed."""
        return tried.num_wrong < self.plain.num_wrong or self.plain.left - tried.left >= LEAST_GAIN


@dataclass(frozen=True, eq=False)
class Judged:
    """All rollouts. Arrays of N answer tokens, in the order of `scores`."""

    scores: Sequence[Scores]
    failed: Sequence[tuple[Rollout, str]]
    sides: Mapping[str, Side]
    exact: Mapping[str, Float64]  # m of each side

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
        declared, stated = self.options.formats[name], self.stated_reading(name)
        formats = AUTO_FORMATS if declared == AUTO else (declared,)
        readings = READINGS if stated == AUTO else (stated,)
        best = self.as_computed(reported, formats, readings)
        is_free = stated == AUTO and all(is_unstated(each.rollout) for each in self.scores)
        if is_free and not best.is_right and np.count_nonzero(best.reported) >= LEAST_FITTED:
            fitted = [reading for each in self.temperatures(reported) for reading in each.readings]
            rollouts = [each.rollout for each in self.scores]
            self.scores, _ = scores_of(self.model, rollouts, self.known.place, None, [*self.scores[0].views, *fitted])
            best = self.as_computed(reported, formats, (*readings, *fitted))
        choices = self.wrong_choices(best.format_name) if name == SIDES[0] else np.zeros(0, np.int64)
        side = self.decided(name, reported, best.reading if stated == AUTO else stated, best, choices)
        if best.is_right and (len(choices) or declared != AUTO or best.format_name == AUTO_FORMATS[0]):
            return self.everywhere(side)  # no log-probability could explain more, or no more is hidden by the format
        return self.everywhere(self.explained(side, stated == AUTO))

    def everywhere(self, side: Side) -> Side:
        """A BUG, if it errs like a coarse format, but only from some training step on, or behind some token. Not in a
        mixture of experts, whose right engines' errors are as uneven.
        """
        if side.cause is not None or side.verdict not in (Verdict.EXACT, Verdict.DRIFT) or len(side.choices):
            return side
        assert side.fit is not None
        name = side.fit.format_name if side.verdict is Verdict.EXACT else side.plain.format_name
        form = format_named(name)
        if form.is_fine or form.levels or self.model.config.sparse_layers:
            return side
        fit = side.fit if side.verdict is Verdict.EXACT else self.of_all(side.reported, name, side.plain.reading)
        noises = noises_of(name, self.model, self.scores, self.known)
        parts = zip(self.scores, noises, strict=True)
        scales = joined(scales_of(each, noise, name, fit.reading)[0] for each, noise in parts)
        seen = fit.reported & (scales > SEEN)
        for words, cuts in self.cuts().items():
            uneven = []
            for cut, early in cuts.items():
                before, after = fit.sizes[seen & early], fit.sizes[seen & ~early]
                few, more = root_mean_square(before.tolist()), root_mean_square(after.tolist())
                if min(len(before), len(after)) >= LEAST_EVEN and few < LEAST_PART * more:
                    uneven.append(
                        f"{words.format(cut)} ({more:.2g} units of its noise on the average, before {few:.2g})"
                    )
            if uneven:
                why = f"errs like {name}, but only {uneven[-1]}"
                return replace(side, verdict=Verdict.BUG, cause=why, reasons=(why, *side.reasons))
        return side

    def cuts(self) -> dict[str, dict[float, NDArray[np.bool_]]]:
        """Which of the N tokens are before each training step, and before each place in an answer; by words for it."""
        steps = joined(
            np.full(each.size, np.nan if each.rollout.step is None else each.rollout.step) for each in self.scores
        )
        places = joined(np.arange(each.size) for each in self.scores)
        later = np.unique(steps[np.isfinite(steps)])[1:].tolist()
        return {
            "from step {:g} on: stale weights": {step: steps < step for step in later},
            "behind the first {:g} tokens of answers": {count: places < count for count in PLACES},
        }

    def of_one_temperature(self, sides: dict[str, Side]) -> dict[str, Side]:
        """Where one was fitted that the file does not state: the finer side's for both, if it explains both."""
        for name, other in (SIDES, SIDES[::-1]):
            side, reading = sides[name], sides[other].reading
            if side.verdict is Verdict.EXACT and side.fit is not None and AT in reading and reading != side.reading:
                best = self.of_all(side.reported, side.fit.format_name, reading)
                if best.is_right:
                    return {**sides, name: self.decided(name, side.reported, reading, best, side.choices)}
        return sides

    def stated_reading(self, name: str) -> str:
        """Of the file if all its lines agree, else auto: what explains most."""
        field_name = "logprobs_mode" if name == SIDES[0] else "trainer_logprobs_mode"
        modes = {getattr(each.rollout, field_name) for each in self.scores}
        return modes.pop() if len(modes) == 1 else AUTO

    def sample(
        self, values: Float64, first: Sequence[int] = (), share: float = 1.0
    ) -> tuple[list[Scores], list[Float64]]:
        """Rollouts of about as many tokens as hypotheses are tried on, or a share of them; theirs of the values [N]:
        those of `first`, up to half of the tokens, then drawn ones; without `first` those that have values.
        """
        count, cut = self.options.cause_tokens * share, by_rollout(values, self.scores)
        known = [index for index, part in enumerate(cut) if np.isfinite(part).any()]
        drawn = np.random.default_rng(self.options.seed).permutation(len(self.scores)).tolist()
        chosen: list[int] = []
        tokens = 0
        for most, indices in ((count / 2.0, first or known), (count, drawn)):
            for index in indices:
                size = len(self.scores[index].rollout.ids)
                if index not in chosen and (tokens + size <= most or not chosen):
                    chosen.append(index)
                    tokens += size
        return [self.scores[index] for index in sorted(chosen)], [cut[index] for index in sorted(chosen)]

    # --- which format and reading

    def as_computed(self, reported: Float64, formats: Sequence[str], readings: Sequence[str]) -> Fit:
        """Of all rollouts, under the first of the formats in which a reading explains them, or the last."""
        some = self.sample(reported)
        for format_name in formats:
            best = self.tried(*some, format_name, readings)[0]
            if best.is_right or format_name == formats[-1]:
                best = self.of_all(reported, format_name, best.reading)
                if best.is_right:
                    break
        return best

    def tried(
        self,
        scores: Sequence[Scores],
        values: Sequence[Float64],
        format_name: str,
        readings: Sequence[str],
        hypotheses: Sequence[Hypothesis] = (AS_COMPUTED,),
        predictions: Sequence[Sequence[Scores] | None] | None = None,
        far: float = LIMIT * FAR,
    ) -> list[Fit]:
        """What hypotheses leave of a side's values [R] of these rollouts: by two emulated engines, by all where that
        leaves in doubt whether the network as computed explains them.

        The scale by two is at most twice that by all (judging/judge.py). A rollout with errors beyond `far` counts as
        wrong.
        """

        def fits(hypotheses: Sequence[Hypothesis], predictions: Sequence[Sequence[Scores] | None]) -> list[Fit]:
            noises = noises_of(format_name, self.model, scores, self.known, self.shown(JUDGING))
            return explanations(values, hypotheses, predictions, noises, format_name, readings)

        worst = largest(fits([AS_COMPUTED], [scores])[0].ratios, scores)
        doubtful = [index for index, size in enumerate(worst) if LIMIT / 2.0 < size <= far]
        doubtful.sort(key=lambda index: -worst[index])
        truths = [scores[index].truth for index in doubtful[:MOST_REFINED]]
        add_noises(self.model, format_name, truths, self.known, DRAWS)
        return fits(hypotheses, predictions or [scores])

    def of_all(self, reported: Float64, format_name: str, reading: str) -> Fit:
        """The network as computed."""
        values = by_rollout(reported, self.scores)
        return self.tried(self.scores, values, format_name, [reading], far=math.inf)[0]

    def temperatures(self, reported: Float64) -> list[Hypothesis]:
        scores, values = self.sample(reported, share=FITTING)
        return other_temperatures(self.model, scores, joined(values), self.known.place)

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
        count = int(np.count_nonzero(judged.reported))
        reasons = []
        if len(choices):
            reasons.append(f"{len(choices)} tokens that its sampling parameters exclude")
        if judged.num_wrong:
            words = f"log-probabilities are further off than {judged.format_name} explains"
            reasons.append(f"{judged.num_wrong} of {count} {words}")
        elif not judged.is_right:
            reasons.append(f"errors are {judged.rms:.3g} times what {judged.format_name} explains on the average")
        verdict = Verdict.BUG if reasons else Verdict.EXACT
        if not reasons:
            reasons = [f"all {count} log-probabilities are within what {judged.format_name} explains"]
            reasons += [longest_words(self.scores, "tempered", judged.reading)] if AT in judged.reading else []
        return Side(name, verdict, tuple(reasons), reported, expected, judged, choices=choices)

    def explained(self, side: Side, is_free: bool) -> Side:
        """With the hypotheses tried; `is_free`: whether any reading may be the side's. Of a side that is right in a
        coarse format only errors in the network that the format may hide, and not those of chunks, which are many.
        """
        assert side.fit is not None
        is_right, name = side.verdict is Verdict.EXACT, side.fit.format_name
        worst = largest(side.fit.sizes, self.scores)
        scores, values = self.sample(side.reported, sorted(range(len(worst)), key=lambda index: -worst[index]))
        readings = [side.expected] if is_right else [*dict.fromkeys((side.expected, *READINGS))]
        rollouts = [each.rollout for each in scores]
        hypotheses = hypotheses_of(self.model, rollouts, self.beside, self.options.chunks, self.previous)
        if is_right:
            hypotheses = [each for each in hypotheses if each.undo is None and each.name != CHUNKED]
        hypotheses += self.temperatures(side.reported)
        progress, predictions = self.shown(EXPLAINING), []
        for number, hypothesis in enumerate(hypotheses, 1):
            predictions.append(prediction_of(self.model, scores, hypothesis, readings, self.known.place))
            if progress:
                progress(number, len(hypotheses))
        formats = sorted(dict.fromkeys((name, *AUTO_FORMATS)), key=lambda each: -format_named(each).bits)
        for format_name in formats[: formats.index(name) + 1] if is_right else formats:
            tried = self.tried(scores, values, format_name, readings, hypotheses, predictions)
            side = replace(side, explained=tuple(tried))
            best, plain = tried[0], side.plain
            if plain.is_right:
                if not is_right or format_name != name or plain.left - best.left < LEAST_GAIN:
                    best = plain
            elif not self.explains(best, plain, is_right):
                continue
            if is_free and not is_right and best.reading in READINGS:
                side = replace(side, expected=best.reading, fit=self.of_all(side.reported, name, best.reading))
            return self.with_cause(side, best)
        return side if is_right else self.unexplained(side)

    @staticmethod
    def explains(best: Fit, plain: Fit, is_right: bool) -> bool:
        """Whether an error explains what the network as computed leaves wrong."""
        wrong, left = plain.num_wrong, best.num_wrong
        return best.is_error and left <= MOST_LEFT * wrong and (not is_right or wrong - left >= LEAST_WRONG)

    def with_cause(self, side: Side, best: Fit) -> Side:
        """With the verdict and reasons that the best explanation leads to, which leaves next to nothing."""
        assert side.fit is not None
        is_fitted = best.is_error and AT in best.reading  # and has it in its name
        reading = "" if is_fitted else longest_words(self.scores, side.expected, best.reading)
        words = ", ".join(filter(None, [best.words, reading]))
        is_right = side.verdict is Verdict.EXACT
        if best.is_error or (words and not is_right):
            hidden = f"hidden within {side.fit.format_name}: {best.format_name} with this error explains more"
            more = (hidden,) if is_right else side.reasons
            return replace(side, verdict=Verdict.BUG, cause=words, reasons=(words, *more))
        if is_right or len(side.choices):
            return side
        why = f"errs like {best.format_name} everywhere, not like {side.fit.format_name}"
        return replace(side, verdict=Verdict.DRIFT, reasons=(why, *side.reasons))

    def unexplained(self, side: Side) -> Side:
        """Stale weights by the steps, or the nearest of the hypotheses."""
        assert side.fit is not None
        best, words = side.explained[0], self.stale_words(side.fit) or "unexplained"
        if words == "unexplained" and best.is_error and side.share(best) >= LEAST_NEAREST:
            words += f"; nearest: {best.words}, {side.share(best):.0%} of the wrong log-probabilities"
        return replace(side, reasons=(words, *side.reasons))

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


def largest(values: Float64, scores: Sequence[Scores]) -> list[float]:
    """Of each rollout the largest size among the values [N]; 0 where all are NaN."""
    return [float(np.nanmax(np.abs(part), initial=0.0)) for part in by_rollout(values, scores)]
