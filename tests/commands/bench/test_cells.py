"""What is measured: names of cells, ratios of times, the table."""

import json
import statistics

import pytest

from lfm2np.commands.bench.measure import CellTimes, Measured
from lfm2np.commands.bench.sides.cells import CELLS, QUICK, Cell, cell_named, cells_named
from lfm2np.commands.bench.table import RATIOS, Ratio, as_json, as_text, columns, ratio_of
from lfm2np.errors import RequestError

SECONDS = {"exact": [2.0, 4.0, 3.0], "floor-float64": [1.0, 3.0, 3.0], "transformers-float32": [2.0, 2.0, 6.0]}


def measured(name: str) -> Measured:
    """Three rounds of one cell, with numbers that are exact in binary."""
    times = CellTimes(cell_named(name))
    result = Measured([times], {side: [1.0] for side in SECONDS}, dict.fromkeys(SECONDS, 10**9))
    for index in range(3):
        for side, seconds in SECONDS.items():
            steps = [{"seconds": seconds[index] + late} for late in (0.0, 0.5, -0.5)]
            if side.startswith("floor"):
                steps = [{**step, "linear": step["seconds"] / 2} for step in steps]
            times.add(side, {"steps": steps, "peak_bytes": 10 + index})
    return result


def test_the_issue_s_cells_are_all_there():
    assert {(cell.kind, cell.requests, cell.context) for cell in CELLS} == {
        ("prefill", 1, 128),
        ("prefill", 1, 512),
        *(("decode", requests, context) for requests in (1, 5, 16, 64) for context in (128, 1024)),
    }
    assert set(QUICK) <= set(CELLS)


def test_a_cell_s_name_names_it():
    assert [cell_named(cell.name) for cell in CELLS] == CELLS
    assert cells_named("decode-2x8, prefill-7,decode-2x8") == [Cell("decode", 2, 8), Cell("prefill", 1, 7)]


@pytest.mark.parametrize("name", ["", "decode-0x8", "decode-8", "prefill-1x8", "prefill-07", "decode-1x8 ", "x" * 99])
def test_another_name_is_refused(name):
    with pytest.raises(RequestError, match="expected prefill-TOKENS or decode-REQUESTSxCONTEXT"):
        cell_named(name)


def test_a_side_s_time_in_a_round_is_the_median_of_its_steps():
    times = measured("decode-16x8").cells[0]
    assert times.seconds == SECONDS
    assert times.parts == {"floor-float64": {"linear": [0.5, 1.5, 1.5]}}
    assert times.peak_bytes == dict.fromkeys(SECONDS, 12)


def test_a_ratio_is_the_median_of_the_rounds_quotients():
    """Not the quotient of the medians, which would be 1 here."""
    spread = ratio_of(RATIOS[1], SECONDS)
    assert (spread.median, spread.low, spread.high) == (1.0, 0.5, 2.0)
    assert ratio_of(RATIOS[2], SECONDS).median == statistics.median([1 / 2, 3 / 4, 3 / 3])
    assert ratio_of(RATIOS[3], SECONDS) is None


@pytest.mark.parametrize(
    ("name", "target"), [("decode-1x8", None), ("decode-5x8", None), ("decode-16x8", 0.7), ("prefill-8", 0.85)]
)
def test_a_share_of_the_floor_is_asked_for_where_the_products_are_large(name, target):
    assert Ratio("exact", "floor-float64", {"decode": 0.7, "prefill": 0.85}).target(cell_named(name)) == target


def test_the_table_s_ratios_are_the_quotients_of_its_times():
    report = as_json(measured("decode-16x8"))
    (cell,) = json.loads(json.dumps(report))["cells"]
    assert set(cell) == {
        *("cell", "kind", "requests", "context"),
        *("seconds", "parts", "peak_bytes", "ratios"),
    }
    assert [(ratio["side"], ratio["other"]) for ratio in cell["ratios"]] == [
        ("exact", "transformers-float32"),
        ("exact", "floor-float64"),
    ]
    for ratio in cell["ratios"]:
        pairs = zip(cell["seconds"][ratio["side"]], cell["seconds"][ratio["other"]], strict=True)
        quotients = [other / value for value, other in pairs]
        assert (ratio["median"], ratio["low"], ratio["high"]) == (
            statistics.median(quotients),
            min(quotients),
            max(quotients),
        )


def test_a_ratio_below_its_target_is_marked():
    shown = as_text(measured("decode-16x8"))
    assert "0.75 (0.50-1.00) 0.8!" in shown
    assert "1.00 (0.50-2.00) 0.9 " in shown
    assert "3000.0 (1500.0)" in shown


def test_columns_align():
    assert columns([["", "ab"], ["abc", "d"]]) == "     ab\nabc   d"
