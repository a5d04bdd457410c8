"""Request-level above token-level batching, on one axis of time that plays: the same requests, with what is wasted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from lfm2np.oracle.report.markup import Markup, counted, element, joined, scrolled, table, visible
from lfm2np.teaching.drawings.page.svg import figure, line, rectangle, words
from lfm2np.teaching.drawings.page.view import (
    View,
    by_number,
    cell,
    legend,
    mark,
    short_names,
    step_numbers,
    steps_between,
)
from lfm2np.teaching.drawings.runs.derive import (
    ABSENT,
    DECODE,
    ENDED,
    IDLE,
    LETTERS,
    PREEMPTED,
    PREFILL,
    QUEUED,
    RECOMPUTED,
    Moment,
    colours,
    moments,
    prefix_hit_tokens,
)
from lfm2np.teaching.drawings.runs.other_policies import Outcome, under
from lfm2np.teaching.drawings.runs.recorded_run import Run

LEFT, RIGHT, HEADING, GAP, AXIS = 44.0, 150.0, 26.0, 12.0, 24.0
TALL = 28.0  # of a lane
WIDEST, NARROWEST, ALL_STEPS = 64.0, 16.0, 768.0  # of a step, and of all of them where they need not be narrower
TOKEN = 11.0  # the least width of a token that is drawn by itself
PLAYER = "batching"
MOST_STEPS = 160  # that are drawn
HELD, WAITS = "held", "its slot waits"  # by requests: a slot whose request has ended, and one with no part in a step
SAID = {
    PREFILL: "prefill",
    RECOMPUTED: "computed again",
    DECODE: "decode",
    WAITS: "its slot waits",
    IDLE: "nothing for it",
    HELD: "ended, but keeps its slot",
    PREEMPTED: "preempted",
    QUEUED: "waiting",
}


@dataclass(frozen=True)
class Way:
    """The requests under one way to batch."""

    title: str
    outcome: Outcome
    rectangles: bool  # whether a step computes a rectangle: its batch by the longest share
    states: Mapping[str, Sequence[Moment]]

    def at(self, name: str, number: int) -> Moment:
        """A request's moment in a step; after the last step all have ended."""
        if number >= len(self.outcome.passes):
            return Moment(ENDED)
        now = self.states[name][number]
        if self.rectangles and name in self.outcome.passes[number].batch and not now.tokens:
            return Moment(HELD if now.state == ENDED else WAITS)
        return now

    def cells(self, name: str, number: int) -> int:
        """Wasted in this request's row of the rectangle."""
        if not self.rectangles or number >= len(self.outcome.passes):
            return 0
        computed = self.outcome.passes[number]
        return computed.longest - self.at(name, number).tokens if name in computed.batch else 0


def batching(run: Run) -> View:
    """Both halves are of the requests of `run`, and not of its steps: the scheduler once more, either way."""
    by_requests, by_tokens = (under(run, policy) for policy in ("static", "fcfs"))
    ways = (
        Way("By requests", by_requests, True, moments(by_requests.run)),
        Way("By tokens", by_tokens, False, moments(by_tokens.run)),
    )
    drafted = any(entry.num_drafts for step in run.steps for entry in step.entries)
    longest = max(len(outcome.passes) for outcome in (by_requests, by_tokens))
    count = min(longest, MOST_STEPS)
    spared = prefix_hit_tokens(by_tokens.run)
    cells = by_requests.rows + by_requests.padding
    return View(
        PLAYER,
        "Batching by request and by token",
        f"{wasted_words(by_requests.padding, cells)} By tokens there is no rectangle{sooner(by_requests, by_tokens)}.",
        joined(
            key(ways),
            scrolled(chart(ways, run, count), "Both ways, step by step"),
            by_number(count, lambda number: of_step(ways, number)),
        ),
        joined(
            element("p", f"{counted(longest - count, 'step')} more are not drawn.") if longest > count else None,
            element(
                "p",
                "Both are the real scheduler once more, every sequence by itself"
                + (", without the drafts of the run" if drafted else "")
                + ". A column is a step, a row a request"
                + (f", without the {counted(spared, 'token')} that the prefix cache has" if spared else "")
                + ". All steps are equally wide: each reads all weights once, "
                "and with so few tokens that is nearly all of its time. Until its first token a request waits "
                f"{mean_wait(by_requests)} steps by requests, {mean_wait(by_tokens)} by tokens (means). Where a prompt "
                "of n tokens joins B - 1 requests that decode one token each, a rectangle pads (n - 1)(B - 1) cells; "
                "the flat array none.",
            ),
        ),
        player=PLAYER,
        num_steps=count,
        start=count - 1,
    )


def wasted_words(padding: int, cells: int) -> str:
    if not padding:
        return f"By requests, all {cells} cells are needed here: no request waits in a batch for one that is longer."
    return (
        f"Look at the hatched cells. By requests, {padding} of {cells} cells are computed for nothing: short prompts "
        "wait for long ones, finished requests for the longest answer, and nobody may join."
    )


