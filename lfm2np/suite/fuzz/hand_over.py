"""Writes a failure into a folder: the trace, a script that reproduces it, a report and the text of an issue."""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.strict_json import read_bytes
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.dialects.dialect import Dialect
from lfm2np.oracle.engines.records import MOST_REQUESTS, Answer, Request, Trace
from lfm2np.oracle.engines.records_json import answer_as_json, parse_line, trace_as_json, trace_from_json
from lfm2np.oracle.report.as_html import as_html
from lfm2np.oracle.report.as_text import as_text
from lfm2np.oracle.report.report import WRONG, Code, Finding, Report, Section, Table
from lfm2np.suite.fuzz.campaign import Failure
from lfm2np.suite.fuzz.judge import MEANS, Judge, Right
from lfm2np.suite.fuzz.timeline import timeline
from lfm2np.suite.fuzz.trace import joined
from lfm2np.suite.fuzz.watched import WatchedServer
from lfm2np.system import write_whole
from scheduler.checksum import FIELD, damage, sealed

TRACE, SCRIPT, REPORT, ISSUE = "trace.json", "reproduce.py", "report.html", "issue.md"
HEADS = ("request", "prompt tokens", "new tokens", "sent", "shares a beginning of", "special")
COMPARED = ("output token", "expected", "seen", "expected log-probability", "seen log-probability")
MOST_BYTES = 64 * 2**20
MOST_TOKENS = 64  # of a prompt that a report shows


@dataclass(frozen=True)
class Context:
    """What a report says besides the failure."""

    target: str
    engine: str
    format_name: str
    why_format: str  # where it was not declared
    checkpoint: str
    command: str


def hand_over(out: Path, failure: Failure, judge: Judge, player: Any, context: Context) -> Path:
    """Writes the folder, as a whole or not at all, and returns it."""
    right = {
        index: judge.right(request, seen_of(failure, index))
        for index, request in enumerate(failure.trace.requests)
        if request.abort_after is None
    }
    record = json.loads(json.dumps(as_record(failure, context)))  # with names that are strings
    texts = {TRACE: json.dumps(sealed(record), indent=1) + "\n"}
    if isinstance(player, WatchedServer):
        whole, before = joined([*failure.before, failure.trace]), num_before(failure)
        ends = () if player.dialect.ignores_eos else judge.ends
        rows = [
            row_of(whole, index, player.body(request), right.get(index - before), ends)
            for index, request in enumerate(whole.requests)
        ]
        alone = [judge.alone(request) for request in failure.trace.requests]
        for index, request in enumerate(alone):
            rows[before + index] |= {} if request is None else {"alone": player.body(request)}
        title = f"{context.engine}: {failure.finding.what}"
        words, is_alone = server_words(failure), any(alone)
        texts[SCRIPT] = reproducer(title, player.dialect, player.timeout, rows, words, before, is_alone)
    report = report_of(failure, context, right, how_to_see(failure, context, SCRIPT in texts), judge.expected)
    fenced = as_text(report, context.command).replace("```", "'''")
    texts |= {REPORT: as_html(report, context.command), ISSUE: f"# {report.means}\n\n```text\n{fenced}\n```\n"}
    return written(out, failure.finding.kind, texts)


