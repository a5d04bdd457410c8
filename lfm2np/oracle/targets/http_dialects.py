"""What each kind of HTTP server is asked, and where its reply says what an Answer holds.

Every request is greedy and switches off what a server may do by default: some take penalties and filters from the
checkpoint's generation_config.json. What may be left out of a reply is None; what is there and of another form raises
RequestError that names it. Values are judged later, by http_target.

mlx-lm 0.32.2 and llama.cpp were held against real servers. vLLM's and SGLang's forms are those of their documentation
and were only tried on servers of our own that play them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.errors import RequestError
from lfm2np.oracle.targets.records import Ask
from lfm2np.oracle.targets.told_routes import from_int32, from_npy

TOP = 5  # log-probabilities a position that are asked for
KEY_OF_ID = "token_id:"  # vLLM's return_tokens_as_token_ids
KINDS: dict[type, str] = {dict: "an object", list: "a list"}


@dataclass(frozen=True)
class Wants:
    """What to ask a server for beyond tokens: servers refuse what they don't know, or don't allow."""

    model: str | None = None
    top: int = TOP
    prompt_logprobs: bool = True
    plainly: bool = False  # without fields beyond OpenAI's


@dataclass(frozen=True)
class Said:
    """What a reply says, unchecked: fields of an Answer, and how many tokens the server itself counted."""

    fields: dict[str, Any]
    prompt_tokens: Any = None
    new_tokens: Any = None


@dataclass(frozen=True)
class Dialect:
    """One way to ask and to be answered.

    tries         what to ask for, the most first
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


def read_vllm(reply: Mapping[str, Any], ask: Ask) -> Said:
    """Tokens from choices[0].token_ids, else from keys like "token_id:123"; texts are never taken for tokens."""
    choice = only_choice(reply)
    ids = optional(choice, "token_ids", list)
    logprobs = optional(choice, "logprobs", dict)
    fields: dict[str, Any] = {"text": choice.get("text"), "finish_reason": choice.get("finish_reason")}
    if logprobs is not None:
        keyed = ids_of_keys(needed(logprobs, "tokens", list))
        if ids is not None and keyed is not None and keyed != ids:
            raise RequestError("choices[0].logprobs.tokens: other tokens than choices[0].token_ids")
        ids = keyed if ids is None else ids
        fields["logprobs"] = needed(logprobs, "token_logprobs", list)
        tops = optional(logprobs, "top_logprobs", list)
        fields["top_logprobs"] = None if keyed is None or not tops else [by_id(top) for top in tops]
    require_prompt(optional(choice, "prompt_token_ids", list), ask, "choices[0].prompt_token_ids")
    prompt = optional(choice, "prompt_logprobs", list)
    if ask.prompt_logprobs and prompt is not None:
        fields["prompt_logprobs"] = prompt_logprobs_by_id(prompt, ask)
    if choice.get("routed_experts") is not None:
        fields["routes"] = from_npy(choice["routed_experts"], "choices[0].routed_experts")
    return counted(reply, fields | {"token_ids": ids})


def vllm_event(event: Mapping[str, Any]) -> Any:
    return only_choice(event).get("token_ids")


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


def read_sglang(reply: Mapping[str, Any], ask: Ask) -> Said:
    """Log-probabilities come as [logprob, id, text]; those of greedy requests are of the raw logits."""
    meta = needed(reply, "meta_info", dict)
    ids = optional(reply, "output_ids", list)
    reason = meta.get("finish_reason")
    fields: dict[str, Any] = {
        "text": reply.get("text"),
        "finish_reason": reason.get("type") if isinstance(reason, dict) else reason,
    }
    new = optional(meta, "output_token_logprobs", list)
    if new is not None:
        logprobs, told = parted(new, "meta_info.output_token_logprobs")
        if ids is not None and told != ids:
            raise RequestError("meta_info.output_token_logprobs: other tokens than output_ids")
        ids, fields["logprobs"] = told, logprobs
        tops = optional(meta, "output_top_logprobs", list)
        fields["top_logprobs"] = [top_of(top) for top in tops] if tops else None
    prompt = optional(meta, "input_token_logprobs", list)
    if ask.prompt_logprobs and prompt:
        logprobs, told = parted(prompt, "meta_info.input_token_logprobs")
        require_prompt(told, ask, "meta_info.input_token_logprobs")
        fields["prompt_logprobs"] = logprobs[1:]
    if meta.get("routed_experts") is not None and ids:
        count = len(ask.prompt_token_ids) + len(ids) - 1
        fields["routes"] = from_int32(meta["routed_experts"], count, "meta_info.routed_experts")
    return Said(fields | {"token_ids": ids}, meta.get("prompt_tokens"), meta.get("completion_tokens"))


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


