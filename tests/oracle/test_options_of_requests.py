"""Wrong engines that only certain requests show: each is right in the plain ones, and wrong in the case made for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from engines import PLENTY, checked_target, chunked, float32, known_of, loaded, own, planted
from faults import Fault, inject

from lfm2np.commands.serve.app import make_app
from lfm2np.commands.serve.server import serving_beside
from lfm2np.commands.serve.settings import Settings
from lfm2np.engine.engine import Engine
from lfm2np.engine.loading import Model
from lfm2np.oracle.check import judged
from lfm2np.oracle.engines.http_target import HttpTarget
from lfm2np.oracle.engines.protocol import Factory
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Request, changed
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.sending import send_all
from lfm2np.oracle.total import Total
from lfm2np.oracle.workloads import HALF
from lfm2np.suite.adapters import Own

pytestmark = [pytest.mark.rounding, pytest.mark.usefixtures("without_constants"), pytest.mark.slow]

OPTIONS = ("unchained", "samples", "temperatures", "streams", "large-steps")


BACK = "np.concatenate([ids[:256], ids[: max(0, len(ids) - 256)]])"
CALLED = "(weights, config, numerics, ids,"
ROWS_READ_BACK = planted("lfm2np.engine.step:forward", CALLED, CALLED.replace("ids", BACK))
ENDS = "*(model.config.eos_token_ids if index else eos)"
FIRST_SAMPLE_GOES_ON = planted("lfm2np.engine.sequence:make_sequences", "*eos", ENDS)
OTHER_TEMPERATURE = planted("lfm2np.engine.sampling.choice:filtered", "/ params.temperature", "/ 1.0")


class Leaking(Own):
    """Draws with parameters that nobody asked for, as servers take them from generation_config.json."""

    def __init__(self, model: Model, sizes: dict[str, Any], **params: Any) -> None:
        super().__init__(model, sizes)
        self.params = params

    def add(self, request: Request) -> None:
        super().add(changed(request, **self.params) if request.is_sampled else request)


def leaking(**params: Any) -> Factory:
    return lambda model, sizes: Leaking(loaded(model, "float32"), {**PLENTY, **sizes}, **params)


WRONG: dict[str, tuple[Factory, str | Fault, str, str]] = {  # engine, fault, case, and what a reason says
    "rows beyond 256 read back": (own("float32", max_num_batched_tokens=64), ROWS_READ_BACK, "large-steps", "further"),
    "a hash without what stands before": (float32, "parent-key-not-hashed", "unchained", "unchained"),
    "samples write to shared keys": (chunked, "shared-block-written-without-a-copy", "samples", "further off"),
    "samples with the same random numbers": (
        float32,
        "same-noise-for-all-samples",
        "samples",
        "the same random numbers",
    ),
    "ignore_eos for the first sample only": (float32, FIRST_SAMPLE_GOES_ON, "samples", "ignore_eos is for all of them"),
    "another temperature": (float32, OTHER_TEMPERATURE, "temperatures", "as if at temperature 1"),
}


@pytest.mark.parametrize(
    ("params", "words"),
    [({"top_p": 0.9}, "as if with top_p 0.9"), ({"min_p": 0.15}, "as if with min_p 0.15"), ({"top_k": 50}, "top_k 40")],
)
def test_a_filter_that_nobody_asked_for_is_named(model: Model, params: dict[str, float], words: str) -> None:
    target = PythonTarget(leaking(**params), model.path)
    result = checked_target(model, target, cases=("seeds", "temperatures"), at_once=8)
    assert result.total.verdict is Verdict.BUG
    assert any(words in reason for reason in result.total.reasons), result.total.reasons


@pytest.mark.parametrize("name", WRONG)
def test_an_engine_that_plain_requests_do_not_show_is_wrong(model: Model, name: str) -> None:
    engine, fault, case, words = WRONG[name]
    with inject(fault):
        plain = checked_target(model, PythonTarget(engine, model.path), cases=("short-prompts",), at_once=8)
        result = checked_target(model, PythonTarget(engine, model.path), cases=(case,), at_once=8)
    assert plain.total.verdict is Verdict.EXACT, plain.total.reasons
    assert result.total.verdict is Verdict.BUG
    assert any(words in reason for reason in result.total.reasons), result.total.reasons


@pytest.mark.parametrize(("form", "engine"), [("exact", "lfm2np.suite.adapters:own"), ("float32", "")])
def test_a_right_engine_is_right_in_all_of_them(model: Model, form: str, engine: str) -> None:
    target = PythonTarget(engine or f"engines:{form}", model.path)
    result = checked_target(model, target, "float32" if engine else form, OPTIONS, at_once=8)
    assert result.total.verdict is Verdict.EXACT, result.total.reasons
    assert {request.case for request, _ in result.pairs} == {*OPTIONS} - {"streams"}
    assert "streamed answers (stream: true)" in result.not_tested
    assert {request.params.n for request, _ in result.pairs} == {1, 3}


# --- over HTTP


@contextmanager
def served(model: Model) -> Iterator[str]:
    options: dict[str, Any] = {"num_blocks": 400, "max_num_seqs": 8}
    app = make_app(Engine(loaded(str(model.path), "float32"), **options), Settings("trained"))
    with serving_beside(app) as port:
        yield f"http://127.0.0.1:{port}"


def shifted(model: Model, request: Request, answer: Answer) -> Answer:
    """Each event has the log-probability of the token before it."""
    if not request.streamed:
        return answer
    logprobs, tops = answer.logprobs or (), answer.top_logprobs or ()
    return replace(answer, logprobs=(logprobs[0], *logprobs[:-1]), top_logprobs=(tops[0], *tops[:-1]))


def broken(model: Model, request: Request, answer: Answer) -> Answer:
    """Each event's text is that of its own tokens."""
    texts = [model.tokenizer.decode([token]) for token in answer.token_ids or ()]
    return replace(answer, text="".join(texts)) if request.streamed else answer


