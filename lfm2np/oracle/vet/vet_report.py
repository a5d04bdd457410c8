"""A result as text and as JSON; neither holds an address's user, a key or a header."""

from __future__ import annotations

import math
from typing import Any

from lfm2np.oracle.reports.report_parts import aligned, visible
from lfm2np.oracle.vet.hypotheses import Hypotheses, shown
from lfm2np.oracle.vet.token_plan import Plan
from lfm2np.oracle.vet.vetting import Bounds, Outcome, Vetted

FORMAT_VERSION = 1
MANY = 10**7  # tokens that nobody asks for


def plan_text(hypotheses: Hypotheses, plan: Plan, bounds: Bounds, alpha: float) -> str:
    """What a verdict costs, by hypothesis: tokens until all others are rejected, if it is true."""
    lines = [
        f"plan: {plan.num_answers} answers of {hypotheses.claim.name}, {plan.num_tokens} sampled tokens, entropy "
        f"{plan.entropy:.2g} nats each; error at most {alpha:g}",
        "",
    ]
    rows: list[tuple[str, ...]] = [
        ("if it is", "tokens", "with log-probabilities", "hardest to tell from", "KL a token")
    ]
    for number, each in enumerate(hypotheses.each):
        others = hypotheses.rivals(number)
        if not others:
            continue
        hardest = max(others, key=lambda other: (float(plan.tokens[number, other]), -float(plan.kl[number, other])))
        needed = (plan.needed(hypotheses, number, with_reported) for with_reported in (False, True))
        rows.append(
            (each.name, *map(count_text, needed), hypotheses.each[hardest].name, f"{plan.kl[number, hardest]:.2g}")
        )
    lines += aligned(rows, range(len(rows[0])))
    if bounds.prompt_price or bounds.answer_price:
        most = min(plan.needed(hypotheses, 0, False), float(bounds.tokens))
        cost = bounds.cost_of(most / max(1.0, plan.answer_tokens) * plan.prompt_tokens, most)
        lines += ["", f"cost of {count_text(most)} tokens: {cost:.2g}"]
    return "\n".join(lines)


def as_text(result: Vetted) -> str:
    lines = [verdict_of(result), ""]
    judged = f"{result.num_tokens} tokens of {result.num_answers} answers, {result.num_reported} log-probabilities"
    lines.append(f"judged     {judged}; stopped: {result.stopped}")
    prompts = f"{result.prompt_tokens} tokens of prompts" if result.prompt_tokens else "prompt tokens not reported"
    cost = f"; cost {result.cost:.2g}" if result.cost else ""
    lines.append(f"received   {result.answer_tokens} generated tokens; {prompts}{cost}")
    for why, count in result.left_out.most_common():
        lines.append(f"left out   {count} answers: {visible(why)}")
    lines += prompt_hint(result)
    rows: list[tuple[str, ...]] = [("hypothesis", "verdict", "evidence against", "best bet against it")]
    for each, standing in zip(result.hypotheses.each, result.standings, strict=True):
        verdict = "not rejected" if standing.rejected is None else f"rejected after {standing.rejected} tokens"
        rows.append((each.name, verdict, f"10^{standing.capital / math.log(10.0):.1f}", standing.by or "none"))
    return "\n".join([*lines, "", *aligned(rows, range(len(rows[0])))])


def prompt_hint(result: Vetted) -> list[str]:
    """Where the server counts other prompts than the claim has."""
    if not result.more_prompt or set(result.more_prompt) == {0}:
        return []
    (more, count), *_ = result.more_prompt.most_common()
    words = f"{abs(more)} tokens {'more' if more > 0 else 'less'} than the claim's" if more else "as the claim's"
    total = result.more_prompt.total()
    return [f"prompts    the server counts {words} for {count} of {total}: it may lay them out or split them otherwise"]


def verdict_of(result: Vetted) -> str:
    """One line."""
    names = [result.hypotheses.each[number].name for number in result.left]
    claim, error = result.hypotheses.claim.name, f"(error at most {result.alpha:g})"
    if result.outcome is Outcome.NONE:
        return f"NONE OF THESE {error}"
    if result.accepted is not None:
        name = result.hypotheses.each[result.accepted].name
        return f"{'ACCEPTED' if result.exit_code == 0 else f'NOT {claim} BUT'}: {name} {error}"
    if result.exit_code == 1:
        return f"NOT {claim}: one of {'; '.join(names)}, or none of these {error}"
    rejected = len(result.standings) - len(names)
    return f"UNDECIDED after {result.num_tokens} tokens: {'; '.join(names)} ({rejected} rejected)"


def as_json(result: Vetted) -> dict[str, Any]:
    each = result.hypotheses.each
    accepted = None if result.accepted is None else each[result.accepted].name
    return {
        "format_version": FORMAT_VERSION,
        "verdict": str(result.outcome),
        "accepted": accepted,
        "exit_code": result.exit_code,
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
        "plan": plan_json(result.hypotheses, result.plan),
    }


def plan_json(hypotheses: Hypotheses, plan: Plan) -> dict[str, Any]:
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


def count_text(tokens: float) -> str:
    """Two digits: more is not known."""
    if tokens > MANY:
        return "never" if math.isinf(tokens) else f"over {MANY:,}"
    rounded = float(f"{max(1.0, tokens):.2g}")
    return f"{round(rounded):,}"
