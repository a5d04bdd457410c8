"""The document of the protocol, made of what the code takes and gives: OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

import lfm2np
from lfm2np.commands.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from lfm2np.commands.serve.replies.chats import Chat
from lfm2np.commands.serve.replies.completions import Completion
from lfm2np.commands.serve.replies.shared import Detokenized, ErrorReply, ModelTold, Tokenized, TokenizerTold

REFUSED = {
    "400": "What was asked can't be met; the message names the field, its value and what was expected.",
    "401": "The key is missing or another one.",
    "404": "Another model than the one that is served.",
    "408": "The body took too long.",
    "413": "The body is too large.",
    "415": "The body is no application/json.",
    "421": "The Host header names another server: only where no key is asked for.",
    "429": "As many requests are under way as this server takes on; Retry-After tells when to come again.",
    "500": "The answer could not be computed.",
    "503": "The engine has ended; or too many bodies are under way, and Retry-After tells when to come again.",
    "504": "The answer took too long.",
}
OF_BODIES = ("400", "401", "404", "408", "413", "415", "421", "500", "503")
EVENT = {  # one of them: OpenAPI has no word for a stream
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "A piece of the answer as JSON; the last is [DONE]."}},
}
REFERENCE = "#/components/schemas/{model}"


def openapi() -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    completion = operation(schemas, "Continue prompts", CompletionBody, Completion, tuple(REFUSED), streams=True)
    chat = operation(schemas, "Answer a conversation", ChatBody, Chat, tuple(REFUSED), streams=True)
    named = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    one_model = operation(schemas, "The model", None, ModelTold, ("401", "404", "421"))
    text = {"description": "Done.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    metrics = {"200": text, **refused(schemas, ("401", "421"))}
    return {
        "openapi": "3.1.0",
        "info": {"title": "lfm2np serve", "version": lfm2np.__version__},
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
        "paths": {
            "/v1/completions": {"post": completion},
            "/v1/chat/completions": {"post": chat},
            "/v1/models": {"get": operation(schemas, "The models: one", None, dict[str, Any], ("401", "421"))},
            "/v1/models/{name}": {"get": {**one_model, "parameters": [named]}},
            "/tokenize": {"post": operation(schemas, "Text to tokens", TokenizeBody, Tokenized, OF_BODIES)},
            "/detokenize": {"post": operation(schemas, "Tokens to text", DetokenizeBody, Detokenized, OF_BODIES)},
            "/tokenizer_info": {
                "get": operation(schemas, "What texts are framed by", None, TokenizerTold, ("400", "401", "421"))
            },
            "/version": {"get": operation(schemas, "Version and fingerprint", None, dict[str, str], ("401", "421"))},
            "/health": {"get": operation(schemas, "Whether the engine runs", None, dict[str, str], ("503",))},
            "/metrics": {"get": {"summary": "Prometheus' text format", "responses": metrics}},
        },
    }


def operation(
    schemas: dict[str, Any], summary: str, body: Any, reply: Any, statuses: tuple[str, ...], streams: bool = False
) -> dict[str, Any]:
    content = {"application/json": {"schema": schema_of(schemas, reply)}}
    if streams:
        content["text/event-stream"] = {"schema": EVENT}
    description: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "Done.", "content": content}, **refused(schemas, statuses)},
    }
    if body is not None:
        content = {"application/json": {"schema": schema_of(schemas, body)}}
        description["requestBody"] = {"required": True, "content": content}
    return description


def refused(schemas: dict[str, Any], statuses: tuple[str, ...]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema_of(schemas, ErrorReply)}}
    return {status: {"description": REFUSED[status], "content": content} for status in statuses}


def schema_of(schemas: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Its JSON Schema; what it is made of goes to `schemas`, under names that differ where their modules do."""
    schema = TypeAdapter(kind).json_schema(ref_template=REFERENCE)
    for name, part in schema.pop("$defs", {}).items():
        if schemas.setdefault(name, part) != part:
            raise ValueError(f"two schemas are called {name}")
    return dict(schema)
