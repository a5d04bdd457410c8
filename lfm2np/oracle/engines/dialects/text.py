"""OpenAI's completions of a text, as mlx-lm has them; with fewer fields any server that knows OpenAI's."""

from __future__ import annotations

from typing import Any

from lfm2np.oracle.engines.dialects import openai
from lfm2np.oracle.engines.dialects.dialect import (
    Dialect,
    Extras,
    Field,
    Reply,
    Response,
    model_field,
    sampling_fields,
)
from lfm2np.oracle.engines.records import Request


def body_of(request: Request, extras: Extras) -> dict[str, Any]:
    """mlx-lm gets no top_logprobs: with them, the id that stands for the sampled token is that of an unsorted list's
    first. It can't be told to ignore the end-of-sequence token."""
    body: dict[str, Any] = {"prompt": request.prompt_text, "max_tokens": request.max_tokens, "temperature": 0.0}
    if not extras.standard_only:
        body |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": True}
    return body | sampling_fields(request) | model_field(extras)


FIELDS = (
    Field("text", "choices[0].text", "text"),
    Field("token_ids", "choices[0].logprobs.content", 'list of objects `{"id": id, "logprob": number}`'),
    Field("logprobs", "choices[0].logprobs.content", "the same"),
    Field("finish_reason", "choices[0].finish_reason", '`"length"` or `"stop"`'),
    Field("prompt_tokens", "usage.prompt_tokens", "number"),
    Field("new_tokens", "usage.completion_tokens", "number"),
)


def read(reply: Reply, request: Request) -> Response:
    """Without ids there are no tokens: those of the text, tokenised again, might be others."""
    choice = openai.only_choice(reply)
    fields: dict[str, Any] = {"text": choice.get("text"), "finish_reason": choice.get("finish_reason")}
    logprobs = choice.get("logprobs")
    return openai.response(
        reply, fields | named_tokens(logprobs.get("content") if isinstance(logprobs, dict) else None)
    )


def named_tokens(entries: Any) -> dict[str, Any]:
    """Ids and log-probabilities of entries that name ids; else nothing."""
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) and "id" in e for e in entries):
        return {}
    return {name: [entry.get(key) for entry in entries] for name, key in (("token_ids", "id"), ("logprobs", "logprob"))}


REPRODUCER = '''def answer(replies):
    """OpenAI's completions, as mlx-lm has them."""
    logprobs = [reply["choices"][0].get("logprobs") or {} for reply in replies]
    entries = [entry for part in logprobs for entry in part.get("content") or []]
    return [entry["id"] for entry in entries], [entry["logprob"] for entry in entries]'''

TEXT = Dialect(
    name="text",
    path=openai.PATH,
    takes_token_ids=False,
    extras=(Extras(prompt_logprobs=False), Extras(prompt_logprobs=False, standard_only=True)),
    request=body_of,
    read=read,
    fields=FIELDS,
    join=openai.join_choices,
    reproducer=REPRODUCER,
    longest=openai.LONGEST,
    cached=openai.CACHED,
)
