"""A scheduler may keep a running request that is aborted for one further step, if it says so."""

from collections.abc import Collection, Mapping, Sequence

import pytest

from lfm2np.suite.schedulers.adapter_calls import Factory, Violation
from lfm2np.suite.schedulers.own import OwnScheduler
from lfm2np.suite.schedulers.program_run import Run


class Late(OwnScheduler):
    """Aborts after the next step, as SGLang does, and names the request then."""

    lacks: Collection[str] = {"abort-at-once"}
    aborted: str | None = None

    def abort(self, request_id: str) -> None:
        self.aborted = request_id

    def update(self, tokens: Mapping[str, Sequence[int]]) -> Collection[str]:
        ended = list(super().update(tokens))
        if self.aborted is not None:
            super().abort(self.aborted)
            ended.append(self.aborted)
            self.aborted = None
        return ended


class Undeclared(Late):
    lacks: Collection[str] = ()


class Silent(OwnScheduler):
    lacks: Collection[str] = {"abort-at-once"}


def abort_and_go_on(factory: Factory) -> None:
    run = Run(factory, {"num_blocks": 4, "block_size": 2, "max_num_seqs": 2, "max_num_batched_tokens": 8})
    run.add("r0", [0, 1, 0], 3)
    run.step(1)
    run.abort("r0")
    run.step(1)
    run.drain()
    run.add("r1", [0, 1, 0], 3)
    run.abort_in_flight("r1")
    run.drain()


def test_a_late_abort_is_right_where_it_is_declared() -> None:
    abort_and_go_on(Late)


def test_a_late_abort_breaks_a_demand_where_it_is_not_declared() -> None:
    with pytest.raises(Violation, match="it ended in step"):
        abort_and_go_on(Undeclared)


def test_a_late_abort_that_is_never_named_is_an_unfinished_request() -> None:
    with pytest.raises(Violation, match="r0: unfinished"):
        abort_and_go_on(Silent)