def written(out: Path, kind: str, texts: Mapping[str, str]) -> Path:
    """All files, in the folder KIND-NUMBER with the first free number. RequestError if it can't be written."""
    beside = out / f".{secrets.token_hex(8)}.part"
    try:
        beside.mkdir(parents=True)
        for name, text in texts.items():
            write_whole(beside / name, text)
        for number in itertools.count(1):
            folder = out / f"{kind}-{number}"
            if not folder.exists():
                beside.rename(folder)
                break
    except OSError as problem:
        raise RequestError(f"{out}: can't be written: {problem.strerror or problem}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def require_place(out: Path) -> None:
    """RequestError for a folder that can't be made, before hours are spent on its content."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise RequestError(f"--out {out}: {existing} is no folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RequestError(f"--out {out}: {existing} can't be written to")


def seen_of(failure: Failure, index: int) -> Answer | None:
    if index == failure.finding.request and failure.finding.seen is not None:
        return failure.finding.seen
    answer = failure.played.answers[index][0]
    return None if answer.token_ids is None else answer


def as_record(failure: Failure, context: Context) -> dict[str, Any]:
    """The content of trace.json: what `lfm2np fuzz TARGET --replay` reads, and the answers."""
    return {
        **trace_as_json(failure.trace),
        **({"before": [trace_as_json(each)["requests"] for each in failure.before]} if failure.before else {}),
        "finding": {"kind": failure.finding.kind, "what": failure.finding.what, "request": failure.finding.request},
        "rate": list(failure.rate),
        "same_tokens": failure.same_tokens,
        "engine": context.engine,
        "format": context.format_name,
        "seen": [[answer_as_json(answer) for answer in answers] for answers in failure.played.answers],
    }


def read_trace(path: Path) -> Trace:
    """From a trace.json, or a file with a trace alone; joined to the traces that must come before it.

    RequestError that names the file, also for a wrong checksum; `hand_over` writes one, files from elsewhere need none.
    """
    raw = parse_line(read_bytes(path, MOST_BYTES, RequestError).decode(errors="replace"), str(path))
    if not isinstance(raw, dict) or "requests" not in raw:
        raise RequestError(f"{path}: expected an object with `requests`")
    if FIELD in raw and (changed := damage(raw)):
        raise RequestError(f"{path}: {changed}; a trace of your own needs none")
    before = raw.get("before", [])
    if not isinstance(before, list):
        raise RequestError(f"{path}: before: expected a list of lists of requests")
    try:
        return joined([trace_from_json({"requests": requests}) for requests in (*before, raw["requests"])])
    except RequestError as problem:
        raise RequestError(f"{path}: {problem}") from None


def reproducer(
    title: str,
    dialect: Dialect,
    timeout: float,
    requests: Sequence[Mapping[str, Any]],
    server: str = "",
    before: int = 0,
    is_alone: bool = False,
) -> str:
    """The script: reproduce.txt with its gaps (@@NAME@@) filled in.

    requests  body, moments and right, as reproduce.txt says
    server    a sentence that says on what server it failed
    before    so many of the first requests are not judged
    is_alone  what is expected is what the server answers to a request alone
    """
    rows = ",\n ".join(json.dumps(request, allow_nan=False) for request in requests)
    filled = {
        "TITLE": title.replace("\\", "/").replace('"""', "'''"),
        "EXPECTED": "its answers to each request alone" if is_alone else "exact arithmetic",
        "SERVER": server,
        "BEFORE": str(before),
        "TIMEOUT": repr(timeout),
        "PATH": json.dumps(dialect.path),
        "REQUESTS": f"[{rows}]",
        "ANSWER": dialect.reproducer,
    }
    template = (resources.files("lfm2np.suite.fuzz") / "reproduce.txt").read_text(encoding="utf-8")
    return re.sub("@@([A-Z]+)@@", lambda mark: filled[mark[1]], template)  # all at once: a title may hold a mark


def row_of(
    trace: Trace, index: int, body: Mapping[str, Any], right: Sequence[Right] | None, ends: Collection[int]
) -> dict[str, Any]:
    """What the script needs of a request. It judges neither multiple samples, nor sampled answers with a stop string.

    ends  tokens behind which the server stops
    """
    request = trace.requests[index]
    moments = {name: getattr(request, name) for name in ("after", "after_tokens", "abort_after")}
    row: dict[str, Any] = {"body": body} | {name: value for name, value in moments.items() if value is not None}
    row |= {"pause": request.pause} if request.pause else {}
    row |= {"streamed": True} if trace.is_streamed(index) else {}
    if right and request.params.n == 1 and (request.stop is None or not request.params.temperature):
        last = next((index for index, token in enumerate(right) if token.token_id in ends), len(right))
        expected = right[: last + 1]
        row["right"] = [[token.token_id, token.logprob, token.bound, token.decided] for token in expected]
        row |= {"may_go_on": True} if len(expected) < len(right) else {}
    return row


def num_before(failure: Failure) -> int:
    return sum(len(trace.requests) for trace in failure.before)


def server_words(failure: Failure) -> str:
    """In what state the server was when it failed, as a sentence."""
    if failure.is_fresh:
        return "It failed on a server that had just been started: start it anew."
    sentence = "It failed on a server that had served other requests before; it was not tried on a new one."
    if failure.needs_before:
        return f"It needs what came before: {num_before(failure)} requests, which are sent first. {sentence}"
    if failure.before:
        return f"{sentence} Before each replay came {num_before(failure)} short requests, which are sent first."
    return sentence


def moment(trace: Trace, index: int) -> str:
    request = trace.requests[index]
    when = "at once" if request.after is None else f"when request {request.after} has ended"
    if request.after_tokens is not None:
        when = f"after {request.after_tokens} tokens of request {request.after}"
    return when + (f", then {request.pause} ms" if request.pause else "")


def special(request: Request) -> str:
    words = [f"aborted after {request.abort_after} tokens"] if request.abort_after is not None else []
    if request.params.temperature:
        words.append(
            f"temperature {request.params.temperature:g}, seed {request.params.seed}, {request.params.n} samples"
        )
    words += [f"stop {request.stop!r}"] if request.stop is not None else []
    words += ["cold"] if request.cold else []
    words += ["streamed"] if request.streamed else []
    return "; ".join(words)


