"""Traffic that is drawn: arrivals, lengths and conversations from a seed.

The same parameters and seed give the same requests on every machine and in every version of NumPy (draws.py), and with
more `requests` the trace begins with the shorter one. Gaps, prompt lengths and output lengths are drawn from streams of
their own: another rate leaves the lengths as they are, other lengths leave the times. Nothing is held in memory but the
conversations that are going on.

All rates are requests a second, all times in parameters seconds.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.commands.simulate import fitted
from lfm2np.commands.simulate.draws import Draws, each, exp, times
from lfm2np.commands.simulate.traffic import (
    MOST_TOKENS,
    NANOSECONDS,
    Arrival,
    Runs,
    output_token_id,
    prompt_token_id,
    shared_token_id,
)
from lfm2np.errors import RequestError
from lfm2np.values import require_count, show

Integers = NDArray[np.int64]
SYSTEM_PROMPT = shared_token_id(0)


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens: all from `low` to `high` equally likely, or log-normal about a median, cut to low and high."""

    low: int
    high: int
    median: int | None = None
    sigma: float = 0.0  # standard deviation of the natural logarithm

    def __post_init__(self) -> None:
        require_count("length", self.low, 1, MOST_TOKENS)
        require_count("length", self.high, self.low, MOST_TOKENS)
        if not 0 <= self.sigma <= 10:
            raise RequestError(f"sigma {show(self.sigma)}: expected a number from 0 to 10")

    def draw(self, draws: Draws) -> Integers:
        if self.median is None:
            lengths = self.low + np.floor(draws.uniform() * (self.high - self.low + 1))
        else:
            lengths = np.rint(self.median * exp(self.sigma * draws.normal()))
        clipped: Integers = np.clip(lengths, self.low, self.high).astype(np.int64)
        return clipped


PROMPT, OUTPUT = Lengths(512, 512), Lengths(128, 128)
USER, REPLY = Lengths(1, 4096, 60, 1.0), Lengths(1, 2048, 200, 0.8)  # of a turn


# --- times of arrival, of requests that know nothing of each other


def poisson(rate: float, seed: int) -> Iterator[int]:
    draws = Draws(seed, "gaps")
    return times(lambda: draws.exponential() / rate)


def gamma(rate: float, cv: float, seed: int) -> Iterator[int]:
    """Bursts: gaps of a Gamma distribution whose standard deviation is `cv` times their mean; 1 is Poisson.

    `vllm bench serve --burstiness B` draws the same with cv = 1 / sqrt(B).
    """
    draws, shape = Draws(seed, "gaps"), 1 / (cv * cv)
    return times(lambda: draws.gamma(shape) / (shape * rate))


def day(rate: float, seed: int, night: float = 0.2, period: float = 86_400.0) -> Iterator[int]:
    """Poisson arrivals of mean `rate` whose rate rises from `night` times its peak, where it begins, to it and falls
    again, once in a `period`. Drawn at the peak's rate and thinned (Lewis and Shedler 1979).
    """
    peak = 2 * rate / (1 + night)
    gaps, kept = Draws(seed, "gaps"), Draws(seed, "thinning")
    drawn = times(lambda: gaps.exponential() / peak)
    return (at for at, level in zip(drawn, each(kept.uniform), strict=False) if level < height(at, night, period))


def height(at: int, night: float, period: float) -> float:
    """The day's rate as a share of its peak: two smooth steps, up and down."""
    phase = at % round(period * NANOSECONDS) / (period * NANOSECONDS)
    up = 2 * min(phase, 1 - phase)
    return night + (1 - night) * (3 - 2 * up) * up * up


def independent(
    arriving: Iterable[int],
    seed: int,
    requests: int = 1000,
    prompt: Lengths = PROMPT,
    output: Lengths = OUTPUT,
    system: int = 0,
) -> Iterator[Arrival]:
    """Requests at these times. `system` tokens, the same in all, come before each prompt."""
    before = ((SYSTEM_PROMPT, system),) if system else ()
    prompts, outputs = (each_of(lengths, seed, name) for lengths, name in ((prompt, "prompts"), (output, "outputs")))
    for number, at, tokens, outs in zip(range(requests), arriving, prompts, outputs, strict=False):
        yield Arrival(at, (*before, (prompt_token_id(number), tokens)), outs, output_token_id(number))


def each_of(lengths: Lengths, seed: int, stream: str) -> Iterator[int]:
    draws = Draws(seed, stream)
    return each(lambda: lengths.draw(draws))


# --- requests


