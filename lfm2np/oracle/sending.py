"""Sends a check's requests to an engine, and those that its answers lead to.

workloads -> target -> transcript, and behind them: what an answer that ended early lacks, stop strings from its text,
samples behind an end of sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lfm2np.engine.loading import Model
from lfm2np.oracle import agreement
from lfm2np.oracle.coverage import CONTINUES, MOST_TIMES, continuations
from lfm2np.oracle.engines.file_target import Transcript
from lfm2np.oracle.engines.records import DEAD, Pair, Request, Trace, changed, greedy, samples_of
from lfm2np.oracle.engines.target import Abilities, Target, TargetError, in_flight
from lfm2np.oracle.report.report import plural
from lfm2np.oracle.workloads import SAMPLES, Writer, noted, noted_behind, rounds
from lfm2np.values import ProgressOf

AFTER_END, END_SEED = 4, 4000  # tokens of samples that have to go on behind an end-of-sequence token, and their seed
While = Callable[[Sequence[Pair]], bool]  # given all answers so far, after each round: whether to go on


def silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""


def always(pairs: Sequence[Pair]) -> bool:
    """Sends every request."""
    return True


@dataclass(frozen=True)
class Collected:
    """Every answer; the engine may be closed."""

    abilities: Abilities
    pairs: tuple[Pair, ...]
    not_put: tuple[str, ...]  # ids of requests without a text, which this engine needs
    left: int = 0  # requests that were not needed after a wrong answer


def send_all(
    model: Model,
    target: Target,
    at_once: int | None = None,
    seed: int = 0,
    cases: Sequence[str] | None = None,
    transcript: Transcript | None = None,
    progress: ProgressOf = silent,
    on: While = always,
    max_model_len: int | None = None,
) -> Collected:
    """Sends the workloads, as long as `on` says so.

    at_once     most requests in flight together; None: as many as the engine has slots
    transcript  keeps the answers to each trace; requests that it has an answer to are not sent again
    max_model_len  of long requests: see workloads.Writer
    errors      TargetError if the engine can't be run, or is gone; with what was received before
    """
    abilities = target.probe()
    together = max(1, min(in_flight(at_once, abilities.slots), abilities.at_once))
    writer = Writer(model.config, model.tokenizer if model.has_tokenizer else None, together, seed, max_model_len)
    split = [possible_requests(trace, abilities) for trace in rounds(writer, cases)]
    not_put = [request.request_id for _, impossible in split for request in impossible]
    plan = noted(possible for possible, _ in split if possible is not None)
    orders = itertools.count(sum(len(trace.requests) for trace in plan))  # of requests that answers lead to
    pairs: list[Pair] = []
    try:
        for done, trace in enumerate(plan):
            progress("asking", done, len(plan))
            pairs += whole_answers(model, target, trace, abilities, transcript, orders)
            if not on(pairs):
                break
        else:
            behind = stop_rounds(model, pairs, abilities, orders), past_ends(model, pairs, abilities, orders)
            for trace in chain(*behind):
                pairs += answered(target, trace, transcript)
    except TargetError as problem:
        raise TargetError(f"{problem}; {received(len(pairs), transcript)}") from None
    progress("asking", len(plan), len(plan))
    if transcript:
        transcript.end()
    every = {sample.request_id for trace in plan for request in stayed(trace) for sample in samples_of(request)}
    return Collected(abilities, tuple(pairs), tuple(not_put), len(every - {request.request_id for request, _ in pairs}))


def received(count: int, transcript: Transcript | None) -> str:
    """What is left of a check whose engine is gone."""
    if transcript is None:
        return f"lost: {plural(count, 'answer')} received before; --save FILE keeps them, and goes on from there"
    kept = plural(sum(answer.error is None or answer.is_refuted for _, answer in transcript.pairs()), "answer")
    return f"{kept} received so far are in {transcript.path}: the same command goes on from there"


def stayed(trace: Trace) -> list[Request]:
    """Those that are not cancelled: only their answers are judged."""
    return [request for request in trace.requests if request.abort_after is None]


def possible_requests(trace: Trace, abilities: Abilities) -> tuple[Trace | None, list[Request]]:
    """The trace without what the engine can't do (requests to abort included; None if nothing is left), and requests
    that it can't take."""
    impossible = [
        request for request in trace.requests if not abilities.takes_token_ids and request.prompt_text is None
    ]
    is_scored = {} if abilities.tells_prompt_logprobs else {"prompt_logprobs": None}
    requests = [
        changed(request, **is_scored)
        for request in trace.requests
        if request not in impossible
        and (abilities.takes_seeds or request.params.seed is None)
        and (abilities.takes_samples or request.params.n == 1)
        and set(request.processors) <= set(abilities.processors)
        and (abilities.takes_streams or request.case != "streams")
        and (abilities.takes_stops or request.case != "stops")
        and (abilities.can_abort or request.abort_after is None)
    ]
    return Trace(tuple(requests)) if requests else None, impossible


