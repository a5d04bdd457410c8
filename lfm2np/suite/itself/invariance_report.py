"""A check against itself, or another engine, as a report: a row a relation, and which are broken, where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lfm2np.oracle.engines.records_json import trace_as_json
from lfm2np.oracle.report.report import OPEN, RIGHT, WRONG, Case, Finding, Report, Section, Table, plural
from lfm2np.suite.itself.asked import INTERRUPTED, OUT_OF_TIME, Asking, Held
from lfm2np.suite.itself.questions import Sizes
from lfm2np.suite.itself.relations import ALONE
from lfm2np.suite.itself.rounding_spread import LEAST_GROUPS, Outcome, Spread, least_limit, limits_of, spread_of

HEADS = ("relation", "verdict", "positions", "equal bits", "largest", "KL", "other tokens")
HOLDS = (Outcome.EQUAL, Outcome.WITHIN, Outcome.TOKENS)
VERDICTS = {RIGHT: "HOLDS", WRONG: "BROKEN", OPEN: "INCONCLUSIVE"}
MEANS = {
    RIGHT: "Under no relation that was judged does an answer change by more than rounding changes it in this engine.",
    WRONG: "The same tokens get answers in other circumstances that rounding does not explain, or impossible ones.",
    OPEN: "It can't be said that all holds: something was not answered, or can't be compared.",
}


def report_of(asking: Asking, folders: Mapping[str, str] | None = None, notes: Sequence[str] = ()) -> Report:
    """`folders`: of findings, by relation."""
    held = asking.held
    unanswered = [f"not answered: {line}" for line in dict.fromkeys(asking.unanswered)]
    code = exit_code(held, bool(unanswered))
    late, cut = (sum(each.why == why for each in held) for why in (OUT_OF_TIME, INTERRUPTED))
    findings = [
        Finding("relation", what_of(each), each.relation.name, {"rounds": each.rounds}) for each in asking.broken
    ]
    if code == OPEN:  # what keeps it from being said that all holds
        unknown = [each for each in held if each.outcome is Outcome.UNKNOWN]
        findings = [Finding("unanswered", line) for line in unanswered]
        findings += [Finding("not judged", what_of(each) or "not judged", each.relation.name) for each in unknown]
        findings = findings or [Finding("not judged", "no relation was judged")]
    told = (Outcome.BROKEN, *((Outcome.UNKNOWN,) if code == OPEN else ()))
    others = [
        f"{each.relation.name}: {what_of(each)}"
        for each in held
        if each.outcome not in told and each.why not in (OUT_OF_TIME, INTERRUPTED) and what_of(each)
    ]
    besides = [*([] if code == OPEN else unanswered), *others, *notes]
    out = [f"{name}: {folder}" for name, folder in (folders or {}).items()]
    holding = sum(each.outcome in HOLDS for each in held)
    rows = [(each.relation.name, each.relation.sentence) for each in held]
    return Report(
        command="check --against",
        verdict=VERDICTS[code],
        exit_code=code,
        means=MEANS[code],
        findings=findings,
        facts={**facts_of(asking), "relations": f"{holding} of {len(held)} hold"},
        next_steps=[
            *hint(asking),
            *(out or (["--report FILE.html also writes scripts that show what is broken"] if code == WRONG else [])),
        ],
        not_tested=[
            *([f"{plural(late, 'relation')}, as time was over"] if late else []),
            *([f"{plural(cut, 'relation')}, as it was interrupted"] if cut else []),
            "what is wrong alike under every relation",
        ],
        sections=[
            Section("Relations", [Table("", HEADS, list(map(cells, held)), (0, 1), len(held))]),
            *([Section("What else was seen", besides)] if besides else []),
            Section("The relations", [Table("", ("relation", "must hold"), rows, (0, 1))], is_long=True),
        ],
        figures={
            "engine": asking.abilities.engine,
            "other": None if asking.other is None else asking.other.abilities.engine,
            "format": asking.format_name,
            "bitwise": asking.is_bitwise,
            "spread": asking.spread.nats,
            "spread_measured": asking.spread.is_measured,
            "traces": asking.traces,
            "requests": asking.requests,
            "tokens": asking.tokens,
            "seconds": round(asking.seconds, 1),
            "unanswered": list(dict.fromkeys(asking.unanswered)),
            "relations": list(map(held_as_json, held)),
            "folders": dict(folders or {}),
        },
        cases=[case_of(asking.abilities.engine, each) for each in held],
    )


def exit_code(held: Sequence[Held], is_unanswered: bool) -> int:
    """OPEN where nothing is broken, but a question is not answered even alone, or other tokens came of which nothing
    says by how much."""
    if any(each.outcome is Outcome.BROKEN for each in held):
        return WRONG
    any_judged = any(each.outcome not in (Outcome.UNKNOWN, Outcome.NOT_ASKED) for each in held)
    is_open = any(each.outcome is Outcome.UNKNOWN and each.score.flips for each in held)
    return OPEN if is_unanswered or is_open or not any_judged else RIGHT


def what_of(held: Held) -> str:
    """What is to be said beside the table, if anything."""
    if held.broken is None:
        return held.why
    if held.relation is ALONE:
        return held.broken.what
    return f"{held.broken.what}; in {held.rounds[0]} of {held.rounds[1]} rounds of other tokens"


def facts_of(asking: Asking) -> dict[str, str]:
    return {
        "engine": asking.abilities.engine,
        **({} if asking.other is None else {"other": asking.other.abilities.engine}),
        "format": asking.format_name,
        "spread": "equal bits" if asking.is_bitwise else spread_words(asking.widest),
        "sizes": sizes_words(asking.sizes),
        "asked": f"{asking.requests} requests, {asking.tokens} tokens, in {asking.seconds:.0f} s",
    }


def sizes_words(sizes: Sizes) -> str:
    """What prompts lie around."""
    at_once = plural(sizes.slots, "request")
    return f"blocks of {sizes.block}, chunks of {sizes.chunk}, {at_once} at once, at most {sizes.longest} tokens"


def spread_words(spread: Spread) -> str:
    if not spread.is_measured:
        return f"not measured: hardly any batch moves a bit; a position may be off by {spread.limit:.2g} nat of a logit"
    return f"{spread.nats:.2g} nat of a logit between two runs; a position may be off by {spread.limit:.2g}"


def hint(asking: Asking) -> list[str]:
    """Another format, if what was measured is of its size and not of the declared one's.

    Rounding moves logits alike whatever changes the order of sums, a bug only where it is met. So another format may
    explain what is broken only if batches, and decode instead of prefill, each move most answers by more than the
    declared one does; it need not, as no truth shows whose roundings these are. What holds under a format may hide in
    it if one of the two moves answers by so little that another format would allow less.
    """
    moved, declared = [nats for nats in asking.spread.moved if nats is not None], limits_of(asking.format_name)[0]
    if asking.is_bitwise or len(moved) < 2:
        return []
    nats = max(moved) if asking.broken else min(moved)
    formats = [name for name in ("float32", "float16", "bfloat16") if nats <= limits_of(name)[0]]
    by = f"batches move a logit by {moved[0]:.2g} nat, decode by {moved[1]:.2g}"
    under_it = spread_of([[min(moved)]] * LEAST_GROUPS, (), formats[0]) if formats else asking.spread
    if not asking.broken and formats[:1] != [asking.format_name] and under_it.limit < asking.spread.limit:
        return [f"{by}: --format {formats[0]} judges by that, {asking.format_name} by more"]
    scores = [each.score for each in asking.broken]
    largest = max((math.inf if score.flips else score.noise or math.inf for score in scores), default=math.inf)
    if min(moved) <= declared or not formats or largest >= least_limit(formats[0]):
        return []
    return [f"{by}: if the engine computes in {formats[0]}, --format {formats[0]}; else a state or operator is off"]


def cells(held: Held) -> list[str]:
    score, first = held.score, [held.relation.name, str(held.outcome)]
    if held.outcome is Outcome.NOT_ASKED:
        return [*first, *[""] * 5]
    share = f"{100 * score.equal / score.positions:.1f} %" if score.positions else ""
    numbers = ["" if value is None else f"{value:.2g}" for value in (score.noise, score.kl)]
    return [*first, str(score.positions), share, *numbers, str(score.flips)]


def case_of(engine: str, held: Held) -> Case:
    failed = held.broken.what if held.outcome is Outcome.BROKEN and held.broken is not None else None
    skipped = held.why or str(held.outcome) if held.outcome in (Outcome.NOT_ASKED, Outcome.UNKNOWN) else None
    return Case(engine, held.relation.name, failed, skipped, [held.relation.sentence, score_words(held)])


def score_words(held: Held) -> str:
    """The table's numbers."""
    pairs = zip(HEADS[2:], cells(held)[2:], strict=True)
    return ", ".join(f"{head} {cell}" for head, cell in pairs if cell)


def held_as_json(held: Held) -> dict[str, Any]:
    fields: dict[str, Any] = {"relation": held.relation.name, "outcome": str(held.outcome)}
    if held.outcome is not Outcome.NOT_ASKED:
        fields |= {**asdict(held.score), "rounds": held.rounds[1], "broken_rounds": held.rounds[0]}
    fields |= {"why": held.why} if held.why else {}
    if held.broken is not None:
        trace = held.broken.trace
        fields |= {"what": held.broken.what, **({"trace": trace_as_json(trace)} if trace is not None else {})}
    return fields
