"""An engine that computes exactly, or in another arithmetic, and sends its tokens where it is told."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.engine.loading import Model
from lfm2np.oracle.check import fitting
from lfm2np.oracle.engines.records import Answer, Pair, greedy
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.routes import OWN, margins, routed, swapped
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.verdict import Position, Verdict
from lfm2np.oracle.total import total
from lfm2np.truth import reference

TORTURE = Path(__file__).parents[3] / "fixtures" / "torture"
PROMPT = (3, 17, 5, 29, 11, 8, 40, 2, 19, 33, 6, 21)
NEW = 6


def said(model: Model, given: np.ndarray | None = None, tells: bool = True, numerics: Any = None) -> Pair:
    """What an engine says that computes exactly, or in another arithmetic, and sends its tokens where it is given."""
    request, answer = (
        said_by_the_right(model) if given is None and numerics is None else computed(model, given, numerics)
    )
    return request, answer if tells else replace(answer, routes=None)


@cache
def said_by_the_right(model: Model) -> Pair:
    return computed(model, None, None)


def computed(model: Model, given: np.ndarray | None, numerics: Any) -> Pair:
    ids = list(PROMPT)
    for _ in range(NEW):
        own = None if given is None else given[: len(ids)]
        arithmetic, kept = routed(numerics or model.numerics, own)
        states = reference.hidden_states(weights_under(model, numerics), model.config, arithmetic, ids)
        logits = reference.output_logits(weights_under(model, numerics), arithmetic, states)
        ids.append(int(np.argmax(logits[-1])))
    logprobs = arithmetic.log_softmax(logits)
    rows = range(len(PROMPT) - 1, len(ids) - 1)
    answer = Answer(
        token_ids=tuple(ids[len(PROMPT) :]),
        logprobs=tuple(float(logprobs[row, ids[row + 1]]) for row in rows),
        prompt_logprobs=tuple(float(logprobs[row, ids[row + 1]]) for row in range(len(PROMPT) - 1)),
        routes=tuple(tuple(map(tuple, of)) for of in kept.chosen().tolist()),
    )
    factors = {"length": len(PROMPT)}
    return greedy("a", PROMPT, NEW, case="short-prompts", prompt_logprobs=0, tags=factors), answer


@cache
def weights_under(model: Model, numerics: Any) -> Any:
    if numerics is None:
        return model.weights
    return prepare_weights(open_checkpoint(model.path, model.config), model.config, numerics)


def own_routes(model: Model) -> np.ndarray:
    """[T, L, K] of the exact network on its own answer."""
    _, answer = said(model)
    return np.array(answer.routes)


def with_swap(model: Model, row: int, layer: int, scores: np.ndarray) -> np.ndarray:
    """Its routes with one changed; behind it the network's own choice."""
    routes = own_routes(model)
    routes[row, layer] = swapped(scores, routes[row, layer])
    routes[row, layer + 1 :] = OWN
    routes[row + 1 :] = OWN
    return routes


def judged(model: Model, pair: Pair, name: str = "float32") -> tuple[list[Position], Verdict]:
    request, answer = pair
    checked = fitting(request, answer, model.config)
    assert checked.error is None
    known = Known()
    positions = judge(model, name, [(request, checked)], known=known)
    return positions, total(model, name, [(request, checked)], positions, known=known).verdict


def ties(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Of the exact network's own answer the margins [T, L] under float32, and the scores [T, L, N]."""
    request, answer = said(model)
    known = Known()
    judge(model, "float32", [(request, replace(answer, routes=None))], known=known)
    ((spoken, truth),) = known.truths.items()
    squares = known.noises["float32", spoken].squares
    assert truth.preferred is not None and squares is not None and model.config.mixture is not None
    return margins(truth.preferred, squares, model.config.mixture.num_experts_per_tok), truth.preferred


def as_tuples(routes: np.ndarray) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(map(tuple, of)) for of in routes.tolist())
