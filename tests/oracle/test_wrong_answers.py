"""An answer that is cut, or does not end at its stop string, is wrong whatever brings it; a right one never is."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import wrong_answers
from engines import Changed, known_of

from lfm2np.engine.loading import Model
from lfm2np.oracle.check import Checked, check, judged
from lfm2np.oracle.engines.exec_target import ExecTarget
from lfm2np.oracle.engines.file_target import FileTarget, Transcript
from lfm2np.oracle.engines.http_target import HttpTarget
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.oracle.engines.target import Target
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.sending import send_all

pytestmark = [pytest.mark.rounding, pytest.mark.slow]

SHORT, STOPS = ("short-prompts",), ("stops",)
EXACT, BUG, INCONCLUSIVE = Verdict.EXACT, Verdict.BUG, Verdict.INCONCLUSIVE
TABLE: dict[str, tuple[tuple[str, ...], Verdict, str]] = {  # the way: cases, verdict, what it names
    "right": (SHORT + STOPS, EXACT, ""),
    "no-reason": (SHORT, EXACT, ""),
    "early-stop": (SHORT, EXACT, ""),
    "aborted": (SHORT, BUG, "finish_reason 'abort'"),
    "cut-abort": (SHORT, BUG, "finish_reason 'abort' after 8 of 16 tokens"),
    "cut-length": (SHORT, BUG, "finish_reason 'length' after 8 of 16 tokens"),
    "cut-filter": (SHORT, BUG, "finish_reason 'content_filter'"),
    "cut-none": (SHORT, INCONCLUSIVE, "finish_reason None after 8 of 16 tokens"),
    "error": (SHORT, INCONCLUSIVE, "finish_reason error"),
    "ignores-stops": (STOPS, BUG, "stop string"),
    "ignores-stops-without-text": (STOPS, BUG, "stop string"),
    "left-in-the-text": (STOPS, BUG, "stop string"),
    "only-the-text-ends": (STOPS, BUG, "stop string"),
    "one-token-more": (STOPS, BUG, "stop string"),
    "refuses-stops": (SHORT + STOPS, EXACT, ""),
    "lacks-stops": (SHORT + STOPS, EXACT, ""),
}
UNTESTED = ("refuses-stops", "lacks-stops")
SERVED = ("right", "no-reason", *(f"cut-{way}" for way in ("abort", "length", "filter", "none")), "ignores-stops")
PROCESSES = ("right", "cut-length", "ignores-stops", "lacks-stops")  # the others are slower to start than to judge


@contextlib.contextmanager
def target_of(route: str, way: str, model: Model) -> Iterator[Target]:
    with contextlib.ExitStack() as stack:
        if route == "http":
            target: Target = HttpTarget(stack.enter_context(wrong_answers.serving(way)), model.tokenizer, at_once=4)
        elif route == "exec":
            command = shlex.join([sys.executable, wrong_answers.__file__, way])
            target = ExecTarget(command, model.path, model.config.vocab_size)
        else:
            target = PythonTarget(lambda path, sizes: wrong_answers.Wrong(way), model.path, at_once=4)
        stack.callback(target.close)
        yield target


def require(result: Checked, way: str) -> None:
    _, verdict, words = TABLE[way]
    assert result.total.verdict is verdict, (way, result.total.reasons)
    assert any(words in reason for reason in result.total.reasons), result.total.reasons
    assert "stops" not in TABLE[way][0] or ("stop strings" in result.not_tested) == (way in UNTESTED)


@pytest.mark.parametrize(
    ("route", "way"),
    [
        *(("python", way) for way in TABLE),
        *(("http", way) for way in (*SERVED, *UNTESTED)),
        *(("exec", way) for way in PROCESSES),
    ],
)
def test_an_answer_that_does_not_end_where_it_should_is_wrong_over_every_route(
    model: Model, tmp_path: Path, route: str, way: str
) -> None:
    with target_of(route, way, model) as target, Transcript(tmp_path / "answers.jsonl") as transcript:
        asked = send_all(model, target, 4, cases=TABLE[way][0], transcript=transcript)
    require(judged(model, asked.abilities, "float32", asked.pairs, known=known_of(model)), way)
    recorded = FileTarget(tmp_path / "answers.jsonl")
    require(judged(model, recorded.probe(), "float32", recorded.pairs(), known=known_of(model)), way)


def test_a_wrong_stop_is_repeated_by_itself_and_said_to_come_and_go(model: Model) -> None:
    """Requests with stop strings had the order, place and company of the requests that they come from."""
    results = {}
    for way in ("ignores-stops", "ignores-every-other-stop"):
        with target_of("python", way, model) as target:
            results[way] = check(model, target, "float32", cases=("stops",), at_once=4)
    always, sometimes = results.values()
    requests = [request for request, _ in always.pairs]
    stopped = [request for request in requests if request.stop]
    assert len(stopped) == 3 == len(always.repeats) and len({request.tags["order"] for request in requests}) == len(
        requests
    )
    for request in stopped:
        place = {"place": 0, "together": 1, "beside": False, "seen": len(request.prompt_token_ids)}
        assert place.items() <= request.tags.items()
    assert [(each.failed, each.times, each.failed_alone) for each in always.repeats] == [(5, 5, None)] * 3
    assert always.total.verdict is sometimes.total.verdict is BUG
    assert not any("not deterministic" in reason for reason in always.total.reasons)
    assert "not deterministic" in sometimes.total.reasons[0] and "stop string" in sometimes.total.reasons[1]


def test_texts_that_are_wrong_each_time_do_not_come_and_go(model: Model) -> None:
    """Of stop strings, too, whose repeats are compared with the plain answers: those are refuted."""

    def without_its_blank(request: Request, answer: Answer) -> Answer:
        return replace(answer, text=(answer.text or "").removeprefix(" "))

    result = check(model, Changed(model, without_its_blank), "float32", cases=(*SHORT, *STOPS), at_once=4)
    assert result.total.verdict is BUG and any(answer.is_refuted for request, answer in result.pairs if request.stop)
    assert not any("not deterministic" in reason for reason in result.total.reasons)
