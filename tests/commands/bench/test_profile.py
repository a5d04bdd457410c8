"""The parts of a step add up to it, and none of its operations is missing."""

from pathlib import Path

import pytest

from lfm2np.arithmetic import exact
from lfm2np.arithmetic.products import fastest
from lfm2np.commands.bench import profile
from lfm2np.commands.bench.measure import CellTimes, Measured
from lfm2np.commands.bench.sides.cells import cell_named
from lfm2np.commands.bench.sides.engine_side import EngineSide
from lfm2np.commands.bench.sides.profile_side import (
    FUNCTIONS,
    PARTS,
    PIECES,
    PRODUCTS,
    REST,
    SERIAL,
    SPREAD,
    ProfileSide,
)

MODEL = Path(__file__).parents[3] / "fixtures" / "torture" / "minimal_config"
CONSTANTS = {"name", "longest_context"}


class Slow:
    """An arithmetic that notes what it is asked for; a linear map takes a second of a clock that stands still else."""

    def __init__(self, inner, clock):
        self.inner, self.clock, self.asked = inner, clock, set()

    def __getattr__(self, name):
        self.asked.add(name)
        attribute = getattr(self.inner, name)
        if name != "linear":
            return attribute

        def linear(*arguments):
            self.clock[0] += 1.0
            return attribute(*arguments)

        return linear


@pytest.mark.rounding
@pytest.mark.parametrize("numerics", ["exact", "float32"])
@pytest.mark.parametrize("cell", ["prefill-7", "decode-3x5"])
def test_parts_add_up_to_the_step(monkeypatch, numerics, cell):
    clock = [0.0]
    side = ProfileSide(numerics)
    side.load(MODEL, 1)
    slow = side._timed._inner = Slow(side._timed._inner, clock)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    steps = side.time(cell_named(cell), 2)
    maps = 4 * side._model.config.num_hidden_layers + 1
    others = [*(part for part in PARTS if part != "linear"), REST, *(part for part in SPREAD if part != SERIAL)]
    expected = {"seconds": maps, "linear": maps, SERIAL: maps} | dict.fromkeys(others, 0)
    assert steps == [expected] * 2
    assert slow.asked - CONSTANTS <= {operation for operations in PARTS.values() for operation in operations} | {
        "cache_columns"
    }


def test_what_is_serial_is_what_neither_products_nor_the_pieces_of_several_threads_take(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def ticking(function):
        def tick(*arguments):
            clock[0] += 1.0
            return function(*arguments)

        return tick

    for least, spread in ((10**9, False), (1, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lfm2np.arithmetic.pieces.THREADS", 2)
            patch.setattr("lfm2np.arithmetic.pieces.LEAST_PIECE", least)
            for places in FUNCTIONS.values():
                for module, name in places:
                    patch.setattr(module, name, ticking(getattr(module, name)))
            side = ProfileSide("exact")
            side.load(MODEL, 2)
            (step,) = side.time(cell_named("prefill-7"), 1)
        assert step[PRODUCTS] == 4 * side._model.config.num_hidden_layers + 1
        assert (step[PIECES] > 0) == spread
        assert (step[SERIAL] == 2.0) == spread  # the inputs and the products of the head, a single row
        assert sum(step[part] for part in SPREAD) == step["seconds"]


@pytest.mark.parametrize(
    ("cell", "expected"),
    [("prefill-7", 2.0 + 8.0 / 8), ("decode-4x5", 2.0 + 7.0 / 8 + 2 / 4), ("decode-1x5", 3.0 + 7.0 / 8)],
)
def test_a_step_on_more_cores_is_its_serial_part_and_a_share_of_the_rest(cell, expected):
    times = CellTimes(cell_named(cell))
    parts = {"products": 4.0, "attention by request": 1.0, "pieces": 3.0, "serial": 2.0}
    for side in ("profile-exact", "floor-float64"):
        times.add(side, {"steps": [{"seconds": 10.0, "linear": 4.0, REST: 6.0, **parts}], "peak_bytes": 1})
    profiled = profile.Profile("exact", 2, Measured([times]))
    (spread,) = profile.as_json(profiled)["spread"]
    assert spread["serial_share"] == 0.2
    assert spread["milliseconds_on_cores"][16] == 1000 * expected
    assert f"{1000 * expected:.1f}" in profile.as_text(profiled)


def test_in_exact_each_way_is_tried_before_a_decode_is_timed(monkeypatch):
    monkeypatch.setattr(fastest, "found", {})
    monkeypatch.setattr(fastest, "MEASURED", True)
    monkeypatch.setattr(fastest, "HOPELESS", 10.0**9)
    monkeypatch.setattr(exact, "LEAST_WEIGHTS", 1)
    side = EngineSide("exact")
    side.load(MODEL, 1)
    assert len(side.time(cell_named("decode-2x5"), 1)) == 1
    config = side._model.config
    head = fastest.found[2, config.vocab_size * side._model.weights.head.grid.slices, config.hidden_size, 1]
    assert [len(tries) for tries in head.values()] == [fastest.TRIES] * 2
