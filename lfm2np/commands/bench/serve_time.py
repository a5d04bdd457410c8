"""What HTTP costs: throughput beside the engine called directly; and how long a client waits, by policy."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.files import read_config
from lfm2np.commands.bench.measure import Turns
from lfm2np.commands.bench.sides.side_process import SideProcess
from lfm2np.commands.bench.table import columns
from lfm2np.commands.serve.extra import require_extra
from lfm2np.errors import RequestError
from lfm2np.values import Progress
from scheduler import POLICIES

CLIENTS, EACH = 16, 2  # clients, and how often each asks
PROMPT, NEW_TOKENS = 64, 48
ARRIVALS, SHORT, LONG = 24, 32, 384  # requests that come one after another, every third with a long prompt
SLOTS = 8
SEED = 0


@dataclass(frozen=True)
class Waited:
    """Of one client: seconds to its first token, between two tokens in the mean, and until its answer was complete."""

    first: float
    between: float
    whole: float


@dataclass(frozen=True)
class ServeTime:
    """Seconds, direct and over HTTP, of each round; and by policy what clients waited, with the seconds between two
    arrivals."""

    direct: list[float]
    over_http: list[float]
    interval: float
    waited: dict[str, list[Waited]]


def measure_serve(directory: Path, numerics: str, rounds: int, threads: int, show: Progress) -> ServeTime:
    """One side, by turns called directly and over HTTP; then each policy under the same arrivals."""
    require_extra("bench serve")
    randomly = random.Random(SEED)
    size = read_config(directory).vocab_size

    def prompt(length: int) -> list[int]:
        return [randomly.randrange(size) for _ in range(length)]

    prompts = [[prompt(PROMPT) for _ in range(EACH)] for _ in range(CLIENTS)]
    arrivals = [prompt(LONG if number % 3 == 0 else SHORT) for number in range(ARRIVALS)]
    turns = Turns(2 * rounds + len(POLICIES), show)
    directly, served = list[float](), list[float]()
    waited: dict[str, list[Waited]] = {}
    with SideProcess(f"serve-{numerics}", directory, threads) as side:
        side.ask("load")
        side.ask("direct", prompts=[[[1, 2, 3]]], new_tokens=2)
        for _ in range(rounds):
            directly.append(side.ask("direct", prompts=prompts, new_tokens=NEW_TOKENS)["seconds"])
            turns.next()
            served.append(over_http(side, prompts))
            turns.next()
        # As fast as they are answered in a full batch, so that some wait and the queue does not grow for ever.
        interval = statistics.median(directly) / (CLIENTS * EACH)
        for policy in POLICIES:
            waited[policy] = under_load(side, policy, arrivals, interval)
            turns.next()
    return ServeTime(directly, served, interval, waited)


def over_http(side: SideProcess, prompts: Sequence[Sequence[Sequence[int]]]) -> float:
    """Seconds until every client has all its answers, token by token."""
    port = side.ask("open", policy="fcfs", slots=len(prompts))["port"]
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda mine: [asked(port, prompt) for prompt in mine], prompts))
    seconds = time.perf_counter() - began
    side.ask("shut")
    return seconds


def under_load(side: SideProcess, policy: str, prompts: Sequence[Sequence[int]], interval: float) -> list[Waited]:
    """Of clients that come at fixed times, whatever became of those before."""
    port = side.ask("open", policy=policy, slots=SLOTS)["port"]
    answers: list[Waited | None] = [None] * len(prompts)

    def request(number: int) -> None:
        answers[number] = asked(port, prompts[number])

    began, threads = time.perf_counter(), []
    for number in range(len(prompts)):
        time.sleep(max(0.0, began + number * interval - time.perf_counter()))
        threads.append(threading.Thread(target=request, args=(number,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    side.ask("shut")
    complete = [waited for waited in answers if waited is not None]
    if len(complete) < len(answers):
        raise RequestError(f"{policy}: {len(answers) - len(complete)} clients got no answer")
    return complete


def asked(port: int, prompt: Sequence[int]) -> Waited:
    """One request, streamed. RequestError unless all its tokens come."""
    fields = {"prompt": list(prompt), "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    fields["return_token_ids"] = True
    connection = http.client.HTTPConnection("127.0.0.1", port)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
    response = connection.getresponse()
    count, first = 0, 0.0
    for line in response:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - began
            count += sum(len(choice["token_ids"]) for choice in json.loads(line[6:]).get("choices", ()))
    whole = time.perf_counter() - began
    connection.close()
    if response.status != 200 or count != NEW_TOKENS:
        raise RequestError(f"HTTP {response.status} and {count} tokens, expected 200 and {NEW_TOKENS}")
    return Waited(first, (whole - first) / (NEW_TOKENS - 1), whole)


def as_json(measured: ServeTime) -> dict[str, Any]:
    return asdict(measured)


def as_text(numerics: str, measured: ServeTime) -> str:
    ratios = [direct / other for direct, other in zip(measured.direct, measured.over_http, strict=True)]
    tokens = CLIENTS * EACH * NEW_TOKENS
    lines = [
        f"{numerics}: {CLIENTS} clients, {EACH} prompts of {PROMPT} tokens and {NEW_TOKENS} new ones each, streamed",
        f"tokens a second: {tokens / statistics.median(measured.over_http):.1f} over HTTP, "
        f"{tokens / statistics.median(measured.direct):.1f} directly; HTTP / direct {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})",
        "",
        f"{ARRIVALS} requests, one every {measured.interval:.2f} s, prompts of {LONG}, {SHORT}, {SHORT}, ... tokens, "
        f"{SLOTS} slots; seconds",
    ]
    rows = [["policy", "to first token", "longest", "between tokens", "longest", "until complete"]]
    for policy, waited in measured.waited.items():
        firsts, betweens = [times.first for times in waited], [times.between for times in waited]
        figures = [statistics.median(firsts), max(firsts), statistics.median(betweens), max(betweens)]
        rows.append(
            [policy, *(f"{each:.2f}" for each in figures), f"{statistics.median(each.whole for each in waited):.2f}"]
        )
    return "\n".join([*lines, columns(rows)])
