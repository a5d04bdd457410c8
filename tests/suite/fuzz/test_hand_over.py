"""What an author gets: a folder that is whole, a page that asks for nothing, a script that says what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from damage import flipped
from served_here import Here, model, player_of, serving

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.dialects import DIALECTS
from lfm2np.oracle.engines.dialects.dialect import Dialect
from lfm2np.oracle.engines.records import Answer, Trace, greedy
from lfm2np.oracle.engines.target import Played
from lfm2np.suite.fuzz import hand_over as handing
from lfm2np.suite.fuzz.campaign import Failure
from lfm2np.suite.fuzz.draw_traces import alphabet_of
from lfm2np.suite.fuzz.hand_over import Context, hand_over, read_trace, reproducer, require_place, row_of
from lfm2np.suite.fuzz.judge import ByTruth, Finding, Right

pytestmark = [pytest.mark.rounding, pytest.mark.slow]
A = alphabet_of(model().tokenizer, 300)
TRACE = Trace(
    (
        greedy("", A[:9], 6),
        greedy("", A[:12], 4, after=0, after_tokens=2, abort_after=1, pause=5),
        greedy("", A[:9], 4, after=0, temperature=1.0, seed=2, cold=True, n=2),
        greedy("", A[:3], 6, stop="a|b"),
    )
)
HOSTILE = '<script src="http://evil/x.js">&"""\'@@ANSWER@@ @@REQUESTS@@ \u202e\\'
CONTEXT = Context(
    "http://127.0.0.1:1", HOSTILE, "float32", "", "model", "lfm2np fuzz '<b>' --seed 3", "lfm2np fuzz '<b>'"
)


def failure_of(trace: Trace = TRACE, **fields: Any) -> Failure:
    seen = Answer((A[0],), (-1.5,), text=HOSTILE, cached_tokens=3)
    answers = tuple(
        (replace(seen, sent=float(index), first=index + 0.5, ended=index + 1.0),)
        for index in range(len(trace.requests))
    )
    finding = Finding("wrong", f"request 0, output token 0: {HOSTILE}", 0)
    return Failure(trace, Played(answers), finding, (9, 10), trace, 7, 1.0, 2.0, **fields)


def handed(out: Path, failure: Failure | None = None) -> Path:
    """By the player of an engine in Python, which has no script."""
    return hand_over(out, failure or failure_of(), ByTruth(model(), CONTEXT.format_name), object(), CONTEXT)


def test_the_folder_has_the_first_free_number_behind_its_kind_and_a_trace_that_is_read_as_it_was(
    tmp_path: Path,
) -> None:
    out, names = tmp_path / "a" / "b", ["wrong-1", "wrong-2", "wrong-3"]
    assert [handed(out).name for _ in names] == sorted(path.name for path in out.iterdir()) == names
    folder = out / "wrong-2"
    assert sorted(path.name for path in folder.iterdir()) == ["issue.md", "report.html", "trace.json"]
    assert read_trace(folder / "trace.json") == TRACE
    document = json.loads((folder / "trace.json").read_text())
    assert document["rate"] == [9, 10] and document["finding"]["kind"] == "wrong" and document["engine"] == HOSTILE
    assert document["seen"][0][0]["token_ids"] == [A[0]]


def test_a_trace_with_a_flipped_bit_is_refused_or_the_same(tmp_path: Path) -> None:
    """The same: a space that is another, or the checksum's name."""
    content, path = (handed(tmp_path) / "trace.json").read_bytes(), tmp_path / "t.json"
    refused = 0
    for _, changed in flipped(content, 60, seed=0):
        path.write_bytes(changed)
        try:
            assert read_trace(path) == TRACE
        except RequestError as error:
            refused += str(error).startswith(f"{path}: ")
    assert refused > 55
    path.write_text(json.dumps({"requests": json.loads(content)["requests"]}))  # of one's own: needs no checksum
    assert read_trace(path) == TRACE


