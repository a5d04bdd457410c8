"""Docstrings as they stand, for Sphinx: they are plain text in aligned tables, no reStructuredText.

A paragraph of prose becomes prose, a list of `- ` lines a list; a paragraph in which anything is aligned (two spaces
between words, or a line that is indented) is shown as it is, so shapes and units stay below each other.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

ALIGNED = re.compile(r"^\s|^>>> |\S {2,}\S|^[\w/.-]+ *(->|=) ")
CODE = re.compile(r"`([^`\n]+)`")


def escaped(text: str) -> str:
    """Prose for reStructuredText: every mark means itself, but `code` is code."""
    parts = CODE.split(text)
    prose = [re.sub(r"([^\w\s])", r"\\\1", part) for part in parts[::2]]
    code = [f"``{part}``" if part.strip() == part else re.sub(r"([^\w\s])", r"\\\1", part) for part in parts[1::2]]
    return "".join(
        # a backslash and a space are nothing, and let a word touch code
        before + (rf"\ {one}\ " if one else "")
        for before, one in zip(prose, [*code, ""], strict=True)
    )


def paragraphs(lines: Sequence[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line.rstrip())
        elif paragraph:
            yield paragraph
            paragraph = []


def literal(lines: Sequence[str], language: str = "text") -> list[str]:
    return [f".. code-block:: {language}", "", *(f"   {line}".rstrip() for line in lines), ""]


def items(paragraph: Sequence[str]) -> list[str]:
    """Each `- ` line with those that go on below it."""
    entries: list[str] = []
    for line in paragraph:
        if line.startswith("- "):
            entries.append(line[2:])
        else:
            entries[-1] += " " + line.strip()
    return entries


def as_rest(lines: Sequence[str]) -> list[str]:
    """The lines of a docstring as reStructuredText that shows what they say."""
    rest_lines: list[str] = []
    shown_as_is: list[str] = []

    def end_block() -> None:
        if shown_as_is:
            rest_lines.extend(literal(textwrap.dedent("\n".join(shown_as_is[:-1])).split("\n")))
            shown_as_is.clear()

    for paragraph in paragraphs(lines):
        starts = [i for i, line in enumerate(paragraph) if line.startswith("- ")]
        rest = paragraph[starts[0] :] if starts else paragraph
        if not starts and any(ALIGNED.search(line) for line in paragraph):
            shown_as_is += [*paragraph, ""]
            continue
        end_block()
        if starts and all(line.startswith(("- ", "  ")) for line in rest):
            if starts[0]:
                rest_lines += [escaped(" ".join(paragraph[: starts[0]])), ""]
            rest_lines += [f"- {escaped(item)}" for item in items(rest)] + [""]
        else:
            rest_lines += [escaped(" ".join(line.strip() for line in paragraph)), ""]
    end_block()
    return rest_lines


def fields_of(kind: type) -> list[str]:
    """The source lines of a dataclass's fields, with the comments beside them."""
    source = textwrap.dedent(inspect.getsource(kind)).split("\n")
    members = re.compile(r"    (\w+): ")
    names = {field.name for field in dataclasses.fields(kind)}
    lines = [i for i, line in enumerate(source) if (match := members.match(line)) and match[1] in names]
    return textwrap.dedent("\n".join(source[lines[0] : lines[-1] + 1])).split("\n") if lines else []


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """For the event autodoc-process-docstring."""
    if what == "class" and dataclasses.is_dataclass(obj) and (obj.__doc__ or "").startswith(f"{obj.__name__}("):
        lines.clear()  # what dataclasses writes where there is no docstring
    lines[:] = as_rest(lines)
    if what in ("class", "exception") and dataclasses.is_dataclass(obj) and isinstance(obj, type):
        lines += literal(fields_of(obj), "python")


def process_signature(app: Any, what: str, name: str, obj: Any, *_: Any) -> tuple[str, None] | None:
    """For the event autodoc-process-signature: a Protocol is not called."""
    return ("", None) if what == "class" and getattr(obj, "_is_protocol", False) else None
