"""Messages to text: the checkpoint's own chat template, or LFM2's plain layout.

The template is chat_template.jinja, else `chat_template` in tokenizer_config.json, as in transformers. It runs in a
sandbox (`chat_template`), which needs jinja2 (the extra `chat`). The built-in renderer serves checkpoints without a
template, and, with a warning, those with one where jinja2 is not installed.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.strict_json import decode_text, is_present, read_bytes, read_object
from lfm2np.checkpoint.text.messages import Objects, plain_object, plain_objects, require_messages
from lfm2np.errors import RequestError, TokenizerError
from lfm2np.values import show

MAX_TEMPLATE_BYTES = 2**20
TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # as in transformers: templates of LFM2.5 know it
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


def render_chat(
    chat: Chat,
    messages: Objects,
    tools: Objects | None = None,
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as text, as transformers renders it.

    messages                role and content, a string or a list of {"type": "text", "text": ...}; and what else the
                            template reads: tool_calls, as OpenAI's; reasoning_content
    tools                   OpenAI's objects, or others that the template knows
    add_generation_prompt   ends with the header of the assistant's next turn; None: unless the last one is continued
    continue_final_message  ends within the last message, where its text ends
    chat_template_kwargs    other variables of the template, such as preserve_thinking; `date` is its today, 2026-11-29

    RequestError names what is not so; TokenizerError, the file of a template that fails.
    """
    checked = require_messages(messages)
    variables = plain_object(chat_template_kwargs or {}, "chat_template_kwargs")
    listed = None if tools is None else plain_objects(tools, "tools")
    if add_generation_prompt and continue_final_message:
        raise RequestError("add_generation_prompt, continue_final_message: expected one of them")
    template = chat.template
    if template is not None and importlib.util.find_spec("jinja2") is None:
        template, problem = None, "jinja2 is not installed, so LFM2's plain layout is used instead of this template"
        warnings.warn(f"{chat.source}: {problem}; install the extra `chat`", stacklevel=2)
    if template is None:
        if listed or variables or continue_final_message or add_generation_prompt is False:
            raise RequestError(f"{chat.source}: tools and options of a prompt: expected a chat template, and jinja2")
        return render_plain(checked, chat.special_tokens["bos_token"])
    from lfm2np.checkpoint.text.chat_template import render_template

    final = _tag_final(checked) if continue_final_message else None
    variables = {"documents": None, **chat.special_tokens, **variables, "messages": checked, "tools": listed}
    variables["add_generation_prompt"] = final is None and add_generation_prompt is not False
    text = render_template(template, variables, chat.source)
    if final is None:
        return text
    end = text.rfind(TAG.strip())
    if end < 0 or final.strip() not in text:
        raise TokenizerError(f"{chat.source}: the chat template leaves out the message that is to be continued")
    return text[:end] if text.startswith(TAG, end) else text[:end].rstrip()  # the template strips what it writes


def _tag_final(messages: list[dict[str, Any]]) -> str:
    """The last message's text, behind which the tag stands from now on. Source: transformers, render_jinja_template."""
    content = messages[-1].get("content")
    place, key = (content[-1], "text") if content and isinstance(content, list) else (messages[-1], "content")
    final = place.get(key)
    if not isinstance(final, str):
        raise RequestError(f"messages[{len(messages) - 1}].content: {show(content)}, expected a text to continue")
    place[key] = final + TAG
    return final


def render_plain(messages: Objects, bos_token: str) -> str:
    """LFM2's layout; no default system message. Source: the chat template published with LFM2-1.2B, without tools."""
    turns = []
    for position, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            raise RequestError(f"messages[{position}].role: {show(role)}, expected one of {', '.join(ROLES)}")
        if not isinstance(content, str) or "tool_calls" in message:
            expected = "expected a text without calls, or a checkpoint with a chat template"
            raise RequestError(f"messages[{position}]: {show(message)}, {expected}")
        if position == 0 and role == "system" and not content:
            continue
        if role == "tool":
            content = f"<|tool_response_start|>{content}<|tool_response_end|>"
        turns.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
    return f"{bos_token}{''.join(turns)}<|im_start|>assistant\n"


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
