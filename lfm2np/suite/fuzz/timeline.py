"""The timeline of a trace: a bar a request, from when it was sent until it ended."""

from __future__ import annotations

from lfm2np.oracle.report.markup import Markup, element
from lfm2np.oracle.report.report import Figure, Table, number
from lfm2np.suite.fuzz.campaign import Failure

WIDTH, LEFT, RIGHT, ROW, TOP = 400.0, 28.0, 390.0, 34.0, 10.0
BAR = 22.0  # its height
CHARACTER = 7.2  # width of one, about
SHORTEST = 3.0  # units of the drawing: a very short request is still visible
CAPTION = (
    "Prompt + new tokens of each request. Light: until the first token (no streaming: the whole bar). Cross: wrong."
)


def timeline(failure: Failure) -> Figure:
    played = failure.played
    last = max((answer.ended or 0.0 for answer, *_ in played.answers), default=0.0) or 1.0
    bottom = TOP + ROW * len(played.answers)
    rows = [drawn(failure, index, last) for index in range(len(played.answers))]
    ends = [label(LEFT, bottom + 16, "0", "start"), label(RIGHT, bottom + 16, f"{last:.3g} {played.clock}", "end")]
    size = {"class_": "chart", "viewBox": f"0 0 {WIDTH:g} {bottom + 24:g}", "role": "img"}
    drawing = element("svg", element("title", "Timeline of the trace"), rows, ends, **size)
    return Figure(drawing, CAPTION, [numbers(failure)])


def drawn(failure: Failure, index: int, last: float) -> list[Markup]:
    """The bar of one request, with its number, its sizes and, if it is the wrong one, a cross."""
    answer, y = failure.played.answers[index][0], TOP + ROW * index
    parts = [label(LEFT - 6, y + 17, str(index), "end")]
    if answer.sent is None or answer.ended is None:
        return [*parts, label(LEFT, y + 17, "never sent", "start")]

    def x(seconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * seconds / last

    first = answer.ended if answer.first is None else answer.first
    parts.append(bar("prefill", x(answer.sent), x(first), y))
    if answer.first is not None:
        parts.append(bar("decode", x(first), x(answer.ended), y))
    words = sizes(failure, index)
    left = max(LEFT, min(x(answer.sent) + 4, RIGHT - CHARACTER * len(words)))
    parts.append(label(left, y + 16, words, "start"))
    if failure.finding.request == index:
        at = wrong_at(failure, index, x(first), x(answer.ended))
        parts.append(element("path", class_="mark bug", d=f"M{at:.1f} {y + 11:.1f}m-6-6l12 12m0-12l-12 12"))
    return parts


def label(x: float, y: float, words: str, anchor: str) -> Markup:
    return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def bar(kind: str, start: float, end: float, y: float) -> Markup:
    width = max(SHORTEST, end - start)
    return element("rect", class_=kind, x=f"{start:.1f}", y=f"{y:.1f}", width=f"{width:.1f}", height=f"{BAR:g}")


def wrong_at(failure: Failure, index: int, first: float, ended: float) -> float:
    """As if tokens came evenly between the first and the last."""
    position, request = failure.finding.position, failure.trace.requests[index]
    if position is None:
        return ended
    at = max(0, position.row - len(request.prompt_token_ids) + 1)
    return first + (ended - first) * at / max(1, request.max_tokens - 1)


def sizes(failure: Failure, index: int) -> str:
    request, answer = failure.trace.requests[index], failure.played.answers[index][0]
    cached = f", {answer.cached_tokens} cached" if answer.cached_tokens else ""
    return f"{len(request.prompt_token_ids)} + {request.max_tokens}{cached}{', aborted' if answer.is_aborted else ''}"


def numbers(failure: Failure) -> Table:
    played = failure.played
    rows = []
    for index, (answer, *_) in enumerate(played.answers):
        is_sent = answer.sent is not None and answer.ended is not None
        times = (
            [number(each) for each in (answer.sent, answer.first, answer.ended)] if is_sent else ["never sent", "", ""]
        )
        rows.append([index, sizes(failure, index), *times])
    return Table(f"Times, {played.clock}", ("request", "tokens", "sent", "first token", "ended"), rows, (0, 1))
