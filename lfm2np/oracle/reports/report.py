"""The report of a check for a terminal and for programs; junit.py and html_page.py write the other forms.

All are pure functions of the check, the command, and facts of the environment: the same input, the same text. `facts`
are by default those of `report_parts.environment`; a caller may add to them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lfm2np.oracle import factors
from lfm2np.oracle.causes import findings
from lfm2np.oracle.causes.regions import described
from lfm2np.oracle.causes.wrong_constants import would_show
from lfm2np.oracle.check import Checked
from lfm2np.oracle.coverage import early_ends
from lfm2np.oracle.judging.verdict import LIMIT, WRONG, Position, Verdict, probability_words
from lfm2np.oracle.reports import report_parts
from lfm2np.oracle.reports.report_parts import number, plural, visible

MOST_LINES = 10  # of flips and of messages
MOST_NOT_TESTED = 600  # characters
POSITION_FIELDS = (
    *("row", "is_new", "token_id", "best", "is_flip", "gap", "gap_ratio", "margin_ratio"),
    *("error", "error_ratio", "error_size", "is_rerouted"),
)
TOTAL_FIELDS = ("rms", "worst", "flips", "flip_chance", "rerouted", "route_chance")


def exit_code(verdict: Verdict) -> int:
    """0 for a right engine, 1 for a wrong one, 2 if that is open."""
    if verdict is Verdict.INCONCLUSIVE:
        return 2
    return 1 if verdict in WRONG else 0


def as_text(checked: Checked, command: str = "", facts: Mapping[str, str] | None = None) -> str:
    """For a terminal: the verdict and why, a table by case, the first wrong position, flips, and what was not
    tested.
    """
    blocks = [
        head_lines(checked),
        case_lines(checked),
        first_wrong_lines(checked.total.first_wrong, checked.total.verdict),
        ["where it goes wrong", *map(visible, checked.cause.lines)] if checked.cause else [],
        flip_lines(report_parts.flips_of(checked)),
        message_lines(checked),
        missing_lines(checked),
        [f"{name:<11}{visible(value)}" for name, value in (facts or report_parts.environment()).items()],
        [f"{'again':<11}{visible(command, report_parts.MOST_COMMAND)}"] if command else [],
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in lines) for lines in blocks if lines)


def format_in_words(checked: Checked) -> str:
    return f"{checked.format} ({checked.why_format})" if checked.why_format else checked.format


def head_lines(checked: Checked) -> list[str]:
    total = checked.total
    reported = sum(position.error_ratio is not None for position in checked.positions)
    errors = f"RMS {number(total.rms)}, worst {number(total.worst)}" if reported else "none reported"
    likely = probability_words(total.flip_chance)
    chance = f"; a right engine has so many or more with probability {likely}" if total.flips else ""
    rerouted = f"{total.rerouted} tokens went to other experts; so many or more with probability"
    constants = None if total.verdict in WRONG else total.constants
    return [
        f"verdict    {total.verdict}",
        f"not tested {visible('; '.join(checked.not_tested), MOST_NOT_TESTED)}",
        *(f"{'' if index else 'because':<11}{visible(reason)}" for index, reason in enumerate(reasons_of(checked))),
        f"engine     {visible(checked.abilities.engine)}",
        f"format     {visible(format_in_words(checked))}",
        f"positions  {len(checked.positions)}: {report_parts.counts_in_words(total.counts)}",
        *(f"early ends {words}" for words in report_parts.early_words(checked)),
        f"errors     {errors} (1 is the noise of the format, {LIMIT:g} the most that it explains)",
        f"flips      {total.flips}{chance}",
        *([f"routes     {rerouted} {probability_words(total.route_chance)}"] if total.rerouted else []),
        *([f"constants  would show if off: {would_show(constants)}"] if constants else []),
    ]


def reasons_of(checked: Checked) -> list[str]:
    """Why, and the first wrong operation if it is known."""
    where = checked.cause.reason if checked.cause else None
    return [*checked.total.reasons, *([where] if where else [])]


def case_lines(checked: Checked) -> list[str]:
    header = ("case", "requests", "positions", "reported", "RMS", "worst", "flips", "verdict")
    rows: list[tuple[object, ...]] = []
    for row in report_parts.case_rows(checked):
        rows.append((visible(row.case), row.asks, *report_parts.group_cells(row.group), row.flips, row.verdict))
    return report_parts.aligned([header, *rows], left=(0, 7)) if rows else []


def first_wrong_lines(position: Position | None, verdict: Verdict) -> list[str]:
    if position is None:
        return []
    ids = position.ask.prompt_token_ids
    prompt = f"prompt of {plural(len(ids), 'token')}: {report_parts.some_ids(ids)}"
    behind = f"the oracle's is {position.best}, the engine's is behind it by {report_parts.gap_words(position)}"
    if position.token_id == position.best:
        behind = "the oracle's too"
    by_itself = "" if position.verdict is verdict else f" by itself, {verdict} with all others"
    return [
        f"first wrong position: {position.verdict}{by_itself}",
        f"request    {visible(position.ask.id)} of {visible(position.ask.case)}, {prompt}",
        f"position   {report_parts.place_words(position)}",
        f"token      {position.token_id}; {behind}",
        f"error      {report_parts.error_words(position)}",
    ]


def flip_lines(flips: Sequence[Position]) -> list[str]:
    """The furthest behind first."""
    if not flips:
        return []
    header = ("flip in", "prompt", "row", "token", "oracle", "gap, nats", "gap, noise", "margin, noise", "verdict")
    rows = [(visible(flip.ask.id), *report_parts.flip_cells(flip)[1:]) for flip in flips[:MOST_LINES]]
    return [*report_parts.aligned([header, *rows], left=(0, 8)), *more(flips)]


def message_lines(checked: Checked) -> list[str]:
    """The engine's messages, counted."""
    counted = report_parts.messages(checked)
    if not counted:
        return []
    unanswered = plural(len(checked.total.unanswered), "request")
    lines = [f"no usable answer to {unanswered} of {len(checked.pairs)}"]
    lines += [f"{count:>9}  {visible(message)}" for message, count in counted[:MOST_LINES]]
    return [*lines, *more(counted)]


