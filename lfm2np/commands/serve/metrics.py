"""/metrics: what the engine holds, what it has done, and how long clients waited; vLLM's names under our own prefix.

Source: vLLM docs, "Production Metrics".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lfm2np.commands.serve.engine_thread import State
from lfm2np.engine.outputs import RequestMetrics

PREFIX = "lfm2np:"
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
GAUGES = {
    "num_requests_running": ("Samples that hold a slot.", lambda state: state.running),
    "num_requests_waiting": ("Samples that wait for one.", lambda state: state.waiting),
    "num_blocks": ("Blocks of the cache.", lambda state: state.num_blocks),
    "kv_cache_usage_perc": (
        "Share of the blocks that requests hold; cached ones are free.",
        lambda state: state.used_blocks / state.num_blocks,
    ),
}
COUNTERS = {  # with the fields of RunMetrics
    "engine_steps": ("Steps that computed tokens.", "steps"),
    "scheduled_tokens": ("Tokens computed, also those computed again.", "scheduled_tokens"),
    "generation_tokens": ("Tokens generated.", "sampled_tokens"),
    "prefix_cache_hits": ("Prompt tokens taken from the prefix cache.", "prefix_hit_tokens"),
    "num_preemptions": ("Requests whose memory was taken away.", "preemptions"),
    "spec_decode_num_draft_tokens": ("Drafts checked.", "draft_tokens"),
    "spec_decode_num_accepted_tokens": ("Drafts accepted.", "accepted_tokens"),
}


class OfEngine(Collector):
    """Reads the engine's state when it is asked for."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        for name, (text, value) in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=value(state))  # type: ignore[no-untyped-call]
        for name, (text, field) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=getattr(state.metrics, field))


class Metrics:
    def __init__(self, state: Callable[[], State]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(OfEngine(state))
        self._ended = Counter(
            PREFIX + "request", "Requests that ended, by HTTP status.", ["status"], registry=self._registry
        )
        self._first = self._histogram("time_to_first_token_seconds", "From a prompt's arrival to its first token.")
        self._next = self._histogram("time_per_output_token_seconds", "Between a prompt's first token and its last.")
        self._queue = self._histogram("request_queue_time_seconds", "From a prompt's arrival to its first step.")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=SECONDS, registry=self._registry)

    def count(self, status: int) -> None:
        """A request ended with this HTTP status; 499: its client left."""
        self._ended.labels(str(status)).inc()

    def observe(self, metrics: RequestMetrics | None) -> None:
        """A prompt's; None for one that has not ended."""
        for histogram, seconds in (
            ()
            if metrics is None
            else (
                (self._first, metrics.time_to_first_token),
                (self._next, metrics.time_per_output_token),
                (self._queue, metrics.queue_time),
            )
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
