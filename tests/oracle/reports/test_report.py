"""The report as text, JSON, JUnit XML and a page: the numbers are those of the check; no text from outside does
anything."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from drawn import Checked as WellFormed
from engines import Kept, checked_target
from faults import inject
from hypothesis import given, settings
from hypothesis import strategies as st
from of_schema import validator

import lfm2np
from lfm2np.errors import RequestError
from lfm2np.oracle.causes.groups import SHOWN, grouped
from lfm2np.oracle.check import Checked
from lfm2np.oracle.check_report import exit_code, report_of
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Request, failed, greedy
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging.verdict import WRONG, Position, Verdict, root_mean_square
from lfm2np.oracle.report.as_html import PAGE_ROWS, as_html
from lfm2np.oracle.report.as_json import as_json, finite
from lfm2np.oracle.report.as_junit import as_junit
from lfm2np.oracle.report.as_text import as_text, visible
from lfm2np.oracle.report.report import Table, environment, number
from lfm2np.oracle.total import Total
from lfm2np.system import replaced, write_whole

pytestmark = [pytest.mark.rounding, pytest.mark.slow]  # all: what one of them computes is kept for the others


# --- what a check may have found: by our own engine, right and with a fault, and made by hand

COMMAND = "lfm2np check 'package.module:factory' --format float32"
HOSTILE = (
    "</title></style></bdi></td><script>alert(1)</script><img src=http://evil.example/x onerror=a()>\"'&amp;]]>-->"
    "\x00\x07\x1b[2J\r\n\u202eevil\u2066\u200b\ud800\ufffe"
)


@pytest.fixture(scope="module")
def right() -> Checked:
    return run_check(Kept)


@pytest.fixture(scope="module")
def wrong() -> Checked:
    with inject("state-never-advanced"):
        return run_check(PythonTarget)


def run_check(kind: type[PythonTarget]) -> Checked:
    """Of lfm2np's own engine, whose cache and state the oracle does not use: a fault there is the engine's alone."""
    model = lfm2np.load()
    return checked_target(model, kind("lfm2np.suite.adapters:own", model.path), cases=("short-prompts",))


def position(request: Request, row: int, verdict: Verdict, error: float | None, flip: bool = False) -> Position:
    return Position(
        request=request,
        row=row,
        is_new=True,
        token_id=5,
        best=6 if flip else 5,
        gap=0.25 if flip else 0.0,
        gap_ratio=3.5 if flip else 0.0,
        margin_ratio=3.5 if flip else 77.0,
        error=None if error is None else error / 1000,
        error_ratio=error,
        error_size=None if error is None else abs(error),
        verdict=verdict,
    )


def made(verdict: Verdict, positions: list[Position], reason: str, engine: str = "hand made") -> Checked:
    """A Checked that no engine said; each position's request has one answer."""
    pairs = {judged.request.request_id: (judged.request, Answer((5,))) for judged in positions}
    ratios = [abs(judged.error_ratio) for judged in positions if judged.error_ratio is not None]
    wrong = [judged for judged in positions if judged.verdict in (Verdict.DRIFT, Verdict.BUG)]
    total = Total(
        verdict=verdict,
        grounds=(reason,),
        counts=dict(Counter(str(position.verdict) for position in positions)),
        rms=root_mean_square(ratios),
        worst=max(ratios, default=0.0),
        flips=sum(judged.is_flip for judged in positions),
        flip_chance=0.125,
        first_wrong=wrong[0] if wrong else None,
        unanswered=(),
    )
    told = Abilities(engine, tells_logprobs=True)
    return Checked(told, "float32", tuple(pairs.values()), (), tuple(positions), total)


def short(case: str = "borders", index: int = 1) -> Request:
    return greedy(f"{case}-{index}", (1, 2, 3), 4, case=case, tags={"length": 3, "beside": False})


def drift() -> Checked:
    positions = [position(short(), row, Verdict.DRIFT, 12.5 + row) for row in range(4)]
    return made(Verdict.DRIFT, positions, "errs like bfloat16 everywhere: not the float32 that it declares")


def inconclusive() -> Checked:
    return made(Verdict.INCONCLUSIVE, [position(short(), 2, Verdict.EXACT, None)], "no log-probabilities were told")


