"""One simulation as plain data: it can be sent to a worker, and its result kept under its checksum."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lfm2np.commands.simulate import generators, trace_files
from lfm2np.commands.simulate.cost import CostModel
from lfm2np.commands.simulate.drawn_acceptance import Acceptance
from lfm2np.commands.simulate.report import as_json, group_as_json
from lfm2np.commands.simulate.run import Simulation
from lfm2np.commands.simulate.traffic import NANOSECONDS, Arrival, faster, first, within
from lfm2np.errors import RequestError
from lfm2np.values import require_count, show
from scheduler import RequestRefused, SchedulerConfig, TraceWriter
from scheduler.checksum import json_sha256

MOST_WAITING = 20_000  # requests: a queue this long is saturated, and ends the simulation
MOST_DRAFTS = 1024
EVERY = 256  # requests between two reports of progress

Report = Callable[[int], None]  # requests that have arrived


@dataclass(frozen=True)
class Traffic:
    """A trace's file, or a generator's specification (generators.parse); then the part of it that is taken.

    speed   how many times as fast as they stand there the requests come
    start, stop  seconds of the trace; requests of this part come from time 0 on
    """

    source: str
    format: str | None = None
    rate: float | None = None
    seed: int = 0
    sort: bool = False
    speed: float = 1.0
    requests: int | None = None
    start: float = 0.0
    stop: float | None = None

    @property
    def is_drawn(self) -> bool:
        return self.source.partition(":")[0] in generators.GENERATORS and not Path(self.source).exists()

    def require(self) -> None:
        """RequestError for a source that is neither a file nor a generator, and for options that it can't have."""
        if self.is_drawn and self.rate is not None:
            raise RequestError(f"--rate {self.rate:g}: the generator has its own, as in {self.source}")
        if not self.is_drawn and not Path(self.source).exists():
            known = ", ".join(generators.GENERATORS)
            raise RequestError(f"{show(self.source)}: no such file, and no generator: expected one of {known}")

    def arrivals(self, skipped: Counter[str] | None = None) -> Iterator[Arrival]:
        if self.is_drawn:
            arrivals = generators.parse(self.source, self.seed)
        else:
            arrivals = trace_files.read(
                self.source, self.format, rate=self.rate, seed=self.seed, sort=self.sort, skipped=skipped
            )
        if self.start or self.stop is not None:
            stop = NANOSECONDS * 10**9 if self.stop is None else round(self.stop * NANOSECONDS)
            arrivals = within(arrivals, round(self.start * NANOSECONDS), stop)
        if self.speed != 1.0:
            arrivals = faster(arrivals, self.speed)
        return arrivals if self.requests is None else first(arrivals, self.requests)

    def parameters(self) -> list[str]:
        """Of its generator; a file has none."""
        return list(generators.defaults_of(self.source.partition(":")[0])) if self.is_drawn else []

    def content(self) -> str:
        """What the source is: the specification, or the file's SHA-256."""
        return self.source if self.is_drawn else hashlib.sha256(Path(self.source).read_bytes()).hexdigest()

    def __str__(self) -> str:
        seed = f", seed {self.seed}" if self.is_drawn or self.rate is not None else ""
        speed = "" if self.speed == 1.0 else f", {self.speed:g} times as fast"
        return f"{self.source}{seed}{speed}"


@dataclass(frozen=True)
class Memory:
    """Bytes for cache blocks: a block has the keys and values of its tokens, and one state after the last of them."""

    size: int
    per_token: int
    per_state: int

    def num_blocks(self, block_size: int) -> int:
        return self.size // (block_size * self.per_token + self.per_state)


