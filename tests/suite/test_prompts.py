"""Prompts of chats.json: the reference makes them, no copy of it with a fault does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.loaded import trained_fixture
from lfm2np.checkpoint.text import chat, chat_template, messages, tokenizer
from lfm2np.errors import TokenizerError
from lfm2np.suite.test_tool_parsers import CHATS

pytestmark = pytest.mark.slow

SPECIAL = {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
MODULES = (messages, chat_template, chat, tokenizer)

# name, where it was seen, what is replaced by what in one of the modules
FAULTS = (
    ("double BOS", "vLLM 16081, SGLang 888", "return ids if ids[:1] == [bos] else [bos, *ids]", "return [bos, *ids]"),
    ("no BOS", "", "return ids if ids[:1] == [bos] else [bos, *ids]", "return ids[1:]"),
    ("tools dropped", "Liquid4All docs 130", '"tools": listed}', '"tools": None}'),
    ("tools as compact JSON", "llama.cpp 21242", "separators: Any = None,", 'separators: Any = (",", ":"),'),
    ("tools in ASCII", "vLLM", "ensure_ascii: bool = False,", "ensure_ascii: bool = True,"),
    ("tools with sorted keys", "llama.cpp", "sort_keys: bool = False", "sort_keys: bool = True"),
    ("tools as HTML", "jinja2", "environment.filters.update(tojson=to_json, ", "environment.filters.update("),
    (
        "history's calls dropped",
        "Rapid-MLX 1592",
        "    return fields if reasoning is None",
        '    fields.pop("tool_calls", 0)\n    return fields if reasoning is None',
    ),
    ("arguments stay JSON", "vllm.cpp 526", "if isinstance(given, str):", "if False:"),
    (
        "responses are the user's",
        "Rapid-MLX 1592",
        "    return fields if reasoning is None",
        '    fields["role"] = fields["role"].replace("tool", "user")\n    return fields if reasoning is None',
    ),
    ("reasoning under one name", "llama.cpp 24234", '{"thinking": reasoning, **fields', "{**fields"),
    (
        "reasoning dropped",
        "LM Studio 1979",
        "reasoning = next((fields[key] for key in REASONING if key in fields), None)",
        "reasoning = next((fields.pop(key) for key in REASONING if key in fields and 0), None)",
    ),
    ("thinking always kept", "llama.cpp 24234", "**variables, ", '**variables, "preserve_thinking": True, '),
    ("template's options dropped", "vLLM", "**chat.special_tokens, **variables, ", "**chat.special_tokens, "),
    ("no generation prompt", "", "final is None and add_generation_prompt is not False", "False"),
    ("always a generation prompt", "", "final is None and add_generation_prompt is not False", "True"),
    ("a continued message ends", "", "    if final is None:\n", "    if True:\n"),
    (
        "content stripped",
        "vLLM",
        "    return fields if",
        '    fields["content"] = str(fields["content"]).strip()\n    return fields if',
    ),
    (
        "null is None",
        "transformers",
        "for key, value in fields.items() if value is not None}",
        "for key, value in fields.items()}",
    ),
    ("blocks leave lines", "", "Sandbox(trim_blocks=True, lstrip_blocks=True", "Sandbox(autoescape=True"),
    ("today is the clock's", "LFM2.5-VL", 'fromisoformat(context["date"])', "today()"),
)


@pytest.fixture(scope="module")
def reference() -> tokenizer.Tokenizer:
    return tokenizer.load_tokenizer(trained_fixture(), load_config(trained_fixture()))


def wrong(loaded: tokenizer.Tokenizer) -> str | None:
    """The first case that another prompt is made of."""
    for case in CHATS["prompts"]:
        loaded.chat = chat.Chat(CHATS["templates"][case["template"]], SPECIAL, case["template"])
        given = (case["messages"], case["tools"])
        try:
            prompt: Any = loaded.render_chat(*given, **case["options"]), loaded.encode_chat(*given, **case["options"])
        except TokenizerError:
            prompt = None, None
        except Exception:
            return str(case["id"])
        if prompt != (case["text"], case["ids"]):
            return str(case["id"])
    return None


def replace_code(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> int:
    """Runs a copy of the modules from now on; how often `old` was there."""
    sources = {module: Path(str(module.__file__)).read_text(encoding="utf-8") for module in MODULES}
    for module, source in sources.items():
        space: dict[str, Any] = {"__name__": module.__name__}
        exec(compile(source.replace(old, new), str(module.__file__), "exec"), space)
        for name, value in space.items():
            if getattr(value, "__module__", None) == module.__name__ and not isinstance(value, type):
                monkeypatch.setattr(module, name, value)
    for name in ("render_chat", "encode_chat"):
        monkeypatch.setattr(tokenizer.Tokenizer, name, getattr(space["Tokenizer"], name))
    return sum(source.count(old) for source in sources.values())


@pytest.mark.parametrize(("old", "new"), [fault[2:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_caught(reference: tokenizer.Tokenizer, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    assert replace_code(monkeypatch, old, new) == 1
    assert wrong(reference)


def test_the_reference_makes_each_prompt(reference: tokenizer.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_code(monkeypatch, "return", "return")
    assert wrong(reference) is None


def test_ids_and_names_of_cases() -> None:
    ids = [case["id"] for case in (*CHATS["cases"], *CHATS["prompts"], *CHATS["streams"])]
    assert len(set(ids)) == len(ids) >= 300
    assert {case["template"] for case in CHATS["prompts"]} == set(CHATS["templates"])


def test_a_stream_is_its_reply() -> None:
    replies = {case["id"]: case for case in CHATS["cases"]}
    for case in CHATS["streams"]:
        reply = replies[case["reply"]]
        assert "".join(case["pieces"]) == "".join(reply["pieces"])
        assert case["ids"] is None or [*itertools.chain(*case["ids"])] == reply["ids"]
