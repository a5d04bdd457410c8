"""A whole check: send requests to an engine, score the answers, give the verdict. Data flows one way:

workloads -> target -> transcript -> judge (truth, noise) -> total -> report

Answers may be judged while others are still to come: see While.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from queue import SimpleQueue
from typing import Any

from lfm2np.engine.loading import Model
from lfm2np.engine.work.place import AnyPlace, place_of
from lfm2np.errors import Lfm2npError, RequestError
from lfm2np.oracle import agreement
from lfm2np.oracle.causes.findings import CERTAIN, Repeats, findings
from lfm2np.oracle.causes.wrong_constants import reading_cause
from lfm2np.oracle.coverage import CONTINUES, MOST_TIMES, continuations, not_tested, without_vain
from lfm2np.oracle.engines.file_target import Transcript
from lfm2np.oracle.engines.records import Answer, Ask, failed
from lfm2np.oracle.engines.target import Abilities, Arrived, Target, in_flight
from lfm2np.oracle.engines.validate import validate
from lfm2np.oracle.factors import OFF
from lfm2np.oracle.judging.drawn import drawn_wrongly
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.noise import DRAWS, STAGES
from lfm2np.oracle.judging.position import is_wrong
from lfm2np.oracle.judging.routes import fitted
from lfm2np.oracle.judging.scored import Known, Pair
from lfm2np.oracle.judging.verdict import WRONG, Position, is_in_doubt
from lfm2np.oracle.total import Total, total, with_causes
from lfm2np.oracle.workloads import LONG, SAMPLES, Round, Writer, noted, noted_behind, rounds
from lfm2np.truth.config import ModelConfig
from lfm2np.values import ProgressOf

SCORING = "scoring"  # the progress that counts tokens
MOST_ROUNDS = 4  # that are repeated, the smallest of those with a wrong request
AFTER_END, END_SEED = 4, 4000  # tokens of samples that have to go on behind an end-of-sequence token, and their seed
TIMES = 5  # each; once more before, so that what a cache may have is there each time
TOKENS_AT_ONCE = 256  # that are scored ahead: more than one answer at once while there are as many
LEAST_JUDGED = 64  # tokens of the first answers that are judged before the others are there

While = Callable[[Sequence[Pair]], bool]  # given all answers so far, after each round: whether to go on


def silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""


def always(pairs: Sequence[Pair]) -> bool:
    """Sends every request."""
    return True


@dataclass(frozen=True)
class Cause:
    """Where a wrong request first goes wrong: it ran again with its activations recorded, see recorders/locating.py."""

    recorder: str  # the target that was recorded
    ask: str  # id of the request
    prompts: tuple[tuple[int, ...], ...]  # what ran together,
    request: int  # which of them it is,
    max_tokens: int  # and how far it ran
    beside: bool  # whether it has to run beside the others to be wrong
    finding: Mapping[str, Any] | None  # the first wrong tensor: the fields of locate.Finding; None: nothing was wrong
    lines: tuple[str, ...]  # in words

    @property
    def reason(self) -> str | None:
        """One line for a verdict."""
        if self.finding is None:
            return None
        where = "" if self.finding["layer"] is None else f"layer {self.finding['layer']}, "
        return f"first wrong operation: {where}{self.finding['operation']} ({self.finding['name']})"


@dataclass(frozen=True)
class Checked:
    """What a check saw, and its verdict."""

    abilities: Abilities
    format: str
    pairs: tuple[Pair, ...]
    not_put: tuple[str, ...]  # ids of asks without a text, which this engine needs
    positions: tuple[Position, ...]
    total: Total
    cause: Cause | None = None  # where it goes wrong, if that was located
    why_format: str = ""  # where it was not declared
    left: int = 0  # asks that were not needed after a wrong answer
    repeats: tuple[Repeats, ...] = ()  # of wrong requests, where the first cause is not certain

    @property
    def not_tested(self) -> list[str]:
        """What the verdict does not cover, in words."""
        words = not_tested(self.abilities, self.pairs, self.not_put, self.left, self.positions)
        if self.total.constants is None and self.total.rms > 0.0 and self.total.verdict not in WRONG:
            words.append(f"constants that are off by less than {self.format} rounds (--constants)")
        return words


@dataclass(frozen=True)
class Asked:
    """All answers of an engine, which is not needed any more."""

    abilities: Abilities
    pairs: tuple[Pair, ...]
    not_put: tuple[str, ...]  # as in Checked
    left: int = 0  # as in Checked


def check(
    model: Model,
    target: Target,
    format_name: str,
    at_once: int | None = None,
    seed: int = 0,
    cases: Sequence[str] | None = None,
    transcript: Transcript | None = None,
    progress: ProgressOf = silent,
    executor: AnyPlace = None,
) -> Checked:
    """Sends the workloads and judges the answers: `ask_all`, then `judged`.

    The answers are scored here or on a concurrent.futures.Executor; a work.Place may keep a record. TargetError if
    the engine can't be run.
    """
    asked = ask_all(model, target, at_once, seed, cases, transcript, progress)
    known = Known(place=place_of(executor))
    result = judged(model, asked.abilities, format_name, asked.pairs, asked.not_put, progress, known)
    return repeated(model, target, result, known) if needs_repeats(result) else result


def ask_all(
    model: Model,
    target: Target,
    at_once: int | None = None,
    seed: int = 0,
    cases: Sequence[str] | None = None,
    transcript: Transcript | None = None,
    progress: ProgressOf = silent,
    on: While = always,
    max_model_len: int | None = None,
    announce: Callable[[Sequence[Ask]], None] = lambda asks: None,
) -> Asked:
    """Sends the workloads, as long as `on` says so.

    at_once     most requests in flight together; None: as many as the engine has slots
    transcript  keeps each answer as it comes; requests that it has an answer to are not sent again
    max_model_len  of long requests: see workloads.Writer
    announce    gets all requests before the first is sent
    errors      TargetError if the engine can't be run
    """
    abilities = target.probe()
    together = max(1, min(in_flight(at_once, abilities.slots), abilities.at_once))
    writer = Writer(model.config, model.tokenizer if model.has_tokenizer else None, together, seed, max_model_len)
    split = [possible_asks(batch, abilities) for batch in rounds(writer, cases)]
    not_put = [ask.id for _, impossible in split for ask in impossible]
    plan = noted(possible for possible, _ in split)
    announce([ask for batch in plan for ask in batch.asks])
    orders = itertools.count(sum(len(batch.asks) for batch in plan))  # of requests that answers lead to
    pairs: list[Pair] = []
    for done, batch in enumerate(plan):
        progress("asking", done, len(plan))
        pairs += whole_answers(model, target, batch, abilities, transcript, orders)
        if not on(pairs):
            break
    else:
        for batch in chain(stop_rounds(model, pairs, abilities, orders), past_ends(model, pairs, abilities, orders)):
            pairs += answered(target, batch, transcript)
    progress("asking", len(plan), len(plan))
    if transcript:
        transcript.end()
    every = [ask.id for batch in plan for ask in batch.asks if ask.id not in batch.aborted]
    return Asked(abilities, tuple(pairs), tuple(not_put), len(set(every) - {ask.id for ask, _ in pairs}))


def until_wrong(model: Model, format_name: str, known: Known) -> While:
    """Judges the new answers whenever the number of tokens has doubled; ends the check at a wrong one."""
    done = 0

    def on(pairs: Sequence[Pair]) -> bool:
        nonlocal done
        before, now = num_tokens(pairs[:done]), num_tokens(pairs)
        if now < max(LEAST_JUDGED, 2 * before):
            return True
        from_here = 0 if model.config.sparse_layers else done  # in a mixture all answers count for each
        new = [(ask, fitting(ask, answer, model.config)) for ask, answer in pairs[from_here:]]
        done = len(pairs)
        return not (any(answer.refuted for _, answer in new) or is_wrong(judge(model, format_name, new, known=known)))

    return on


@contextlib.contextmanager
def scored_ahead(model: Model, format_name: str, known: Known) -> Iterator[While]:
    """A thread computes what `known` lacks of the answers so far, while later requests run; for engines in separate
    processes. Nothing else may use `known` meanwhile. Long requests are left: together they cost one prefill.

    At the end and after an error the running computation is waited for and no other starts; an interrupt does not wait.
    Errors in the thread are ignored here: they occur again, and are raised, when the answers are judged.
    """
    waiting: SimpleQueue[Sequence[Pair]] = SimpleQueue()
    ended, taken = threading.Event(), 0

    def on(pairs: Sequence[Pair]) -> bool:
        nonlocal taken
        new = [(ask, fitting(ask, answer, model.config)) for ask, answer in pairs[taken:]]
        waiting.put([pair for pair in new if pair[0].case != LONG])
        taken = len(pairs)
        return True

    def compute() -> None:
        while not ended.is_set():
            pairs = list(waiting.get())
            while num_tokens(pairs) < TOKENS_AT_ONCE and not waiting.empty():
                pairs += waiting.get()
            try:
                if not ended.is_set():
                    judge(model, format_name, pairs, known=known)
            except Lfm2npError:
                return

    thread = threading.Thread(target=compute, name="lfm2np-ahead", daemon=True)
    thread.start()

    is_interrupted = False
    try:
        yield on
    except KeyboardInterrupt:
        is_interrupted = True
        raise
    finally:
        ended.set()
        waiting.put([])
        if not is_interrupted:
            thread.join()


def as_far_as_needed(pairs: Sequence[Pair], on: While) -> Sequence[Pair]:
    """Of complete answers, those that `on` would have asked for."""
    return next((pairs[:count] for count in range(1, len(pairs)) if not on(pairs[:count])), pairs)


def num_tokens(pairs: Sequence[Pair]) -> int:
    return sum(len(ask.prompt_token_ids) + len(answer.token_ids or ()) for ask, answer in pairs)


def judged(
    model: Model,
    abilities: Abilities,
    format_name: str,
    pairs: Sequence[Pair],
    not_put: Sequence[str] = (),
    progress: ProgressOf = silent,
    known: Known | None = None,
    every_constant: bool = False,
) -> Checked:
    """The verdict on answers, of this run or recorded earlier. `every_constant` as in total."""

    def scoring(done: int, count: int) -> None:
        progress(SCORING, done, count)

    pairs = [(ask, fitting(ask, answer, model.config)) for ask, answer in pairs]
    pairs = agreement.without_refusals(without_vain(pairs))
    known = Known() if known is None else known
    positions = judge(model, format_name, pairs, scoring, known)
    if not is_wrong(positions) and is_in_doubt(positions, OFF / math.sqrt(len(DRAWS) / len(STAGES[0]))):
        positions = judge(model, format_name, pairs, scoring, known, stages=[DRAWS])
    tokenizer = model.tokenizer if model.has_tokenizer else None
    drawn = drawn_wrongly(model, pairs, positions, known)
    more = dict([drawn] if drawn else [])
    pairs = agreement.with_mismatches(pairs, positions, tokenizer, model.config.eos_token_ids, more)
    verdict = total(model, format_name, pairs, positions, scoring, known, every_constant)
    if reading := reading_cause(model, format_name, pairs, positions):
        verdict = with_causes(verdict, [reading])
    if not positions and abilities.refused:  # why nothing could be judged
        verdict = replace(verdict, reasons=(*verdict.reasons, f"probed as {'; '.join(abilities.refused)}"))
    return Checked(abilities, format_name, tuple(pairs), tuple(not_put), tuple(positions), verdict)


def needs_repeats(result: Checked) -> bool:
    """Whether it is wrong, and repeats may show more of the cause."""
    causes = result.total.causes
    if causes and causes[0].sure == CERTAIN:
        return False
    return bool(wrong_stops(result)) or (bool(causes) and any(position.is_wrong for position in result.positions))


def wrong_stops(result: Checked) -> set[str]:
    """Ids of requests with a stop string whose answers no right engine gives."""
    return {ask.id for ask, answer in result.pairs if ask.stop and answer.refuted}


def repeated(model: Model, target: Target, result: Checked, known: Known) -> Checked:
    """The result with repeats of wrong requests, each beside the same requests as before; MOST_ROUNDS at most.

    Rounds with cancelled requests can't be repeated: it is not known when those ended.
    """
    wrong = {position.ask.id for position in result.positions if position.is_wrong} | wrong_stops(result)
    plain = [pair for pair in result.pairs if pair[0].stop is None]
    companies: dict[tuple[int, int], list[Ask]] = {}
    for ask, _ in result.pairs:
        order, place = int(ask.factors.get("order", 0)), int(ask.factors.get("place", 0))
        companies.setdefault((order - place, int(ask.factors.get("together", 1))), []).append(ask)
    whole = [asks for (_, together), asks in companies.items() if len(asks) == together]
    whole = [asks for asks in whole if any(ask.id in wrong for ask in asks)]
    repeats: list[Repeats] = []
    for asks in sorted(whole, key=len)[:MOST_ROUNDS]:
        failed = failures(model, target, result.format, asks, plain, known)
        for ask in asks:
            if ask.id in wrong:
                is_beside = len(asks) > 1
                alone = failures(model, target, result.format, [ask], plain, known)[ask.id] if is_beside else None
                repeats.append(Repeats(ask.id, failed[ask.id], TIMES, alone))
    causes = findings(result.positions, repeats) or result.total.causes
    return replace(result, repeats=tuple(repeats), total=with_causes(result.total, causes))


def failures(
    model: Model, target: Target, format_name: str, asks: Sequence[Ask], plain: Sequence[Pair], known: Known
) -> dict[str, int]:
    """How often each is wrong when these are sent together TIMES times, after one run to fill caches.

    plain  answers without a stop string, with which those that have one must agree
    """
    counts = dict.fromkeys([ask.id for ask in asks], 0)
    for turn in range(1 + TIMES):
        for ask, answer in zip(asks, target.answer(asks), strict=True):
            if turn:
                pair = ask, fitting(ask, answer, model.config)
                is_refuted = bool(pair[1].refuted) or misses_its_stop(model, pair, plain)
                counts[ask.id] += is_refuted or is_wrong(judge(model, format_name, [pair], known=known))
    return counts


def misses_its_stop(model: Model, pair: Pair, plain: Sequence[Pair]) -> bool:
    return pair[0].stop is not None and bool(agreement.stop_mismatches([*plain, pair], model.tokenizer))


def possible_asks(batch: Round, abilities: Abilities) -> tuple[Round, list[Ask]]:
    """The round without what the engine can't do (requests to abort included), and requests that it can't take."""
    impossible = [ask for ask in batch.asks if not abilities.takes_token_ids and ask.prompt_text is None]
    asks = [
        replace(ask, prompt_logprobs=ask.prompt_logprobs and abilities.tells_prompt_logprobs)
        for ask in batch.asks
        if ask not in impossible
        and (abilities.takes_seeds or ask.seed is None)
        and (abilities.takes_samples or ask.samples == 1)
        and (abilities.takes_streams or ask.case != "streams")
        and (abilities.takes_stops or ask.case != "stops")
        and (abilities.can_abort or ask.id not in batch.aborted)
    ]
    return Round(tuple(asks), tuple(ask.id for ask in asks if ask.id in batch.aborted)), impossible


def whole_answers(
    model: Model,
    target: Target,
    batch: Round,
    abilities: Abilities,
    transcript: Transcript | None,
    orders: Iterator[int],
) -> list[Pair]:
    """The answers of a round, and continuations of those that ended early."""
    tokenizer = model.tokenizer if model.has_tokenizer else None
    newest = answered(target, batch, transcript)
    pairs = list(newest)
    for _ in range(MOST_TIMES):
        more = continuations(newest, tokenizer, abilities.takes_token_ids)
        if not more:
            break
        newest = answered(target, noted_behind(more, orders), transcript)
        pairs += newest
    return pairs


def stop_rounds(model: Model, pairs: Sequence[Pair], abilities: Abilities, orders: Iterator[int]) -> Iterator[Round]:
    """The requests of the case "stops" again, each with a stop string from its answer; the last one's is at its end."""
    plain = [(ask, answer) for ask, answer in pairs if ask.case == "stops" and CONTINUES not in ask.factors]
    for ask, answer in plain if abilities.takes_stops else ():
        stop = agreement.stop_string(model.tokenizer, answer.token_ids or (), ask is plain[-1][0])
        if stop is not None:
            seen = {"prefix": "warm", "seen": len(ask.prompt_token_ids)}
            stopped = replace(ask, id=f"{ask.id}:stop", stop=stop, factors={**ask.factors, **seen})
            yield noted_behind([stopped], orders)


