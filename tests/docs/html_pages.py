"""Builds pages; of built ones the links: what each offers to be linked to, what it links to, what it makes a browser
load."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from run_pages import CHECKOUT, DOCS

LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
NO_LOAD = {"index", "search", "next", "prev", "canonical", "author", "copyright"}  # rel of a link that is only told
CSS_LOADS = re.compile(r"""@import\s*(?:url\()?["']?([^"')\s;]+)|url\(["']?([^"')]+)""")


def sphinx(source: Path, to: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """As CONTRIBUTING.md says, with conf.py of docs/. A warning is an error."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-c", str(DOCS), *options]
    return subprocess.run([*command, str(source), str(to)], cwd=CHECKOUT, capture_output=True, text=True, check=False)


@dataclass
class Page(HTMLParser):
    path: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given["id"]} if "id" in given else set()
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given and not NO_LOAD & set(given.get("rel", "").split()):
            self.loads.append(given[LOADED[tag]])
        self.loads += [quoted or two for quoted, two in CSS_LOADS.findall(given.get("style", ""))]


def read_pages(folder: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}


def is_elsewhere(address: str) -> bool:
    return address.startswith("//") or urlsplit(address).scheme not in ("", "data")


def broken_links(pages: dict[Path, Page]) -> list[str]:
    """Links to files or to anchors in pages that are not there; those to other places are not followed."""
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if is_elsewhere(link):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            missing_anchor = parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or missing_anchor:
                broken.append(f"{path.name}: {link}")
    return broken


def loaded_from_elsewhere(folder: Path, pages: dict[Path, Page]) -> list[str]:
    """What a browser would ask a network for: by pages, and by style sheets."""
    elsewhere = [f"{path.name}: {load}" for path, page in pages.items() for load in page.loads if is_elsewhere(load)]
    for path in folder.rglob("*.css"):
        loads = [quoted or two for quoted, two in CSS_LOADS.findall(path.read_text(encoding="utf-8"))]
        elsewhere += [f"{path.name}: {load}" for load in loads if is_elsewhere(load)]
    return elsewhere
