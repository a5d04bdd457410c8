"""The report as a page: whole, asking for nothing, and no text from outside does anything."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reports import COMMAND, HOSTILE, drift, hostile, inconclusive, made, tie, unanswered
from reports import right as right_check
from reports import wrong as wrong_check

from lfm2np.oracle.causes.groups import SHOWN, Group, grouped
from lfm2np.oracle.check import Checked
from lfm2np.oracle.check_report import report_of
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.report.as_html import as_html
from lfm2np.oracle.report.as_text import visible
from lfm2np.oracle.report.report import environment, number

pytestmark = pytest.mark.rounding  # all: what one of them computes is kept for the others


@pytest.fixture
def right() -> Checked:
    return right_check()


@pytest.fixture
def wrong() -> Checked:
    return wrong_check()


VOID = {"meta", "br"}


class Page(HTMLParser):
    """Its elements balanced, its text; AssertionError for what a report must not have."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.labels: list[str] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.policy = ""
        self.lang: str | None = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs)
        assert tag not in ("script", "img", "link", "iframe", "object", "embed", "base", "form")
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("src", "style", "srcdoc", "xlink:href")
            assert name != "href" or (value or "").startswith("#")
        self.tags.append(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [(given["href"] or "")[1:]] if "href" in given else []
        self.labels += (given.get("aria-labelledby") or "").split()
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        self.lang = given.get("lang", self.lang)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

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


def numbers(group: Group) -> list[str]:
    counts = [str(count) for count in (group.count, group.told, group.flips, group.bugs)]
    return [*counts[:2], number(group.rms), number(group.worst), *counts[2:]]


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


def test_the_page_of_a_wrong_engine_has_the_numbers_of_the_check(wrong: Checked) -> None:
    page, total = page_of(wrong), wrong.total
    assert "lfm2np check: ✕ BUG" in page.text
    for reason in total.reasons:
        assert reason in page.text
    assert f"RMS {number(total.rms)} times rounding error plus logit step; beyond" in page.text
    for name in SHOWN:
        for level, group in grouped(wrong.positions, name).items():
            assert [name, level, *numbers(group)] in [row[:-1] for row in page.rows], (name, level)
    for judged in wrong.positions:
        if judged.is_flip:
            sizes = [number(value) for value in (judged.gap, judged.gap_ratio, judged.margin_ratio)]
            assert any(row[0] == judged.request.request_id and row[6:9] == sizes for row in page.rows)
    for value in (*environment().values(), COMMAND, wrong.abilities.engine):
        assert value in page.text


# --- text from outside


def test_hostile_text_is_shown_and_does_nothing() -> None:
    page, text = page_of(hostile()), as_html(report_of(hostile()), HOSTILE)
    assert visible(HOSTILE) in page.text
    assert "<U+202E>evil<U+2066><U+200B><U+D800><U+FFFE>" in page.text
    assert "<U+0000><U+0007><U+001B>[2J<U+000D><U+000A>" in page.text
    assert visible(HOSTILE) in Page(text).text
    assert all(c == "\n" or c.isprintable() for c in text)


@settings(max_examples=20)
@given(st.text())
def test_the_elements_of_a_page_do_not_depend_on_what_the_engine_says(text: str) -> None:
    base = tie()
    said = replace(base, abilities=Abilities(text), total=replace(base.total, grounds=(text,)))
    usual = replace(base, abilities=Abilities("engine"), total=replace(base.total, grounds=("reason",)))
    assert page_of(said).tags == page_of(usual).tags
