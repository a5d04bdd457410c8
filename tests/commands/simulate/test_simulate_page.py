"""Pages of simulations: whole, with the numbers of the result, asking for nothing; figures with axes that hold all."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lfm2np.commands.simulate.cost import CostModel
from lfm2np.commands.simulate.page.simulation import HEADS, SHORT, amount, simulation_report
from lfm2np.commands.simulate.page.sweep_page import sweep_report
from lfm2np.commands.simulate.report import NAMES, as_json, percent, saturation_line, span
from lfm2np.commands.simulate.run import Simulation
from lfm2np.commands.simulate.traffic import Arrival
from lfm2np.oracle.report.as_html import PAGE_ROWS, as_html
from lfm2np.oracle.report.as_text import as_text, visible
from lfm2np.oracle.report.charts import Axis, Line, document, line_chart, scale_of, seconds_words
from scheduler import SchedulerConfig

Result = dict[str, Any]
HOSTILE = "</title></desc><script>alert(1)</script><img src=x onerror=y>\"'&\u202e]]>-->\x00"
MEASURED = CostModel("toy", "measured on nothing, by nobody", ({"1": 1e-3, "tokens": 1e-5},))


def simulated(num_requests: int = 40, every: int = 20_000_000, **settings: Any) -> Result:
    config = SchedulerConfig(num_blocks=24, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, **settings)
    run = Simulation(config, MEASURED)
    arrivals = (
        Arrival(every * number, ((number % 3, 3 + 7 * (number % 5)),), 1 + number % 9, 7, priority=number % 2)
        for number in range(num_requests)
    )
    too_long = Arrival(every * num_requests, ((1, 999),), 9, 7)
    statistics = run.run([*arrivals, too_long])
    result: Result = json.loads(json.dumps(as_json(statistics, run.scheduler, MEASURED, "a toy")))
    return result


def nothing() -> Result:
    """All was refused."""
    return simulated(num_requests=0)


def huge() -> Result:
    result = simulated()
    for course in ("running", "waiting", "blocks", "tokens_per_second"):
        result["courses"][course] = [0.0, 1e300, 1e-300]
    result["courses"]["width"] = 1e15
    result["distributions"]["ttft"] = [[0.0, 0.1], [1e-9, 0.5], [1e300, 1.0]]
    return result


def one_bin() -> Result:
    result = simulated()
    result["courses"] = {
        "width": 2.0,
        **{name: [3.0] for name in ("running", "waiting", "blocks", "tokens_per_second")},
    }
    result["distributions"]["itl"] = [[0.5, 1.0]]
    return result


def swept(settings: dict[str, list[Any]] | None = None) -> Result:
    """Four runs: the second saturated, the third one without times."""
    settings = settings or {"policy": ["fcfs", HOSTILE], "max_num_batched_tokens": [512, 4096]}
    first, second = settings.values()
    runs = []
    for number, chosen in enumerate(itertools.product(first, second)):
        values = {name: None if number == 2 else 0.01 * 7**number + place for place, name in enumerate(HEADS)}
        runs.append(
            {
                "settings": dict(zip(settings, chosen, strict=True)),
                "seconds": dict.fromkeys(SHORT, values),
                "throughput": {"requests_per_second": 12.345 + number},
                "utilisation": {"busy": 0.5 + number / 1000},
                "preemptions": 1000 + number,
                "saturation": {"since": 1.0, "waiting": 77, "requests_per_second": 3.0} if number == 1 else None,
                "on_front": number == 0,
                "lost": 10 + number,
                "queue": {"longest": 80, "longest_at": 2.0, "unclear": None},
                "requests": {"aborted": 0, "left": 0},
                "beyond": None,
            }
        )
    target = {"metric": "ttft", "quantile": "p99", "seconds": 2.0}
    cost = {"name": "paper", "origin": "published figures, not measured: a data sheet", "errors": None}
    return {
        "kind": "sweep",
        "traffic": HOSTILE,
        "cost": cost,
        "settings": settings,
        "target": target,
        "runs": runs,
        "answer": [f"Choose policy {HOSTILE}: it is best."],
        "notes": [f"The same with {HOSTILE}."],
        "share": 0.93,
    }


def no_numbers() -> Result:
    """Settings without a number among them, and no target."""
    return {**swept({"policy": ["fcfs", "static"], "prefix_caching": [True, False]}), "target": None}


def many() -> Result:
    """More lines than are drawn, and numbers that are no numbers of a run."""
    result = swept({"policy": [f"policy {number}" for number in range(12)], HOSTILE: [0.0, 0.01, 1e6, None]})
    return {**result, "target": {"metric": "e2e", "quantile": "p50", "seconds": 1e-9}}


def saturated_sweep() -> Result:
    result = swept()
    for run in result["runs"]:
        run.update(saturation={"since": 0.0, "waiting": 50, "requests_per_second": 1e9}, on_front=False)
    return result


def simulation_page(result: Result) -> str:
    return as_html(simulation_report(result))


def sweep_page(result: Result) -> str:
    return as_html(sweep_report(result))


def body_of(page: str) -> ElementTree.Element:
    """Of HTML that is well-formed XML."""
    return ElementTree.fromstring(page[page.index("<body>") : page.index("</html>")])


def rows_of(page: str) -> list[list[str]]:
    return [["".join(cell.itertext()) for cell in row] for row in body_of(page).iter("tr")]


PAGES: list[tuple[Callable[[Result], str], Callable[[], Result]]] = [
    *((simulation_page, result) for result in (simulated, nothing, huge, one_bin)),
    *((sweep_page, result) for result in (swept, no_numbers, many, saturated_sweep)),
]


@pytest.mark.parametrize(("page_of", "result_of"), PAGES)
def test_a_page_is_whole_asks_for_nothing_and_is_the_same_each_time(
    page_of: Callable[[Result], str], result_of: Callable[[], Result]
) -> None:
    result = result_of()
    before = copy.deepcopy(result)
    page = page_of(result)
    assert page == page_of(result_of()) and result == before
    body, attributes = body_of(page), ("src", "style", "srcset", "srcdoc", "onload", "onerror", "data", "action")
    ids = [element.attrib["id"] for element in body.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    for element in body.iter():
        assert element.tag not in ("script", "img", "link", "iframe", "object", "embed", "style", "image", "use")
        assert not element.attrib.keys() & {*attributes, "{http://www.w3.org/1999/xlink}href"}
        assert element.attrib.get("href", "#").startswith("#") and element.attrib.get("href", "#")[1:] in {*ids, ""}
        assert set(element.attrib.get("aria-labelledby", "").split()) <= set(ids)
    assert "://" not in page and "url(" not in page and "@import" not in page
    assert not re.search(r"\b(nan|inf|None)\b", "".join(svg_texts(body)))
    for figure in body.iter("svg"):
        assert all(figure.findtext(name) for name in ("title", "desc"))
        _, _, width, height = map(float, figure.attrib["viewBox"].split())
        for x, y in places(figure):
            assert 0 <= x <= width and 0 <= y <= height


def svg_texts(body: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for figure in body.iter("svg") for text in figure.iter("text")]


def places(figure: ElementTree.Element) -> list[tuple[float, float]]:
    """Where paths and texts begin."""
    begins = [re.findall(r"M(\S+?) (\S+?)(?=[mhvHVLMz]|$)", path.attrib["d"]) for path in figure.iter("path")]
    texts = [(text.attrib["x"], text.attrib["y"]) for text in figure.iter("text")]
    return [(float(x), float(y)) for x, y in [*(pair for place in begins for pair in place), *texts]]


def test_the_tables_have_the_numbers_of_the_result() -> None:
    result = simulated()
    result["requests"]["skipped"] = {"no prompt tokens": 1234}
    rows = rows_of(simulation_page(result))
    assert ["no prompt tokens", "1,234"] in rows
    for name, values in result["seconds"].items():
        assert [NAMES[name], SHORT[name], *(span(values[head]) for head in HEADS)] in rows
    for priority, values in result["ttft_by_priority"].items():
        assert [priority, *(span(values[head]) for head in HEADS)] in rows
    assert len(result["ttft_by_priority"]) == 2 and result["requests"]["refused"]
    for why, number in result["requests"]["refused"].items():
        assert [why, f"{number:,}"] in rows
    for name, value in result["config"].items():
        assert [name, str(value)] in rows
    for name, share in result["utilisation"].items():
        assert any(row[:2] == [name, percent(share)] for row in rows)
    for reason, number in result["prefix_cache"]["ended"].items():
        assert any(row[0] == reason and row[1].startswith(f"{number:,} (") for row in rows)
    for name in ("requests", "output_tokens", "computed_tokens"):
        assert [name.replace("_", " "), amount(result["throughput"][f"{name}_per_second"])] in rows
    courses = result["courses"]
    for index in range(min(PAGE_ROWS, len(courses["running"]))):
        numbers = [courses[name][index] for name in ("running", "waiting", "blocks", "tokens_per_second")]
        assert [amount(index * courses["width"]), *map(amount, numbers)] in rows
    for points in result["distributions"].values():
        assert all([span(value), f"{100 * share:.4g} %"] in rows for value, share in points)


def test_a_sweep_has_its_answer_first_and_a_row_of_every_run() -> None:
    result = swept()
    page = sweep_page(result)
    assert page.index("it is best.") < page.index("<nav")
    rows = rows_of(page)
    for number, run in enumerate(result["runs"], 1):
        row, more = ([row for row in rows if len(row) == size and row[0] == str(number)][-1] for size in (11, 5))
        assert row[1:3] == [visible(run["settings"]["policy"]), str(run["settings"]["max_num_batched_tokens"])]
        columns = ("ttft", "mean"), ("ttft", "p99"), ("tpot", "mean"), ("tpot", "p99"), ("e2e", "mean")
        assert row[3:8] == [span(run["seconds"][metric][which]) for metric, which in columns]
        assert row[8:10] == [f"{run['throughput']['requests_per_second']:.3g}", f"{run['lost']} %"]
        assert row[10] == ("\u25cf front", "\u2715 saturated", "", "")[number - 1]
        used = [percent(run["utilisation"]["busy"]), f"{run['preemptions']:,}"]
        assert more[1:4] == [span(run["seconds"]["e2e"]["p99"]), *used]
    figure = next(body_of(page).iter("svg"))
    drawn = {path.attrib["class"]: path.attrib["d"].count("M") for path in list(figure.iter("path"))[-3:]}
    assert drawn == {"dots s4": 1, "dots s3 hollow": 1, "dots s0": 1}  # the third run has no times


def test_runs_of_two_loads_are_never_in_one_figure() -> None:
    """Only runs with the same requests can be compared; a setting that a run's policy does not read has a dash."""
    result = swept({"rate": [1, 50], "max_num_batched_tokens": [512, 4096]})
    del result["runs"][3]["settings"]["max_num_batched_tokens"]
    result["runs"][2]["seconds"] = result["runs"][0]["seconds"]
    page = sweep_page(result)
    titles = ["".join(title.itertext()) for title in body_of(page).iter("title")]
    of_loads = [title for title in titles if "by rate" not in title]
    assert len(of_loads) == 6 and {title.partition(":")[0] for title in of_loads} == {"With rate 1", "With rate 50"}
    assert next(row for row in rows_of(page) if len(row) == 11 and row[0] == "4")[1:3] == ["50", "-"]


