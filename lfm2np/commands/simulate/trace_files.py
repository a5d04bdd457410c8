"""Files of traces, read line by line: what arrived when, how long it was, what it shared.

lfm2np           JSON lines, see `write`
mooncake         Mooncake's JSON lines: timestamp in milliseconds, hash_ids of prefix blocks of 512 tokens. Or without
                 hash_ids. vLLM's dataset `timed_trace` and SGLang's `mooncake` read the same file.
bailian          Alibaba's Qwen-Bailian JSON lines: the same in seconds, with blocks of 16 tokens
azure            Azure's CSV, of 2023 and 2024: TIMESTAMP,ContextTokens,GeneratedTokens
burstgpt         BurstGPT's CSV, with or without Session ID and Elapsed time; Timestamp in seconds
bench-result     JSON of `vllm bench serve --save-result --save-detailed`, or a line of SGLang's `bench_serving
                 --output-details`: input_lens and output_lens, and start_times where vLLM is new enough
sglang-requests  JSON lines of SGLang's request logger, which its schedule simulator reads

Of these, azure, burstgpt, bench-result and sglang-requests go by a clock: the first request arrives at 0. bench-result
and sglang-requests may have no times: `rate` gives them. A prompt of which no prefixes are known is its own, shared
with none. Files may be gzipped, whatever their name.

vLLM's dataset `custom` and SGLang's ShareGPT hold texts, whose tokens only a tokenizer can count: run them once,
and read the result. BurstGPT's Session ID is not used: nothing says whether a prompt contains the turns before it.

Checked against: kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl; Azure/AzurePublicDataset,
AzureLLMInferenceTrace_conv.csv (whole files). HPMLL/BurstGPT, README.md (columns, units, failures of 0 tokens);
alibaba-edu/qwen-bailian-usagetraces-anon, README.md; vllm-project/vllm, pull request 39795 (timed_trace);
sgl-project/sglang, benchmark/datasets/mooncake.py, srt/utils/request_logger.py and
srt/debug_utils/schedule_simulator/data_source/data_loader.py (sources, no files). The fields of benchmark results of
both are known from excerpts of their sources only, and BurstGPT's 8 columns from others who quote them.
"""

from __future__ import annotations

import csv
import decimal
import gzip
import io
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

from lfm2np.commands.simulate.draws import Draws, times
from lfm2np.commands.simulate.traffic import (
    MOST_TOKENS,
    NANOSECONDS,
    Arrival,
    Runs,
    merge_runs,
    output_token_id,
    prompt_token_id,
    shared_token_id,
)
from lfm2np.errors import RequestError, TraceError
from lfm2np.values import plain, require_count, show, show_json

LATEST = 2**63 - 1  # nanoseconds
LARGEST_ID = 2**63 - 1
LARGEST_HASH = 2**61  # shared_token_id of it is an id
Line = tuple[int, str]
Skipped = Counter[str]  # requests of a file that are left out, by what they lack


class Row(NamedTuple):
    """One request as its file has it."""

    line: int
    at: int | None  # nanoseconds; None: the file has no times
    num_prompt_tokens: int
    num_output_tokens: int
    prompt: Runs | None = None  # None: of its own
    output_token_id: int | None = None  # None: of its own
    max_tokens: int | None = None
    priority: int = 0
    abort_after: int | None = None


@dataclass(frozen=True)
class Source:
    """A file, for messages. `unit` is what is counted in it."""

    path: str
    unit: str = "line"

    def wrong(self, line: int, name: str, value: object, expected: str) -> NoReturn:
        where = f"{self.path}:{line}" if self.unit == "line" else f"{self.path}: {self.unit} {line}"
        shown = plain(str(value)) if isinstance(value, Decimal) else show_json(value)
        raise TraceError(f"{where}: {name} {shown}: expected {expected}")


@dataclass(frozen=True)
class Format:
    """`rows` reads the requests of the lines of a file. With a `clock`, the first of them arrives at 0."""

    rows: Callable[[Source, Iterator[Line]], Iterator[Row]]
    clock: bool = False
    unit: str = "line"


