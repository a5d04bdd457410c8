"""A dialect is one value: no other file knows its name; what is sent and read in it is what the page says."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import dialects
import pytest
from http_player import play_llama, play_mlx, play_sglang, play_vllm, request_of

import lfm2np
from lfm2np.oracle.engines.dialects import DIALECTS, LLAMA_CPP, SGLANG, TEXT, VLLM
from lfm2np.oracle.engines.dialects.dialect import Dialect, Extras

pytestmark = pytest.mark.rounding

REQUEST = request_of("a", prompt_logprobs=0)
PLAYS = {
    "vllm": (VLLM, play_vllm),
    "sglang": (SGLANG, play_sglang),
    "llama.cpp": (LLAMA_CPP, play_llama),
    "text": (TEXT, play_mlx),
}
ROUTES = {"routes"}  # of mixtures; the servers that are played have none


@pytest.fixture(params=PLAYS)
def spoken(request: pytest.FixtureRequest) -> tuple[Dialect, dict[str, Any]]:
    """A dialect, and a response with all that it may hold."""
    dialect, play = PLAYS[request.param]
    reply = play(dialect.path, dialect.request(REQUEST, Extras()))
    assert reply is not None
    return dialect, reply


def test_the_page_has_what_is_sent_and_read() -> None:
    assert dialects.made() in dialects.PAGE.read_text(encoding="utf-8")


def without(reply: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy of the reply; the field is there to begin with."""
    less = copy.deepcopy(reply)
    *outer, last = re.findall(r"\w+", path)
    inside: Any = less
    for name in outer:
        inside = inside[int(name) if name.isdigit() else name]
    del inside[last]
    return less


def said(dialect: Dialect, reply: dict[str, Any]) -> dict[str, Any]:
    """What is read, what is missing left out."""
    return {name: value for name, value in dialect.read(reply, REQUEST).items() if value is not None}


def test_each_field_of_the_table_is_read_there_and_there_only(spoken: tuple[Dialect, dict[str, Any]]) -> None:
    dialect, reply = spoken
    whole = said(dialect, reply)
    assert set(whole) == {field.says for field in dialect.fields} - ROUTES - {"prompt"}
    for name in whole:
        less = reply
        for path in {field.path for field in dialect.fields if field.says == name}:
            less = without(less, path)
        assert name not in said(dialect, less), name


def test_the_script_of_a_fuzz_run_reads_a_response_in_the_same_way(spoken: tuple[Dialect, dict[str, Any]]) -> None:
    dialect, reply = spoken
    names: dict[str, Any] = {}
    exec(dialect.reproducer, names)
    fields = dialect.read(reply, REQUEST)
    assert names["answer"]([reply]) == (fields["token_ids"], fields["logprobs"])


NAMES = "|".join(re.escape(each.name) for each in DIALECTS if each.name != "text")  # also a field of answers
SINGLED_OUT = re.compile(
    r"import\b[^\n]*\b(VLLM|SGLANG|LLAMA_CPP|TEXT)\b"
    r"|\bdialects(\.| import [^\n]*)\b(openai|sglang|llama_cpp)\b"
    r"|dialect\.name\b[^\n]*(==|!=| in )"
    rf"|(==|!=| in )[^\n]*[\"']({NAMES})[\"']|[\"']({NAMES})[\"'] in "
)


def test_no_other_file_imports_a_dialect_or_compares_its_name() -> None:
    """In any other place a new dialect would have to be added, too."""
    package = Path(lfm2np.__file__).parent
    folders = (package / "oracle" / "engines", package / "suite" / "fuzz", package / "commands" / "cli")
    paths = [path for folder in folders for path in folder.rglob("*.py") if path.parent.name != "dialects"]
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    assert texts and {name: found[0] for name, text in texts.items() if (found := SINGLED_OUT.search(text))} == {}
    assert SINGLED_OUT.search("if engine.startswith('x') and kind == 'llama.cpp': pass")
