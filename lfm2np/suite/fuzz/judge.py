"""Who says what is wrong with the answers to a trace: the oracle here, the engine's own other answers elsewhere."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from lfm2np.engine.loading import Model
from lfm2np.engine.work.place import Place
from lfm2np.oracle.engines.records import Answer, Request, Trace
from lfm2np.oracle.engines.target import Played
from lfm2np.oracle.judging.scored import Known
from lfm2np.suite.fuzz.finding import Finding, finding_of
from lfm2np.suite.fuzz.right import Right, right_answer, with_stops


class Judge(Protocol):
    """What a campaign and its report need to know of right and wrong."""

    @property
    def vocab_size(self) -> int:
        """Token ids of prompts are below it."""

    @property
    def ends(self) -> Collection[int]:
        """End-of-sequence tokens, behind which a server may stop."""

    @property
    def expected(self) -> str:
        """What an answer is held against, as a sentence."""

    @property
    def is_certain(self) -> bool:
        """Whether a trace that failed once is a finding though it never fails again."""

    def with_stops(self, trace: Trace) -> Trace:
        """The trace with stop strings that its requests will meet."""

    def finding(self, trace: Trace, played: Played) -> Finding | None:
        """The worst that is wrong; None for answers that may be right."""

    def right(self, request: Request, seen: Answer | None) -> list[Right]:
        """What should have come; empty where that is unknown."""

    def alone(self, request: Request) -> Request | None:
        """The request whose answer is what should have come; None where that is not the engine's own."""


@dataclass(frozen=True)
class ByTruth:
    """Exact arithmetic, under the rounding error of the declared format.

    texts  also judge texts and finish reasons
    """

    model: Model
    format_name: str
    place: Place = field(default_factory=Place)
    texts: bool = True
    is_certain: ClassVar = True
    expected: ClassVar = (
        "What is right is computed in exact arithmetic, in which the order of sums cannot matter; how far off the "
        "declared format may be is measured at each position."
    )

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def ends(self) -> Collection[int]:
        return self.model.config.eos_token_ids

    def with_stops(self, trace: Trace) -> Trace:
        return with_stops(self.model, trace)

    def finding(self, trace: Trace, played: Played) -> Finding | None:
        return finding_of(self.model, self.format_name, trace, played, Known(place=self.place), self.texts)

    def right(self, request: Request, seen: Answer | None) -> list[Right]:
        return right_answer(self.model, self.format_name, request, seen)

    def alone(self, request: Request) -> Request | None:
        return None
