"""Scripts of the vector sets: run by a small engine with states of its own, right and with bugs of real engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vector_sets import packaged, trained

from lfm2np.oracle import vectors_plain
from lfm2np.oracle.vectors.scripts import SCRIPTS
from lfm2np.teaching import nano
from lfm2np.teaching.tutorial import Wrong

pytestmark = pytest.mark.slow

Json = dict[str, Any]
Rows = Callable[[Json], np.ndarray]  # log-probabilities [T, V] of a row's tokens


def answers_of(script: Json, move: Callable[[Json], None], compute: Rows) -> list[Json]:
    """As an engine's author writes it: all reads in the order of the steps."""
    answers: dict[str, Json] = {}
    for step in script["steps"]:
        for what in step["moves"]:
            move(what)
        for row in step["rows"]:
            logprobs = compute(row)
            blank = {"id": row["id"], "script": script["id"], "token_ids": [], "logprobs": []}
            answer = answers.setdefault(row["id"], blank)
            for offset, position in row["reads"]:
                assert position == len(answer["token_ids"])  # each once, in order
                answer["token_ids"].append(int(logprobs[offset].argmax()))
                answer["logprobs"].append(float(logprobs[offset].max()))
    return list(answers.values())


def judged(answers: list[Json]) -> set[str]:
    """Verdicts of the scripts' answers alone."""
    return {each.verdict for each in vectors_plain.judge(packaged(), answers, "float32") if "/" in each.id}


class Stateful:
    """The engine of nano.py, stepped by hand.

    loses  a kind of move after which the slot still has the state of before it: that behind the last rejected draft,
           or the one that a preempted request left
    """

    def __init__(self, engine: nano.Engine, loses: str = "") -> None:
        self.engine, self.loses = engine, loses
        self.sequences: dict[str, nano.Sequence] = {}

    def admit(self, sequence: nano.Sequence) -> None:
        self.engine.waiting.append(sequence)
        self.engine.admit()

    def move(self, what: Json) -> None:
        sequence = self.sequences[what["id"]]
        stale = self.engine.states[sequence.slot].copy()
        self.engine.release(sequence)
        kept, sequence.token_ids = sequence.token_ids[: what.get("to", 0)], []
        self.admit(sequence)
        if kept:
            self.compute({"id": what["id"], "start": 0, "token_ids": kept})
        if what["kind"] == self.loses:
            self.engine.states[sequence.slot] = stale

    def compute(self, row: Json) -> np.ndarray:
        name = row["id"]
        if name not in self.sequences:
            self.sequences[name] = nano.Sequence(name, [], 0, 1, ())
            self.admit(self.sequences[name])
        sequence = self.sequences[name]
        assert row["start"] == len(sequence.token_ids)
        sequence.token_ids += row["token_ids"]
        chunk = self.engine.chunk(sequence, 0)
        assert chunk is not None and chunk.stop == len(sequence.token_ids)
        logits = self.engine.forward([chunk])
        sequence.num_computed_tokens = chunk.stop
        shifted = logits - logits.max(axis=1, keepdims=True)
        logprobs: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return logprobs


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("loses", "make", "caught_by"),
    [
        ("", nano.Engine, set()),
        ("rollback", nano.Engine, {"rejected-drafts", "rejected-beside-others", "undone-chunk"}),
        ("preempt", nano.Engine, {"preempted-decoding", "preempted-prompt"}),
        ("", Wrong, set(SCRIPTS) - {"rejected-drafts"}),  # of steps of one token, which that has none of
    ],
)
def test_bugs_of_real_engines_are_caught_by_the_scripts_for_them(loses: str, make: Any, caught_by: set[str]) -> None:
    verdicts = {}
    for script in packaged()["scripts"]:
        player = Stateful(make(trained().path, prefix_caching=False), loses)
        verdicts[script["id"]] = judged(answers_of(script, player.move, player.compute))
    assert set(verdicts) == set(SCRIPTS)
    assert {name for name, each in verdicts.items() if each & {"BUG", "DRIFT"}} == caught_by
    assert caught_by or all(each == {"EXACT"} for each in verdicts.values()), verdicts


def test_a_script_is_judged_beyond_a_wrong_token_and_has_to_be_whole() -> None:
    script = next(script for script in packaged()["scripts"] if script["id"] == "rejected-beside-others")
    names = vectors_plain.vectors_by_script(packaged())[script["id"]]
    vectors = {vector["id"]: vector for vector in packaged()["vectors"]}
    answers = [{"id": name, "script": script["id"], "token_ids": list(vectors[name]["token_ids"])} for name in names]
    answers[0]["token_ids"][1] = answers[0]["token_ids"][3] = 0
    verdicts = vectors_plain.judge(packaged(), answers, "float32")
    assert [each.position for each in verdicts if each.verdict == "BUG"] == [1, 3]
    assert "INCONCLUSIVE" in judged(answers[1:])
    assert vectors_plain.not_run(packaged(), answers) == [name for name in SCRIPTS if name != script["id"]]
