"""The sizes of an engine around which the questions lie: as given, as it reports once it is made, as the model has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lfm2np.oracle.engines.records import Answer
from lfm2np.suite.itself.questions import Sizes
from lfm2np.suite.itself.target_engine import BLOCK, CHUNK, LONGEST, SLOTS, Options, asking_of

VOCAB = 300


class Silent:
    """Reports no size."""

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        self.hints = sizes

    def generate(self, requests: Any) -> list[list[Answer]]:
        return [[Answer((9,) * request.max_tokens, finish_reason="length")] for request in requests]


class Heeds(Silent):
    """Has smaller chunks than any hint, and reports them."""

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        super().__init__(model, sizes)
        self.sizes = {"block_size": 8, "max_num_batched_tokens": min(64, sizes["max_num_batched_tokens"])}


class Short(Heeds):
    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        super().__init__(model, sizes)
        self.sizes["max_model_len"] = 100


CASES: dict[str, tuple[str, dict[str, int | None], object, Sizes]] = {  # engine, given, positions of config.json
    "nothing": ("Silent", {}, None, Sizes(BLOCK, CHUNK, SLOTS, LONGEST, VOCAB)),
    "the model's context": ("Silent", {}, 1024, Sizes(BLOCK, CHUNK, SLOTS, 1024, VOCAB)),
    "a longer context": ("Silent", {}, 128_000, Sizes(BLOCK, CHUNK, SLOTS, LONGEST, VOCAB)),
    "a context that is none": ("Silent", {}, "long", Sizes(BLOCK, CHUNK, SLOTS, LONGEST, VOCAB)),
    "reported": ("Heeds", {}, 1024, Sizes(8, 64, SLOTS, 1024, VOCAB)),
    "reported, and a context": ("Short", {}, 1024, Sizes(8, 64, SLOTS, 100, VOCAB)),
    "given": (
        "Heeds",
        {"block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 2, "max_model_len": 36},
        1024,
        Sizes(4, 12, 2, 36, VOCAB),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_given_counts_then_what_the_engine_reports_then_the_model(name: str, tmp_path: Path) -> None:
    """Pinned: chunks of 512 for an engine that reported 64, and 1,535 tokens for a model of 1,024 positions."""
    engine, given, positions, expected = CASES[name]
    if positions is not None:
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    with asking_of(f"test_target_engine:{engine}", Options(tmp_path, given, VOCAB)) as asking:
        assert asking.sizes == expected
