"""This package's network against plain.py, which shares no code with it: what the reference and the engine share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import plain
from hypothesis import strategies as st

from internal_properties.internal import internal
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.engines.records import Request
from lfm2np.suite.adapters import own
from lfm2np.suite.catalogue import sequences
from lfm2np.suite.properties.driver import make
from lfm2np.suite.properties.property import Violation
from lfm2np.suite.strategies.lengths import Lengths
from lfm2np.suite.strategies.tiny_models import TinyModel, checkpoint

PLAIN_LENGTH = 128  # it is in plain Python
TOLERANCE = 1e-4  # of the largest logit: float32 activations against float64, where a wrong formula is off by tenths
LEAST_MARGIN = 1e-4  # of an expert's score, between 0 and 1


def short_sequences(lengths: Lengths | None = None) -> st.SearchStrategy[tuple[Any, ...]]:
    return sequences(lengths and replace(lengths, longest=min(lengths.longest, PLAIN_LENGTH)))


@internal(
    "is-lfm2",
    "What is scored, generated and said of its log-probabilities is that of a second implementation in float64.",
    2,
    short_sequences,
    weight=3.0,
    at_length=True,
    bugs=("ollama37 437", "llama.cpp 17548", "mlx-lm 908"),
)
def is_lfm2(example: tuple[TinyModel, tuple[int, ...]]) -> None:
    """What an engine generates comes by another way through its code than what it scores."""
    model, ids = example
    rows, tolerance = plain_logits(model, ids)
    require_near(rows, tolerance, ids, make(own, model, {}).score(ids))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    ((answer,),) = make(own, model, {}).generate([Request("a", ids, params)])
    for last in rows[len(ids) - 1 :]:
        if not last[answer.ids[0]] >= max(last) - 2 * tolerance:
            raise Violation(f"token {answer.ids[0]}: its logit is below the largest of LFM2, {max(last)}")
    require_near(rows, tolerance, (*ids, *answer.ids), (*answer.prompt_logprobs, *answer.logprobs))


def plain_logits(model: TinyModel, ids: Sequence[int]) -> tuple[list[list[float]], float]:
    """Logits [T][V] by plain.py, and how far a log-probability may be off them.

    Rows end before the first where float32 may choose another expert: which that is, the other properties demand.
    """
    rows, margins = plain.logits_and_margins(*plain.read_checkpoint(checkpoint(model)), ids)
    certain = next((row for row, margin in enumerate(margins) if margin < LEAST_MARGIN), len(rows))
    return rows[:certain], TOLERANCE * max(1.0, max(abs(value) for row in rows for value in row))


def require_near(rows: list[list[float]], tolerance: float, ids: Sequence[int], scores: Sequence[float]) -> None:
    """Scores of all tokens but the first, as far as there are rows [T][V] of logits before them."""
    for position, (score, row) in enumerate(zip(scores, rows, strict=False), start=1):
        expected = plain.log_softmax(row)[ids[position]]
        if not abs(score - expected) <= tolerance:
            raise Violation(f"token {position + 1}: log-probability {score:.6f}, LFM2 has {expected:.6f}")