def read(
    path: str | Path,
    format: str | None = None,
    *,
    rate: float | None = None,
    seed: int = 0,
    sort: bool = False,
    skipped: Skipped | None = None,
) -> Iterator[Arrival]:
    """The requests of a file, in order of arrival; TraceError that names file, line, value and expectation.

    format   a name of FORMATS; None: as the first line has it
    rate     requests a second, Poisson by `seed`, of a file without times; a file with times must not be given one
    sort     reads the whole file and sorts it, where times may be out of order
    skipped  counts requests that are left out, as they have no prompt or got no output (failures, in real traces)
    """
    if format is not None and format not in FORMATS:
        raise RequestError(f"format {show(format)}: expected one of {', '.join(FORMATS)}")
    if rate is not None and not 1e-3 <= rate <= 1e6:
        raise RequestError(f"rate {show(rate)}: expected requests a second, from 0.001 to 1000000")
    require_count("seed", seed, 0, None)
    name = plain(str(path))
    lines = lines_of(path, name)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{name}: empty, expected a trace")
    chosen = FORMATS[format or detect(name, first[1])]
    source = Source(name, chosen.unit)
    rows = with_ids(
        source, chosen.rows(source, itertools.chain([first], lines)), Counter() if skipped is None else skipped
    )
    return arrivals(source, timed(source, rows, rate, seed), chosen.clock, sort)


def lines_of(path: str | Path, name: str) -> Iterator[Line]:
    """Lines with something in them, and their numbers. Gzip is known by its first two bytes."""
    number = 0
    try:
        with Path(path).open("rb") as file, text_of(file) as text:
            for number, line in enumerate(text, 1):
                if "\0" in line:
                    raise TraceError(f"{name}:{number}: a zero byte, expected text")
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as problem:
        raise TraceError(f"{name}:{number + 1}: not UTF-8 ({problem.reason}), expected text") from None
    except (EOFError, zlib.error) as problem:
        raise TraceError(f"{name}:{number + 1}: its gzip data is cut short or broken: {problem}") from None
    except OSError as problem:
        raise TraceError(f"{name}: can't be read: {problem.strerror or problem}") from None


def text_of(file: io.BufferedReader) -> TextIO:
    is_gzip = file.peek(2)[:2] == b"\x1f\x8b"
    return io.TextIOWrapper(gzip.GzipFile(fileobj=file) if is_gzip else file, encoding="utf-8-sig", newline="")


# Which format it is


def detect(name: str, line: str) -> str:
    """The format whose first line this can be."""
    if line.lstrip().startswith("{"):
        return detect_json(name, json_object(Source(name), 1, line))
    header = set(csv_values(Source(name), 1, line))
    for format, columns in (("azure", AZURE), ("burstgpt", BURSTGPT)):
        if set(columns) <= header:
            return format
    raise TraceError(f"{name}: begins {show(line.strip())}: expected a trace: {', '.join(FORMATS)}")


def detect_json(name: str, first: dict[str, Any]) -> str:
    keys = first.keys()
    if keys >= {"input_length", "output_length"}:
        return detect_blocks(name, first)
    if keys >= {"input_lens", "output_lens"}:
        return "bench-result"
    if isinstance(first.get("event"), str) and "rid" in keys:
        return "sglang-requests"
    if "prompt_tokens" in keys or isinstance(first.get("prompt"), list):
        return "lfm2np"
    for key in ("prompt", "conversations", "messages"):
        if key in keys:
            raise TraceError(f"{name}: {key} is text, expected numbers of tokens: read the result of a benchmark of it")
    if "total_input_tokens" in keys:
        how = "--save-detailed (vLLM) or --output-details (SGLang)"
        raise TraceError(f"{name}: a benchmark's result without the lengths of its requests: run it with {how}")
    raise TraceError(f"{name}: keys {show(list(keys))}: expected those of {', '.join(FORMATS)}")


