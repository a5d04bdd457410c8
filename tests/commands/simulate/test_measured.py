"""Predicted beside measured, fixtures/simulate_measured.jsonl: its predictions are those of today's simulation."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulate_measured
from simulate_measured import CASES, RESULTS, Arrival, Driven, drawn_traffic, figures, open_loop, simulated, token_ids

from lfm2np.commands.simulate.cost import CostModel, StepShape, shape_of
from scheduler import Request, Scheduler

LINES = simulate_measured.read_lines(RESULTS)
CELLS = [line for line in LINES if line["kind"] == "cell"]
MODELS = {
    (line["engine"], line["model"]): CostModel(line["name"], line["origin"], tuple(line["forms"]))
    for line in LINES
    if line["kind"] == "model"
}


@pytest.mark.slow
@pytest.mark.parametrize("line", CELLS, ids=lambda line: f"{line['model']}-{line['policy']}-{line['load']}")
def test_the_predictions_are_those_of_the_simulation(line):
    """But for lengths that another machine's logarithm rounds to a token more or less."""
    case = CASES[line["model"]]
    vocab_size = simulate_measured.VOCAB_SIZES[line["model"]]
    arrivals = drawn_traffic(case, line["rate"], line["seconds"], line["seed"], vocab_size)
    times = simulated(case.config(line["policy"]), MODELS[line["engine"], line["model"]], arrivals)
    assert figures(times) == pytest.approx(line["predicted"], rel=0.02)


def test_the_page_has_the_table_and_counts_what_stands_in_it():
    page = (Path(__file__).parents[3] / "docs" / "engine" / "18-simulate.md").read_text(encoding="utf-8")
    table = [row for row in simulate_measured.table(RESULTS).splitlines() if row.startswith("|")]
    assert "\n".join(table) in page
    drifts = [abs(line["step_errors"]["total"]) for line in CELLS]
    assert f"up to {max(drifts):.0%} faster or slower".replace("%", " %") in page
    off = [abs(line["at_its_speed"]["mean_e2e"] / line["measured"]["mean_e2e"] - 1) for line in CELLS]
    assert f"{sum(error <= 0.065 for error in off)} of {len(CELLS)} mean times are within 6 %" in page


class Scheduled:
    """An engine that only schedules: its steps take what a cost model says, by a clock that it moves itself."""

    def __init__(self, case: simulate_measured.Case, policy: str, cost: CostModel) -> None:
        self.scheduler, self.cost, self.now = Scheduler(case.config(policy)), cost, 0
        self.shapes: list[StepShape] = []

    def add(self, number: int, prompt: tuple[int, ...], num_output_tokens: int) -> None:
        self.scheduler.add(Request(str(number), prompt, num_output_tokens))

    def step(self) -> list[tuple[int, bool]]:
        plan = self.scheduler.schedule()
        self.shapes.append(shape_of(plan))
        self.now += self.cost.nanoseconds(self.shapes[-1])
        tokens = {name: [1] for entry in plan.scheduled for name in entry.samples}
        ended = {request.request_id for request in self.scheduler.update(plan, tokens)}
        return [(int(name), name in ended) for name in tokens]

    @property
    def is_busy(self) -> bool:
        return self.scheduler.has_unfinished

    def clock(self) -> float:
        return self.now / 1e9


@pytest.mark.parametrize("policy", simulate_measured.POLICIES)
def test_an_engine_that_takes_what_the_model_says_is_predicted_exactly(policy):
    """So what a table shows as an error is the cost model's, and not of the loop or of the clock."""
    case, cost = CASES["trained"], CostModel("drawn", "nowhere", ({"1": 1e-3, "tokens": 1e-4, "read": 1e-6},))
    arrivals: list[Arrival] = drawn_traffic(case, 20.0, 5.0, 3, 512)
    engine: Driven = Scheduled(case, policy, cost)
    measured = open_loop(engine, arrivals, engine.clock)
    assert figures(measured) == pytest.approx(figures(simulated(case.config(policy), cost, arrivals)), rel=1e-6)
    assert len({token_ids(arrival)[:2] for arrival in arrivals}) == len(arrivals), "no two prompts begin alike"
