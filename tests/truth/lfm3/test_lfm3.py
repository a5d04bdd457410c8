"""LFM3: window, norms behind the operators, gate on heads, two rotations; each counts, in every arithmetic.

plain.py is the second implementation; tests/peers/test_lfm3_peer.py compares with transformers.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import plain
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lfm3_models import MODELS

import lfm2np
from lfm2np.arithmetic import exact
from lfm2np.engine.engine import Engine
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.suite.audit import AuditedEngine
from lfm2np.suite.strategies.tiny_models import TinyModel, checkpoint, loaded
from lfm2np.truth import integers
from lfm2np.truth.integers import attention_scale
from scheduler import Request, RequestRefused, Scheduler, SchedulerConfig, check
from scheduler.groups import held
from scheduler.prefix_cache import REASONS

pytestmark = pytest.mark.slow

IDS = [5, 17, 3, 3, 9, 22, 11, 8, 20, 4, 17, 3, 6, 13, 2, 19, 7]


@pytest.mark.rounding
@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)
def test_it_is_the_network_that_plain_python_computes(tiny: TinyModel):
    truth = np.array(plain.logits(*plain.read_checkpoint(checkpoint(tiny)), IDS))
    assert np.abs(lfm2np.load(checkpoint(tiny), "float64").logits(IDS) - truth).max() < 1e-12
    assert np.abs(lfm2np.load(checkpoint(tiny), "float32").logits(IDS) - truth).max() < 1e-2
    exactly = loaded(tiny).logits(IDS)
    assert np.abs(exactly - truth).max() < 1e-3
    assert exactly.tobytes() == lfm2np.load(checkpoint(tiny), "integers").logits(IDS).tobytes()


SIZES = {
    "chunks": {"max_num_batched_tokens": 5},
    "few blocks: preempted": {"num_blocks": 12},
    "few blocks of windows: preempted": {"num_window_blocks": 6, "max_num_batched_tokens": 5},
    "drafts": {"drafter": lfm2np.NgramDrafter(), "num_speculative_tokens": 3},
}


@pytest.mark.parametrize("name", ["all kinds of layers", "window of one"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_batched_equals_alone(name: str, sizes: dict[str, object]):
    """Ragged, chunked over the window's edge, on shared prefixes, preempted, with drafts; memory audited."""
    model = loaded(MODELS[name])
    first = IDS[:11]
    prompts = {"a": first, "b": IDS[3:8], "c": IDS[:1], "d": [*first[:9], 20, 21], "e": [7, 8, 9] * 4}
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    engine = AuditedEngine(model, **{"num_blocks": 64, "block_size": 3, "max_num_seqs": 4, **sizes})
    for request_id, ids in prompts.items():
        engine.add_request(request_id, ids, greedy)
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    for request_id, ids in prompts.items():
        assert outputs[request_id] == alone(name, tuple(ids), outputs[request_id]), request_id


