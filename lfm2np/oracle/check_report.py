"""The report of a check: verdict and reasons, errors by position, the first wrong one, what the errors depend on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.oracle.causes.findings import lines
from lfm2np.oracle.causes.groups import SHOWN, Group, group_of, grouped, level_of
from lfm2np.oracle.causes.tags import TAGS
from lfm2np.oracle.check import Checked
from lfm2np.oracle.coverage import early_ends
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging.verdict import LIMIT, Position, Verdict, probability_words
from lfm2np.oracle.judging.verdict import WRONG as WRONG_VERDICTS
from lfm2np.oracle.prefix_hits import prefix_hits, wrong_requests
from lfm2np.oracle.report.charts import Axis, Dots, scatter_chart, svg
from lfm2np.oracle.report.report import (
    OPEN,
    RIGHT,
    WRONG,
    Case,
    Code,
    Figure,
    Finding,
    Report,
    Section,
    Table,
    number,
    plural,
)
from lfm2np.oracle.workloads import CASES

SEVERITY = (Verdict.EXACT, Verdict.ROUTE, Verdict.TIE, Verdict.INCONCLUSIVE, Verdict.DRIFT, Verdict.BUG)
LOOKS = {  # of the marks in the figure
    Verdict.BUG: 1,
    Verdict.DRIFT: 5,
    Verdict.INCONCLUSIVE: 3,
    Verdict.TIE: 2,
    Verdict.ROUTE: 6,
    Verdict.EXACT: 0,
}
MEANS = {
    Verdict.EXACT: "Every token is the oracle's, and every error is one that the declared format explains.",
    Verdict.ROUTE: "Some tokens went to other experts, where the declared format can't tell the scores apart.",
    Verdict.TIE: "Some tokens differ from the oracle's, where the declared format can't tell the two apart.",
    Verdict.INCONCLUSIVE: "The engine reports too little, or did not answer: it can't be shown to be right or wrong.",
    Verdict.DRIFT: "Errors are larger than the declared format explains, but another format explains all of them.",
    Verdict.BUG: "Errors are larger than any number format explains.",
}
ERRORS = (
    "An error of 1 is what the declared format is expected to have at that very position. Single errors are counted "
    f"beyond one rounding step of the logits: up to {LIMIT:g} may be the format, more is not. RMS is of whole errors, "
    "the rounding step being part of their unit; so is worst where no error goes beyond that step."
)
SMALLEST = 0.01  # error that is drawn; smaller ones are drawn there
POSITION_FIELDS = (
    *("row", "is_new", "token_id", "best", "is_flip", "gap", "gap_ratio", "margin_ratio"),
    *("error", "error_ratio", "error_size", "is_rerouted"),
)
TOTAL_FIELDS = ("rms", "worst", "flips", "flip_chance", "rerouted", "route_chance")
FLIP_HEADER = ("flip in", "prompt", "row", "token", "oracle", "gap, nats", "gap, noise", "margin, noise", "verdict")
WRONG_HEADER = ("request", "row", "kind", "token", "oracle", "gap, nats", "gap, noise", "error, nats", "error, noise")


def exit_code(verdict: Verdict) -> int:
    if verdict is Verdict.INCONCLUSIVE:
        return OPEN
    return WRONG if verdict in WRONG_VERDICTS else RIGHT


def report_of(checked: Checked) -> Report:
    verdict = checked.total.verdict
    return Report(
        command="check",
        verdict=str(verdict),
        exit_code=exit_code(verdict),
        means=MEANS[verdict],
        findings=[Finding("reason", reason) for reason in reasons_of(checked)],
        facts=facts_of(checked),
        not_tested=checked.not_tested,
        sections=[section for section in sections_of(checked) if section.blocks],
        figures=figures_of(checked),
        cases=cases_of(checked),
    )


def reasons_of(checked: Checked) -> list[str]:
    """Why, and the first wrong operation if it is known."""
    where = checked.cause.reason if checked.cause else None
    return [*checked.total.reasons, *([where] if where else [])]


def facts_of(checked: Checked) -> dict[str, str]:
    total = checked.total
    reported = sum(position.error_ratio is not None for position in checked.positions)
    errors = f"RMS {number(total.rms)}, worst {number(total.worst)}" if reported else "none reported"
    likely = probability_words(total.flip_chance)
    chance = f"; a right engine has so many or more with probability {likely}" if total.flips else ""
    rerouted = f"{total.rerouted} tokens went to other experts; so many or more with probability"
    constants = None if total.verdict in WRONG_VERDICTS else total.constants
    return {
        "engine": checked.abilities.engine,
        "format": f"{checked.format} ({checked.why_format})" if checked.why_format else checked.format,
        "positions": f"{len(checked.positions)}: {counts_in_words(total.counts)}",
        **({"early ends": words} if (words := early_words(checked)) else {}),
        "errors": f"{errors} (1 is the rounding error of the format, {LIMIT:g} the most that it explains)",
        "flips": f"{total.flips}{chance}",
        **({"prefix cache": words} if (words := prefix_cache_words(checked)) else {}),
        **({"routes": f"{rerouted} {probability_words(total.route_chance)}"} if total.rerouted else {}),
        **({"constants": f"would show if off: {constants.would_show}"} if constants else {}),
    }


def sections_of(checked: Checked) -> list[Section]:
    total = checked.total
    flips = flips_of(checked)
    cause = [Code(["where it goes wrong", *checked.cause.lines])] if checked.cause else []
    wrong = [position for position in checked.positions if position.is_wrong]
    wrong_table = Table("Positions that are DRIFT or BUG", (*WRONG_HEADER, "verdict"), list(map(wrong_row, wrong)))
    return [
        Section("Cases", case_tables(checked)),
        Section("First wrong position", first_wrong(total.first_wrong, total.verdict)),
        Section("Where it goes wrong", cause),
        Section("Flips", [Table("", FLIP_HEADER, [flip_row(flip) for flip in flips], (0, 8), 10)] if flips else []),
        Section("No usable answer", message_tables(checked)),
        Section("Not sent, not reported", [Code(left_out)] if (left_out := missing(checked)) else []),
        Section("Errors by position", error_figure(checked), is_long=True),
        Section("Wrong positions", [wrong_table] if wrong else [], is_long=True),
        Section("What the errors depend on", by_tag(checked.positions), is_long=True),
    ]


# --- tables


@dataclass(frozen=True)
class CaseRow:
    """One case of the workloads, all its requests together."""

    case: str
    requests: int
    unanswered: int
    group: Group
    flips: int
    verdict: Verdict


def case_rows(checked: Checked) -> list[CaseRow]:
    """Every requested case, also without a usable answer, in the order of the workloads."""
    positions: dict[str, list[Position]] = {}
    for position in checked.positions:
        positions.setdefault(position.request.case, []).append(position)
    asked = Counter(request.case for request, _ in checked.pairs)
    unanswered = set(checked.total.unanswered)
    silent = Counter(request.case for request, _ in checked.pairs if request.request_id in unanswered)
    rows = []
    for case in in_order([*asked, *positions]):
        judged = positions.get(case, [])
        verdict, flips = common_verdict(judged), sum(position.is_flip for position in judged)
        rows.append(CaseRow(case, asked[case], silent[case], group_of(judged), flips, verdict))
    return rows


def case_tables(checked: Checked) -> list[Table]:
    header = ("case", "requests", "positions", "reported", "RMS", "worst", "flips", "verdict")
    rows = [[row.case, row.requests, *group_cells(row.group), row.flips, row.verdict] for row in case_rows(checked)]
    return [Table("", header, rows, (0, 7), shown=len(CASES))] if rows else []


def common_verdict(positions: Sequence[Position]) -> Verdict:
    """The most severe one; INCONCLUSIVE where nothing is wrong, but no log-probability was reported."""
    worst = max((position.verdict for position in positions), key=SEVERITY.index, default=Verdict.INCONCLUSIVE)
    is_reported = any(position.error_ratio is not None for position in positions)
    return worst if is_reported or worst in WRONG_VERDICTS else Verdict.INCONCLUSIVE


def in_order(cases: Iterable[str]) -> list[str]:
    """In the order of the workloads, unknown ones last."""
    names = list(CASES)
    return sorted(dict.fromkeys(cases), key=lambda case: names.index(case) if case in CASES else len(names))


def group_cells(group: Group) -> list[str | int]:
    """Positions, how many with a log-probability, root mean square and worst of their errors."""
    return [group.count, group.told, *(number(error if group.told else None) for error in (group.rms, group.worst))]


def flips_of(checked: Checked) -> list[Position]:
    """All `total.flips`, the furthest behind first."""
    return sorted(
        (position for position in checked.positions if position.is_flip), key=lambda position: -position.gap_ratio
    )


def flip_row(flip: Position) -> list[object]:
    prompt, ratios = len(flip.request.prompt_token_ids), (flip.gap, flip.gap_ratio, flip.margin_ratio)
    return [flip.request.request_id, prompt, flip.row, flip.token_id, flip.best, *map(number, ratios), flip.verdict]


def wrong_row(position: Position) -> list[object]:
    sizes = (position.gap, position.gap_ratio, position.error, position.error_ratio)
    names = (position.request.request_id, position.row, phase(position), position.token_id, position.best)
    return [*names, *map(number, sizes), position.verdict]


def by_tag(positions: Sequence[Position]) -> list[str | Table]:
    """A number format errs alike everywhere; the errors of a bug depend on something."""
    rows = [
        [name, level, *group_cells(group), group.bugs, state(group)]
        for name in SHOWN
        for level, group in grouped(positions, name).items()
    ]
    header = ("tag", "level", "positions", "reported", "RMS", "worst", "bugs", "state")
    return [Table("Errors by each tag, in units of the rounding error", header, rows, (0, 1, 7)), ERRORS]


def state(group: Group) -> str:
    if group.is_off:
        return "off"
    if not group.told:
        return "not reported"
    return "fine" if group.is_fine else "too few to tell"


def message_tables(checked: Checked) -> list[Table]:
    """The engine's messages, counted."""
    counted = messages(checked)
    unanswered = plural(len(checked.total.unanswered), "request")
    title = f"no usable answer to {unanswered} of {len(checked.pairs)}"
    return [Table(title, ("requests", "why"), [[count, why] for why, count in counted], (1,), 10)] if counted else []


