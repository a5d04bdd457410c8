"""The runs behind the page: the hand model's, the trained fixture's, and the two broken steps. All are made here and
now, and the same everywhere: exact arithmetic, fixed seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from lfm2np.checkpoint.files import read_tensors
from lfm2np.checkpoint.loaded import hand_fixture
from lfm2np.engine.drafters import NgramDrafter
from lfm2np.engine.loading import Model, load
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.teaching.drawings.runs.leaks import Leak, leak
from lfm2np.teaching.drawings.runs.recorded import Coming, recorded, texts
from lfm2np.teaching.drawings.runs.recorded_run import Run, read_run

HAND_SIZES: dict[str, Any] = {"block_size": 2, "num_blocks": 16, "max_num_batched_tokens": 6, "max_num_seqs": 4}
MAIN_SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 20, "max_num_batched_tokens": 14, "max_num_seqs": 5}
LEAKING = {"a": "copy: red blue ->", "b": "sort: 3 1 2 -> 1 2 3 copy:", "c": "kim has"}
LEAKING_BUDGET = 13  # a and seven tokens of b, then a's decode, the rest of b and all of c


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **more})


def hand_model() -> tuple[Model, list[str], Mapping[str, Any]]:
    """The model, its words, and its weights by name."""
    folder = hand_fixture()
    words: list[str] = json.loads((folder / "words.json").read_text(encoding="utf-8"))
    model = load(folder)
    weights = {name: tensor.array for name, tensor in read_tensors(folder, model.config).items()}
    return model, words, weights


@dataclass(frozen=True)
class Paper:
    """A run of the hand model, with numbers for a pencil."""

    run: Run
    weights: Mapping[str, Any]  # by name in the checkpoint


@cache
def paper() -> Paper:
    """Two requests, and a third that comes in step 2."""
    model, words, weights = hand_model()
    prompts = {
        "a": ("<start> the cat sees", 6, 0),
        "b": ("<start> a red ball", 4, 0),
        "c": ("<start> the dog sees a", 5, 2),
    }
    coming = [
        Coming(name, [words.index(word) for word in text.split()], greedy(most), arrival)
        for name, (text, most, arrival) in prompts.items()
    ]
    return Paper(read_run(recorded(model, coming, words, **HAND_SIZES)), weights)


def main_lines(model: Model) -> list[str]:
    """Everything at once: shared prefixes, two samples of one prompt, drafts, and a pool that is too small."""
    sampled = SamplingParams(temperature=1.0, n=2, seed=3, max_tokens=8, ignore_eos=True)
    coming = [
        Coming("a", prompt(model, "copy: cat dog cat dog ->"), greedy(14)),
        Coming("b", prompt(model, "12+30="), greedy(12)),
        Coming("c", prompt(model, "copy: cat dog cat dog -> cat"), greedy(10), 2),
        Coming("d", prompt(model, "sort: 3 1 2 ->"), greedy(12), 2),
        Coming("e", prompt(model, "ann has a red ball."), sampled, 5),
        Coming("f", prompt(model, "bob has"), greedy(10), 6),
    ]
    return recorded(model, coming, drafter=NgramDrafter(), num_speculative_tokens=2, watermark=0.0, **MAIN_SIZES)


def prompt(model: Model, text: str) -> str | list[int]:
    """The text; without a tokenizer an id of the vocabulary for every two of its bytes, so that equal ones stay equal.

    Two, as the prompts are then about as long as the trained fixture's.
    """
    if model.has_tokenizer:
        return text
    written = text.encode()
    return [sum(written[start : start + 2]) % model.config.vocab_size for start in range(0, len(written), 2)]


def leaking(model: Model) -> Leak:
    """A step with a decode, the rest of a prompt, and a whole prompt."""
    *early, late = LEAKING
    coming = [Coming(name, LEAKING[name], greedy(2), int(name == late)) for name in (*early, late)]
    words = texts(model, (), range(model.config.vocab_size))
    return leak(model, coming, 1, words, num_blocks=64, max_num_batched_tokens=LEAKING_BUDGET)
