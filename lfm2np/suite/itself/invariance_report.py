"""A check against itself, or another engine, as a report: a row a relation, and which are broken, where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lfm2np.oracle.engines.records_json import trace_as_json as trace_as_json
from lfm2np.oracle.report.report import OPEN, RIGHT, WRONG, Case, Finding, Report, Section, Table, plural
from lfm2np.suite.itself.asked import OUT_OF_TIME, Checked, Held
from lfm2np.suite.itself.rounding_spread import Outcome, Spread, least_limit

HEADS = ("relation", "verdict", "positions", "equal bits", "largest", "mean", "KL", "other tokens")
HOLDS = (Outcome.EQUAL, Outcome.WITHIN, Outcome.TOKENS)
VERDICTS = {RIGHT: "HOLDS", WRONG: "BROKEN", OPEN: "INCONCLUSIVE"}
MEANS = {
    RIGHT: "Under no relation that was judged does an answer change by more than rounding changes it in this engine.",
    WRONG: "The same tokens get other answers in other circumstances, by more than rounding explains.",
    OPEN: "It can't be said that all holds: something was not answered, or can't be compared.",
}


@dataclass(frozen=True)
class Result:
    """One engine against itself, or two and what lies between them. `folders`: of findings, by relation."""

    engines: tuple[Checked, ...]
    between: Held | None = None
    folders: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def named(self) -> list[tuple[str, Held]]:
        """All relations, each with its engine."""
        between = [("two engines", self.between)] if self.between else []
        return [*((checked.engine, each) for checked in self.engines for each in checked.held), *between]

    @property
    def held(self) -> list[Held]:
        return [held for _, held in self.named]

    @property
    def broken(self) -> list[Held]:
        return [each for each in self.held if each.outcome is Outcome.BROKEN]

    @property
    def is_judged(self) -> bool:
        """Whether it can be said that all holds, of what was asked. Not where a question is not answered even alone or
        other tokens came of which nothing says by how much."""
        is_open = any(each.score and each.score.flips for each in self.unknown)
        any_judged = any(each.outcome not in (Outcome.UNKNOWN, Outcome.NOT_ASKED) for each in self.held)
        return any_judged and not is_open and not any(checked.unanswered for checked in self.engines)

    @property
    def unknown(self) -> list[Held]:
        return [each for each in self.held if each.outcome is Outcome.UNKNOWN]

    @property
    def exit_code(self) -> int:
        return WRONG if self.broken else RIGHT if self.is_judged else OPEN


def report_of(result: Result) -> Report:
    late = sum(each.why == OUT_OF_TIME for each in result.held)
    return Report(
        command="check --against",
        verdict=VERDICTS[result.exit_code],
        exit_code=result.exit_code,
        means=MEANS[result.exit_code],
        findings=findings_of(result),
        facts=facts_of(result),
        next_steps=next_steps(result),
        not_tested=[
            *([f"{plural(late, 'relation')}, as time was over"] if late else []),
            "what is wrong alike under every relation",
        ],
        sections=list(sections_of(result)),
        figures={
            "engines": list(map(engine_as_json, result.engines)),
            "between": None if result.between is None else held_trace_as_json(result.between),
            "folders": dict(result.folders),
        },
        cases=[case_of(*each) for each in result.named],
    )


def findings_of(result: Result) -> list[Finding]:
    """What is broken; where nothing is, what keeps it from being said that all holds."""
    broken = [
        Finding("relation", what_of(held), held.relation.name, {"engine": engine, "rounds": held.rounds})
        for engine, held in result.named
        if held.outcome is Outcome.BROKEN
    ]
    if result.exit_code != OPEN:
        return broken
    unanswered = [Finding("unanswered", f"not answered: {line}") for line in unanswered_of(result)]
    unknown = [Finding("not judged", what_of(held) or "not judged", held.relation.name) for held in result.unknown]
    return [*unanswered, *unknown] or [Finding("not judged", "no relation was judged")]


def unanswered_of(result: Result) -> list[str]:
    return [line for checked in result.engines for line in checked.unanswered]


def what_of(held: Held) -> str:
    """What is to be said beside the table, if anything."""
    if held.broken is None:
        return held.why
    return f"{held.broken.what}; in {held.rounds[0]} of {held.rounds[1]} rounds of other tokens"


def facts_of(result: Result) -> dict[str, str]:
    """Of two engines each has a number behind its names."""
    facts: dict[str, str] = {}
    for number, checked in enumerate(result.engines, 1):
        demand = "equal bits" if checked.is_bitwise else spread_words(checked.spread)
        asked = f"{checked.requests} requests, {checked.tokens} tokens, in {checked.seconds:.0f} s"
        values = {"engine": checked.engine, "format": checked.format_name, "spread": demand, "asked": asked}
        behind = f" {number}" if len(result.engines) > 1 else ""
        facts |= {name + behind: value for name, value in values.items()}
    count = sum(each.outcome in HOLDS for each in result.held)
    return {**facts, "relations": f"{count} of {len(result.held)} hold"}


def spread_words(spread: Spread) -> str:
    if not spread.is_measured:
        return f"not measured: hardly any batch moves a bit; a position may be off by {spread.limit:.2g} nat"
    return f"{spread.nats:.2g} nat, of one logit between two runs; a position may be off by {spread.limit:.2g}"


def next_steps(result: Result) -> list[str]:
    hints = [line for checked in result.engines for line in hint(checked)]
    folders = [f"{name}: {folder}" for name, folder in result.folders]
    return [*hints, *(folders or (["--out DIR shrinks what is broken, and writes scripts"] if result.broken else []))]


def hint(checked: Checked) -> list[str]:
    """Another format that would explain what is broken."""
    scores = [each.score for each in checked.broken if each.score is not None]
    if not scores or checked.is_bitwise or any(score.noise is None or score.flips for score in scores):
        return []
    largest = max(score.noise or 0.0 for score in scores)
    now = least_limit(checked.format_name)
    named = [name for name in ("float16", "bfloat16") if max(largest, now) < least_limit(name)]
    return [f"{named[0]} would explain all of it: is --format {checked.format_name} right?"] if named else []


def sections_of(result: Result) -> Iterator[Section]:
    for checked in result.engines:
        engine = checked.engine if len(result.engines) > 1 else ""
        table = Table(engine, HEADS, list(map(cells, checked.held)), (0, 1), len(checked.held))
        yield Section(engine or "Relations", [table])
    if result.between is not None:
        title = "The two engines, each request alone, against the larger spread"
        yield Section("The two engines", [Table(title, HEADS, [cells(result.between)], (0, 1))])
    if seen := seen_besides(result):
        yield Section("What else was seen", seen)
    rows = {each.relation.name: each.relation.sentence for each in result.held}
    yield Section("The relations", [Table("", ("relation", "must hold"), list(rows.items()), (0, 1))], is_long=True)


def seen_besides(result: Result) -> list[str]:
    """What the findings do not say."""
    is_open = result.exit_code == OPEN
    relevant = (Outcome.BROKEN, Outcome.UNKNOWN) if is_open else (Outcome.BROKEN,)
    others = [held for held in result.held if held.outcome not in relevant and what_of(held)]
    return [
        *([] if is_open else [f"not answered: {line}" for line in unanswered_of(result)]),
        *(f"{held.relation.name}: {what_of(held)}" for held in others),
        *result.notes,
    ]


def cells(held: Held) -> list[str]:
    score = held.score
    if score is None:
        return [held.relation.name, str(held.outcome), *[""] * 6]
    share = f"{100 * score.equal / score.positions:.1f} %" if score.positions else ""
    numbers = [nats(score.largest), nats(score.mean), nats(score.kl)]
    return [held.relation.name, str(held.outcome), str(score.positions), share, *numbers, str(score.flips)]


def nats(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def case_of(engine: str, held: Held) -> Case:
    failed = held.broken.what if held.outcome is Outcome.BROKEN and held.broken is not None else None
    skipped = held.why or str(held.outcome) if held.outcome in (Outcome.NOT_ASKED, Outcome.UNKNOWN) else None
    return Case(engine, held.relation.name, failed, skipped, [held.relation.sentence, score_words(held)])


def score_words(held: Held) -> str:
    """The table's numbers."""
    pairs = zip(HEADS[2:], cells(held)[2:], strict=True)
    return ", ".join(f"{head} {cell}" for head, cell in pairs if cell)


def engine_as_json(checked: Checked) -> dict[str, Any]:
    return {
        "engine": checked.engine,
        "format": checked.format_name,
        "bitwise": checked.is_bitwise,
        "spread": checked.spread.nats,
        "spread_measured": checked.spread.is_measured,
        "traces": checked.traces,
        "requests": checked.requests,
        "tokens": checked.tokens,
        "seconds": round(checked.seconds, 1),
        "unanswered": list(checked.unanswered),
        "relations": [held_trace_as_json(each) for each in checked.held],
    }


def held_trace_as_json(held: Held) -> dict[str, Any]:
    fields: dict[str, Any] = {"relation": held.relation.name, "outcome": str(held.outcome)}
    if held.score is not None:
        fields |= asdict(held.score)
        fields |= {"rounds": held.rounds[1], "broken_rounds": held.rounds[0]}
    if held.why:
        fields["why"] = held.why
    if held.broken is not None:
        fields["what"] = held.broken.what
        if held.broken.trace is not None:
            fields["trace"] = trace_as_json(held.broken.trace)
    return fields
