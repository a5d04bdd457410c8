"""Alternatives have to be the likeliest tokens, besides having the right values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from lfm2np.engine.loading import Model
from lfm2np.oracle.check import judged
from lfm2np.oracle.engines.records import Answer, Pair, changed, greedy
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging.verdict import Verdict

pytestmark = [pytest.mark.rounding, pytest.mark.usefixtures("without_constants")]

PROMPTS = ((1, 50, 60, 70), (9, 20, 77), (300, 4))
Order = Callable[[np.ndarray, int], list[int]]  # ids, the likeliest first, and the token -> those that are listed


def answered(model: Model, listed: Order, sampled: bool = False) -> list[Pair]:
    """Answers of two tokens with exact values; sampled ones have tokens that are far from the likeliest."""
    pairs = []
    for number, prompt in enumerate(PROMPTS):
        ids, logprobs, tops = list(prompt), [], []
        for _ in range(2):
            row = np.asarray(model.logits(ids)[-1], np.float64)
            row -= row.max() + np.log(np.exp(row - row.max()).sum())
            order = np.argsort(-row, kind="stable")
            token = int(order[100 if sampled else 0])
            ids.append(token)
            logprobs.append(float(row[token]))
            tops.append({each: float(row[each]) for each in listed(order, token)})
        request = changed(greedy(str(number), prompt, 2), temperature=1.0 if sampled else 0.0)
        pairs.append((request, Answer(tuple(ids[len(prompt) :]), tuple(logprobs), tuple(tops))))
    return pairs


def verdict_on(model: Model, pairs: list[Pair]) -> tuple[Verdict, str]:
    total = judged(model, Abilities("written here"), "float32", pairs).total
    return total.verdict, " ".join(total.reasons)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    "listed",
    [
        lambda order, token: order[:5].tolist(),
        lambda order, token: [*order[:5].tolist(), token],
        lambda order, token: [token],
        lambda order, token: [*order[:4].tolist(), token],
    ],
)
def test_the_likeliest_are_right_with_the_token_or_without_it(model: Model, listed: Order, sampled: bool) -> None:
    assert verdict_on(model, answered(model, listed, sampled))[0] is Verdict.EXACT


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (lambda order, token: order[-5:].tolist(), "and lack "),
        (lambda order, token: [token, *order[2:6].tolist()], "top_logprobs of new token 1 have token "),
        (lambda order, token: [*order[:4].tolist(), int(order[30])], "which is likelier by "),
    ],
)
def test_others_than_the_likeliest_are_wrong_whatever_their_values(model: Model, listed: Order, words: str) -> None:
    verdict, reasons = verdict_on(model, answered(model, listed))
    assert verdict is Verdict.BUG and words in reasons


def test_wrong_values_are_the_cause_where_they_are_wrong(model: Model) -> None:
    pairs = answered(model, lambda order, token: order[2:7].tolist())
    pairs = [
        (request, replace(answer, logprobs=tuple(value - 1.0 for value in answer.logprobs or ())))
        for request, answer in pairs
    ]
    verdict, reasons = verdict_on(model, pairs)
    assert verdict is not Verdict.EXACT and "top_logprobs" not in reasons