def detect_blocks(name: str, first: dict[str, Any]) -> str:
    """Mooncake's and Bailian's traces differ by what else they tell, or by how many blocks a prompt has."""
    length, blocks = first["input_length"], first.get("hash_ids")
    if "chat_id" in first:
        return "bailian"
    if not isinstance(blocks, list) or not isinstance(length, int):
        return "mooncake"
    for format, size in (("mooncake", 512), ("bailian", 16)):
        if len(blocks) == -(-length // size):
            return format
    raise TraceError(
        f"{name}: {len(blocks)} hash_ids for input_length {show(length)}: expected blocks of 512 tokens or of 16"
    )


# From rows to arrivals


def with_ids(source: Source, rows: Iterable[Row], skipped: Skipped) -> Iterator[Row]:
    """Those that have tokens; where a prompt or outputs are of their own, ids that no other request has."""
    for number, row in enumerate(rows):
        check_length(source, row.line, "prompt tokens", row.num_prompt_tokens)
        check_length(source, row.line, "output tokens", row.num_output_tokens)
        if not row.num_prompt_tokens or not row.num_output_tokens:
            skipped["no output tokens" if row.num_prompt_tokens else "no prompt tokens"] += 1
            continue
        yield row._replace(
            prompt=row.prompt or ((prompt_token_id(number), row.num_prompt_tokens),),
            output_token_id=output_token_id(number) if row.output_token_id is None else row.output_token_id,
        )


def check_length(source: Source, line: int, name: str, length: int) -> None:
    if not 0 <= length <= MOST_TOKENS:
        source.wrong(line, name, length, f"0 to {MOST_TOKENS}")


def timed(source: Source, rows: Iterable[Row], rate: float | None, seed: int) -> Iterator[Row]:
    """All with times: their own, or Poisson's."""
    draws = Draws(seed, "gaps")
    drawn = times(lambda: draws.exponential() / rate) if rate is not None else itertools.repeat(None)
    for row, at in zip(rows, drawn, strict=False):
        if row.at is None and at is None:
            source.wrong(row.line, "time", None, "a time, or a rate (--rate) for a trace without times")
        if row.at is not None and at is not None:
            source.wrong(row.line, "rate", rate, "none: this trace has times, and can be run faster (--speed)")
        yield row if at is None else row._replace(at=at)


def arrivals(source: Source, rows: Iterable[Row], clock: bool, sort: bool) -> Iterator[Arrival]:
    begin, last = None, 0
    for row in by_time(rows) if sort else rows:
        at = row.at or 0
        begin = (at if clock else 0) if begin is None else begin
        if at < max(last, begin):
            expected = (
                f"at least that of the request before it, {seconds_text(max(last, begin))} s; --sort sorts the file"
            )
            source.wrong(row.line, "time", Decimal(seconds_text(at)), expected)
        last = at
        yield Arrival(
            at - begin,
            row.prompt or (),
            row.num_output_tokens,
            row.output_token_id or 0,
            row.max_tokens,
            row.priority,
            row.abort_after,
        )
    if begin is None:
        raise TraceError(f"{source.path}: no request with prompt and output tokens in it, expected at least one")


# Values


def json_object(source: Source, line: int, text: str) -> dict[str, Any]:
    """Fractions as Decimal, so that they are what the file says."""
    try:
        value = json.loads(text, parse_float=Decimal, parse_constant=Decimal)
    except (ValueError, RecursionError, decimal.DecimalException) as problem:
        where = f"{source.path}:{line}" if source.unit == "line" else source.path
        raise TraceError(f"{where}: not JSON, or cut short: {show(text.strip())}: {reason(problem)}") from None
    if not isinstance(value, dict):
        source.wrong(line, "JSON", value, "an object")
    return value


def reason(problem: Exception) -> str:
    if isinstance(problem, decimal.DecimalException):
        return "a number out of range"
    return problem.msg if isinstance(problem, json.JSONDecodeError) else str(problem)[:80]


def integer(source: Source, line: int, row: dict[str, Any], name: str, least: int, most: int) -> int:
    value = row.get(name)
    if type(value) is not int or not least <= value <= most:
        source.wrong(line, name, value, f"a whole number, {least} to {most}")
    return value


def nanoseconds(source: Source, line: int, name: str, value: Any, unit: int) -> int:
    """`unit` is how many of them the value counts in; to the nearest."""
    is_number = type(value) is int or (isinstance(value, Decimal) and value.is_finite())
    if not is_number or not 0 <= value <= Decimal(LATEST) / unit:
        source.wrong(line, name, value, "a time that is 0 or later")
    return value * unit if type(value) is int else int((value * unit).to_integral_value())


def seconds_of(source: Source, line: int, name: str, text: str) -> int:
    """Nanoseconds of a number of seconds."""
    try:
        return nanoseconds(source, line, name, Decimal(text), NANOSECONDS)
    except decimal.DecimalException:
        source.wrong(line, name, text, "a number")


def integer_of(source: Source, line: int, name: str, text: str) -> int:
    if not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text):
        source.wrong(line, name, text, f"a whole number, 0 to {MOST_TOKENS}")
    return int(text)


