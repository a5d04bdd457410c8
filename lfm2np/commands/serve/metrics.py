"""/metrics: what the engine holds and has done, in Prometheus' text format; vLLM's names under our own prefix.

Source: vLLM docs, "Production Metrics".
"""

from __future__ import annotations

from collections.abc import Mapping

from lfm2np.commands.serve.engine_thread import State

PREFIX = "lfm2np:"
GAUGES = {  # with the fields of State
    "num_requests_running": ("Samples that hold a slot.", "running"),
    "num_requests_waiting": ("Samples that wait for one.", "waiting"),
    "num_blocks": ("Blocks of the cache.", "num_blocks"),
    "kv_cache_usage_perc": ("Share of the blocks that requests hold; cached ones are free.", "usage"),
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


def metrics_text(state: State, ended: Mapping[int, int]) -> str:
    """`ended` counts POST requests by HTTP status; 499: the client left."""
    families = [(name, "gauge", text, {"": getattr(state, field)}) for name, (text, field) in GAUGES.items()]
    for name, (text, field) in COUNTERS.items():
        families.append((f"{name}_total", "counter", text, {"": getattr(state.metrics, field)}))
    by_status = {f'{{status="{status}"}}': count for status, count in sorted(ended.items())}
    families.append(("request_total", "counter", "POST requests that ended, by HTTP status.", by_status))
    lines = []
    for name, kind, text, values in families:
        lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"]
        lines += [f"{PREFIX}{name}{labels} {float(value)}" for labels, value in values.items()]
    return "\n".join([*lines, ""])
