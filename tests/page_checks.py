"""What tests of pages in a browser share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The texts on the screen whose contrast to what is behind them is below 4.5: of an article alone, if there is one, and
# with those of the picture of packages in docs/.
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
      if (c.a === 1) return c;
    }
    return {r: 255, g: 255, b: 255, a: 1};
  };
  const bad = [];
  const look = (el) => {  // what is hidden is left out with all that is in it
    const svg = el.closest("svg");
    if (el.hidden || svg && !svg.closest(".house") || el.matches(".view:not(.current)")) return;
    if ((!svg || el.tagName === "text") && [...el.childNodes].some(n => n.nodeType === 3 && n.data.trim())) {
      const style = getComputedStyle(el), box = el.getBoundingClientRect();
      if (style.visibility !== "hidden" && style.opacity > 0 && box.width) {
        const rect = svg && el.parentElement.querySelector("rect");
        const ground = rect ? parse(getComputedStyle(rect).fill) : back(svg || el);
        const a = lum(parse(svg ? style.fill : style.color)), b = lum(ground);
        const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        if (ratio < 4.5) bad.push([el.tagName, el.className, el.textContent.slice(0, 40), ratio]);
      }
    }
    for (const child of el.children) look(child);
  };
  look(document.querySelector("article") || document.body);
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
