"""The page: all views in one HTML file that needs nothing else. The same run gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from lfm2np.oracle.report.markup import Markup, document, element
from lfm2np.teaching.drawings.page.view import NUM_COLOURS, View

BUTTONS = (
    ("first", "First", "First step of"),
    ("back", "Back", "Step back in"),
    ("play", "Play", "Play"),
    ("on", "Next", "Next step of"),
)
BEGIN = "\nbegin(new AbortController().signal);\n"
PLAYERS = {"batching": "both ways to batch", "main": "the run"}
SPEEDS = {"0.5": "½×", "1": "1×", "2": "2×", "4": "4×"}


@dataclass(frozen=True)
class Panel:
    """What a page has beside its views: controls above them, the script that begins the page and them, and the
    directives of what the script may ask for."""

    above: Markup
    script: str
    sources: str


def page(title: str, about: Markup, views: Sequence[View], panel: Panel | None = None, start: str = "") -> str:
    """Without a panel the page asks for nothing; with one it may ask the server that it came from.

    start   the view that is shown first; none: the first one
    """
    body = element(
        "div",
        element("header", element("h1", title), class_="top"),
        element("div", contents(views), [player(name, views) for name in PLAYERS], class_="side"),
        element(
            "main",
            panel.above if panel else None,
            [section(view, number, views) for number, view in enumerate(views)],
            element("footer", about, class_="about"),
            id="views",
        ),
        class_="layout",
    )
    script = asset("page.js") + (panel.script if panel else BEGIN)
    skip = element("a", "Skip to the views", href="#views", class_="skip")
    content, sources = [skip, patterns(), body], panel.sources if panel else "form-action 'none'"
    style = asset("page.css")
    return document(title, style, content, script=script, allowed=sources, data_start=start or None)


def asset(name: str) -> str:
    return (resources.files("lfm2np.teaching.drawings") / "assets" / name).read_text(encoding="utf-8")


def contents(views: Sequence[View]) -> Markup:
    links = [element("li", element("a", view.title, href=f"#{view.id}")) for view in views]
    return element(
        "nav", element("p", "Views of the run", class_="heading"), element("ol", links, role="list"), aria_label="Views"
    )


def section(view: View, index: int, views: Sequence[View]) -> Markup:
    """A screen: its title, its lesson, what it shows, and the way to its neighbours."""
    before, after = views[index - 1] if index else None, views[index + 1] if index + 1 < len(views) else None
    return element(
        "section",
        element("h2", view.title, id=f"{view.id}-title"),
        element("p", view.lesson, class_="lesson") if view.lesson else None,
        element("figure", element("div", view.picture), class_="drawn") if view.picture else None,
        view.text,
        element(
            "p",
            element("a", f"\u2190 {before.title}", href=f"#{before.id}") if before else element("span"),
            element("a", f"{after.title} \u2192", href=f"#{after.id}") if after else None,
            class_="neighbours",
        ),
        id=view.id,
        class_="view",
        aria_labelledby=f"{view.id}-title",
        data_player=view.player,
    )


def player(name: str, views: Sequence[View]) -> Markup:
    """The controls that step all views of one run; hidden without the script."""
    steps = max((view.num_steps for view in views if view.player == name), default=0)
    if steps == 0:
        return Markup("")
    what, start = PLAYERS[name], max(view.start for view in views if view.player == name)
    buttons = [
        element("button", text, type="button", class_=kind, aria_label=f"{label} {what}")
        for kind, text, label in BUTTONS
    ]
    speeds = [element("option", text, value=value, selected=value == "1") for value, text in SPEEDS.items()]
    return element(
        "div",
        element("div", buttons, class_="buttons"),
        element("input", type="range", min=0, max=steps - 1, value=steps - 1, aria_label=f"Step of {what}"),
        element(
            "div",
            element("output", f"step {steps - 1} of {steps - 1}", aria_live="off"),
            element("select", speeds, class_="speed", aria_label=f"Speed of {what}"),
            class_="pace",
        ),
        element("p", class_="spoken", role="status"),  # the sentence of a step to which one goes by hand
        class_="player",
        id=f"player-{name}",
        role="group",
        aria_label=f"Steps of {what}",
        data_player=name,
        data_what=what,
        data_start=start,
        hidden=True,
    )


def patterns() -> Markup:
    """Fills that stay apart in grey and on paper."""
    fills = []
    for index in range(NUM_COLOURS):
        gap = 5 if index < 4 else 3
        stripe = element("rect", width=gap, height=1.2, class_="stripe")
        ground = element("rect", width=gap, height=gap, class_=f"ground g{index}")
        fills.append(pattern(f"p{index}", gap, gap, (0, 45, 90, 135)[index % 4], ground, stripe))
    stripe = element("line", x1=0, y1=0, x2=0, y2=6, class_="waste-line")
    across = element("line", x1=0, y1=0, x2=6, y2=0, class_="waste-line")
    fills += [pattern("waste", 5, 6, 45, stripe), pattern("held", 6, 6, 45, stripe, across)]
    return element("svg", element("defs", fills), width=0, height=0, class_="defs", aria_hidden="true")


def pattern(identity: str, width: int, height: int, angle: int, *shapes: Markup) -> Markup:
    sizes = {"width": width, "height": height, "patternUnits": "userSpaceOnUse"}
    return element("pattern", shapes, id=identity, **sizes, patternTransform=f"rotate({angle})")