def test_a_run_that_may_be_saturated_is_marked_in_the_tables() -> None:
    result = swept()
    assert "unclear whether saturated" not in sweep_page(result)
    for run in result["runs"]:
        run["queue"]["unclear"] = "the load is near capacity"
    states = [row[-1] for row in rows_of(sweep_page(result)) if len(row) == 11 and row[0] in "1234"]
    assert states == ["▲ unclear whether saturated", "✕ saturated", *["▲ unclear whether saturated"] * 2]


def test_the_first_thing_a_page_says_is_whether_it_is_saturated() -> None:
    fine = simulated()
    flooded = {**fine, "saturation": {"since": 1.5, "waiting": 1234, "requests_per_second": 26.8}}
    near = {**fine, "queue": {**fine["queue"], "unclear": "the load is near capacity"}}
    for result, words in (
        (fine, "\u25cf not saturated"),
        (flooded, "\u2715 SATURATED"),
        (near, "\u25a1 unclear whether saturated"),
    ):
        page, report = simulation_page(result), simulation_report(result)
        assert body_of(page).findtext("header/h1") == f"lfm2np simulate: {words}"
        assert saturation_line(result) in text_of(body_of(page).find("header"))
        assert as_text(report).startswith(f"verdict    {words[2:]}") and report.exit_code == 0