@pytest.mark.parametrize("content", ["[]", '{"requests": [{"prompt_token_ids": [], "max_tokens": 1}]}', "\x00\xff"])
def test_an_invalid_trace_is_refused_by_its_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content, encoding="latin-1")
    with pytest.raises(RequestError, match=r"t\.json: "):
        read_trace(tmp_path / "t.json")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    write = handing.write_whole

    def full(path: Path, text: str) -> None:
        if path.name == "issue.md":
            raise error
        write(path, text)

    monkeypatch.setattr(handing, "write_whole", full)
    with pytest.raises(RequestError if isinstance(error, OSError) else KeyboardInterrupt):
        handed(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_can_not_be_is_said_before_anything_is_done(tmp_path: Path) -> None:
    require_place(tmp_path / "new" / "deep")
    require_place(Path("lfm2np-findings"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RequestError, match="file is no folder"):
            require_place(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_the_page_requests_for_nothing_and_shows_hostile_names_as_text(tmp_path: Path) -> None:
    page = (handed(tmp_path) / "report.html").read_text()
    assert "<script" not in page and "<b>" not in page and "\u202e" not in page and "&lt;script src=" in page
    assert "<svg" not in page and "6 requests" not in page and "<bdi>wrong; 3 cached</bdi>" in page


def test_the_issue_holds_the_table_of_the_requests(tmp_path: Path) -> None:
    lines = (handed(tmp_path) / "issue.md").read_text().splitlines()
    assert any("`lfm2np fuzz '<b>' --replay trace.json` plays them again." in line for line in lines)
    start = lines.index("sent, first token, ended: in seconds")
    assert [re.split("  +", line) for line in lines[start + 2 : start + 6]] == [
        ["0", "9", "6", "at once", "none", "wrong; 3 cached", "0", "0.5", "1"],
        [
            *("1", "12", "4", "after 2 tokens of request 0, then 5 ms", "9 with request 0"),
            *("aborted after 1 tokens; 3 cached", "1", "1.5", "2"),
        ],
        [
            *("2", "9", "4", "when request 0 has ended", "9 with request 0"),
            *("temperature 1, seed 2, 2 samples; cold; 3 cached", "2", "2.5", "3"),
        ],
        ["3", "3", "6", "at once", "3 with request 0", "stop 'a|b'; 3 cached", "3", "3.5", "4"],
    ]
    assert any(line.startswith("replays    fails in 9 of 10 replays") for line in lines)


# The script


def scripted(path: Path, *arguments: str) -> tuple[int, str, str]:
    """By the plain interpreter, in an empty folder, without anything but the standard library."""
    empty = path.parent / "empty"
    empty.mkdir(exist_ok=True)
    command = [sys.executable, "-I", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=empty, check=False, timeout=300)
    return done.returncode, done.stdout, done.stderr


def script_for(tmp_path: Path, here: Here, trace: Trace, context: Context = CONTEXT, **fields: Any) -> Path:
    with player_of(here) as player:
        player.probe()
        played = player.play(trace)
        finding = ByTruth(model(), "float32").finding(trace, played) or Finding("wrong", "none", 0)
        failure = Failure(trace, played, finding, (1, 1), trace, 1, 0.0, 0.0, **fields)
        return hand_over(tmp_path, failure, ByTruth(model(), context.format_name), player, context) / "reproduce.py"


ALL = Trace(
    (
        greedy("", A[:9], 6),
        greedy("", A[:12], 4, after=0, after_tokens=2),
        greedy("", A[:12], 4, abort_after=1, pause=5),
        greedy("", A[:12], 4, abort_after=0),
        greedy("", A[:9], 4, after=1, temperature=1.0, seed=2, cold=True, n=2),
        greedy("", A[:4], 3, temperature=1.0, seed=2),
        greedy("", A[:3], 6, stop=model().tokenizer.decode(A[:1]), streamed=True),
    )
)


def test_the_script_says_0_for_a_right_server_1_for_a_wrong_one_and_2_without(tmp_path: Path) -> None:
    with serving() as here:
        path = script_for(tmp_path, here, ALL)
        assert scripted(path, here.url + "/v1/", "2") == (0, "all as it should be\n" * 2 + "wrong in 0 of 2\n", "")
        here.spoil = spoil
        code, printed, _ = scripted(path, here.url)
        assert code == 1 and printed.startswith("request 1" if "request 1" in printed else "request 5")
        assert "wrong in 1 of 1" in printed and "log-probability expected" in printed
        here.spoil = None
    assert scripted(path, here.url) == (2, "", f"{here.url}: no server\n")
    assert scripted(path)[0] == 2


def spoil(fields: dict[str, Any]) -> None:
    logprobs = fields["choices"][0]["logprobs"]["token_logprobs"]
    logprobs[:] = [logprob - 0.5 for logprob in logprobs]


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script for a trace of one request."""
    with serving() as here:
        return script_for(tmp_path_factory.mktemp("one"), here, Trace((greedy("", A[:9], 6),))).read_text()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda choice: choice["token_ids"].__setitem__(1, A[40]), "output token 1: expected "),
        (lambda choice: choice.update(token_ids=choice["token_ids"] * 2), "12 tokens, expected 6"),
        (lambda choice: choice.update(token_ids=5), "expected an answer, seen: TypeError"),
    ],
)
def test_the_script_prints_what_it_expected_and_saw(tmp_path: Path, of_one: str, change: Any, told: str) -> None:
    script = tmp_path / "reproduce.py"
    script.write_text(of_one)
    with serving() as here:
        here.spoil = lambda fields: change(fields["choices"][0])
        code, said, _ = scripted(script, here.url)
    assert (code, told in said) == (1, True), said


@pytest.mark.parametrize("way", ["drip", "die", "500"])
def test_the_script_ends_whatever_the_server_does(tmp_path: Path, of_one: str, way: str) -> None:
    def trouble(handler: Any) -> bool:
        if handler.command != "POST":
            return False
        if way == "500":
            handler.send(500, b"{}", "application/json")
        elif way == "die":
            here.shutdown()
            here.server_close()
            handler.connection.close()
        else:
            handler.send_response(200)
            handler.send_header("Content-Length", "60000")
            handler.end_headers()
            while not here.freed.wait(0.05):
                handler.wfile.write(b" ")
        return True

    script = tmp_path / "reproduce.py"
    script.write_text(re.sub(r"^TIMEOUT = .*?  #", "TIMEOUT = 0.4  #", of_one, flags=re.M))
    with serving() as here:
        here.trouble = trouble
        code, said, error = scripted(script, here.url, "2")
    assert (code, error) == (1, "") and "expected an answer, seen: " in said, said
    assert "wrong in 1 of 1" in said if way == "die" else "wrong in 2 of 2" in said


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_title_can_not_change_the_script(dialect: Dialect) -> None:
    text = reproducer(HOSTILE, dialect, 60.0, [{"body": {"prompt": '"""\\'}}])
    code = compile(text, "reproduce.py", "exec")
    assert code is not None and text.count("def answer(replies):") == 1
    assert text.splitlines()[0].startswith('"""<script') and "@@ANSWER@@" in text.splitlines()[0]


def right(*tokens: int) -> list[Right]:
    return [Right(token, -1.0, 0.1, True) for token in tokens]


def test_tokens_behind_an_end_are_expected_only_if_the_server_goes_on() -> None:
    def tokens(ends: tuple[int, ...]) -> tuple[list[int], bool]:
        row = row_of(Trace((greedy("", (5,), 4),)), 0, {}, right(9, 4, 8), ends)
        return [token[0] for token in row["right"]], row.get("may_go_on", False)

    assert tokens(()) == ([9, 4, 8], False)
    assert tokens((4,)) == ([9, 4], True)


def test_the_script_does_not_judge_what_it_can_not() -> None:
    several = Trace((greedy("", (5,), 4, temperature=1.0, n=2), greedy("", (5,), 4, temperature=1.0, stop="a")))
    assert all("right" not in row_of(several, index, {}, right(9), ()) for index in (0, 1))
    assert "right" not in row_of(several, 0, {}, None, ())


def test_an_answer_with_invalid_tokens_can_be_handed_over(tmp_path: Path) -> None:
    failure = failure_of(Trace((greedy("", A[:3], 2, temperature=1.0),)))
    seen = Answer((999, 5), (-1.0, -1.0), error="no", kind="impossible", sent=0.0, ended=1.0)
    assert handed(tmp_path, replace(failure, played=Played(((seen,),)))).exists()


def test_a_dialect_goes_on_behind_an_end_if_its_requests_say_so() -> None:
    request = greedy("a", (1,), 1, case="fuzz", prompt_text="a")
    for dialect in DIALECTS:
        assert dialect.ignores_eos == ('"ignore_eos": true' in json.dumps(dialect.request(request, dialect.extras[0])))
