"""Requests with their times: Azure's and Mooncake's traces, plain JSON lines, and Poisson arrivals.

azure     Azure/AzurePublicDataset, 2023 and 2024: CSV with TIMESTAMP,ContextTokens,GeneratedTokens
mooncake  kvcache-ai/Mooncake, FAST25: JSON lines with timestamp (milliseconds), input_length, output_length and
          hash_ids of the prompt's blocks of 512 tokens
plain     JSON lines with
              at             seconds since the trace began
              prompt_tokens  length of a prompt that shares nothing; or
              prompt         runs of equal token ids, [[id, count], ...]: prompts share a prefix as far as ids are equal
              output_tokens  how many it gets
              output_id      token id of its outputs, which a later prompt may name; left out: no other request's
              priority       lower goes first under --policy priority; left out: 0

A file's first line says which it is; it may be gzipped. A prompt whose prefix is not known is shared with no other.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from lfm2np.errors import RequestError, TraceError
from lfm2np.values import show

NANOSECONDS = 1_000_000_000  # all times are whole nanoseconds, so their sums are exact
MOST_TOKENS = 1_000_000_000
MOST_ID = 2**61
MOST_TIME = 2**62  # nanoseconds
BLOCK = 512  # tokens of a Mooncake hash
PLAIN = ("at", "prompt", "prompt_tokens", "output_tokens", "output_id", "priority")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
Runs = tuple[tuple[int, int], ...]  # of equal token ids: (token id, count)


class Arrival(NamedTuple):
    """One request. Token ids stand for content: two requests share a prefix as far as their ids are equal."""

    at: int  # nanoseconds since the trace began
    prompt: Runs
    num_output_tokens: int
    output_token_id: int
    priority: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for _, count in self.prompt)


class Trace(NamedTuple):
    """rate      requests a second; None: all come at once
    left_out  requests without prompt or output tokens: failures, in real traces
    """

    arrivals: Sequence[Arrival]
    rate: float | None
    left_out: int


SHARED, PROMPT, OUTPUT = range(3)  # content: a block's hash; a request's own prompt; its outputs


def token_id(kind: int, number: int) -> int:
    """That of no other kind or number."""
    return 3 * number + kind


@dataclass(frozen=True)
class Traffic:
    """The requests of a file, or of "poisson:prompt=512,output=128,requests=1000".

    rate      requests a second on average: the times of a trace are stretched to it; None: as they are
    seed      of drawn requests
    requests  the first ones only
    """

    source: str
    rate: float | None = None
    seed: int = 0
    requests: int | None = None

    @property
    def is_drawn(self) -> bool:
        return self.source.partition(":")[0] == "poisson"

    def arrivals(self) -> Sequence[Arrival]:
        """In order of arrival. RequestError for a specification or a file that is wrong, or has no requests."""
        trace, rate = self.trace, self.rate
        if rate is None:
            if self.is_drawn:
                raise RequestError(f"{self.source}: expected --rate, in requests a second")
            return trace.arrivals
        if trace.rate is None:
            raise RequestError(f"rate {rate:g}: all requests of {self.source} come at once")
        return [each._replace(at=round(each.at * trace.rate / rate)) for each in trace.arrivals]

    @property
    def trace(self) -> Trace:
        return poisson(self.source, self.seed) if self.is_drawn else read(self.source, self.requests)

    def __str__(self) -> str:
        first = f", the first {self.requests:,} requests" if self.requests and not self.is_drawn else ""
        rate = f", {self.rate:g} requests a second" if self.rate is not None else ""
        return f"{self.source}{first}{rate}" + (f", seed {self.seed}" if self.is_drawn else "")


# --- drawn


@lru_cache(maxsize=1)
def poisson(source: str, seed: int) -> Trace:
    """Poisson arrivals, one a second. Lengths are 512, 100-1000 (all equally likely) or 512~0.8 (log-normal: median
    and standard deviation of the logarithm). Times and lengths are drawn from streams of their own."""
    settings = {"prompt": "512", "output": "128", "requests": "1000"}
    for part in filter(None, source.partition(":")[2].split(",")):
        name, _, value = part.partition("=")
        if name not in settings or source.count(f"{name}=") > 1:
            raise RequestError(f"{source}: {show(part)}: expected {', '.join(settings)}, each once")
        settings[name] = value
    if not re.fullmatch(r"[1-9]\d{0,8}", settings["requests"]):
        raise RequestError(f"{source}: requests {show(settings['requests'])}: expected a whole number, at least 1")
    gaps, prompts, outputs = (random.Random(f"{seed} {name}") for name in ("gaps", "prompts", "outputs"))
    draw_prompt, draw_output = (length_of(source, name, settings[name]) for name in ("prompt", "output"))
    arrivals, at = [], 0.0
    for number in range(int(settings["requests"])):
        at += gaps.expovariate(1.0)
        prompt = ((token_id(PROMPT, number), draw_prompt(prompts)),)
        arrivals.append(Arrival(round(at * NANOSECONDS), prompt, draw_output(outputs), token_id(OUTPUT, number)))
    return Trace(arrivals, 1.0, 0)


def length_of(source: str, name: str, text: str) -> Callable[[random.Random], int]:
    match = re.fullmatch(r"([1-9]\d{0,8})(?:-([1-9]\d{0,8})|~(\d\.?\d*))?", text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise RequestError(f"{source}: {name} {show(text)}: expected 512, 100-1000 or 512~0.8")
    low, high, sigma = int(match[1]), int(match[2] or match[1]), match[3]
    if sigma:
        return lambda rng: max(1, min(round(low * rng.lognormvariate(0.0, float(sigma))), 131_072))
    return lambda rng: rng.randint(low, high)


# --- files


@dataclass(frozen=True)
class Line:
    """One line of a trace, as its values by name; `where` is file and number, for messages."""

    where: str
    values: dict[str, Any]

    def wrong(self, name: str, expected: str) -> TraceError:
        return TraceError(f"{self.where}: {name} {show(self.values.get(name))}: expected {expected}")

    def integer(self, name: str, least: int = 0, most: int = MOST_TOKENS) -> int:
        value = self.values.get(name)
        if isinstance(value, str) and re.fullmatch(r"\s*\d{1,18}\s*", value):  # of a CSV
            value = int(value)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number, {least} to {most}")
        return value

    def time(self, name: str, unit: int) -> int:
        """Nanoseconds; `unit` is how many of them one is."""
        value: Any = self.values.get(name)
        if type(value) not in (int, Decimal) or not 0 <= value * unit <= MOST_TIME:
            raise self.wrong(name, "a time, at least 0")
        return int((Decimal(value) * unit).to_integral_value())

    def clock(self, name: str) -> int:
        """Nanoseconds since 1970 of `2023-11-16 18:15:46.6805900`, which is UTC."""
        whole, _, fraction = str(self.values[name]).strip().removesuffix("+00:00").partition(".")
        try:
            seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
            return seconds * NANOSECONDS + int(Decimal(f"0.{fraction}") * NANOSECONDS)
        except (ValueError, ArithmeticError):
            raise self.wrong(name, "a time such as 2023-11-16 18:15:46.6805900") from None


@lru_cache(maxsize=1)
def read(path: str, requests: int | None) -> Trace:
    """The first requests of a file.

    TraceError with file, line, name, value and what was expected; also for times out of order.
    """
    arrivals: list[Arrival] = []
    left_out, last = 0, 0
    for line, arrival in islice(requests_of(path), requests):
        if arrival.at < last:
            raise TraceError(f"{line.where}: {arrival.at / 1e9:g} s, after {last / 1e9:g} s: expected order of arrival")
        last = arrival.at
        if arrival.num_prompt_tokens and arrival.num_output_tokens:
            arrivals.append(arrival)
        else:
            left_out += 1
    if not arrivals:
        raise TraceError(f"{path}: expected at least one request with prompt and output tokens")
    span = arrivals[-1].at - arrivals[0].at
    return Trace(arrivals, len(arrivals) / span * NANOSECONDS if span else None, left_out)


def requests_of(path: str) -> Iterator[tuple[Line, Arrival]]:
    """Azure's first arrives at 0."""
    begin = None
    for number, line in enumerate(lines_of(path)):
        if AZURE[0] in line.values:
            at = line.clock(AZURE[0])
            begin = at if begin is None else begin
            prompt, outputs = own_prompt(line, AZURE[1], number), line.integer(AZURE[2])
            yield line, Arrival(at - begin, prompt, outputs, token_id(OUTPUT, number))
        else:
            yield line, (mooncake_request if "input_length" in line.values else plain_request)(line, number)


