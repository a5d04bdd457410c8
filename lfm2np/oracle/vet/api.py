"""`lfm2np.vet(...)`: the command as a function that returns plain data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.loading import load
from lfm2np.engine.work.place import Place
from lfm2np.errors import RequestError
from lfm2np.oracle.report.as_json import as_json
from lfm2np.oracle.vet.asking import Provider
from lfm2np.oracle.vet.hypotheses import (
    Candidate,
    Hypotheses,
    Rendering,
    hypotheses_of,
    parse_candidate,
    parse_sampling,
    read_template,
)
from lfm2np.oracle.vet.provider_answers import ReplyFile
from lfm2np.oracle.vet.questions import Question, open_questions
from lfm2np.oracle.vet.token_plan import Plan, planned
from lfm2np.oracle.vet.vet_report import report_of
from lfm2np.oracle.vet.vetting import PLANNING, Bounds, Session, Vetted, require_same_vocabulary, vetted
from lfm2np.values import ProgressOf

ALPHA, MAX_TOKENS, PLANNED = 0.01, 32, 16  # the last: answers of the plan
CLAIMED_SAMPLING = "temperature=1"
Paths = Mapping[str, str | Path | LoadedModel] | Sequence[str]


def vet(
    candidates: Paths,
    url: str | None = None,
    *,
    answers: str | Path | None = None,
    claim: str | None = None,
    samplings: Sequence[str] = (CLAIMED_SAMPLING,),
    system: str | None = None,
    templates: Sequence[str] = (),
    inserted: Sequence[str] = (),
    questions: Iterable[Question] | None = None,
    chat: bool = True,
    max_tokens: int = MAX_TOKENS,
    tokens: int = 4000,
    alpha: float = ALPHA,
    logprobs: bool = True,
    seed: int = 0,
    name: str | None = None,
    save: str | Path | None = None,
) -> dict[str, Any]:
    """Which candidate answers at an address, or gave the answers in a file: what `lfm2np vet --json` prints.

    "verdict" and "findings" say it in short, "figures" has the accepted candidate and all numbers.

    candidates  NAME -> directory, GGUF file or loaded model; or texts NAME=PATH[,kv=FORMAT]
    answers     a file of recorded answers, in place of a URL
    others      as the command's options: docs/engine/16-vet.md
    errors      RequestError, TargetError if there is no server, and those of `load`
    """
    hypotheses = all_hypotheses(candidates_of(candidates), claim, samplings, system, templates, inserted)
    provider = None
    if url is not None:
        provider = Provider(url, hypotheses.samplings[0], max_tokens, name, chat, logprobs)
    recorded = reply_file(answers, save)
    try:
        result = run(
            hypotheses,
            Bounds(tokens),
            provider,
            recorded,
            questions=None if questions is None else list(questions),
            system=system,
            chat=chat,
            max_tokens=max_tokens,
            alpha=alpha,
            logprobs=logprobs,
            seed=seed,
            keep=save is not None,
        )
    finally:
        if provider is not None:
            provider.close()
    return as_json(report_of(result))


def run(
    hypotheses: Hypotheses,
    bounds: Bounds,
    provider: Provider | None,
    recorded: ReplyFile | None,
    *,
    questions: Sequence[Question] | None = None,
    system: str | None = None,
    chat: bool = True,
    max_tokens: int = MAX_TOKENS,
    alpha: float = ALPHA,
    logprobs: bool = True,
    seed: int = 0,
    keep: bool = False,
    num_planned: int = PLANNED,
    places: Sequence[Place] | None = None,
    progress: ProgressOf | None = None,
    announce: Callable[[Plan], None] | None = None,
) -> Vetted:
    """The plan, then the test; `announce(plan)` comes between."""
    if provider is None and recorded is None:
        raise RequestError("nothing to judge: expected a URL or a file of answers")
    if not 0.0 < alpha < 0.5:
        raise RequestError(f"alpha {alpha:g}: expected a number between 0 and 0.5")
    plan = planned(
        hypotheses,
        of_plan(questions, None if provider else recorded, system, chat, seed, num_planned),
        max_tokens,
        alpha,
        seed,
        None if progress is None else lambda done, total: progress(PLANNING, done, total),
    )
    if announce is not None:
        announce(plan)
    telling = (question for question in open_questions(seed + 1, system, chat) if question.kind in plan.kinds)
    session = Session(hypotheses, plan, alpha, bounds, places, logprobs, progress)
    return vetted(session, telling if questions is None else iter(questions), provider, recorded, keep)


def of_plan(
    questions: Sequence[Question] | None,
    recorded: ReplyFile | None,
    system: str | None,
    chat: bool,
    seed: int,
    most: int,
) -> list[Question]:
    """Those that are to be asked or were; else open ones."""
    if questions is None and recorded is not None and recorded.replies:
        questions = [reply.question for reply in recorded.replies]
    if questions is None:
        return list(itertools.islice(open_questions(seed, system, chat), most))
    if not questions:
        raise RequestError("no questions: expected at least one")
    step = max(1, len(questions) // most)
    return list(questions[::step][:most])


def candidates_of(
    paths: Paths, load_named: Callable[[str, str], LoadedModel] = lambda name, path: load(path)
) -> list[Candidate]:
    """Two of one checkpoint, with different caches, share it. RequestError for another form; errors as in `load`."""
    if isinstance(paths, Mapping):
        return [Candidate(name, path if isinstance(path, LoadedModel) else load(path)) for name, path in paths.items()]
    loaded: dict[str, LoadedModel] = {}
    candidates = []
    for text in paths:
        name, path, kv = parse_candidate(text)
        if path not in loaded:
            loaded[path] = load_named(name, path)
        candidates.append(Candidate(name, loaded[path], kv))
    return candidates


def all_hypotheses(
    candidates: Sequence[Candidate],
    claim: str | None,
    samplings: Sequence[str],
    system: str | None,
    templates: Sequence[str],
    inserted: Sequence[str],
) -> Hypotheses:
    renderings = [] if system is None else [Rendering("without the system message", system=False)]
    renderings += [read_template(path) for path in templates]
    renderings += [Rendering(f"with a system message {text[:40]!r}", system=text) for text in inserted]
    views = [parse_sampling(text) for text in samplings or (CLAIMED_SAMPLING,)]
    hypotheses = hypotheses_of(candidates, claim, renderings, views)
    require_same_vocabulary(hypotheses)
    return hypotheses


def reply_file(answers: str | Path | None, save: str | Path | None) -> ReplyFile | None:
    """RequestError for both, or a file of answers that is not there."""
    if answers is not None and save is not None:
        raise RequestError("answers of a file and a file to save answers: expected one of them")
    if answers is not None and not Path(answers).is_file():
        raise RequestError(f"{answers}: no such file, expected one of answers")
    path = answers if answers is not None else save
    return None if path is None else ReplyFile(path)