@dataclass(frozen=True)
class Scenario:
    """`acceptance`: of `num_drafts` drafts a step for each request that decodes. `memory`, if given, says how many
    blocks there are, whatever config.num_blocks is."""

    traffic: Traffic
    config: SchedulerConfig
    cost: CostModel
    num_drafts: int = 0
    acceptance: Acceptance | None = None
    most_waiting: int = MOST_WAITING
    memory: Memory | None = None

    def sized(self) -> SchedulerConfig:
        """RequestError for a memory that does not hold a block."""
        if self.memory is None:
            return self.config
        return config_of(asdict(self.config) | {"num_blocks": self.memory.num_blocks(self.config.block_size)})

    def key(self, content: str) -> str:
        """The checksum of all that its result depends on; `content` is that of its traffic, if that is a file."""
        traffic = asdict(self.traffic) | ({} if self.traffic.is_drawn else {"source": content})
        cost = self.cost.as_json()
        drafts = [self.num_drafts, None if self.acceptance is None else asdict(self.acceptance)]
        return json_sha256([traffic, asdict(self.sized()), cost, drafts, self.most_waiting])

    def unread(self) -> tuple[str, ...]:
        """Settings that its policy does not read."""
        return () if self.config.policy == "waiting-served" else OF_WAITING_SERVED

    def with_setting(self, name: str, value: Any) -> Scenario:
        """RequestError for an unknown name, or a value that it can't have."""
        if name == "num_blocks" and self.memory is not None:
            raise RequestError("num_blocks: --memory says how many there are")
        if name == "drafts":
            return dataclasses.replace(self, num_drafts=require_count("drafts", value, 0, MOST_DRAFTS))
        if name == "speed":
            return dataclasses.replace(self, traffic=dataclasses.replace(self.traffic, speed=positive("speed", value)))
        if name in self.traffic.parameters():
            source = generators.with_parameter(self.traffic.source, name, value)
            return dataclasses.replace(self, traffic=dataclasses.replace(self.traffic, source=source))
        if name not in CONFIG:
            known = ", ".join([*SETTINGS, *self.traffic.parameters()])
            raise RequestError(f"setting {name!r}: expected one of {known}")
        return dataclasses.replace(self, config=config_of(asdict(self.config) | {name: value}))


def config_of(sizes: Mapping[str, Any]) -> SchedulerConfig:
    """RequestError for what can't be."""
    try:
        return SchedulerConfig(**sizes)
    except RequestRefused as error:
        raise RequestError(str(error)) from None


def positive(name: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 < value < 1e9:  # type: ignore[operator]
        raise RequestError(f"{name} {show(value)}: expected a number above 0")
    return float(value)  # type: ignore[arg-type]


CONFIG = tuple(field.name for field in dataclasses.fields(SchedulerConfig))
OF_WAITING_SERVED = ("waiting_served_ratio", "max_waiting_tokens")  # what no other policy reads
CHOSEN = (*CONFIG, "drafts")
SETTINGS = (*CHOSEN, "speed")  # and the parameters of a generator


def simulate(scenario: Scenario, report: Report | None = None, trace: TraceWriter | None = None) -> dict[str, Any]:
    """Its result as report.as_json, with what its traffic left out, and its groups of requests under "groups".

    With a trace every step is taken by itself, and written.
    """
    skipped: Counter[str] = Counter()
    scenario.traffic.require()
    simulation = simulation_of(scenario, trace=trace)
    arrivals = scenario.traffic.arrivals(skipped)
    statistics = simulation.run(arrivals if report is None else reported(arrivals, report), scenario.most_waiting)
    result = as_json(statistics, simulation.scheduler, scenario.cost, str(scenario.traffic), len(simulation.live))
    result["requests"]["skipped"] = dict(skipped)
    if not result["requests"]["arrived"]:
        raise RequestError(f"{scenario.traffic}: no request in this part of it")
    return {**result, "groups": [group_as_json(group) for group in statistics.groups]}


def simulation_of(scenario: Scenario, **more: Any) -> Simulation:
    accepts = None if scenario.acceptance is None else scenario.acceptance.draw
    return Simulation(scenario.sized(), scenario.cost, scenario.num_drafts, accepts, **more)


def reported(arrivals: Iterator[Arrival], report: Report) -> Iterator[Arrival]:
    for number, arrival in enumerate(arrivals):
        if number % EVERY == 0:
            report(number)
        yield arrival