def test_a_sweep_says_whether_its_target_is_met() -> None:
    missed = {**swept(), "target": {"metric": "ttft", "quantile": "p99", "seconds": 1e-9}}
    some = swept({"rate": [1, 50], "max_num_batched_tokens": [512, 4096]})
    expected = {
        "target met": {**swept(), "target": {"metric": "ttft", "quantile": "p99", "seconds": 100.0}},
        "target not met": missed,
        "target met with 1 of 2 loads": some,
        "measured: no target was set": no_numbers(),
        "every run is saturated": saturated_sweep(),
    }
    some["target"]["seconds"] = 100.0
    for verdict, result in expected.items():
        report = sweep_report(result)
        assert (report.verdict, report.exit_code) == (verdict, 0)
        assert report.next_steps == result["answer"]


def test_published_figures_are_marked_as_not_measured_and_errors_are_shown() -> None:
    result = simulated()
    assert "not measured" not in simulation_page(result)
    result["cost"].update(origin="published figures, not measured: H100")
    assert "△ published figures, not measured" in simulation_page(
        result
    ) and "△ published figures, not measured" in sweep_page(swept())
    result["cost"]["errors"] = {"steps": 1234, "folds": 7, "median": 0.031, "p90": 0.12, "total": -0.004}
    page = simulation_page(result)
    assert all(words in page for words in ("1,234", "7 folds", "3.1 %", "12 %", "-0.4 %"))


