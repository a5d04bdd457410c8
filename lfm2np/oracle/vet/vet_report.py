"""The report of a vetting. No part of it holds an address's user, a key or a header."""

from __future__ import annotations

import math
from typing import Any

from lfm2np.oracle.report.report import OPEN, RIGHT, Finding, Report, Section, Table
from lfm2np.oracle.vet.hypotheses import Hypotheses, shown
from lfm2np.oracle.vet.token_plan import Plan
from lfm2np.oracle.vet.vetting import Bounds, Outcome, Vetted

MANY = 10**7  # tokens that nobody asks for
MEANS = {
    "ACCEPTED": "The answers are the claim's: every other hypothesis is rejected.",
    "NOT THE CLAIM": "The claim is rejected, and at least one of the other hypotheses is not.",
    "NONE OF THESE": "Every hypothesis is rejected: something else answers.",
    "UNDECIDED": "The claim is not rejected, and the answers do not tell it from everything else.",
}
PLAN_HEADER = ("if it is", "tokens", "with log-probabilities", "hardest to tell from", "KL a token")


def report_of(result: Vetted) -> Report:
    verdict = verdict_of(result)
    evidence = {"tokens": result.num_tokens, "alpha": result.alpha}
    return Report(
        command="vet",
        verdict=verdict,
        exit_code=result.exit_code,
        means=MEANS[verdict],
        findings=[Finding("hypothesis", because(result), evidence=evidence)],
        facts=facts_of(result),
        next_steps=next_steps(result),
        not_tested=[f"{count} answers left out: {why}" for why, count in result.left_out.most_common()],
        sections=[
            Section("Hypotheses", [standings(result)]),
            plan_section(result.hypotheses, result.plan, result.bounds, result.alpha, is_long=True),
        ],
        figures=figures_of(result),
    )


def verdict_of(result: Vetted) -> str:
    if result.outcome is Outcome.NONE:
        return "NONE OF THESE"
    return {RIGHT: "ACCEPTED", OPEN: "UNDECIDED"}.get(result.exit_code, "NOT THE CLAIM")


def because(result: Vetted) -> str:
    """Which it is, as far as that is known, and at what error."""
    names = [result.hypotheses.each[number].name for number in result.left]
    claim, error = result.hypotheses.claim.name, f"(error at most {result.alpha:g})"
    if result.outcome is Outcome.NONE:
        return f"all {len(result.standings)} hypotheses are rejected {error}"
    if result.accepted is not None:
        other = "" if result.exit_code == RIGHT else f", not {claim}"
        return f"it is {result.hypotheses.each[result.accepted].name}{other} {error}"
    if result.exit_code != OPEN:
        return f"not {claim}: one of {'; '.join(names)}, or none of these {error}"
    rejected = len(result.standings) - len(names)
    return f"after {result.num_tokens} tokens: {'; '.join(names)} ({rejected} rejected)"


def facts_of(result: Vetted) -> dict[str, str]:
    judged = f"{result.num_tokens} tokens of {result.num_answers} answers, {result.num_reported} log-probabilities"
    prompts = f"{result.prompt_tokens} tokens of prompts" if result.prompt_tokens else "prompt tokens not reported"
    cost = f"; cost {result.cost:.2g}" if result.cost else ""
    hint = prompt_hint(result)
    return {
        "claim": result.hypotheses.claim.name,
        "judged": f"{judged}; stopped: {result.stopped}",
        "received": f"{result.answer_tokens} generated tokens; {prompts}{cost}",
        **({"prompts": hint} if hint else {}),
    }


def prompt_hint(result: Vetted) -> str:
    """Where the server counts other prompts than the claim has."""
    if not result.more_prompt or set(result.more_prompt) == {0}:
        return ""
    (more, count), *_ = result.more_prompt.most_common()
    words = f"{abs(more)} tokens {'more' if more > 0 else 'less'} than the claim's" if more else "as the claim's"
    total = result.more_prompt.total()
    return f"the server counts {words} for {count} of {total}: it may lay them out or split them otherwise"


def next_steps(result: Vetted) -> list[str]:
    """What would tell apart what is left."""
    if result.exit_code != OPEN:
        return []
    if not any(map(result.hypotheses.rivals, result.left)):
        return ["name another --candidate: one alone is never accepted"]
    reported = bool(result.num_reported)
    needed = max(result.plan.needed(result.hypotheses, number, reported) for number in result.left)
    if math.isinf(needed):
        return ["by the plan no number of tokens tells all of these apart: leave out a --candidate"]
    return [f"by the plan {count_text(needed)} tokens tell these apart, whichever it is: --tokens"]