def test_a_long_request_holds_what_its_window_needs():
    """Of 300 tokens in blocks of 4: in windowed layers never more than the window and a step; each is the reference's.

    A second request then finds the prefix, whose last blocks alone the windowed layers still need.
    """
    model = loaded(replace(MODELS["all kinds of layers"], window=10, positions=400))
    ids = [3 + (7 * i * i + i) % 20 for i in range(300)]
    trace = io.StringIO()
    engine = AuditedEngine(model, num_blocks=120, block_size=4, max_num_batched_tokens=32, trace=trace)
    between: list[int] = []  # steps
    for request_id in ("a", "b"):
        engine.add_request(request_id, ids, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        while engine.has_unfinished:
            outputs = engine.step()
            between += [len(held(request.tables[1])) for request in engine.scheduler.running]
        assert outputs[0].outputs[0].token_ids == model.generate(ids, max_tokens=6).token_ids
    entries = [entry for line in map(json.loads, trace.getvalue().splitlines()) for entry in plan_of(line)]
    assert max(len(held(entry["window_table"])) for entry in entries) == 11  # 10 - 1 + 32 tokens in blocks of 4
    assert max(between) == 3
    assert max(len(entry["block_table"]) for entry in entries) == 77
    assert engine.scheduler.prefix_cache.statistics.hit_tokens == 296
    assert engine.verify() > 70


def plan_of(line: dict[str, Any]) -> list[dict[str, Any]]:
    return line["plan"]["scheduled"] if line["kind"] == "step" else []


def test_a_hit_ends_where_windowed_layers_lost_what_the_next_row_sees():
    """A pool that held one window only: of a prefix that full attention knows, what is left of it is of no use."""
    config = SchedulerConfig(
        num_blocks=40, block_size=2, max_num_batched_tokens=4, watermark=0.0, sliding_window=5, num_window_blocks=5
    )
    scheduler = Scheduler(config)
    for request_id, ids in {"a": (1, 2, 3, 4, 5, 6, 7), "b": (9,) * 11, "c": (1, 2, 3, 4, 5, 6, 7)}.items():
        scheduler.add(Request(request_id, ids, 1))
        while scheduler.has_unfinished:
            plan = scheduler.schedule()
            scheduler.update(plan, {name: [0] for entry in plan.scheduled for name in entry.samples})
            check(scheduler)
    assert scheduler.prefix_cache.statistics.hit_tokens == 0
    assert scheduler.prefix_cache.statistics.ended == dict.fromkeys(REASONS, 0) | {"unknown": 2, "window": 1}


@pytest.mark.parametrize(("window", "blocks"), [(0, 4), (True, 4), (2.0, 4), (2, 0), (2, None), (None, 3)])
def test_a_window_is_a_whole_number_and_has_blocks(window: Any, blocks: Any):
    with pytest.raises(RequestRefused, match=r"sliding_window|num_window_blocks"):
        SchedulerConfig(num_blocks=4, sliding_window=window, num_window_blocks=blocks)


def test_what_windows_leave_no_room_for_is_refused():
    scheduler = Scheduler(SchedulerConfig(num_blocks=40, block_size=2, sliding_window=5, num_window_blocks=4))
    with pytest.raises(RequestRefused, match="windowed layers in a step of 11 tokens need 6 blocks of 2"):
        scheduler.add(Request("a", (1,) * 11, 1))
    with pytest.raises(RequestError, match="num_window_blocks 3: this model has no layer with a window"):
        Engine(loaded(TinyModel()), num_window_blocks=3)


@cache
def alone(name: str, ids: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Nine tokens by the whole sequence's logits, the one behind the prompt and behind each but the last."""
    rows = loaded(MODELS[name]).logits([*ids, *tokens[:8]])[len(ids) - 1 :]
    return tuple(np.argmax(rows, -1).tolist())


@given(
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
)
def test_attention_in_a_window_sees_the_last_positions_only(tokens: int, before: int, window: int, seed: int):
    """Whatever stands outside changes no bit; `exact` is `integers`; a chunk is its rows one by one."""
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(tokens, 4, 6)).astype(np.float32)
    keys, values = rng.normal(size=(2, before + tokens, 2, 6)).astype(np.float32)
    norm, v_proj = np.ones(6, np.float32), rng.normal(size=(12, 4)).astype(np.float32)
    scale = attention_scale(norm, norm, v_proj, window)
    whole = exact.attend(queries, keys, values, scale)
    assert whole.tobytes() == integers.attend(queries, keys, values, scale).tobytes()
    for row in range(tokens):
        stop = before + row + 1
        seen = slice(max(0, stop - window), stop)
        alone = exact.attend(queries[row : row + 1], keys[seen], values[seen], scale._replace(window=None))
        assert whole[row : row + 1].tobytes() == alone.tobytes()


def test_the_digest_is_the_same_on_every_machine():
    """Under Haswell's, Prescott's, SkylakeX's and Zen's kernels, on one thread and two."""
    assert loaded(MODELS["wide"]).digest() == "2c5f3c450b66d0e0c03824b1a48a3e759fd933442a4a104abaff56848394ac14"
