"""The mixture of experts against transformers' Lfm2Moe: every way it computes experts, in float64 and in float32.

Its default, grouped_mm, refuses float64; "eager" is the loop of the modelling file.
"""

from __future__ import annotations

from pathlib import Path

import make_goldens
import numpy as np
import pytest
import torch
from golden_routes import DECIDED, differing, sparse_blocks

import lfm2np

pytestmark = pytest.mark.peers

WAYS = ("eager", "grouped_mm", "batched_mm")
DIRECTORIES = [
    path for path in make_goldens.fixture_directories() if '"lfm2_moe"' in (path / "config.json").read_text()
]
by_fixture = pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)


def golden(directory: Path) -> make_goldens.Golden:
    return make_goldens.read_golden(make_goldens.FIXTURES / "goldens" / f"{directory.name}.safetensors")[0]


def numbered(golden: make_goldens.Golden, kind: str) -> list[np.ndarray]:
    """Its arrays of one kind, prompt by prompt."""
    return [golden[f"{kind}_{i}"] for i in range(sum(name.startswith("prompt_") for name in golden))]


@by_fixture
@pytest.mark.parametrize("way", WAYS)
def test_exact_is_nearer_to_float64_than_transformers_in_float32_and_chooses_as_it_does(
    directory: Path, way: str
) -> None:
    """Whichever way that computes experts. Measured: 0.46 to 0.93 of its largest error."""
    known = golden(directory)
    ours, theirs = [], []
    model = lfm2np.load(directory)
    everything = zip(*(numbered(known, kind) for kind in ("prompt", "float64", "experts", "margins")), strict=True)
    for ids, wide, experts, margins in everything:
        logits, chosen = make_goldens.peer_run(directory, ids.tolist(), torch.float32, experts=way)
        assert chosen is not None
        assert differing(chosen[0], experts, margins, DECIDED) == 0
        theirs.append(make_goldens.distance(logits.astype(np.float64), wide))
        ours.append(make_goldens.distance(model.logits(ids.tolist()).astype(np.float64), wide))
    assert max(ours) <= max(theirs) < 1e-4


@by_fixture
def test_eager_and_batched_experts_are_the_same_in_float64(directory: Path) -> None:
    for ids in numbered(golden(directory), "prompt"):
        eager, batched = (
            make_goldens.peer_run(directory, ids.tolist(), torch.float64, True, way)[0]
            for way in ("eager", "batched_mm")
        )
        assert make_goldens.distance(eager, batched) < 1e-12


def test_grouped_experts_still_refuse_float64() -> None:
    """Why the goldens ask for another way; once it does not, they may take the default."""
    with pytest.raises(RuntimeError, match="Float32, BFloat16 or Float16"):
        make_goldens.peer_run(DIRECTORIES[0], [1, 2, 3], torch.float64, experts="grouped_mm")


@by_fixture
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bias_of_experts_stays_float32_in_a_narrower_model(directory: Path, dtype: torch.dtype) -> None:
    blocks = sparse_blocks(make_goldens.load_peer(directory, dtype))
    assert blocks
    for block in blocks:
        assert block.gate.weight.dtype == block.experts.down_proj.dtype == dtype
        assert not block.use_expert_bias or block.expert_bias.dtype == torch.float32
