"""`check` and the pytest plugin against itself and against another engine, over HTTP and in this process."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
from faults import inject
from of_schema import validator
from served_here import serving

from lfm2np.commands.cli import check as check_command
from lfm2np.commands.cli import main
from lfm2np.commands.cli.program import build_parser
from lfm2np.errors import Lfm2npError
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.suite.itself.asked import Asking, Held
from lfm2np.suite.itself.relations import NAMES, Relation

pytestmark = [pytest.mark.rounding, pytest.mark.slow]
FAULT = "prefix-hit-without-its-state"
OWN = "lfm2np.suite.adapters:own"
SIZES = ("--block-size", "4", "--max-num-batched-tokens", "8", "--max-num-seqs", "2", "--max-model-len", "36")
SIZES += ("--vocab-size", "300")
FEW = ("--cases", "repeat,warm,prefixes")


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    """Exit code, what --json printed, and the last line on stderr."""
    code = main(["check", *words, *SIZES, "--json"])
    captured = capsys.readouterr()
    report = json.loads(captured.out) if captured.out else None
    if report is not None:
        validator("report").validate(report)
    return code, report, (captured.err.splitlines() or [""])[-1]


def outcomes(report: Any) -> dict[str, str]:
    return {row["relation"]: row["outcome"] for row in report["figures"]["relations"]}


def reproduced(script: Path, url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(script), url]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_right_server_holds_and_what_it_does_not_take_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with serving("float32") as here:
        code, report, _ = check(capsys, here.url, "--against", "itself", *FEW[:1], "repeat,warm,stream,sizes")
        assert code == 0 and (report["verdict"], report["facts"]["relations"]) == ("HOLDS", "3 of 4 hold")
        rows = {row["relation"]: row for row in report["figures"]["relations"]}
        assert rows["sizes"]["why"] == "only an engine in Python that steps is made again in other sizes"


def test_a_fault_breaks_its_relations(capsys: pytest.CaptureFixture[str]) -> None:
    with inject(FAULT), serving("float32") as here:
        code, report, last = check(capsys, here.url, "--against", "itself", *FEW)
    assert code == 1 and last.startswith("lfm2np: ProofError: BROKEN: warm: prompt of ")
    assert [(row["kind"], row["where"]) for row in report["findings"]] == [
        ("relation", "warm"),
        ("relation", "prefixes"),
    ]
    broken = next(row for row in report["figures"]["relations"] if row["relation"] == "warm")
    assert broken["broken_rounds"] == 2 and broken["largest"] > 1e-3 and broken["trace"]["requests"]


def test_an_interrupt_keeps_what_is_broken_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Asking.ask

    def interrupted(self: Asking, relation: Relation) -> Held:
        if relation.name == "prefixes":
            raise KeyboardInterrupt
        return ask(self, relation)

    monkeypatch.setattr(Asking, "ask", interrupted)
    with inject(FAULT), serving("float32") as here:
        code, report, last = check(capsys, here.url, "--against", "itself", *FEW)
    assert (code, last) == (130, "lfm2np: interrupted")
    assert outcomes(report)["warm"] == "BROKEN" and outcomes(report)["prefixes"] == "not asked"
    assert "1 relation, as it was interrupted" in report["not_tested"]


@pytest.mark.night
def test_what_a_fault_breaks_is_handed_over_and_shown_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reports = ("--report", str(tmp_path / "r.html"), "--report", str(tmp_path / "r.xml"))
    with serving("float32") as right:
        with inject(FAULT), serving("float32") as here:
            code, report, _ = check(capsys, here.url, "--against", "itself", *FEW, *reports)
            assert code == 1 and [row["where"] for row in report["findings"]] == ["warm", "prefixes"]
            assert outcomes(report)["repeat"] in ("equal bits", "within spread")
            folders = sorted(path.name for path in (tmp_path / "r-findings").iterdir())
            assert folders and all(name.startswith("differs-") for name in folders)
            script = tmp_path / "r-findings" / folders[0] / "reproduce.py"
            ran = reproduced(script, here.url)
            assert ran.returncode == 1 and "expected" in ran.stdout
            assert "its answers to each request alone" in script.read_text()
        ran = reproduced(script, right.url)
        assert (ran.returncode, ran.stderr) == (0, "")
    issue = (script.parent / "issue.md").read_text()
    assert "this engine's own answer to the same request, alone" in issue and "exact" not in issue
    cases = {case.get("name"): case for case in ElementTree.parse(tmp_path / "r.xml").getroot()}
    assert cases["warm"].find("failure") is not None and cases["repeat"].find("failure") is None
    page = (tmp_path / "r.html").read_text()
    assert "\u2715 BROKEN" in page and "<bdi>prefixes: prompt of " in page and "<script" not in page


@pytest.mark.night
def test_two_servers_are_compared_by_their_spread(capsys: pytest.CaptureFixture[str]) -> None:
    with serving("float32") as first, serving("exact") as second:
        code, report, _ = check(capsys, first.url, "--against", second.url, "--cases", "repeat")
        assert code == 0 and outcomes(report)["other"] == "within spread" and report["figures"]["other"]
    with serving("float32") as first, serving("bfloat16") as second:
        code, report, _ = check(capsys, first.url, "--against", second.url, "--cases", "repeat")
        assert code == 1 and report["findings"][-1]["where"] == "other"
        assert outcomes(report)["repeat"] in ("equal bits", "within spread")


@pytest.mark.night
def test_an_exact_engine_in_this_process_has_equal_bits_under_every_relation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, report, _ = check(capsys, OWN, "--against", "itself", "--bitwise")
    assert code == 0
    asked = {name: value for name, value in outcomes(report).items() if value != "not asked"}
    assert asked.pop("greedy") == "not judged"  # it reports its own tokens' log-probabilities alone
    assert set(asked.values()) == {"equal bits"} and set(NAMES) - set(asked) == {"stream", "greedy"}


AGAINST = (OWN, "--against", "itself")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*AGAINST, "--cases", "batch,long"], "--cases 'long': not with --against, which needs no truth; expected"),
        ([*AGAINST, "--workers", "2"], "--workers: not with --against"),
        ([*AGAINST, "--format", "float32 kv:float8"], "--format float32 kv:float8: expected one of float32"),
        ([*AGAINST, "--name", "x"], "--name: only with a server as TARGET"),
        ([*AGAINST, "--cases", "batch,none"], "--cases 'none': expected some of batch"),
        ([*AGAINST, "--format", "auto"], "--format auto: expected one of float32"),
        ([*AGAINST, "--vocab-size", "3"], "--vocab-size 3: expected at least 16"),
        ([*AGAINST, "--minutes", "0"], "--minutes 0.0: expected more than 0"),
        ([OWN, "--against", "no"], "--against 'no': expected `itself`"),
        ([*AGAINST, "--report", "r.html"], "r-findings is no folder"),
        (["http://127.0.0.1:9", *AGAINST[1:]], "http://127.0.0.1:9"),
        ([OWN, "--vocab-size", "300"], "--vocab-size: only with --against"),
        ([OWN, "--bitwise"], "--bitwise: only with --against"),
        ([OWN, "--cases", "warm"], "--cases 'warm': only with --against; expected some of short-prompts"),
        ([OWN, "--cases", "stops,chats"], "or chats alone"),
        (["answers.jsonl", "--seed", "1"], "--seed: not with a file of answers"),
        (["answers.jsonl", "--cases", "stops"], "--cases: not with a file of answers"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_3(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r-findings").touch()
    assert main(["check", *words]) == 3
    assert expected in capsys.readouterr().err


class Crowded:
    """Gives another token to requests beside others."""

    lacks: ClassVar = {"samples", "stops", "sampling"}

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        """It needs neither."""

    def generate(self, requests: Sequence[Request]) -> list[list[Answer]]:
        token, counts = 8 + (len(requests) > 1), [each.params.max_tokens or 1 for each in requests]
        return [[Answer((token,) * count, (-0.001,) * count, finish_reason="length")] for count in counts]


def test_an_engine_that_gives_other_tokens_beside_others_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    """It reports -0.001 for each token that it chose, and nothing of others: no difference of what both report."""
    code, report, _ = check(capsys, "test_cli_against:Crowded", "--against", "itself", "--cases", "batch,twins")
    assert code == 1 and [row["where"] for row in report["findings"]] == ["batch", "twins"]
    (row, _) = report["figures"]["relations"]
    assert row["flips"] and row["noise"] > 9 and "at least 9.8 nat" in row["what"]


class Read(argparse.Namespace):
    """Arguments that remember which of them were read."""

    def __getattribute__(self, name: str) -> Any:
        vars_ = super().__getattribute__("__dict__")
        if name in vars_:
            READ.add(name)
        return super().__getattribute__(name)


READ: set[str] = set()


def test_each_option_is_used_or_refused_with_against(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["check", "test_cli_against:Crowded", "--against", "itself", *SIZES, "--report", str(tmp_path / "r.html")]
    arguments = build_parser("check").parse_args([*words, "--cases", "batch"])
    READ.clear()
    with pytest.raises(Lfm2npError):
        check_command.run(Read(**vars(arguments)))
    assert not set(vars(arguments)) - {"command", "run", "is_verdict"} - READ


# --- pytest --pyargs lfm2np.suite --server


SUITE = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--pyargs", "lfm2np.suite"]


def test_the_plugin_has_a_test_for_each_relation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = ["-k", "repeat or prefixes or sizes", "--junit-xml", "j.xml"]
    with inject(FAULT), serving("float32") as here:
        code = pytest.main([*SUITE, *SIZES, "--server", here.url, *chosen])
    printed = capsys.readouterr().out
    assert code == 1 and "1 failed, 1 passed, 1 skipped" in printed, printed
    assert "a cached prefix of every length = without" in printed
    assert (tmp_path / "j.xml").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (3, "--server http://127.0.0.1:9: ")),
        (["--engine", OWN], (4, "--engine and --server: expected one of them")),
        (["--vocab-size", "x"], (4, "--vocab-size 'x': expected a number above 0")),
    ],
)
def test_the_plugin_without_a_server_is_one_line(
    words: list[str], expected: tuple[int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pytest.main([*SUITE, "--server", "http://127.0.0.1:9", *words]) == expected[0]
    captured = capsys.readouterr()
    assert expected[1] in captured.out + captured.err
