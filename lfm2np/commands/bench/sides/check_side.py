"""A whole check as a side: how long engines take to be asked and judged, and what scoring their tokens takes alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from lfm2np.engine.loading import load
from lfm2np.engine.teacher_forcing import score_many
from lfm2np.oracle.check import judged, until_wrong
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Pair
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.sending import While, always, send_all

AT_ONCE = 8


class CheckSide:
    """Of engines whose answers are judged as ones of this format."""

    def __init__(self, format_name: str) -> None:
        self._format = format_name

    def load(self, directory: Path, threads: int) -> dict[str, str]:
        self._model = load(directory)
        return {}

    def check(self, engine: str, first: bool) -> dict[str, float | str]:
        """Seconds of one check, with `first` until the first wrong answer; the verdict, and how many tokens it read.

        asking       the engine alone
        judging      of what it said
        to_verdict   from when the first answers were there
        scoring      the same tokens in exact arithmetic, each request's once; not with `first`
        """
        target, known = PythonTarget(engine, self._model.path), Known()
        target.probe()
        inner = until_wrong(self._model, self._format, known) if first else always
        on, times = timed(inner)
        began = time.perf_counter()
        asked = send_all(self._model, target, AT_ONCE, on=on)
        asking = time.perf_counter() - began - times[1]
        target.close()
        began = time.perf_counter()
        judgement = judged(self._model, asked.abilities, self._format, asked.pairs, known=known)
        ended = time.perf_counter()
        sequences = [[*request.prompt_token_ids, *(answer.token_ids or ())] for request, answer in asked.pairs]
        seconds: dict[str, float | str] = {
            "verdict": str(judgement.total.verdict),
            "tokens": sum(map(len, sequences)),
            "asking": asking,
            "judging": times[1] + ended - began,
            "to_verdict": ended - times[0],
        }
        if not first:
            began = time.perf_counter()
            score_many(self._model, sequences)
            seconds["scoring"] = time.perf_counter() - began
        return seconds


def timed(on: While) -> tuple[While, list[float]]:
    """The same; also when it was first called, and the seconds that it took in all."""
    times = [0.0, 0.0]

    def noted(pairs: Sequence[Pair]) -> bool:
        began = time.perf_counter()
        times[0] = times[0] or began
        goes_on = on(pairs)
        times[1] += time.perf_counter() - began
        return goes_on

    return noted, times
