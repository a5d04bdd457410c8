"""llama.cpp's /completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.dialects.dialect import (
    ALL_EXTRAS,
    GREEDY,
    Dialect,
    Extras,
    Field,
    Location,
    Metrics,
    Reply,
    Response,
    by_token_id,
    concatenated,
    optional,
    sampling_fields,
)
from lfm2np.oracle.engines.records import Request

ENTRIES = "completion_probabilities"
REASONS = {"eos": "stop", "word": "stop", "limit": "length"}


def body_of(request: Request, extras: Extras) -> dict[str, Any]:
    """No ignore_eos: llama.cpp then forbids the end-of-sequence tokens, so that others come than the model's own.

    Its log-probabilities are taken before that, of the raw logits, so they would not even show it.
    """
    return {
        "prompt": list(request.prompt_token_ids),
        "n_predict": request.max_tokens,
        **GREEDY,
        "top_k": 0,
        "repeat_penalty": 1.0,
        "dry_multiplier": 0.0,
        "xtc_probability": 0.0,
        "mirostat": 0,
        "ignore_eos": False,
        "n_probs": extras.top_logprobs,
        "post_sampling_probs": False,
        "return_tokens": True,
        "cache_prompt": not request.cold,
        **sampling_fields(request),
    }


FIELDS = (
    Field("token_ids", "tokens", "list of ids"),
    Field("logprobs", "completion_probabilities", 'list of objects `{"id": id, "logprob": number}`'),
    Field("top_logprobs", "completion_probabilities", 'in each of them `"top_logprobs"`, a list of such objects'),
    Field("text", "content", "text"),
    Field("finish_reason", "stop_type", '`"limit"`, `"eos"` or `"word"`'),
    Field("prompt_tokens", "tokens_evaluated", "number"),
    Field("new_tokens", "tokens_predicted", "number"),
)


def read(reply: Reply, request: Request) -> Response:
    """Entries with `prob` instead of `logprob` are of what sampling left over, and not read.

    A token that ends within a character has no entry (server-context.cpp, process_token: `if (!incomplete)`). Where
    entries are fewer than tokens, which is whose is unknown, so there are no log-probabilities.
    """
    ids = optional(reply, "tokens", list) or None
    stop = reply.get("stop_type")
    reason = REASONS.get(stop) if isinstance(stop, str) else None
    if reason == "length" and reply.get("truncated") is True:
        raise RequestError("truncated: true, so its slot is full; start the server with a larger context (-c)")
    fields: dict[str, Any] = {"text": reply.get("content"), "finish_reason": reason, "token_ids": ids}
    entries = optional(reply, ENTRIES, list) or []
    are_logprobs = all(isinstance(entry, dict) and {"id", "logprob"} <= entry.keys() for entry in entries)
    if entries and are_logprobs and ids is not None:
        entry_ids = [entry["id"] for entry in entries]
        if len(entry_ids) >= len(ids) and entry_ids != ids:
            raise RequestError(f"{ENTRIES}: other tokens than `tokens`")
        if entry_ids == ids:
            fields["logprobs"] = [entry["logprob"] for entry in entries]
            tops = [optional(entry, "top_logprobs", list) for entry in entries]
            fields["top_logprobs"] = [top_logprobs(top) for top in tops if top is not None] or None
    return Response(fields, reply.get("tokens_evaluated"), reply.get("tokens_predicted"))


def top_logprobs(entries: Any) -> dict[Any, Any]:
    if not all(isinstance(entry, dict) for entry in entries):
        raise RequestError(f"{ENTRIES}: top_logprobs: expected objects")
    return by_token_id([(entry.get("id"), entry.get("logprob")) for entry in entries], ENTRIES)


def join(events: Sequence[Reply]) -> dict[str, Any]:
    """Events hold what is new, and the last the counts."""
    whole = dict(events[-1])
    for name in ("content", "tokens", ENTRIES):
        pieces = [event[name] for event in events if event.get(name)]
        if pieces:
            whole[name] = concatenated(pieces, name)
    return whole


REPRODUCER = '''def answer(replies):
    """llama.cpp's /completion. A token that ends within a character has no log-probability."""
    tokens = [token for reply in replies for token in reply.get("tokens") or []]
    logprobs = [entry["logprob"] for reply in replies for entry in reply.get("completion_probabilities") or []]
    return tokens, logprobs if len(logprobs) == len(tokens) else None'''

LLAMA_CPP = Dialect(
    name="llama.cpp",
    path="/completion",
    extras=ALL_EXTRAS[1:],
    request=body_of,
    read=read,
    fields=FIELDS,
    join=join,
    reproducer=REPRODUCER,
    takes_stops=True,
    takes_seeds=True,
    raw_logprobs=True,
    streams_all=False,  # no token that ends within a character, or that may belong to a stop string
    gguf_format="q8",
    gguf_only=True,
    version=Location("/props", ("build_info",)),
    slots=Location("/props", ("total_slots",)),
    longest=Location("/props", ("default_generation_settings", "n_ctx")),
    cached=("timings", "cache_n"),
    metrics=Metrics(  # tools/server/README.md
        active=("llamacpp:requests_processing", "llamacpp:requests_deferred"),
        counters=("llamacpp:n_busy_slots_per_decode",),
    ),
)
