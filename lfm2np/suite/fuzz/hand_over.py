"""Writes a failure into a folder: the trace, a script that reproduces it, a report and the text of an issue."""

from __future__ import annotations

import itertools
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.strict_json import read_bytes
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.dialects.dialect import Dialect
from lfm2np.oracle.engines.records import MOST_REQUESTS, Answer, Trace, shown_ids
from lfm2np.oracle.engines.records_json import answer_as_json, parse_line, trace_as_json, trace_from_json
from lfm2np.oracle.report.as_html import as_html
from lfm2np.oracle.report.as_text import as_text
from lfm2np.oracle.report.report import WRONG, Code, Finding, Report, Section, Table, number
from lfm2np.suite.fuzz.campaign import Failure, size_of
from lfm2np.suite.fuzz.judge import MEANS, Expected, Right
from lfm2np.suite.fuzz.watched import WatchedServer
from lfm2np.system import write_whole
from scheduler.checksum import FIELD, damage, sealed

TRACE, SCRIPT, REPORT, ISSUE = "trace.json", "reproduce.py", "report.html", "issue.md"
MOST_BYTES = 64 * 2**20
HEADS = ("request", "prompt tokens", "new tokens", "when", "shares a beginning of", "special", "sent", "first", "ended")


@dataclass(frozen=True)
class Context:
    """What a report says besides the failure."""

    target: str
    engine: str
    format_name: str
    why_format: str  # where it was not declared
    checkpoint: str
    command: str
    replaying: str = ""  # the command without what does not go with --replay; "": all of it does


def hand_over(out: Path, failure: Failure, judge: Expected, player: Any, context: Context) -> Path:
    """Writes the folder, as a whole or not at all, and returns it."""
    record = json.loads(json.dumps(as_record(failure, context)))  # with names that are strings
    texts = {TRACE: json.dumps(sealed(record), indent=1) + "\n"}
    how = f"`{context.replaying or context.command} --replay {TRACE}` plays them again."
    if isinstance(player, WatchedServer):
        how = (
            f"`{SCRIPT}` (standard library only) sends these requests and says what it expected and saw: "
            f"`python {SCRIPT} {context.target}`. {server_words(failure)}"
        )
        texts[SCRIPT] = script(failure, judge, player, f"{context.engine}: {failure.finding.what}")
    report = report_of(failure, context, how, judge.expected)
    fenced = as_text(report, context.command).replace("```", "'''")
    texts |= {REPORT: as_html(report, context.command), ISSUE: f"# {report.means}\n\n```text\n{fenced}\n```\n"}
    return written(out, failure.finding.kind, texts)


def report_of(failure: Failure, context: Context, how: str, expected: str) -> Report:
    """how       to see it again
    expected  what an answer is compared with
    """
    trace, kind = failure.trace, failure.finding.kind
    rows = [row_shown(failure, index) for index in range(len(trace.requests))]
    ids = [f"{index}: {shown_ids(request.prompt_token_ids)}" for index, request in enumerate(trace.requests)]
    clock = f"sent, first token, ended: in {failure.played.clock}"
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
            Section("The requests", [expected, Table(clock, HEADS, rows, (0, 3, 4, 5), MOST_REQUESTS), Code(ids)])
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
    size = size_of(failure.trace)
    if failure.drawn != failure.trace:
        size = f"drawn with {size_of(failure.drawn)}; shrunk to {size} in {failure.shrinking:.0f} s"
    return {"replays": rate, "found": f"after {failure.traces} traces and {failure.seconds:.0f} s", "size": size}


def server_words(failure: Failure) -> str:
    """In what state the engine was when it failed, as a sentence."""
    if failure.is_fresh:
        return "It failed on an engine that had just been started: start it anew."
    return "It failed on an engine that had served other requests before; it was not tried on a new one."


