"""Traces are read as they are written, and what is wrong in them is named."""

import gzip
import io
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.commands.simulate import trace_files
from lfm2np.commands.simulate.trace_files import FORMATS, read, write
from lfm2np.commands.simulate.traffic import (
    MOST_TOKENS,
    NANOSECONDS,
    Arrival,
    faster,
    first,
    merge_runs,
    output_token_id,
    prompt_token_id,
    shared_token_id,
    within,
)
from lfm2np.errors import RequestError, TraceError

MILLISECOND = NANOSECONDS // 1000
IDS, TOKENS = st.integers(0, 2**63 - 1), st.integers(1, MOST_TOKENS)
TIMES = st.integers(0, 2**63 - 1) | st.integers(0, 3)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    drawn = []
    for number, at in enumerate(sorted(draw(st.lists(TIMES, min_size=1, max_size=6)))):
        outputs = draw(TOKENS)
        runs = st.lists(st.tuples(IDS | st.integers(0, 3), st.integers(1, 1000)), min_size=1, max_size=5).map(
            merge_runs
        )
        prompt = st.just(((prompt_token_id(number), 7),)) | runs
        more = st.none() | st.integers(outputs, MOST_TOKENS)
        priority, leaves = st.integers(-(2**63) + 1, 2**63 - 1), st.none() | TIMES
        output_id = st.just(output_token_id(number)) | IDS
        drawn.append(Arrival(at, draw(prompt), outputs, draw(output_id), draw(more), draw(priority), draw(leaves)))
    return drawn


def write_file(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def lines(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def unrelated(number: int, tokens: int, at: int, outputs: int) -> Arrival:
    """A request that shares nothing, the `number`th of its file."""
    return Arrival(at, ((prompt_token_id(number), tokens),), outputs, output_token_id(number))


@given(arrivals())
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, trace: list[Arrival]) -> None:
    text = io.StringIO()
    write(trace, text)
    path = write_file(tmp_path_factory.getbasetemp() / "round.jsonl", text.getvalue())
    assert list(read(path)) == trace
    assert list(read(path, "lfm2np", sort=True)) == trace


def test_a_trace_is_written_short(tmp_path: Path) -> None:
    text = io.StringIO()
    write([unrelated(0, 5, 0, 2), Arrival(1_500_000_001, ((0, 3), (8, 1)), 2, 9, 4, -1, NANOSECONDS)], text)
    assert text.getvalue() == (
        '{"at": 0, "prompt_tokens": 5, "output_tokens": 2}\n'
        '{"at": 1.500000001, "prompt": [[0, 3], [8, 1]], "output_tokens": 2, "output_id": 9, "max_tokens": 4, '
        '"priority": -1, "abort_after": 1}\n'
    )


MOONCAKE = lines(
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 27, "input_length": 1024, "output_length": 6, "hash_ids": [0, 2]},
    {"timestamp": 27, "input_length": 1025, "output_length": 7, "hash_ids": [0, 0, 3]},
)


def test_mooncake_shares_blocks_of_512(tmp_path: Path) -> None:
    block = [shared_token_id(number) for number in range(4)]
    assert list(read(write_file(tmp_path / "trace", MOONCAKE))) == [
        Arrival(0, ((block[0], 512), (block[1], 88)), 5, output_token_id(0)),
        Arrival(27 * MILLISECOND, ((block[0], 512), (block[2], 512)), 6, output_token_id(1)),
        Arrival(27 * MILLISECOND, ((block[0], 1024), (block[3], 1)), 7, output_token_id(2)),
    ]


def test_mooncake_without_blocks_shares_nothing(tmp_path: Path) -> None:
    path = write_file(tmp_path / "trace", lines({"timestamp": 1.5, "input_length": 9, "output_length": 5}))
    assert list(read(path)) == [unrelated(0, 9, 1_500_000, 5)]


