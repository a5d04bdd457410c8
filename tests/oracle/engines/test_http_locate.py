"""`check http://... --locate`: a server shows answers only, and its wrong request is to be dumped where it runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_player import playing

from lfm2np.commands.cli.program import main

pytestmark = pytest.mark.rounding


def test_of_a_server_the_verdict_comes_and_then_how_to_dump_its_shortest_wrong_request(capsys: Any) -> None:
    """Pinned: exit code 3 and no verdict, "can't be recorded: expected transformers:..."."""

    def half_a_nat_off_late(reply: dict[str, Any]) -> None:
        for choice in reply.get("choices", ()):
            logprobs = choice["logprobs"]["token_logprobs"]
            logprobs[2:] = [logprob - 0.5 for logprob in logprobs[2:]]

    with playing("vllm") as server:
        server.spoil = half_a_nat_off_late
        assert main(["check", server.url, "--cases", "short-prompts", "--locate", "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    cause = output["figures"]["cause"]
    assert (output["exit_code"], cause["finding"], cause["max_tokens"]) == (1, None, 3)
    (prompt,) = cause["prompts"]
    assert cause["lines"][0].startswith(f"not recorded        {server.url} shows answers only")
    assert "short-prompts-1: prompt of 1, 3 new, alone; greedy" in cause["lines"][1]
    assert cause["lines"][2].split() == ["its", "prompt", "ids", str(prompt[0])]
    assert cause["lines"][-1] == "then                lfm2np locate dump.safetensors --format float32"