def tie() -> Checked:
    positions = [position(short(), 0, Verdict.EXACT, 0.5), position(short(), 1, Verdict.TIE, 1.5, flip=True)]
    return made(Verdict.TIE, positions, "every flip is within what float32 explains")


def hostile() -> Checked:
    """Everything that an engine, a file of answers or a prompt may say."""
    tags = {"length": 3, "prefix": HOSTILE}
    request = greedy(f"{HOSTILE}-1", (1, 2, 3), 4, case=HOSTILE, prompt_text=HOSTILE, tags=tags)
    base = made(Verdict.BUG, [position(request, row, Verdict.BUG, 99.0, True) for row in range(4)], HOSTILE, HOSTILE)
    silent = greedy("silent-1", (1,), 4, case="silent", tags={"length": 1})
    pairs = (*base.pairs, (silent, Answer(error=HOSTILE)))
    total = replace(base.total, unanswered=(silent.request_id,))
    return replace(base, format=HOSTILE, pairs=pairs, not_put=(HOSTILE,), total=total)


def unanswered() -> Checked:
    """Some requests failed, with twelve messages; some could not be put."""
    requests = [short("prefixes", index) for index in range(24)]
    pairs = tuple((request, failed(f"message {min(index, 11)}")) for index, request in enumerate(requests))
    base = made(Verdict.INCONCLUSIVE, [], "24 requests got no usable answer")
    total = replace(base.total, unanswered=tuple(request.request_id for request in requests))
    return replace(base, pairs=pairs, not_put=("borders-7", "borders-9", "families-2"), total=total)


# --- exit codes


def test_exit_codes_say_right_wrong_or_unknown() -> None:
    codes = {"EXACT": 0, "TIE": 0, "ROUTE": 0, "DRIFT": 1, "BUG": 1, "INCONCLUSIVE": 2}
    assert {str(verdict): exit_code(verdict) for verdict in Verdict} == codes


# --- text


def lines_of(checked: Checked) -> list[str]:
    return as_text(report_of(checked), COMMAND).splitlines()


def row_of(lines: list[str], case: str) -> list[str]:
    return next(line.split() for line in lines if line.startswith(f"{case} "))


def test_the_text_of_a_right_engine_has_the_numbers_of_the_check(right: Checked) -> None:
    lines = lines_of(right)
    count = len(right.positions)
    assert lines[:2] == ["verdict    EXACT", f"because    all {count:,} log-probabilities are within float32"]
    assert f"engine     {right.abilities.engine}" in lines
    assert f"positions  {count}: {count} EXACT" in lines
    assert row_of(lines, "short-prompts") == f"short-prompts {len(right.pairs)} {count} {count} 0 0 0 0 EXACT".split()
    assert not any("first wrong" in line or "position in" in line for line in lines)
    for name, value in environment().items():
        assert f"{name:<11}{value}" in lines
    assert lines[-1] == f"again      {COMMAND}"


def test_the_text_of_a_wrong_engine_says_why_and_what_next_before_what_was_not_tested(wrong: Checked) -> None:
    lines, total = lines_of(wrong), wrong.total
    assert lines[0] == "verdict    BUG"
    assert [line[11:] for line in lines[1 : 1 + len(total.reasons)]] == list(total.reasons)
    assert lines[1 + len(total.reasons)].startswith("next       --locate ")
    start = next(index for index, line in enumerate(lines) if line.startswith("not tested "))
    untested = lines[start : start + len(wrong.not_tested)]
    assert [line[11:] for line in untested] == wrong.not_tested and "batches" in wrong.not_tested


@pytest.mark.parametrize("target", ["module:factory", "transformers:", "http://host:1", "exec:x", "a.jsonl"])
def test_what_is_offered_next_works_for_the_kind_of_target(wrong: Checked, target: str) -> None:
    """Answers that were recorded, of a server or a process, can't be run again with activations."""
    (step,) = report_of(wrong, target).next_steps
    records = target in ("module:factory", "transformers:")
    assert step.startswith("--locate records") == records and ("--locate RECORDER" in step) != records