@pytest.mark.parametrize("chat", [{"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1}, {}])
def test_bailian_shares_blocks_of_16_and_counts_seconds(tmp_path: Path, chat: dict[str, object]) -> None:
    row = chat | {"timestamp": 61.114, "input_length": 20, "output_length": 5, "hash_ids": [7, 8]}
    prompt = ((shared_token_id(7), 16), (shared_token_id(8), 4))
    assert list(read(write_file(tmp_path / "trace", lines(row)))) == [
        Arrival(61_114 * MILLISECOND, prompt, 5, output_token_id(0))
    ]


@pytest.mark.parametrize(
    ("times", "gap"),
    [
        (("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50.9951690"), 4_314_579_000),
        (("2024-05-10 00:00:00.009930+00:00", "2024-05-10 02:00:00+02:00"), -9_930_000),
        (("2023-12-31 23:59:59", "2024-01-01T00:00:00.25Z"), 1_250_000_000),
    ],
)
def test_azure_begins_with_its_first_request(tmp_path: Path, times: tuple[str, str], gap: int) -> None:
    rows = [f"{at},{tokens},44" for at, tokens in zip(times, (374, 396), strict=True)]
    path = write_file(tmp_path / "trace", "\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    trace = list(read(path, sort=True))
    assert sorted(each.num_prompt_tokens for each in trace) == [374, 396]
    assert [each.at for each in trace] == [0, abs(gap)]


@pytest.mark.parametrize("more", [False, True])
def test_burstgpt_with_and_without_sessions_and_failures(tmp_path: Path, more: bool) -> None:
    middle = ",Session ID,Elapsed time" if more else ""
    session = ",1722ac82-0a46,43" if more else ""
    text = f"Timestamp{middle},Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
        f"{at}{session},ChatGPT,{prompt},{outputs},{prompt + outputs},Conversation log\n"
        for at, prompt, outputs in (
            ("19440110.0", 472, 18),
            ("19440110.25", 1087, 0),
            ("19440112", 0, 5),
            ("19440112", 417, 9),
        )
    )
    skipped: Counter[str] = Counter()
    assert list(read(write_file(tmp_path / "trace", text), skipped=skipped)) == [
        unrelated(0, 472, 0, 18),
        unrelated(3, 417, 2 * NANOSECONDS, 9),
    ]
    assert skipped == {"no output tokens": 1, "no prompt tokens": 1}


RESULT = {"input_lens": [10, 20, 30], "output_lens": [1, 0, 3], "ttfts": [0.1, 0.0, 0.1], "errors": ["", "no", ""]}


def test_a_benchmark_with_start_times_begins_with_its_first_request(tmp_path: Path) -> None:
    result = RESULT | {"start_times": [1000.5, 0.0, 1000.25]}
    skipped: Counter[str] = Counter()
    for text in (json.dumps(result), json.dumps(result, indent=1)):
        trace = list(read(write_file(tmp_path / "result", text), "bench-result", skipped=skipped))
        assert [(each.at, each.num_prompt_tokens) for each in trace] == [(0, 30), (NANOSECONDS // 4, 10)]
    assert skipped == {"no output tokens": 2}


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"input_lens": [1], "output_lens": [3]}\n' * 2, "2 runs of a benchmark, expected one"),
        ('{"total_input_tokens": 3}\n', "run it with --save-detailed"),
    ],
)
def test_a_benchmark_of_several_runs_or_without_lengths_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        list(read(write_file(tmp_path / "result", text), rate=2.0))


def test_a_benchmark_without_times_takes_a_rate(tmp_path: Path) -> None:
    path = write_file(tmp_path / "result", json.dumps(RESULT))
    trace, again = (list(read(path, rate=2.0, seed=seed)) for seed in (1, 1))
    assert trace == again != list(read(path, rate=2.0, seed=2))
    assert [each.num_prompt_tokens for each in trace] == [10, 30]


def test_sglangs_request_log_is_in_order_of_arrival(tmp_path: Path) -> None:
    def line(second: int, event: str, rid: str, **more: object) -> dict[str, object]:
        return {"timestamp": f"2026-01-02T03:04:{second:02d}.500000", "event": f"request.{event}", "rid": rid, **more}

    def finished(second: int, rid: str, tokens: int) -> dict[str, object]:
        return line(second, "finished", rid, out={"meta_info": {"prompt_tokens": tokens, "completion_tokens": 5}})

    log = [line(1, "received", "a"), line(2, "received", "b"), finished(3, "b", 20), finished(4, "a", 10)]
    path = write_file(tmp_path / "log", lines(*log) + "INFO: text of another program\n")
    assert [(each.at, each.num_prompt_tokens) for each in read(path)] == [(0, 10), (NANOSECONDS, 20)]
    without = write_file(tmp_path / "without", lines(*log[2:]))
    assert [each.num_prompt_tokens for each in read(without, rate=1.0)] == [20, 10]


def test_gzip_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    expected = list(read(write_file(path, MOONCAKE)))
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf\n" + MOONCAKE.encode()))
    assert list(read(path)) == expected


def test_a_file_is_read_as_far_as_it_is_used(tmp_path: Path) -> None:
    path = write_file(tmp_path / "trace", MOONCAKE + "{")
    assert [each.at for each in first(read(path), 2)] == [0, 27 * MILLISECOND]
    with pytest.raises(TraceError):
        list(read(path))


def test_sort_sorts_and_keeps_what_comes_at_once_in_its_order(tmp_path: Path) -> None:
    rows = [
        {"at": at, "prompt_tokens": tokens, "output_tokens": 1} for at, tokens in ((2, 5), (1, 6), (2, 7), (0.5, 8))
    ]
    path = write_file(tmp_path / "trace", lines(*rows))
    assert [each.num_prompt_tokens for each in read(path, sort=True)] == [8, 6, 5, 7]
    with pytest.raises(TraceError, match=r"trace:2: time 1: expected at least that .* before it, 2 s; --sort"):
        list(read(path))


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
ROW = {"at": 0, "prompt_tokens": 5, "output_tokens": 2}
BLOCKS = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace: empty, expected a trace"),
        ("\n \n", "trace: empty"),
        (lines(ROW | {"at": -1}), "trace:1: at -1: expected a time that is 0 or later"),
        ('{"at": -0.5, "prompt_tokens": 5, "output_tokens": 2}', "trace:1: at -0.5: expected a time"),
        (lines(ROW | {"at": float("nan")}), "trace:1: at NaN: expected a time"),
        (lines(ROW | {"at": float("inf")}), "trace:1: at Infinity: expected a time"),
        (lines(ROW | {"at": 2**63}), "trace:1: at 9223372036854775808: expected a time"),
        ('{"at": 1e99999, "prompt_tokens": 5, "output_tokens": 2}', r"trace:1: at 1E\+99999: expected a time"),
        ('{"at": 1e99999999999999999999, "prompt_tokens": 5}', "trace:1: not JSON.*: a number out of range"),
        (lines(ROW | {"at": "0"}), "trace:1: at '0': expected a time"),
        (lines(ROW | {"at": None}), "trace:1: at null: expected a time"),
        (lines(ROW | {"at": True}), "trace:1: at true: expected a time"),
        (lines(ROW, ROW | {"output_tokens": 0}), "trace:2: output_tokens 0: expected a whole number, 1 to"),
        (lines(ROW | {"prompt_tokens": 10**10}), "trace:1: prompt_tokens 10000000000: expected a whole number"),
        (lines(ROW | {"prompt_tokens": 1.0}), "trace:1: prompt_tokens 1.0: expected a whole number"),
        (f'{{"prompt_tokens": {"9" * 5000}}}', "trace:1: not JSON, or cut short: .*digits"),
        (lines({"at": 0, "prompt_tokens": 5}), "trace:1: output_tokens null: expected a whole number"),
        (lines(ROW | {"max_tokens": 1}), "trace:1: max_tokens 1: expected a whole number, 2 to"),
        (lines(ROW | {"priority": "x"}), "trace:1: priority 'x': expected a whole number"),
        (lines(ROW | {"abort_after": -1}), "trace:1: abort_after -1: expected a time"),
        (lines(ROW | {"output_id": -1}), "trace:1: output_id -1: expected"),
        (lines(ROW | {"colour": 1}), "trace:1: key 'colour': expected at, prompt, prompt_tokens"),
        (lines(ROW | {"prompt": [[1, 2]]}), "trace:1: prompt_tokens 5: expected prompt or prompt_tokens, not both"),
        (lines({"at": 0, "prompt": [], "output_tokens": 2}), r"trace:1: prompt \[\]: expected runs"),
        (lines({"at": 0, "prompt": [[1, 0]], "output_tokens": 2}), r"trace:1: prompt \[1, 0\]: expected runs"),
        (lines({"at": 0, "prompt": [[-1, 1]], "output_tokens": 2}), r"trace:1: prompt \[-1, 1\]: expected runs"),
        (lines({"at": 0, "prompt": [1, 2], "output_tokens": 2}), "trace:1: prompt 1: expected runs"),
        (lines({"at": 0, "prompt": [[1, MOST_TOKENS]] * 2, "output_tokens": 2}), "trace:1: prompt tokens 2000000000: "),
        (lines({"prompt_tokens": 5, "output_tokens": 2}), r"trace:1: time null: expected a time, or a rate \(--rate\)"),
        (lines(ROW, {"prompt_tokens": 5, "output_tokens": 2}), "trace:2: time null: expected a time"),
        (lines(ROW) + '{"at": 1, "prompt_to', "trace:2: not JSON, or cut short: .*Unterminated string"),
        (lines(ROW) + "[1]", r"trace:2: JSON \[1\]: expected an object"),
        ("{" * 100_000, "trace:1: not JSON, or cut short"),
        ('{"a": ' * 100_000, "trace:1: not JSON, or cut short"),
        (lines({"a": 1}), r"trace: keys \['a'\]: expected those of lfm2np, mooncake"),
        (lines({"prompt": "What is", "output_tokens": 10}), "trace: prompt is text, expected numbers of tokens"),
        (lines({"id": "x", "conversations": []}), "trace: conversations is text, expected"),
        (lines(BLOCKS | {"input_length": 1025}), "trace: 2 hash_ids for input_length 1025: expected blocks of 512"),
        (lines(BLOCKS, BLOCKS | {"input_length": 1025}), "trace:2: hash_ids: number 2: expected 3 of them, "),
        (lines(BLOCKS | {"hash_ids": [0, -1]}), "trace:1: hash_ids: -1: expected whole numbers"),
        (lines(BLOCKS | {"hash_ids": [0, 2**62]}), "trace:1: hash_ids: 4611686018427387904: expected"),
        (lines(BLOCKS | {"hash_ids": [0, "a"]}), "trace:1: hash_ids: 'a': expected"),
        (lines(BLOCKS | {"timestamp": -1}), "trace:1: timestamp -1: expected a time"),
        (lines(BLOCKS | {"input_length": -1}), "trace: 2 hash_ids for input_length -1"),
        (lines(BLOCKS | {"output_length": -1}), "trace:1: output_length -1: expected a whole number, 0 to"),
        (lines(BLOCKS | {"output_length": 0}), "trace: no request with prompt and output tokens in it"),
        (lines(BLOCKS | {"timestamp": 5}, BLOCKS), "trace:2: time 0: expected at least .* 0.005 s; --sort sorts"),
        ("1,2,3\n", "trace: begins '1,2,3': expected a trace: lfm2np"),
        ("TIMESTAMP,ContextTokens\n", "trace: begins 'TIMESTAMP,ContextTokens': expected"),
        (AZURE, "trace: no request with prompt and output tokens in it"),
        (f"{AZURE}2023-11-16 18:15:46,1\n", "trace:2: CSV '2023-11-16 18:15:46,1': expected 3 columns"),
        (f"{AZURE}2023-11-16 18:15:46,x,1\n", "trace:2: ContextTokens 'x': expected a whole number"),
        (f"{AZURE}2023-11-16 18:15:46,1,-1\n", "trace:2: output tokens -1: expected 0 to"),
        (f"{AZURE}2023-11-16 18:15:46,1,{'9' * 30}\n", "trace:2: GeneratedTokens '9999.*: expected a whole"),
        (f"{AZURE}2023-13-16 18:15:46,1,1\n", "trace:2: TIMESTAMP '2023-13-16 18:15:46': expected a time such as"),
        (f"{AZURE}1969-12-31 23:59:59,1,1\n", "trace:2: TIMESTAMP .*: expected a time from 1970"),
        (f"{AZURE}NaN,1,1\n", "trace:2: TIMESTAMP 'NaN': expected a time such as"),
        (f'{AZURE}"2023-11-16,1,1\n', "trace:2: CSV .*: expected columns"),
        (f"{AZURE}2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n", "trace:3: time .*45: expected .*46 s; --sort"),
        (f"{BURST}NaN,GPT-4,1,1,2,API log\n", "trace:2: Timestamp NaN: expected a time"),
        (f"{BURST}-5,GPT-4,1,1,2,API log\n", "trace:2: Timestamp -5: expected a time"),
        (f"{BURST}soon,GPT-4,1,1,2,API log\n", "trace:2: Timestamp 'soon': expected a number"),
        (lines(RESULT), r"trace: request 1: time null: expected a time, or a rate"),
        (lines(RESULT | {"output_lens": [1]}), "trace: keys .*: expected input_lens, output_lens and"),
        (lines(RESULT | {"start_times": [1, 2]}), "trace: keys .*: expected input_lens, output_lens and"),
        (lines(RESULT | {"input_lens": [10, 2.5, 1]}), "trace: request 2: input_lens 2.5: expected a whole number"),
        (lines(RESULT, RESULT), "trace: 2 runs of a benchmark, expected one"),
        (lines({"event": "request.finished", "rid": "a"}), "trace:1: out null: expected meta_info"),
        (lines({"event": "request.finished", "rid": "a", "out": {"meta_info": {}}}), "trace:1: prompt_tokens null"),
        (lines({"event": "request.received", "rid": "a", "timestamp": 5}), "trace:1: timestamp 5: expected a time"),
        ("PK\3\4\0", "trace:1: a zero byte, expected text"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_on_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = write_file(tmp_path / "trace", text)
    with pytest.raises(TraceError, match=message) as caught:
        list(read(path))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert str(caught.value).startswith(str(tmp_path))


def test_a_file_that_is_not_text_or_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for content, message in (
        (b"\xff\xfe\xfd", "trace:1: not UTF-8"),
        (b"\x1f\x8bxxxxxxxxxxxxxxx", "trace: can't be read"),
        (gzip.compress(MOONCAKE.encode())[:-20], "trace:.* its gzip data is cut short"),
    ):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=message):
            list(read(path))
    with pytest.raises(TraceError, match="gone: can't be read: No such file"):
        read(tmp_path / "gone")
    with pytest.raises(TraceError, match="can't be read: Is a directory"):
        read(tmp_path)


def test_what_is_asked_for_is_checked_at_once(tmp_path: Path) -> None:
    path = write_file(tmp_path / "trace", MOONCAKE)
    with pytest.raises(RequestError, match="format 'csv': expected one of lfm2np, mooncake"):
        read(path, "csv")
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RequestError, match=r"rate .*: expected requests a second"):
            read(path, rate=rate)
    with pytest.raises(RequestError, match="seed -1"):
        read(path, seed=-1)
    with pytest.raises(TraceError, match=r"trace:1: rate 2.0: expected none: this trace has times"):
        list(read(path, rate=2.0))


def test_a_format_that_is_given_is_held_to(tmp_path: Path) -> None:
    path = write_file(tmp_path / "trace", MOONCAKE)
    with pytest.raises(TraceError, match="hash_ids: number 2: expected 38 of them, one for each 16"):
        list(read(path, "bailian"))
    with pytest.raises(TraceError, match=r"trace:1: columns .*: expected a column TIMESTAMP"):
        list(read(path, "azure"))


def test_each_format_is_described() -> None:
    for name in FORMATS:
        assert re.search(rf"^{name}\s", trace_files.__doc__ or "", re.MULTILINE), name


def test_faster_first_and_within() -> None:
    trace = [unrelated(number, 5, at, 2) for number, at in enumerate((0, 3, 4, 9))]
    assert [each.at for each in faster(trace, 2.0)] == [0, 1, 2, 4]
    assert [each.at for each in faster(trace, 0.5)] == [0, 6, 8, 18]
    assert list(faster(trace, 1.0)) == list(first(trace, 9)) == trace
    assert [(each.at, each.output_token_id) for each in within(trace, 3, 9)] == [(0, 5), (1, 8)]
    for speed in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="speed"):
            faster(trace, speed)
