"""The figures of rollouts as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lfm2np.oracle.reports.report_parts import aligned, number, plural
from lfm2np.oracle.rollouts.reported_side import SIDES

MOST_HYPOTHESES = 4
SHOWN_MEASURES = (  # of the table, in the text; all are in --json and on the page
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "train/train_rollout_logprob_abs_diff",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/ppl_ratio",
    "rollout_corr/chi2_token",
    "token_mult_prob_error",
    "share of ratios outside [0.9, 1.1]",
)
PARTS = {
    "sampler": "the sampler's error",
    "trainer": "the trainer's error",
    "meaning": "what they mean by it",
}


def as_text(figures: Mapping[str, Any]) -> str:
    because = f": {figures['because']}" if figures["because"] else ""
    lines = [f"verdict  {figures['verdict']}{because}", head(figures)]
    for name in SIDES:
        lines += side_lines(name, figures["sides"][name])
    if figures["difference"]:
        lines += ["", *difference_lines(figures["difference"])]
    lines += measure_lines(figures)
    for name, groups in figures["by"].items():
        lines += ["", *group_lines(name, groups)]
    lines += [""] + [
        f"left out: {each['count']} ({each['kind']}), first {each['first']}" for each in figures["left_out"]
    ]
    lines += [f"not computed: {each['id']}: {each['why']}" for each in figures["not_computed"]]
    return "\n".join(lines).rstrip()


def head(figures: Mapping[str, Any]) -> str:
    of = "" if figures["sampled_of"] is None else f" (a sample of {figures['sampled_of']})"
    left = sum(each["count"] for each in figures["left_out"])
    more = f"; {left} more left out" if left else ""
    return f"{plural(figures['rollouts'], 'rollout')}{of}, {plural(figures['tokens'], 'answer token')}{more}"


def side_lines(name: str, side: Mapping[str, Any]) -> list[str]:
    lines = [f"{name:<9}{side['verdict']}  {side['reasons'][0]}"]
    lines += [f"{'':<9}{reason}" for reason in side["reasons"][1:]]
    if "format" not in side:
        return lines
    lines.append(
        f"{'':<9}reports {side['reading']} log-probabilities in {side['format']}: error {number(side['rms'])} of its "
        f"rounding error (rms), beyond a unit of the logits at most {number(side['worst'])}; "
        f"{number(side['mean_abs_error'])} nats on the average"
    )
    for each in side["hypotheses"][:MOST_HYPOTHESES] if side["cause"] or side["verdict"] != "EXACT" else []:
        detail = f" ({each['detail']})" if each["detail"] else ""
        fits = "" if each["adequate"] else "; does not explain all"
        lines.append(
            f"{'':<11}{each['behind_the_best_per_token']:>8.3f} nats a token behind  {each['name']}{detail}, "
            f"{each['reading']}, {each['format']}{fits}"
        )
    if side["cause"]:
        cause = side["cause"]
        lines.append(
            f"{'':<9}{cause['words']} explains {cause['explained']:.1%} of the squared error; what is left is "
            f"{number(cause['rms'])} of {cause['format']}'s rounding error (rms, {cause['tokens']} tokens)"
        )
    clipped = side["cause"] and side["cause"]["clipped"]
    if clipped:
        before, after = (clipped[when]["below"] + clipped[when]["above"] for when in ("before", "after"))
        lines.append(f"{'':<9}clipped ratios: {before:.2%} as they are, {after:.2%} with that mended")
    return lines


def difference_lines(difference: Mapping[str, Any]) -> list[str]:
    low, high = difference["clip"]
    clipped = difference["clipped"]
    lines = [
        f"trainer - sampler: {number(difference['mean_abs'])} nats on the average (absolute), "
        f"at most {number(difference['largest'])}; ratio below {low:g}: {clipped['below']:.2%}, "
        f"above {high:g}: {clipped['above']:.2%}"
    ]
    if "mean_abs_interval" in difference:
        least, most = difference["mean_abs_interval"]
        lines[0] += f"; in all of the file {number(least)} to {number(most)} (95 %)"
    for name, words in PARTS.items():
        part = difference["parts"][name]
        more = f": {difference['meaning']}" if name == "meaning" and difference["meaning"] else ""
        lines.append(f"  {part['share']:>7.1%}  {words}{more} ({number(part['mean_abs'])} nats)")
    return lines


def measure_lines(figures: Mapping[str, Any]) -> list[str]:
    columns = {name: values for name, values in figures["measures"].items() if values}
    if not columns:
        return []
    rows: list[list[object]] = [["", *(name.replace("_", " - ") for name in columns)]]
    for name in SHOWN_MEASURES:
        if any(name in values for values in columns.values()):
            rows.append([name, *(number(values.get(name)) for values in columns.values())])
    return ["", *aligned(rows, (0,))]


def group_lines(name: str, groups: list[Mapping[str, Any]]) -> list[str]:
    sides = [side for side in SIDES if side in groups[0]]
    rows: list[list[object]] = [
        [
            f"by {name}",
            "tokens",
            "|difference|",
            *(f"{side} rms" for side in sides),
            *(f"{side} wrong" for side in sides),
        ]
    ]
    for group in groups:
        rms = [number(group[side]["rms"]) for side in sides]
        wrong = [group[side]["wrong"] for side in sides]
        rows.append([group["group"], group["tokens"], number(group["mean_abs_difference"]), *rms, *wrong])
    return aligned(rows, (0,))