def test_the_text_of_a_wrong_engine_shows_the_first_wrong_position(wrong: Checked) -> None:
    text = as_text(report_of(wrong), COMMAND)
    first, total = wrong.total.first_wrong, wrong.total
    assert first is not None and first.error is not None
    assert f"RMS {total.rms:.3g} times rounding error plus logit step; beyond that step at most " in text
    count, sizes = str(len(wrong.positions)), [f"{total.rms:.3g}", f"{total.worst:.3g}"]
    numbers = [str(len(wrong.pairs)), count, count, *sizes, str(total.flips), str(total.counts["BUG"])]
    assert row_of(text.splitlines(), "short-prompts") == ["short-prompts", *numbers, "BUG"]
    where = text[text.index("first wrong position: BUG") :]
    ids = first.request.prompt_token_ids
    prompt = f"prompt of {len(ids)} tokens: {','.join(map(str, ids))}\n"
    assert f"{first.request.request_id} of short-prompts, {prompt}" in where
    assert f"row {first.row}, which predicts token {first.row + 1}" in where
    assert f"token      {first.token_id}; the oracle's is {first.best}" in where
    assert f"{first.gap:.3g} nats, {first.gap_ratio:.3g} times the rounding error" in where
    assert f"error      {first.error:.3g} nats" in where


def test_a_drawn_token_is_no_prompts_and_a_position_is_where_its_row_is() -> None:
    """The engine's choice is no flip where it draws, so is_new is False."""
    drawn = [replace(position(short(), row, Verdict.DRIFT, 12.5), is_new=False) for row in (1, 2, 5)]
    text = as_text(report_of(made(Verdict.DRIFT, drawn, "drawn")))
    table = text[text.index("position in") :].splitlines()
    assert table[0].endswith("its error, nats  largest, noise  verdict")
    assert [line.split()[2:4] for line in table[1:4]] == [["1", "prompt"], ["2", "generated"], ["5", "generated"]]
    assert "row 1, which predicts token 2 of the sequence (prompt)" in text
    assert "error      0.0125 nats; the largest reported, of it or an alternative, is 12.5 times" in text


def test_answers_that_failed_are_grouped_by_message() -> None:
    lines = lines_of(unanswered())
    start = lines.index("no usable answer to 24 requests of 24")
    assert lines[start + 2].split(maxsplit=1) == ["13", "message 11"]
    assert lines[start + 3].split(maxsplit=1) == ["1", "message 0"]
    assert lines[start + 12].startswith("... 2 more")
    assert any("3 requests whose token ids no text encodes to (borders 2, families 1)" in line for line in lines)
    assert any("log-probabilities of prompts" in line for line in lines)
    assert row_of(lines, "prefixes") == ["prefixes", "24", "0", "0", "-", "-", "0", "0", "INCONCLUSIVE"]


def test_what_was_not_reported_is_a_dash_and_not_a_zero() -> None:
    text = as_text(report_of(inconclusive()))
    assert "errors     none reported" in text
    assert row_of(text.splitlines(), "borders") == ["borders", "1", "1", "0", "-", "-", "0", "0", "INCONCLUSIVE"]
    assert "again" not in text


# --- JSON


@pytest.mark.parametrize("name", ["right", "wrong"])
def test_the_json_has_all_numbers_of_the_check(name: str, request: pytest.FixtureRequest) -> None:
    checked: Checked = request.getfixturevalue(name)
    total = checked.total
    whole = json.loads(json.dumps(as_json(report_of(checked), COMMAND), allow_nan=False))
    validator("report").validate(whole)
    assert whole["verdict"] == total.verdict and whole["exit_code"] == exit_code(total.verdict)
    assert [finding["words"] for finding in whole["findings"]] == list(total.reasons)
    assert whole["environment"] == environment() and whole["command_line"] == COMMAND
    report = whole["figures"]
    assert report["counts"] == total.counts
    for field in ("rms", "worst", "flips", "flip_chance"):
        assert report[field] == getattr(total, field)
    odd = [judged for judged in checked.positions if judged.verdict is not Verdict.EXACT]
    assert [(entry["id"], entry["row"], entry["error_ratio"]) for entry in report["positions"]] == [
        (judged.request.request_id, judged.row, judged.error_ratio) for judged in odd
    ]
    assert report["prompts"] == {judged.request.request_id: list(judged.request.prompt_token_ids) for judged in odd}
    assert (report["first_wrong"] is None) == (total.first_wrong is None)
    for name in SHOWN:
        groups = {level: asdict(group) for level, group in grouped(checked.positions, name).items()}
        assert report["groups"][name] == finite(groups)
    assert report["abilities"]["engine"] == checked.abilities.engine


