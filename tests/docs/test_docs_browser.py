"""The built pages in a real browser, from disk: the extras `docs` and `browser`, and chromium.

pytest -m browser tests/docs
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_checks import CONTRAST

pytestmark = pytest.mark.browser

PAGES = ["index.html", "start/first-check.html", "design/generated/house.html", "reference/generated/lfm2np.html"]


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that notes in `asked` what it asked for, and in `complaints` what it complained of."""
    context = browser.new_context()
    new_page = context.new_page()
    new_page.asked, new_page.complaints = [], []
    new_page.on("request", lambda request: new_page.asked.append(request.url))
    new_page.on("console", lambda message: new_page.complaints.append(message.text))
    new_page.on("pageerror", lambda error: new_page.complaints.append(str(error)))
    yield new_page
    context.close()


def test_no_page_is_wider_than_the_window_or_asks_a_network(page: Any, built: Path) -> None:
    for file in sorted(built.rglob("*.html")):
        page.goto(file.as_uri())
        is_alike = file.parent == built / "reference" / "generated"  # a hundred pages of one kind
        for width in (360,) if is_alike else (360, 1024, 1920):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (file.name, width)
    assert page.complaints == []
    assert len(page.asked) > 100
    assert {url.partition(":")[0] for url in page.asked} <= {"file", "data"}


def test_the_search_finds_from_disk(page: Any, built: Path) -> None:
    page.goto((built / "index.html").as_uri())
    page.fill(".sidebar-search", "causal convolution")
    page.press(".sidebar-search", "Enter")
    page.wait_for_selector('#search-results ul.search li a[href*="arithmetic"]')  # results come one after another
    page.click("#search-results ul.search li a")
    assert "onvol" in page.inner_text("article")
    page.goto((built / "search.html").as_uri() + "?q=nosuchwordatall")
    page.wait_for_selector(".search-summary")
    assert page.query_selector_all("#search-results ul.search li a") == []
    assert page.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_text_has_contrast(browser: Any, built: Path, scheme: str, name: str) -> None:
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto((built / name).as_uri())
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (min(map(int, ground.strip("rgb()").split(","))) > 127) == (scheme == "light")
    assert page.evaluate(CONTRAST) == []
    context.close()


def test_the_house_says_what_it_shows_and_leads_to_its_rooms(page: Any, built: Path) -> None:
    page.goto((built / "design/generated/house.html").as_uri())
    assert page.text_content(".house svg > title")  # arrows have titles of their own
    assert page.text_content(".house svg > desc")
    page.click(".house a >> nth=1")
    assert page.inner_text("h1").startswith("lfm2np")
