"""From what a client sent to what the engine is asked: tokens and sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.errors import RequestError
from lfm2np.sampling.params import SamplingParams, from_json
from lfm2np.serve.bodies import ChatBody, CompletionBody, Message, Sampled
from lfm2np.serve.runner import Job

SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("min_tokens", "allowed_token_ids", "banned_token_ids", "stop_token_ids", "stop"),
    *("include_stop_str_in_output", "ignore_eos", "seed", "profile"),
)


def completion_jobs(model: LoadedModel, body: CompletionBody, name: str) -> list[Job]:
    """A job for each prompt. RequestError for what can't be met; the engine checks the rest."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(f"best_of {body.best_of}: expected n={body.n or 1}")
    prompts = [prompt_ids(model, one, body.add_special_tokens) for one in prompts_of(body.prompt)]
    # What only scores its prompt computes a token that is not told.
    max_tokens = 16 if body.max_tokens is None else max(1, body.max_tokens)
    told = [] if body.prompt_logprobs is None else [body.prompt_logprobs]
    told += [body.logprobs] if body.echo and body.logprobs is not None else []
    params = sampling(body, max_tokens, body.logprobs, max(told, default=None))
    return made_jobs(body, name, prompts, params)


def chat_jobs(model: LoadedModel, body: ChatBody, name: str, capacity: int) -> list[Job]:
    """The conversation's only job. Errors as of completion_jobs.

    capacity  tokens that the cache holds: as long an answer as fits, where none is told
    """
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise RequestError(
            f"max_completion_tokens {body.max_completion_tokens}: expected max_tokens={body.max_tokens}, or one of them"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(f"top_logprobs {body.top_logprobs}: expected logprobs true beside it")
    ids = model.tokenizer.encode_chat(plain_messages(body.messages))
    room = max(1, min(model.room_after(ids), capacity - len(ids)))
    max_tokens = next((one for one in (body.max_tokens, body.max_completion_tokens) if one is not None), room)
    top = (body.top_logprobs or 0) if body.logprobs else None
    return made_jobs(body, name, [ids], sampling(body, max_tokens, top, body.prompt_logprobs))


def sampling(body: Sampled, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING if getattr(body, name) is not None}
    return from_json(given | {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs})


def made_jobs(body: Sampled, name: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Job]:
    names = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
    rest = (params, body.priority or 0, body.cache_salt or "")
    return [Job(one, tuple(ids), *rest) for one, ids in zip(names, prompts, strict=True)]


def prompts_of(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """Each prompt by itself. RequestError for none."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt []: expected at least one token, or one prompt")
    if isinstance(prompt[0], int):
        return [[one for one in prompt if isinstance(one, int)]]
    return [one for one in prompt if not isinstance(one, int)]


def prompt_ids(model: LoadedModel, prompt: str | list[int], add_special_tokens: bool | None) -> list[int]:
    if isinstance(prompt, str) and add_special_tokens is False:
        return model.prompt_ids(model.tokenizer.encode_more(prompt))
    return model.prompt_ids(prompt)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """As chat templates take them: strings only."""
    plain = []
    for message in messages:
        content = message.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        plain.append({"role": message.role, "content": text} | ({"name": message.name} if message.name else {}))
    return plain
