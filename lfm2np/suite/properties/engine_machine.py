"""A state machine for a whole engine: any calls in any order, and every token against reference.py."""

# mypy: disable-error-code="misc,untyped-decorator,no-any-unimported,unused-ignore"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.engines.protocol import Factory
from lfm2np.oracle.engines.records import Request
from lfm2np.suite.properties.driver import Outcome, Violation, count, disturb, is_finished, make, require_truth
from lfm2np.suite.strategies.scenarios import Scenario, models, prompts, sampling_params, sizes
from lfm2np.suite.strategies.tiny_models import AnyModel, TinyModel

MOST_STEPS = 3000  # to end at most some dozen requests: a bound on livelock, not on speed


def engine_machine(factory: Factory, adapt: Callable[[Any], Any]) -> type[RuleBasedStateMachine]:
    """The machine's class for one engine; `adapt` leaves what it lacks out of models, sizes and requests."""

    class EngineMachine(RuleBasedStateMachine):
        @initialize(model=models(), sizes=sizes())
        def start(self, model: TinyModel, sizes: dict[str, Any]) -> None:
            self.model: AnyModel = adapt(model)
            self.sizes: dict[str, Any] = adapt(sizes)
            self.engine = make(factory, self.model, self.sizes)
            self.requests: list[Request] = []
            self.outcome, self.alive = Outcome(), set[str]()

        @rule(prompt=prompts(), params=sampling_params(), priority=st.integers(0, 2))
        def add(self, prompt: tuple[int, ...], params: SamplingParams, priority: int) -> None:
            request: Request = adapt(Request(f"r{len(self.requests)}", prompt, params, priority))
            self.engine.add(request)
            self.requests.append(request)
            self.alive.add(request.request_id)

        @rule()
        def step(self) -> None:
            self.outcome.steps += 1
            if self.outcome.steps > MOST_STEPS:
                raise Violation(f"no progress: {sorted(self.alive)} not finished after {MOST_STEPS} steps")
            self.outcome.completions.update(self.engine.step())
            self.alive -= {n for n in self.alive if is_finished(self.outcome.completions.get(n, ()))}

        @precondition(lambda self: self.alive)
        @rule(kind=st.sampled_from(("abort", "preempt", "fork")), which=st.integers(0, 9), seed=st.integers(0, 1))
        def disturb(self, kind: str, which: int, seed: int) -> None:
            originals = [request for request in self.requests if request.request_id in self.alive]
            if originals and hasattr(self.engine, kind):
                disturb(self.engine, kind, originals[which % len(originals)], (0, seed), self.outcome, self.alive)

        def teardown(self) -> None:
            if not hasattr(self, "engine"):
                return
            while self.engine.has_unfinished:
                self.step()
            if self.alive:
                raise Violation(f"{sorted(self.alive)}: the engine says that it is done, but these never ended")
            count(self.outcome)
            require_truth(factory, Scenario(self.model, tuple(self.requests), self.sizes), self.outcome)

    return EngineMachine
