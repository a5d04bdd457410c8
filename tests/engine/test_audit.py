"""What the engine's own check trusts: the contents of a prefix are those of the sequence that begins with it."""

from pathlib import Path

import numpy as np
import pytest

import lfm2np
from lfm2np.checkpoint.loaded import hand_fixture
from lfm2np.suite.audit import MOST_KNOWN, AuditedEngine, expected_cache

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = ["trained", *sorted(f"torture/{path.name}" for path in (FIXTURES / "torture").iterdir())]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_prefix_demands_is_the_beginning_of_what_a_longer_sequence_demands(name: str):
    model = lfm2np.load(FIXTURES / name)
    ids = np.random.default_rng(5).integers(0, model.config.vocab_size, 40).tolist()
    entries, columns = expected_cache(model, ids)
    whole = [array for layer in entries for array in layer] + columns
    for length in (1, 2, 3, 17, 39):
        entries, columns = expected_cache(model, ids[:length])
        alone = [array for layer in entries for array in layer] + columns
        assert [logits.tobytes() for logits in alone] == [logits[:length].tobytes() for logits in whole]


@pytest.mark.slow
def test_an_engine_keeps_a_bounded_number_of_sequences():
    engine = AuditedEngine(lfm2np.load(hand_fixture()), block_size=1, num_blocks=200)
    for name in range(MOST_KNOWN // 3):
        engine.add_request(
            str(name), [1, 2 + name % 8, 2 + name // 8], lfm2np.SamplingParams(n=3, max_tokens=9, temperature=3.0)
        )
    list(engine.stream())
    assert len(engine.audit._known) == MOST_KNOWN
