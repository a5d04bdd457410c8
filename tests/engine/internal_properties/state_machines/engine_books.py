"""What a run of our engine must count, kept from its trace, a clock and the scheduler's requests: books and metrics."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

from internal_properties.state_machines.compare import require
from lfm2np.engine.outputs import RequestOutput, RunMetrics
from lfm2np.oracle.engines.records import Request as Asked
from scheduler import Request

NOTHING: dict[str, Any] = {
    item.name: [] if item.name in ("drafted_at", "accepted_at") else 0 for item in fields(RunMetrics)
}
TICK = 1.4e-6  # seconds from one look at the clock to the next: one that a trace rounds to 1e-6


def sample_name(name: str, index: int) -> str:
    """Of a request's sample, as the scheduler, a trace, a drafter and `on_logits` have it."""
    return f"{name}#{index}" if index else name


def sample_names(request: Asked) -> list[str]:
    return [sample_name(request.request_id, index) for index in range(request.params.n)]


class Clock:
    """Goes on by one tick whenever it is looked at."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.looks * TICK


@dataclass
class Book:
    """Of one request: its samples, as the scheduler has them, and at which look at the clock something happened."""

    requests: list[Request]
    arrived: int
    first_scheduled: int | None = None
    first_token: int | None = None
    last_token: int | None = None
    drafts: int = 0
    accepted: int = 0


@dataclass
class Books:
    """Of a whole run."""

    clock: Clock = field(default_factory=Clock)
    metrics: RunMetrics = field(default_factory=lambda: RunMetrics(**deepcopy(NOTHING)))
    books: dict[str, Book] = field(default_factory=dict)
    owner: dict[str, str] = field(default_factory=dict)  # of the scheduler's request ids
    truth: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by the same: all its tokens
    said: dict[str, int] = field(default_factory=dict)  # and how many of them were said


def recount(books: Books, name: str) -> None:
    books.metrics.recomputed_tokens += sum(request.num_recomputed_tokens for request in books.books[name].requests)


def count_drafts(metrics: RunMetrics, book: Book, drafts: list[int], rest: tuple[int, ...], said: int) -> None:
    """Drafts hold as far as they are what comes; then one token more comes, if any does."""
    wrong = [index for index, (a, b) in enumerate(zip(drafts, rest, strict=False)) if a != b]
    held = wrong[0] if wrong else min(len(drafts), len(rest))
    require(said, min(held + 1, len(rest)), "tokens of a step with drafts", str(drafts))
    metrics.drafted_rows += 1
    metrics.drafted_row_tokens += said
    metrics.draft_tokens += len(drafts)
    metrics.accepted_tokens += held
    book.drafts += len(drafts)
    book.accepted += held
    more = [0] * (len(drafts) - len(metrics.drafted_at))
    metrics.drafted_at += more
    metrics.accepted_at += more
    metrics.drafted_at[: len(drafts)] = [count + 1 for count in metrics.drafted_at[: len(drafts)]]
    metrics.accepted_at[:held] = [count + 1 for count in metrics.accepted_at[:held]]


def require_request_metrics(output: RequestOutput, book: Book) -> None:
    name, requests, metrics = output.request_id, book.requests, output.metrics
    assert metrics is not None

    def seconds(start: int, stop: int | None) -> float | None:
        return None if stop is None else (stop - start) * TICK

    longest = max(len(sample.token_ids) for sample in output.outputs)
    per_token = None if book.first_token is None or longest == 1 else seconds(book.first_token, book.last_token)
    times = {
        "queue_time": seconds(book.arrived, book.first_scheduled),
        "time_to_first_token": seconds(book.arrived, book.first_token),
        "time_per_output_token": None if per_token is None else per_token / (longest - 1),
    }
    for what, expected in times.items():
        mine = getattr(metrics, what)
        near = None not in (mine, expected) and abs(mine - expected) < TICK / 100
        require(mine, mine if near else expected, f"metrics: {what}", name)
    counts = {
        "steps": sum(request.num_steps for request in requests),
        "blocks": max(request.most_blocks for request in requests),
        "cached_tokens": sum(request.num_cached_tokens for request in requests),
        "preemptions": sum(request.num_preemptions for request in requests),
        "recomputed_tokens": sum(request.num_recomputed_tokens for request in requests),
        "draft_tokens": book.drafts,
        "accepted_tokens": book.accepted,
        "draft_error": None,
    }
    for what, count in counts.items():
        require(getattr(metrics, what), count, f"metrics: {what}", name)
