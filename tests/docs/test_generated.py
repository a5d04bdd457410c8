"""What pages are made from: docstrings as they stand, the rooms' imports, schemas in words."""

from __future__ import annotations

from functools import cache
from itertools import chain

import house_picture
import pytest
import rooms
import schemas
from docstrings import as_rest

pytestmark = pytest.mark.slow

DOCSTRING = """One line with `code`, a *star*, a trailing_ and |bars|.

u        [t, D]   float32
returns  [t, D]

    indented = 1

Prose again, over
two lines:
- an item
  that goes on
- another"""


def test_a_docstring_is_shown_as_it_stands() -> None:
    shown = "\n".join(as_rest(DOCSTRING.split("\n")))
    assert "``code``" in shown
    assert r"a \*star\*" in shown
    assert ".. code-block:: text\n\n   u        [t, D]   float32\n   returns  [t, D]\n\n       indented = 1\n" in shown
    assert "- an item that goes on\n- another\n" in shown
    assert r"Prose again\, over two lines\:" in shown


read_modules = cache(rooms.read_modules)


def test_the_picture_has_an_arrow_or_a_way_for_every_import() -> None:
    modules = read_modules()
    arrows = rooms.arrows(modules)
    drawn = house_picture.drawn(arrows)

    @cache
    def reached(box: str) -> frozenset[str]:
        return frozenset(drawn[box]).union(*map(reached, drawn[box]))

    for box, others in drawn.items():
        assert set(others) <= set(arrows[box])
        assert reached(box) == set(arrows[box]) - set(house_picture.ANYWHERE) | set(
            chain.from_iterable(reached(other) for other in arrows[box] if other in drawn)
        )
    boxes = {one for row in house_picture.rows_of(drawn) for one in row if isinstance(one, str)}
    assert boxes == set(drawn)
    table = house_picture.table(arrows)
    assert {row[0] for row in table} == set(map(house_picture.label, arrows))
    svg = house_picture.picture(arrows, {})
    assert svg.count('class="arrow"') == sum(map(len, drawn.values()))
    assert "<title id=" in svg
    assert "<desc id=" in svg


def test_arrows_run_down() -> None:
    drawn = house_picture.drawn(rooms.arrows(read_modules()))
    row_of = {one: i for i, row in enumerate(house_picture.rows_of(drawn)) for one in row}
    assert all(row_of[box] < row_of[other] for box, others in drawn.items() for other in others)


def test_a_schema_in_words() -> None:
    value = {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}}
    assert schemas.in_words(value) == "list of integer, 0 or more or null"
    assert schemas.in_words({"enum": ["a", 1]}) == '`"a"` or `1`'
    assert schemas.in_words({"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}) == "x or null"
    assert schemas.in_words({"type": "object", "additionalProperties": {"type": "string"}}) == "object of string"
