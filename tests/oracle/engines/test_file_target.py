"""FILE.jsonl: what was recorded is read as it was written, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from answering import answers_to

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.file_target import FileTarget, Transcript
from lfm2np.oracle.engines.records import Answer, Request, Trace, failed, greedy
from lfm2np.oracle.engines.records_json import answer_as_json, request_as_json
from lfm2np.oracle.engines.target import Target, TargetError
from lfm2np.oracle.workloads import noted

TAGS = {"border": 16, "of": (1, 2), "prefix": "warm", "seen": 8}
PAIRS = [
    (
        greedy("a", (1, 2), 2, case="case", prompt_text="x\u2028y\n", prompt_logprobs=0, tags=TAGS),
        Answer((5, 6), (-0.1, -1e-300), ({5: -0.1, 7: -3.0}, {}), (-2.5,), "é", "length", cached_tokens=1),
    ),
    (greedy("b", (1,), 1, case="case"), failed("it died")),
    (greedy("c", (3,), 1, case="case"), Answer((), finish_reason="abort")),
]
NEW = greedy("d", (1,), 1, case="case"), Answer((1,))


def requests_in(path: Path) -> list[Request]:
    return [request for request, _ in FileTarget(path).pairs()]


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    """Of a torn line. Of all kinds, a file that any test left open would fail the test in which it is collected."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*: dropped")
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of the three, of a check that goes on."""
    with Transcript(tmp_path / "run.jsonl") as transcript:
        for pair in PAIRS:
            transcript.append(*pair)
    return tmp_path / "run.jsonl"


@pytest.fixture
def ended(path: Path) -> Path:
    """The same, of one that came to its end."""
    with Transcript(path) as transcript:
        transcript.end()
    return path


def line_of(request: Request, answer: Answer) -> str:
    return json.dumps({"request": request_as_json(request), "answer": answer_as_json(answer)})


def test_every_line_is_there_before_append_returns_and_is_read_as_it_was(tmp_path: Path) -> None:
    transcript = Transcript(tmp_path / "run.jsonl")
    for count, pair in enumerate(PAIRS, 1):
        transcript.append(*pair)
        again = Transcript(tmp_path / "run.jsonl")
        assert [answer for _, answer in again.pairs()] == [answer for _, answer in PAIRS[:count]]
        assert again.known(pair[0]) == pair[1]
        assert again.pairs()[0][0].tags == {"case": "case", **TAGS, "of": [1, 2]}
        transcript.close()  # the next opens it again
    other = greedy("b", (1, 9), 1, case="case")  # of several answers to an id the last stands
    transcript.append(other, Answer((4,)))
    transcript.close()
    again = Transcript(tmp_path / "run.jsonl")
    assert again.known(other) == Answer((4,))
    assert [request.request_id for request, _ in again.pairs()] == ["a", "b", "c"]


def test_an_answer_is_known_to_exactly_its_request(path: Path) -> None:
    """Also to one of which its place in the plan is noted: a file may be of before there were such notes."""
    transcript = Transcript(path)
    (trace,) = noted([Trace((PAIRS[1][0],))])
    assert transcript.known(PAIRS[1][0]) == transcript.known(trace.requests[0]) == PAIRS[1][1]
    assert transcript.known(greedy("z", (1,), 1, case="case")) is None
    for other in (
        greedy("b", (1,), 1, case="other"),
        greedy("b", (1,), 1, case="case", tags={"prefix": "warm"}),
        greedy("b", (2,), 1, case="case"),
        greedy("b", (1,), 2, case="case"),
        greedy("b", (1,), 1, case="case", prompt_logprobs=0),
        greedy("b", (1,), 1, case="case", tags={"border": 16}),
        greedy("b", (1,), 1, case="case", abort_after=1),
    ):
        with pytest.raises(RequestError, match="'b' is another request there"):
            transcript.known(other)


@pytest.mark.slow
def test_a_torn_last_line_is_dropped_with_a_warning_wherever_it_tore(path: Path) -> None:
    content = path.read_bytes()
    start = content.rindex(b"\n", 0, -1) + 1
    for end in range(start + 1, len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.warns(UserWarning, match="line 3: torn"):
            torn = Transcript(path)
        assert len(torn.pairs()) == 2
    torn.append(*PAIRS[2])
    torn.append(*NEW)
    torn.close()
    assert path.read_bytes().startswith(content)
    assert len(Transcript(path).pairs()) == 4


GOOD = line_of(*PAIRS[1])
BAD_LINES = {
    "torn, but not the last": (GOOD[:-3], "not JSON"),
    "no answer": ('{"request": {}}', "request, expected an object with request and answer"),
    "more": (GOOD[:-1] + ', "more": 1}', "expected an object with request and answer"),
    "infinity": (GOOD.replace('"error": "it died"', '"token_ids": [1], "logprobs": [-Infinity]'), "finite number"),
    "an unknown field": (GOOD.replace('"error"', '"eror"'), "answer field 'eror'"),
    "no prompt": (GOOD.replace("[1]", "[]"), "prompt_token_ids: expected token ids, at least one"),
    "an error of no kind": (GOOD.replace('"5xx"', "5"), "kind 5: expected text"),
    "another length": (
        GOOD.replace('"max_tokens"', '"tags": {"length": 2}, "max_tokens"'),
        "tags.length 2: expected 1",
    ),
    "no text": ("\udcff", "not UTF-8: byte 0"),
    "a byte order mark": ("\ufeff" + GOOD, "begins with a byte order mark (BOM), expected UTF-8 without one"),
}


@pytest.mark.parametrize(
    "fields",
    ['"token_ids": [1], "logprobs": [NaN]', '"token_ids": [1], "logprobs": [Infinity]', '"token_ids": [-1]'],
)
def test_what_no_right_engine_gives_is_an_answer_that_says_so(tmp_path: Path, fields: str) -> None:
    """As by Python, a process or HTTP. Pinned: the file was refused."""
    path = tmp_path / "run.jsonl"
    path.write_text(GOOD.replace('"error": "it died", "kind": "5xx"', fields) + "\n")
    ((_, answer),) = FileTarget(path).pairs()
    assert answer.is_refuted and answer.error is not None
    assert answer.error.startswith(f"{path} line 1: ") and "[0] " in answer.error


def test_a_prompt_outside_the_vocabulary_is_refused_by_its_line_and_place(ended: Path) -> None:
    assert FileTarget(ended, 4).pairs()
    with pytest.raises(RequestError, match=r"run.jsonl line 3: prompt_token_ids\[0\] 3: expected 0 to 2"):
        FileTarget(ended, 3).probe()


@pytest.mark.parametrize(("line", "error"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, line: str, error: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes("\n".join([line_of(*PAIRS[0]), line, line_of(*PAIRS[2]), ""]).encode(errors="surrogateescape"))
    for read in (Transcript, requests_in, lambda path: FileTarget(path).probe()):
        with pytest.raises(RequestError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path} line 2: ") and error in str(caught.value)


def test_a_file_that_another_writes_to_is_not_cut(path: Path) -> None:
    mine = Transcript(path)
    with Transcript(path) as other:
        other.append(*NEW)
    content = path.read_bytes()
    with pytest.raises(RequestError, match="something else writes to it"):
        mine.append(greedy("e", (1,), 1, case="case"), Answer((1,)))
    assert path.read_bytes() == content


def test_what_is_no_json_is_not_written(path: Path) -> None:
    content = path.read_bytes()
    with Transcript(path) as transcript, pytest.raises(RequestError, match="request 'd': can't be written"):
        transcript.append(greedy("d", (1,), 1, case="case"), Answer((1,), (float("nan"),)))
    assert path.read_bytes() == content
    with (
        pytest.raises(RequestError, match="not a directory: can't be"),
        Transcript(path / "not a directory") as transcript,
    ):
        transcript.append(*PAIRS[0])


def test_a_file_is_a_target(ended: Path) -> None:
    target: Target = FileTarget(ended)
    abilities = target.probe()
    assert abilities.engine == "recorded in run.jsonl"
    assert (abilities.tells_token_ids, abilities.tells_logprobs, abilities.tells_prompt_logprobs) == (True, True, True)
    assert (abilities.num_top_logprobs, abilities.at_once, abilities.can_abort) == (2, 3, True)
    unknown = greedy("d", (1,), 1, case="case")
    requests = [PAIRS[2][0], unknown, PAIRS[0][0]]
    assert answers_to(target, requests) == [PAIRS[2][1], failed("not recorded"), PAIRS[0][1]]
    target.close()
    target.close()


def replaced(old: str, new: str) -> Callable[[list[str]], list[str]]:
    """Changes the first line."""
    return lambda lines: [lines[0].replace(old, new, 1), *lines[1:]]


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (lambda lines: lines[:-1], "no end behind the last 3 of its answers: its check broke off, and is to be res"),
        (lambda lines: lines[:1] + lines[2:], "line 3: the end of 3 answers, expected 2, as stand before it"),
        (lambda lines: [*lines, lines[0]], "no end behind the last 1 of its answers"),
        (replaced('"token_ids": [', '"token_ids": [1'), "line 1: sha256 '.*', expected .* of its other fields"),
        (replaced('"sha256": "', '"sha256": "0'), "line 1: sha256 '0.*, expected"),
        (
            replaced('"sha256"', '"sha257"'),
            "line 1: answer, request, sha257, expected an object with request and answer",
        ),
        (replaced('"a"', '"c"'), "line 1: sha256 '.*', expected"),
        (lambda lines: ['{"end": 0}'], "line 1: end, expected an object with request and answer"),
    ],
)
def test_a_damaged_file_is_no_target(ended: Path, damaged: Callable[[list[str]], list[str]], said: str) -> None:
    """A line is missing, there once more, or changed: its answer, checksum, the checksum's name, the request's id."""
    lines = damaged(ended.read_text().splitlines())
    ended.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(RequestError, match=said):
        FileTarget(ended).probe()


def test_lines_of_ones_own_need_neither_checksum_nor_end(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(json.dumps({"request": line["request"], "answer": line["answer"]}) + "\n" for line in lines)
    )
    assert [request.request_id for request in requests_in(path)] == ["a", "b", "c"]
    with Transcript(path) as transcript:  # what a check adds to them has both
        transcript.append(*NEW)
        transcript.end()
        transcript.end()
    assert len(path.read_text().splitlines()) == 5 and len(requests_in(path)) == 4


def test_a_file_that_is_not_there_or_empty_is_a_target_error_but_an_empty_transcript(tmp_path: Path) -> None:
    assert Transcript(tmp_path / "run.jsonl").pairs() == []
    with pytest.raises(TargetError, match=r"run\.jsonl: no such file"):
        FileTarget(tmp_path / "run.jsonl").probe()
    with pytest.raises(TargetError, match="no such file"):
        requests_in(tmp_path)
    (tmp_path / "run.jsonl").touch()
    with pytest.raises(TargetError, match=r"run\.jsonl: no answers"):
        FileTarget(tmp_path / "run.jsonl").probe()


def test_a_target_whose_later_line_contradicts_an_earlier_answer_is_refused(tmp_path: Path) -> None:
    request, answer = PAIRS[2]
    other = dataclasses.replace(answer, text="another")
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(line_of(request, reply) + "\n" for reply in (other, answer)))
    with pytest.raises(RequestError, match=r"line 2: .* another request or answer than an earlier line's"):
        FileTarget(path).probe()
    assert Transcript(path).known(request) == answer, "a resumed check takes the last"
    path.write_text("".join(line_of(request, reply) + "\n" for reply in (failed("no connection"), answer, answer)))
    with pytest.warns(UserWarning, match=r"answers.jsonl: answers that stand there again, and count once: 1"):
        assert answers_to(FileTarget(path), [request]) == [answer]


def test_a_whole_last_line_without_its_end_is_kept(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with Transcript(path) as transcript:
        assert len(transcript.pairs()) == 3
        transcript.append(*NEW)
    assert path.read_bytes().startswith(content) and len(Transcript(path).pairs()) == 4
