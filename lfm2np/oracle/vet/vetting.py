"""The whole: rounds of answers under every hypothesis, until the test decides, and the report. `lfm2np.vet`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.loading import load
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import AnyPlace, Place, place_of
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.file_target import FileTarget, Transcript
from lfm2np.oracle.engines.named import target_named
from lfm2np.oracle.engines.records import Pair
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.report.as_json import as_json
from lfm2np.oracle.report.report import OPEN, RIGHT, WRONG, Finding, Report, Section, Table
from lfm2np.oracle.vet.answers import ROUND, questions_of, requests_of, rounds_of, with_tokens
from lfm2np.oracle.vet.evidence import (
    Hypothesis,
    Likelihoods,
    Standing,
    hypotheses_of,
    joined_likelihoods,
    likelihoods_of,
    parse_sampling,
    require_different,
    standings,
)
from lfm2np.values import ProgressOf

ALPHA, MAX_TOKENS, TOKENS = 0.01, 32, 4000
MOST_SILENT = 4  # rounds without a usable answer
JUDGING = "tokens"  # the stage that progress counts


def vet(target: str, candidates: Mapping[str, LoadedModel | str | Path], **options: Any) -> dict[str, Any]:
    """What `lfm2np vet --json` prints; "verdict" and "findings" say it in short. Arguments and errors: see `vetted`;
    a candidate may be a path, too, with the errors of `load`."""
    loaded = {name: each if isinstance(each, LoadedModel) else load(each) for name, each in candidates.items()}
    return as_json(vetted(target, loaded, **options))


def vetted(
    target: str,
    candidates: Mapping[str, LoadedModel],
    samplings: Sequence[str] = (),
    *,
    chat: bool = False,
    questions: Sequence[str] | None = None,
    max_tokens: int = MAX_TOKENS,
    tokens: int = TOKENS,
    alpha: float = ALPHA,
    seed: int = 0,
    name: str | None = None,
    timeout: float = 60.0,
    at_once: int | None = None,
    save: str | Path | None = None,
    place: AnyPlace = None,
    progress: ProgressOf | None = None,
) -> Report:
    """Judges answers until they decide which candidate gave them, or `tokens` of them are judged.

    target      as in lfm2np.check: an engine, or a file of its answers
    candidates  by name, the claim first
    samplings   the first is requested ("temperature=1"); others are ways in which the provider may sample instead
    chat        use /v1/chat/completions: the provider lays out the prompts
    save        keeps answers, round by round; those that it has are not requested again
    errors      RequestError for what can't be, TargetError for an engine that can't be run, or gives no usable answer
    """
    if not candidates or not 0.0 < alpha < 0.5:
        raise RequestError(f"alpha {alpha:g}, {len(candidates)} candidates: expected 0 to 0.5, and at least one")
    model, is_file = next(iter(candidates.values())), target.endswith(".jsonl") and ":" not in target
    pairs = FileTarget(target).pairs() if is_file else []
    requested = parse_sampling(samplings[0]) if samplings else pairs[0][0].params if pairs else SamplingParams()
    hypotheses = hypotheses_of(candidates, requested, samplings[1:])
    with ExitStack() as stack:
        rounds: Iterable[list[Pair]] = (pairs[start : start + ROUND] for start in range(0, len(pairs), ROUND))
        if not is_file:
            kind = model.path, model.config.vocab_size, model.tokenizer, hypotheses[0].format
            engine = stack.enter_context(closing(target_named(target, *kind, name, at_once, timeout, chat=chat)))
            transcript = None if save is None else stack.enter_context(Transcript(save))
            if transcript:
                stack.callback(transcript.end)  # after an interrupt too: fewer answers are a file as good
            as_text = not chat and not engine.probe().takes_token_ids
            requests = requests_of(model, questions or questions_of(seed), requested, max_tokens, as_text)
            rounds = rounds_of(engine, requests, transcript)
        return judged(hypotheses, rounds, tokens, alpha, place_of(place), progress)


def judged(
    hypotheses: Sequence[Hypothesis],
    rounds: Iterable[list[Pair]],
    most: int,
    alpha: float,
    place: Place,
    progress: ProgressOf | None = None,
) -> Report:
    """After as many rounds as it takes. TargetError if nothing can be judged, RequestError for equal candidates."""
    seen: Likelihoods | None = None
    results, left_out, silent = list[Standing](), Counter[str](), 0
    for pairs in rounds:
        answers = [(request, with_tokens(request, answer, hypotheses[0].model)) for request, answer in pairs]
        usable = [pair for pair in answers if pair[1].error is None]
        left_out.update(answer.error for _, answer in answers if answer.error is not None)
        silent = 0 if usable else silent + 1
        if usable:
            new = likelihoods_of(hypotheses, usable, place)
            seen = new if seen is None else joined_likelihoods([seen, new])
            require_different(hypotheses, seen)
            results, count = standings(hypotheses, seen, alpha), len(seen.last)
            decision = decided(results)
            if progress:
                progress(JUDGING, min(count, most), most)
            if count >= most or decision.accepted or not decision.left:
                break
        elif silent == MOST_SILENT:
            break
    if seen is None:
        raise TargetError(f"no usable answer: {', '.join(left_out) or 'none came'}")
    return report_of(results, seen, alpha, left_out)


class Decision(NamedTuple):
    """What the standings of all hypotheses say.

    left      those that are not rejected, the one with the least against it first
    accepted  whether that is the only candidate that is left, of several, and what was reported no other model's
    more      tokens until all other candidates are rejected, if that is true; infinite: never
    """

    verdict: str
    left: Sequence[Standing] = ()
    accepted: bool = False
    more: float = 0.0


def decided(results: Sequence[Standing]) -> Decision:
    """Candidates count, not their sampling, which a provider is free to choose."""
    left = sorted(
        (standing for standing in results if standing.rejected_after is None), key=lambda standing: standing.log_e
    )
    if not left:
        return Decision("NONE OF THESE")
    number, claim = results.index(left[0]), results[0].hypothesis.model
    rivals = [standing for standing in results if standing.hypothesis.model is not left[0].hypothesis.model]
    more = [standing.more[number] for standing in rivals if standing.rejected_after is None]
    accepted = bool(rivals) and not more and any(standing.fits_after is not None for standing in left)
    if all(standing.hypothesis.model is not claim for standing in left):
        verdict = "NOT THE CLAIM"
    else:
        verdict = "ACCEPTED" if accepted else "UNDECIDED"
    return Decision(verdict, left, accepted, max(more, default=0.0))


def report_of(results: Sequence[Standing], seen: Likelihoods, alpha: float, left_out: Counter[str]) -> Report:
    decision, count, num_reported = decided(results), len(seen.last), int(np.isfinite(seen.errors[0, 0]).sum())
    header = ("hypothesis", "e-value against it", "most of it by", "rejected after")
    rows = [
        [each.hypothesis.name, f"10^{each.log_e / math.log(10.0):.1f}", each.by, each.rejected_after or "not rejected"]
        for each in results
    ]
    return Report(
        command="vet",
        verdict=decision.verdict,
        exit_code={"ACCEPTED": RIGHT, "UNDECIDED": OPEN}.get(decision.verdict, WRONG),
        findings=[Finding("hypothesis", because(decision, results[0].hypothesis.name, alpha))],
        facts={
            "claim": results[0].hypothesis.name,
            "judged": f"{count} tokens of {int(seen.last.sum())} answers, {num_reported} with log-probabilities",
            "threshold": f"an e-value of {1 / alpha:g}, which that of a true hypothesis reaches with a probability of "
            f"at most {alpha:g} (Ville's inequality)",
        },
        next_steps=[next_step(decision, results, count)] if decision.verdict == "UNDECIDED" else [],
        not_tested=[
            *(f"{number} answers left out: {why}" for why, number in left_out.most_common()),
            *(["checkpoints off the list: one near a candidate passes for it"] if decision.accepted else []),
        ],
        sections=[Section("Hypotheses", [Table("", header, rows, range(len(header)), len(rows))])],
        figures={
            "accepted": decision.left[0].hypothesis.name if decision.accepted else None,
            "tokens": count,
            "reported": num_reported,
            "more_tokens": decision.more,
            "hypotheses": [
                each._asdict() | {"hypothesis": each.hypothesis.name, "sha256": each.hypothesis.model.sha256}
                for each in results
            ],
        },
    )


def because(decision: Decision, claim: str, alpha: float) -> str:
    """Which it is, as far as that is known, and at what error."""
    names = "; ".join(standing.hypothesis.name for standing in decision.left)
    if decision.verdict == "UNDECIDED":
        return f"not rejected: {names}"
    if decision.accepted:
        others = "" if decision.verdict == "ACCEPTED" else f", not {claim}"
        words = f"of the candidates it is {decision.left[0].hypothesis.name}{others}"
    else:
        words = f"not {claim}: one of {names}, or none of these" if names else "all hypotheses are rejected"
    return f"{words} (error at most {alpha:g})"


def next_step(decision: Decision, results: Sequence[Standing], count: int) -> str:
    """Where it is undecided."""
    if len({standing.hypothesis.model for standing in results}) == 1:
        return "name another --candidate: one alone is never accepted"
    if math.isinf(decision.more):
        return "these are closer than rounding errors, no number of tokens tells them apart: leave out a --candidate"
    more, name = max(1, round(decision.more)), decision.left[0].hypothesis.name
    return f"some {more:,} more tokens tell these apart, if it is {name}: --tokens {count + more}"
