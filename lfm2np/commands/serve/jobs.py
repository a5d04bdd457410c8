"""From a client's request to token ids and sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.commands.serve.bodies import ChatBody, CompletionBody, Message, Sampled
from lfm2np.commands.serve.engine_thread import Job
from lfm2np.commands.serve.limits import Limits
from lfm2np.commands.serve.service import Service
from lfm2np.engine.sampling.params import SamplingParams, from_json
from lfm2np.errors import RequestError

SAMPLING = Sampled.model_fields.keys() & {field.name for field in fields(SamplingParams)}
FEW_TOKENS = 4096  # are checked in a millisecond


def num_places(body: Sampled) -> int:
    prompts = len(prompts_of(body.prompt)) if isinstance(body, CompletionBody) else 1
    return prompts * (body.n or 1)


def takes_long(body: Sampled) -> bool:
    """Whether something has to be made tokens, or many have to be checked."""
    prompts = prompts_of(body.prompt) if isinstance(body, CompletionBody) else [""]
    return any(isinstance(prompt, str) for prompt in prompts) or sum(map(len, prompts)) > FEW_TOKENS


def completion_jobs(service: Service, body: CompletionBody, name: str) -> list[Job]:
    """A job for each prompt. RequestError for what can't be met; the engine checks the rest."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(f"best_of {body.best_of}: expected n={body.n or 1}")
    if body.max_tokens == 0 and body.min_tokens:
        raise RequestError(f"min_tokens {body.min_tokens}: expected at most max_tokens=0")
    model, limits = service.model, service.settings.limits
    prompts = [prompt_ids(model, prompt, body.add_special_tokens) for prompt in prompts_of(body.prompt)]
    # What only scores its prompt computes a token that is not told.
    max_tokens = 16 if body.max_tokens is None else max(1, body.max_tokens)
    for ids in prompts if body.max_tokens else ():
        require_room(model, ids, max_tokens)
    counts = [] if body.prompt_logprobs is None else [body.prompt_logprobs]
    counts += [body.logprobs] if body.echo and body.logprobs is not None else []
    params = sampling(body, max_tokens, body.logprobs, max(counts, default=None), limits)
    return made_jobs(body, name, prompts, params)


def chat_jobs(service: Service, body: ChatBody, name: str) -> list[Job]:
    """The conversation's only job; without a limit, as many tokens as fit. Errors as of completion_jobs."""
    model, limits = service.model, service.settings.limits
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        expected = f"expected max_tokens={body.max_tokens}, or one of them"
        raise RequestError(f"max_completion_tokens {body.max_completion_tokens}: {expected}")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(f"top_logprobs {body.top_logprobs}: expected logprobs true beside it")
    ids = chat_ids(model, body.messages)
    max_tokens = next((limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None), None)
    if max_tokens is not None:
        require_room(model, ids, max_tokens)
    room = max(1, min(model.room_after(ids), service.capacity - len(ids)))
    top = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling(body, room if max_tokens is None else max_tokens, top, body.prompt_logprobs, limits)
    return made_jobs(body, name, [ids], params)


def require_room(model: LoadedModel, ids: Sequence[int], max_tokens: int) -> None:
    """RequestError for more tokens than the context leaves: they would never come."""
    room = model.room_after(ids)
    if max_tokens > room:
        raise RequestError(f"max_tokens {max_tokens}: expected at most {room}, what {len(ids)} prompt tokens leave")


def sampling(
    body: Sampled, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None, limits: Limits
) -> SamplingParams:
    most = limits.max_logprobs
    for field, count in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if count is not None and count > most:
            raise RequestError(f"{field} {count}: expected at most {most}, which this server allows")
    given: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING if getattr(body, name) is not None}
    return from_json(given | {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs})


def made_jobs(body: Sampled, name: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Job]:
    names = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
    rest = (params, body.priority or 0, body.cache_salt or "")
    return [Job(name, tuple(ids), *rest) for name, ids in zip(names, prompts, strict=True)]


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """Each prompt by itself, of what bodies.checked_prompt has let pass."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def prompt_ids(model: LoadedModel, prompt: str | list[int], add_special_tokens: bool | None) -> list[int]:
    if isinstance(prompt, str):
        require_tokenizer(model)
    if isinstance(prompt, str) and add_special_tokens is False:
        return model.prompt_ids(model.tokenizer.encode_more(prompt))
    if not isinstance(prompt, str):
        model.room_after(prompt)  # before each id is looked at
    return model.prompt_ids(prompt)


def chat_ids(model: LoadedModel, messages: Sequence[Message]) -> list[int]:
    require_tokenizer(model)
    return model.tokenizer.encode_chat(plain_messages(messages))


def require_tokenizer(model: LoadedModel) -> None:
    if not model.has_tokenizer:
        raise RequestError("this model has no tokenizer: expected token ids")


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """As chat templates take them: strings only."""
    plain = []
    for message in messages:
        content = message.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        plain.append({"role": message.role, "content": text} | ({"name": message.name} if message.name else {}))
    return plain
