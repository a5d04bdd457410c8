"""Slides: the page's pictures, one a slide, in one file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import drawn
import pytest

from lfm2np.commands.cli import main
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.all_views import views_beside


def test_slides_are_whole() -> None:
    text = drawn.demo_slides()
    checked = drawn.Checked()
    checked.feed(text)
    assert checked.open == []
    assert checked.scripts == 1
    assert len(set(checked.ids)) == len(checked.ids)


def test_every_picture_of_the_page_is_a_slide() -> None:
    text = drawn.demo_slides()
    views = [view for view in views_beside(drawn.demo_run(), drawn.trained(), lambda done, count: None) if view.picture]
    count = 1 + len(views)
    sections = re.findall(r'<section id="(\d+)" class="view(?: front)?".*?</section>', text, re.DOTALL)
    assert sections == [str(number) for number in range(1, count + 1)]
    for number, view in enumerate(views, start=2):
        slide = text.partition(f'<section id="{number}"')[2].partition('<section id="')[0]
        assert view.picture in slide
        assert view.lesson.replace("'", "&#x27;") in slide
        assert f">{number}/{count}<" in slide
    assert "worksheet" not in [view.id for view in views]


def test_the_command_writes_slides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "main_lines", lambda model: drawn.demo_lines())
    out = tmp_path / "slides.html"
    assert main(["draw", "--demo", "--slides", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == {"page": str(out), "bytes": out.stat().st_size, "steps": len(drawn.demo_run().steps)}
    text = out.read_text(encoding="utf-8")
    assert "lfm2np draw --demo --slides slides.html" in text
    assert '<body class="slides">' in text


def test_a_schedule_has_no_slides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schedule.json"
    fields = {"kind": "schedule", "scheduler": "s", "block_size": 2, "calls": [], "message": "m", "place": None}
    file.write_text(json.dumps({**fields, "steps": []}))
    assert main(["draw", str(file), "--slides", str(tmp_path / "slides.html")]) == 2
    assert "--slides is for traces" in capsys.readouterr().err