def test_json_numbers_that_are_not_finite_are_text() -> None:
    base = made(Verdict.BUG, [position(short(), 0, Verdict.BUG, float("inf"), True)], "x")
    report = json.loads(json.dumps(as_json(report_of(base)), allow_nan=False))["figures"]
    assert report["worst"] == "inf" and report["positions"][0]["error_ratio"] == "inf"


# --- JUnit


def suite_of(checked: Checked) -> ElementTree.Element:
    return ElementTree.fromstring(as_junit(report_of(checked), COMMAND).encode())


def test_junit_has_a_case_for_each_request_and_one_for_the_verdict(right: Checked, wrong: Checked) -> None:
    passed = suite_of(right)
    names = [case.get("name") for case in passed.findall("testcase")]
    assert names == [*(request.request_id for request, _ in right.pairs), "verdict"]
    assert {case.get("classname") for case in passed.findall("testcase")} == {"short-prompts", "lfm2np check"}
    zeros = dict.fromkeys(("failures", "skipped", "errors"), "0")
    assert passed.attrib == {"name": "lfm2np check", "tests": str(len(names)), **zeros}
    failed = {judged.request.request_id: judged for judged in reversed(wrong.positions) if judged.verdict in WRONG}
    suite = suite_of(wrong)
    failing = {str(case.get("name")): case.findtext("failure") for case in suite.findall("testcase[failure]")}
    assert failing.keys() == failed.keys() | {"verdict"} and suite.get("failures") == str(len(failing))
    for name, first in failed.items():
        assert f"{number(first.error)} nats" in str(failing[name]) and f"row {first.row}" in str(failing[name])


def test_junit_fails_for_drift_and_passes_for_a_tie() -> None:
    assert [suite_of(checked).get("failures") for checked in (drift(), tie())] == ["2", "0"]


def test_junit_skips_what_can_not_be_judged() -> None:
    for checked in (inconclusive(), unanswered()):
        suite = suite_of(checked)
        cases = suite.findall("testcase")
        assert len(cases) == len(checked.pairs) + len(checked.not_put) + 1
        assert all(case.find("skipped") is not None for case in cases)
        assert suite.get("skipped") == str(len(cases)) and suite.get("failures") == "0"
    names = {case.get("name"): case.get("classname") for case in cases}
    assert names["families-2"] == "families"


# --- text from outside


def test_hostile_text_is_shown_and_does_nothing() -> None:
    checked = hostile()
    forms = [form(report_of(checked), HOSTILE) for form in (as_junit, as_text, as_html)]
    assert all(c == "\n" or c.isprintable() for form in forms for c in form)
    assert visible(HOSTILE) in as_text(report_of(checked))
    suite = suite_of(checked)
    assert {case.get("name") for case in suite.findall("testcase")} >= {visible(HOSTILE), f"{visible(HOSTILE)}-1"}
    assert json.loads(json.dumps(as_json(report_of(checked), HOSTILE)))["facts"]["format"] == HOSTILE
    for page in (page_of(checked), Page(forms[2])):
        assert visible(HOSTILE) in page.text
        assert "<U+202E>evil<U+2066><U+200B><U+D800><U+FFFE>" in page.text
        assert "<U+0000><U+0007><U+001B>[2J<U+000D><U+000A>" in page.text


def test_a_long_text_is_cut_and_its_length_given() -> None:
    assert visible("x" * 1001) == "x" * 1000 + "... (1001 characters)"
    assert visible("x" * 1000) == "x" * 1000
    assert visible("é ε א 語") == "é ε א 語"


def test_the_same_check_gives_the_same_bytes(wrong: Checked) -> None:
    again = replace(wrong, positions=wrong.positions[:])
    for form in (as_html, as_junit, as_text, as_json):
        assert form(report_of(wrong), COMMAND) == form(report_of(again), COMMAND)