CLOCK_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,12})?(Z|[+-]\d\d:\d\d)?")
EPOCH = datetime(1970, 1, 1)


def clock_time(source: Source, line: int, name: str, value: Any) -> int:
    """Nanoseconds since 1970 of `2023-11-16 18:15:46.6805900`, with or without a zone."""
    match = CLOCK_TIME.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        date, time, fraction, zone = match.groups() if match else ("", "", "", "")
        whole = datetime.fromisoformat(f"{date}T{time}{(zone or '').replace('Z', '+00:00')}")
    except ValueError:
        source.wrong(line, name, value, "a time such as 2023-11-16 18:15:46.6805900")
    since = whole.replace(tzinfo=None) - (whole.utcoffset() or EPOCH - EPOCH) - EPOCH
    nanos = (since.days * 86_400 + since.seconds) * NANOSECONDS + int(Decimal(f"0{fraction or ''}") * NANOSECONDS)
    if not 0 <= nanos <= LATEST:
        source.wrong(line, name, value, "a time from 1970 to 2262")
    return nanos


# lfm2np

KEYS = ("at", "prompt", "prompt_tokens", "output_tokens", "output_id", "max_tokens", "priority", "abort_after")


def lfm2np_rows(source: Source, lines: Iterator[Line]) -> Iterator[Row]:
    for line, text in lines:
        row = json_object(source, line, text)
        for key in row:
            if key not in KEYS:
                source.wrong(line, "key", key, ", ".join(KEYS))
        outputs = integer(source, line, row, "output_tokens", 1, MOST_TOKENS)
        prompt = runs_of(source, line, row["prompt"]) if "prompt" in row else None
        if prompt and "prompt_tokens" in row:
            source.wrong(line, "prompt_tokens", row["prompt_tokens"], "prompt or prompt_tokens, not both")
        yield Row(
            line,
            nanoseconds(source, line, "at", row["at"], NANOSECONDS) if "at" in row else None,
            sum(count for _, count in prompt)
            if prompt
            else integer(source, line, row, "prompt_tokens", 1, MOST_TOKENS),
            outputs,
            prompt,
            integer(source, line, row, "output_id", 0, LARGEST_ID) if "output_id" in row else None,
            integer(source, line, row, "max_tokens", outputs, MOST_TOKENS) if "max_tokens" in row else None,
            integer(source, line, row, "priority", -LARGEST_ID, LARGEST_ID) if "priority" in row else 0,
            nanoseconds(source, line, "abort_after", row["abort_after"], NANOSECONDS) if "abort_after" in row else None,
        )


def runs_of(source: Source, line: int, runs: Any) -> Runs:
    for run in runs if isinstance(runs, list) and runs else [runs]:
        is_pair = isinstance(run, list) and len(run) == 2 and all(type(number) is int for number in run)
        if not is_pair or not 0 <= run[0] <= LARGEST_ID or not 1 <= run[1] <= MOST_TOKENS:
            source.wrong(line, "prompt", run, f"runs [token id, 1 to {MOST_TOKENS} tokens]")
    return merge_runs((token_id, count) for token_id, count in runs)


