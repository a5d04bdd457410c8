"""What a browser would send of a page's forms, and what belongs to what."""

from __future__ import annotations

from html.parser import HTMLParser


class Forms(HTMLParser):
    """sent       the fields of each form, by its id or label
    described  what describes the field of each name
    fields     ids of what can be typed or chosen; `labelled` those that have a label
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sent: dict[str, list[tuple[str, str]]] = {}
        self.described: dict[str, str] = {}
        self.ids: list[str] = []
        self.fields: set[str] = set()
        self.labelled: set[str] = set()
        self._form = self._select = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {key: value or "" for key, value in attrs}
        name = attributes.get("name", "")
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag == "form":
            self._form = attributes.get("id", attributes.get("aria-label", ""))
            self.sent[self._form] = []
        if tag == "label":
            self.labelled.add(attributes["for"])
        if tag in ("input", "select") and name and attributes.get("type") != "hidden":
            self.fields.add(attributes["id"])
            self.labelled |= {attributes["id"]} if attributes.get("aria-label") else set()
            self.described[attributes["id"]] = attributes.get("aria-describedby", "")
        if tag == "input" and name:
            self.sent[self._form].append((name, attributes["value"]))
        if tag == "select":
            self._select = name  # the player's has none, and is in no form
        if tag == "option" and "selected" in attributes and self._select:
            self.sent[self._form].append((self._select, attributes["value"]))
