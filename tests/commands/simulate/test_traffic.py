"""Traces as their makers wrote them, plain lines, and Poisson arrivals; what is wrong in a file is named."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import statistics
from pathlib import Path

import pytest

from lfm2np.commands.simulate.traffic import NANOSECONDS, Arrival, Traffic
from lfm2np.errors import RequestError, TraceError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,0
2023-11-16 18:16:50.9951691,91,16
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0,1,2,3,4,5,6,7,8,9,10,11,12,3]}
{"timestamp": 3052, "input_length": 1100, "output_length": 490, "hash_ids": [0, 1, 14]}
{"timestamp": 3052, "input_length": 40, "output_length": 7}
"""
PLAIN = """{"at": 0, "prompt_tokens": 300, "output_tokens": 40}
{"at": 0.25, "prompt": [[5, 60], [7, 240]], "output_tokens": 40, "priority": -1}

{"at": 1.000000001, "prompt": [[5, 60], [1, 5]], "output_tokens": 1, "output_id": 9}
"""


def arrivals_of(folder: Path, text: str | bytes, **more: object) -> list[Arrival]:
    path = folder / f"{len(list(folder.iterdir()))}.trace"  # a file is read once: each has its name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(Traffic(str(path), **more).arrivals())  # type: ignore[arg-type]


def test_azures_traces_begin_at_0_and_requests_without_tokens_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    first, second, last = Traffic(str(path)).arrivals()
    assert (first.at, first.num_prompt_tokens, first.num_output_tokens) == (0, 374, 44)
    assert (second.at, last.at) == (4_314_579_000, 64_314_579_100)
    assert len({token for each in (first, second, last) for token, _ in each.prompt}) == 3
    assert Traffic(str(path)).trace.left_out == 1
    assert [each.at for each in arrivals_of(tmp_path, AZURE_2024)] == [0, 7_405_000]


def test_mooncakes_blocks_are_shared_by_their_hashes(tmp_path: Path) -> None:
    first, second, alone = arrivals_of(tmp_path, MOONCAKE)
    assert [first.num_prompt_tokens, second.num_prompt_tokens, alone.num_prompt_tokens] == [6758, 1100, 40]
    assert first.prompt[:2] == second.prompt[:2] and first.prompt[2] != second.prompt[2]
    assert second.prompt[2][1] == 1100 - 2 * 512
    assert second.at == alone.at == 3_052_000_000


def test_plain_lines_say_all_that_a_request_has(tmp_path: Path) -> None:
    first, second, third = arrivals_of(tmp_path, PLAIN)
    assert (first.num_prompt_tokens, first.priority) == (300, 0)
    assert (second.at, second.num_prompt_tokens, second.num_output_tokens) == (250_000_000, 300, 40)
    assert second.priority == -1
    assert third.at == 1_000_000_001 and third.prompt[0] == second.prompt[0]
    ids = [
        token
        for each in (first, second, third)
        for token in (*(token for token, _ in each.prompt), each.output_token_id)
    ]
    assert len(set(ids)) == len(ids) - 1, "but for what the two prompts share"


def test_a_gzipped_trace_is_read_and_its_first_requests_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert list(Traffic(str(path)).arrivals()) == arrivals_of(tmp_path, MOONCAKE)
    assert len(Traffic(str(path), requests=2).arrivals()) == 2


