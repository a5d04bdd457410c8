"""What a vetting found, and its report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lfm2np.oracle.report.report import OPEN, RIGHT, WRONG, Finding, Report, Section, Table
from lfm2np.oracle.vet.candidates import Hypothesis
from lfm2np.oracle.vet.evidence import Standing

MEANS = {
    "ACCEPTED": "The answers are the claim's: every other candidate is rejected.",
    "NOT THE CLAIM": "The claim is rejected, and at least one of the other candidates is not.",
    "NONE OF THESE": "Every candidate is rejected: something else answers.",
    "UNDECIDED": "The claim is not rejected, and the answers do not tell it from everything else.",
}


@dataclass
class Vetted:
    """What is known so far. standings: of each hypothesis, or none; left_out: answers that say nothing, by why."""

    hypotheses: Sequence[Hypothesis]
    alpha: float
    standings: Sequence[Standing] = ()
    num_answers: int = 0
    num_tokens: int = 0
    num_reported: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def left(self) -> list[int]:
        """Hypotheses that are not rejected, the one with the least against it first."""
        left = [number for number, standing in enumerate(self.standings) if standing.rejected is None]
        return sorted(left, key=lambda number: self.standings[number].log_e)

    @property
    def rivals(self) -> list[int]:
        """Of the likeliest: those of other candidates that are left."""
        left = self.left
        return [number for number in left if self.hypotheses[number].model is not self.hypotheses[left[0]].model]

    @property
    def accepted(self) -> int | None:
        """The likeliest, if everything else is rejected: other candidates, of which there is one, and other models."""
        is_alone = all(each.model is self.hypotheses[0].model for each in self.hypotheses)
        fits = any(self.standings[number].fits is not None for number in self.left)
        return self.left[0] if fits and not self.rivals and not is_alone else None

    @property
    def is_decided(self) -> bool:
        return bool(self.standings) and (not self.left or self.accepted is not None)

    @property
    def verdict(self) -> str:
        models = [self.hypotheses[number].model for number in self.left]
        if not models:
            return "NONE OF THESE"
        if self.hypotheses[0].model not in models:
            return "NOT THE CLAIM"
        return "UNDECIDED" if self.accepted is None else "ACCEPTED"

    @property
    def more(self) -> float:
        """Tokens until all else is rejected, if the likeliest is true; infinite: never."""
        return max((self.standings[rival].more[self.left[0]] for rival in self.rivals), default=0.0)


def report_of(result: Vetted) -> Report:
    verdict, names = result.verdict, [result.hypotheses[number].name for number in result.left]
    test = f"e-value of {1 / result.alpha:g}, which a true hypothesis reaches with a probability of {result.alpha:g} at most"
    reported = f"{result.num_reported} with log-probabilities"
    return Report(
        command="vet",
        verdict=verdict,
        exit_code={"ACCEPTED": RIGHT, "UNDECIDED": OPEN}.get(verdict, WRONG),
        means=MEANS[verdict],
        findings=[
            Finding("hypothesis", because(result, names), evidence={"tokens": result.num_tokens, "alpha": result.alpha})
        ],
        facts={
            "claim": result.hypotheses[0].name,
            "judged": f"{result.num_tokens} tokens of {result.num_answers} answers, {reported}",
            "rejected": f"by an {test} (Ville's inequality)",
        },
        next_steps=[next_step(result)] if verdict == "UNDECIDED" else [],
        not_tested=[f"{count} answers left out: {why}" for why, count in result.left_out.most_common()],
        sections=[Section("Hypotheses", [table_of(result)])],
        figures=figures_of(result),
    )


def because(result: Vetted, names: Sequence[str]) -> str:
    """Which it is, as far as that is known, and at what error."""
    error = f"(error at most {result.alpha:g})"
    if not names:
        return f"all {len(result.hypotheses)} hypotheses are rejected {error}"
    if result.accepted is not None:
        other = "" if result.verdict == "ACCEPTED" else f", not {result.hypotheses[0].name}"
        return f"it is {names[0]}{other} {error}"
    if result.verdict == "NOT THE CLAIM":
        return f"not {result.hypotheses[0].name}: one of {'; '.join(names)}, or none of these {error}"
    return f"after {result.num_tokens} tokens: {'; '.join(names)}"


def next_step(result: Vetted) -> str:
    if len({each.model for each in result.hypotheses}) == 1:
        return "name another --candidate: one alone is never accepted"
    if math.isinf(result.more):
        return "these are closer than rounding errors: no number of tokens tells them apart; leave out a --candidate"
    more = max(1, round(float(f"{result.more:.2g}")))
    total = float(f"{result.num_tokens + more:.2g}")
    return f"some {more:,} more tokens tell these apart, if it is {result.hypotheses[result.left[0]].name}: --tokens {total:.0f}"


def table_of(result: Vetted) -> Table:
    rows = []
    for hypothesis, standing in zip(result.hypotheses, result.standings, strict=True):
        verdict = "not rejected" if standing.rejected is None else f"rejected after {standing.rejected} tokens"
        rows.append([hypothesis.name, verdict, f"10^{standing.log_e / math.log(10.0):.1f}", standing.by])
    return Table("", ("hypothesis", "verdict", "e-value against", "most of it by"), rows, (0, 1, 2, 3), len(rows))


def figures_of(result: Vetted) -> dict[str, Any]:
    accepted = result.accepted
    return {
        "accepted": None if accepted is None else result.hypotheses[accepted].name,
        "left": [result.hypotheses[number].name for number in result.left],
        "alpha": result.alpha,
        "tokens": result.num_tokens,
        "reported": result.num_reported,
        "more_tokens": result.more,
        "hypotheses": [
            {
                "name": each.name,
                "sha256": each.model.sha256,
                "format": each.format,
                "rejected_after": standing.rejected,
                "log10_e": standing.log_e / math.log(10.0),
                "by": standing.by,
            }
            for each, standing in zip(result.hypotheses, result.standings, strict=True)
        ],
    }
