"""OpenAI's chat completions, which lay out prompts themselves: only on request, and only of requests with a message.

A server that knows more than OpenAI's fields, or names ids among its log-probabilities, reports tokens; of any other
there are texts only.
"""

from __future__ import annotations

from typing import Any

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.dialects import openai, text
from lfm2np.oracle.engines.dialects.dialect import (
    Dialect,
    Extras,
    Field,
    Reply,
    Response,
    model_field,
    optional,
    sampling_fields,
)
from lfm2np.oracle.engines.records import Request


def body_of(request: Request, extras: Extras) -> dict[str, Any]:
    if request.message is None:
        raise RequestError("message: none, and this server takes chats only")
    messages = [{"role": "user", "content": request.message}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": request.max_tokens, "temperature": 0.0, "top_p": 1.0}
    if not extras.standard_only:
        body |= {"logprobs": True, "return_token_ids": True}
    return body | sampling_fields(request) | model_field(extras)


FIELDS = (
    Field("text", "choices[0].message.content", "text"),
    Field("token_ids", "choices[0].token_ids", "list of ids"),
    Field("token_ids", "choices[0].logprobs.content", 'list of objects `{"id": id, "logprob": number}`'),
    Field("logprobs", "choices[0].logprobs.content", 'list of objects `{"logprob": number}`'),
    Field("finish_reason", "choices[0].finish_reason", '`"length"` or `"stop"`'),
)


def read(reply: Reply, request: Request) -> Response:
    """The prompt's length is the server's matter: it laid it out."""
    choice = openai.only_choice(reply)
    message, logprobs = (optional(choice, name, dict) or {} for name in ("message", "logprobs"))
    entries, ids = optional(logprobs, "content", list) or [], optional(choice, "token_ids", list)
    fields: dict[str, Any] = {"text": message.get("content"), "finish_reason": choice.get("finish_reason")}
    fields |= text.named_tokens(entries)
    if ids:
        values = [entry.get("logprob") if isinstance(entry, dict) else None for entry in entries]
        fields |= {"token_ids": ids, "logprobs": values if len(values) == len(ids) else None}
    return Response(fields, None, openai.response(reply, fields).new_tokens)


CHAT = Dialect(
    name="chat",
    path="/v1/chat/completions",
    takes_token_ids=False,
    extras=text.TEXT.extras,
    request=body_of,
    read=read,
    fields=FIELDS,
    join=openai.join_choices,
    reproducer=text.REPRODUCER,
    longest=openai.LONGEST,
    cached=openai.CACHED,
)
