"""From a client's request to token ids and sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.commands.serve.bodies import ChatBody, CompletionBody, Message, Rendered, Sampled
from lfm2np.commands.serve.engine_thread import Job
from lfm2np.commands.serve.settings import Settings
from lfm2np.engine.sampling.params import SamplingParams, from_json
from lfm2np.errors import RequestError
from lfm2np.values import show

SAMPLING = Sampled.model_fields.keys() & {field.name for field in fields(SamplingParams)}

OF_MESSAGE = ("role", "content", "name", "tool_calls", "reasoning_content", "reasoning", "tool_call_id")


def num_places(body: Sampled) -> int:
    """Prompts times samples."""
    return max(1, body.n or 1) * (len(body.prompts) if isinstance(body, CompletionBody) else 1)


def jobs_of(model: LoadedModel, settings: Settings, capacity: int, body: Sampled, name: str) -> list[Job]:
    """A job for each prompt; `capacity` in tokens. RequestError for what can't be met; the engine checks the rest."""
    if isinstance(body, CompletionBody):
        prompts, params = _completion(model, settings, body)
    else:
        assert isinstance(body, ChatBody)
        prompts, params = _chat(model, settings, capacity, body)
    rest = (params, body.priority or 0, body.cache_salt or "")
    names = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
    return [Job(name, tuple(ids), *rest) for name, ids in zip(names, prompts, strict=True)]


def _completion(model: LoadedModel, settings: Settings, body: CompletionBody) -> tuple[list[list[int]], SamplingParams]:
    if body.best_of not in (None, body.n or 1):
        raise RequestError(f"best_of {body.best_of}: expected n={body.n or 1}")
    if body.max_tokens == 0 and body.min_tokens:
        raise RequestError(f"min_tokens {body.min_tokens}: expected at most max_tokens=0")
    prompts = [prompt_ids(model, prompt, body.add_special_tokens) for prompt in body.prompts]
    # To score a prompt alone computes a token that is not sent.
    max_tokens = 16 if body.max_tokens is None else max(1, body.max_tokens)
    for ids in prompts if body.max_tokens else ():
        _require_room(model, ids, max_tokens)
    counts = [body.prompt_logprobs, body.logprobs if body.echo else None]
    prompt_logprobs = max((count for count in counts if count is not None), default=None)
    return prompts, _sampling(settings, body, max_tokens, body.logprobs, prompt_logprobs)


def _chat(
    model: LoadedModel, settings: Settings, capacity: int, body: ChatBody
) -> tuple[list[list[int]], SamplingParams]:
    """Without a limit, as many tokens as fit."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        expected = f"expected max_tokens={body.max_tokens}, or one of them"
        raise RequestError(f"max_completion_tokens {body.max_completion_tokens}: {expected}")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(f"top_logprobs {body.top_logprobs}: expected logprobs true beside it")
    ids = chat_ids(model, body.messages, body)
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if max_tokens is None:
        max_tokens = max(1, min(model.room_after(ids), capacity - len(ids)))
    else:
        _require_room(model, ids, max_tokens)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return [ids], _sampling(settings, body, max_tokens, logprobs, body.prompt_logprobs)


def _require_room(model: LoadedModel, ids: Sequence[int], max_tokens: int) -> None:
    """RequestError for more tokens than the context leaves: they would never come."""
    room = model.room_after(ids)
    if max_tokens > room:
        raise RequestError(f"max_tokens {max_tokens}: expected at most {room}, what {len(ids)} prompt tokens leave")


def _sampling(
    settings: Settings, body: Sampled, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    counts = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    for field, count in counts.items():
        if count is not None and count > settings.max_logprobs:
            expected = f"expected at most {settings.max_logprobs}, which this server allows"
            raise RequestError(f"{field} {count}: {expected}")
    given: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING if getattr(body, name) is not None}
    return from_json(given | counts | {"max_tokens": max_tokens})


def prompt_ids(model: LoadedModel, prompt: str | list[int], add_special_tokens: bool | None) -> list[int]:
    """RequestError for a prompt that can't be."""
    if isinstance(prompt, list):
        model.room_after(prompt)  # before each id is looked at
        return model.prompt_ids(prompt)
    require_tokenizer(model)
    return model.prompt_ids(model.tokenizer.encode_more(prompt) if add_special_tokens is False else prompt)


def chat_ids(model: LoadedModel, messages: Sequence[Message], body: Rendered) -> list[int]:
    """The conversation by the checkpoint's template. Content is one string: not every template takes parts, or none."""
    require_tokenizer(model)
    for place, tool in enumerate(body.tools or ()):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{place}]: {show(tool)}, expected type 'function', and a function with a name")
    plain = []
    for message in messages:
        fields = {name: value for name in OF_MESSAGE if (value := getattr(message, name)) not in (None, [])}
        if isinstance(message.content, list):
            fields["content"] = "".join(part.text for part in message.content)
        plain.append({"content": "", **fields} if "tool_calls" in fields else fields)
    options = {name: value for name in Rendered.model_fields if (value := getattr(body, name)) is not None}
    return model.tokenizer.encode_chat(plain, **options)


def require_tokenizer(model: LoadedModel) -> None:
    if not model.has_tokenizer:
        raise RequestError("this model has no tokenizer: expected token ids")
