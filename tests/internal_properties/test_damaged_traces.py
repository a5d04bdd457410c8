"""Every damage that the suite does to a trace changes it, also in a step that schedules nothing."""

import pytest

from internal_properties.misuse import DAMAGES, damaged_traces
from lfm2np.conformance.again import Request, SamplingParams, Scenario, TinyModel

# The second step comes after the only request has ended.
ENDED = Scenario(
    model=TinyModel(heads=1),
    requests=(Request("a", (3,), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)),),
    sizes={"block_size": 2, "num_blocks": 11},
    ops=(("add", 0), ("step",), ("step",)),
)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("damage", [one for one in DAMAGES if one != "missing"])
def test_a_step_that_schedules_nothing_can_be_damaged_too(damage: str, step: int):
    damaged_traces((ENDED, step, damage))