def cooled(model: Model, request: Request, answer: Answer) -> Answer:
    """The alternatives after temperature, the chosen token's before it."""
    if request.params.temperature != HALF:
        return answer
    tops = []
    for top in answer.top_logprobs or ():
        total = math.log(math.fsum(math.exp(value / HALF) for value in top.values()))
        tops.append({token: value / HALF - total for token, value in top.items()})
    return replace(answer, top_logprobs=tuple(tops))


Change = Callable[[Model, Request, Answer], Answer]
CHANGES: dict[str, tuple[Change, str, str]] = {
    "log-probabilities of a stream shifted": (shifted, "streams", "in streamed requests"),
    "characters broken in a stream": (broken, "streams", "streamed text"),
    "alternatives after temperature": (cooled, "temperatures", "tokens have two log-probabilities"),
}


def test_servers_that_are_wrong_in_streams_and_temperatures_are_seen(model: Model) -> None:
    """One right server; its answers are changed as a wrong one would give them."""
    cases = ("short-prompts", "streams", "samples", "temperatures")
    with served(model) as url, closing(HttpTarget(url, model.tokenizer)) as target:
        asked = send_all(model, target, 8, cases=cases)
    assert {request.case for request, _ in asked.pairs} == {*cases}

    def verdict(change: Change, cases: Sequence[str]) -> Total:
        pairs = [(request, change(model, request, answer)) for request, answer in asked.pairs if request.case in cases]
        return judged(model, asked.abilities, "float32", pairs, known=known_of(model)).total

    assert verdict(lambda model, request, answer: answer, cases).verdict is Verdict.EXACT
    for name, (change, case, names) in CHANGES.items():
        result = verdict(change, (case,))
        assert verdict(change, ("short-prompts", "samples")).verdict is Verdict.EXACT, name
        assert result.verdict is Verdict.BUG, name
        assert any(names in reason for reason in result.reasons), (name, result.reasons)
