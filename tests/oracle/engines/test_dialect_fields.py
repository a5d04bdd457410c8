"""The table of what is sent and read in each dialect: it says what the code does, and the page has it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import dialects
import pytest
from http_player import play_llama, play_mlx, play_sglang, play_vllm, request_of

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.dialects import LLAMA_CPP, SGLANG, TEXT, VLLM
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
    response = dialect.read(reply, REQUEST)
    fields = {**response.fields, "prompt_tokens": response.prompt_tokens, "new_tokens": response.new_tokens}
    return {name: value for name, value in fields.items() if value is not None}


def test_each_field_of_the_table_is_read_there_and_there_only(spoken: tuple[Dialect, dict[str, Any]]) -> None:
    dialect, reply = spoken
    whole = said(dialect, reply)
    assert set(whole) == {field.says for field in dialect.fields} - ROUTES - {"prompt"}
    for name in whole:
        less = reply
        for path in {field.path for field in dialect.fields if field.says == name}:
            less = without(less, path)
        try:
            assert name not in said(dialect, less), name
        except RequestError as missed:  # vLLM's logprobs without their tokens
            assert ": NoneType, expected" in str(missed)


def test_the_script_of_a_fuzz_run_reads_a_response_in_the_same_way(spoken: tuple[Dialect, dict[str, Any]]) -> None:
    dialect, reply = spoken
    names: dict[str, Any] = {}
    exec(dialect.reproducer, names)
    fields = dialect.read(reply, REQUEST).fields
    assert names["answer"]([reply]) == (fields["token_ids"], fields["logprobs"])


def test_nothing_else_of_a_response_is_read(spoken: tuple[Dialect, dict[str, Any]]) -> None:
    dialect, reply = spoken
    whole, paths = said(dialect, reply), [field.path for field in dialect.fields]
    others = [path for path in leaves(reply) if not any(path.startswith(known) for known in paths)]
    for path in others:
        assert said(dialect, without(reply, path)) == whole, path


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all fields that are no objects; of a list of objects those of its first, if it has no other."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value, path = value[0], f"{path}[0]"
    if not isinstance(value, dict):
        yield path
        return
    for name, inner in value.items():
        yield from leaves(inner, f"{path}.{name}" if path else name)


def test_a_prompt_that_the_server_computed_otherwise_is_refused() -> None:
    reply = play_vllm(VLLM.path, VLLM.request(REQUEST, Extras()))
    assert reply is not None
    reply["choices"][0]["prompt_token_ids"] = [1]
    with pytest.raises(RequestError, match="other tokens than the prompt"):
        VLLM.read(reply, REQUEST)