def read_llama(reply: Mapping[str, Any], ask: Ask) -> Said:
    """`prob` instead of `logprob` is of what sampling left over: not told.

    A token that ends within a character has no entry (server-context.cpp, process_token: `if (!incomplete)`), so that
    entries may be fewer than tokens: then which is whose is not told either.
    """
    ids = optional(reply, "tokens", list) or None
    stop = reply.get("stop_type")
    reason = {"eos": "stop", "word": "stop", "limit": "length"}.get(stop) if isinstance(stop, str) else None
    fields: dict[str, Any] = {"text": reply.get("content"), "finish_reason": reason, "token_ids": ids}
    entries = optional(reply, "completion_probabilities", list) or []
    where = "completion_probabilities"
    is_told = bool(entries) and all(isinstance(one, dict) and {"id", "logprob"} <= one.keys() for one in entries)
    if is_told and ids is not None:
        told = [entry["id"] for entry in entries]
        if len(told) >= len(ids) and told != ids:
            raise RequestError(f"{where}: other tokens than `tokens`")
        if told == ids:
            fields["logprobs"] = [entry["logprob"] for entry in entries]
            tops = [optional(entry, "top_logprobs", list) for entry in entries]
            fields["top_logprobs"] = [top_of_objects(top, where) for top in tops if top is not None] or None
    return Said(fields, reply.get("tokens_evaluated"), reply.get("tokens_predicted"))


def ask_text(ask: Ask, wants: Wants) -> dict[str, Any]:
    """mlx-lm's completions; `plainly` for any server that knows OpenAI's.

    mlx-lm gets no top_logprobs: with them, the id that stands for the sampled token is that of an unsorted list's
    first. It can't be told to ignore the end-of-sequence token.
    """
    fields: dict[str, Any] = {"prompt": ask.prompt_text, "max_tokens": ask.max_tokens, "temperature": 0.0}
    if not wants.plainly:
        fields |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": True}
    return fields | with_model(wants)


def read_text(reply: Mapping[str, Any], ask: Ask) -> Said:
    """Without ids there are no tokens: those of the text, tokenised again, might be others."""
    choice = only_choice(reply)
    fields: dict[str, Any] = {"text": choice.get("text"), "finish_reason": choice.get("finish_reason")}
    logprobs = choice.get("logprobs")
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    if isinstance(entries, list) and entries and all(isinstance(one, dict) and "id" in one for one in entries):
        fields["token_ids"] = [entry["id"] for entry in entries]
        fields["logprobs"] = [entry.get("logprob") for entry in entries]
    return counted(reply, fields)


def untold(event: Mapping[str, Any]) -> Any:
    """SGLang's events repeat what came before, mlx-lm's have text; llama.cpp's leave out parts of characters."""
    return None


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


