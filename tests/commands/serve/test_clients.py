"""Clients that nobody here wrote: the `openai` package, and Schemathesis against the document of the protocol."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served_app import Served, expected, model, serving

from lfm2np.commands.serve.bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from lfm2np.commands.serve.settings import Settings

pytestmark = pytest.mark.clients
MESSAGES: list[Any] = [{"role": "user", "content": "sort: 7 2 9 4"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(model(), Settings("trained", key="a-key"), num_blocks=200) as one:
        yield one


def client(served: Served, kind: str = "OpenAI", **options: Any) -> Any:
    openai = pytest.importorskip("openai")
    return getattr(openai, kind)(base_url=f"http://127.0.0.1:{served.port}/v1", **{"api_key": "a-key", **options})


def test_completions_and_streams_by_the_openai_package(served: Served):
    fields = {"prompt": "add: 20 + 97 ->", "temperature": 0.7, "seed": 5, "max_tokens": 8, "logprobs": 2}
    (sample,) = expected(fields).outputs
    asked = {"model": "trained", **fields}
    answer = client(served).completions.create(**asked)
    (choice,) = answer.choices
    assert choice.text == sample.text and choice.finish_reason == sample.finish_reason
    assert choice.logprobs.token_logprobs == [logprob.logprob for logprob in sample.logprobs or ()]
    assert answer.usage.completion_tokens == len(sample.token_ids)
    assert answer.system_fingerprint.endswith(model().sha256)
    pieces = list(client(served).completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == sample.text
    assert pieces[-1].usage.completion_tokens == len(sample.token_ids)


def test_a_chat_and_its_stream_by_the_openai_package(served: Served):
    chats = client(served).chat.completions
    whole = chats.create(model="trained", messages=MESSAGES, temperature=0.0, logprobs=True, top_logprobs=3)
    assert whole.choices[0].message.content == "2 4 7 9" and whole.choices[0].finish_reason == "stop"
    assert all(len(token.top_logprobs) == 3 for token in whole.choices[0].logprobs.content)
    pieces = list(chats.create(model="trained", messages=MESSAGES, temperature=0.0, stream=True))
    assert "".join(piece.choices[0].delta.content for piece in pieces) == "2 4 7 9"
    again = [*MESSAGES, whole.choices[0].message.model_dump(), {"role": "user", "content": "add: 3 + 4"}]
    assert chats.create(model="trained", messages=again, temperature=0.0, max_completion_tokens=4).choices


def test_errors_as_the_openai_package_knows_them(served: Served):
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.AuthenticationError):
        client(served, api_key="another").models.list()
    with pytest.raises(openai.NotFoundError):
        client(served).completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client(served).completions.create(model="trained", prompt="a", max_tokens=-1)
    assert [listed.id for listed in client(served).models.list()] == ["trained"]


BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def document() -> dict[str, Any]:
    """The forms of bodies in OpenAPI's words."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for path, kind in BODIES.items():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        statuses = ("200", "400", "401", "404", "413", "415", "421", "429")
        responses = {status: {"description": "any"} for status in statuses}
        paths[path] = {"post": {"requestBody": body, "responses": responses}}
    info = {"title": "lfm2np serve", "version": "0"}
    return {"openapi": "3.1.0", "info": info, "components": {"schemas": schemas}, "paths": paths}


def test_schemathesis_finds_nothing(tmp_path: Path):
    """All its checks but one: a JSON schema can't say which values can't go together or lie beyond this model, so that
    some that fit it are refused with 400. With `ignore_eos` and no `max_tokens` a response fills all blocks: few."""
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed: the extra `clients`")
    (tmp_path / "openapi.json").write_text(json.dumps(document()))
    command = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json"]
    options = ["--exclude-checks", "positive_data_acceptance", "--max-examples", "30", "--seed", "1"]
    options += ["--request-timeout", "300", "-H", "Authorization: Bearer a-key"]
    with serving(model(), Settings("trained", key="a-key"), num_blocks=20) as served:
        options += ["--url", f"http://127.0.0.1:{served.port}"]
        ran = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
