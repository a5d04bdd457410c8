"""Draws traces, plays and judges them, and makes what fails small: one run against one engine.

A live engine remembers what was cached and what was freed. So each replay of a trace is of other tokens in the same
places (`relabelled`), on a server that was just started where that is quickly done, and a trace that fails only after
others is played behind them. Whether a trace fails is a rate:
it is measured first, says how many replays a smaller one gets, and is measured again at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, Phase, given, seed, settings, target

from lfm2np.fuzz.draw import Around, traces, unfit
from lfm2np.fuzz.found import Finding, finding_of
from lfm2np.fuzz.played import DEAD, HANG, Played, Player
from lfm2np.fuzz.shrink import shrunk
from lfm2np.fuzz.trace import Trace, calm, joined, relabelled
from lfm2np.loading import Model
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.targets.target import TargetError
from lfm2np.work.place import Place

BATCH = 50  # examples that steering may vary; each batch begins anew
FIRST_REPLAYS, LAST_REPLAYS, MOST_REPLAYS = 3, 10, 6
HISTORIES = (0, 1, 3, 7, 15, 31)  # traces that are played before one that does not fail by itself
MISSED = 0.1  # probability of taking a trace that fails for one that does not
UNREPEATABLE = (DEAD, HANG)  # the server must be started anew
Found = tuple[Trace, Played, Finding]


@dataclass
class Counts:
    """So far."""

    traces: int = 0
    replays: int = 0
    requests: int = 0
    tokens: int = 0
    findings: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


@dataclass(frozen=True)
class Failure:
    """What is handed over: a trace that failed, with the tokens with which it did last, and what was seen then.

    rate      replays that failed, of those at the end: (9, 10); (0, 0) where nothing can be replayed
    drawn     the trace as it was drawn
    traces    how many had been played until then, this one included
    seconds   until it was found; `shrinking` seconds more until it was small
    is_fresh  each replay was on a server that had just been started
    """

    trace: Trace
    played: Played
    finding: Finding
    rate: tuple[int, int]
    drawn: Trace
    traces: int
    seconds: float
    shrinking: float
    is_fresh: bool = False


class Enough(BaseException):
    """Ends the drawing; no Exception, as those are examples that fail."""


@dataclass
class Campaign:
    """One engine under test.

    restart     starts the server, anew if it is there; None: it can't be
    is_quick    it is there so soon that each replay may have a fresh one
    is_live     answers come when they come: the same trace may fail now and not then
    """

    model: Model
    player: Player
    format_name: str
    around: Around
    place: Place = field(default_factory=Place)
    restart: Callable[[], None] | None = None
    is_quick: bool = False
    is_live: bool = True
    shrink_seconds: float = 300.0
    tell: Callable[[Counts], None] = lambda counts: None
    counts: Counts = field(default_factory=Counts)
    label: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    history: list[Trace] = field(default_factory=list)
    best: Failure = field(init=False)  # of the finding that is being shrunk
    is_interrupted: bool = False
    is_fresh: bool = False  # what is played is on a server that was just started
    is_down: bool = False  # it is started anew before the next trace

    def run(self, number: int, examples: int | None, seconds: float | None, most: int = 1) -> Iterator[Failure]:
        """Failures as they are found, at most `most`, within so many examples or seconds."""
        until = math.inf if seconds is None else time.monotonic() + seconds
        left = math.inf if examples is None else examples
        for batch in itertools.count():
            before = self.counts.traces
            if left <= 0 or time.monotonic() >= until:
                return
            self.is_down |= self.is_quick  # a fresh server: what a batch fails by is then in its history, all of it
            found = self.search(number * 100_003 + batch, int(min(BATCH, left)), until)
            left -= self.counts.traces - before
            if found is not None:
                yield self.small(*found)
                self.go_on()
                if self.counts.findings >= most or self.is_lost(found[2]):
                    return

    def is_lost(self, finding: Finding) -> bool:
        """Whether there is no engine any more to be asked."""
        return finding.kind in UNREPEATABLE and self.restart is None

    def unfit(self, trace: Trace) -> str | None:
        """Why this engine can't be asked a trace; None for each that is drawn."""
        return unfit(self.around, self.model.config.vocab_size, trace)

    def relabelled(self, trace: Trace) -> Trace:
        return relabelled(trace, self.around.alphabet, next(self.label))

    def go_on(self) -> None:
        """What was found is handed over; now an interrupt takes effect."""
        if self.is_interrupted:
            raise KeyboardInterrupt

    def search(self, number: int, examples: int, until: float) -> Found | None:
        """Draws until one fails. Steering: Hypothesis varies the traces in which what the server tells is largest."""
        failed: list[Found] = []

        @seed(number)
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.target],
            suppress_health_check=list(HealthCheck),
        )
        @given(traces(self.around))
        def one(trace: Trace) -> None:
            if time.monotonic() > until:
                raise Enough
            fresh = self.relabelled(trace)
            if self.is_down:
                self.history = []
            played, finding = self.play(fresh)
            self.counts.traces += 1
            if finding is not None:
                failed.append((fresh, played, finding))
                raise Enough
            self.history = [*self.history, fresh][-BATCH:]
            for name, value in played.counted.items():
                if math.isfinite(value):
                    target(float(value), label=name)

        with contextlib.suppress(Enough):
            one()
        return failed[0] if failed else None

    def play(self, trace: Trace) -> tuple[Played, Finding | None]:
        """One trace, judged; on a new server if it is to be fresh, or the old is gone. TargetError if none starts."""
        if self.restart is not None and (self.is_fresh or self.is_down):
            self.restart()
            self.is_down = False
        played = self.player.play(trace)
        finding = finding_of(self.model, self.format_name, trace, played, Known(place=self.place))
        self.counts.requests += len(trace.requests)
        self.counts.tokens += sum(len(one.token_ids or ()) for reply in played.replies for one in reply.answers)
        self.tell(self.counts)
        self.is_down = finding is not None and finding.kind in UNREPEATABLE
        return played, finding

    def replay(self, trace: Trace, kind: str) -> Found | None:
        """With other tokens; None if it does not fail in this way."""
        self.counts.replays += 1
        fresh = self.relabelled(trace)
        played, finding = self.play(fresh)
        return (fresh, played, finding) if finding is not None and finding.kind == kind else None

    def fails(self, trace: Trace, kind: str, replays: int) -> tuple[int, Found | None]:
        """In how many of the replays, and the last of those."""
        found = [one for one in (self.replay(trace, kind) for _ in range(replays)) if one is not None]
        return len(found), found[-1] if found else None

    def small(self, trace: Trace, played: Played, finding: Finding) -> Failure:
        """Shrinks it, if it fails again at all. An interrupt, or a server that is gone, leaves what is small so far.

        Without a server every trace fails, whatever it holds: then nothing is replayed.
        """
        self.counts.findings += 1
        began = time.monotonic()
        self.best = Failure(
            trace, played, finding, (0, FIRST_REPLAYS), trace, self.counts.traces, self.counts.seconds, 0.0
        )
        if self.is_lost(finding):
            self.best = replace(self.best, rate=(0, 0))
            return self.best
        try:
            rate = self.repeated(finding.kind)
            if rate:
                self.shrink(finding.kind, replays_for(rate), began)
                times, last = self.fails(self.best.trace, finding.kind, LAST_REPLAYS)
                self.keep(last)
                self.best = replace(self.best, rate=(times, LAST_REPLAYS))
        except TargetError:
            pass
        except KeyboardInterrupt:
            self.is_interrupted = True
        finally:
            self.best = replace(self.best, is_fresh=self.is_fresh, shrinking=time.monotonic() - began)
            self.is_fresh = False
        return self.best

    def repeated(self, kind: str) -> float:
        """The share of replays in which it fails, alone or behind those that were played before it; one request after
        another, if it fails so; on a fresh server, if it fails there."""
        trace = self.best.trace
        for is_fresh in (True, False) if self.is_quick else (False,):
            self.is_fresh = is_fresh
            for count in (*(one for one in HISTORIES if one < len(self.history)), len(self.history)):
                whole = joined([*self.history[len(self.history) - count :], trace])
                for variant in (calm(whole), whole):
                    times, last = self.fails(variant, kind, FIRST_REPLAYS)
                    if last is not None:
                        self.keep(last)
                        return times / FIRST_REPLAYS
        return 0.0

    def keep(self, found: Found | None) -> None:
        if found is not None:
            trace, played, finding = found
            self.best = replace(self.best, trace=trace, played=played, finding=finding)

    def shrink(self, kind: str, replays: int, began: float) -> None:
        needed = 2 if self.is_live else 1  # one failure may be luck, and luck after luck ends in what hardly ever fails

        def still_fails(trace: Trace) -> bool:
            if self.unfit(trace):
                return False
            failures = 0
            for tried in range(1, needed * replays + 1):
                found = self.replay(trace, kind)
                failures += found is not None
                if failures == needed:
                    self.keep(found)
                    return True
                if tried >= replays and not failures:
                    return False
            return False

        shrunk(self.best.trace, still_fails, lambda: time.monotonic() - began < self.shrink_seconds)


def replays_for(rate: float) -> int:
    """How many it takes to miss one that fails at such a rate with a probability of MISSED only."""
    return 1 if rate >= 1.0 else min(MOST_REPLAYS, math.ceil(math.log(MISSED) / math.log(1.0 - rate)))


def known_traces(again: Sequence[Trace], campaign: Campaign, times: int) -> Iterator[Failure]:
    """Failures of earlier runs, each played up to so many times: as it is, and then with other tokens."""
    for trace in again:
        for number in range(times):
            campaign.is_fresh = campaign.is_quick
            fresh = campaign.relabelled(trace) if number else trace
            played, finding = campaign.play(fresh)
            campaign.is_fresh = False
            campaign.counts.traces += 1
            if finding is None:
                continue
            yield campaign.small(fresh, played, finding)
            campaign.go_on()
            if campaign.is_lost(finding):
                return
            break
