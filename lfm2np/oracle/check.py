"""A whole check: send requests to an engine, score the answers, give the verdict. Data flows one way:

sending (workloads, target, transcript) -> judge (truth, noise) -> total -> report
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lfm2np.engine.loading import Model
from lfm2np.engine.work.place import AnyPlace, place_of
from lfm2np.errors import RequestError
from lfm2np.oracle import agreement
from lfm2np.oracle.causes.everywhere import reading_cause
from lfm2np.oracle.causes.findings import CERTAIN, Repeats, with_repeats
from lfm2np.oracle.causes.groups import OFF, SHOWN, Group, grouped
from lfm2np.oracle.coverage import not_tested
from lfm2np.oracle.engines.file_target import Transcript
from lfm2np.oracle.engines.records import Answer, Pair, Request, Trace, failed, samples_of, whole_request
from lfm2np.oracle.engines.target import Abilities, Target
from lfm2np.oracle.engines.validate import validate
from lfm2np.oracle.judging.drawn import drawn_wrongly
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.listed import not_the_likeliest
from lfm2np.oracle.judging.noise import DRAWS
from lfm2np.oracle.judging.position import is_wrong
from lfm2np.oracle.judging.processors import can_be_judged, wrong_choices
from lfm2np.oracle.judging.routes import fitted
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.verdict import DOUBT, WRONG, Position, chance_together, size_of
from lfm2np.oracle.prefix_hits import with_hits
from lfm2np.oracle.sending import While, send_all, silent
from lfm2np.oracle.total import Total, total
from lfm2np.truth.config import ModelConfig
from lfm2np.values import ProgressOf

SCORING = "scoring"  # the progress that counts tokens
MOST_ROUNDS = 4  # that are repeated, the smallest of those with a wrong request
TIMES = 5  # each; once more before, so that what a cache may have is there each time
LEAST_JUDGED = 64  # tokens of the first answers that are judged before the others are there


@dataclass(frozen=True)
class Cause:
    """Where a wrong request first goes wrong: it ran again with its activations recorded, see recorders/locating.py."""

    recorder: str  # the target that was recorded
    request_id: str
    prompts: tuple[tuple[int, ...], ...]  # what ran together,
    request: int  # which of them it is,
    max_tokens: int  # and how far it ran
    beside: bool  # whether it has to run beside the others to be wrong
    finding: Mapping[str, Any] | None  # the first wrong tensor: the fields of locate.Finding; None: nothing was wrong
    lines: tuple[str, ...]  # in words
    before: tuple[tuple[int, ...], ...] = ()  # prompts that ran before it, one after the other: alone it is right

    @property
    def reason(self) -> str | None:
        """One line for a verdict."""
        if self.finding is None:
            return None
        where = "" if self.finding["layer"] is None else f"layer {self.finding['layer']}, "
        before = ", or one before it that was not dumped" if self.finding["recomputed"] else ""
        return f"first wrong operation: {where}{self.finding['operation']} ({self.finding['name']}){before}"


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
    earlier: str = ""  # answers that were there before, in words
    repeats: tuple[Repeats, ...] = ()  # of wrong requests, where the first cause is not certain
    unjudged: tuple[str, ...] = ()  # ids of requests of a mixture, of which it is unknown what their processors exclude

    @cached_property
    def groups(self) -> dict[str, dict[str, Group]]:
        """The positions by each level of the tags that are shown."""
        return {name: grouped(self.positions, name) for name in SHOWN}

    @property
    def not_tested(self) -> list[str]:
        """What the verdict does not cover, in words."""
        words = not_tested(self.abilities, self.pairs, self.not_put, self.left, self.positions, self.unjudged)
        if self.total.constants is None and self.total.rms > 0.0 and self.total.verdict not in WRONG:
            words.append(f"constants that are off by less than {self.format} rounds (--constants)")
        return words


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
    """Sends the workloads and judges the answers: `send_all`, then `judged`.

    The answers are scored here or on a concurrent.futures.Executor; a work.Place may keep a record. TargetError if
    the engine can't be run.
    """
    collected = send_all(model, target, at_once, seed, cases, transcript, progress)
    known = Known(place=place_of(executor))
    result = judged(model, collected.abilities, format_name, collected.pairs, collected.not_put, progress, known)
    return repeated(model, target, result, known) if needs_repeats(result) else result


def until_wrong(model: Model, format_name: str, known: Known) -> While:
    """Judges the new answers whenever the number of tokens has doubled; ends the check at a wrong one."""
    done = 0

    def on(pairs: Sequence[Pair]) -> bool:
        nonlocal done
        before, now = num_tokens(pairs[:done]), num_tokens(pairs)
        if now < max(LEAST_JUDGED, 2 * before):
            return True
        from_here = 0 if model.config.sparse_layers else done  # in a mixture all answers count for each
        new = [(request, fitting(request, answer, model.config)) for request, answer in pairs[from_here:]]
        new = [pair for pair in new if can_be_judged(model, format_name, pair)]
        done = len(pairs)
        return not (
            any(answer.is_refuted for _, answer in new) or is_wrong(judge(model, format_name, new, known=known))
        )

    return on


def as_far_as_needed(pairs: Sequence[Pair], on: While) -> Sequence[Pair]:
    """Of complete answers, those that `on` would have asked for."""
    return next((pairs[:count] for count in range(1, len(pairs)) if not on(pairs[:count])), pairs)


def num_tokens(pairs: Sequence[Pair]) -> int:
    return sum(len(request.prompt_token_ids) + len(answer.token_ids or ()) for request, answer in pairs)


def judged(
    model: Model,
    abilities: Abilities,
    format_name: str,
    pairs: Sequence[Pair],
    not_put: Sequence[str] = (),
    progress: ProgressOf = silent,
    known: Known | None = None,
    constants: bool = False,
) -> Checked:
    """The verdict on answers, of this run or recorded earlier. `constants` as in total."""

    def scoring(done: int, count: int) -> None:
        progress(SCORING, done, count)

    pairs = [(request, fitting(request, answer, model.config)) for request, answer in pairs]
    pairs = agreement.without_refusals(pairs)
    unjudged = tuple(pair[0].request_id for pair in pairs if not can_be_judged(model, format_name, pair))
    pairs = [pair for pair in pairs if pair[0].request_id not in unjudged]
    known = Known() if known is None else known
    positions = judge(model, format_name, pairs, scoring, known)
    if not is_wrong(positions) and (chance_together(positions) < DOUBT or size_of(positions) > OFF / 2.0):
        positions = judge(model, format_name, pairs, scoring, known, DRAWS)  # a better estimate may change the verdict
    unrefuted, pairs = pairs, with_refuted(model, format_name, pairs, positions, known)
    verdict = total(model, format_name, pairs, positions, scoring, known, constants)
    if verdict.errs_like and pairs != unrefuted:  # what its rounding explains refutes nothing
        under = judge(model, verdict.errs_like, unrefuted, scoring, known, explains=False)
        pairs = with_refuted(model, verdict.errs_like, unrefuted, under, known)
        verdict = total(model, format_name, pairs, positions, scoring, known, constants)
    if reading := reading_cause(model, format_name, pairs, positions):
        verdict = replace(verdict, causes=(reading,))
    elif verdict.verdict in WRONG:
        verdict = replace(verdict, causes=tuple(with_hits(verdict.causes, pairs, positions)))
    if not positions and abilities.refused:  # why nothing could be judged
        verdict = replace(verdict, grounds=(*verdict.grounds, f"probed as {'; '.join(abilities.refused)}"))
    return Checked(abilities, format_name, tuple(pairs), tuple(not_put), tuple(positions), verdict, unjudged=unjudged)


def with_refuted(
    model: Model, format_name: str, pairs: Sequence[Pair], positions: Sequence[Position], known: Known
) -> list[Pair]:
    """The pairs, with an error in place of each answer that no right engine of the format gives. `positions` are theirs
    in this format."""
    drawn = drawn_wrongly(model, pairs, positions, known)
    more = not_the_likeliest(model, format_name, pairs, positions, known) | dict([drawn] if drawn else [])
    more |= wrong_choices(model, format_name, pairs, known)
    tokenizer = model.tokenizer if model.has_tokenizer else None
    return agreement.with_mismatches(pairs, positions, tokenizer, model.config.eos_token_ids, more)


def needs_repeats(result: Checked) -> bool:
    """Whether it is wrong, and repeats may show more of the cause."""
    causes = result.total.causes
    if causes and causes[0].sure == CERTAIN:
        return False
    return bool(wrong_stops(result)) or (bool(causes) and any(position.is_wrong for position in result.positions))


def wrong_stops(result: Checked) -> set[str]:
    """Ids of requests with a stop string whose answers no right engine gives. Only where the answer without it, with
    which repeats are compared, is usable."""
    plain = {request.prompt_token_ids for request, answer in result.pairs if not request.stop and answer.token_ids}
    return {
        request.request_id
        for request, answer in result.pairs
        if request.stop and answer.is_refuted and request.prompt_token_ids in plain
    }


def repeated(model: Model, target: Target, result: Checked, known: Known) -> Checked:
    """The result with repeats of wrong requests, each beside the same requests as before; MOST_ROUNDS at most.

    Rounds with cancelled requests can't be repeated: it is not known when those ended.
    """
    wrong = {position.request.request_id for position in result.positions if position.is_wrong} | wrong_stops(result)
    plain = [pair for pair in result.pairs if pair[0].stop is None]  # with which answers to stop strings must agree
    companies: dict[tuple[int, int], dict[str, Request]] = {}  # by id, the requests of a trace with a wrong one
    for request, _ in result.pairs:
        order, place = int(request.tags.get("order", 0)), int(request.tags.get("place", 0))
        company = companies.setdefault((order - place, int(request.tags.get("together", 1))), {})
        company[whole_request(request).request_id] = whole_request(request)

    def wrong_samples(request: Request) -> list[str]:
        return [sample.request_id for sample in samples_of(request) if sample.request_id in wrong]

    def failures(requests: Sequence[Request]) -> Counter[str]:
        """How often each sample is wrong when these are sent together TIMES times, after one run to fill caches."""
        trace, counts = Trace(tuple(requests)), Counter[str]()
        target.play(trace)
        for request, answer in (pair for _ in range(TIMES) for pair in target.play(trace).pairs(trace)):
            pair = request, fitting(request, answer, model.config)
            misses = request.stop is not None and agreement.stop_mismatches([*plain, pair], model.tokenizer)
            positions = judge(model, result.format, [pair], known=known, explains=False)
            counts[request.request_id] += bool(pair[1].is_refuted or misses or is_wrong(positions))
        return counts

    whole = [list(company.values()) for (_, together), company in companies.items() if len(company) == together]
    whole = [requests for requests in whole if any(map(wrong_samples, requests))]
    repeats: list[Repeats] = []
    for requests in sorted(whole, key=len)[:MOST_ROUNDS]:
        together = failures(requests)
        for request in requests:
            names = wrong_samples(request)
            alone = failures([request]) if names and len(requests) > 1 else None
            repeats += [Repeats(name, together[name], TIMES, None if alone is None else alone[name]) for name in names]
    causes = with_repeats(result.total.causes, result.positions, repeats)
    return replace(result, repeats=tuple(repeats), total=replace(result.total, causes=tuple(causes)))


def fitting(request: Request, answer: Answer, config: ModelConfig) -> Answer:
    """The answer with its routes in the oracle's form, or what is wrong with it: see validate, routes.fitted."""
    answer = validate(request, answer, config.vocab_size)
    if answer.error is not None or answer.token_ids is None or answer.routes is None:
        return answer
    rows = len(request.prompt_token_ids) + len(answer.token_ids) - 1
    try:
        return replace(answer, routes=fitted(answer.routes, rows, config))
    except RequestError as problem:
        return failed(str(problem))
