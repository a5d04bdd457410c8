"""What tests of pages in a browser share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The texts on the screen whose contrast to what is behind them is below 4.5.
CONTRAST = """() => {
  const parse = c => {
    const m = c.match(/[\\d.]+/g).map(Number);
    return {r: m[0], g: m[1], b: m[2], a: m.length > 3 ? m[3] : 1};
  };
  const lum = c => [c.r, c.g, c.b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
  const back = el => {
    for (let e = el; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.a) return c;
    }
    return {r: 255, g: 255, b: 255, a: 1};
  };
  const bad = [];
  const look = (el) => {  // what is hidden is left out with all that is in it
    if (el.hidden || el.tagName === "svg" || el.matches(".view:not(.current)")) return;
    if ([...el.childNodes].some(n => n.nodeType === 3 && n.data.trim())) {
      const style = getComputedStyle(el), box = el.getBoundingClientRect();
      if (style.visibility !== "hidden" && box.width) {
        const a = lum(parse(style.color)), b = lum(back(el));
        const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        if (ratio < 4.5) bad.push([el.tagName, el.className, el.textContent.slice(0, 40), ratio]);
      }
    }
    for (const child of el.children) look(child);
  };
  look(document.body);
  return bad;
}"""


def each_view(page: Any) -> Iterator[str]:
    """Every view after the other on the screen; a click by the mouse waits until a large page stands still."""
    for view in page.eval_on_selector_all(".view", "views => views.map(view => view.id)"):
        page.eval_on_selector(f'.side a[href="#{view}"]', "link => link.click()")
        page.wait_for_selector(f"#{view}.current")
        assert page.locator(".view:visible").count() == 1
        yield view


class Opened:
    """A page, with what it complained of and what it asked the network for."""

    def __init__(self, browser: Any, file: Path, width: int = 1200, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())


def go(page: Any, player: str, step: int) -> None:
    """By the slider of the player."""
    page.eval_on_selector(
        f"#player-{player} input", "(one, step) => { one.value = step; one.dispatchEvent(new Event('input')); }", step
    )
