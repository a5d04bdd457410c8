"""The suite on engines that round: what their number format explains is no failure, and bugs still are."""

import contextlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from faults import inject

from lfm2np.errors import RequestError
from lfm2np.oracle.judging.formats import FORMATS
from lfm2np.suite import adapters
from lfm2np.suite.again import Request, SamplingParams, Scenario, TinyModel
from lfm2np.suite.catalogue import by_id
from lfm2np.suite.plugin import NUMBER_FORMATS
from lfm2np.suite.properties.driver import generate
from lfm2np.suite.properties.property import Violation
from lfm2np.suite.properties.rounding import Rounding, require_explained, require_rounded_scores
from lfm2np.suite.runner import met, run_property
from lfm2np.suite.strategies.tiny_models import loaded

pytestmark = pytest.mark.rounding

BFLOAT16 = Rounding(adapters.own_bfloat16, "bfloat16")
PLAIN = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
SCENARIO = Scenario(TinyModel(layers="ccAc"), (Request("a", (3, 4, 5, 3), PLAIN), Request("b", (5, 4), PLAIN)))


def test_without_a_format_it_is_not_equal_to_the_reference():
    for name in ("equals-reference", "every-schedule"):
        assert run_property(by_id(name), adapters.own_bfloat16, "quick", shrink=False).status == "failed"


SEEN = [  # a fault, and the property that sees it; without one, another format than the declared
    ("slot-index-wraps-modulo-2", "equals-reference"),
    ("parent-key-not-hashed", "every-schedule"),
    ("fork-does-not-copy-the-state", "every-schedule"),
    ("short-chunk-leaves-the-state-one-behind", "equals-reference"),
    ("rejected-drafts-stay-in-the-state", "speculative-is-plain"),
    *(("", name) for name in ("equals-reference", "every-schedule", "scores")),
]


@pytest.mark.night
@pytest.mark.parametrize(("fault", "name"), SEEN)
def test_bugs_and_another_format_are_seen_beyond_the_noise(fault, name):
    engine = BFLOAT16 if fault else Rounding(adapters.own_bfloat16, "float32")
    with inject(fault) if fault else contextlib.nullcontext():
        result = run_property(by_id(name), engine, "ci", shrink=False)
    assert result.status == "failed"
    assert f"times the noise of {'bfloat16' if fault else 'float32'}" in result.message


@pytest.mark.slow
def test_wrong_answers_are_named():
    answers = generate(adapters.own, SCENARIO).completions
    said = [
        (request.request_id, request.prompt_token_ids, answers[request.request_id][0]) for request in SCENARIO.requests
    ]
    require_explained("float32", SCENARIO.model, said)
    name, prompt, answer = said[1]
    ids, logprobs = answer.token_ids, answer.logprobs
    other = (*ids[:2], (ids[2] + 1) % 24, *ids[3:])
    for wrong, words in (
        (replace(answer, token_ids=other, logprobs=None), r"b, output token 2: \d+, but the oracle's is .* of float32"),
        (
            replace(answer, logprobs=(*logprobs[:4], logprobs[4] - 0.01, logprobs[5])),
            r"b, output token 4: token \d+ .* off by -0.01 nat: .* the noise",
        ),
        (
            replace(answer, prompt_logprobs=(answer.prompt_logprobs[0] + 0.01,)),
            r"b, prompt token 1: token \d+ .* off by \+0.01 nat: ",
        ),
        (replace(answer, logprobs=logprobs[:5]), "b: logprobs: 5 entries for 6 token_ids"),
        (adapters.Answer((24,)), r"token_ids\[0\] 24: expected 0 to 23"),
    ):
        with pytest.raises(Violation, match=words):
            require_explained("float32", SCENARIO.model, [said[0], (name, prompt, wrong)])


def test_scores_are_judged():
    model, ids = SCENARIO.model, (3, 4, 5, 5, 3)
    scores = [score.logprob for score in loaded(model).score(ids)]
    require_rounded_scores("float32", model, ids, scores)
    with pytest.raises(Violation, match="score, prompt token 3: token 5 with a log-probability that is off by"):
        require_rounded_scores("float32", model, ids, [*scores[:2], scores[2] + 0.01, scores[3]])


def test_what_no_format_lets_judge_is_said_never_to_be_sent():
    """Pinned: an engine that ignored penalties passed, and nothing said that none was sent."""
    words = "penalties, biases, masks, filters, min_tokens: with --number-format none are sent"
    assert words in met(BFLOAT16).partition("; never: ")[2]
    assert words not in met(adapters.own)


def test_formats_of_a_small_range_are_not_asked_to_overflow():
    result = run_property(by_id("overflow-stays-home"), Rounding(adapters.own_float32, "float16"), "quick")
    assert (result.status, result.message) == ("skipped", "overflow: not judged where an engine computes in float16")
    with pytest.raises(RequestError, match=re.escape("format 'fp8': expected one of float32")):
        Rounding(adapters.own, "fp8")


class Short(adapters.Rounded):
    """Beside others a request gets its first token only, or none, and nothing says why."""

    kept = 1

    def generate(self, requests):
        answers = self._engine.generate(requests)
        if len(requests) == 1:
            return answers
        return [[adapters.Answer(completion.token_ids[: self.kept]) for completion in each] for each in answers]


@pytest.mark.parametrize("kept", [0, 1])
def test_answers_that_break_off_are_no_rounding(kept, monkeypatch):
    monkeypatch.setattr(Short, "kept", kept)
    together = Rounding(lambda model, sizes: Short(adapters.Own(adapters.load_once(Path(model)), sizes)), "float32")
    with pytest.raises(Violation, match=rf"request a: ended after {kept} tokens \(None\), max_tokens is 6"):
        by_id("equals-reference").check(together, SCENARIO)


@pytest.mark.night
def test_the_plugin_takes_a_format(tmp_path: Path):
    def plugin(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "lfm2np.suite", *arguments]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)

    engine = ("--engine", "lfm2np.suite.adapters:own_bfloat16", "-k", "equals-reference or memory-is", "-rs")
    ended = plugin(*engine, "--number-format", "bfloat16")
    assert ended.returncode == 0, ended.stdout
    assert "1 passed, 1 skipped" in ended.stdout
    assert plugin(*engine).returncode == 1
    ended = plugin(*engine, "--number-format", "fp8")
    assert ended.returncode == 4
    assert "invalid choice: 'fp8'" in ended.stderr
    assert tuple(FORMATS) == NUMBER_FORMATS
