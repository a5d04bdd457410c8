"""A sweep's curve, by matplotlib, which the extra `docs` brings."""

from __future__ import annotations

import re

import pytest

from lfm2np.commands.simulate.curve import picture

pytestmark = pytest.mark.docs
LINES = {"policy fcfs": [(2.0, 0.01), (4.0, 0.02), (8.0, 0.05)], "policy static": [(2.0, 0.9)]}


def test_a_curve_has_a_line_for_each_configuration_its_target_and_units() -> None:
    svg = picture("a.svg", LINES, "TTFT P99", "a trace", 0.1)
    assert svg == picture("a.svg", LINES, "TTFT P99", "a trace", 0.1)  # no date, no random names
    words = re.findall(r">([^<>\n]+)<", svg.decode())
    assert {"policy fcfs", "policy static", "target: 100 ms", "TTFT P99", "requests a second", "a trace"} <= set(words)
    assert {"2", "4", "8", "10 ms", "500 ms"} <= set(words)
    lines = [line for line in re.findall(r'<path d="([^"]+)"', svg.decode()) if line.count("L") == 2]
    points = [[float(value) for value in re.findall(r"[\d.]+", line)] for line in lines]
    assert any(x[0] < x[2] < x[4] and x[1] > x[3] > x[5] for x in points)  # rises from left to right


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF")])
def test_the_name_says_the_format(name: str, start: bytes) -> None:
    assert picture(name, LINES, "TTFT P99", "a trace", None).startswith(start)
