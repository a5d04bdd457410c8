"""Draws traces, plays and judges them, and makes what fails small: one run against one engine.

A live engine remembers what was cached and what was freed. So each replay of a trace is of other tokens in the same
places (`relabelled`), on a server that was just started where that is quickly done, and a trace that fails only after
others is played behind them. Whether a trace fails is a rate:
it is measured first, says how many replays a smaller one gets, and is measured again at the end.

On a used server a small trace may fail by what the larger ones before it left there. So at the end it is played behind
short requests of no account, and if it does not fail there the last larger one is taken that does; if none does, what
was played before the smallest is played before it again, and handed over with it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, Phase, given, seed, settings, target

from lfm2np.fuzz.answers.texts import with_stops
from lfm2np.fuzz.draw import TEXTS, Around, traces, unfit
from lfm2np.fuzz.found import Finding, finding_of
from lfm2np.fuzz.played import DEAD, HANG, Played, Player
from lfm2np.fuzz.shrink import shrunk
from lfm2np.fuzz.trace import Sent, Trace, calm, joined, relabelled
from lfm2np.loading import Model
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.targets.target import TargetError
from lfm2np.work.place import Place

BATCH = 50  # examples that steering may vary; each batch begins anew
FIRST_REPLAYS, LAST_REPLAYS, MOST_REPLAYS = 3, 10, 6
HISTORIES = (0, 1, 3, 7, 15, 31)  # traces that are played before one that does not fail by itself
MISSED = 0.1  # probability of taking a trace that fails for one that does not
LEAST_SHARE = 1 / 3  # of the rate at first that the trace at the end must have, or it is another failure
MOST_SHORT = 8  # short requests before a replay
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
    before    traces that were played before each replay, on a server that had served others: the first is of short
              requests; the others are those without which it does not fail
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
    before: tuple[Trace, ...] = ()
    same_tokens: bool = False

    @property
    def needs_before(self) -> bool:
        """Whether it fails only behind what was played before it."""
        return len(self.before) > 1


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
    keeps_tokens: bool = False  # replays are of the same tokens
    kept: list[tuple[Found, tuple[Trace, ...]]] = field(default_factory=list)  # each smaller than that before it; and
    # what was played before it
    earlier: tuple[Trace, ...] = ()  # what was played before the replay that failed last
    log: deque[Trace] = field(default_factory=lambda: deque(maxlen=HISTORIES[-1]))  # what the server was asked last

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
        return with_stops(self.model, relabelled(trace, self.around.alphabet, next(self.label)))

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

    def play(self, trace: Trace, before: Sequence[Trace] = ()) -> tuple[Played, Finding | None]:
        """One trace, judged, behind others that are not; on a new server if it is to be fresh, or the old is gone.
        TargetError if none starts."""
        if self.restart is not None and (self.is_fresh or self.is_down):
            self.restart()
            self.is_down = False
            self.log.clear()
        for other in before:
            self.player.play(other)
        played = self.player.play(trace)
        texts = TEXTS not in self.around.without
        finding = finding_of(self.model, self.format_name, trace, played, Known(place=self.place), texts)
        self.log.extend((*before, trace))
        self.counts.requests += sum(len(one.requests) for one in (*before, trace))
        self.counts.tokens += sum(len(one.token_ids or ()) for reply in played.replies for one in reply.answers)
        self.tell(self.counts)
        self.is_down = finding is not None and finding.kind in UNREPEATABLE
        return played, finding

    def replay(self, trace: Trace, kind: str, before: Sequence[Trace] = ()) -> Found | None:
        """With other tokens, the same others in all; None if it does not fail in this way."""
        self.counts.replays += 1
        label = next(self.label)
        fresh, *others = (
            one if self.keeps_tokens else with_stops(self.model, relabelled(one, self.around.alphabet, label))
            for one in (trace, *before)
        )
        played, finding = self.play(fresh, others)
        if finding is None or finding.kind != kind:
            return None
        self.earlier = tuple(self.log)[:-1]
        return fresh, played, finding

    def fails(self, trace: Trace, kind: str, replays: int, before: Sequence[Trace] = ()) -> tuple[int, Found | None]:
        """In how many of the replays, and the last of those."""
        found = [one for one in (self.replay(trace, kind, before) for _ in range(replays)) if one is not None]
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
                self.confirm(finding.kind, max(1, math.ceil(LEAST_SHARE * rate * LAST_REPLAYS)))
        except TargetError:
            pass
        except KeyboardInterrupt:
            self.is_interrupted = True
        finally:
            self.best = replace(
                self.best,
                is_fresh=self.is_fresh,
                same_tokens=self.keeps_tokens,
                shrinking=time.monotonic() - began,
            )
            self.is_fresh = self.keeps_tokens = False
            self.kept = []
        return self.best

    def repeated(self, kind: str) -> float:
        """The share of replays in which it fails, alone or behind those that were played before it; one request after
        another, if it fails so; on a fresh server, if it fails there; with the same tokens, if with no others."""
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
        for is_fresh in (True, False) if self.is_quick else (False,):
            self.is_fresh, self.keeps_tokens = is_fresh, True
            times, last = self.fails(trace, kind, FIRST_REPLAYS)
            if last is not None:
                self.keep(last)
                return times / FIRST_REPLAYS
        self.keeps_tokens = False
        return 0.0

    def keep(self, found: Found) -> None:
        self.kept.append((found, self.earlier))
        self.best = with_found(self.best, found)

    def confirm(self, kind: str, least: int) -> None:
        """The smallest trace that fails in at least so many of LAST_REPLAYS; of those that fail in fewer the one that
        does so most often."""
        before = () if self.is_fresh else (self.short(),)
        tried: dict[int, tuple[int, Found | None]] = {}

        def times(index: int) -> int:
            if index not in tried:
                tried[index] = self.fails(self.kept[index][0][0], kind, LAST_REPLAYS, before)
                if tried[index][0] > self.best.rate[0] or index == len(self.kept) - 1:
                    self.settle(*tried[index], before)
            return tried[index][0]

        index = last_that(lambda index: times(index) >= least, len(self.kept))
        if index is not None:
            self.settle(*tried[index], before)
        elif not self.is_fresh:
            self.confirm_behind(kind, least, before)

    def confirm_behind(self, kind: str, least: int, short: tuple[Trace, ...]) -> None:
        """The smallest trace behind what was played before it when it failed, as little of that as it takes."""
        (found, earlier) = self.kept[-1]

        def times(before: Sequence[Trace]) -> bool:
            fits = all(self.unfit(one) is None for one in before)
            return fits and self.fails(found[0], kind, FIRST_REPLAYS, (*short, *before))[0] == FIRST_REPLAYS

        for count in HISTORIES[1:]:
            before = earlier[-count:]
            if times(before):
                for one in before:
                    fewer = tuple(other for other in before if other is not one)
                    before = fewer if fewer and times(fewer) else before
                failed, last = self.fails(found[0], kind, LAST_REPLAYS, (*short, *before))
                if failed >= least:
                    self.settle(failed, last, (*short, *before))
                    return

    def settle(self, times: int, last: Found | None, before: tuple[Trace, ...]) -> None:
        if last is not None:
            self.best = replace(with_found(self.best, last), before=before)
        self.best = replace(self.best, rate=(times, LAST_REPLAYS))

    def short(self) -> Trace:
        """Short requests, one after another: what a server remembers after it is not of the trace before."""
        one = Sent((*self.around.first, self.around.alphabet[0]))
        return calm(Trace((one,) * min(MOST_SHORT, self.around.slots)))

    def shrink(self, kind: str, replays: int, began: float) -> None:
        needed = 2 if self.is_live else 1  # one failure may be luck, and luck after luck ends in what hardly ever fails

        def still_fails(trace: Trace) -> bool:
            if self.unfit(trace):
                return False
            failures = 0
            for tried in range(1, needed * replays + 1):
                found = self.replay(trace, kind)
                failures += found is not None
                if found is not None and failures == needed:
                    self.keep(found)
                    return True
                if tried >= replays and not failures:
                    return False
            return False

        shrunk(self.best.trace, still_fails, lambda: time.monotonic() - began < self.shrink_seconds)


def with_found(failure: Failure, found: Found) -> Failure:
    trace, played, finding = found
    return replace(failure, trace=trace, played=played, finding=finding)


def last_that(holds: Callable[[int], bool], count: int) -> int | None:
    """The last index below `count` that holds, as far as steps back of 1, 2, 4, ... and a bisection tell; or None."""
    above, step = count, 1
    index = count - 1
    while index >= 0 and not holds(index):
        if index == 0:
            return None
        above, index, step = index, max(0, index - step), 2 * step
    while above - index > 1:
        middle = (index + above) // 2
        index, above = (middle, above) if holds(middle) else (index, middle)
    return index


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