def row_shown(failure: Failure, index: int) -> list[object]:
    """Cells of HEADS."""
    request, answer = failure.trace.requests[index], failure.played.answers[index][0]
    when = "at once" if request.after is None else f"when request {request.after} has ended"
    if request.after_tokens is not None:
        when = f"after {request.after_tokens} tokens of request {request.after}"
    when += f", then {request.pause} ms" if request.pause else ""
    params = request.params
    words = ["wrong"] if failure.finding.request == index else []
    words += [f"aborted after {request.abort_after} tokens"] if request.abort_after is not None else []
    words += [f"temperature {params.temperature:g}, seed {params.seed}, {params.n} samples"] * bool(params.temperature)
    words += [f"stop {request.stop!r}"] if request.stop is not None else []
    words += ["cold"] * request.cold + ["streamed"] * request.streamed
    words += [f"{answer.cached_tokens} cached"] if answer.cached_tokens else []
    prompt = request.prompt_token_ids
    pairs = [zip(prompt, other.prompt_token_ids, strict=False) for other in failure.trace.requests[:index]]
    shared = [len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], each))) for each in pairs]
    longest = max(shared, default=0)
    sharing = f"{longest} with request {shared.index(longest)}" if longest else "none"
    times = [number(time) for time in (answer.sent, answer.first, answer.ended)]
    return [index, len(prompt), request.max_tokens, when, sharing, "; ".join(words), *times]


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
        raise RequestError(f"{out}: {existing} is no folder, expected a place for findings")
    try:
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as problem:
        raise RequestError(f"{out}: {existing} can't be written to: {problem.strerror}") from None


def as_record(failure: Failure, context: Context) -> dict[str, Any]:
    """The content of trace.json: what `lfm2np fuzz TARGET --replay` reads, and the answers."""
    return {
        **trace_as_json(failure.trace),
        "finding": {"kind": failure.finding.kind, "what": failure.finding.what, "request": failure.finding.request},
        "rate": list(failure.rate),
        "same_tokens": failure.same_tokens,
        "engine": context.engine,
        "format": context.format_name,
        "seen": [[answer_as_json(answer) for answer in answers] for answers in failure.played.answers],
    }


def read_trace(path: Path) -> Trace:
    """From a trace.json, or a file with a trace alone.

    RequestError that names the file, also for a wrong checksum; `hand_over` writes one, files from elsewhere need none.
    """
    raw = parse_line(read_bytes(path, MOST_BYTES, RequestError).decode(errors="replace"), str(path))
    if not isinstance(raw, dict) or "requests" not in raw:
        raise RequestError(f"{path}: expected an object with `requests`")
    if FIELD in raw and (changed := damage(raw)):
        raise RequestError(f"{path}: {changed}; a trace of your own needs none")
    try:
        return trace_from_json({"requests": raw["requests"]})
    except RequestError as problem:
        raise RequestError(f"{path}: {problem}") from None


def script(failure: Failure, judge: Expected, player: WatchedServer, title: str) -> str:
    """The text of reproduce.py."""
    trace, dialect = failure.trace, player.spoken().dialect
    ends = () if dialect.ignores_eos else judge.ends
    rows = []
    for index, request in enumerate(trace.requests):
        right = judge.right(request, seen_of(failure, index)) if request.abort_after is None else None
        alone = judge.alone(request)
        row = row_of(trace, index, player.body(request), right, ends)
        rows.append(row | ({} if alone is None else {"alone": player.body(alone)}))
    expected = "its answers to each request alone" if any("alone" in row for row in rows) else "exact arithmetic"
    return reproducer(title, dialect, player.timeout, rows, server_words(failure), expected)


def seen_of(failure: Failure, index: int) -> Answer | None:
    """The answer to a request, the wrong one of its samples; None without tokens."""
    if index == failure.finding.request and failure.finding.seen is not None:
        return failure.finding.seen
    answer = failure.played.answers[index][0]
    return None if answer.token_ids is None else answer


def reproducer(
    title: str,
    dialect: Dialect,
    timeout: float,
    requests: Sequence[Mapping[str, Any]],
    server: str = "",
    expected: str = "",
) -> str:
    """reproduce.txt with its gaps (@@NAME@@) filled in.

    requests  body, moments and right, as reproduce.txt says
    server    a sentence that says on what engine it failed
    """
    rows = ",\n ".join(json.dumps(request, allow_nan=False) for request in requests)
    filled = {
        "TITLE": title.replace("\\", "/").replace('"""', "'''"),
        "EXPECTED": expected,
        "SERVER": server,
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
