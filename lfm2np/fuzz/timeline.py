"""A trace as a picture: a row for each request, time to the right; what overlapped, was cached, went wrong."""

from __future__ import annotations

import html

from lfm2np.fuzz.campaign import Failure
from lfm2np.oracle.reports.figure import label
from lfm2np.oracle.reports.parts import visible

WIDTH, LEFT, RIGHT, ROW, TOP = 640.0, 44.0, 628.0, 34.0, 26.0
MOST_WORDS = 100_000
SHORTEST = 3.0  # units of the drawing: a very short request is still visible


def timeline(failure: Failure) -> str:
    """SVG, with a description of the same in words."""
    replies = failure.played.replies
    last = max((reply.ended or 0.0 for reply in replies), default=0.0) or 1.0

    def x(seconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * seconds / last

    height = TOP + ROW * len(replies) + 30.0
    parts = [
        label(LEFT, 16, "prompt + new tokens of each request; light: until the first token; cross: wrong", "start")
    ]
    for index, reply in enumerate(replies):
        y = TOP + ROW * index
        parts.append(label(LEFT - 6, y + 18, str(index), "end"))
        if reply.sent is None or reply.ended is None:
            parts.append(label(LEFT, y + 18, "never sent", "start"))
            continue
        first = reply.ended if reply.first is None else reply.first
        parts.append(bar("prefill", x(reply.sent), x(first), y))
        parts.append(bar("decode", x(first), x(reply.ended), y))
        parts.append(label(x(reply.sent) + 4, y + 17, words(failure, index), "start"))
        if failure.finding.request == index:
            parts.append(cross(wrong_at(failure, index, x(first), x(reply.ended)), y + 11))
    parts.append(label(RIGHT, height - 8, f"{last:.3g}", "end") + label(LEFT, height - 8, "0", "start"))
    title, description = "Timeline of the trace", html.escape(visible(in_words(failure), MOST_WORDS))
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-labelledby="time-title time-text">\n'
        f'<title id="time-title">{title}</title>\n<desc id="time-text">{description}</desc>\n'
        f"{''.join(parts)}</svg>\n"
    )


def bar(name: str, start: float, end: float, y: float) -> str:
    width = max(SHORTEST, end - start)
    return f'<rect class="{name}" x="{start:.1f}" y="{y:.1f}" width="{width:.1f}" height="22"/>\n'


def cross(x: float, y: float) -> str:
    return f'<path class="mark bug" d="M{x:.1f} {y:.1f}m-6-6l12 12m0-12l-12 12"/>\n'


def wrong_at(failure: Failure, index: int, first: float, ended: float) -> float:
    """As if tokens came evenly between the first and the last."""
    position, sent = failure.finding.position, failure.trace.requests[index]
    if position is None:
        return ended
    at = max(0, position.row - len(sent.prompt) + 1)
    return first + (ended - first) * at / max(1, sent.max_tokens - 1)


def words(failure: Failure, index: int) -> str:
    sent, reply = failure.trace.requests[index], failure.played.replies[index]
    parts = [f"{len(sent.prompt)} + {sent.max_tokens}"]
    if reply.cached:
        parts.append(f"{reply.cached} cached")
    if reply.left:
        parts.append("left")
    return ", ".join(parts)


def in_words(failure: Failure) -> str:
    lines = []
    for index, reply in enumerate(failure.played.replies):
        when = "never sent" if reply.sent is None or reply.ended is None else f"{reply.sent:.3g} to {reply.ended:.3g}"
        lines.append(f"Request {index}: {words(failure, index)}; {when}.")
    return " ".join([*lines, failure.finding.what])
