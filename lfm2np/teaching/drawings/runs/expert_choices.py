"""Which experts the tokens of a step chose: read off the detail of a recorded run.

T tokens of the step, N experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lfm2np.teaching.drawings.runs.derive import DECODE, Moment
from lfm2np.teaching.drawings.runs.recorded_run import Run, Step


@dataclass(frozen=True)
class Routes:
    """One sparse layer in one step."""

    layer: int
    num_experts: int
    chosen: tuple[tuple[int, ...], ...]  # [T, K], best first

    @property
    def rows(self) -> list[int]:
        """For each expert the number of tokens that chose it: the rows of its product."""
        return [sum(expert in experts for experts in self.chosen) for expert in range(self.num_experts)]

    @property
    def num_choices(self) -> int:
        return sum(map(len, self.chosen))

    @property
    def num_read(self) -> int:
        return len({expert for experts in self.chosen for expert in experts})

    def tokens_of(self, expert: int) -> list[int]:
        return [row for row, experts in enumerate(self.chosen) if expert in experts]


def routes(step: Step) -> list[Routes]:
    """Of every sparse layer; empty for a dense model, and where the detail was not recorded.

    A layer that was computed again without drafts counts once, with all tokens of the step.
    """
    by_layer: dict[int, Routes] = {}
    for operation in step.operations:
        if operation["operation"] == "best" and operation["layer"] not in by_layer:
            chosen = tuple(map(tuple, operation["chosen"]))
            by_layer[operation["layer"]] = Routes(
                operation["layer"], operation["inputs"]["preferred"]["shape"][1], chosen
            )
    return list(by_layer.values())


def is_sparse(run: Run) -> bool:
    return any(operation["operation"] == "best" for step in run.steps for operation in step.operations)


@dataclass(frozen=True)
class Reading:
    step: int
    decodes: int  # of its tokens
    prefills: int
    num_layers: int
    choices: int
    read: int  # experts' weights, a layer's apart from another's
    held: int  # how many there are
    most_rows: int  # of one expert


def readings(run: Run, states: dict[str, list[Moment]]) -> list[Reading]:
    """Of each step that computed something; `states` are its moments."""
    of_steps = []
    for step in run.steps:
        layers = routes(step)
        if layers:
            moments = [state[step.number] for state in states.values()]
            decodes = sum(moment.tokens for moment in moments if moment.state == DECODE)
            of_steps.append(
                Reading(
                    step=step.number,
                    decodes=decodes,
                    prefills=step.num_tokens - decodes,
                    num_layers=len(layers),
                    choices=sum(layer.num_choices for layer in layers),
                    read=sum(layer.num_read for layer in layers),
                    held=sum(layer.num_experts for layer in layers),
                    most_rows=max(max(layer.rows) for layer in layers),
                )
            )
    return of_steps


def read_evenly(num_experts: int, per_token: int, num_tokens: int) -> float:
    """Experts that a layer is expected to read if each token's are any K of the N, as likely as any others.

    A token leaves one expert out with probability 1 - K/N, so all of them with its power.
    """
    return num_experts * (1 - (1 - per_token / num_experts) ** num_tokens)


def by_decodes(of_steps: Iterable[Reading]) -> dict[int, list[Reading]]:
    """The steps that only decode, by their number of tokens."""
    groups: dict[int, list[Reading]] = {}
    for reading in of_steps:
        if reading.decodes and not reading.prefills:
            groups.setdefault(reading.decodes, []).append(reading)
    return dict(sorted(groups.items()))
