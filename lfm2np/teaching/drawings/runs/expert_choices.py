"""Which experts the tokens of a step chose: read off the detail of a recorded run.

T tokens of the step, N experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def read_evenly(num_experts: int, per_token: int, num_tokens: int) -> float:
    """Experts that a layer is expected to read if each token's are any K of the N, as likely as any others.

    A token leaves one expert out with probability 1 - K/N, so all of them with its power.
    """
    return num_experts * (1 - (1 - per_token / num_experts) ** num_tokens)
