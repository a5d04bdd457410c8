"""What the requests of several dialects share."""

from __future__ import annotations

from typing import Any

from lfm2np.oracle.targets.dialects.dialect import Extras
from lfm2np.oracle.targets.records import Ask

GREEDY = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def is_cold(ask: Ask) -> bool:
    """Whether no cached prefix may be used."""
    return bool(ask.factors.get("cold", False))


def stop_and_seed(ask: Ask) -> dict[str, Any]:
    """In the names that OpenAI, SGLang and llama.cpp share."""
    seed = {} if ask.seed is None else {"temperature": 1.0, "seed": ask.seed}
    return seed if ask.stop is None else {**seed, "stop": [ask.stop]}


def model_field(extras: Extras) -> dict[str, Any]:
    return {} if extras.model is None else {"model": extras.model}
