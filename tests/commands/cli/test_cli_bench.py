"""`lfm2np bench` as people and scripts see it."""

import json
import statistics
from pathlib import Path

import pytest

from lfm2np.commands.bench import check_time, measure, profile
from lfm2np.commands.bench.sides.profile_side import PARTS, REST, SPREAD
from lfm2np.commands.cli import main

MODEL = str(Path(__file__).parents[3] / "fixtures" / "torture" / "minimal_config")
TINY = ("bench", "--model", MODEL, "--cells", "prefill-6,decode-2x5", "--rounds", "2", "--threads", "1")
ALONE = (*TINY, "--without-peers")


def answer(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.rounding
def test_steps_as_json(capsys):
    report = answer(capsys, *ALONE)
    assert set(report) == {"model", "machine", "threads", "share_of_others", "sides", "cells", "notes"}
    assert set(report["machine"]) == {
        *("processor", "cores", "system", "python", "numpy", "blas", "blas_kernel", "lfm2np")
    }
    sides = [*measure.OURS, *measure.FLOORS]
    assert list(report["sides"]) == sides
    assert [cell["cell"] for cell in report["cells"]] == ["prefill-6", "decode-2x5"]
    for cell in report["cells"]:
        assert list(cell["seconds"]) == list(cell["peak_bytes"]) == sides
        assert all(len(rounds) == 2 for rounds in cell["seconds"].values())
        for ratio in cell["ratios"]:
            pairs = zip(cell["seconds"][ratio["side"]], cell["seconds"][ratio["other"]], strict=True)
            assert ratio["median"] == statistics.median(other / value for value, other in pairs)


@pytest.mark.slow
@pytest.mark.rounding
def test_steps_as_a_table(capsys):
    assert main([*ALONE]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].startswith("minimal_config on ")
    assert "1 threads" in lines[0]
    assert lines[1].startswith("other processes took ")
    assert [line.split()[0] for line in lines if line.startswith("prefill-6")] == ["prefill-6"] * 3


@pytest.mark.slow
@pytest.mark.rounding
def test_sides_that_do_not_fit_together_are_loaded_anew_in_each_round(capsys, monkeypatch):
    monkeypatch.setattr(measure, "available_bytes", lambda: 0)
    report = answer(capsys, *ALONE)
    assert all(len(side["load_seconds"]) == 2 for side in report["sides"].values())
    assert all(len(rounds) == 2 for cell in report["cells"] for rounds in cell["seconds"].values())
    assert report["notes"] == ["not all sides fit into memory together: each was loaded anew in each round"]


@pytest.mark.slow
@pytest.mark.rounding
def test_missing_peers_are_said(capsys, monkeypatch):
    monkeypatch.setattr(measure, "has_peers", lambda: False)
    assert answer(capsys, *TINY)["notes"] == [
        'transformers is not installed and was not measured: pip install "lfm2np[peers]"'
    ]


PROFILE = ("bench", "profile", *TINY[1:])


@pytest.mark.slow
@pytest.mark.rounding
def test_profile_as_json(capsys):
    report = answer(capsys, *PROFILE)
    assert set(report) == {"model", "machine", "threads", "share_of_others", "profile"}
    assert [run["numerics"] for run in report["profile"]] == ["exact", "float32"]
    for run in report["profile"]:
        (ours, parts), (floor, products) = run["cells"][0]["parts"].items()
        assert (ours, floor) == profile.sides(run["numerics"])
        assert set(parts) == {*PARTS, REST, *SPREAD}
        assert all(seconds > 0 for name in PARTS for seconds in parts[name])
        assert set(products) == {"linear", "attention"}


@pytest.mark.rounding
def test_profile_of_one_arithmetic_as_a_table(capsys):
    assert main([*PROFILE, "--numerics", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "milliseconds" in line] == ["float32"]
    head = next(index for index, line in enumerate(lines) if line.split() == ["prefill-6", "decode-2x5"])
    named = [line.split("  ")[0] for line in lines[head + 1 :]]
    assert named[: len(PARTS) + 2] == ["step", *PARTS, REST]
    assert named[-len(SPREAD) - 4 :] == [*SPREAD, "serial, %", *(f"on {cores} cores" for cores in profile.CORES)]


@pytest.mark.rounding
def test_five_as_json(capsys):
    report = answer(capsys, "bench", "five", "--model", MODEL, "--new-tokens", "3", "--threads", "1")
    assert set(report) == {"model", "machine", "threads", "share_of_others", "five"}
    assert [run["numerics"] for run in report["five"]] == ["exact", "float32"]
    assert set(report["five"][0]) == {
        *("numerics", "longest_answer", "tokens", "integrated_from_lengths", "seconds", "tokens_per_second"),
        *("gain", "gain_of_rounds", "target", "causes"),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rounds", "0"), "--rounds 0: expected a whole number, 1 to 10000"),
        (("--threads", "0"), "--threads 0: expected a whole number, 1 to 1024"),
        (("--cells", "decode"), "cell 'decode': expected prefill-TOKENS or decode-REQUESTSxCONTEXT"),
        (("--whole",), "--whole goes with bench five"),
        (("--model", "x", "--model-shape", "350m"), "--model and --model-shape: expected one of them"),
        (("profile", "--quick"), "--quick goes with bench steps"),
        (("--numerics", "exact"), "--numerics goes with bench profile, five, growth, large, serve"),
        (("five", "--quick"), "--quick goes with bench steps"),
        (("--format", "bfloat16"), "--format goes with bench check"),
        (("five", "--new-tokens", "0"), "--new-tokens 0: expected a whole number, 1 to 1048576"),
        (("growth", "--cells", "prefill-1"), "--cells goes with bench steps, profile"),
    ],
)
def test_what_can_t_be_measured_is_refused_before_anything_is_made(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"lfm2np: RequestError: {message}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_cell_beyond_the_longest_context_is_one_line(capsys):
    assert main(["bench", "--model", MODEL, "--cells", "prefill-5,decode-2x9999999"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lfm2np: RequestError: cell decode-2x9999999: expected at most max_position_emb")


@pytest.mark.slow
@pytest.mark.rounding
@pytest.mark.parametrize("format_name", ["float32", "bfloat16"])
def test_the_time_of_a_verdict(capsys, format_name):
    """The wrong engine is called wrong long before all is asked; what is timed adds up."""
    report = answer(capsys, "bench", "check", "--model", MODEL, "--threads", "1", "--format", format_name)["check"]
    (right,), (wrong,) = report["engines"].values()
    assert right["verdict"] in ("EXACT", "TIE") and wrong["verdict"] == "BUG"
    assert 0 < wrong["tokens"] < right["tokens"] / 10 and "scoring" not in wrong
    assert right["to_verdict"] >= right["judging"] > 0 and right["scoring"] > 0 and right["asking"] > 0
    text = check_time.as_text(check_time.CheckTime(format_name, 1.0, report["engines"]))
    assert f"{right['judging'] / right['scoring']:.2f}" in text and "wrong, --first" in text
