"""vLLM's /v1/completions, with the fields that it has beyond OpenAI's; our own server speaks it, too."""

from __future__ import annotations

import io
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.dialects import openai
from lfm2np.oracle.engines.dialects.dialect import (
    GREEDY,
    Dialect,
    Extras,
    Field,
    Location,
    Metrics,
    Reply,
    Response,
    from_base64,
    model_field,
    needed,
    optional,
    require_prompt,
    sampling_fields,
)
from lfm2np.oracle.engines.records import Request

ID_PREFIX = "token_id:"  # of return_tokens_as_token_ids


def body_of(request: Request, extras: Extras) -> dict[str, Any]:
    """A cold request has a cache salt that no other has."""
    body: dict[str, Any] = {
        "prompt": list(request.prompt_token_ids),
        "max_tokens": request.max_tokens,
        **GREEDY,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "logprobs": extras.top_logprobs,
        **sampling_fields(request),
    }
    if request.is_scored and extras.prompt_logprobs:
        body["prompt_logprobs"] = 0  # of the prompt's own tokens
    if request.cold:
        body["cache_salt"] = uuid.uuid4().hex
    return body | model_field(extras)


FIELDS = (
    Field("token_ids", "choices[0].token_ids", "list of ids"),
    Field("token_ids", "choices[0].logprobs.tokens", 'list of texts `"token_id:123"`'),
    Field("logprobs", "choices[0].logprobs.token_logprobs", "list of numbers"),
    Field("top_logprobs", "choices[0].logprobs.top_logprobs", 'list of objects `{"token_id:123": number}`'),
    Field("prompt_logprobs", "choices[0].prompt_logprobs", 'list: null, then objects `{"123": {"logprob": number}}`'),
    Field("text", "choices[0].text", "text"),
    Field("finish_reason", "choices[0].finish_reason", '`"length"` or `"stop"`'),
    Field("routes", "choices[0].routed_experts", "an .npy file [tokens, layers, experts], in base64"),
    Field("prompt", "choices[0].prompt_token_ids", "list of ids"),
    Field("prompt_tokens", "usage.prompt_tokens", "number"),
    Field("new_tokens", "usage.completion_tokens", "number"),
)


def read(reply: Reply, request: Request) -> Response:
    """Tokens from choices[0].token_ids, else from keys like "token_id:123"; texts are never taken for tokens."""
    choice = openai.only_choice(reply)
    ids = optional(choice, "token_ids", list)
    logprobs = optional(choice, "logprobs", dict)
    fields: dict[str, Any] = {"text": choice.get("text"), "finish_reason": choice.get("finish_reason")}
    if logprobs is not None:
        keyed = ids_of_keys(needed(logprobs, "tokens", list))
        if ids is not None and keyed is not None and keyed != ids:
            raise RequestError("choices[0].logprobs.tokens: other tokens than choices[0].token_ids")
        ids = keyed if ids is None else ids
        fields["logprobs"] = needed(logprobs, "token_logprobs", list)
        tops = optional(logprobs, "top_logprobs", list)
        fields["top_logprobs"] = None if keyed is None or not tops else [top_logprobs(top) for top in tops]
    require_prompt(optional(choice, "prompt_token_ids", list), request, "choices[0].prompt_token_ids")
    prompt = optional(choice, "prompt_logprobs", list)
    if request.is_scored and prompt is not None:
        fields["prompt_logprobs"] = prompt_logprobs(prompt, request)
    if choice.get("routed_experts") is not None:
        fields["routes"] = routes(choice["routed_experts"], "choices[0].routed_experts")
    return openai.response(reply, fields | {"token_ids": ids})


def event_ids(event: Reply) -> Any:
    return openai.only_choice(event).get("token_ids")


def ids_of_keys(keys: Sequence[Any]) -> list[int] | None:
    """None if one of them is a text."""
    ids = [id_of_key(key) for key in keys]
    return [token_id for token_id in ids if token_id is not None] if None not in ids else None


def id_of_key(key: Any) -> int | None:
    digits = key.removeprefix(ID_PREFIX) if isinstance(key, str) and key.startswith(ID_PREFIX) else ""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None


def top_logprobs(top: Any) -> dict[int, Any]:
    if not isinstance(top, dict) or ids_of_keys(list(top)) is None:
        raise RequestError(f'top_logprobs: expected objects with keys like "{ID_PREFIX}123"')
    return {int(key.removeprefix(ID_PREFIX)): value for key, value in top.items()}


def prompt_logprobs(entries: Sequence[Any], request: Request) -> list[Any]:
    """Null for the first token, then {"id": {"logprob": number, ...}} with the prompt's own among them."""
    if len(entries) != len(request.prompt_token_ids):
        raise RequestError(f"prompt_logprobs: {len(entries)} entries, expected {len(request.prompt_token_ids)}")
    logprobs = []
    for index, (entry, token_id) in enumerate(zip(entries[1:], request.prompt_token_ids[1:], strict=True), 1):
        prompt_token = entry.get(str(token_id)) if isinstance(entry, dict) else None
        if not isinstance(prompt_token, dict):
            raise RequestError(f"prompt_logprobs[{index}]: expected an entry of the prompt's token {token_id}")
        logprobs.append(prompt_token.get("logprob"))
    return logprobs


def routes(text: Any, where: str) -> list[list[list[int]]]:
    """Experts of all layers (--enable-return-routed-experts): an .npy file [positions, layers, experts] in base64."""
    try:
        array = np.load(io.BytesIO(from_base64(text, where)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as problem:
        raise RequestError(f"{where}: not an .npy file: {problem}") from None
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise RequestError(
            f"{where}: {array.dtype} of shape {array.shape}, expected integers [tokens, layers, experts]"
        )
    ids: list[list[list[int]]] = array.tolist()
    return ids


REPRODUCER = '''def answer(replies):
    """OpenAI's completions, as vLLM has them."""
    choices = [reply["choices"][0] for reply in replies if reply.get("choices")]
    tokens = [token for choice in choices for token in choice.get("token_ids") or []]
    parts = [choice["logprobs"]["token_logprobs"] for choice in choices if choice.get("logprobs")]
    logprobs = [logprob for part in parts for logprob in part]
    return tokens, logprobs if len(logprobs) == len(tokens) else None'''

VLLM = Dialect(
    name="vllm",
    path=openai.PATH,
    request=body_of,
    read=read,
    fields=FIELDS,
    join=openai.join_choices,
    reproducer=REPRODUCER,
    event_ids=event_ids,
    split_samples=openai.split_choices,
    takes_stops=True,
    takes_seeds=True,
    ignores_eos=True,
    raw_logprobs=True,
    gguf_format="float16",
    version=Location("/version", ("version",)),
    longest=openai.LONGEST,
    cached=openai.CACHED,
    metrics=Metrics(  # vLLM docs "Production Metrics"; ours: commands/serve/metrics.py
        active=(
            *("vllm:num_requests_running", "vllm:num_requests_waiting"),
            *("lfm2np:num_requests_running", "lfm2np:num_requests_waiting"),
        ),
        memory=("vllm:kv_cache_usage_perc", "lfm2np:kv_cache_usage_perc"),
        counters=(
            *("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total"),
            *("lfm2np:num_preemptions_total", "lfm2np:prefix_cache_hits_total"),
        ),
    ),
)