def messages(checked: Checked) -> list[tuple[str, int]]:
    """Why requests got no usable answer, with counts, the most frequent first."""
    unanswered = set(checked.total.unanswered)
    counts: Counter[str] = Counter()
    for request, answer in checked.pairs:
        if request.request_id in unanswered:
            counts[answer.error or ("no token ids reported" if answer.token_ids is None else "no tokens")] += 1
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def missing(checked: Checked) -> list[str]:
    """What the engine can't do or does not report, and requests that were not sent."""
    gaps = [f"the engine {words}" for words in limits(checked.abilities)]
    if checked.left:
        gaps.append(f"{plural(checked.left, 'request')} not sent or not judged: an earlier one is certainly wrong")
    if checked.not_put:
        by_case = ", ".join(f"{case} {count}" for case, count in not_put_by_case(checked).items())
        gaps.append(f"not sent: {plural(len(checked.not_put), 'request')} ({by_case})")
    return gaps


def limits(abilities: Abilities) -> list[str]:
    """What this engine can't do or does not report, and so was not checked."""
    lacking = {
        "takes texts only: prompts that no text encodes to can't be sent": abilities.takes_token_ids,
        "does not report the ids of its tokens": abilities.tells_token_ids,
        "does not report log-probabilities of its tokens": abilities.tells_logprobs,
        "does not report log-probabilities of prompts": abilities.tells_prompt_logprobs,
        "takes one request at a time: no batches were tested": abilities.at_once > 1,
        "can't abort: no request was cancelled midway": abilities.can_abort,
    }
    refused = [f"was probed as {words}" for words in abilities.refused]
    return [*(words for words, has_it in lacking.items() if not has_it), *refused]


