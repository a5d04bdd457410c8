"""A failure as a report: what failed how often, who overlapped whom, what was expected and seen, the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest

from lfm2np.oracle.engines.records import MOST_REQUESTS, Answer, Request, Trace, shown_ids
from lfm2np.oracle.report.report import WRONG, Code, Finding, Report, Section, Table, number
from lfm2np.suite.fuzz.campaign import Failure, size_of
from lfm2np.suite.fuzz.judge import MEANS, Right

HEADS = ("request", "prompt tokens", "new tokens", "sent", "shares a beginning of", "special")
TIMES = ("request", "tokens", "sent", "first token", "ended", "when")
COMPARED = ("output token", "expected", "seen", "expected log-probability", "seen log-probability")
MOST_TOKENS = 64  # of a prompt or an answer
WIDTH = 48  # characters of a bar that lasts as long as the whole trace
BLANK, PREFILL, DECODE = "\u00b7", "\u2591", "\u2588"
WRONG_MARK = " (wrong)"


@dataclass(frozen=True)
class Context:
    """What a report says besides the failure."""

    target: str
    engine: str
    format_name: str
    why_format: str  # where it was not declared
    checkpoint: str
    command: str


def report_of(failure: Failure, context: Context, right: Sequence[Right], how: str, expected: str) -> Report:
    """right  what should have come of the wrong request; `how` to see it again
    expected  what an answer is compared with"""
    trace, kind = failure.trace, failure.finding.kind
    rows: list[list[object]] = []
    for index, request in enumerate(trace.requests):
        sizes = (len(request.prompt_token_ids), request.max_tokens)
        rows.append([index, *sizes, moment(request), sharing(trace, index), special(request)])
    compared = expected_and_seen(failure, right)
    return Report(
        command="fuzz",
        verdict=kind.upper(),
        exit_code=WRONG,
        means=f"{MEANS[kind][0].upper()}{MEANS[kind][1:]}.",
        findings=[Finding(kind, failure.finding.what)],
        facts={
            "engine": context.engine,
            "checkpoint": context.checkpoint,
            "format": f"{context.format_name} ({context.why_format or 'declared'})",
            **history(failure),
        },
        next_steps=[how],
        sections=[
            Section("Who overlapped whom", [timeline(failure)]),
            Section(
                "Expected and seen",
                [
                    *([Table("Tokens of the wrong request", COMPARED, compared, (), MOST_TOKENS)] if compared else []),
                    expected,
                ],
            ),
            Section(
                "The requests",
                [
                    Table("Requests", HEADS, rows, (0, 3, 4, 5), MOST_REQUESTS),
                    Code([f"{index}: {shown_ids(each.prompt_token_ids)}" for index, each in enumerate(trace.requests)]),
                ],
            ),
        ],
    )


def history(failure: Failure) -> dict[str, str]:
    """How often it fails, when it was found, and how it was shrunk."""
    failed, replays = failure.rate
    tokens = (
        "the same tokens: with others it did not fail" if failure.same_tokens else "other tokens in the same places"
    )
    rate = "not played again: the engine is gone, and there is no --start"
    if replays:
        rate = f"fails in {failed} of {replays} replays, each with {tokens}. {server_words(failure)}"
    shrunk = f"shrunk to {size_of(failure.trace)} in {failure.shrinking:.0f} s"
    return {
        "replays": rate,
        "found": f"after {failure.traces} traces and {failure.seconds:.0f} s",
        "size": f"drawn with {size_of(failure.drawn)}; {shrunk}",
    }


def server_words(failure: Failure) -> str:
    """In what state the engine was when it failed, as a sentence."""
    if failure.is_fresh:
        return "It failed on an engine that had just been started: start it anew."
    sentence = "It failed on an engine that had served other requests before; it was not tried on a new one."
    if failure.needs_before:
        return f"It needs what came before: {failure.num_before} requests, which are sent first. {sentence}"
    if failure.before:
        return f"{sentence} Before each replay came {failure.num_before} short requests, which are sent first."
    return sentence


def timeline(failure: Failure) -> Table:
    """Sizes, times and bars. Light: until the first token; without streaming that is the whole bar."""
    played = failure.played
    last = max((answer.ended or 0.0 for answer, *_ in played.answers), default=0.0) or 1.0
    rows: list[list[object]] = []
    for index, (request, (answer, *_)) in enumerate(zip(failure.trace.requests, played.answers, strict=True)):
        cached = f", {answer.cached_tokens} cached" if answer.cached_tokens else ""
        size = f"{len(request.prompt_token_ids)} + {request.max_tokens}{cached}"
        size += (", aborted" if answer.is_aborted else "") + (WRONG_MARK if failure.finding.request == index else "")
        times = (answer.sent, answer.first, answer.ended)
        shown, bar = ["never sent", "", ""], ""
        if answer.sent is not None and answer.ended is not None:
            first = answer.ended if answer.first is None else answer.first
            start, middle, end = (int(WIDTH * time / last) for time in (answer.sent, first, answer.ended))
            bar = (BLANK * start + PREFILL * max(1, middle - start) + DECODE * (end - middle)).ljust(WIDTH, BLANK)
            shown = list(map(number, times))
        rows.append([index, size, *shown, bar])
    return Table(f"Prompt + new tokens; times in {played.clock}", TIMES, rows, (0, 1, 5), MOST_REQUESTS)


def seen_of(failure: Failure, index: int) -> Answer | None:
    """The answer to a request, the wrong one of its samples; None without tokens."""
    if index == failure.finding.request and failure.finding.seen is not None:
        return failure.finding.seen
    answer = failure.played.answers[index][0]
    return None if answer.token_ids is None else answer


def expected_and_seen(failure: Failure, right: Sequence[Right]) -> list[list[str]]:
    """Rows of COMPARED for the wrong request, what is wrong marked up to the first other token: behind that both texts
    differ."""
    index = failure.finding.request
    if index is None:
        return []
    position, seen = failure.finding.position, seen_of(failure, index) or Answer()
    at = None if position is None else position.row - len(failure.trace.requests[index].prompt_token_ids) + 1
    rows, is_same = [], True
    for place, (expected, token, logprob) in enumerate(zip_longest(right, seen.ids, seen.logprobs or ())):
        is_other = expected is not None and token is not None and expected.token_id != token
        bad = off = False
        if position is not None and place == at:
            bad, off = position.is_flip, not position.is_flip
        if expected is not None:
            bad |= is_other and expected.decided
            off |= not is_other and logprob is not None and abs(logprob - expected.logprob) > expected.bound
        rows.append(
            [
                str(place),
                "" if expected is None else str(expected.token_id),
                "" if token is None else f"{token}{WRONG_MARK * (bad and is_same)}",
                "" if expected is None else f"{expected.logprob:.6f}",
                "" if logprob is None else f"{logprob:.6f}{WRONG_MARK * (off and is_same)}",
            ]
        )
        is_same &= not is_other
    return rows[:MOST_TOKENS]


def moment(request: Request) -> str:
    when = "at once" if request.after is None else f"when request {request.after} has ended"
    if request.after_tokens is not None:
        when = f"after {request.after_tokens} tokens of request {request.after}"
    return when + (f", then {request.pause} ms" if request.pause else "")


def special(request: Request) -> str:
    params = request.params
    words = [f"aborted after {request.abort_after} tokens"] if request.abort_after is not None else []
    words += [f"temperature {params.temperature:g}, seed {params.seed}, {params.n} samples"] * bool(params.temperature)
    words += [f"stop {request.stop!r}"] if request.stop is not None else []
    return "; ".join([*words, *["cold"] * request.cold, *["streamed"] * request.streamed])


def sharing(trace: Trace, index: int) -> str:
    prompt = trace.requests[index].prompt_token_ids
    pairs = [zip(prompt, other.prompt_token_ids, strict=False) for other in trace.requests[:index]]
    lengths = [len(list(takewhile(lambda pair: pair[0] == pair[1], each))) for each in pairs]
    longest = max(lengths, default=0)
    return f"{longest} with request {lengths.index(longest)}" if longest else "none"