def standings(result: Vetted) -> Table:
    rows = []
    for each, standing in zip(result.hypotheses.each, result.standings, strict=True):
        verdict = "not rejected" if standing.rejected is None else f"rejected after {standing.rejected} tokens"
        rows.append([each.name, verdict, f"10^{standing.capital / math.log(10.0):.1f}", standing.by or "none"])
    return Table(
        "", ("hypothesis", "verdict", "evidence against", "best bet against it"), rows, (0, 1, 2, 3), len(rows)
    )


def plan_section(hypotheses: Hypotheses, plan: Plan, bounds: Bounds, alpha: float, is_long: bool = False) -> Section:
    """What a verdict costs, by hypothesis: tokens until all others are rejected, if it is true."""
    words = (
        f"plan: {plan.num_answers} answers of {hypotheses.claim.name}, {plan.num_tokens} sampled tokens, entropy "
        f"{plan.entropy:.2g} nats each; error at most {alpha:g}"
    )
    rows = []
    for number, each in enumerate(hypotheses.each):
        others = hypotheses.rivals(number)
        if not others:
            continue
        hardest = max(others, key=lambda other: (float(plan.tokens[number, other]), -float(plan.kl[number, other])))
        needed = (count_text(plan.needed(hypotheses, number, with_reported)) for with_reported in (False, True))
        rows.append([each.name, *needed, hypotheses.each[hardest].name, f"{plan.kl[number, hardest]:.2g}"])
    table = Table("", PLAN_HEADER, rows, range(len(PLAN_HEADER)), len(rows))
    if not bounds.prompt_price and not bounds.answer_price:
        return Section("Plan", [words, table], is_long)
    most = min(plan.needed(hypotheses, 0, False), float(bounds.tokens))
    cost = bounds.cost_of(most / max(1.0, plan.answer_tokens) * plan.prompt_tokens, most)
    return Section("Plan", [words, table, f"cost of {count_text(most)} tokens: {cost:.2g}"], is_long)


def count_text(tokens: float) -> str:
    """Two digits: more is not known."""
    if tokens > MANY:
        return "never" if math.isinf(tokens) else f"over {MANY:,}"
    rounded = float(f"{max(1.0, tokens):.2g}")
    return f"{round(rounded):,}"


# --- for programs


def figures_of(result: Vetted) -> dict[str, Any]:
    each = result.hypotheses.each
    accepted = None if result.accepted is None else each[result.accepted].name
    return {
        "accepted": accepted,
        "claim": result.hypotheses.claim.name,
        "alpha": result.alpha,
        "left": [each[number].name for number in result.left],
        "stopped": result.stopped,
        "answers": result.num_answers,
        "tokens": result.num_tokens,
        "reported": result.num_reported,
        "prompt_tokens": result.prompt_tokens,
        "answer_tokens": result.answer_tokens,
        "cost": result.cost,
        "left_out": dict(result.left_out),
        "more_prompt_tokens": {str(more): count for more, count in result.more_prompt.items()},
        "candidates": [
            {
                "name": candidate.name,
                "path": str(candidate.model.path),
                "sha256": candidate.model.sha256,
                "kv": candidate.kv,
                "format": candidate.format_name,
                "spread": spread,
            }
            for candidate, spread in zip(result.hypotheses.candidates, result.plan.spreads, strict=True)
        ],
        "hypotheses": [
            {
                "name": hypothesis.name,
                "candidate": result.hypotheses.candidates[hypothesis.candidate].name,
                "rendering": result.hypotheses.renderings[hypothesis.rendering].name,
                "sampling": shown(result.hypotheses.samplings[hypothesis.sampling]),
                "rejected_after": standing.rejected,
                "log10_evidence_against": standing.capital / math.log(10.0),
                "best_bet": standing.by,
            }
            for hypothesis, standing in zip(each, result.standings, strict=True)
        ],
        "plan": plan_figures(result.hypotheses, result.plan),
    }


def plan_figures(hypotheses: Hypotheses, plan: Plan) -> dict[str, Any]:
    """Infinite is null."""
    names = [each.name for each in hypotheses.each]

    def by_name(values: Any) -> dict[str, dict[str, float | None]]:
        return {
            name: {other: finite(values[row, column]) for column, other in enumerate(names) if column != row}
            for row, name in enumerate(names)
        }

    return {
        "answers": plan.num_answers,
        "tokens": plan.num_tokens,
        "entropy": plan.entropy,
        "kinds": list(plan.kinds),
        "kl": by_name(plan.kl),
        "tokens_to_reject": by_name(plan.tokens),
        "tokens_to_reject_with_logprobs": by_name(plan.reported),
        "needed": {name: finite(plan.needed(hypotheses, row, False)) for row, name in enumerate(names)},
        "needed_with_logprobs": {name: finite(plan.needed(hypotheses, row, True)) for row, name in enumerate(names)},
    }


def finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