def test_a_rate_stretches_the_times_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("".join(json.dumps({"at": at, "prompt_tokens": 5, "output_tokens": 5}) + "\n" for at in range(5)))
    assert Traffic(str(path)).trace.rate == 5 / 4
    assert [each.at for each in Traffic(str(path), rate=2.5).arrivals()] == [at * NANOSECONDS // 2 for at in range(5)]
    path.with_name("at-once").write_text('{"at": 1, "prompt_tokens": 5, "output_tokens": 5}\n')
    with pytest.raises(RequestError, match=r"rate 2: all requests of .* come at once"):
        Traffic(str(path.with_name("at-once")), rate=2).arrivals()


def test_poisson_arrivals_have_their_rate_and_lengths_and_are_the_same_again() -> None:
    traffic = Traffic("poisson:prompt=100-300,output=50~0.5,requests=4000", rate=8.0)
    arrivals = traffic.arrivals()
    assert len(arrivals) == 4000 and arrivals[-1].at / NANOSECONDS == pytest.approx(500, rel=0.05)
    gaps = [(b.at - a.at) / NANOSECONDS for a, b in itertools.pairwise(arrivals)]
    assert statistics.pstdev(gaps) == pytest.approx(1 / 8, rel=0.1)
    prompts, outputs = (
        [getattr(each, name) for each in arrivals] for name in ("num_prompt_tokens", "num_output_tokens")
    )
    assert (min(prompts), max(prompts)) == (100, 300) and statistics.mean(prompts) == pytest.approx(200, rel=0.03)
    assert statistics.median(outputs) == pytest.approx(50, rel=0.05) and max(outputs) > 150
    other = Traffic("poisson:prompt=100-300,output=7,requests=4000", rate=2.0).arrivals()
    assert [each.prompt for each in other] == [each.prompt for each in arrivals]
    assert other[9].at == pytest.approx(4 * arrivals[9].at, abs=4)
    assert Traffic("poisson", 1.0, seed=1).arrivals()[0].at != Traffic("poisson", 1.0, seed=2).arrivals()[0].at


@pytest.mark.parametrize(
    "text, named",
    [
        (b"\xff\xfe", ".trace: can't be read"),
        (b"\x1f\x8bgzip", ".trace: can't be read"),
        ("", "empty"),
        ("one two three\n", "'one two three'"),
        ("TIMESTAMP,ContextTokens\n", "GeneratedTokens"),
        (AZURE.replace("374", "x"), ":2: ContextTokens 'x'"),
        (AZURE.replace("2023-11-16 18:16", "2023-11-16 18:14"), ":5: -55.6854 s, after 4.54188 s"),
        (AZURE.replace("18:15:46", "18:75:46"), ":2: TIMESTAMP"),
        (AZURE.replace("374,44", "374"), ":2: GeneratedTokens None"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "at least one request"),
        (MOONCAKE.replace('"timestamp": 0', '"timestamp": -1'), ":1: timestamp -1"),
        (MOONCAKE.replace("3052", "1e3000"), ":2: timestamp"),
        (MOONCAKE.replace("[0, 1, 14]", "[0, 14]"), ":2: hash_ids"),
        (MOONCAKE.replace("[0, 1, 14]", "[0, 14, 1.5]"), ":2: hash_ids"),
        (MOONCAKE.replace("6758", "-1"), ":1: input_length -1"),
        (MOONCAKE + "{", ":4: not JSON"),
        (MOONCAKE + "[1]", ":4: [1]"),
        (PLAIN.replace("prompt_tokens", "prompts"), ":1: 'prompts'"),
        (PLAIN.replace('"prompt_tokens": 300, ', ""), ":1: ['at', 'output_tokens']"),
        (PLAIN.replace("[5, 60], [7", "[5, 0], [7"), ":2: prompt"),
        (PLAIN.replace("[[5, 60], [1, 5]]", "[]"), ":4: prompt []"),
        (PLAIN.replace('"at": 0.25', '"at": "x"'), ":2: at 'x'"),
        (PLAIN.replace('"at": 0,', '"at": true,'), ":1: at True"),
    ],
)
def test_what_is_wrong_in_a_trace_is_named(text: str | bytes, named: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=rf"^{tmp_path}.*{re.escape(named)}.*\Z"):
        arrivals_of(tmp_path, text)


@pytest.mark.parametrize("source", ["poisson:rate=4", "poisson:requests=0", "poisson:prompt=9-3", "poisson:output=1~x"])
def test_a_wrong_specification_is_named(source: str) -> None:
    with pytest.raises(RequestError, match=f"{source}: "):
        Traffic(source, 1.0).arrivals()
    with pytest.raises(RequestError, match="expected --rate"):
        Traffic("poisson").arrivals()
