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
FIELDS: dict[str, dict[str, Any]] = {  # of a drawn model, as an engine needs them that lacks the word
    "biases": {"conv_bias": False},
    "taps": {"taps": 3},
    "overflow": {"overflows": False},
    "constants": {"eps": 1e-5, "theta": 1e6},
    "long-contexts": {"positions": TinyModel().positions},
}
PARAMETERS: dict[str, dict[str, Any]] = {  # and of requests
    "sampling": {"temperature": 0.0, "n": 1},
    "reference-noise": {"temperature": 0.0, "n": 1},
    "samples": {"n": 1},
    "stops": {"stop_token_ids": (), "ignore_eos": True},
    "stop-strings": {"stop": (), "include_stop_str_in_output": False},
    "logprobs": {"logprobs": None, "prompt_logprobs": None},
}
HEAD_DIM, WIDTH = 64, 64  # of published checkpoints; their widths are multiples of it


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
    changed = changed_by(FIELDS, lacks)
    layers = model.layers
    if model.lfm3 and "lfm3" in lacks:
        model, layers = replace(model, **OF_LFM2), layers.replace("S", "A")
    if "convolution-only" in lacks and not set(layers) & {"A", "S"}:
        layers += "A"
    if "attention-only" in lacks and "c" not in layers:
        layers = "c" + layers
    changed["layers"] = layers
    if "taps" in lacks and model.lfm3:
        changed["taps"] = 7
    if "untied" in lacks and (not model.overflows or "overflow" in lacks):
        changed["tied"] = True
    if model.experts:
        changed |= fitting_mixture(replace(model, layers=layers), lacks)
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    if "odd-heads" in lacks and (heads % 2 or kv_heads % 2 or heads == kv_heads):
        heads, kv_heads = 4, 2
    if "head-dims" in lacks:
        head_dim = HEAD_DIM
    if "widths" in lacks:
        if "head-dims" not in lacks:
            head_dim = 8 // heads if heads in (1, 2, 4) else head_dim
        widths = {"hidden_size": heads * head_dim, "vocab_size": WIDTH}
        changed |= {**widths, "feed_forward": 3 * WIDTH, "multiplier": 1.0}  # two thirds of it is a multiple, too
    return replace(model, heads=heads, kv_heads=kv_heads, head_dim=head_dim, **changed)


def changed_by(table: Mapping[str, dict[str, Any]], lacks: frozenset[str]) -> dict[str, Any]:
    return {name: value for word in table if word in lacks for name, value in table[word].items()}


def fitting_mixture(model: TinyModel, lacks: frozenset[str]) -> dict[str, Any]:
    """What changes of its experts; where there may be none the fields about them are as in any dense model."""
    if "mixture-of-experts" in lacks:
        return dict(DENSE)
    changed: dict[str, Any] = {}
    if "odd-mixtures" in lacks:
        first = max(1, model.dense_layers)
        layers = model.layers if len(model.layers) > first else model.layers + model.layers[-1]
        kept = {"expert_width": model.expert_width, "dense_layers": first, "layers": layers}
        changed |= {**DENSE, "experts": 8, "experts_a_token": 4, **kept}
    if "widths" in lacks:
        changed["expert_width"] = WIDTH
    return changed


def fitting_request(request: Request, lacks: frozenset[str]) -> Request:
    params, prompt = request.params, request.prompt_token_ids
    if "processors" in lacks:
        params = SamplingParams(**{name: getattr(params, name) for name in PLAIN_FIELDS})
    params = replace(params, **changed_by(PARAMETERS, lacks))
    if "long-contexts" in lacks:
        prompt = prompt[:LONGEST_PROMPT]
        params = replace(params, max_tokens=min(params.max_tokens or MOST_TOKENS, MOST_TOKENS))
    if "priorities" in lacks:
        request = replace(request, priority=0)
    if "salts" in lacks:
        request = replace(request, cache_salt="")
    return replace(request, prompt_token_ids=prompt, params=params)
