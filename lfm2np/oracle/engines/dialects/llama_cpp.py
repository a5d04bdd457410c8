"""llama.cpp's /completion."""

from __future__ import annotations

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
    Reading,
    by_token_id,
    grown,
    sampling_fields,
)
from lfm2np.oracle.engines.records import Request

REASONS = {"eos": "stop", "word": "stop", "limit": "length"}
ORDER = ("penalties", "temperature", "min_p", "top_k", "top_p")  # vLLM's
Entries = list[dict[str, Any]]  # one a token


def request_of(request: Request, extras: Extras) -> dict[str, Any]:
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
        **renamed(sampling_fields(request)),
    }


def renamed(fields: dict[str, Any]) -> dict[str, Any]:
    """Unless it is told otherwise, its repetition penalty, of another name, counts the last 64 tokens only, and filters
    come before the temperature."""
    penalty = fields.pop("repetition_penalty", None)
    if penalty is not None:
        return {**fields, "repeat_penalty": penalty, "repeat_last_n": -1}
    return {**fields, "samplers": ORDER} if {"top_k", "top_p", "min_p"} & fields.keys() else fields


def some_ids(ids: list[Any], reading: Reading) -> list[Any] | None:
    return ids or None


def are_whole(entries: Entries, reading: Reading) -> bool:
    """Whether each token has one, of a `logprob`; entries with `prob` are of what sampling left over.

    A token that ends within a character has no entry (server-context.cpp, process_token: `if (!incomplete)`). Where
    entries are fewer than tokens, which is whose is unknown, so there are no log-probabilities.
    """
    return 0 < reading.num_new <= len(entries) and all("logprob" in entry for entry in entries)


def entry_ids(entries: Entries, reading: Reading) -> list[Any] | None:
    return [entry["id"] for entry in entries] if are_whole(entries, reading) else None


def logprobs(entries: Entries, reading: Reading) -> list[Any] | None:
    return [entry["logprob"] for entry in entries] if are_whole(entries, reading) else None


def top_logprobs(entries: Entries, reading: Reading) -> list[dict[int, Any]] | None:
    tops = [entry["top_logprobs"] for entry in entries if entry.get("top_logprobs") is not None]
    if not are_whole(entries, reading) or not tops:
        return None
    return [by_token_id([(token["id"], token["logprob"]) for token in top]) for top in tops]


def reason(value: str, reading: Reading) -> str | None:
    return REASONS.get(value)


def refuse_a_full_slot(is_truncated: Any, reading: Reading) -> None:
    if is_truncated is True and reading.fields.get("finish_reason") == "length":
        raise RequestError("truncated: true, so its slot is full; start the server with a larger context (-c)")


ENTRIES = "completion_probabilities"
LLAMA_CPP = Dialect(
    name="llama.cpp",
    path="/completion",
    extras=ALL_EXTRAS[1:],
    request=request_of,
    fields=(
        Field("token_ids", "tokens", "list of ids", some_ids),
        Field("token_ids", ENTRIES, 'list of objects `{"id": id, "logprob": number}`', entry_ids),
        Field("logprobs", ENTRIES, "the same", logprobs),
        Field("top_logprobs", ENTRIES, 'in each of them `"top_logprobs"`, a list of such objects', top_logprobs),
        Field("text", "content", "text"),
        Field("finish_reason", "stop_type", '`"limit"`, `"eos"` or `"word"`', reason),
        Field("finish_reason", "truncated", "`true`: an error", refuse_a_full_slot),
        Field("prompt_tokens", "tokens_evaluated", "number"),
        Field("new_tokens", "tokens_predicted", "number"),
    ),
    join=grown,
    reproducer='''def answer(replies):
    """llama.cpp's /completion. A token that ends within a character has no log-probability."""
    tokens = [token for reply in replies for token in reply.get("tokens") or []]
    logprobs = [entry["logprob"] for reply in replies for entry in reply.get("completion_probabilities") or []]
    return tokens, logprobs if len(logprobs) == len(tokens) else None''',
    takes_stops=True,
    takes_seeds=True,
    processors=("top_k", "top_p", "min_p", "repetition_penalty"),  # its other penalties count prompts, too
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
    ),
)