def case_of(request_id: str) -> str:
    """The case of an ask by its id: `Writer.ask` numbers them."""
    return request_id.rpartition("-")[0] or request_id


def not_put_by_case(checked: Checked) -> dict[str, int]:
    counts = Counter(map(case_of, checked.not_put))
    return {case: counts[case] for case in in_order(counts)}


# --- one position


def first_wrong(position: Position | None, verdict: Verdict) -> list[Code]:
    if position is None:
        return []
    ids = position.request.prompt_token_ids
    behind = f"the oracle's is {position.best}, the engine's is behind it by {gap_words(position)}"
    if position.token_id == position.best:
        behind = "the oracle's too"
    by_itself = "" if position.verdict is verdict else f" by itself, {verdict} with all others"
    prompt = f"prompt of {plural(len(ids), 'token')}: {some_ids(ids)}"
    facts = [
        f"first wrong position: {position.verdict}{by_itself}",
        f"request    {position.request.request_id} of {position.request.case}, {prompt}",
        f"position   row {position.row}, which predicts token {position.row + 1} of the sequence ({phase(position)})",
        *([f"token      {position.token_id}; {behind}"] if position.is_new else []),  # else the engine chose none
        f"error      {error_words(position)}",
    ]
    return [Code(facts)]


def phase(position: Position) -> str:
    return "generated" if position.is_new else "prompt"


