"""`locate` tells what an engine's step found in its caches from what it computed: faults of sections A, B and C."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from dumps import BIASED, LFM3, TRAINED, loaded, located, rows_of, up_to
from faults import FAULTS, inject, of_file

from lfm2np.errors import DumpError
from lfm2np.oracle.locate.dump import content_of, parse_dump
from lfm2np.oracle.locate.locate import Finding
from lfm2np.oracle.recorders.lfm2np_recorder import record

pytestmark = [pytest.mark.rounding, pytest.mark.slow]

READ = ("self_attn.keys_read", "self_attn.values_read")
# The run, whose rows, which rows of layer 0's convolution are wrong, and which steps found a wrong state there.
STATE = {
    "convolution-crosses-requests": ("with neighbours", "b", "rows 0 to 1 of 8", "step 0 of 4"),
    "state-read-by-index-in-the-batch": ("with neighbours", "c", "from row 8 on", "from step 2 on"),
    "slot-index-wraps-modulo-2": ("with neighbours", "c", "from row 7 on", "from step 1 on"),
    "state-written-to-every-slot": ("with neighbours", "b", "from row 5 on", "from step 1 on"),
    "slot-freed-twice": ("one after another", "b", "only row 6", "step 1 of 3"),
    "previous-tenants-state-is-read": ("one after another", "b", "rows 0 to 1 of 8", "step 0 of 3"),
    "one-token-prompt-reads-the-previous-tenants-state": (
        "one after another",
        "c",
        "rows 0 to 1 of 3",
        "steps 0 to 1 of 3",
    ),
    "masked-padding-gets-a-bias": ("in chunks", "a", "only the first row, 0", "step 0 of 7"),
    "left-padding-enters-the-convolution": ("with neighbours", "b", "rows 0 to 1 of 8", "step 0 of 4"),
    "right-padding-enters-the-state": ("with neighbours", "b", "rows 5 to 6 of 8", "steps 1 to 2 of 4"),
    "state-dropped-after-the-prompt": ("in chunks", "a", "rows 13 to 14 of 17", "steps 3 to 4 of 7"),
    "single-token-step-has-no-state": ("in chunks", "a", "from row 13 on", "from step 3 on"),
    "state-zeroed-when-the-batch-is-repacked": ("with neighbours", "b", "from row 6 on", "from step 2 on"),
    "chunk-ignores-the-past-state": ("in chunks", "a", "the 2 rows at multiples of 5, 5 to 11", "steps 1 to 2 of 7"),
    "chunk-truncates-the-past-state": ("in chunks", "a", "the row at multiples of 5, 5 to 10", "steps 1 to 2 of 7"),
    "chunk-deep-in-a-prompt-ignores-the-past-state": ("at length", "a", "rows 48 to 49 of 92", "step 1 of 4"),
    "short-chunk-leaves-the-state-one-behind": ("token by token", "a", "rows 1 to 6 of 8", "steps 1 to 6 of 8"),
    "state-never-advanced": ("token by token", "a", "from row 1 on", "from step 1 on"),
    "rejected-drafts-stay-in-the-state": ("wrong drafts", "a", "from row 9 on", "from step 1 on"),
    "prefix-hit-without-its-state": ("after a hit", "b", "rows 8 to 9 of 14", "step 0 of 3"),
    "checkpoint-taken-before-the-chunk": ("after a hit", "b", "rows 8 to 9 of 14", "step 0 of 3"),
    "checkpoint-one-token-ahead-of-its-key": ("after a hit", "b", "rows 8 to 9 of 14", "step 0 of 3"),
    "blocks-published-before-they-are-written": ("a shared prefix", "b", "rows 8 to 9 of 14", "step 0 of 3"),
    "fork-does-not-copy-the-state": ("sampled thrice", "a#1", "rows 9 to 10 of 12", "steps 0 to 1 of 3"),
}
CHANGES_NO_ACTIVATION = {"slot-leaked-when-admission-fails-after-a-match", "prompts-are-never-published"}


@pytest.mark.parametrize("name", STATE)
def test_a_fault_of_the_state_is_found_in_what_a_step_found_and_not_in_what_it_computed(name: str) -> None:
    """And, without the states, at the first convolution."""
    run, request, rows, steps = STATE[name]
    model = loaded(BIASED if name == "masked-padding-gets-a-bias" else TRAINED, "float32")
    with inject(name):
        recorded = rows_of(model, run, request)
    findings = located(model, recorded, up_to("model.layers.2")).findings  # the first with attention
    first = findings[0]
    assert first.name == "model.layers.0.conv.state"
    assert first.steps.startswith(steps)
    stored = ("conv.state", "keys_read", "values_read")
    assert all(finding.name.endswith(stored) for finding in findings) and first.recomputed == ()
    is_seen = up_to("model.layers.0")
    first = located(model, recorded, lambda tensor: is_seen(tensor) and not tensor.endswith(".state")).findings[0]
    assert first.name == "model.layers.0.conv.conv"
    assert first.rows.startswith(rows)
    assert first.channels.startswith("all")


# Sections B and C: the run, whose rows, the first wrong tensor of a layer, and the steps.
CACHED = {
    "attention-crosses-requests": ("with neighbours", "b", "self_attn.keys_read", "steps 0 to 1 of 4"),
    "hit-blocks-omitted-from-the-plan": ("after a hit", "b", "self_attn.keys_read", "step 0 of 3"),
    "prefill-restarts-at-0-over-cached-blocks": ("after a hit", "b", "conv.state", "step 0 of 4"),
    "half-the-block-size-used-for-offsets": ("in chunks", "a", "self_attn.keys_read", "from step 1 on"),
    "old-content-of-a-cell-is-read": ("in chunks", "a", "self_attn.keys_read", "each of the 7"),
    "rejected-drafts-stay-in-the-blocks": ("wrong drafts", "a", "self_attn.keys_read", "from step 1 on"),
    "shared-block-written-without-a-copy": ("sampled thrice", "a#1", "self_attn.keys_read", "from step 1 on"),
    "duplicate-block-freed-while-in-a-table": ("a shared prefix", "b", "self_attn.keys_read", "from step 2 on"),
    "positions-are-rows-of-the-batch": ("with neighbours", "b", "self_attn.q_rotated", "each of the 4"),
    "positions-restart-at-each-chunk": ("in chunks", "a", "self_attn.q_rotated", "steps 1 to 2 of 7"),
}


@pytest.mark.parametrize("name", CACHED)
def test_a_fault_in_a_cache_is_distinguished_from_one_in_a_computation(name: str) -> None:
    """What is stored in blocks and checkpoints is named where a step found it; a wrong position at the rotation."""
    run, request, tensor, steps = CACHED[name]
    model = loaded(TRAINED, "float32")
    with inject(name):
        recorded = rows_of(model, run, request)
    findings = located(model, recorded, up_to("model.layers.2")).findings
    assert findings[0].name.endswith(f".{tensor}")
    assert findings[0].steps.startswith(steps)
    kinds = {finding.name.split(".", 3)[3] for finding in findings}
    stored = {"conv.state", *READ} | ({"self_attn.attended"} if name == "attention-crosses-requests" else set())
    assert kinds <= ({"self_attn.q_rotated", "self_attn.k_rotated"} if tensor.endswith("rotated") else stored)


# Of an LFM3: the run, whose rows, and what the first wrong step read wrongly of the layer with a window.
CHUNKS, THRICE = "window, in chunks", "window, sampled thrice"
WINDOWS = {
    "window-block-freed-one-early": (CHUNKS, "a", "positions 0 to 3 of 20, as step 1"),
    "window-block-read-after-it-was-reused": (CHUNKS, "b", "positions 1 to 3 of 25, as step 2"),
    "prefix-hit-of-full-layers-only": ("window, a lost prefix", "b", "positions 9 to 11 of 30, as step 0"),
    "window-blocks-written-by-the-other-table": (CHUNKS, "a", "positions 20 to 29 of 33, as step 3"),
    "window-shared-block-written-without-a-copy": (THRICE, "a", "position 26 of 28, as step 2"),
    "window-blocks-not-copied-with-the-others": (THRICE, "a#1", "positions 24 to 25 of 27, as step 0"),
}
ONLY_KEEPS_BLOCKS = {
    "window-blocks-never-given-back",
    "window-blocks-of-rejected-drafts-leak",
    "prefix-hit-needs-every-block-of-the-window-layers",
}


@cache
def findings_of_a_right_engine(run: str, request: str) -> tuple[Finding, ...]:
    model = loaded(LFM3, "float32")
    return located(model, rows_of(model, run, request)).findings


@pytest.mark.parametrize("name", WINDOWS)
def test_a_fault_of_a_windows_blocks_is_found_in_what_a_step_read(name: str) -> None:
    run, request, read = WINDOWS[name]
    model = loaded(LFM3, "float32")
    assert findings_of_a_right_engine(run, request) == ()
    with inject(name):
        recorded = rows_of(model, run, request)
    first, *others = located(model, recorded, up_to("model.layers.4")).findings
    assert (first.name, first.rows) == ("model.layers.4.self_attn.keys_read", f"{read} read them")
    assert {finding.name.partition(".4.")[2] for finding in others} <= {*READ, "self_attn.attended"}


def test_rows_that_a_window_hides_are_not_taken_for_those_it_shows() -> None:
    """An engine that dumps all positions is told what was expected, and why."""
    model = loaded(LFM3, "float32")
    recorded = rows_of(model, "window, in chunks", "a")
    name = "model.layers.4.self_attn.keys_read"
    recorded[name] = np.concatenate([recorded[name], recorded[name][:1]])
    message = r"keys_read: .* expected .* rows, .* in sum: what each step sees, from 15 positions before its first on"
    with pytest.raises(DumpError, match=message):
        parse_dump(content_of(recorded), "dump", model.config)


def test_every_fault_of_the_state_and_of_windows_blocks_is_in_a_table() -> None:
    assert {entry.name for entry in FAULTS if entry.section == "A"} == STATE.keys() | CHANGES_NO_ACTIVATION
    windows = {fault.name for fault in of_file("lfm3") if fault.section == "B"}
    assert windows == WINDOWS.keys() | ONLY_KEEPS_BLOCKS


@pytest.mark.parametrize(("run", "name"), sorted({(run, name) for run, name, *_ in STATE.values()}))
def test_without_a_fault_the_engines_rows_are_right(run: str, name: str) -> None:
    model = loaded(TRAINED, "float32")
    recorded = rows_of(model, run, name)
    report = located(model, recorded)
    assert report.findings == ()
    assert len(report.checks) == len(recorded) - 2 > 80


def test_the_engines_rows_are_the_references_own_bits() -> None:
    """In exact arithmetic, from chunks, after a hit and with neighbours: nothing is lost on the way to the dump."""
    model = loaded(TRAINED, "exact")
    for run, request in (("in chunks", "a"), ("with neighbours", "c"), ("after a hit", "b"), ("wrong drafts", "a")):
        recorded = rows_of(model, run, request)
        whole = record(model, recorded["token_ids"].tolist())
        for name, values in recorded.items():
            if name.endswith(".conv.state"):
                u = np.pad(whole[name.replace("state", "u")], ((2, 0), (0, 0)))  # L = 3
                starts = len(whole["token_ids"]) - np.cumsum(recorded["steps"][::-1])[::-1]
                assert np.array_equal(values, [u[start : start + 2].ravel() for start in starts]), name
            elif name != "steps":
                computed = slice(None if name == "token_ids" else -len(values), None)  # not what came from a cache
                assert np.array_equal(values, whole[name][computed]), name