@pytest.mark.browser
def test_no_page_is_wider_than_the_window_or_asks_for_anything(browser: Any, tmp_path: Path) -> None:
    for number, (page_of, result_of) in enumerate(PAGES):
        file = tmp_path / f"{number}.html"
        file.write_text(page_of(result_of()), encoding="utf-8")
        for scheme in ("light", "dark"):
            page, asked, said = browser.new_page(color_scheme=scheme), [], []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, said=said: said.append(message.text))
            page.goto(file.as_uri())
            page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
            for width in (360, 800, 1600):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (number, width)
            assert asked == [file.as_uri()] and said == []
            page.close()


# --- axes


sizes = st.floats(0.0, 1e300, allow_subnormal=False)


@given(st.lists(sizes, max_size=6), st.booleans(), st.booleans())
@example([0.0], True, True)
@example([5.0], True, False)
@example([2.2315e-3, 2.232e-3], False, False)
@example([0.3], False, False)
def test_an_axis_holds_all_values_between_round_ticks_in_order(
    values: list[float], is_log: bool, from_zero: bool
) -> None:
    scale = scale_of(Axis("", is_log, from_zero=from_zero), values, 50.0, 350.0)
    shown = sorted(value for value in values if value > 0 or not is_log)
    assert scale.low < scale.high and 1 <= len(scale.ticks) <= 8
    if shown:
        assert scale.low <= shown[0] * (1 + 1e-9) and shown[-1] * (1 - 1e-9) <= scale.high
    assert not from_zero or is_log or scale.low == 0
    at = [scale(value) for value in sorted(values)]
    assert at == sorted(at) and all(50.0 <= place <= 350.0 for place in at)
    assert all(float(f"{tick:.11e}") == tick and scale.low <= tick <= scale.high for tick in scale.ticks)
    words = [seconds_words(tick) for tick in scale.ticks]
    assert len(set(words)) == len(words)
    if is_log:
        assert all(f"{tick:e}"[:8] in ("1.000000", "2.000000", "5.000000") for tick in scale.ticks)


def test_a_curve_goes_through_its_points() -> None:
    """At 0, half and all of both axes; steps keep the value before."""
    points = [(0.0, 0.0), (5.0, 50.0), (10.0, 100.0)]
    joined, steps = (
        re.search(r'class="curve s0" d="([^"]*)"', line_chart("a", "t", "d", [line], Axis("x"), Axis("y")).shapes)
        for line in (Line("a", points), Line("a", points, steps=True))
    )
    assert joined and joined[1] == "M60.0 214.0L222.0 119.0L384.0 24.0"
    assert steps and steps[1] == "M60.0 214.0H222.0V119.0H384.0V24.0"


def test_the_size_of_the_pool_is_a_line_or_is_said_where_it_would_hide_the_blocks_below() -> None:
    result = one_bin()
    for owned, is_drawn in ((24.0, True), (1.0, False)):
        result["courses"]["blocks"] = [owned]
        figure = next(each for each in body_of(simulation_page(result)).iter("figure") if "Owned" in text_of(each))
        assert "the pool: 24" in text_of(figure)
        assert ("level" in [path.attrib["class"] for path in figure.iter("path")]) == is_drawn


def text_of(element: ElementTree.Element | None) -> str:
    assert element is not None
    return "".join(element.itertext())


def test_a_figure_stands_alone_as_a_file() -> None:
    lines = [Line(f"line {number} {HOSTILE}", [(1.0, number), (2.0, 3.0)]) for number in range(9)]
    text = document(line_chart("a", HOSTILE, HOSTILE, lines, Axis(HOSTILE, is_log=True), Axis("y")))
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in text and "--text: #eceef1" in text
    used = set(re.findall(r"var\((--\w+)\)", text))
    assert used <= set(re.findall(r"(--\w+):", text))
    assert text.count("://") == 1 and "<script" not in text and "url(" not in text
    looks = [path.attrib["class"] for path in root.iter() if path.attrib.get("class", "").startswith("curve")]
    assert set(looks) == {f"curve s{number}" for number in range(8)}
