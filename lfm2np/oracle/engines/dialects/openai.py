"""The dialects that speak OpenAI's completions.

vLLM's has fields beyond OpenAI's, and our own server speaks it, too. `text` is of a text, as mlx-lm has it; with fewer
fields any server that knows OpenAI's. `chat` lays out prompts itself: only on request, and only of requests with a
message.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Sequence
from dataclasses import replace
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
    Reading,
    Reply,
    by_token_id,
    extend,
    from_base64,
    sampling_fields,
    value_at,
)
from lfm2np.oracle.engines.records import PROCESSORS, Request

ID_PREFIX = "token_id:"  # of return_tokens_as_token_ids


def vllm_request(request: Request, extras: Extras) -> dict[str, Any]:
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


def text_request(request: Request, extras: Extras) -> dict[str, Any]:
    """mlx-lm gets no top_logprobs: with them, the id that stands for the sampled token is that of an unsorted list's
    first. It can't be told to ignore the end-of-sequence token."""
    body: dict[str, Any] = {"prompt": request.prompt_text, "max_tokens": request.max_tokens, "temperature": 0.0}
    if not extras.standard_only:
        body |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": True}
    return body | sampling_fields(request) | model_field(extras)


def chat_request(request: Request, extras: Extras) -> dict[str, Any]:
    if request.message is None:
        raise RequestError("message: none, and this server takes chats only")
    messages = [{"role": "user", "content": request.message}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": request.max_tokens, "temperature": 0.0, "top_p": 1.0}
    if not extras.standard_only:
        body |= {"logprobs": True, "return_token_ids": True}
    return body | sampling_fields(request) | model_field(extras)


def model_field(extras: Extras) -> dict[str, Any]:
    return {} if extras.model is None else {"model": extras.model}


# --- reading


def ids_of_keys(keys: list[str], reading: Reading) -> list[int] | None:
    """None where they are texts, which are never taken for tokens."""
    are_ids = all(key.startswith(ID_PREFIX) for key in keys)
    return [int(key.removeprefix(ID_PREFIX)) for key in keys] if are_ids else None


def top_logprobs(tops: list[dict[str, Any]], reading: Reading) -> list[dict[int, Any]] | None:
    if not any(key.startswith(ID_PREFIX) for top in tops for key in top):
        return None
    return [by_token_id([(int(key.removeprefix(ID_PREFIX)), value) for key, value in top.items()]) for top in tops]


def prompt_logprobs(entries: list[Any], reading: Reading) -> list[Any] | None:
    """Null for the first token, then {"id": {"logprob": number, ...}} with the prompt's own among them."""
    if not reading.request.is_scored:
        return None
    ids = reading.request.prompt_token_ids
    if len(entries) != len(ids):
        raise RequestError(f"prompt_logprobs: {len(entries)} entries, expected {len(ids)}")
    return [entry[str(token_id)]["logprob"] for entry, token_id in zip(entries[1:], ids[1:], strict=True)]


def routes(text: str, reading: Reading) -> list[list[list[int]]]:
    """Experts of all layers (--enable-return-routed-experts): an .npy file [positions, layers, experts] in base64."""
    array = np.load(io.BytesIO(from_base64(text)), allow_pickle=False)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise ValueError(array.shape)
    ids: list[list[list[int]]] = array.tolist()
    return ids


def named_ids(entries: list[dict[str, Any]], reading: Reading) -> list[Any] | None:
    """None without ids: those of the text, tokenised again, might be others."""
    return [entry["id"] for entry in entries] if entries and all("id" in entry for entry in entries) else None


def named_logprobs(entries: list[dict[str, Any]], reading: Reading) -> list[Any] | None:
    """One for each token, or none: which is whose would be unknown."""
    return [entry["logprob"] for entry in entries] if entries and len(entries) == reading.num_new else None


def some_ids(ids: list[Any], reading: Reading) -> list[Any] | None:
    return ids or None


# --- events


def joined_choices(events: Sequence[Reply]) -> dict[str, Any]:
    """Events hold what is new of one choice, which its index names, as another does a call of a chat's; the last may
    hold usage only."""
    choices: dict[int, dict[str, Any]] = {}
    calls: dict[int, dict[int, dict[str, Any]]] = {}
    whole: dict[str, Any] = {}
    for event in events:
        extend(whole, {name: value for name, value in event.items() if value is not None and name != "choices"})
        for choice in event["choices"]:
            index = int(choice.get("index", 0))
            extend(choices.setdefault(index, {}), choice)
            for call in value_at(choice, ("delta", "tool_calls")) or ():
                extend(calls.setdefault(index, {}).setdefault(int(call.get("index", 0)), {}), call)
    for index, by_index in calls.items():
        choices[index]["delta"]["tool_calls"] = [by_index[place] for place in sorted(by_index)]
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


# --- the dialects

CHOICE = "choices[0]"
ENTRIES = f"{CHOICE}.logprobs.content"
NAMED = 'list of objects `{"id": id, "logprob": number}`'
TOPS = 'list of objects `{"token_id:123": number}`'
OF_PROMPT = 'list: null, then objects `{"123": {"logprob": number}}`'
TEXT_FIELD = Field("text", f"{CHOICE}.text", "text")
REASON = Field("finish_reason", f"{CHOICE}.finish_reason", '`"length"` or `"stop"`')
PROMPT_TOKENS = Field("prompt_tokens", "usage.prompt_tokens", "number")
NEW_TOKENS = Field("new_tokens", "usage.completion_tokens", "number")

VLLM = Dialect(
    name="vllm",
    path="/v1/completions",
    request=vllm_request,
    fields=(
        Field("prompt", f"{CHOICE}.prompt_token_ids", "list of ids"),
        Field("token_ids", f"{CHOICE}.token_ids", "list of ids"),
        Field("token_ids", f"{CHOICE}.logprobs.tokens", 'list of texts `"token_id:123"`', ids_of_keys),
        Field("logprobs", f"{CHOICE}.logprobs.token_logprobs", "list of numbers"),
        Field("top_logprobs", f"{CHOICE}.logprobs.top_logprobs", TOPS, top_logprobs),
        Field("prompt_logprobs", f"{CHOICE}.prompt_logprobs", OF_PROMPT, prompt_logprobs),
        TEXT_FIELD,
        REASON,
        Field("routes", f"{CHOICE}.routed_experts", "an .npy file [tokens, layers, experts], in base64", routes),
        PROMPT_TOKENS,
        NEW_TOKENS,
    ),
    join=joined_choices,
    reproducer='''def answer(replies):
    """OpenAI's completions, as vLLM has them."""
    choices = [reply["choices"][0] for reply in replies if reply.get("choices")]
    tokens = [token for choice in choices for token in choice.get("token_ids") or []]
    parts = [choice["logprobs"]["token_logprobs"] for choice in choices if choice.get("logprobs")]
    logprobs = [logprob for part in parts for logprob in part]
    return tokens, logprobs if len(logprobs) == len(tokens) else None''',
    event_ids=lambda event: value_at(event, ("choices", 0, "token_ids")),
    takes_samples=True,
    takes_stops=True,
    takes_seeds=True,
    processors=tuple(name for name in PROCESSORS if name != "banned_token_ids"),  # its bad_words are texts
    ignores_eos=True,
    raw_logprobs=True,
    gguf_format="float16",
    version=Location("/version", ("version",)),
    longest=Location("/v1/models", ("data", 0, "max_model_len")),
    cached=("usage", "prompt_tokens_details", "cached_tokens"),
    metrics=Metrics(  # vLLM docs "Production Metrics"; ours: commands/serve/metrics.py
        active=(
            *("vllm:num_requests_running", "vllm:num_requests_waiting"),
            *("lfm2np:num_requests_running", "lfm2np:num_requests_waiting"),
        ),
        memory=("vllm:kv_cache_usage_perc", "lfm2np:kv_cache_usage_perc"),
        cached=("vllm:prefix_cache_hits_total", "lfm2np:prefix_cache_hits_total"),
    ),
)
TEXT = Dialect(
    name="text",
    path=VLLM.path,
    takes_token_ids=False,
    extras=(Extras(prompt_logprobs=False), Extras(prompt_logprobs=False, standard_only=True)),
    request=text_request,
    fields=(
        TEXT_FIELD,
        Field("token_ids", ENTRIES, NAMED, named_ids),
        Field("logprobs", ENTRIES, "the same", named_logprobs),
        REASON,
        PROMPT_TOKENS,
        NEW_TOKENS,
    ),
    join=joined_choices,
    reproducer='''def answer(replies):
    """OpenAI's completions, as mlx-lm has them."""
    logprobs = [reply["choices"][0].get("logprobs") or {} for reply in replies]
    entries = [entry for part in logprobs for entry in part.get("content") or []]
    return [entry["id"] for entry in entries], [entry["logprob"] for entry in entries]''',
    longest=VLLM.longest,
    cached=VLLM.cached,
)
CHAT = replace(  # the prompt's length is the server's matter: it laid it out
    TEXT,
    name="chat",
    path="/v1/chat/completions",
    request=chat_request,
    fields=(
        Field("text", f"{CHOICE}.message.content", "text"),
        Field("token_ids", f"{CHOICE}.token_ids", "list of ids", some_ids),
        Field("token_ids", ENTRIES, NAMED, named_ids),
        Field("logprobs", ENTRIES, 'list of objects `{"logprob": number}`', named_logprobs),
        REASON,
        NEW_TOKENS,
    ),
)