def missing_lines(checked: Checked) -> list[str]:
    lines = [f"the engine {words}" for words in report_parts.limits(checked.abilities)]
    lines += report_parts.left_words(checked)
    if checked.not_put:
        by_case = ", ".join(f"{visible(case)} {count}" for case, count in report_parts.not_put_by_case(checked).items())
        lines.append(f"not sent: {plural(len(checked.not_put), 'request')} ({by_case})")
    return ["not tested", *("  " + line for line in lines)] if lines else []


def more(things: Sequence[Any]) -> list[str]:
    return [f"... {len(things) - MOST_LINES} more"] if len(things) > MOST_LINES else []


def as_json(checked: Checked, command: str = "", facts: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Everything that a program may want. Numbers that are not finite become text, as JSON has none."""
    total = checked.total
    regions = described(checked.positions) if total.verdict is Verdict.BUG else None
    odd = [position for position in checked.positions if position.verdict is not Verdict.EXACT]
    fields = {
        "verdict": str(total.verdict),
        "exit_code": exit_code(total.verdict),
        "reasons": reasons_of(checked),
        "not_tested": checked.not_tested,
        "early_ends": dataclasses.asdict(early_ends(checked.pairs)),
        "suspects": findings.lines(total.causes),
        "causes": [dataclasses.asdict(cause) for cause in total.causes],
        "constants": None if total.constants is None else dataclasses.asdict(total.constants),
        "repeats": [dataclasses.asdict(repeat) for repeat in checked.repeats],
        "regions": regions and regions.as_json(),
        "format": checked.format,
        "why_format": checked.why_format,
        "abilities": dataclasses.asdict(checked.abilities),
        "counts": dict(total.counts),
        **{name: getattr(total, name) for name in TOTAL_FIELDS},
        "cases": [{**dataclasses.asdict(row), "verdict": str(row.verdict)} for row in report_parts.case_rows(checked)],
        "groups": {factor: groups_json(checked.positions, factor) for factor in factors.FACTORS},
        "first_wrong": None if total.first_wrong is None else position_json(total.first_wrong),
        "cause": None if checked.cause is None else dataclasses.asdict(checked.cause),
        "positions": [position_json(position) for position in odd],
        "prompts": {position.ask.id: list(position.ask.prompt_token_ids) for position in odd},
        "asked": len(checked.pairs),
        "unanswered": [{"message": message, "count": count} for message, count in report_parts.messages(checked)],
        "unanswered_ids": list(total.unanswered),
        "not_put": list(checked.not_put),
        "left": checked.left,
        "limits": report_parts.limits(checked.abilities),
        "environment": dict(facts or report_parts.environment()),
        "command": command,
    }
    plain: dict[str, Any] = finite(fields)
    return plain


def groups_json(positions: Iterable[Position], factor: str) -> dict[str, Any]:
    return {
        level: {**dataclasses.asdict(group), "fine": group.is_fine, "off": group.is_off}
        for level, group in factors.grouped(positions, factor).items()
    }


def position_json(position: Position) -> dict[str, Any]:
    """Its numbers, and its request by id."""
    return {
        "id": position.ask.id,
        "case": position.ask.case,
        "prompt_length": len(position.ask.prompt_token_ids),
        **{name: getattr(position, name) for name in POSITION_FIELDS},
        "route": None if position.route is None else dataclasses.asdict(position.route),
        "verdict": str(position.verdict),
    }


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
