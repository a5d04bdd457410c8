"""LFM3: window, norms behind the operators, gate on heads, two rotations; each counts, in every arithmetic.

plain.py is the second implementation; tests/peers/test_lfm3_peer.py compares with transformers.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lfm3_models import MODELS

import lfm2np
from lfm2np import plain
from lfm2np.conformance.strategies.models import TinyModel, checkpoint, loaded
from lfm2np.engine.engine import Engine
from lfm2np.numerics import exact, integers
from lfm2np.numerics.integers import attention_scale
from lfm2np.sampling.params import SamplingParams

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


CHANGES = {
    "the window": {"window": 4},
    "the norms behind": {"sandwich": False},
    "the gate": {"gated": False},
    "how much is rotated": {"rotated": 1.0},
    "the window's rotation": {"local_theta": 20.0},
    "full attention's rotation": {"theta": 20.0},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_part_counts(change: dict[str, object]):
    """Without it logits are others by more than any rounding. (Another set of tensors draws other weights: the same
    seed gives those that both have, as tensors are drawn in order, so only keys are changed that add none.)"""
    tiny = MODELS["all kinds of layers"]
    other = replace(tiny, **change)  # type: ignore[arg-type]
    config, tensors = plain.read_checkpoint(checkpoint(tiny))
    changed, _ = plain.read_checkpoint(checkpoint(other))
    if "sandwich" in change:
        tensors = {name: values for name, values in tensors.items() if ".post_" not in name}
    rows = [np.array(plain.logits(keys, tensors, IDS)) for keys in (config, changed)]
    if "sandwich" in change:
        rows[0] = loaded(tiny).logits(IDS)
    assert np.abs(rows[0] - rows[1]).max() > 0.01


SIZES = {
    "chunks": {"max_num_batched_tokens": 5},
    "one token a step": {"max_num_batched_tokens": 1},
    "few blocks: preempted": {"num_blocks": 12},
    "few blocks: swapped": {"num_blocks": 12, "num_host_blocks": 24},
    "drafts": {"drafter": lfm2np.NgramDrafter(), "num_speculative_tokens": 3},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", ["all kinds of layers", "window of one"])
def test_batched_equals_alone(name: str, sizes: dict[str, object]):
    """Ragged, chunked over the window's edge, on shared prefixes, preempted, swapped, with drafts; memory audited."""
    model = loaded(MODELS[name])
    first = IDS[:11]
    prompts = {"a": first, "b": IDS[3:8], "c": IDS[:1], "d": [*first[:9], 20, 21], "e": [7, 8, 9] * 4}
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    engine = Engine(model, **{"num_blocks": 64, "block_size": 3, "max_num_seqs": 4, "check": True, **sizes})
    for request_id, ids in prompts.items():
        engine.add_request(request_id, ids, greedy)
    outputs = {}
    while engine.has_unfinished:
        outputs |= {one.request_id: one.outputs[0].token_ids for one in engine.step() if one.finished}
    for request_id, ids in prompts.items():
        assert outputs[request_id] == greedy_tokens(name, tuple(ids)), request_id


@cache
def greedy_tokens(name: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    """By the whole sequence's logits for each; `generate` gives the same."""
    model, sequence = loaded(MODELS[name]), list(ids)
    for _ in range(9):
        sequence.append(int(np.argmax(model.logits(sequence)[-1])))
    tokens = tuple(sequence[len(ids) :])
    assert model.generate(list(ids), max_tokens=9).token_ids == tokens or ends_early(model, list(ids))
    return tokens


def ends_early(model: lfm2np.Model, ids: list[int]) -> bool:
    """`generate` stops at an end-of-sequence token, which the engine was told to ignore."""
    return model.generate(ids, max_tokens=9).token_ids[-1] in model.config.eos_token_ids


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


@pytest.mark.slow
def test_the_property_suite_passes_on_an_lfm3(tmp_path: Path):
    """All that the engine does, on a checkpoint with a window, a gate, seven taps and biases."""
    tiny = TinyModel(lfm3=True, layers="cSAcS", heads=4, kv_heads=2, head_dim=8, window=5, taps=7, attention_bias=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "lfm2np.conformance"]
    options = ["--model", str(checkpoint(tiny)), "--profile", "quick"]
    ended = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert re.search(r"2\d passed", ended.stdout)