def sooner(by_requests: Outcome, by_tokens: Outcome) -> str:
    if by_tokens.steps >= by_requests.steps:
        return ""
    return f", and all is done after {by_tokens.steps} steps, not {by_requests.steps}"


def mean_wait(outcome: Outcome) -> str:
    return f"{sum(outcome.first.values()) / max(1, len(outcome.first)):.1f}"


# --- what runs along: a sentence, and the sums so far


def of_step(ways: Sequence[Way], number: int) -> Markup:
    return joined(
        element("p", sentence(ways, number), class_="says"), element("div", counters(ways, number), class_="counters")
    )


def counters(ways: Sequence[Way], number: int) -> Markup:
    rows = []
    for way in ways:
        passes = way.outcome.passes[: number + 1]
        given = sum(len(ids) for each in passes for ids in each.step.tokens.values())
        rows_ = sum(each.rows for each in passes)
        padding = sum(each.padding for each in passes) if way.rectangles else 0
        ended = sum(len(each.step.finished) for each in passes)
        waiting = sum(way.at(name, number).state in (QUEUED, PREEMPTED) for name in way.states)
        rows.append([way.title, len(passes), given, rows_, padding, f"{ended} of {len(way.states)}", waiting])
    head = ["", "steps", "tokens given", "rows computed", "rows wasted", "finished", "waiting"]
    return table(f"After step {number}", head, rows)


def sentence(ways: Sequence[Way], number: int) -> Markup:
    halves = [f"{way.title}, {events_of(way, number)}." for way in ways]
    return joined(element("strong", f"Step {number}. "), " ".join(halves))


def events_of(way: Way, number: int) -> str:
    """The states of a step, each with its requests."""
    shown = short_names(way.states)
    parts = []
    for state, text in SAID.items():
        names = []
        for name in way.states:
            now = way.at(name, number)
            if now.state == state:
                names.append(shown[name] + (f" ({now.tokens})" if now.tokens > 1 else ""))
        if names:
            parts.append(f"{text}: {', '.join(names)}")
    if number < len(way.outcome.passes) and way.outcome.passes[number].step.finished:
        parts.append(f"ends: {', '.join(shown[name] for name in way.outcome.passes[number].step.finished)}")
    return "; ".join(parts) or ("all finished" if number >= len(way.outcome.passes) else "nothing to do")


# --- the picture


@dataclass(frozen=True)
class Scale:
    wide: float  # of a step
    apart: bool  # whether each token is drawn by itself
    count: int  # steps

    def x(self, number: float) -> float:
        return LEFT + number * self.wide


def chart(ways: Sequence[Way], run: Run, count: int) -> Markup:
    """Lanes of requests, by requests above and by tokens below; steps from left to right."""
    longest = max((computed.longest for way in ways for computed in way.outcome.passes), default=1)
    wide = min(WIDEST, max(NARROWEST, ALL_STEPS / count))
    scale = Scale(wide, wide >= TOKEN * longest, count)
    lanes = len(ways[0].states)
    half = HEADING + TALL * lanes + GAP
    width, height = scale.x(count) + RIGHT, 2 * half + AXIS
    bands = (rectangle(scale.x(step), 0, wide, height, class_="band") for step in range(count))
    still: list[object] = [mark(step, band) for step, band in enumerate(bands)]
    moving: list[object] = []
    for index, way in enumerate(ways):
        top = index * half + HEADING
        heading = f"{way.title} (policy {way.outcome.policy})"
        still.append(words(4, top - HEADING / 2, heading, class_="label heading"))
        still += names_of(way, scale, top)
        drawn = [lane(way, name, row, run, scale, top) for row, name in enumerate(way.states)]
        moving.append(element("g", drawn, end_of(way, scale, top, lanes), class_="half"))
    still += step_numbers(count, wide, LEFT, height - AXIS / 2)
    reach = element("clipPath", rectangle(0, 0, width, height), id="reach")
    played = element("g", moving, class_="played", clip_path="url(#reach)")
    x = scale.x(count)
    handle = element("path", d=f"M{x:g} {height - AXIS:g}l-6 9h12z")
    head = element("g", line(x, 0, x, height - AXIS), handle, class_="playhead needs-script")
    sizes = {"data_left": f"{LEFT:g}", "data_wide": f"{wide:g}", "data_steps": count, "data_full": f"{width:g}"}
    description = (
        "Above by requests, below by tokens: a lane for each request, a column for each step. Hatched is wasted."
    )
    return figure(
        "The same requests, batched by requests and by tokens",
        description,
        width,
        height,
        element("g", reach, still, played, head, class_="plays", **sizes),
    )


def names_of(way: Way, scale: Scale, top: float) -> Iterator[Markup]:
    for row, name in enumerate(short_names(way.states).values()):
        y = top + (row + 0.5) * TALL
        yield words(LEFT - 10, y, name, "end", class_="label")
        yield line(LEFT, y, scale.x(scale.count), y, class_="lane")


