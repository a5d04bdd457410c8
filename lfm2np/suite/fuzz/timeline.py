"""The timeline of a trace, as text: a bar a request, from when it was sent until it ended."""

from __future__ import annotations

from lfm2np.oracle.engines.records import MOST_REQUESTS
from lfm2np.oracle.report.report import Table, number
from lfm2np.suite.fuzz.campaign import Failure

WIDTH = 48  # characters of the whole trace
BLANK, PREFILL, DECODE = "\u00b7", "\u2591", "\u2588"
HEADER = ("request", "tokens", "sent", "first token", "ended", "when")


def timeline(failure: Failure) -> Table:
    """Sizes, times and bars. Light: until the first token; without streaming that is the whole bar."""
    played = failure.played
    last = max((answer.ended or 0.0 for answer, *_ in played.answers), default=0.0) or 1.0
    rows: list[list[object]] = []
    for index, (answer, *_) in enumerate(played.answers):
        wrong = " (wrong)" if failure.finding.request == index else ""
        if answer.sent is None or answer.ended is None:
            rows.append([index, f"{sizes(failure, index)}{wrong}", "never sent", "", "", ""])
            continue
        times = (answer.sent, answer.ended if answer.first is None else answer.first, answer.ended)
        start, first, end = (int(WIDTH * time / last) for time in times)
        bar = BLANK * start + PREFILL * max(1, first - start) + DECODE * (end - first)
        shown = map(number, (answer.sent, answer.first, answer.ended))
        rows.append([index, f"{sizes(failure, index)}{wrong}", *shown, bar.ljust(WIDTH, BLANK)])
    return Table(f"Prompt + new tokens; times in {played.clock}", HEADER, rows, (0, 1, 5), MOST_REQUESTS)


def sizes(failure: Failure, index: int) -> str:
    request, answer = failure.trace.requests[index], failure.played.answers[index][0]
    cached = f", {answer.cached_tokens} cached" if answer.cached_tokens else ""
    return f"{len(request.prompt_token_ids)} + {request.max_tokens}{cached}{', aborted' if answer.is_aborted else ''}"
