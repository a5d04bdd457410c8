"""Writes a failure into a folder: the trace, a script that reproduces it, a report and the text of an issue."""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.strict_json import read_bytes
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.dialects.dialect import Dialect
from lfm2np.oracle.engines.records import Trace
from lfm2np.oracle.engines.records_json import answer_as_json, parse_line, trace_as_json, trace_from_json
from lfm2np.oracle.report.as_html import as_html
from lfm2np.oracle.report.as_text import as_text
from lfm2np.suite.fuzz.campaign import Failure
from lfm2np.suite.fuzz.failure_report import Context, report_of, seen_of, server_words
from lfm2np.suite.fuzz.judge import Judge, Right
from lfm2np.suite.fuzz.trace import joined
from lfm2np.suite.fuzz.watched import WatchedServer
from lfm2np.system import write_whole
from scheduler.checksum import FIELD, damage, sealed

TRACE, SCRIPT, REPORT, ISSUE = "trace.json", "reproduce.py", "report.html", "issue.md"
MOST_BYTES = 64 * 2**20


def hand_over(out: Path, failure: Failure, judge: Judge, player: Any, context: Context) -> Path:
    """Writes the folder, as a whole or not at all, and returns it."""
    trace = failure.trace
    right = {
        index: judge.right(request, seen_of(failure, index))
        for index, request in enumerate(trace.requests)
        if request.abort_after is None
    }
    record = json.loads(json.dumps(as_record(failure, context)))  # with names that are strings
    texts = {TRACE: json.dumps(sealed(record), indent=1) + "\n"}
    how = f"`{context.command} --replay {TRACE}` plays them again."
    if isinstance(player, WatchedServer):
        how = (
            f"`{SCRIPT}` (standard library only) sends these requests and says what it expected and saw: "
            f"`python {SCRIPT} {context.target}`. {server_words(failure)}"
        )
        texts[SCRIPT] = script(failure, judge, player, right, f"{context.engine}: {failure.finding.what}")
    wrong = -1 if failure.finding.request is None else failure.finding.request
    report = report_of(failure, context, right.get(wrong, []), how, judge.expected)
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


def script(
    failure: Failure, judge: Judge, player: WatchedServer, right: Mapping[int, Sequence[Right]], title: str
) -> str:
    """The text of reproduce.py. Traces before the failing one are sent first, and not judged."""
    whole, before = joined([*failure.before, failure.trace]), failure.num_before
    dialect = player.spoken().dialect
    ends = () if dialect.ignores_eos else judge.ends
    rows = [
        row_of(whole, index, player.body(request), right.get(index - before), ends)
        for index, request in enumerate(whole.requests)
    ]
    alone = [judge.alone(request) for request in failure.trace.requests]
    for row, request in zip(rows[before:], alone, strict=True):
        row |= {} if request is None else {"alone": player.body(request)}
    expected = "its answers to each request alone" if any(alone) else "exact arithmetic"
    return reproducer(title, dialect, player.timeout, rows, server_words(failure), before, expected)


def reproducer(
    title: str,
    dialect: Dialect,
    timeout: float,
    requests: Sequence[Mapping[str, Any]],
    server: str = "",
    before: int = 0,
    expected: str = "",
) -> str:
    """reproduce.txt with its gaps (@@NAME@@) filled in.

    requests  body, moments and right, as reproduce.txt says
    server    a sentence that says on what server it failed
    before    so many of the first requests are not judged
    """
    rows = ",\n ".join(json.dumps(request, allow_nan=False) for request in requests)
    filled = {
        "TITLE": title.replace("\\", "/").replace('"""', "'''"),
        "EXPECTED": expected,
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
