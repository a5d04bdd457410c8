"""What each kind of HTTP server is asked; http_replies.py says where its reply has what an Answer holds.

Every request is greedy and switches off what a server may do by default: some take penalties and filters from the
checkpoint's generation_config.json.

vLLM 0.32.0, mlx-lm 0.32.2 and llama.cpp were tried on real servers (fixtures/engines/results.jsonl). SGLang's form is
that of its documentation, tried only on servers of our own.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lfm2np.oracle.targets.http_replies import (
    LLAMA_FIELDS,
    SGLANG_FIELDS,
    TEXT_FIELDS,
    VLLM_FIELDS,
    Field,
    Said,
    read_llama,
    read_sglang,
    read_text,
    read_vllm,
    untold,
    vllm_event,
)
from lfm2np.oracle.targets.records import Ask

TOP = 5  # log-probabilities a position that are asked for


@dataclass(frozen=True)
class Wants:
    """What to ask a server for beyond tokens: servers refuse what they don't know, or don't allow."""

    model: str | None = None
    top: int = TOP
    prompt_logprobs: bool = True
    plainly: bool = False  # without fields beyond OpenAI's

    def __str__(self) -> str:
        """For a message about a server that refused."""
        if self.plainly:
            return "OpenAI's fields only"
        if not self.top:
            return "without log-probabilities"
        return "with log-probabilities of the prompt" if self.prompt_logprobs else "with log-probabilities"


@dataclass(frozen=True)
class Dialect:
    """One way to ask and to be answered.

    tries         what to ask for, the most first
    fields        where the reply holds what `read` takes
    streamed_ids  the new tokens of one server-sent event; None where events don't tell
    version       a path, and the field of its answer that says which version serves
    slots         likewise, how many requests are computed together
    takes_stops, takes_seeds   whether requests have fields for them, which need no setting of the server
    """

    name: str
    path: str
    takes_token_ids: bool
    tries: tuple[Wants, ...]
    request: Callable[[Ask, Wants], dict[str, Any]]
    read: Callable[[Mapping[str, Any], Ask], Said]
    fields: tuple[Field, ...]
    streamed_ids: Callable[[Mapping[str, Any]], Any]
    version: tuple[str, str] | None
    slots: tuple[str, str] | None = None
    takes_stops: bool = False
    takes_seeds: bool = False


def ask_vllm(ask: Ask, wants: Wants) -> dict[str, Any]:
    """A prefix that was computed before is not used for a cold ask: its cache has a salt of its own."""
    fields: dict[str, Any] = {
        "prompt": list(ask.prompt_token_ids),
        "max_tokens": ask.max_tokens,
        **GREEDY,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "logprobs": wants.top,
        **chosen(ask),
    }
    if ask.prompt_logprobs and wants.prompt_logprobs:
        fields["prompt_logprobs"] = 0  # of the prompt's own tokens
    if is_cold(ask):
        fields["cache_salt"] = uuid.uuid4().hex
    return fields | with_model(wants)


def ask_sglang(ask: Ask, wants: Wants) -> dict[str, Any]:
    sampling = {
        "max_new_tokens": ask.max_tokens,
        **GREEDY,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        **chosen(ask),
    }
    return {
        "input_ids": list(ask.prompt_token_ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": 0 if ask.prompt_logprobs and wants.prompt_logprobs else -1,
        "top_logprobs_num": wants.top,
        "return_routed_experts": True,
    }


def ask_llama(ask: Ask, wants: Wants) -> dict[str, Any]:
    """No ignore_eos: llama.cpp then forbids the end-of-sequence tokens, so that others come than the model's own.

    Its log-probabilities are taken before that, of the raw logits, so they would not even show it.
    """
    return {
        "prompt": list(ask.prompt_token_ids),
        "n_predict": ask.max_tokens,
        **GREEDY,
        "top_k": 0,
        "repeat_penalty": 1.0,
        "dry_multiplier": 0.0,
        "xtc_probability": 0.0,
        "mirostat": 0,
        "ignore_eos": False,
        "n_probs": wants.top,
        "post_sampling_probs": False,
        "return_tokens": True,
        "cache_prompt": not is_cold(ask),
        **chosen(ask),
    }


def ask_text(ask: Ask, wants: Wants) -> dict[str, Any]:
    """mlx-lm's completions; `plainly` for any server that knows OpenAI's.

    mlx-lm gets no top_logprobs: with them, the id that stands for the sampled token is that of an unsorted list's
    first. It can't be told to ignore the end-of-sequence token.
    """
    fields: dict[str, Any] = {"prompt": ask.prompt_text, "max_tokens": ask.max_tokens, "temperature": 0.0}
    if not wants.plainly:
        fields |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": True}
    return fields | with_model(wants)


# Helpers


def is_cold(ask: Ask) -> bool:
    """Whether nothing that was computed before may be used: the factor `cold` of the ask."""
    return bool(ask.factors.get("cold", False))


def chosen(ask: Ask) -> dict[str, Any]:
    """Where it is to stop, and what it draws with: fields that OpenAI's, SGLang's and llama.cpp's requests share."""
    drawn = {} if ask.seed is None else {"temperature": 1.0, "seed": ask.seed}
    return drawn if ask.stop is None else {**drawn, "stop": [ask.stop]}


def with_model(wants: Wants) -> dict[str, Any]:
    return {} if wants.model is None else {"model": wants.model}


GREEDY = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
FEWER = (Wants(), Wants(prompt_logprobs=False), Wants(top=0, prompt_logprobs=False))
VLLM = Dialect(
    "vllm",
    "/v1/completions",
    True,
    FEWER,
    ask_vllm,
    read_vllm,
    VLLM_FIELDS,
    vllm_event,
    version=("/version", "version"),
    takes_stops=True,
    takes_seeds=True,
)
SGLANG = Dialect(
    "sglang",
    "/generate",
    True,
    FEWER,
    ask_sglang,
    read_sglang,
    SGLANG_FIELDS,
    untold,
    version=("/server_info", "version"),
    slots=("/server_info", "max_running_requests"),
    takes_stops=True,  # its seeds hold only with --enable-deterministic-inference
)
LLAMA = Dialect(
    "llama.cpp",
    "/completion",
    True,
    FEWER[1:],
    ask_llama,
    read_llama,
    LLAMA_FIELDS,
    untold,
    version=("/props", "build_info"),
    slots=("/props", "total_slots"),
    takes_stops=True,
    takes_seeds=True,
)
TEXT = Dialect(
    "text",
    "/v1/completions",
    False,
    (Wants(prompt_logprobs=False), Wants(prompt_logprobs=False, plainly=True)),
    ask_text,
    read_text,
    TEXT_FIELDS,
    untold,
    version=None,
)
DIALECTS = (VLLM, SGLANG, LLAMA, TEXT)