def write(trace: Iterable[Arrival], file: TextIO) -> None:
    """One JSON object a line, as `read` reads it: the same requests, to the nanosecond.

    at             seconds since the trace began, up to 9 decimals; left out: the reader gives a rate
    prompt         runs of equal tokens, [[token id, how many], ...]; or
    prompt_tokens  how many, of a prompt that no other shares
    output_tokens  how many it gets, at least 1
    output_id      token id of its outputs; left out: one that no other has
    max_tokens     how many it asks for; left out: output_tokens
    priority       left out: 0
    abort_after    seconds after its arrival at which its user leaves; left out: never
    """
    for number, arrival in enumerate(trace):
        fields = [f'"at": {seconds_text(arrival.at)}']
        if arrival.prompt == ((prompt_token_id(number), arrival.num_prompt_tokens),):
            fields.append(f'"prompt_tokens": {arrival.num_prompt_tokens}')
        else:
            fields.append(f'"prompt": {json.dumps(arrival.prompt)}')
        fields.append(f'"output_tokens": {arrival.num_output_tokens}')
        if arrival.output_token_id != output_token_id(number):
            fields.append(f'"output_id": {arrival.output_token_id}')
        if arrival.max_tokens is not None:
            fields.append(f'"max_tokens": {arrival.max_tokens}')
        if arrival.priority:
            fields.append(f'"priority": {arrival.priority}')
        if arrival.abort_after is not None:
            fields.append(f'"abort_after": {seconds_text(arrival.abort_after)}')
        file.write(f"{{{', '.join(fields)}}}\n")


def seconds_text(nanos: int) -> str:
    """All nanoseconds, without a loss: `1.5`."""
    whole, rest = divmod(nanos, NANOSECONDS)
    return f"{whole}.{rest:09d}".rstrip("0").rstrip(".") if rest else str(whole)


# mooncake, bailian


def block_rows(source: Source, lines: Iterator[Line], size: int, unit: int) -> Iterator[Row]:
    """`size` tokens to a block, `unit` nanoseconds to a timestamp's one."""
    for line, text in lines:
        row = json_object(source, line, text)
        length = integer(source, line, row, "input_length", 0, MOST_TOKENS)
        yield Row(
            line,
            nanoseconds(source, line, "timestamp", row["timestamp"], unit) if "timestamp" in row else None,
            length,
            integer(source, line, row, "output_length", 0, MOST_TOKENS),
            block_runs(source, line, row["hash_ids"], length, size) if row.get("hash_ids") else None,
        )