def gap_words(position: Position) -> str:
    return f"{number(position.gap)} nats, {number(position.gap_ratio)} times the rounding error"


def error_words(position: Position) -> str:
    largest = f"the largest reported is {number(position.error_ratio)} times the rounding error"
    return f"{number(position.error)} nats; {largest}"


def some_ids(ids: Sequence[int], most: int = 32) -> str:
    shown = ",".join(map(str, ids[:most]))
    return shown if len(ids) <= most else f"{shown},... ({len(ids)} ids)"


def counts_in_words(counts: Mapping[str, int]) -> str:
    """ "30 EXACT, 27 BUG", the harmless first."""
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in SEVERITY if counts.get(verdict)) or "none"


def prefix_cache_words(checked: Checked) -> str:
    """How many of the repeated prefixes hit, and whether hits are right; empty if none was repeated."""
    return prefix_hits(checked.pairs).words(wrong_requests(checked.pairs, checked.positions))


def early_words(checked: Checked) -> str:
    """Answers that ended before max_tokens, if any did; tokens that stay lost are in `not_tested`."""
    early = early_ends(checked.pairs)
    short = f"{plural(early.answers, 'answer')}, {plural(early.tokens, 'token')} short"
    return f"{short}: {early.tokens - early.lost} of them came in follow-up requests" if early.answers else ""


# --- the figure


def error_figure(checked: Checked) -> list[Figure]:
    """A mark a judged log-probability, what is wrong on top."""
    reported = [position for position in checked.positions if position.error_ratio is not None]
    points: dict[Verdict, list[tuple[float, float, str]]] = {verdict: [] for verdict in LOOKS}
    for position in reported:
        y = max(SMALLEST, min(1e15, abs(position.error_ratio or 0.0)))
        points[position.verdict].append((position.row + 1.0, y, ""))
    groups = [
        Dots(str(verdict), points[verdict], look, verdict is Verdict.INCONCLUSIVE) for verdict, look in LOOKS.items()
    ]
    if not reported:
        return []
    title = "Error of log-probabilities by position, in units of the format's rounding error"
    about = f"{plural(len(reported), 'position')}: {counts_in_words(checked.total.counts)}. The numbers stand below."
    levels = [(1.0, "1: rounding"), (LIMIT, f"{LIMIT:g}: the limit")]
    axes = Axis("position in the sequence, from 1", is_log=True), Axis("error", is_log=True)
    drawing = scatter_chart("errors", title, about, groups, *axes, levels=levels)
    caption = f"{title}. Those of one verdict at one spot share a mark; below {SMALLEST} they are drawn at the bottom."
    return [Figure(svg(drawing), caption, [by_row(checked.positions)])]


def by_row(positions: Sequence[Position]) -> Table:
    counts: dict[str, Counter[Verdict]] = {}
    for position in positions:
        counts.setdefault(level_of(TAGS["row"], position), Counter())[position.verdict] += 1
    rows = [
        [level, *group_cells(group), *(counts[level][verdict] for verdict in SEVERITY)]
        for level, group in grouped(positions, "row").items()
    ]
    header = ("row", "positions", "reported", "RMS", "worst", *map(str, SEVERITY))
    return Table("Errors by row, in units of the rounding error", header, rows)


