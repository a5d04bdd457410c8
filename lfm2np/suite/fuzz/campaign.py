"""Draws traces, plays and judges them, and minimizes a failing one: one run against one engine.

A live engine remembers what was cached and freed. So each replay of a trace is of other tokens in the same places
(`relabelled`), on a freshly started server where starting is quick; a trace that fails only after others is played
behind them. A trace fails at a rate. It is measured first, decides how many replays a smaller trace gets, and is
measured again at the end.

On a used server a small trace may fail because of what the larger ones before it left behind. So each replay there is
behind short, unrelated requests; if the smallest trace nevertheless fails too seldom at the end, a larger one is taken.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lfm2np.oracle.engines.records import DEAD, HANG, Trace, greedy
from lfm2np.oracle.engines.target import Played, Target, TargetError
from lfm2np.oracle.report.report import plural
from lfm2np.suite.fuzz.draw_traces import Around, drawn_trace, unfit
from lfm2np.suite.fuzz.judge import ByTruth, Finding
from lfm2np.suite.fuzz.shrink import shrunk
from lfm2np.suite.fuzz.trace import in_turn, joined, relabelled

BATCH = 50  # traces on one server that is quickly started, and the most that are put before one that fails
FIRST_REPLAYS, LAST_REPLAYS, MOST_REPLAYS = 3, 10, 6
HISTORIES = (0, 1, 3, 7, 15, 31)  # traces that are put before one that does not fail by itself
SOME_BEFORE = 7
MISSED = 0.1  # probability of taking a trace that fails for one that does not
LEAST_SHARE = 1 / 3  # of the first rate, which the final trace must have: else it is another failure
MOST_SHORT = 8  # short requests before a replay on a used server
UNREPEATABLE = (DEAD, HANG)  # the server must be restarted
Failed = tuple[Trace, Played, Finding]


@dataclass
class Counts:
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
    """A trace that failed, with the tokens of its last failing replay, and what the engine answered then.

    rate      failing replays, of those at the end: (9, 10); (0, 0) where nothing can be replayed
    drawn     the trace as it was drawn
    traces    how many had been played until then, this one included
    seconds   until it was found; `shrinking` is how long minimizing took
    is_fresh  each replay was on a freshly started server
    same_tokens  each replay was of the same tokens, as it does not fail with others
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
    same_tokens: bool = False


