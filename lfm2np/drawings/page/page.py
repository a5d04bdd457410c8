"""The page: all views in one HTML file that needs nothing else. The same run gives the same bytes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from lfm2np.drawings.page.markup import Markup, element, joined
from lfm2np.drawings.page.view import NUM_COLOURS, View

PLAYERS = {"single": "the single request", "hand": "the hand model's run", "main": "the run"}


def page(title: str, about: Markup, views: Sequence[View]) -> str:
    style, script = asset("page.css"), asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(style)),
    )
    body = element(
        "body",
        element("a", "Skip to the views", href="#views", class_="skip"),
        element("header", element("h1", title), about, contents(views)),
        patterns(),
        [player(name, views) for name in PLAYERS],
        element("main", [section(view) for view in views], id="views"),
        element("script", Markup(script)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def asset(name: str) -> str:
    return (resources.files("lfm2np.drawings") / "assets" / name).read_text(encoding="utf-8")


def contents(views: Sequence[View]) -> Markup:
    links = [element("li", element("a", view.title, href=f"#{view.id}")) for view in views]
    return element("nav", element("ol", links), aria_label="Views")


def section(view: View) -> Markup:
    return element(
        "section",
        element("h2", view.title, id=f"{view.id}-title"),
        element("p", view.lesson, class_="lesson"),
        view.body,
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
    return element(
        "div",
        element("button", "First", type="button", class_="first", aria_label=f"First step of {what}"),
        element("button", "Back", type="button", class_="back", aria_label=f"Step back in {what}"),
        element("button", "Play", type="button", class_="play", aria_label=f"Play {what}", aria_pressed="false"),
        element("button", "On", type="button", class_="on", aria_label=f"Step on in {what}"),
        element(
            "input",
            type="range",
            min=0,
            max=steps - 1,
            value=steps - 1,
            aria_label=f"Step of {what}",
        ),
        element("output", f"step {steps - 1} of {steps - 1}"),
        class_="player",
        id=f"player-{name}",
        role="group",
        aria_label=f"Steps of {what}",
        data_player=name,
        data_start=start,
        hidden=True,
    )


def patterns() -> Markup:
    """Fills that stay apart in grey and on paper."""
    made = []
    for index in range(NUM_COLOURS):
        angle = (0, 45, 90, 135)[index % 4]
        gap = 5 if index < 4 else 3
        stripe = element("rect", width=gap, height=1.2, class_="stripe")
        ground = element("rect", width=gap, height=gap, class_=f"ground g{index}")
        made.append(
            element(
                "pattern",
                ground,
                stripe,
                id=f"p{index}",
                width=gap,
                height=gap,
                patternUnits="userSpaceOnUse",
                patternTransform=f"rotate({angle})",
            )
        )
    return element("svg", element("defs", joined(made)), width=0, height=0, class_="defs", aria_hidden="true")
