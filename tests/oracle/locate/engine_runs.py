"""Runs of our own engine whose activations are recorded: what the tests of `locate` put faults into."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from dumps import dump_of

import lfm2np
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.engine.drafters import ScriptedDrafter
from lfm2np.engine.loading import Model
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.recorders.lfm2np_recorder import RecordedEngine

FIXTURES = Path(__file__).parents[3] / "fixtures"
TRAINED, BIASED, UNTIED, LFM3 = "trained", "torture/biased_two_taps", "torture/all_attention", "lfm3"
Recorded = dict[str, np.ndarray]


@cache
def loaded(name: str, numerics: str) -> Model:
    return lfm2np.load(FIXTURES / name, numerics)


def located(
    model: Model, recorded: Recorded, kept: Callable[[str], bool] = lambda name: True, stored: str = "float32"
) -> Report:
    chosen = {name: values for name, values in recorded.items() if name in ("token_ids", "steps") or kept(name)}
    return locate(open_checkpoint(model.path, model.config), model.config, dump_of(chosen, stored))


def up_to(tensor: str) -> Callable[[str], bool]:
    """What to keep if this is to be the first finding: the tensors of its layer and of those before it."""
    last = layer_of(tensor)
    return lambda name: last is None or name == "model.embed_tokens" or layer_of(name, last + 1) <= last


def layer_of(name: str, default: Any = None) -> Any:
    match = re.match(r"model\.layers\.(\d+)", name)
    return int(match[1]) if match else default


def prompt(seed: int, length: int, vocabulary: int = 60) -> list[int]:
    return [int(integer) for integer in np.random.default_rng(seed).integers(10, vocabulary, length)]


def engine(model: Model, **options: object) -> RecordedEngine:
    return RecordedEngine(model, **({"block_size": 4, "prefix_caching": False} | options))


def in_chunks(model: Model) -> RecordedEngine:
    run = engine(model, max_num_batched_tokens=5)
    run.add("a", prompt(1, 13), 5)
    return run


def token_by_token(model: Model) -> RecordedEngine:
    run = engine(model, max_num_batched_tokens=1)
    run.add("a", prompt(1, 6), 3)
    return run


def with_neighbours(model: Model) -> RecordedEngine:
    run = engine(model)
    for index, length in enumerate((9, 5, 7)):
        run.add("abc"[index], prompt(index, length), 2 + 2 * index)
    return run


def one_after_another(model: Model) -> RecordedEngine:
    run = engine(model, max_num_seqs=1)
    for index, length in enumerate((9, 6, 1)):
        run.add("abc"[index], prompt(index + 1, length), 3)
    return run


def after_a_prefix_hit(model: Model) -> RecordedEngine:
    run = engine(model, prefix_caching=True, max_num_batched_tokens=20)
    run.add("a", prompt(9, 8) + prompt(1, 5), 3)
    run.run()
    run.add("b", prompt(9, 8) + prompt(2, 4), 3)
    return run


def with_a_shared_prefix(model: Model) -> RecordedEngine:
    run = engine(model, prefix_caching=True)
    run.add("a", prompt(9, 8) + prompt(1, 5), 3)
    run.add("b", prompt(9, 8) + prompt(2, 4), 3)
    return run


def at_length(model: Model) -> RecordedEngine:
    run = engine(model, block_size=16, max_num_batched_tokens=48)
    run.add("a", prompt(1, 90), 3)
    return run


def sampled_thrice(model: Model) -> RecordedEngine:
    run = engine(model)
    run.add("a", prompt(1, 9), 4, n=3, temperature=2.0, seed=1)
    return run


def with_wrong_drafts(model: Model) -> RecordedEngine:
    run = engine(model, drafter=ScriptedDrafter({"a": prompt(7, 12)}), num_speculative_tokens=3)
    run.add("a", prompt(1, 9), 8)
    return run


# --- past an LFM3's window, of 16 positions


def past_the_window_in_chunks(model: Model) -> RecordedEngine:
    run = engine(model, max_num_batched_tokens=10)
    run.add("a", prompt(1, 33, 44), 12)
    run.add("b", prompt(2, 29, 44), 12)
    return run


def past_the_window_sampled_thrice(model: Model) -> RecordedEngine:
    run = engine(model)
    run.add("a", prompt(1, 26, 44), 6, n=3, temperature=2.0, seed=1)
    return run


def past_the_window_after_a_lost_prefix(model: Model) -> RecordedEngine:
    """The pool of the layers with a window is small: what b would need of its prefix there is gone."""
    run = engine(model, prefix_caching=True, num_window_blocks=14, max_num_batched_tokens=20)
    run.add("a", prompt(9, 24, 44) + prompt(1, 40, 44), 3)
    run.run()
    run.add("b", prompt(9, 24, 44) + prompt(2, 6, 44), 3)
    return run


def rows_of(run: RecordedEngine, request: str) -> Recorded:
    run.run()
    name, _, index = request.partition("#")
    return run.dump(name, int(index or 0))
