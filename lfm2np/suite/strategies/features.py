"""Examples without what an engine lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.engines.protocol import FEATURES, SIZES
from lfm2np.oracle.engines.records import Request
from lfm2np.suite.strategies.scenarios import LONGEST_PROMPT, MOST_TOKENS, OF_LFM3, OF_MIXTURES, Scenario
from lfm2np.suite.strategies.tiny_models import TinyModel

PLAIN_FIELDS = (
    *("temperature", "n", "max_tokens", "stop_token_ids", "stop", "include_stop_str_in_output", "ignore_eos", "seed"),
    *("logprobs", "prompt_logprobs"),
)
WORDS = (*FEATURES, *SIZES)
DENSE = {name: getattr(TinyModel(), name) for name in ("experts", "experts_a_token", *OF_MIXTURES)}
OF_LFM2 = {name: getattr(TinyModel(), name) for name in ("lfm3", *OF_LFM3)}
PARAMETERS: dict[str, dict[str, Any]] = {  # of requests, as an engine needs them that lacks the word
    "sampling": {"temperature": 0.0, "n": 1},
    "reference-noise": {"temperature": 0.0, "n": 1},
    "samples": {"n": 1},
    "stops": {"stop_token_ids": (), "ignore_eos": True},
    "stop-strings": {"stop": (), "include_stop_str_in_output": False},
    "logprobs": {"logprobs": None, "prompt_logprobs": None},
}
HEAD_DIM = WIDTH = 64  # of published checkpoints; their widths are multiples of it


def fit(example: Any, lacks: frozenset[str]) -> Any:
    """The example without what an engine lacks."""
    if isinstance(example, tuple):
        return tuple(fit(part, lacks) for part in example)
    if isinstance(example, TinyModel):
        return fitting_model(example, lacks)
    if isinstance(example, Scenario):
        of_requests = lacks - {"reference-noise"} if example.any_noise else lacks
        model, requests = fit(example.model, lacks), fit(example.requests, of_requests)
        return replace(example, model=model, requests=requests, sizes=fit(example.sizes, lacks))
    if isinstance(example, Request):
        return fitting_request(example, lacks)
    if isinstance(example, Mapping) and set(example) <= set(SIZES):
        return {name: size for name, size in example.items() if name not in lacks}
    return example


def fitting_model(model: TinyModel, lacks: frozenset[str]) -> TinyModel:
    """A drawn model as near to this one as the engine can run."""
    if model.lfm3 and "lfm3" in lacks:
        model = replace(model, layers=model.layers.replace("S", "A"), **OF_LFM2)
    if model.experts and "mixture-of-experts" in lacks:
        model = replace(model, **DENSE)
    if "overflow" in lacks:
        model = replace(model, overflows=False)
    if "long-contexts" in lacks:
        model = replace(model, positions=TinyModel().positions)
    return published(model) if "odd-shapes" in lacks else model


def published(model: TinyModel) -> TinyModel:
    """With a shape as published checkpoints have it."""
    layers = model.layers if set(model.layers) & {"A", "S"} else model.layers + "A"
    layers = layers if "c" in layers else "c" + layers
    if model.experts:
        first = max(1, model.dense_layers)
        layers = layers if len(layers) > first else layers + layers[-1]
        model = replace(model, **DENSE)
        model = replace(model, experts=8, experts_a_token=4, expert_width=WIDTH, dense_layers=first)
    if model.heads % 2 or model.kv_heads % 2 or model.heads == model.kv_heads:
        model = replace(model, heads=4, kv_heads=2)
    return replace(
        model,
        layers=layers,
        taps=7 if model.lfm3 else 3,
        conv_bias=False,
        tied=not model.overflows,
        head_dim=HEAD_DIM,
        hidden_size=model.heads * HEAD_DIM,
        vocab_size=WIDTH,
        feed_forward=3 * WIDTH,  # two thirds of it is a multiple, too
        multiplier=1.0,
        eps=1e-5,
        theta=1e6,
    )


def fitting_request(request: Request, lacks: frozenset[str]) -> Request:
    params, prompt = request.params, request.prompt_token_ids
    if "processors" in lacks:
        params = SamplingParams(**{name: getattr(params, name) for name in PLAIN_FIELDS})
    for word in PARAMETERS.keys() & lacks:
        params = replace(params, **PARAMETERS[word])
    if "long-contexts" in lacks:
        prompt = prompt[:LONGEST_PROMPT]
        params = replace(params, max_tokens=min(params.max_tokens or MOST_TOKENS, MOST_TOKENS))
    if "priorities" in lacks:
        request = replace(request, priority=0)
    if "salts" in lacks:
        request = replace(request, cache_salt="")
    return replace(request, prompt_token_ids=prompt, params=params)