def whole_answers(
    model: Model,
    target: Target,
    trace: Trace,
    abilities: Abilities,
    transcript: Transcript | None,
    orders: Iterator[int],
) -> list[Pair]:
    """The answers to a trace, and continuations of those that ended early."""
    tokenizer = model.tokenizer if model.has_tokenizer else None
    newest = answered(target, trace, transcript)
    pairs = list(newest)
    for _ in range(MOST_TIMES):
        more = continuations(newest, tokenizer, abilities.takes_token_ids)
        if not more:
            break
        newest = answered(target, noted_behind(more, orders), transcript)
        pairs += newest
    return pairs


def stop_rounds(model: Model, pairs: Sequence[Pair], abilities: Abilities, orders: Iterator[int]) -> Iterator[Trace]:
    """The requests of the case "stops" again, each with a stop string from its answer; the last one's is at its end."""
    plain = [pair for pair in pairs if pair[0].case == "stops" and CONTINUES not in pair[0].tags]
    for request, answer in plain if abilities.takes_stops else ():
        stop = agreement.stop_string(model.tokenizer, answer.token_ids or (), request is plain[-1][0])
        if stop is not None:
            seen = {"prefix": "warm", "seen": len(request.prompt_token_ids)}
            name = f"{request.request_id}:stop"
            yield noted_behind([changed(request, request_id=name, stop=stop, tags=seen)], orders)


def past_ends(model: Model, pairs: Sequence[Pair], abilities: Abilities, orders: Iterator[int]) -> Iterator[Trace]:
    """Several samples from where a greedy answer had an end-of-sequence token and went on: each sample has to go on."""
    chats = [(request, answer) for request, answer in pairs if request.case == SAMPLES and not request.is_sampled]
    for request, answer in chats if abilities.takes_samples and abilities.takes_token_ids else ():
        ids = answer.token_ids or ()
        end = next((index for index, token in enumerate(ids[:-1]) if token in model.config.eos_token_ids), None)
        if end is not None and CONTINUES not in request.tags:
            prompt = (*request.prompt_token_ids, *ids[:end])
            tags = {"case": SAMPLES, "length": len(prompt), "prefix": "warm", "seen": len(prompt)}
            drawn = {"temperature": 1.0, "seed": END_SEED, "n": 3}
            yield noted_behind([greedy(f"{request.request_id}:end", prompt, AFTER_END, tags=tags, **drawn)], orders)


def answered(target: Target, trace: Trace, transcript: Transcript | None = None) -> list[Pair]:
    """Requests and answers of a trace, without the cancelled; in the transcript when all are there.

    A trace whose answers are all known is not sent again. Of one that broke off all requests are, as the others are
    company; what was known stays. TargetError if the engine is gone.
    """
    judged = [sample for request in stayed(trace) for sample in samples_of(request)]
    recorded = {sample.request_id: transcript.known(sample) for sample in judged} if transcript else {}
    known = {name: answer for name, answer in recorded.items() if answer is not None and answer.error is None}
    if len(known) == len(judged):
        return [(sample, known[sample.request_id]) for sample in judged]
    wanted = {sample.request_id for sample in judged} - known.keys()
    pairs = target.play(trace).pairs(trace)
    if all(answer.kind == DEAD for _, answer in pairs):
        raise TargetError(str(pairs[0][1].error))
    for sample, answer in pairs:
        plain = replace(answer, sent=None, first=None, ended=None)
        if transcript is not None and sample.request_id in wanted and transcript.known(sample) != plain:
            transcript.append(sample, plain)
    known = {request.request_id: answer for request, answer in pairs} | known
    return [(sample, known[sample.request_id]) for sample in judged]