def past_ends(model: Model, pairs: Sequence[Pair], abilities: Abilities, orders: Iterator[int]) -> Iterator[Round]:
    """Several samples from where a greedy answer had an end-of-sequence token and went on: each sample has to go on."""
    chats = [(ask, answer) for ask, answer in pairs if ask.case == SAMPLES and not ask.is_sampled]
    for ask, answer in chats if abilities.takes_samples and abilities.takes_token_ids else ():
        ids = answer.token_ids or ()
        end = next((index for index, token in enumerate(ids[:-1]) if token in model.config.eos_token_ids), None)
        if end is not None and CONTINUES not in ask.factors:
            prompt = (*ask.prompt_token_ids, *ids[:end])
            factors = {"length": len(prompt), "prefix": "warm", "seen": len(prompt)}
            drawn = Ask(f"{ask.id}:end", SAMPLES, prompt, AFTER_END, seed=END_SEED, samples=3, factors=factors)
            each = [replace(drawn, id=f"{drawn.id}-{number}", sample=number) for number in range(drawn.samples)]
            yield noted_behind(each, orders)


def answered(target: Target, batch: Round, transcript: Transcript | None) -> list[Pair]:
    """Asks and answers of a round, without the aborted; each is in the transcript as soon as it is there.

    A round whose answers are all known is not sent again. Of one that broke off all requests are, as the others are
    company; what was known stays.
    """
    judged_asks = [ask for ask in batch.asks if ask.id not in batch.aborted]
    recorded = [transcript.known(ask) for ask in judged_asks] if transcript else []
    known = {answer.id: answer for answer in recorded if answer is not None and answer.error is None}
    if len(known) < len(judged_asks):
        if transcript is None:
            answers = target.answer(batch.asks, batch.aborted)
        else:
            keep = keeper(transcript, [ask for ask in judged_asks if ask.id not in known])
            answers = target.answer(batch.asks, batch.aborted, keep)
            for answer in answers:
                keep(answer)
        known = {answer.id: answer for answer in answers} | known
    return [(ask, known[ask.id]) for ask in judged_asks]


def keeper(transcript: Transcript, asks: Sequence[Ask]) -> Arrived:
    """Appends answers to these, and each only once."""
    by_id = {ask.id: ask for ask in asks}
    kept: dict[str, Answer] = {}

    def keep(answer: Answer) -> None:
        if answer.id in by_id and kept.get(answer.id) != answer:
            transcript.append(by_id[answer.id], answer)
            kept[answer.id] = answer

    return keep


def fitting(ask: Ask, answer: Answer, config: ModelConfig, is_aborted: bool = False) -> Answer:
    """The answer with its routes in the oracle's form, or what is wrong with it: see validate, routes.fitted."""
    answer = validate(ask, answer, config.vocab_size, is_aborted)
    if answer.error is not None or answer.token_ids is None or answer.routes is None:
        return answer
    rows = len(ask.prompt_token_ids) + len(answer.token_ids) - 1
    try:
        return replace(answer, routes=fitted(answer.routes, rows, config))
    except RequestError as problem:
        return failed(ask, str(problem))
