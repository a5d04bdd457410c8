"""SGLang's /generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.dialects.dialect import (
    GREEDY,
    Dialect,
    Extras,
    Field,
    Location,
    Metrics,
    Reply,
    Response,
    by_token_id,
    from_base64,
    needed,
    optional,
    require_prompt,
    sampling_fields,
)
from lfm2np.oracle.engines.records import Request


def body_of(request: Request, extras: Extras) -> dict[str, Any]:
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


FIELDS = (
    Field("token_ids", "output_ids", "list of ids"),
    Field("token_ids", "meta_info.output_token_logprobs", "list of `[number, id, text]`"),
    Field("logprobs", "meta_info.output_token_logprobs", "list of `[number, id, text]`"),
    Field("top_logprobs", "meta_info.output_top_logprobs", "list of lists of `[number, id, text]`"),
    Field("prompt_logprobs", "meta_info.input_token_logprobs", "list of `[number, id, text]`, the first number null"),
    Field("text", "text", "text"),
    Field("finish_reason", "meta_info.finish_reason", '`{"type": "length"}` or `{"type": "stop"}`'),
    Field("routes", "meta_info.routed_experts", "int32 [tokens, layers, experts], in base64"),
    Field("prompt_tokens", "meta_info.prompt_tokens", "number"),
    Field("new_tokens", "meta_info.completion_tokens", "number"),
)


def read(reply: Reply, request: Request) -> Response:
    """Log-probabilities come as [logprob, id, text]; those of greedy requests are of the raw logits."""
    meta = needed(reply, "meta_info", dict)
    ids = optional(reply, "output_ids", list)
    reason = meta.get("finish_reason")
    fields: dict[str, Any] = {
        "text": reply.get("text"),
        "finish_reason": reason.get("type") if isinstance(reason, dict) else reason,
    }
    new = optional(meta, "output_token_logprobs", list)
    if new is not None:
        fields["logprobs"], new_ids = logprobs_and_ids(new, "meta_info.output_token_logprobs")
        if ids is not None and new_ids != ids:
            raise RequestError("meta_info.output_token_logprobs: other tokens than output_ids")
        ids = new_ids
        tops = optional(meta, "output_top_logprobs", list)
        fields["top_logprobs"] = [top_logprobs(top) for top in tops] if tops else None
    prompt = optional(meta, "input_token_logprobs", list)
    if request.is_scored and prompt:
        logprobs, prompt_ids = logprobs_and_ids(prompt, "meta_info.input_token_logprobs")
        require_prompt(prompt_ids, request, "meta_info.input_token_logprobs")
        fields["prompt_logprobs"] = logprobs[1:]
    if meta.get("routed_experts") is not None and ids:
        count = len(request.prompt_token_ids) + len(ids) - 1
        fields["routes"] = routes(meta["routed_experts"], count, "meta_info.routed_experts")
    return Response(fields | {"token_ids": ids}, meta.get("prompt_tokens"), meta.get("completion_tokens"))


def logprobs_and_ids(triples: Sequence[Any], where: str) -> tuple[list[Any], list[Any]]:
    """Of a list of [logprob, id, text]."""
    for index, triple in enumerate(triples):
        if not isinstance(triple, list) or len(triple) < 2:
            raise RequestError(f"{where}[{index}]: expected [logprob, id, text]")
    return [triple[0] for triple in triples], [triple[1] for triple in triples]


def top_logprobs(triples: Any) -> dict[Any, Any]:
    where = "meta_info.output_top_logprobs"
    if not isinstance(triples, list):
        raise RequestError(f"{where}: expected lists of [logprob, id, text]")
    logprobs, ids = logprobs_and_ids(triples, where)
    return by_token_id(list(zip(ids, logprobs, strict=True)), where)


def routes(text: Any, positions: int, where: str) -> list[list[list[int]]]:
    """Experts as int32, little-endian, in base64; the shape is not reported, so they are given as one layer's.

    oracle/judging/routes.py, which knows the model, divides them.
    """
    content = from_base64(text, where)
    if len(content) % 4 or positions < 1 or (len(content) // 4) % positions:
        raise RequestError(f"{where}: {len(content)} bytes, expected int32 of {positions} positions")
    ids: list[list[list[int]]] = np.frombuffer(content, "<i4").reshape(positions, 1, -1).tolist()
    return ids


def last_event(events: Sequence[Reply]) -> dict[str, Any]:
    """Events repeat what came before."""
    return dict(events[-1])


REPRODUCER = '''def answer(replies):
    """SGLang's /generate, whose events repeat what came before."""
    entries = replies[-1]["meta_info"]["output_token_logprobs"]
    return [entry[1] for entry in entries], [entry[0] for entry in entries]'''

SGLANG = Dialect(
    name="sglang",
    path="/generate",
    request=body_of,
    read=read,
    fields=FIELDS,
    join=last_event,
    reproducer=REPRODUCER,
    takes_stops=True,  # its seeds hold only with --enable-deterministic-inference
    ignores_eos=True,
    gguf_format="float16",
    version=Location("/server_info", ("version",)),
    slots=Location("/server_info", ("max_running_requests",)),
    cached=("meta_info", "cached_tokens"),
    metrics=Metrics(  # SGLang docs "Production Metrics"
        active=("sglang:num_running_reqs", "sglang:num_queue_reqs"),
        counters=("sglang:num_retracted_reqs", "sglang:cache_hit_rate"),
    ),
)
