"""Prompts of chats.json by transformers' apply_chat_template: the same text and ids, case by case."""

from __future__ import annotations

import copy
import datetime
import json
from pathlib import Path
from typing import Any

import pytest

import lfm2np

transformers = pytest.importorskip("transformers")
from transformers.utils import chat_template_utils  # noqa: E402

from lfm2np.checkpoint.loaded import trained_fixture  # noqa: E402

pytestmark = pytest.mark.peers
CHATS = json.loads((Path(lfm2np.__file__).parent / "suite" / "tool_parsers" / "chats.json").read_text(encoding="utf-8"))
CASES = {case["id"]: case for case in CHATS["prompts"] if case["text"] is not None}  # others are refused here


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(trained_fixture())


@pytest.mark.parametrize("name", CASES)
def test_transformers_makes_the_same_prompt(theirs: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = CASES[name]
    messages, options = copy.deepcopy(case["messages"]), dict(case["options"])
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        given = call["function"]["arguments"]  # vLLM parses them before it renders; transformers' templates raise
        call["function"]["arguments"] = json.loads(given or "{}") if isinstance(given, str) else given
    variables = options.pop("chat_template_kwargs", {})
    if "date" in variables:
        monkeypatch.setattr(chat_template_utils, "datetime", frozen(variables["date"]))
    theirs.chat_template = CHATS["templates"][case["template"]]
    given = {
        "tools": case["tools"],
        "add_generation_prompt": not options.get("continue_final_message"),
        **options,
        **variables,
    }
    assert theirs.apply_chat_template(messages, tokenize=False, **given) == case["text"]
    assert theirs.apply_chat_template(messages, return_dict=False, **given) == case["ids"]


def frozen(date: str) -> Any:
    class Frozen:
        @staticmethod
        def now() -> datetime.datetime:
            return datetime.datetime.fromisoformat(date)

    return Frozen