def lines_of(path: str) -> Iterator[Line]:
    """Those with something in them."""
    try:
        with Path(path).open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        with (gzip.open if is_gzip else open)(path, "rt", encoding="utf-8-sig") as text:
            first = text.readline()
            if first.lstrip().startswith("{"):
                lines = enumerate(chain([first], text), 1)
                yield from (json_line(f"{path}:{number}", line) for number, line in lines if line.strip())
                return
            reader = csv.DictReader(chain([first], text))
            if not set(AZURE) <= set(reader.fieldnames or ()):
                expected = f"expected a trace: {', '.join(AZURE)}, or JSON lines"
                raise TraceError(f"{path}: {show(first.strip()) if first else 'empty'}, {expected}")
            yield from (Line(f"{path}:{reader.line_num}", row) for row in reader)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as problem:
        raise TraceError(f"{path}: can't be read: {getattr(problem, 'strerror', None) or problem}") from None


def json_line(where: str, text: str) -> Line:
    """Fractions as Decimal, so that they are what the file says."""
    try:
        values = json.loads(text, parse_float=Decimal)
    except (ValueError, ArithmeticError, RecursionError) as problem:
        raise TraceError(f"{where}: not JSON, or cut short: {show(text.strip())}: {problem}") from None
    if not isinstance(values, dict):
        raise TraceError(f"{where}: {show(values)}: expected an object")
    return Line(where, values)