def block_runs(source: Source, line: int, blocks: Any, length: int, size: int) -> Runs:
    """One run a block, the last as long as the prompt reaches into it."""
    if not isinstance(blocks, list) or len(blocks) != -(-length // size):
        count = len(blocks) if isinstance(blocks, list) else blocks
        expected = f"{-(-length // size)} of them, one for each {size} of input_length {length}"
        source.wrong(line, "hash_ids: number", count, expected)
    for block in blocks:
        if type(block) is not int or not 0 <= block <= LARGEST_HASH:
            source.wrong(line, "hash_ids:", block, f"whole numbers, 0 to {LARGEST_HASH}")
    counts = [size] * (len(blocks) - 1) + [length - size * (len(blocks) - 1)]
    return merge_runs((shared_token_id(block), count) for block, count in zip(blocks, counts, strict=True))


# azure, burstgpt

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
ReadTime = Callable[[Source, int, str, str], int]


def csv_values(source: Source, line: int, text: str) -> list[str]:
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as problem:
        source.wrong(line, "CSV", text.strip(), f"columns ({problem})")


def csv_rows(source: Source, lines: Iterator[Line], columns: Sequence[str], time_of: ReadTime) -> Iterator[Row]:
    """`columns`: of a request's time, which `time_of` reads, its prompt tokens and its output tokens."""
    line, header = next(lines)
    names = csv_values(source, line, header)
    for column in columns:
        if column not in names:
            source.wrong(line, "columns", header.strip(), f"a column {column}")
    for line, text in lines:
        values = csv_values(source, line, text)
        if len(values) != len(names):
            source.wrong(line, "CSV", text.strip(), f"{len(names)} columns")
        at, prompt, outputs = ((source, line, name, values[names.index(name)]) for name in columns)
        yield Row(line, time_of(*at), integer_of(*prompt), integer_of(*outputs))


# bench-result, sglang-requests


def bench_rows(source: Source, lines: Iterator[Line]) -> Iterator[Row]:
    """Of one run, which is one JSON object and so read as a whole."""
    texts = [text for _, text in lines if text.strip()]
    runs = sum(text.startswith("{") for text in texts)
    if runs > 1:  # SGLang appends to its file; JSON with line breaks has one such line
        raise TraceError(f"{source.path}: {runs} runs of a benchmark, expected one: take a line by itself")
    result = json_object(source, 1, "".join(texts))
    columns = [result.get(name) for name in ("input_lens", "output_lens")]
    starts = result.get("start_times")
    if (
        not all(isinstance(each, list) for each in columns)
        or len({len(each or ()) for each in (*columns, starts or columns[0])}) > 1
    ):
        expected = "expected input_lens, output_lens and, if any, start_times, lists of the same length"
        raise TraceError(f"{source.path}: keys {show(list(result))}: {expected}")
    yield from by_time(bench_row(source, number, result) for number in range(len(result["input_lens"])))


def bench_row(source: Source, number: int, result: dict[str, Any]) -> Row:
    at = {name: result[name][number] for name in ("input_lens", "output_lens", "start_times") if result.get(name)}
    return Row(
        number + 1,
        nanoseconds(source, number + 1, "start_times", at["start_times"], NANOSECONDS) if "start_times" in at else None,
        integer(source, number + 1, at, "input_lens", 0, MOST_TOKENS),
        integer(source, number + 1, at, "output_lens", 0, MOST_TOKENS),
    )


def by_time(rows: Iterable[Row]) -> list[Row]:
    """In the file's order where they have no times."""
    return sorted(rows, key=lambda row: row.at or 0)


def sglang_rows(source: Source, lines: Iterator[Line]) -> Iterator[Row]:
    """Finished requests, kept until the file ends, by when they were received. Other lines are other programs'."""
    received: dict[str, int] = {}
    rows = []
    for line, text in lines:
        event = json_object(source, line, text) if text.startswith("{") else {}
        request = str(event.get("rid"))
        if event.get("event") == "request.received" and "timestamp" in event:
            received[request] = clock_time(source, line, "timestamp", event["timestamp"])
        elif event.get("event") == "request.finished":
            rows.append(Row(line, received.pop(request, None), *finished_lengths(source, line, event)))
    yield from by_time(rows)


def finished_lengths(source: Source, line: int, event: dict[str, Any]) -> tuple[int, int]:
    output = event.get("out")
    about = output.get("meta_info") if isinstance(output, dict) else None
    if not isinstance(about, dict):
        source.wrong(line, "out", output, "meta_info with prompt_tokens and completion_tokens")
    prompt, outputs = (
        integer(source, line, about, f"{name}_tokens", 0, MOST_TOKENS) for name in ("prompt", "completion")
    )
    return prompt, outputs


FORMATS = {
    "lfm2np": Format(lfm2np_rows),
    "mooncake": Format(partial(block_rows, size=512, unit=NANOSECONDS // 1000)),
    "bailian": Format(partial(block_rows, size=16, unit=NANOSECONDS)),
    "azure": Format(partial(csv_rows, columns=AZURE, time_of=clock_time), clock=True),
    "burstgpt": Format(partial(csv_rows, columns=BURSTGPT, time_of=seconds_of), clock=True),
    "bench-result": Format(bench_rows, clock=True, unit="request"),
    "sglang-requests": Format(sglang_rows, clock=True),
}
