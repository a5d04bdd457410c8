"""The report of a check: verdict and reasons, errors by case and by position, the first wrong one, and by what it
depends on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lfm2np.oracle.causes.groups import Group, group_of
from lfm2np.oracle.causes.replies import SAMPLER
from lfm2np.oracle.check import Checked
from lfm2np.oracle.coverage import case_of, early_ends
from lfm2np.oracle.engines.records import Answer, Request, shown_ids
from lfm2np.oracle.judging.verdict import LIMIT, WRONG, Position, Verdict, probability_words
from lfm2np.oracle.prefix_hits import prefix_hits, wrong_requests
from lfm2np.oracle.recorders.registry import shows_answers_only
from lfm2np.oracle.report import report as reports
from lfm2np.oracle.report.report import Case, Code, Finding, Report, Section, Table, number, plural
from lfm2np.oracle.total import Total
from lfm2np.oracle.workloads import CASES

SEVERITY = (  # the least severe first
    *(Verdict.EXACT, Verdict.ROUTE, Verdict.TIE),
    *(Verdict.INCONCLUSIVE, Verdict.DRIFT, Verdict.BUG),
)
MEANS = {
    Verdict.EXACT: "Every token is the oracle's, and every error is one that the declared format explains.",
    Verdict.ROUTE: "Some tokens went to other experts, where the declared format can't tell the scores apart.",
    Verdict.TIE: "Some tokens differ from the oracle's, where the declared format can't tell the two apart.",
    Verdict.INCONCLUSIVE: "The engine reports too little, or did not answer: it can't be shown to be right or wrong.",
    Verdict.DRIFT: "Errors are larger than the declared format explains, but another format explains all of them.",
    Verdict.BUG: "The declared format does not explain the errors, nor are they another format's everywhere.",
}
LOCATE = "--locate records the shortest wrong request and names the wrong operation"
DUMP = "--locate says how to dump the shortest wrong request; --locate RECORDER records it, if that runs in Python"
ERRORS = (
    "An error of 1 is what the declared format is expected to have at that very position. Single errors are counted "
    f"beyond one rounding step of the logits: up to {LIMIT:g} may be the format, more is not. RMS is of whole errors, "
    "the rounding step being part of their unit; so is worst where no error goes beyond that step."
)
NO_FIELDS = ("request", "scale", "route_chance", "flip_chance", "context")  # of a position
TOTAL_FIELDS = ("rms", "worst", "flips", "flip_chance", "rerouted", "route_chance")
SIZES = ("positions", "reported", "RMS", "worst", "flips", "bugs")  # of a group
ODD = (
    *("position in", "prompt", "row", "kind", "token", "oracle", "gap, nats", "gap, noise", "margin, noise"),
    *("its error, nats", "largest, noise", "verdict"),  # of the token, and of it and its alternatives
)


def exit_code(verdict: Verdict) -> int:
    if verdict is Verdict.INCONCLUSIVE:
        return reports.OPEN
    return reports.WRONG if verdict in WRONG else reports.RIGHT


def report_of(checked: Checked, target: str = "") -> Report:
    """`target`, by its name, decides what can be offered next."""
    total = checked.total
    locate = DUMP if shows_answers_only(target) else LOCATE
    where = checked.cause.reason if checked.cause else None
    return Report(
        command="check",
        verdict=str(total.verdict),
        exit_code=exit_code(total.verdict),
        means=MEANS[total.verdict],
        findings=[Finding("reason", reason) for reason in (*total.reasons, *([where] if where else []))],
        next_steps=[locate] if is_in_the_network(total) and checked.cause is None else [],
        facts={name: words for name, words in facts_of(checked).items() if words or name == "engine"},
        not_tested=checked.not_tested,
        sections=[section for section in sections_of(checked) if section.blocks],
        figures=figures_of(checked),
        cases=junit_cases(checked),
    )


def is_in_the_network(total: Total) -> bool:
    return (
        total.first_wrong is not None
        and total.verdict is Verdict.BUG
        and all(cause.suspect != SAMPLER for cause in total.causes)
    )


def facts_of(checked: Checked) -> dict[str, str]:
    """Empty where there is nothing to say."""
    total, early = checked.total, early_ends(checked.pairs)
    beyond = [abs(position.error_ratio) for position in checked.positions if position.error_ratio is not None]
    short = f"{plural(early.answers, 'answer')}, {plural(early.tokens, 'token')} short"
    short = f"{short}: {early.tokens - early.lost} of them came in follow-up requests" if early.answers else ""
    chance = f"a right engine has so many or more with probability {probability_words(total.flip_chance)}"
    rerouted = f"{total.rerouted} tokens went to other experts; so many or more with probability"
    constants = None if total.verdict in WRONG else total.constants
    return {
        "engine": checked.abilities.engine,
        "earlier": checked.earlier,
        "format": f"{checked.format} ({checked.why_format})" if checked.why_format else checked.format,
        "positions": f"{len(checked.positions)}: {counts_in_words(checked)}",
        "early ends": short,
        "errors": f"RMS {number(total.rms)} times rounding error plus logit step; beyond that step at most "
        f"{number(max(beyond))} times the rounding error ({LIMIT:g} are explained)"
        if beyond
        else "none reported",
        "flips": f"{total.flips}; {chance}" if total.flips else "0",
        "prefix cache": prefix_hits(checked.pairs).words(wrong_requests(checked.pairs, checked.positions)),
        "routes": f"{rerouted} {probability_words(total.route_chance)}" if total.rerouted else "",
        "constants": f"would show if off: {constants.would_show}" if constants else "",
        "probed as": "; ".join(checked.abilities.refused),
    }


def counts_in_words(checked: Checked) -> str:
    """ "30 EXACT, 27 BUG", the harmless first."""
    counts = checked.total.counts
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in SEVERITY if counts.get(verdict)) or "none"


def sections_of(checked: Checked) -> list[Section]:
    first, verdict = checked.total.first_wrong, checked.total.verdict
    by_itself = "" if first is None or first.verdict is verdict else f" by itself, {verdict} with all others"
    odd = [position for position in checked.positions if position.is_wrong or position.is_flip]
    odd.sort(key=lambda position: (-SEVERITY.index(position.verdict), -distance(position)))
    counted = [[count, why] for why, count in messages(checked)]
    title = f"no usable answer to {plural(len(checked.total.unanswered), 'request')} of {len(checked.pairs)}"
    header = ("case", "requests", *SIZES, "verdict")
    cases = [[case, asked, *sizes(group), verdict] for case, asked, _, group, verdict in case_rows(checked)]
    by_tag = [
        [name, level, *sizes(group), state(group)]
        for name, levels in checked.groups.items()
        for level, group in levels.items()
    ]
    about = Table(
        "Errors by each tag, in units of the rounding error", ("tag", "level", *SIZES, "state"), by_tag, (0, 1)
    )
    return [
        Section("Cases", [Table("", header, cases, (0, len(header) - 1), len(CASES))] if cases else []),
        Section(
            "First wrong position",
            [Code([f"first wrong position: {first.verdict}{by_itself}", *words_of(first)])] if first else [],
        ),
        Section("Where it goes wrong", [Code(["where it goes wrong", *checked.cause.lines])] if checked.cause else []),
        Section("Wrong positions and flips", [Table("", ODD, list(map(cells, odd)), (0, 3, 11), 10)] if odd else []),
        Section("No usable answer", [Table(title, ("requests", "why"), counted, (1,), 10)] if counted else []),
        Section("What the errors depend on", [about, ERRORS], is_long=True),
    ]


# --- groups of positions


def case_rows(checked: Checked) -> list[tuple[str, int, int, Group, Verdict]]:
    """Every requested case, also without a usable answer: its requests, those unanswered, its positions, and the most
    severe verdict: BUG with an answer that no right engine gives, INCONCLUSIVE where nothing is wrong, but no
    log-probability was reported."""
    asked = Counter(request.case for request, _ in checked.pairs)
    silent = Counter(request.case for request, _ in checked.pairs if request.request_id in checked.total.unanswered)
    positions: dict[str, list[Position]] = {case: [] for case in asked}
    for position in checked.positions:
        positions.setdefault(position.request.case, []).append(position)
    verdicts = {case: common_verdict(some) for case, some in positions.items()}
    verdicts |= {request.case: Verdict.BUG for request, answer in checked.pairs if answer.is_refuted}
    return [(case, asked[case], silent[case], group_of(some), verdicts[case]) for case, some in positions.items()]


def common_verdict(positions: Sequence[Position]) -> Verdict:
    worst = max((position.verdict for position in positions), key=SEVERITY.index, default=Verdict.INCONCLUSIVE)
    is_reported = any(position.error_ratio is not None for position in positions)
    return worst if is_reported or worst in WRONG else Verdict.INCONCLUSIVE


def sizes(group: Group) -> list[object]:
    rms, worst = (number(error if group.told else None) for error in (group.rms, group.worst))
    return [group.count, group.told, rms, worst, group.flips, group.bugs]


def state(group: Group) -> str:
    if group.is_off:
        return "off"
    if not group.told:
        return "not reported"
    return "fine" if group.is_fine else "too few to tell"


def messages(checked: Checked) -> list[tuple[str, int]]:
    """Why requests got no usable answer, with counts, the most frequent first."""
    silent = [answer for _, answer in checked.pairs if answer.error is not None or not answer.token_ids]
    no_tokens = {True: "no token ids reported", False: "no tokens"}
    return Counter(answer.error or no_tokens[answer.token_ids is None] for answer in silent).most_common()


# --- one position


def distance(position: Position) -> float:
    """From what is right, in units of the noise."""
    return max(position.gap_ratio * position.is_flip, abs(position.error_ratio or 0.0))


def cells(position: Position) -> list[object]:
    request, sizes = position.request, (position.gap, position.gap_ratio, position.margin_ratio)
    errors = position.error, position.error_ratio
    names = request.request_id, len(request.prompt_token_ids), position.row, phase(position)
    return [*names, position.token_id, position.best, *map(number, (*sizes, *errors)), position.verdict]


def words_of(position: Position) -> list[str]:
    request, ids = position.request, position.request.prompt_token_ids
    gap, ratio, error = number(position.gap), number(position.gap_ratio), number(position.error)
    behind = (
        f"the oracle's is {position.best}, the engine's is behind it by {gap} nats, {ratio} times the rounding error"
    )
    behind = "the oracle's too" if position.token_id == position.best else behind
    prompt = f"prompt of {plural(len(ids), 'token')}: {shown_ids(ids)}"
    largest = f"of it or an alternative, is {number(position.error_ratio)} times the rounding error"
    return [
        f"request    {request.request_id} of {request.case}, {prompt}",
        f"position   row {position.row}, which predicts token {position.row + 1} of the sequence ({phase(position)})",
        *([f"token      {position.token_id}; {behind}"] if position.is_new else []),  # else the engine chose none
        f"error      {error} nats; the largest reported, {largest}",
    ]


def phase(position: Position) -> str:
    """Of the token that is predicted there, which may be drawn: then is_new is False."""
    return "prompt" if position.row + 1 < len(position.request.prompt_token_ids) else "generated"


# --- for programs


def figures_of(checked: Checked) -> dict[str, Any]:
    """Everything that a program may want beside the reasons and what was not tested."""
    total = checked.total
    odd = [position for position in checked.positions if position.verdict is not Verdict.EXACT]
    return {
        "suspects": [cause.line for cause in total.causes],
        "causes": [asdict(cause) for cause in total.causes],
        "constants": None if total.constants is None else asdict(total.constants),
        "repeats": [asdict(repeat) for repeat in checked.repeats],
        "format": checked.format,
        "why_format": checked.why_format,
        "abilities": asdict(checked.abilities),
        "prefix_hits": prefix_hits(checked.pairs).figures(wrong_requests(checked.pairs, checked.positions)),
        "counts": dict(total.counts),
        **{name: getattr(total, name) for name in TOTAL_FIELDS},
        "cases": [
            {"case": case, "requests": asked, "unanswered": silent, **asdict(group), "verdict": str(verdict)}
            for case, asked, silent, group, verdict in case_rows(checked)
        ],
        "groups": {
            name: {level: asdict(group) for level, group in levels.items()} for name, levels in checked.groups.items()
        },
        "first_wrong": None if total.first_wrong is None else position_json(total.first_wrong),
        "cause": None if checked.cause is None else asdict(checked.cause),
        "positions": [position_json(position) for position in odd],
        "prompts": {position.request.request_id: list(position.request.prompt_token_ids) for position in odd},
        "asked": len(checked.pairs),
        "unanswered": [{"message": message, "count": count} for message, count in messages(checked)],
        "left": checked.left,
    }


def position_json(position: Position) -> dict[str, Any]:
    """Its numbers, and its request by id."""
    return {
        "id": position.request.request_id,
        "case": position.request.case,
        "prompt_length": len(position.request.prompt_token_ids),
        **{name: value for name, value in vars(position).items() if name not in NO_FIELDS},
        "is_flip": position.is_flip,
        "route": None if position.route is None else asdict(position.route),
        "verdict": str(position.verdict),
    }


# --- for JUnit


def junit_cases(checked: Checked) -> list[Case]:
    """A request each: wrong with a wrong token or log-probability, skipped where it can't be judged."""
    by_request: dict[str, list[Position]] = {}
    for position in checked.positions:
        by_request.setdefault(position.request.request_id, []).append(position)
    cases = [junit_case(request, answer, by_request.get(request.request_id, [])) for request, answer in checked.pairs]
    why = "not sent: the engine takes texts only, and no text encodes to this prompt"
    return [*cases, *(Case(case_of(name), name, skipped=why) for name in checked.not_put)]


def junit_case(request: Request, answer: Answer, positions: Sequence[Position]) -> Case:
    failed = skipped = None
    wrong = [
        f"{position.verdict}: {'; '.join(' '.join(line.split()) for line in words_of(position)[1:])}"
        for position in positions
        if position.is_wrong
    ]
    if answer.is_refuted:
        failed = f"no right engine gives this: {answer.error}"
    elif answer.error is not None or not positions:
        skipped = f"no usable answer: {answer.error or 'no tokens that could be judged'}"
    elif common_verdict(positions) is Verdict.INCONCLUSIVE:
        skipped = "INCONCLUSIVE: no log-probabilities were reported"
    elif wrong:
        failed = f"{len(wrong)} of {len(positions)} positions; {wrong[0]}"
    return Case(request.case, request.request_id, failed, skipped, wrong)
