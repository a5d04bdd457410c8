"""The parts of a step add up to it, and none of its operations is missing."""

from pathlib import Path

import pytest

from lfm2np.bench.sides.cells import cell_named
from lfm2np.bench.sides.profile_side import PARTS, REST, ProfileSide

MODEL = Path(__file__).parent.parent.parent / "fixtures" / "torture" / "minimal_config"
CONSTANTS = {"name", "longest_context"}


class Slow:
    """An arithmetic that notes what it is asked for; a linear map takes a second of a clock that stands still else."""

    def __init__(self, inner, clock):
        self.inner, self.clock, self.asked = inner, clock, set()

    def __getattr__(self, name):
        self.asked.add(name)
        found = getattr(self.inner, name)
        if name != "linear":
            return found

        def linear(*arguments):
            self.clock[0] += 1.0
            return found(*arguments)

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
    expected = {"seconds": maps, "linear": maps} | dict.fromkeys(
        [*(part for part in PARTS if part != "linear"), REST], 0
    )
    assert steps == [expected] * 2
    assert slow.asked - CONSTANTS <= {one for operations in PARTS.values() for one in operations} | {"cache_columns"}
