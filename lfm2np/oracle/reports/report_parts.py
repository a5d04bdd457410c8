"""Building blocks of a check's reports: numbers as words, foreign text made harmless, rows of the tables."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import lfm2np
from lfm2np.numerics.products.blas import blas_kernel, blas_library
from lfm2np.oracle import factors
from lfm2np.oracle.check import Checked
from lfm2np.oracle.coverage import early_ends
from lfm2np.oracle.judging.verdict import LIMIT, WRONG, Position, Verdict
from lfm2np.oracle.targets.records import MOST_OF_A_MESSAGE
from lfm2np.oracle.targets.target import Abilities
from lfm2np.oracle.workloads import CASES

SEVERITY = (Verdict.EXACT, Verdict.ROUTE, Verdict.TIE, Verdict.INCONCLUSIVE, Verdict.DRIFT, Verdict.BUG)
MOST_COMMAND = 4000  # characters
NOISE = (
    "An error of 1 is the noise that the declared format is expected to have at that very position. Single errors are "
    f"counted beyond one rounding step of the logits: up to {LIMIT:g} may be the format, more is not. RMS is of whole "
    "errors, the rounding step being part of their unit; so is worst where no error goes beyond that step."
)


@dataclass(frozen=True)
class CaseRow:
    """One case of the workloads, all its requests together."""

    case: str
    asks: int
    unanswered: int
    group: factors.Group
    flips: int
    verdict: Verdict


def environment() -> dict[str, str]:
    """The versions that affect a verdict, BLAS's kernels, and the platform; no names of machines or users."""
    kernel = blas_kernel()  # of which the noise is
    return {
        "lfm2np": lfm2np.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": blas_library() + (f", kernels {kernel}" if kernel else ""),
        "platform": platform.platform(),
    }


def visible(text: str, most: int = MOST_OF_A_MESSAGE) -> str:
    """Foreign text on one line: what a terminal, a browser or XML would act on becomes its number, <U+202E>."""
    kept = "".join(c if c.isprintable() else f"<U+{ord(c):04X}>" for c in text[:most])
    return kept if len(text) <= most else f"{kept}... ({len(text)} characters)"


def number(value: float | None) -> str:
    """Three digits; a dash for what was not reported."""
    return "-" if value is None else f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def common_verdict(positions: Sequence[Position]) -> Verdict:
    """The most severe one; INCONCLUSIVE where nothing is wrong, but no log-probability was reported."""
    worst = max((position.verdict for position in positions), key=SEVERITY.index, default=Verdict.INCONCLUSIVE)
    is_reported = any(position.error_ratio is not None for position in positions)
    return worst if is_reported or worst in WRONG else Verdict.INCONCLUSIVE


def case_rows(checked: Checked) -> list[CaseRow]:
    """Every requested case, also without a usable answer, in the order of the workloads."""
    positions: dict[str, list[Position]] = {}
    for position in checked.positions:
        positions.setdefault(position.ask.case, []).append(position)
    asked = Counter(ask.case for ask, _ in checked.pairs)
    unanswered = set(checked.total.unanswered)
    silent = Counter(ask.case for ask, _ in checked.pairs if ask.id in unanswered)
    rows = []
    for case in in_order([*asked, *positions]):
        judged = positions.get(case, [])
        verdict, flips = common_verdict(judged), sum(position.is_flip for position in judged)
        rows.append(CaseRow(case, asked[case], silent[case], factors.group_of(judged), flips, verdict))
    return rows


def in_order(cases: Iterable[str]) -> list[str]:
    """In the order of the workloads, unknown ones last."""
    names = list(CASES)
    return sorted(dict.fromkeys(cases), key=lambda case: names.index(case) if case in CASES else len(names))


def left_words(checked: Checked) -> list[str]:
    """Of a check that ended early."""
    if not checked.left:
        return []
    return [f"{plural(checked.left, 'request')} not sent or not judged: an earlier one is certainly wrong"]


def early_words(checked: Checked) -> list[str]:
    """Answers that ended before max_tokens, if any did; tokens that stay lost are in `not_tested`."""
    early = early_ends(checked.pairs)
    short = f"{plural(early.answers, 'answer')}, {plural(early.tokens, 'token')} short"
    return [f"{short}: {early.tokens - early.lost} of them came in follow-up requests"] if early.answers else []


def flips_of(checked: Checked) -> list[Position]:
    """All `total.flips`, the furthest behind first."""
    return sorted(
        (position for position in checked.positions if position.is_flip), key=lambda position: -position.gap_ratio
    )


def messages(checked: Checked) -> list[tuple[str, int]]:
    """Why requests got no usable answer, with counts, the most frequent first."""
    unanswered = set(checked.total.unanswered)
    counts: Counter[str] = Counter()
    for ask, answer in checked.pairs:
        if ask.id in unanswered:
            counts[answer.error or ("no token ids reported" if answer.token_ids is None else "no tokens")] += 1
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def case_of(ask_id: str) -> str:
    """The case of an ask by its id: `Writer.ask` numbers them."""
    return ask_id.rpartition("-")[0] or ask_id


def not_put_by_case(checked: Checked) -> dict[str, int]:
    counts = Counter(map(case_of, checked.not_put))
    return {case: counts[case] for case in in_order(counts)}


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


def counts_in_words(counts: Mapping[str, int]) -> str:
    """ "30 EXACT, 27 BUG", the harmless first."""
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in SEVERITY if counts.get(verdict)) or "none"


def phase(position: Position) -> str:
    return "generated" if position.is_new else "prompt"


def group_cells(group: factors.Group) -> list[str | int]:
    """Positions, how many with a log-probability, root mean square and worst of their errors."""
    return [group.count, group.told, *(number(error if group.told else None) for error in (group.rms, group.worst))]


def flip_cells(flip: Position) -> list[object]:
    """Under the header of a table of flips: the request's id first, the verdict last."""
    prompt, ratios = len(flip.ask.prompt_token_ids), (flip.gap, flip.gap_ratio, flip.margin_ratio)
    return [flip.ask.id, prompt, flip.row, flip.token_id, flip.best, *map(number, ratios), flip.verdict]


def aligned(rows: Sequence[Sequence[object]], left: Sequence[int]) -> list[str]:
    """A table as lines: the columns in `left` aligned to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def place_words(position: Position) -> str:
    return f"row {position.row}, which predicts token {position.row + 1} of the sequence ({phase(position)})"


def gap_words(position: Position) -> str:
    return f"{number(position.gap)} nats, {number(position.gap_ratio)} times the noise"


def error_words(position: Position) -> str:
    return f"{number(position.error)} nats; the largest reported is {number(position.error_ratio)} times the noise"


def some_ids(ids: Sequence[int], most: int = 32) -> str:
    shown = ",".join(map(str, ids[:most]))
    return shown if len(ids) <= most else f"{shown},... ({len(ids)} ids)"