def shown_ids(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:MOST_TOKENS]))
    return shown + (f", ... {len(ids)} tokens" if len(ids) > MOST_TOKENS else "")


def sharing(trace: Trace, index: int) -> str:
    prompt = trace.requests[index].prompt_token_ids
    lengths = [num_shared(prompt, other.prompt_token_ids) for other in trace.requests[:index]]
    longest = max(lengths, default=0)
    return f"{longest} with request {lengths.index(longest)}" if longest else "none"


def num_shared(ids: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(ids, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(ids), len(other)))


WRONG_MARK = " (wrong)"


def expected_and_seen(failure: Failure, right: Mapping[int, Sequence[Right]]) -> list[list[str]]:
    """Rows of COMPARED for the wrong request. Behind the first other token both texts differ, so nothing is marked."""
    index = failure.finding.request
    if index is None:
        return []
    position, seen = failure.finding.position, seen_of(failure, index)
    at = None if position is None else position.row - len(failure.trace.requests[index].prompt_token_ids) + 1
    tokens = () if seen is None else seen.token_ids or ()
    logprobs = () if seen is None else seen.logprobs or ()
    rows, is_same = [], True
    for place, (expected, token, logprob) in enumerate(zip_longest(right.get(index, ()), tokens, logprobs)):
        here = position if place == at else None
        is_other = expected is not None and token is not None and expected.token_id != token
        is_bad = here is not None and here.is_flip
        is_off = here is not None and not here.is_flip
        if expected is not None and is_other:
            is_bad |= expected.decided
        elif expected is not None and logprob is not None:
            is_off |= abs(logprob - expected.logprob) > expected.bound
        bad, off = (WRONG_MARK if is_same and is_wrong else "" for is_wrong in (is_bad, is_off))
        rows.append(
            [
                str(place),
                "" if expected is None else str(expected.token_id),
                "" if token is None else f"{token}{bad}",
                "" if expected is None else f"{expected.logprob:.6f}",
                "" if logprob is None else f"{logprob:.6f}{off}",
            ]
        )
        is_same &= not is_other
    return rows[:MOST_TOKENS]


def facts(failure: Failure, context: Context) -> dict[str, str]:
    failed, replays = failure.rate
    tokens = (
        "the same tokens: with others it did not fail" if failure.same_tokens else "other tokens in the same places"
    )
    rate = "not played again: the server is gone, and nothing was given that starts it"
    if replays:
        rate = f"fails in {failed} of {replays} replays, each with {tokens}. {server_words(failure)}"
    drawn, small = (
        f"{len(trace.requests)} requests, {trace.num_tokens} tokens" for trace in (failure.drawn, failure.trace)
    )
    return {
        "engine": context.engine,
        "checkpoint": context.checkpoint,
        "format": f"{context.format_name} ({context.why_format or 'declared'})",
        "replays": rate,
        "found": f"after {failure.traces} traces and {failure.seconds:.0f} s",
        "size": f"drawn with {drawn}; shrunk to {small} in {failure.shrinking:.0f} s",
    }


def rows_of(trace: Trace) -> list[list[Any]]:
    return [
        [
            index,
            len(request.prompt_token_ids),
            request.max_tokens,
            moment(trace, index),
            sharing(trace, index),
            special(request),
        ]
        for index, request in enumerate(trace.requests)
    ]


def how_to_see(failure: Failure, context: Context, has_script: bool) -> str:
    if not has_script:
        return f"`{context.command} --replay {TRACE}` plays them again."
    return (
        f"`{SCRIPT}` (standard library only) sends these requests and says what it expected and saw: "
        f"`python {SCRIPT} {context.target}`. {server_words(failure)}"
    )


def report_of(
    failure: Failure, context: Context, right: Mapping[int, Sequence[Right]], how: str, expected: str
) -> Report:
    trace, finding = failure.trace, failure.finding
    compared = expected_and_seen(failure, right)
    prompts = [f"{index}: {shown_ids(request.prompt_token_ids)}" for index, request in enumerate(trace.requests)]
    requests = Table("Requests", HEADS, rows_of(trace), (0, 3, 4, 5), MOST_REQUESTS)
    tokens = [Table("Tokens of the wrong request", COMPARED, compared, (), MOST_TOKENS)] if compared else []
    return Report(
        command="fuzz",
        verdict=finding.kind.upper(),
        exit_code=WRONG,
        means=f"{MEANS[finding.kind][0].upper()}{MEANS[finding.kind][1:]}.",
        findings=[Finding(finding.kind, finding.what)],
        facts=facts(failure, context),
        next_steps=[how],
        sections=[
            Section("Who overlapped whom", [timeline(failure)]),
            Section("Expected and seen", [*tokens, expected]),
            Section("The requests", [requests, Code(prompts)]),
        ],
    )
