"""SGLang's /generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lfm2np.oracle.engines.dialects.dialect import (
    GREEDY,
    Dialect,
    Extras,
    Field,
    Location,
    Metrics,
    Reading,
    by_token_id,
    from_base64,
    sampling_fields,
)
from lfm2np.oracle.engines.records import Request

Triples = Sequence[Any]  # lists of [logprob, id, text]


def request_of(request: Request, extras: Extras) -> dict[str, Any]:
    return {
        "input_ids": list(request.prompt_token_ids),
        "sampling_params": {
            "max_new_tokens": request.max_tokens,
            **GREEDY,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            **sampling_fields(request),
        },
        "return_logprob": True,
        "logprob_start_len": 0 if request.is_scored and extras.prompt_logprobs else -1,
        "top_logprobs_num": extras.top_logprobs,
        "return_routed_experts": True,
    }


def ids(triples: Triples, reading: Reading) -> list[Any]:
    return [triple[1] for triple in triples]


def logprobs(triples: Triples, reading: Reading) -> list[Any]:
    """Those of greedy requests are of the raw logits."""
    return [triple[0] for triple in triples]


def top_logprobs(tops: Sequence[Triples], reading: Reading) -> list[dict[int, Any]] | None:
    return [by_token_id([(triple[1], triple[0]) for triple in triples]) for triples in tops] or None


def prompt_ids(triples: Triples, reading: Reading) -> list[Any] | None:
    return ids(triples, reading) if reading.request.is_scored and triples else None


def prompt_logprobs(triples: Triples, reading: Reading) -> list[Any] | None:
    return logprobs(triples, reading)[1:] if reading.request.is_scored and triples else None


def reason(value: Any, reading: Reading) -> Any:
    return value.get("type") if isinstance(value, dict) else value


def routes(text: str, reading: Reading) -> list[list[list[int]]] | None:
    """Experts as int32, little-endian, in base64; the shape is not reported, so they are given as one layer's.

    oracle/judging/routes.py, which knows the model, divides them.
    """
    positions = len(reading.request.prompt_token_ids) + reading.num_new - 1
    return np.frombuffer(from_base64(text), "<i4").reshape(positions, 1, -1).tolist() if reading.num_new else None


META, TRIPLES, TOPS = "meta_info", "list of `[number, id, text]`", "list of lists of `[number, id, text]`"
SGLANG = Dialect(
    name="sglang",
    path="/generate",
    request=request_of,
    fields=(
        Field("prompt", f"{META}.input_token_logprobs", TRIPLES, prompt_ids),
        Field("token_ids", "output_ids", "list of ids"),
        Field("token_ids", f"{META}.output_token_logprobs", TRIPLES, ids),
        Field("logprobs", f"{META}.output_token_logprobs", TRIPLES, logprobs),
        Field("top_logprobs", f"{META}.output_top_logprobs", TOPS, top_logprobs),
        Field("prompt_logprobs", f"{META}.input_token_logprobs", f"{TRIPLES}, the first null", prompt_logprobs),
        Field("text", "text", "text"),
        Field("finish_reason", f"{META}.finish_reason", '`{"type": "length"}` or `{"type": "stop"}`', reason),
        Field("routes", f"{META}.routed_experts", "int32 [tokens, layers, experts], in base64", routes),
        Field("prompt_tokens", f"{META}.prompt_tokens", "number"),
        Field("new_tokens", f"{META}.completion_tokens", "number"),
    ),
    join=lambda events: dict(events[-1]),  # they repeat what came before
    reproducer='''def answer(replies):
    """SGLang's /generate, whose events repeat what came before."""
    entries = replies[-1]["meta_info"]["output_token_logprobs"]
    return [entry[1] for entry in entries], [entry[0] for entry in entries]''',
    takes_stops=True,  # its seeds hold only with --enable-deterministic-inference
    ignores_eos=True,
    gguf_format="float16",
    version=Location("/server_info", ("version",)),
    slots=Location("/server_info", ("max_running_requests",)),
    cached=(META, "cached_tokens"),
    metrics=Metrics(  # SGLang docs "Production Metrics"
        active=("sglang:num_running_reqs", "sglang:num_queue_reqs"),
        cached=("sglang:cached_tokens_total",),
    ),
)
