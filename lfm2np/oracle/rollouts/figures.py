"""What was judged as numbers: the figures of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.rollouts.causes import Explanation
from lfm2np.oracle.rollouts.measures import measures
from lfm2np.oracle.rollouts.reported_side import SIDES
from lfm2np.oracle.rollouts.rollout import Left
from lfm2np.oracle.rollouts.rollouts import Judged, Side, cause_words, cut

Float64 = NDArray[np.float64]
DRAWS, MOST = 1000, 0.95  # of the bootstrap over rollouts, and its interval
PAIRS = {"sampler_trainer": SIDES, "sampler_truth": (SIDES[0], "truth"), "trainer_truth": (SIDES[1], "truth")}
Edges = Sequence[tuple[float, str]]
POSITIONS: Edges = ((1, "first token"), (8, "tokens 2-8"), (64, "9-64"), (512, "65-512"), (math.inf, "later"))
LENGTHS: Edges = ((64, "up to 64 tokens"), (256, "65-256"), (1024, "257-1024"), (math.inf, "longer"))
ENTROPIES: Edges = ((0.01, "below 0.01 nats"), (0.5, "0.01-0.5"), (2.0, "0.5-2"), (math.inf, "above 2"))


def figures_of(judged: Judged, left: Sequence[Left] = (), sampled_of: int | None = None) -> dict[str, Any]:
    """All of it; `sampled_of` is the number of usable rollouts in the file, if these are a sample of them."""
    parts = judged.parts
    return {
        "rollouts": len(judged.scores),
        "sampled_of": sampled_of,
        "tokens": len(parts["difference"]),
        "left_out": [{"kind": each.kind, "count": each.count, "first": each.first} for each in left],
        "not_computed": [{"id": rollout.id, "why": why} for rollout, why in judged.failed],
        "sides": {name: side_figures(judged, side) for name, side in judged.sides.items()},
        "difference": difference_figures(judged, sampled_of is not None),
        "measures": {name: measures_of(judged, pair) for name, pair in PAIRS.items()},
        "by": {name: groups for name, groups in groups_of(judged).items() if groups},
    }


def side_figures(judged: Judged, side: Side) -> dict[str, Any]:
    """Of one side; all None where it reported nothing."""
    fit = side.fit
    if fit is None:
        return {"verdict": str(side.verdict), "reasons": list(side.reasons)}
    finite = np.abs(fit.errors[np.isfinite(fit.errors)])
    figures: dict[str, Any] = {
        "verdict": str(side.verdict),
        "reasons": list(side.reasons),
        "reported": int(np.count_nonzero(fit.reported)),
        "expected_reading": side.expected,
        "reading": fit.reading,
        "format": fit.format_name,
        "rms": plain(fit.rms),
        "worst": plain(float(np.max(np.abs(fit.ratios[fit.reported]), initial=0.0))),
        "wrong": int(np.count_nonzero(fit.wrong)),
        "excluded_choices": len(side.choices),
        "mean_abs_error": plain(mean(finite)),
        "cause": None,
        "hypotheses": [explanation_figures(each, side.explained[0]) for each in side.explained],
    }
    if side.cause is not None:
        is_compared = all(each.fit is not None for each in judged.sides.values())
        clipped = {when: judged.clipped(side.name, when == "after") for when in ("before", "after")}
        figures["cause"] = {
            "words": cause_words(side.cause, judged.reading_of(side)),
            "explained": side.cause.explained,
            "format": side.cause.fit.format_name,
            "rms": plain(side.cause.fit.rms),
            "tokens": len(side.sample),
            "clipped": clipped if is_compared else None,  # on these tokens, before and after it is mended
        }
    return figures


def explanation_figures(explanation: Explanation, best: Explanation) -> dict[str, Any]:
    tokens = max(1, int(np.count_nonzero(explanation.fit.reported)))
    return {
        "name": explanation.hypothesis.name,
        "detail": explanation.hypothesis.detail,
        "reading": explanation.fit.reading,
        "format": explanation.fit.format_name,
        "log_likelihood": explanation.fit.log_likelihood,
        "behind_the_best_per_token": (best.fit.log_likelihood - explanation.fit.log_likelihood) / tokens,
        "explained": explanation.explained,
        "adequate": explanation.is_adequate,
    }


def difference_figures(judged: Judged, has_interval: bool) -> dict[str, Any] | None:
    """trainer - sampler and its parts, of the tokens where all are finite; None without any.

    `share` is the part's covariance with the whole over the whole's mean square: they sum to 1.
    """
    parts = judged.parts
    whole = parts["difference"]
    known = ~np.isnan(whole)
    if not known.any():
        return None
    square = float(np.mean(whole[known] ** 2))
    residual = whole - parts["trainer"] - parts["sampler"] - parts["meaning"]
    figures: dict[str, Any] = {
        "tokens": int(np.count_nonzero(known)),
        "mean": mean(whole[known]),
        "mean_abs": mean(np.abs(whole[known])),
        "largest": float(np.max(np.abs(whole[known]))),
        "parts": {
            name: {
                "mean_abs": mean(np.abs(parts[name][known])),
                "share": float(np.mean(parts[name][known] * whole[known])) / square if square else 0.0,
            }
            for name in ("sampler", "trainer", "meaning")
        },
        "largest_residual": float(np.max(np.abs(residual[known]))),
        "meaning": judged.meaning_words(),
        "clip": list(judged.options.clip),
        "clipped": judged.clipped(),
    }
    if has_interval:
        figures["mean_abs_interval"] = interval(cut(np.abs(whole), judged.scores), judged.options.seed)
    return figures


def interval(by_rollout: Sequence[Float64], seed: int) -> list[float]:
    """Of the mean over tokens, by drawing rollouts anew: what a sample of them leaves open."""
    totals = np.array([[np.nansum(values), np.count_nonzero(~np.isnan(values))] for values in by_rollout])
    rng = np.random.default_rng(seed)
    drawn = totals[rng.integers(0, len(totals), (DRAWS, len(totals)))].sum(axis=1)
    means = drawn[:, 0] / np.maximum(1, drawn[:, 1])
    return [float(edge) for edge in np.quantile(means, [(1 - MOST) / 2, (1 + MOST) / 2])]


def measures_of(judged: Judged, pair: Sequence[str]) -> dict[str, float | None] | None:
    """Of the tokens where both are finite; the truth is that of what the side reports. None without any."""
    side = judged.sides[pair[0]]
    first = side.reported
    second = judged.exact[side.name] if pair[1] == "truth" else judged.sides[pair[1]].reported
    known = np.isfinite(first) & np.isfinite(second)
    if not known.any():
        return None
    lengths = [int(np.count_nonzero(part)) for part in cut(known, judged.scores)]
    values = measures(first[known], second[known], [length for length in lengths if length])
    return {name: plain(value) for name, value in values.items()}


def groups_of(judged: Judged) -> dict[str, list[dict[str, Any]]]:
    """Errors of both sides by what the token's place is, each group with its tokens."""
    columns: dict[str, list[str]] = {name: [] for name in ("position", "length", "phase", "entropy", "pack", "step")}
    first_of_pack: set[str] = set()
    for each in judged.scores:
        rollout, count = each.rollout, len(each.entropy)
        length = len(rollout.prompt_token_ids) + count
        columns["position"] += [group(index + 1, POSITIONS) for index in range(count)]
        columns["length"] += [group(length, LENGTHS)] * count
        columns["phase"] += ["prefill", *["decode"] * (count - 1)]
        columns["entropy"] += [group(value, ENTROPIES) for value in each.entropy.tolist()]
        place = "" if rollout.pack is None else "first" if rollout.pack not in first_of_pack else "later"
        first_of_pack.add(rollout.pack or "")
        columns["pack"] += [place] * count
        columns["step"] += ["" if rollout.step is None else str(rollout.step)] * count
    return {name: grouped(judged, np.array(labels, np.str_)) for name, labels in columns.items()}


