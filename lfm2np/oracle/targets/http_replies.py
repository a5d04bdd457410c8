"""Where a reply of each kind of HTTP server says what an Answer holds.

What may be left out of a reply is None; what is there and of another form raises RequestError that names it. Values are
judged later, by http_target.

Beside each reader stand the fields that it takes, as docs/engine/2-targets.md shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lfm2np.errors import RequestError
from lfm2np.oracle.targets.records import Ask
from lfm2np.oracle.targets.told_routes import from_int32, from_npy

KEY_OF_ID = "token_id:"  # vLLM's return_tokens_as_token_ids
KINDS: dict[type, str] = {dict: "an object", list: "a list"}


@dataclass(frozen=True)
class Said:
    """What a reply says, unchecked: fields of an Answer, and how many tokens the server itself counted."""

    fields: dict[str, Any]
    prompt_tokens: Any = None
    new_tokens: Any = None


class Field(NamedTuple):
    """Where a reply holds what an Answer does, or what `Said` counts."""

    says: str  # the field of Answer or of Said; "prompt": the ids that were sent, to be compared
    path: str
    form: str


VLLM_FIELDS = (
    Field("token_ids", "choices[0].token_ids", "list of ids"),
    Field("token_ids", "choices[0].logprobs.tokens", 'list of texts `"token_id:123"`'),
    Field("logprobs", "choices[0].logprobs.token_logprobs", "list of numbers"),
    Field("top_logprobs", "choices[0].logprobs.top_logprobs", 'list of objects `{"token_id:123": number}`'),
    Field("prompt_logprobs", "choices[0].prompt_logprobs", 'list: null, then objects `{"123": {"logprob": number}}`'),
    Field("text", "choices[0].text", "text"),
    Field("finish_reason", "choices[0].finish_reason", '`"length"` or `"stop"`'),
    Field("routes", "choices[0].routed_experts", "an .npy file [tokens, layers, experts], in base64"),
    Field("prompt", "choices[0].prompt_token_ids", "list of ids"),
    Field("prompt_tokens", "usage.prompt_tokens", "number"),
    Field("new_tokens", "usage.completion_tokens", "number"),
)


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


SGLANG_FIELDS = (
    Field("token_ids", "output_ids", "list of ids"),
    Field("token_ids", "meta_info.output_token_logprobs", "list of `[number, id, text]`"),
    Field("logprobs", "meta_info.output_token_logprobs", "list of `[number, id, text]`"),
    Field("top_logprobs", "meta_info.output_top_logprobs", "list of lists of `[number, id, text]`"),
    Field("prompt_logprobs", "meta_info.input_token_logprobs", "list of `[number, id, text]`, the first number null"),
    Field("text", "text", "text"),
    Field("finish_reason", "meta_info.finish_reason", '`{"type": "length"}` or `{"type": "stop"}`'),
    Field("routes", "meta_info.routed_experts", "int32 [tokens, layers, experts], in base64"),
    Field("prompt_tokens", "meta_info.prompt_tokens", "number"),
    Field("new_tokens", "meta_info.completion_tokens", "number"),
)


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


LLAMA_FIELDS = (
    Field("token_ids", "tokens", "list of ids"),
    Field("logprobs", "completion_probabilities", 'list of objects `{"id": id, "logprob": number}`'),
    Field("top_logprobs", "completion_probabilities", 'in each of them `"top_logprobs"`, a list of such objects'),
    Field("text", "content", "text"),
    Field("finish_reason", "stop_type", '`"limit"`, `"eos"` or `"word"`'),
    Field("prompt_tokens", "tokens_evaluated", "number"),
    Field("new_tokens", "tokens_predicted", "number"),
)


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


TEXT_FIELDS = (
    Field("text", "choices[0].text", "text"),
    Field("token_ids", "choices[0].logprobs.content", 'list of objects `{"id": id, "logprob": number}`'),
    Field("logprobs", "choices[0].logprobs.content", "the same"),
    Field("finish_reason", "choices[0].finish_reason", '`"length"` or `"stop"`'),
    Field("prompt_tokens", "usage.prompt_tokens", "number"),
    Field("new_tokens", "usage.completion_tokens", "number"),
)


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