@dataclass
class Campaign:
    """One engine under test.

    restart     restarts the server, or starts it; None: it can't be started from here
    is_quick    it starts so quickly that each replay may have a fresh one
    is_live     answers depend on timing: the same trace may fail once and pass the next time
    report      called with the counts after each trace
    say         called with a line where shrinking begins, and where it ends
    """

    judge: ByTruth
    player: Target
    around: Around
    restart: Callable[[], None] | None = None
    is_quick: bool = False
    is_live: bool = True
    shrink_seconds: float = 300.0
    report: Callable[[Counts], None] = lambda counts: None
    say: Callable[[str], None] = lambda line: None
    counts: Counts = field(default_factory=Counts)
    label: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    history: list[Trace] = field(default_factory=list)
    best: Failure = field(init=False)  # of the finding that is being minimized
    is_interrupted: bool = False
    is_fresh: bool = False  # each trace is played on a freshly started server
    is_down: bool = False  # the server is restarted before the next trace
    keeps_tokens: bool = False  # replays are of the same tokens

    def run(self, number: int, examples: int | None, seconds: float | None, most: int = 1) -> Iterator[Failure]:
        """Failures as they are found, at most `most`, within so many examples or seconds."""
        until = math.inf if seconds is None else time.monotonic() + seconds
        for index in itertools.count() if examples is None else range(examples):
            if time.monotonic() >= until:
                return
            if index % BATCH == 0:
                self.is_down |= self.is_quick  # whatever makes a trace fail is then in its history
            failed = self.drawn(f"{number} {index}")
            if failed is not None:
                yield from self.minimized(*failed)
                if self.counts.findings >= most or self.is_lost(failed[2]):
                    return
                self.is_down |= self.is_quick

    def known(self, traces: Sequence[Trace], times: int) -> Iterator[Failure]:
        """Those of earlier runs that fail again, each played up to so many times: as it is, then with other tokens."""
        for trace in traces:
            for number in range(times):
                self.is_fresh = self.is_quick
                fresh = self.relabelled(trace, next(self.label)) if number else trace
                played, finding = self.play(fresh)
                self.is_fresh = False
                self.counts.traces += 1
                if finding is not None:
                    yield from self.minimized(fresh, played, finding)
                    if self.is_lost(finding):
                        return
                    break

    def minimized(self, trace: Trace, played: Played, finding: Finding) -> Iterator[Failure]:
        """One; an interrupt that came meanwhile is raised when it was yielded."""
        yield self.minimize(trace, played, finding)
        self.raise_interrupt()

    def is_lost(self, finding: Finding) -> bool:
        return finding.kind in UNREPEATABLE and self.restart is None

    def unfit(self, trace: Trace) -> str | None:
        """Why a trace can't be played on this engine; None for each that is drawn."""
        return unfit(self.around, self.judge.model.config.vocab_size, trace)

    def relabelled(self, trace: Trace, label: int) -> Trace:
        return self.judge.with_stops(relabelled(trace, self.around.alphabet, label))

    def raise_interrupt(self) -> None:
        """One that came while a failure was being minimized, now that it was yielded."""
        if self.is_interrupted:
            raise KeyboardInterrupt

    def drawn(self, seed: str) -> Failed | None:
        """Draws a trace and plays it; None if it does not fail."""
        trace = self.relabelled(drawn_trace(self.around, seed), next(self.label))
        if self.is_down:
            self.history = []
        played, finding = self.play(trace)
        self.counts.traces += 1
        if finding is not None:
            return trace, played, finding
        self.history = [*self.history, trace][-BATCH:]
        return None

    def play(self, trace: Trace) -> tuple[Played, Finding | None]:
        """Judged. TargetError if no server starts: a new one if it is to be fresh, or if the old one is gone."""
        if self.restart is not None and (self.is_fresh or self.is_down):
            self.restart()
            self.is_down = False
        played = self.player.play(trace)
        finding = self.judge.finding(trace, played)
        self.counts.requests += len(trace.requests)
        self.counts.tokens += sum(answer.num_tokens for answers in played.answers for answer in answers)
        self.report(self.counts)
        self.is_down = finding is not None and finding.kind in UNREPEATABLE
        return played, finding

    def replay(self, trace: Trace, kind: str) -> Failed | None:
        """With other tokens, shared ones still shared; None if it does not fail in this way."""
        self.counts.replays += 1
        fresh = trace if self.keeps_tokens else self.relabelled(trace, next(self.label))
        if not (self.is_fresh or self.is_down):
            self.player.play(self.short())
        played, finding = self.play(fresh)
        return None if finding is None or finding.kind != kind else (fresh, played, finding)

    def short(self) -> Trace:
        """Short requests, one after another, so that a server remembers nothing of the trace before them."""
        request = greedy("", (*self.around.first, self.around.alphabet[0]), 1)
        return in_turn((request,) * min(MOST_SHORT, self.around.slots))

    def fails(self, trace: Trace, kind: str, replays: int) -> tuple[int, Failed | None]:
        """In how many of the replays, and the last of those."""
        failed = [replayed for _ in range(replays) if (replayed := self.replay(trace, kind)) is not None]
        return len(failed), failed[-1] if failed else None

    def minimize(self, trace: Trace, played: Played, finding: Finding) -> Failure:
        """Shrinks it, if it fails again at all. An interrupt, or a server that is gone, keeps the smallest so far.

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
        limit = f"limit {self.shrink_seconds:g} s"
        self.say(f"shrinking {size_of(trace)}, {limit}: {finding.what}")
        try:
            rate = self.repeated(finding.kind, began)
            if rate:
                first = self.best.trace
                self.shrink(finding.kind, replays_for(rate), began)
                self.confirm(first, finding.kind, math.ceil(LEAST_SHARE * rate * LAST_REPLAYS))
        except TargetError:
            pass
        except KeyboardInterrupt:
            self.is_interrupted = True
        finally:
            seconds = time.monotonic() - began
            self.best = replace(self.best, is_fresh=self.is_fresh, same_tokens=self.keeps_tokens, shrinking=seconds)
            ended = "" if self.has_time(began) else f"; the {limit} was reached"
            self.say(f"shrunk to {size_of(self.best.trace)} in {seconds:.0f} s{ended}")
            self.is_fresh = self.keeps_tokens = False
        return self.best

    def repeated(self, kind: str, began: float) -> float:
        """The share of replays in which it fails, in the first way in which it does; what failed is kept."""
        for is_fresh, keeps_tokens, variant in self.ways(self.best.trace, began):
            self.is_fresh, self.keeps_tokens = is_fresh, keeps_tokens
            times, last = self.fails(variant, kind, FIRST_REPLAYS)
            if last is not None:
                self.keep(last)
                return times / FIRST_REPLAYS
        self.is_fresh = self.keeps_tokens = False
        return 0.0

    def ways(self, trace: Trace, began: float) -> Iterator[tuple[bool, bool, Trace]]:
        """To replay it: on a fresh server or not, with its own tokens or not, and what.

        Alone, behind the traces before it (while there is time), and with the same tokens; each on a fresh server
        first, if that is quick, and one request after another first.
        """
        places = (True, False) if self.is_quick else (False,)
        counts = (*(count for count in HISTORIES if count < len(self.history)), len(self.history))
        for is_fresh in places:
            for count in counts:
                if not count or self.has_time(began):
                    whole = joined([*self.history[len(self.history) - count :], trace])
                    yield is_fresh, False, in_turn(whole.requests)
                    yield is_fresh, False, whole
        for is_fresh in places:
            yield is_fresh, True, trace

    def keep(self, failed: Failed) -> None:
        trace, played, finding = failed
        self.best = replace(self.best, trace=trace, played=played, finding=finding)

    def confirm(self, first: Trace, kind: str, least: int) -> None:
        """Measures how often the smallest trace fails; if that is less than in `least` of them, also the first one, and
        the drawn one behind those before it: larger traces may have left in the server what made smaller ones fail."""
        self.best = replace(self.best, rate=(0, LAST_REPLAYS))
        drawn = joined([*self.history[-SOME_BEFORE:], self.best.drawn])
        for trace in dict.fromkeys((self.best.trace, first, drawn)):
            if self.best.rate[0] < least:
                times, last = self.fails(trace, kind, LAST_REPLAYS)
                if last is not None and times > self.best.rate[0]:
                    self.keep(last)
                    self.best = replace(self.best, rate=(times, LAST_REPLAYS))

    def shrink(self, kind: str, replays: int, began: float) -> None:
        needed = 2 if self.is_live else 1  # a single failure may be luck, and repeated luck ends in a rare failure

        def still_fails(trace: Trace) -> bool:
            if self.unfit(trace):
                return False
            failures = 0
            for tried in range(1, needed * replays + 1):
                failed = self.replay(trace, kind)
                failures += failed is not None
                if failed is not None and failures == needed:
                    self.keep(failed)
                    return True
                if tried >= replays and not failures:
                    break
            return False

        shrunk(self.best.trace, still_fails, lambda: self.has_time(began))

    def has_time(self, began: float) -> bool:
        """To shrink what began to be shrunk then."""
        return time.monotonic() - began < self.shrink_seconds


def size_of(trace: Trace) -> str:
    return f"{plural(len(trace.requests), 'request')}, {trace.num_tokens} tokens"


def replays_for(rate: float) -> int:
    """So many that a trace that fails at this rate passes all of them with a probability of MISSED."""
    return 1 if rate >= 1.0 else min(MOST_REPLAYS, math.ceil(math.log(MISSED) / math.log(1.0 - rate)))
