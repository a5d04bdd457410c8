"""The whole: rounds of requests, their answers under every hypothesis, until the test decides. `lfm2np.vet`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

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
from lfm2np.oracle.report.report import Report
from lfm2np.oracle.vet.answers import ROUND, questions_of, requests_of, rounds_of, with_tokens
from lfm2np.oracle.vet.candidates import drawn_by, format_of, hypotheses_of, parse_sampling
from lfm2np.oracle.vet.evidence import Likelihoods, likelihoods_of, standings
from lfm2np.oracle.vet.vet_report import Vetted, report_of
from lfm2np.values import ProgressOf

ALPHA, MAX_TOKENS, TOKENS = 0.01, 32, 4000
MOST_SILENT = 4  # rounds without a usable answer
SCORING = "tokens"  # the stage that progress counts


def vet(target: str, candidates: Mapping[str, LoadedModel | str | Path], **options: Any) -> dict[str, Any]:
    """Which candidate answers: what `lfm2np vet --json` prints; "verdict" and "findings" say it in short.

    candidates  name -> directory, GGUF file or loaded model, the claim first
    options     of `vetted`
    """
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
    """Judges answers until they decide, or `tokens` of them are judged.

    target     as in lfm2np.check: an engine, or a file of its answers
    samplings  the first is requested ("temperature=1"); others are ways in which the provider may sample instead
    chat       use /v1/chat/completions: the provider lays out the prompts
    save       keeps answers as they come; those that it has are not requested again
    errors     RequestError for what can't be, TargetError for an engine that can't be run, or gives no usable answer
    """
    if not candidates or not 0.0 < alpha < 0.5:
        raise RequestError(f"alpha {alpha:g}, {len(candidates)} candidates: expected 0 to 0.5, and at least one")
    model, is_file = next(iter(candidates.values())), target.endswith(".jsonl") and ":" not in target
    requested = parse_sampling(samplings[0]) if samplings else SamplingParams()
    with ExitStack() as stack:
        if is_file:
            pairs = FileTarget(target).pairs()
            requested = requested if samplings or not pairs else drawn_by(pairs[0][0].params)
            rounds = (pairs[start : start + ROUND] for start in range(0, len(pairs), ROUND))
        else:
            kind = model.path, model.config.vocab_size, model.tokenizer, format_of(model)
            engine = stack.enter_context(closing(target_named(target, *kind, name, at_once, timeout, chat=chat)))
            transcript = None if save is None else stack.enter_context(Transcript(save))
            requests = requests_of(model, questions or questions_of(seed), requested, max_tokens)
            rounds = rounds_of(engine, requests, transcript)
        hypotheses = hypotheses_of(candidates, requested, samplings[1:])
        return report_of(judged(Vetted(hypotheses, alpha), rounds, tokens, place_of(place), progress))


def judged(
    result: Vetted, rounds: Iterator[list[Pair]], most: int, place: Place, progress: ProgressOf | None = None
) -> Vetted:
    """The result after as many rounds as it takes. TargetError if nothing can be judged."""
    parts, silent, model = list[Likelihoods](), 0, result.hypotheses[0].model
    for pairs in rounds:
        usable = [(request, with_tokens(request, answer, model)) for request, answer in pairs]
        result.left_out.update(answer.error for _, answer in usable if answer.error is not None)
        usable = [pair for pair in usable if pair[1].error is None]
        silent = 0 if usable else silent + 1
        if usable:
            parts.append(likelihoods_of(result.hypotheses, usable, place))
            result.standings, result.num_answers = (
                standings(result.hypotheses, parts, result.alpha),
                result.num_answers + len(usable),
            )
            result.num_tokens += sum(answer.num_tokens for _, answer in usable)
            result.num_reported += sum(answer.num_tokens for _, answer in usable if answer.logprobs is not None)
            if progress:
                progress(SCORING, min(result.num_tokens, most), most)
        if result.is_decided or result.num_tokens >= most or silent == MOST_SILENT:
            break
    if not parts:
        raise TargetError(f"no usable answer: {', '.join(result.left_out) or 'none came'}")
    return result
