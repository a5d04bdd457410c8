"""How long a simulation takes: with leaps over steps of decodes, and one step after another, on the same traffic."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lfm2np.commands.simulate.presets import preset
from lfm2np.commands.simulate.scenario import Scenario, Traffic, simulation_of
from lfm2np.errors import ProofError
from lfm2np.values import Progress
from scheduler import SchedulerConfig

COST = "H100:LFM2-1.2B"
LOADS = {
    # How many requests run at once is what a step costs.
    "low": "poisson:rate=0.5,prompt=100,output=400,requests=400",
    "some": "poisson:rate=10,prompt=200,output=300,requests=400",
    "high": "poisson:rate=60,prompt=200,output=300,requests=400",
    "full": "poisson:rate=1000,prompt=200,output=300,requests=400",
    "conversations": "mooncake-like:requests=60",
}


@dataclass(frozen=True)
class Timed:
    """The fewest seconds of all rounds, of processor time: it runs on one thread, whatever others do."""

    load: str
    traffic: str
    steps: int
    mean_running: float
    leaping: float
    stepping: float

    @property
    def ratio(self) -> float:
        return self.stepping / self.leaping


def measure_simulate(rounds: int, progress: Progress | None = None) -> list[Timed]:
    measured = []
    for number, (load, source) in enumerate(LOADS.items()):
        scenario = Scenario(Traffic(source), SchedulerConfig(65536, max_num_seqs=64), preset(COST))
        leaping, stepping = [], []
        for turn in range(rounds):
            leaping.append(timed(scenario, leaps=True))
            stepping.append(timed(scenario, leaps=False))
            if progress:
                progress(number * rounds + turn + 1, len(LOADS) * rounds)
        statistics = leaping[0][1]
        if replace(statistics, real_steps=0) != replace(stepping[0][1], real_steps=0):
            raise ProofError(f"{source}: a simulation with leaps counts otherwise than one step by step")
        running = sum(statistics.running.bins) / max(1, statistics.busy)
        fewest = [min(seconds for seconds, _ in each) for each in (leaping, stepping)]
        measured.append(Timed(load, source, statistics.steps, running, *fewest))
    return measured


def timed(scenario: Scenario, leaps: bool) -> tuple[float, Any]:
    simulation = simulation_of(scenario, leaps=leaps)
    began = time.process_time()
    statistics = simulation.run(scenario.traffic.arrivals())
    return time.process_time() - began, statistics


def as_json(measured: Sequence[Timed]) -> list[dict[str, Any]]:
    return [{**vars(each), "ratio": each.ratio} for each in measured]


def as_text(measured: Sequence[Timed]) -> str:
    heads = f"{'load':<15}{'steps':>9}{'running':>9}{'leaping':>11}{'stepping':>11}{'ratio':>8}  traffic"
    return "\n".join([heads, *map(line, measured)])


def line(each: Timed) -> str:
    times = f"{each.leaping:>9.2f} s{each.stepping:>9.2f} s{each.ratio:>8.1f}"
    return f"{each.load:<15}{each.steps:>9,}{each.mean_running:>9.1f}{times}  {each.traffic}"
