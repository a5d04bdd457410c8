"""Messages to text: the checkpoint's own chat template, or LFM2's plain layout.

The template is chat_template.jinja, else `chat_template` in tokenizer_config.json, as in transformers. It runs in a
sandbox (`chat_template`), which needs jinja2 (the extra `chat`). The built-in renderer serves checkpoints without a
template, and, with a warning, those with one where jinja2 is not installed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lfm2np.checkpoint.strict_json import decode_text, is_present, read_bytes, read_object
from lfm2np.errors import RequestError, TokenizerError
from lfm2np.values import show

MAX_TEMPLATE_BYTES = 2**20
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Chat:
    """How one checkpoint lays out a conversation.

    template        Jinja source, or None for the built-in layout
    special_tokens  what a template sees besides the messages: "bos_token" -> its text
    source          the file the template is from, for messages
    """

    template: str | None
    special_tokens: Mapping[str, str]
    source: str


def load_chat(directory: Path, bos_token: str) -> Chat:
    """The chat layout of a checkpoint; `bos_token` stands in where tokenizer_config.json names none."""
    settings_path, template_path = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    settings = read_object(settings_path, TokenizerError) if is_present(settings_path, TokenizerError) else {}
    special_tokens = {"bos_token": bos_token} | _special_tokens(settings, str(settings_path))
    if is_present(template_path, TokenizerError):
        content = read_bytes(template_path, MAX_TEMPLATE_BYTES, TokenizerError)
        return Chat(decode_text(content, str(template_path), TokenizerError), special_tokens, str(template_path))
    template = settings.get("chat_template")
    if template is None:
        return Chat(None, special_tokens, "built-in chat layout")
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_BYTES:
        expected = f"a string of at most {MAX_TEMPLATE_BYTES} characters"
        raise TokenizerError(f"{settings_path}: chat_template: {show(template)}, expected {expected}")
    return Chat(template, special_tokens, str(settings_path))


def render_chat(chat: Chat, messages: Sequence[Mapping[str, str]]) -> str:
    """The conversation as text, ending with the header of the assistant's next turn.

    Raises RequestError for messages that are not role and content strings, TokenizerError for a failing template.
    """
    checked = require_messages(messages)
    if chat.template is None:
        return render_plain(checked, chat.special_tokens["bos_token"])
    try:
        import jinja2  # noqa: F401
    except ImportError:
        warnings.warn(
            f"{chat.source}: jinja2 is not installed, so LFM2's plain layout is used instead of this template; "
            "install the extra `chat`",
            stacklevel=2,
        )
        return render_plain(checked, chat.special_tokens["bos_token"])
    from lfm2np.checkpoint.text.chat_template import render_template

    return render_template(chat.template, checked, chat.special_tokens, chat.source)


def render_plain(messages: Sequence[Mapping[str, str]], bos_token: str) -> str:
    """LFM2's layout; no default system message. Source: the chat template published with LFM2-1.2B, without tools."""
    turns = []
    for position, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise RequestError(f"messages[{position}].role: {show(role)}, expected one of {', '.join(ROLES)}")
        if position == 0 and role == "system" and not content:
            continue
        if role == "tool":
            content = f"<|tool_response_start|>{content}<|tool_response_end|>"
        turns.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
    return f"{bos_token}{''.join(turns)}<|im_start|>assistant\n"


def require_messages(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Plain copies of the messages, each with the strings role and content, and other strings if it likes."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages: {show(messages)}, expected a non-empty list of messages")
    checked = []
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{position}]: {show(message)}, expected an object with role and content")
        for key in dict.fromkeys(("role", "content", *message)):
            if not isinstance(key, str):
                raise RequestError(f"messages[{position}]: the key {show(key)}, expected a string")
            if not isinstance(message.get(key), str):
                raise RequestError(f"messages[{position}].{key}: {show(message.get(key))}, expected a string")
        checked.append({str(key): str(value) for key, value in message.items()})
    return checked


def _special_tokens(settings: Mapping[str, object], source: str) -> dict[str, str]:
    """bos_token, eos_token and so on: a string, or an object with the string under content; null is absent."""
    texts = {}
    for key, value in settings.items():
        if not key.endswith("_token") or value is None or isinstance(value, bool):  # add_bos_token is a bool
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise TokenizerError(f"{source}: {show(key)}: {show(value)}, expected a string or an object with content")
        texts[key] = text
    return texts