# --- files


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_whole(path, "first\n")
    write_whole(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "x" * 100_000 + "\ud800")
    assert path.read_bytes() == "é\n".encode()
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
def test_a_file_that_is_overwritten_keeps_its_mode_and_a_link_is_one(tmp_path: Path, mode: int) -> None:
    real, link, new = (tmp_path / name for name in ("real", "link", "new"))
    real.write_text("old")
    real.chmod(mode)
    link.symlink_to("real")
    for path in (real, link):
        write_whole(path, path.name)
        assert (real.read_text(), stat.S_IMODE(real.stat().st_mode)) == (path.name, mode)
    with replaced(link) as file:  # as the commands that write piece by piece
        assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob(".*.part")} == {mode}
        file.write(b"pieces")
    assert link.is_symlink() and real.read_text() == "pieces"
    before = os.umask(0o027)
    try:
        write_whole(new, "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["missing/report.html", ".", "x" * 300])
def test_a_file_that_can_not_be_written_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="can't be written"):
        write_whole(tmp_path / name, "text")
    assert list(tmp_path.iterdir()) == []


# --- HTML


class Page(WellFormed):
    """Also its text, rows and labels; AssertionError for what a report must not have."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.labels: list[str] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.policy = self.lang = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        given = {name: value or "" for name, value in attrs}
        assert len(given) == len(attrs) and not {"style", "srcdoc", "xlink:href"} & given.keys()
        assert tag not in ("script", "img", "link", "iframe", "object", "embed", "base", "form")
        self.tags.append(tag)
        self.links += [given["href"][1:]] if "href" in given else []
        self.labels += given.get("aria-labelledby", "").split()
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        self.lang = given.get("lang", self.lang)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def page_of(checked: Checked) -> Page:
    return Page(as_html(report_of(checked), COMMAND))


def test_every_page_is_whole_and_requests_for_nothing(right: Checked, wrong: Checked) -> None:
    for checked in (right, wrong, drift(), inconclusive(), tie(), unanswered(), hostile(), made(Verdict.EXACT, [], "")):
        page = page_of(checked)
        assert page.lang == "en"
        assert page.policy.startswith("default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'")
        assert "script-src" not in page.policy  # so that none runs
        assert len(set(page.ids)) == len(page.ids)
        assert set(page.links) | set(page.labels) <= set(page.ids)
        assert [page.tags.count(tag) for tag in ("h1", "main", "header", "nav", "script")] == [1, 1, 1, 1, 0]
        assert "@import" not in as_html(report_of(checked)) and "url(" not in as_html(report_of(checked))


def test_the_page_of_a_wrong_engine_has_all_that_its_report_has(wrong: Checked) -> None:
    report, page = report_of(wrong), page_of(wrong)
    tables = [block for section in report.sections for block in section.blocks if isinstance(block, Table)]
    assert len(tables) == 3  # cases, wrong positions, tags
    assert [tables[0].header[column] for column in tables[0].words] == ["case", "verdict"]
    levels = [(name, level) for name in SHOWN for level in grouped(wrong.positions, name)]
    assert [row[:2] for row in tables[2].rows] == list(map(list, levels))
    flips = [judged for judged in wrong.positions if judged.is_flip]
    sizes = {(each.request.request_id, *map(number, (each.gap, each.gap_ratio, each.margin_ratio))) for each in flips}
    assert flips and sizes <= {(row[0], *row[6:9]) for row in tables[1].rows}
    for row in (row for table in tables for row in table.rows[:PAGE_ROWS]):
        assert list(map(str, row)) in page.rows
    shown = [report.means, *report.facts.values(), *report.not_tested, *environment().values(), COMMAND]
    for text in (f"lfm2np check: ✕ {report.verdict}", *(finding.sentence for finding in report.findings), *shown):
        assert text in page.text


def tags_of(engine: str, reason: str) -> list[str]:
    said = replace(tie(), abilities=Abilities(engine))
    return page_of(replace(said, total=replace(said.total, grounds=(reason,)))).tags


USUAL = tags_of("engine", "reason")


@settings(max_examples=20)
@given(st.text())
def test_the_elements_of_a_page_do_not_depend_on_what_the_engine_says(text: str) -> None:
    assert tags_of(text, text) == USUAL