def group(value: float, edges: Edges) -> str:
    return next(name for edge, name in edges if value <= edge)


def grouped(judged: Judged, labels: NDArray[np.str_]) -> list[dict[str, Any]]:
    """In the order of the edges, else of appearance; nothing where there is a single one."""
    ranks = {name: rank for edges in (POSITIONS, LENGTHS, ENTROPIES) for rank, (_, name) in enumerate(edges)}
    names = [name for name in dict.fromkeys(labels.tolist()) if name]
    names.sort(key=lambda name: ranks.get(name, 0))
    if len(names) < 2:
        return []
    whole = np.abs(judged.parts["difference"])
    rows = []
    for name in names:
        tokens = labels == name
        row: dict[str, Any] = {"group": name, "tokens": int(np.count_nonzero(tokens))}
        row["mean_abs_difference"] = plain(mean(whole[tokens & ~np.isnan(whole)]))
        for side in judged.sides.values():
            if side.fit is not None:
                known = tokens & np.isfinite(side.fit.errors)
                row[side.name] = {
                    "mean_abs_error": plain(mean(np.abs(side.fit.errors[known]))),
                    "rms": plain(math.sqrt(mean(side.fit.sizes[known] ** 2))),
                    "wrong": int(np.count_nonzero(side.fit.wrong & tokens)),
                }
        rows.append(row)
    return rows


def mean(values: Float64) -> float:
    return math.fsum(values.tolist()) / len(values) if len(values) else 0.0


def plain(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