def lane(way: Way, name: str, row: int, run: Run, scale: Scale, top: float) -> list[Markup]:
    """A request's steps; those in which it only waits are one bar."""
    colour, letter = colours(run)[name], short_names(way.states)[name]
    y = top + row * TALL + 2
    shapes: list[Markup] = []
    steps = range(min(len(way.outcome.passes), scale.count))
    for kind, group in groupby(steps, key=lambda number: way.at(name, number).state):
        numbers = list(group)
        if kind in (QUEUED, PREEMPTED, IDLE):
            wide = scale.wide * len(numbers)
            title = f"{visible(name)}, {steps_between(numbers[0], numbers[-1])}: {SAID[kind]}"
            text = SAID[kind] if wide > 8 * len(SAID[kind]) else LETTERS[kind]
            shapes.append(bar(scale.x(numbers[0]) + 1, y, wide - 2, kind, text, title))
        elif kind not in (ABSENT, ENDED):
            for number in numbers:
                shapes += computed_cells(way, name, number, (colour, letter), scale, y)
    return shapes


def bar(x: float, y: float, width: float, kind: str, text: str, title: str) -> Markup:
    """With its text at the left, where it is seen first."""
    drawn = rectangle(x, y, width, TALL - 4, class_=f"cell {kind}")
    return element("g", drawn, words(x + 5, y + TALL / 2 - 2, text, class_="letter"), element("title", title))


def computed_cells(
    way: Way, name: str, number: int, painted: tuple[int, str], scale: Scale, y: float
) -> Iterator[Markup]:
    """The tokens that a step computes for a request, then the cells that a rectangle adds."""
    colour, letter = painted
    now, wasted = way.at(name, number), way.cells(name, number)
    longest = way.outcome.passes[number].longest if scale.apart or wasted else now.tokens
    side = scale.wide / max(1, longest)
    x = scale.x(number)
    title = f"step {number}, {visible(name)}: {SAID[now.state]}, {counted(now.tokens, 'token')}"
    if scale.apart:
        for index in range(now.tokens):
            yield token(x + index * side, y, side, colour, letter, now.state, title)
        for index in range(now.tokens, now.tokens + wasted):
            yield waste(x + index * side, y, side, now.state, f"{title}; wasted")
        return
    if now.tokens:
        text = letter if now.state == DECODE else str(now.tokens)
        fits = side * now.tokens > 8 * len(text)
        yield token(x, y, side * now.tokens, colour, text if fits else "", now.state, title)
    if wasted:
        yield waste(x + side * now.tokens, y, side * wasted, now.state, f"{title}; {wasted} wasted")
        if wasted > 1 and side * wasted > 8 * len(str(wasted)):
            yield words(x + side * (now.tokens + wasted / 2), y + TALL / 2 - 2, wasted, "middle", class_="lost")


def token(x: float, y: float, width: float, colour: int, text: str, state: str, title: str) -> Markup:
    if state == DECODE:  # round, whatever the width of its step
        side = min(width - 1, TALL - 4)
        return cell(x + (width - side) / 2, y + (TALL - 4 - side) / 2, side, side, colour, text, state, title)
    return cell(x + 0.5, y, width - 1, TALL - 4, colour, text, state, title)


def waste(x: float, y: float, width: float, state: str, title: str) -> Markup:
    kind = "waste held" if state == HELD else "waste"
    return rectangle(x + 0.5, y, width - 1, TALL - 4, element("title", title), class_=kind)


def end_of(way: Way, scale: Scale, top: float, lanes: int) -> Markup | None:
    """Where all are finished, if that is drawn."""
    last = len(way.outcome.passes)
    if last > scale.count:
        return None
    x = scale.x(last)
    y = top + TALL * lanes / 2
    lines = (
        words(x + 8, y + by, text, class_="label")
        for by, text in ((-9, "all finished after"), (9, counted(last, "step")))
    )
    return element("g", line(x, top - 2, x, top + TALL * lanes), *lines, class_="ended")


def key(ways: Sequence[Way]) -> Markup:
    """Of the states that there are."""
    steps = [(way, number) for way in ways for number in range(len(way.outcome.passes))]
    shown = {way.at(name, number).state for way, number in steps for name in way.states}
    samples = {
        PREFILL: ("a token of a prompt", cell(1, 1, 16, 16, 0, "a")),
        DECODE: ("a generated token goes in", cell(1, 1, 16, 16, 0, "a", DECODE)),
        RECOMPUTED: ("computed again", cell(1, 1, 16, 16, 0, "a", RECOMPUTED)),
        QUEUED: ("waits", cell(1, 1, 16, 16, 0, LETTERS[QUEUED], QUEUED)),
        PREEMPTED: ("preempted: its memory was taken", cell(1, 1, 16, 16, 0, LETTERS[PREEMPTED], PREEMPTED)),
        IDLE: ("nothing for it in this step", cell(1, 1, 16, 16, 0, LETTERS[IDLE], IDLE)),
    }
    entries = [sample for state, sample in samples.items() if state in shown]
    wasted = ("wasted: padding, or a slot that waits", rectangle(1, 1, 16, 16, class_="waste"))
    held = ("wasted: ended, but keeps its slot", rectangle(1, 1, 16, 16, class_="waste held"))
    return legend(*entries, wasted, held)