# --- for programs


def figures_of(checked: Checked) -> dict[str, Any]:
    """Everything that a program may want beside the reasons and what was not tested."""
    total = checked.total
    odd = [position for position in checked.positions if position.verdict is not Verdict.EXACT]
    return {
        "early_ends": dataclasses.asdict(early_ends(checked.pairs)),
        "prefix_hits": prefix_hits(checked.pairs).figures(wrong_requests(checked.pairs, checked.positions)),
        "suspects": lines(total.causes),
        "causes": [dataclasses.asdict(cause) for cause in total.causes],
        "constants": None if total.constants is None else dataclasses.asdict(total.constants),
        "repeats": [dataclasses.asdict(repeat) for repeat in checked.repeats],
        "format": checked.format,
        "why_format": checked.why_format,
        "abilities": dataclasses.asdict(checked.abilities),
        "counts": dict(total.counts),
        **{name: getattr(total, name) for name in TOTAL_FIELDS},
        "cases": [{**dataclasses.asdict(row), "verdict": str(row.verdict)} for row in case_rows(checked)],
        "groups": {name: groups_json(checked.positions, name) for name in SHOWN},
        "first_wrong": None if total.first_wrong is None else position_json(total.first_wrong),
        "cause": None if checked.cause is None else dataclasses.asdict(checked.cause),
        "positions": [position_json(position) for position in odd],
        "prompts": {position.request.request_id: list(position.request.prompt_token_ids) for position in odd},
        "asked": len(checked.pairs),
        "unanswered": [{"message": message, "count": count} for message, count in messages(checked)],
        "unanswered_ids": list(total.unanswered),
        "not_put": list(checked.not_put),
        "left": checked.left,
        "limits": limits(checked.abilities),
    }


def groups_json(positions: Iterable[Position], name: str) -> dict[str, Any]:
    return {
        level: {**dataclasses.asdict(group), "fine": group.is_fine, "off": group.is_off}
        for level, group in grouped(positions, name).items()
    }


def position_json(position: Position) -> dict[str, Any]:
    """Its numbers, and its request by id."""
    return {
        "id": position.request.request_id,
        "case": position.request.case,
        "prompt_length": len(position.request.prompt_token_ids),
        **{name: getattr(position, name) for name in POSITION_FIELDS},
        "route": None if position.route is None else dataclasses.asdict(position.route),
        "verdict": str(position.verdict),
    }


# --- for JUnit


def cases_of(checked: Checked) -> list[Case]:
    """A request each: wrong with a wrong token or log-probability, skipped where it can't be judged."""
    by_request: dict[str, list[Position]] = {}
    for position in checked.positions:
        by_request.setdefault(position.request.request_id, []).append(position)
    cases = [
        case_of_request(request, answer, by_request.get(request.request_id, [])) for request, answer in checked.pairs
    ]
    why = "not sent: the engine takes texts only, and no text encodes to this prompt"
    return [*cases, *(Case(case_of(name), name, skipped=why) for name in checked.not_put)]


def case_of_request(request: Request, answer: Answer, positions: Sequence[Position]) -> Case:
    failed = skipped = None
    wrong = [position_line(position) for position in positions if position.is_wrong]
    if answer.is_refuted:
        failed = f"no right engine gives this: {answer.error}"
    elif answer.error is not None:
        skipped = f"no usable answer: {answer.error}"
    elif not positions:
        skipped = "no usable answer: no tokens that could be judged"
    elif common_verdict(positions) is Verdict.INCONCLUSIVE:
        skipped = "INCONCLUSIVE: no log-probabilities were reported"
    elif wrong:
        failed = f"{len(wrong)} of {len(positions)} positions; {wrong[0]}"
    return Case(request.case, request.request_id, failed, skipped, wrong)


def position_line(position: Position) -> str:
    token = f"token {position.token_id}, the oracle's {position.best}"
    errors = f"gap {gap_words(position)}, error {error_words(position)}"
    return f"{position.verdict} at row {position.row} ({phase(position)}): {token}, {errors}"