def needed(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise RequestError(f"{name}: {type(value).__name__}, expected {KINDS[kind]}")
    return value


def optional(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    return None if fields.get(name) is None else needed(fields, name, kind)


def only_choice(reply: Mapping[str, Any]) -> dict[str, Any]:
    choices = needed(reply, "choices", list)
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise RequestError(f"choices: {len(choices)} entries, expected one object")
    choice: dict[str, Any] = choices[0]
    return choice


def counted(reply: Mapping[str, Any], fields: dict[str, Any]) -> Said:
    usage = optional(reply, "usage", dict) or {}
    return Said(fields, usage.get("prompt_tokens"), usage.get("completion_tokens"))


def ids_of_keys(keys: Sequence[Any]) -> list[int] | None:
    """None if one of them is a text."""
    ids = [id_of_key(key) for key in keys]
    return [one for one in ids if one is not None] if None not in ids else None


def id_of_key(key: Any) -> int | None:
    digits = key.removeprefix(KEY_OF_ID) if isinstance(key, str) and key.startswith(KEY_OF_ID) else ""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None


def by_id(top: Any) -> dict[int, Any]:
    if not isinstance(top, dict) or ids_of_keys(list(top)) is None:
        raise RequestError(f'top_logprobs: expected objects with keys like "{KEY_OF_ID}123"')
    return {int(key.removeprefix(KEY_OF_ID)): value for key, value in top.items()}


def prompt_logprobs_by_id(entries: Sequence[Any], ask: Ask) -> list[Any]:
    """vLLM: null for the first token, then {"id": {"logprob": number, ...}} with the prompt's own among them."""
    if len(entries) != len(ask.prompt_token_ids):
        raise RequestError(f"prompt_logprobs: {len(entries)} entries, expected {len(ask.prompt_token_ids)}")
    found = []
    for index, (entry, token_id) in enumerate(zip(entries[1:], ask.prompt_token_ids[1:], strict=True), 1):
        own = entry.get(str(token_id)) if isinstance(entry, dict) else None
        if not isinstance(own, dict):
            raise RequestError(f"prompt_logprobs[{index}]: expected an entry of the prompt's token {token_id}")
        found.append(own.get("logprob"))
    return found


def parted(triples: Sequence[Any], where: str) -> tuple[list[Any], list[Any]]:
    """SGLang's [logprob, id, text] as log-probabilities and ids."""
    for index, triple in enumerate(triples):
        if not isinstance(triple, list) or len(triple) < 2:
            raise RequestError(f"{where}[{index}]: expected [logprob, id, text]")
    return [triple[0] for triple in triples], [triple[1] for triple in triples]


def top_of(triples: Any) -> dict[Any, Any]:
    if not isinstance(triples, list):
        raise RequestError("meta_info.output_top_logprobs: expected lists of [logprob, id, text]")
    logprobs, ids = parted(triples, "meta_info.output_top_logprobs")
    return unique(list(zip(ids, logprobs, strict=True)), "meta_info.output_top_logprobs")


def top_of_objects(entries: Any, where: str) -> dict[Any, Any]:
    if not all(isinstance(entry, dict) for entry in entries):
        raise RequestError(f"{where}: top_logprobs: expected objects")
    return unique([(entry.get("id"), entry.get("logprob")) for entry in entries], where)


def unique(pairs: Sequence[tuple[Any, Any]], where: str) -> dict[Any, Any]:
    """By id. RequestError for what is no whole number, or there twice."""
    for token_id, _ in pairs:
        if type(token_id) is not int:
            raise RequestError(f"{where}: id {token_id!r}, expected a whole number")
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RequestError(f"{where}: a token stands twice among the most probable, expected once")
    return found


def require_prompt(told: Sequence[Any] | None, ask: Ask, where: str) -> None:
    """The server must have computed the prompt that was sent: not with a second BOS, not cut."""
    if told is not None and list(told) != list(ask.prompt_token_ids):
        raise RequestError(f"{where}: other tokens than the prompt that was sent")


GREEDY = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
FEWER = (Wants(), Wants(prompt_logprobs=False), Wants(top=0, prompt_logprobs=False))
VLLM = Dialect(
    "vllm",
    "/v1/completions",
    True,
    FEWER,
    ask_vllm,
    read_vllm,
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
    untold,
    version=("/props", "build_info"),
    slots=("/props", "total_slots"),
    takes_stops=True,
    takes_seeds=True,
)
TEXT = Dialect("text", "/v1/completions", False, (Wants(), Wants(plainly=True)), ask_text, read_text, untold, None)
DIALECTS = (VLLM, SGLANG, LLAMA, TEXT)