def own_prompt(line: Line, name: str, number: int) -> Runs:
    """One that is shared with no other request."""
    return ((token_id(PROMPT, number), line.integer(name)),)


def mooncake_request(line: Line, number: int) -> Arrival:
    """One run a block, the last as long as the prompt reaches into it."""
    length = line.integer("input_length")
    blocks: Any = line.values.get("hash_ids")
    if blocks is None:
        prompt = own_prompt(line, "input_length", number)
    elif not isinstance(blocks, list) or len(blocks) != -(-length // BLOCK):
        raise line.wrong("hash_ids", f"one for each {BLOCK} of input_length {length}")
    elif not all(type(block) is int and 0 <= block <= MOST_ID for block in blocks):
        raise line.wrong("hash_ids", f"whole numbers, 0 to {MOST_ID}")
    else:
        counts = [min(BLOCK, length - BLOCK * index) for index in range(len(blocks))]
        prompt = tuple((token_id(SHARED, block), count) for block, count in zip(blocks, counts, strict=True))
    return Arrival(line.time("timestamp", 1_000_000), prompt, line.integer("output_length"), token_id(OUTPUT, number))


def plain_request(line: Line, number: int) -> Arrival:
    """See PLAIN."""
    values = line.values
    unknown = [name for name in values if name not in PLAIN]
    if unknown or ("prompt" in values) == ("prompt_tokens" in values):
        shown = show(unknown[0] if unknown else sorted(values))
        raise TraceError(f"{line.where}: {shown}: expected {', '.join(PLAIN)}, one of prompt and prompt_tokens")
    return Arrival(
        line.time("at", NANOSECONDS),
        plain_runs(line) if "prompt" in values else own_prompt(line, "prompt_tokens", number),
        line.integer("output_tokens"),
        token_id(SHARED, line.integer("output_id", 0, MOST_ID)) if "output_id" in values else token_id(OUTPUT, number),
        line.integer("priority", -(2**31), 2**31) if "priority" in values else 0,
    )


def plain_runs(line: Line) -> Runs:
    runs: Any = line.values["prompt"]
    for run in runs if isinstance(runs, list) and runs else [[]]:
        is_pair = isinstance(run, list) and len(run) == 2 and all(type(number) is int for number in run)
        if not is_pair or not 0 <= run[0] <= MOST_ID or not 1 <= run[1] <= MOST_TOKENS:
            raise line.wrong("prompt", f"runs [token id, 1 to {MOST_TOKENS} tokens]")
    return tuple((token_id(SHARED, content), count) for content, count in runs)
