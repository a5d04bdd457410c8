"""A whole comparison: both predictions at every position, of each quantised checkpoint, and figures of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.work.place import Place, compute
from lfm2np.errors import NumericsError
from lfm2np.oracle.compare.figures import Figures, figures_of
from lfm2np.oracle.compare.pair import Files
from lfm2np.oracle.compare.positions import Others, compare_work
from lfm2np.oracle.compare.sequences import Scored
from lfm2np.values import Progress
from scheduler.checksum import json_sha256


@dataclass(frozen=True, eq=False)
class Compared:
    """The result. figures: one entry per checkpoint, in their order; failed: why sequences could not be computed."""

    base: LoadedModel
    quantised: tuple[Files, ...]
    scored: tuple[Scored, ...]
    figures: tuple[Figures, ...]
    failed: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Of the figures, whose shortest digits say their bits."""
        return json_sha256(self.figures)

    @property
    def sources(self) -> dict[str, dict[str, int]]:
        """By what was scored: sequences, and compared positions."""
        counts_by_source: dict[str, dict[str, int]] = {}
        for sequence in self.scored:
            counts = counts_by_source.setdefault(sequence.source, {"sequences": 0, "positions": 0})
            counts["sequences"] += 1
            counts["positions"] += sequence.stop - sequence.start
        return counts_by_source


def compare(
    model: LoadedModel,
    quantised: Sequence[Files],
    others: Others,
    scored: Sequence[Scored],
    place: Place,
    progress: Progress | None = None,
) -> Compared:
    """The whole comparison of some checkpoints with the base. NumericsError if no sequence can be computed.

    others  loaded checkpoints, or where workers find them, by SHA-256
    """
    names = [checkpoint.sha256 for checkpoint in quantised]
    results = compute(compare_work(others), model, [sequence.item(names) for sequence in scored], place, progress)
    figures = [
        {**figures_of(scored, results, number), "bits_a_weight": checkpoint.bits_a_weight}
        for number, checkpoint in enumerate(quantised)
    ]
    failed = dict.fromkeys(
        f"{sequence.source} {sequence.name}: {columns['error']}"
        for sequence, result in zip(scored, results, strict=True)
        for columns in (result["base"], *result["quantised"])
        if "error" in columns
    )
    if not any(entry["positions"] for entry in figures):
        raise NumericsError(f"no sequence can be computed, {next(iter(failed))}")
    return Compared(model, tuple(quantised), tuple(scored), tuple(figures), tuple(failed))
