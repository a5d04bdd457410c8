"""The report of a check as one page for any browser: no script, no request, foreign text escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from lfm2np.oracle import factors
from lfm2np.oracle.causes.findings import lines
from lfm2np.oracle.check import Cause, Checked
from lfm2np.oracle.judging.verdict import LIMIT, Position, Verdict, probability_words
from lfm2np.oracle.reports import report_parts
from lfm2np.oracle.reports.figure import MOST_MARKS, error_figure
from lfm2np.oracle.reports.page import bullets, details, foreign, page, table, versions
from lfm2np.oracle.reports.report import format_in_words, reasons_of
from lfm2np.oracle.reports.report_parts import number, plural

MOST_ROWS = 100  # of one table
MOST_PROMPT = 400  # characters
SIGNS = {
    Verdict.EXACT: "●",
    Verdict.ROUTE: "◐",
    Verdict.TIE: "◆",
    Verdict.INCONCLUSIVE: "□",
    Verdict.DRIFT: "▲",
    Verdict.BUG: "✕",
}
MEANS = {
    Verdict.EXACT: "Every token is the oracle's, and every error is one that the declared format explains.",
    Verdict.ROUTE: "Some tokens went to other experts, where the declared format can't tell the scores apart.",
    Verdict.TIE: "Some tokens differ from the oracle's, where the declared format can't tell the two apart.",
    Verdict.INCONCLUSIVE: "The engine reports too little, or did not answer: it can't be shown to be right or wrong.",
    Verdict.DRIFT: "Errors are larger than the declared format explains, but another format explains all of them.",
    Verdict.BUG: "Errors are larger than any number format explains.",
}
FACTOR_WORDS = {
    "case": "Case",
    "row": "Row",
    "prompt length": "Length of the prompt, in tokens",
    "company": "Alone or beside other requests",
    "prefix": "Prefix cold, warm or shared",
    "phase": "Prefill or decode",
}
NUMBERS = ("positions", "reported", "RMS", "worst")


def as_html(checked: Checked, command: str = "", facts: Mapping[str, str] | None = None) -> str:
    """The page. `facts` are by default those of `report_parts.environment`."""
    sections = [
        ("errors", "Errors by position", errors(checked)),
        ("first", "First wrong position", first_wrong(checked.total.first_wrong)),
        *([("cause", "Where it goes wrong", cause(checked.cause))] if checked.cause else []),
        ("suspects", "What the errors point to", suspected(checked)),
        ("factors", "What the errors depend on", by_factor(checked)),
        ("flips", "Flips", flips(checked)),
        ("cases", "Cases", cases(checked)),
        ("missing", "Not tested", missing(checked)),
        ("again", "Versions and command", again(checked, command, facts or report_parts.environment())),
    ]
    title = f"{checked.total.verdict}: {checked.abilities.engine} - lfm2np check"
    return page(title, head(checked), sections, f'<p class="note">{report_parts.NOISE}</p>\n')


def verdict_cell(verdict: Verdict) -> str:
    return f"{SIGNS[verdict]} {verdict}"


def head(checked: Checked) -> str:
    total = checked.total
    declared = "Format, not declared" if checked.why_format else "Declared format"
    return (
        f"<h1>lfm2np check: {verdict_cell(total.verdict)}</h1>\n"
        f'<div class="verdict {total.verdict.lower()}">\n'
        f"<p>Engine: {foreign(checked.abilities.engine)}<br>{declared}: {foreign(format_in_words(checked))}</p>\n"
        f"<p>{MEANS[total.verdict]}</p>\n{bullets([foreign(reason) for reason in reasons_of(checked)])}</div>\n"
    )


def errors(checked: Checked) -> str:
    total = checked.total
    reported = sum(position.error_ratio is not None for position in checked.positions)
    rms, worst = (number(value) if reported else "-" for value in (total.rms, total.worst))
    summary = (
        f"{plural(len(checked.positions), 'position')}: {report_parts.counts_in_words(total.counts)}. "
        f"{plural(reported, 'position')} with a reported log-probability. Errors in units of the noise of "
        f"{foreign(checked.format)}: RMS {rms}, worst {worst}; the limit is {LIMIT:g}."
    )
    text = summary.replace("<bdi>", "").replace("</bdi>", "")  # a description in SVG has no elements
    drawing, marks = error_figure(checked.positions, text)
    binned = (
        f" More than {MOST_MARKS:,} positions: those of one verdict at one spot share a mark, {marks:,} marks for "
        f"{reported:,} positions."
        if reported > MOST_MARKS
        else ""
    )
    return (
        f'<p>{summary}</p>\n<figure>\n{drawing}<figcaption class="note">One mark per position; errors below 0.01 are '
        f"drawn at the bottom.{binned}</figcaption>\n</figure>\n"
        + details("The numbers of the figure", by_row(checked) + wrong_table(checked))
    )


def by_row(checked: Checked) -> str:
    counts: dict[str, Counter[Verdict]] = {}
    for position in checked.positions:
        counts.setdefault(factors.row_bin(position), Counter())[position.verdict] += 1
    rows = [
        [level, *report_parts.group_cells(group), *(counts[level][verdict] for verdict in report_parts.SEVERITY)]
        for level, group in factors.grouped(checked.positions, "row").items()
    ]
    return table(
        "Errors by row, in units of the noise", ["row", *NUMBERS, *map(verdict_cell, report_parts.SEVERITY)], {"": rows}
    )


def wrong_table(checked: Checked) -> str:
    """The wrong positions themselves, as many as one can read."""
    wrong = [position for position in checked.positions if position.is_wrong]
    if not wrong:
        return "<p>No position is DRIFT or BUG.</p>\n"
    header = ("request", "row", "kind", "token", "oracle's", "gap, nats", "gap, noise", "error, nats", "error, noise")
    rows = [
        [
            *(foreign(position.ask.id), position.row, report_parts.phase(position), position.token_id, position.best),
            *map(number, (position.gap, position.gap_ratio, position.error, position.error_ratio)),
            verdict_cell(position.verdict),
        ]
        for position in wrong[:MOST_ROWS]
    ]
    return table("Positions that are DRIFT or BUG", [*header, "verdict"], {"": rows}, (0, 2, 9)) + more(wrong)


def more(things: Sequence[object]) -> str:
    left = len(things) - MOST_ROWS
    return f"<p>... {left:,} more; the report as JSON has them all.</p>\n" if left > 0 else ""


def first_wrong(position: Position | None) -> str:
    if position is None:
        return "<p>None.</p>\n"
    ask, ids = position.ask, position.ask.prompt_token_ids
    rows: list[list[object]] = [
        ["verdict", verdict_cell(position.verdict)],
        ["request", f"{foreign(ask.id)} of case {foreign(ask.case)}"],
        ["prompt", f"{plural(len(ids), 'token')}: <code>{report_parts.some_ids(ids, 64)}</code>"],
        ["position", report_parts.place_words(position)],
        ["token", position.token_id],
        ["the oracle's token", position.best],
        ["behind it by", report_parts.gap_words(position)],
        ["error", report_parts.error_words(position)],
    ]
    if ask.prompt_text is not None:
        rows.insert(3, ["prompt as text", foreign(ask.prompt_text, MOST_PROMPT)])
    return table("The first position that the format does not explain", ("what", "value"), {"": rows}, (0, 1))


def cause(cause: Cause) -> str:
    """The lines of `locate`."""
    located = "\n".join(foreign(line) for line in cause.lines)
    prompts = [[index, f"<code>{report_parts.some_ids(ids, 64)}</code>"] for index, ids in enumerate(cause.prompts)]
    together = f"Requests that ran together; recorded was {cause.request}"
    return f"<pre>{located}</pre>\n" + table(together, ("request", "prompt"), {"": prompts}, (1,))


def suspected(checked: Checked) -> str:
    if causes := lines(checked.total.causes):
        return "<p>Suspected causes, the likeliest first:</p>\n" + bullets(list(map(foreign, causes)))
    if checked.total.verdict is Verdict.DRIFT:
        return "<p>To no bug: another number format explains the errors, as the verdict says.</p>\n"
    return "<p>No class of bug is suspected.</p>\n"


def by_factor(checked: Checked) -> str:
    """Errors by each level of each factor."""
    bodies = {
        FACTOR_WORDS.get(factor, factor): [
            [foreign(level), *report_parts.group_cells(group), group.bugs, state(group)]
            for level, group in factors.grouped(checked.positions, factor).items()
        ]
        for factor in factors.FACTORS
    }
    header = ("level", *NUMBERS, "bugs", "state")
    return "<p>A number format errs alike everywhere; the errors of a bug depend on something.</p>\n" + table(
        "Errors by each factor, in units of the noise", header, bodies, (0, 6)
    )


def state(group: factors.Group) -> str:
    if group.is_off:
        return "✕ off"
    if not group.told:
        return "? not reported"
    return "● fine" if group.is_fine else "? too few to tell"


def flips(checked: Checked) -> str:
    sorted_flips = report_parts.flips_of(checked)
    if not sorted_flips:
        judged = any(position.is_new for position in checked.positions)
        return f"<p>{'None' if judged else 'No new token could be judged'}.</p>\n"
    header = ("request", "prompt", "row", "token", "oracle's", "gap, nats", "gap, noise", "margin, noise", "verdict")
    shown = sorted_flips[:MOST_ROWS]
    rows = [[foreign(flip.ask.id), *report_parts.flip_cells(flip)[1:-1], verdict_cell(flip.verdict)] for flip in shown]
    likely = probability_words(checked.total.flip_chance)
    return (
        f"<p>{checked.total.flips} new tokens are not the oracle's. A right engine of this format has so many or more "
        f"with probability {likely}. Margin: how far the oracle is from a tie there.</p>\n"
        + table("Flips, the furthest behind first", header, {"": rows}, (0, 8))
        + more(sorted_flips)
    )


def cases(checked: Checked) -> str:
    rows = [
        [
            foreign(row.case),
            row.asks,
            row.unanswered,
            *report_parts.group_cells(row.group),
            row.flips,
            verdict_cell(row.verdict),
        ]
        for row in report_parts.case_rows(checked)
    ]
    header = ("case", "requests", "unanswered", *NUMBERS, "flips", "verdict")
    return table("Each case, all its requests together", header, {"": rows}, (0, 8))


def missing(checked: Checked) -> str:
    sentences = [
        *(f"Ended early: {words}." for words in report_parts.early_words(checked)),
        *(f"Not tested: {foreign(words)}." for words in checked.not_tested),
        *(f"The engine {words}." for words in report_parts.limits(checked.abilities)),
        *(
            f"Not sent: {plural(n, 'request')} of {foreign(case)}."
            for case, n in report_parts.not_put_by_case(checked).items()
        ),
        *(f"{words}." for words in report_parts.left_words(checked)),
    ]
    content = bullets(sentences) if sentences else "<p>Everything was tested.</p>\n"
    counted = report_parts.messages(checked)
    if counted:
        rows = [[foreign(message), count] for message, count in counted[:MOST_ROWS]]
        content += table("Requests without a usable answer", ("why", "requests"), {"": rows}) + more(counted)
    return content


def again(checked: Checked, command: str, facts: Mapping[str, str]) -> str:
    return versions("Versions", [("engine", checked.abilities.engine), *facts.items()], command)
