"""The built pages: no warning, no broken link, nothing from elsewhere, and every public name."""

from __future__ import annotations

from pathlib import Path

import html_pages
import pytest
import rooms
import schemas
from run_pages import CHECKOUT

pytestmark = pytest.mark.docs
BARE = ("-D", "lfm2np_generated=0", "-D", "lfm2np_laboratory=0")  # a page by itself


def test_no_link_is_broken_and_nothing_comes_from_elsewhere(built: Path) -> None:
    pages = html_pages.read_pages(built)
    assert len(pages) > 50
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert html_pages.broken_links(pages) == []
    assert html_pages.loaded_from_elsewhere(built, pages) == []


def test_the_laboratory_that_computes_in_the_browser_lies_beside_the_pages(built: Path) -> None:
    assert (built / "lab" / "index.html").is_file() and (built / "lab" / "service.js").is_file()
    assert "../lab/index.html" in html_pages.Page(built / "learn" / "laboratory.html").links


def test_every_public_name_stands_in_the_reference(built: Path) -> None:
    modules = rooms.read_modules()
    for room in rooms.rooms(modules):
        ids = html_pages.Page(built / "reference" / "generated" / f"{room.name}.html").ids
        offered = room.init.offered
        wanted = {f"{room.name}.{name}" for name in offered or room.init.public}
        for module in room.modules:
            if not module.name.endswith(("__main__", "test_conformance")):
                wanted |= {f"{module.name}.{name}" for name in module.public} - set(offered.values())
        assert wanted - ids == set(), room.name


def test_every_command_and_every_schema_has_its_place(built: Path) -> None:
    generated = built / "reference" / "generated"
    commands = html_pages.Page(generated / "command-line.html").ids
    assert {f"command-lfm2np-{name}" for name in ("generate", "check", "vectors-make")} <= commands
    formats = html_pages.Page(generated / "formats.html").ids
    names = [path.name.removesuffix(".schema.json") for path in schemas.files(CHECKOUT)]
    assert {f"format-{name}" for name in names} <= formats
    assert {"exec-protocol", "trace", "transcript", "results"} <= set(names)


def test_copies_in_a_virtual_environment_are_no_schemas(tmp_path: Path) -> None:
    original, copy = (tmp_path / top / "one.schema.json" for top in ("lfm2np/schemas", ".venv/lib/lfm2np/schemas"))
    for path in (original, copy):
        path.parent.mkdir(parents=True)
        path.touch()
    assert schemas.files(tmp_path) == [original]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{repo}`lfm2np/truth/reference.py`", ""),
        ("[gone](gone.md)", "gone.md"),
        ("[gone](other.md#gone)", "gone"),
        ("{py:obj}`lfm2np.Gone`", "lfm2np.Gone"),
        ("{repo}`lfm2np/gone.py`", "lfm2np/gone.py"),
        ("{doc}`/gone`", "gone"),
        ("```{gone}\n```", "gone"),
        ("in no table of contents", "lost.md"),
    ],
)
def test_a_page_with_something_wrong_does_not_build(tmp_path: Path, text: str, told: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "index.md").write_text(f"# Index\n\n{text}\n\n```{{toctree}}\nother\n```\n")
    for name in ("other.md", *([told] if told == "lost.md" else [])):
        (source / name).write_text("# Other\n\n## There\n")
    done = html_pages.sphinx(source, tmp_path / "to", *BARE)
    assert (done.returncode != 0) == bool(told)
    assert told in done.stderr


@pytest.mark.parametrize(
    ("page", "broken", "elsewhere"),
    [
        ('<a href="b.html#x">', 0, 0),
        ('<a href="b.html#y">', 1, 0),
        ('<a href="c.html">', 1, 0),
        ('<a href="https://example.com/c.html">', 0, 0),
        ('<script src="https://example.com/a.js"></script>', 0, 1),
        ('<link rel="stylesheet" href="//example.com/a.css">', 0, 1),
        ('<p style="background: url(http://example.com/a.png)">', 0, 1),
    ],
)
def test_the_checks_of_links_see_what_is_wrong(tmp_path: Path, page: str, broken: int, elsewhere: int) -> None:
    (tmp_path / "a.html").write_text(page)
    (tmp_path / "b.html").write_text('<h1 id="x">')
    (tmp_path / "b.css").write_text("@font-face { src: url(fonts/own.woff2) }")
    pages = html_pages.read_pages(tmp_path)
    assert len(html_pages.broken_links(pages)) == broken
    assert len(html_pages.loaded_from_elsewhere(tmp_path, pages)) == elsewhere
    (tmp_path / "b.css").write_text('@import "https://example.com/font.css";')
    assert len(html_pages.loaded_from_elsewhere(tmp_path, pages)) == elsewhere + 1
