"""Profile `transformers` against the chain that transformers itself builds, and `vllm` against its torch operations.

Supports must be equal and probabilities within 1e-6. The peers compute in float64 here, so that a support can differ
only where top_p or min_p falls on a rounding, which is ruled out by asking for the neighbours of both thresholds too,
and in which of equally likely tokens top_p removes, which torch.sort leaves open.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation.logits_process import LogitsProcessorList

from lfm2np.engine.sampling.choice import integer_weights, process
from lfm2np.engine.sampling.params import SamplingParams, bias_pairs, require_vocabulary
from lfm2np.errors import RequestError

pytestmark = pytest.mark.peers

Array = NDArray[Any]
VOCAB = 40
EOS = (3, 5)
CLOSE = 1e-9  # of a probability to a threshold


@st.composite
def requests(draw: st.DrawFn) -> tuple[Array, SamplingParams, list[int], list[int]]:
    row = np.random.default_rng(draw(st.integers(0, 2**32))).standard_normal(VOCAB).astype(np.float32) * 3
    if draw(st.booleans()):
        row = np.rint(row)  # many ties
    ids = st.lists(st.integers(0, VOCAB - 1), max_size=12)
    params = SamplingParams(
        temperature=draw(st.just(1.0) | st.floats(0.05, 5.0)),
        top_k=draw(st.just(0) | st.integers(1, VOCAB + 3)),
        top_p=draw(st.just(1.0) | st.floats(0.01, 0.999)),
        min_p=draw(st.just(0.0) | st.floats(1e-9, 1.0)),  # below 2**-46 it removes what has weight 0,
        repetition_penalty=draw(st.just(1.0) | st.floats(0.2, 5.0)),
        logit_bias=draw(st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=32))),
        banned_token_ids=draw(ids),
        min_tokens=draw(st.integers(0, 4)),
        max_tokens=16,
        profile="transformers",
    )
    try:
        require_vocabulary(params, VOCAB, EOS)
    except RequestError:
        assume(False)
    return row, params, draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)), draw(ids)


@functools.cache
def smallest_model() -> transformers.Lfm2ForCausalLM:
    config = transformers.Lfm2Config(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        layer_types=["full_attention"],
    )
    return transformers.Lfm2ForCausalLM(config)


def chain(params: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    """What `generate` would use: transformers chooses the processors, their order and their arguments."""
    config = transformers.GenerationConfig(
        do_sample=True,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        sequence_bias=[[[token_id], bias] for token_id, bias in bias_pairs(params)] or None,
        suppress_tokens=list(params.banned_token_ids) or None,
        min_new_tokens=params.min_tokens or None,
        eos_token_id=list(EOS),
    )
    config._eos_token_tensor = torch.tensor(EOS)
    return smallest_model()._get_logits_processor(config, input_ids_seq_length=prompt_length, device="cpu")


def probabilities(processed: Array) -> Array:
    weights = integer_weights(processed)
    return weights / weights.sum()


def near_a_threshold(row: Array, params: SamplingParams, prompt: list[int], output: list[int]) -> bool:
    """Whether a slightly different top_p or min_p gives another support."""
    supports = []
    for sign in (-1, 0, 1):
        top_p = params.top_p if params.top_p == 1.0 else params.top_p + sign * CLOSE
        near = replace(params, top_p=top_p, min_p=min(params.min_p * (1 + sign * CLOSE), 1.0))
        supports.append(np.isfinite(process(row, near, prompt, output, EOS)).tolist())
    return supports[0] != supports[1] or supports[1] != supports[2]


def require_same(
    theirs: torch.Tensor, row: Array, params: SamplingParams, prompt: list[int], output: list[int]
) -> None:
    """Equal supports and probabilities, but for which of equally likely tokens top_p removes: of those, as many."""
    ours = process(row, params, prompt, output, EOS)
    kept, kept_theirs = np.isfinite(ours), torch.isfinite(theirs).numpy()
    before_top_p = process(row, replace(params, top_p=1.0), prompt, output, EOS)
    least = before_top_p[kept].min()
    assert np.all(np.abs(before_top_p[kept != kept_theirs] - least) < CLOSE) and kept.sum() == kept_theirs.sum()
    assert params.top_p < 1.0 or np.array_equal(kept, kept_theirs)
    difference = np.sort(probabilities(ours)) - np.sort(torch.softmax(theirs, -1).numpy())
    assert np.abs(difference).max() < 1e-6
    both = kept & kept_theirs
    assert np.abs(probabilities(ours) - torch.softmax(theirs, -1).numpy())[both].max(initial=0.0) < 1e-6


@given(requests())
def test_profile_transformers_is_transformers_own_chain(request_: Any) -> None:
    row, params, prompt, output = request_
    assume(not near_a_threshold(row, params, prompt, output))
    scores = torch.from_numpy(row.astype(np.float64))[None]
    theirs = chain(params, len(prompt))(torch.tensor([prompt + output]), scores)[0]
    require_same(theirs, row, params, prompt, output)


@pytest.mark.parametrize("profile", ["vllm", "transformers"])
def test_the_orders_meet_where_every_filter_bites(profile: str) -> None:
    """400 rows, probabilities near the thresholds: 168 of them tell min_p before top_p from after it."""
    telling = 0
    for seed in range(400):
        random = np.random.default_rng(seed)
        row = random.standard_normal(VOCAB).astype(np.float32) * 2
        top_p, min_p, top_k = random.uniform(0.5, 0.95), random.uniform(0.02, 0.4), int(random.integers(5, 20))
        params = SamplingParams(temperature=1.5, top_p=top_p, min_p=min_p, top_k=top_k, profile=profile)
        prompt, output = [0, 1], [2]
        if near_a_threshold(row, params, prompt, output):
            continue
        wide = torch.from_numpy(row.astype(np.float64))
        if profile == "vllm":
            theirs = vllm_operations(wide.clone(), params, prompt, output)
        else:
            theirs = chain(params, len(prompt))(torch.tensor([prompt + output]), wide[None])[0]
        require_same(theirs, row, params, prompt, output)
        other = replace(params, profile="transformers" if profile == "vllm" else "vllm")
        telling += np.isfinite(process(row, other, prompt, output, EOS)).tolist() != torch.isfinite(theirs).tolist()
    assert telling >= 100, "the control: the other order is told apart"


@given(requests(), st.floats(-2, 2), st.floats(-2, 2))
def test_the_transformers_chain_in_vllms_order_is_profile_vllm(
    request_: Any, frequency: float, presence: float
) -> None:
    """vLLM itself can't be run here: its operations as published, in torch, min_p before top_k and top_p."""
    row, params, prompt, output = request_
    params = replace(params, profile="vllm", frequency_penalty=frequency, presence_penalty=presence)
    assume(not near_a_threshold(row, params, prompt, output))
    theirs = vllm_operations(torch.from_numpy(row.astype(np.float64)), params, prompt, output)
    require_same(theirs, row, params, prompt, output)


def vllm_operations(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logits [V] after each step of vLLM V1's Sampler, in its order and with its comparisons."""
    logits[list(params.banned_token_ids)] = -torch.inf
    if len(output) < params.min_tokens:
        logits[list(EOS)] = -torch.inf
    for token_id, bias in bias_pairs(params):
        logits[token_id] += bias
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[prompt + output] = True
    penalty = torch.where(seen, torch.tensor(params.repetition_penalty, dtype=torch.float64), 1.0)
    logits *= torch.where(logits > 0, 1.0 / penalty, penalty)
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB)
    logits -= params.frequency_penalty * counts
    logits -= params.presence_penalty * (counts > 0)
    logits /= params.temperature
    likely = torch.softmax(logits, -1)
    logits[likely < params.min_p * likely.max()] = -torch.inf
    ordered, index = logits.sort(descending=False)
    if 0 < params.top_k < VOCAB:
        ordered[ordered < ordered[VOCAB - params.top_k].clone()] = -torch.inf
    if params.top_p < 1.0:
        removed = torch.softmax(ordered, -1).cumsum(-1) <= 1 - params.top_p
        removed[-1] = False
        ordered[removed] = -torch.inf
    return torch.empty_like(logits).scatter_(0, index, ordered)