def conversations(
    *,
    rate: float,
    turns: float = 5.0,
    system: int = 256,
    prompt: Lengths = USER,
    output: Lengths = REPLY,
    think: float = 30.0,
    token_time: float = 0.02,
    max_context: int = 32_768,
    requests: int = 1000,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Chats: each turn's prompt is the turn before it, that turn's outputs, and `prompt` tokens that are new.

    A conversation begins with the `system` prompt, has `turns` turns on average (geometric), and ends before a turn
    that would take more than `max_context` tokens, outputs included. A turn follows the end of the one before, which
    takes `token_time` for each output token, after a pause of mean `think` (exponential). Conversations begin as
    Poisson, rate / turns of them a second, so that `rate` is reached as far as max_context ends few of them.
    """
    if system + 2 > max_context:
        raise RequestError(f"max_context {max_context}: expected at least {system + 2}: system={system}, and a turn")
    gaps, pauses = Draws(seed, "gaps"), Draws(seed, "pauses")
    begins = times(lambda: gaps.exponential() * (turns / rate))
    thinks = each(lambda: np.rint(pauses.exponential() * (think * NANOSECONDS)).astype(np.int64))
    ends, ends_with = each(Draws(seed, "ends").uniform), 1 / turns
    prompts, outputs = each_of(prompt, seed, "prompts"), each_of(output, seed, "outputs")
    shared: Runs = ((SYSTEM_PROMPT, system),) if system else ()

    def arrivals() -> Iterator[Arrival]:
        due: list[tuple[int, int, Runs, int, int, int]] = []  # a heap: at, entry, before, its length, prompt, outputs
        entries, begin = itertools.count(), next(begins)
        for number in range(requests):
            while not due or begin <= due[0][0]:  # a first turn, cut to max_context
                outs = min(next(outputs), max_context - system - 1)
                new = min(next(prompts), max_context - system - outs)
                heapq.heappush(due, (begin, next(entries), shared, system, new, outs))
                begin = next(begins)
            at, _, before, length, new, outs = heapq.heappop(due)
            whole = (*before, (prompt_token_id(number), new))
            yield Arrival(at, whole, outs, output_token_id(number))
            if next(ends) < ends_with:
                continue
            later = at + outs * round(token_time * NANOSECONDS) + next(thinks)
            length += new + outs
            before = (*whole, (output_token_id(number), outs))
            new, outs = next(prompts), next(outputs)
            if length + new + outs <= max_context:
                heapq.heappush(due, (later, next(entries), before, length, new, outs))

    return arrivals()


TIMES: dict[str, Callable[..., Iterator[int]]] = {"poisson": poisson, "gamma": gamma, "day": day}
REQUESTS: dict[str, Callable[..., Iterator[Arrival]]] = {
    "conversations": conversations,
    "mooncake-like": fitted.mooncake_like,
    "azure-conversation-like": fitted.azure_conversation_like,
}
GENERATORS = (*TIMES, *REQUESTS)


def parse(spec: str, seed: int = 0) -> Iterator[Arrival]:
    """The requests of `NAME` or `NAME:PARAMETER=VALUE,...`; RequestError that names what is not known and what is.

    Lengths are written 512 (always), 100-1000 (any of these), 512~1.2 (log-normal: median and sigma), and
    512~1.2:16-8192 (cut to these).
    """
    require_count("seed", seed, 0, None)
    name, _, rest = spec.partition(":")
    if name not in GENERATORS:
        raise RequestError(f"generator {show(name)}: expected one of {', '.join(GENERATORS)}")
    known = defaults_of(name)
    parameters = {}
    for part in filter(None, rest.split(",")):
        key, equals, text = part.partition("=")
        if key not in known or not equals or key in parameters:
            what = "given twice" if key in parameters else f"expected {', '.join(f'{each}=...' for each in known)}"
            raise RequestError(f"{name}: {show(part)}: {what}")
        parameters[key] = READERS[key](f"{name}: {key}", text)
    missing = [key for key, default in known.items() if default is inspect.Parameter.empty and key not in parameters]
    if missing:
        raise RequestError(f"{name}: {missing[0]}=... is missing")
    if name in REQUESTS:
        return REQUESTS[name](**parameters, seed=seed)
    of_times = {key: parameters.pop(key) for key in defaults_in(TIMES[name]) if key in parameters}
    return independent(TIMES[name](**of_times, seed=seed), seed, **parameters)


def defaults_of(name: str) -> dict[str, Any]:
    """Of a generator's parameters; `inspect.Parameter.empty` where it must be given."""
    return defaults_in(REQUESTS[name]) if name in REQUESTS else defaults_in(TIMES[name]) | defaults_in(independent)


def defaults_in(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {key: each.default for key, each in parameters.items() if key not in ("arriving", "seed")}


def with_parameter(spec: str, parameter: str, value: object) -> str:
    """The specification with another value of one parameter."""
    name, _, rest = spec.partition(":")
    others = [part for part in rest.split(",") if part and part.partition("=")[0] != parameter]
    return f"{name}:{','.join([*others, f'{parameter}={value}'])}"


def number(least: float, most: float) -> Callable[[str, str], float]:
    def read(name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise RequestError(f"{name} {show(text)}: expected a number from {least:g} to {most:g}")
        return value

    return read


def count(least: int, most: int | None) -> Callable[[str, str], int]:
    def read(name: str, text: str) -> int:
        return require_count(name, int(text) if re.fullmatch("[0-9]{1,18}", text) else text, least, most)

    return read


LENGTHS = re.compile(r"(?:(?P<median>\d{1,10})~(?P<sigma>\d+\.?\d*):?)?(?:(?P<low>\d{1,10})(?:-(?P<high>\d{1,10}))?)?")


def read_lengths(name: str, text: str) -> Lengths:
    match = LENGTHS.fullmatch(text)
    if not match or not text or text.endswith(":"):
        raise RequestError(f"{name} {show(text)}: expected 512, 100-1000, 512~1.2 or 512~1.2:16-8192")
    median, sigma, low, high = match.group("median", "sigma", "low", "high")
    try:
        if median is None:
            return Lengths(int(low), int(high or low))
        require_count("median", int(median), 1, MOST_TOKENS)
        return Lengths(int(low or 1), int(high or low or MOST_DRAWN), int(median), float(sigma))
    except RequestError as problem:
        raise RequestError(f"{name} {show(text)}: {problem}") from None


MOST_DRAWN = 131_072  # where a log-normal length without bounds ends: the longest context that the project knows

READERS: dict[str, Callable[[str, str], Any]] = {
    "rate": number(1e-3, 1e6),
    "cv": number(0.01, 30),
    "night": number(0, 1),
    "period": number(1, 1e9),
    "turns": number(1, 1e6),
    "think": number(0, 1e6),
    "token_time": number(0, 1e3),
    "requests": count(1, None),
    "system": count(0, MOST_TOKENS),
    "max_context": count(2, MOST_TOKENS),
    "prompt": read_lengths,
    "output": read_lengths,
}
