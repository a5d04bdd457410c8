"""Engines' answers to golden vectors: right and wrong ones."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
from engines import planted
from vector_sets import FIXTURES, PLAIN, few, packaged, six, trained

from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.engine.engine import Engine
from lfm2np.engine.loading import Model, load
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle import vectors_plain
from lfm2np.oracle.engines.records import Answer, greedy
from lfm2np.oracle.judging.emulate import emulated
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.vectors import golden
from lfm2np.oracle.vectors.chosen import choose, picked
from lfm2np.oracle.vectors.golden import make, verify
from lfm2np.oracle.vectors.set_files import PACKAGED, document_text, packaged_set, read_set

pytestmark = pytest.mark.slow

Json = dict[str, Any]


def right_answers(document: Json) -> list[Json]:
    return [
        {
            "id": vector["id"],
            "token_ids": list(vector["token_ids"]),
            "logprobs": [p["logprob"] for p in vector["positions"]],
        }
        for vector in document["vectors"]
    ]


def verdict(document: Json, answers: list[Json], format_name: str) -> int:
    return vectors_plain.result(vectors_plain.judge(document, answers, format_name))


def flip(answers: list[Json], wanted: Callable[[Json], bool], *more: int) -> None:
    """The runner-up of the first position that is wanted, with its own log-probability; after it only these tokens."""
    for answer, vector in zip(answers, packaged()["vectors"], strict=True):
        for index, position in enumerate(vector["positions"]):
            if wanted(position) and index + len(more) < len(vector["positions"]):
                token, logprob, _ = position["top"][1]
                answer["token_ids"][index:] = [token, *more]
                answer["logprobs"][index:] = [logprob, *(-50.0 for _ in more)]
                return


def is_tie_of_bfloat16(position: Json) -> bool:
    return (
        position["may_tie_in"] == ["bfloat16"]
        and position["margin"] <= vectors_plain.allowances(position, "bfloat16", packaged())[1]
    )


def no_logprobs(answers: list[Json]) -> None:
    for answer in answers:
        del answer["logprobs"]


def too_far_off(answers: list[Json]) -> None:
    answers[5]["logprobs"][2] -= 5 * packaged()["vectors"][5]["positions"][2]["noise"]["bfloat16"]["logprob"]


def of_fourth(change: Callable[[list[int], list[Any]], object]) -> Callable[[list[Json]], object]:
    """A change of the ids and the log-probabilities of one answer."""
    return lambda answers: change(answers[3]["token_ids"], answers[3]["logprobs"])


CHANGES: dict[str, tuple[Callable[[list[Json]], object], tuple[int, int, int]]] = {  # and codes in golden.BOUNDED
    "none": (lambda answers: None, (0, 0, 0)),
    "no log-probabilities": (no_logprobs, (0, 0, 0)),
    "a wrong token where it must match": (partial(flip, wanted=lambda p: p["result"] == "must_match"), (1, 1, 1)),
    "a tie of bfloat16": (partial(flip, wanted=is_tie_of_bfloat16), (1, 0, 1)),
    "a tie, and what follows is not judged": (lambda answers: flip(answers, is_tie_of_bfloat16, 0), (1, 0, 1)),
    "a log-probability further off than its format explains": (too_far_off, (1, 0, 1)),
    "a token less": (of_fourth(lambda ids, logprobs: (ids.pop(), logprobs.pop())), (2, 2, 2)),
    "a token more": (of_fourth(lambda ids, logprobs: (ids.append(5), logprobs.append(-1.0))), (1, 1, 1)),
    "a log-probability less": (of_fourth(lambda ids, logprobs: logprobs.pop()), (2, 2, 2)),
    "a null for a log-probability": (of_fourth(lambda ids, logprobs: logprobs.__setitem__(1, None)), (2, 2, 2)),
    "no answer": (lambda answers: answers.append({"id": answers.pop()["id"], "error": "out of memory"}), (2, 2, 2)),
    "a missing line": (list.pop, (2, 2, 2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_answers_have_their_exit_codes(name: str) -> None:
    change, codes = CHANGES[name]
    answers = right_answers(packaged())
    change(answers)
    assert tuple(verdict(packaged(), answers, format_name) for format_name in golden.BOUNDED) == codes


def written(tmp_path: Path, answers: list[Json]) -> str:
    """As Python's json writes them."""
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return str(file)


def judged_file(tmp_path: Path, answers: list[Json], format_name: str = "float32") -> list[vectors_plain.Judged]:
    return vectors_plain.judge(packaged(), vectors_plain.read_answers(written(tmp_path, answers)), format_name)


@pytest.mark.parametrize(
    ("change", "verdict", "detail"),
    [
        ("a token more", "BUG", "9 tokens, 8 were asked for"),
        ("a log-probability less", "INCONCLUSIVE", "logprobs: 7 for 8 token_ids, expected one each"),
        ("a null for a log-probability", "INCONCLUSIVE", "logprobs[1]: null, expected a finite number"),
    ],
)
def test_an_answer_of_another_form_is_named_and_the_others_are_judged(
    tmp_path: Path, change: str, verdict: str, detail: str
) -> None:
    answers = right_answers(packaged())
    CHANGES[change][0](answers)
    judged = judged_file(tmp_path, answers)
    assert [each for each in judged if each.verdict != "EXACT"] == [(answers[3]["id"], None, verdict, detail)]
    assert len(judged) == 1 + sum(len(vector["token_ids"]) for vector in packaged()["vectors"]) - 8


@pytest.mark.parametrize(
    ("value", "format_name"),
    [(math.nan, "bfloat16"), (math.inf, "bfloat16"), (-math.inf, "float16"), (0.04, "bfloat16")],
)
def test_a_log_probability_that_can_be_none_is_wrong(tmp_path: Path, value: float, format_name: str) -> None:
    answers = right_answers(packaged())
    answers[2]["logprobs"][1] = value
    judged = judged_file(tmp_path, answers, format_name)
    (wrong,) = [each for each in judged if each.verdict != "EXACT"]
    assert wrong[:3] == (answers[2]["id"], 1, "BUG")
    (line, *_) = vectors_plain.report(packaged(), judged, answers)
    assert line.startswith(f"{'BUG':<12}  {answers[2]['id']} position 1: log-probability {value} of token ")
    position = packaged()["vectors"][2]["positions"][1]
    expected = (
        "at most 0" if value == 0.04 else f"{position['logprob']:.9g}" if value == -math.inf else "a finite number"
    )
    assert line.endswith(f": expected {expected}")
    assert vectors_plain.judge_token(position, 10**6, value, format_name, packaged())[0] == "BUG"


@pytest.mark.parametrize(("expected", "verdict"), [(-16.0, "BUG"), (-16.1, "INCONCLUSIVE")])
def test_minus_infinity_is_left_of_a_probability_that_a_format_can_not_hold(expected: float, verdict: str) -> None:
    """A likely token is expected to have one that every format holds: float16's least is exp(-16.6)."""
    position = copy.deepcopy(packaged()["vectors"][2]["positions"][1])
    token, _, logit = position["top"][0]
    position["top"][0] = [token, expected, logit]
    assert vectors_plain.judge_token(position, token, -math.inf, "float32", packaged())[0] == verdict


def test_what_is_not_tested_is_said() -> None:
    answers = right_answers(packaged())
    no_logprobs(answers)
    *_, tokens_only, not_run = vectors_plain.report(packaged(), [], answers)
    assert tokens_only.startswith("tokens only") and not_run.startswith("scripts not run: uneven-chunks, ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"id": "short-1-ids", "token_ids": [1], "token_ids": [2]}', "line 1: not JSON: a name stands twice"),
        ('\ufeff{"id": "short-1-ids"}', ": begins with a byte order mark (BOM), expected UTF-8 without one"),
        ('{"id": "short-1-ids", "token_ids": [true]}', "token_ids: expected a list of whole numbers"),
        ('{"id": "short-1-ids", "token_ids": 1}', "token_ids: expected a list of whole numbers"),
        ('{"id": "short-1-ids", "logprob": []}', "field 'logprob', expected one of id, script, token_ids"),
        (f'{{"id": "decode-32", "logprobs": [-1{"0" * 400}]}}', "line 1: logprobs: a whole number that is too large"),
        ('{"token_ids": [1]}', "expected an object with a vector's id"),
        ('{"id": "decode-32", "script": 1}', "script: expected text"),
        ('{"id": "decode-32", "script": "no-such"}', "the set has no script 'no-such' with 'decode-32'"),
        ('{"id": "beside-3", "script": "rejected-drafts"}', "no script 'rejected-drafts' with 'beside-3'"),
        ('{"id": "no-such", "token_ids": [1]}', "id 'no-such' is not in the vector set"),
    ],
)
def test_answers_that_are_none_are_refused(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(vectors_plain.PlainError, match=re.escape(message)):
        vectors_plain.judge(packaged(), vectors_plain.read_answers(str(file)), "float32")


@pytest.mark.parametrize("field", ["vectors", "formats", "limit", "scripts"])
def test_a_document_that_is_no_set_is_refused_by_the_plain_checker(field: str) -> None:
    for value in (None, [{"id": "a"}]) if field == "scripts" else (None, []):
        with pytest.raises(
            vectors_plain.PlainError, match=r"not a sound vector set|is not in the vector set|format 'f"
        ):
            vectors_plain.judge({**packaged(), field: value}, right_answers(packaged()), "float32")


def test_two_vectors_of_one_id_are_refused_by_the_plain_checker() -> None:
    document = {**packaged(), "vectors": [*packaged()["vectors"], packaged()["vectors"][0]]}
    with pytest.raises(vectors_plain.PlainError, match="two vectors have one id"):
        vectors_plain.judge(document, right_answers(packaged()), "float32")


def test_an_engines_error_can_not_look_like_a_verdict() -> None:
    answers = [{"id": "decode-32", "error": "no\n48 answers: 389 EXACT\x1b[2J"}]
    (line, *_) = vectors_plain.report(packaged(), vectors_plain.judge(packaged(), answers, "float32"), answers)
    assert line == r"INCONCLUSIVE  decode-32: no\n48 answers: 389 EXACT\x1b[2J"


@pytest.mark.parametrize(
    ("change", "code"), [("none", 0), ("a wrong token where it must match", 1), ("a missing line", 2), ("format", 3)]
)
def test_the_file_alone_has_the_exit_codes(tmp_path: Path, change: str, code: int) -> None:
    """As an engine's CI runs it: a copy, an isolated interpreter without site-packages."""
    answers = right_answers(packaged())
    CHANGES.get(change, CHANGES["none"])[0](answers)
    copied, format_name = tmp_path / "vectors_plain.py", "bfloat17" if change == "format" else "float16"
    copied.write_text(PLAIN.read_text())
    words = [str(copied), str(packaged_set()), written(tmp_path, answers), "--format", format_name]
    command = [sys.executable, "-I", "-S", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    if code == 1:  # pinned: also of a traceback
        full = "the output can't be written: [Errno 28] No space left on device\n"
        closed = "the output can't be written: standard output is closed\n"
        for redirection, ended in ((">/dev/full", (3, full)), (">&-", (3, closed)), ("| true", (1, ""))):
            shell = ["bash", "-c", f'set -o pipefail; "$@" {redirection}', "", *command]
            done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
            assert (done.returncode, done.stderr) == ended


def emulated_answers(model: Model, document: Json, format_name: str, draw: int) -> list[Json]:
    """What a right engine of a format says: seed 1, so none of those that the bounds were made from."""
    numerics = emulated(format_name, 1, draw)
    weights = prepare_weights(open_checkpoint(model.path, model.config), model.config, numerics)
    engine, answers = Model(model.path, model.config, numerics, weights), []
    for vector in document["vectors"]:
        ids, logprobs = list(vector["prompt_token_ids"]), []
        for _ in vector["token_ids"]:
            row = engine.logits(ids)[-1]
            ids.append(int(np.argmax(row)))
            logprobs.append(float(numerics.log_softmax(row)[ids[-1]]))
        new = ids[len(vector["prompt_token_ids"]) :]
        answers.append({"id": vector["id"], "token_ids": new, "logprobs": logprobs})
    return answers


@pytest.mark.rounding
@pytest.mark.parametrize("format_name", golden.BOUNDED)
@pytest.mark.parametrize("engine_format", ["float32", "bfloat16"])
def test_the_plain_checker_agrees_with_the_one_with_the_model(format_name: str, engine_format: str) -> None:
    """Up to the first token that is not the expected one, at each position: with the bounds of the set, which are
    rounded, and with those that judge.py measures at other columns."""
    document = few()
    answers = emulated_answers(six(), document, engine_format, 3)
    pairs = [
        (
            greedy(answer["id"], tuple(vector["prompt_token_ids"]), len(vector["token_ids"]), case=""),
            Answer(tuple(answer["token_ids"]), tuple(answer["logprobs"])),
        )
        for answer, vector in zip(answers, document["vectors"], strict=True)
    ]
    known = {
        (position.request.request_id, position.row - len(position.request.prompt_token_ids) + 1): position
        for position in judge(six(), format_name, pairs)
    }
    judged = vectors_plain.judge(document, answers, format_name)
    plain = [judgement for judgement in judged if judgement.verdict != "INCONCLUSIVE"]
    assert plain
    for judgement in plain:
        other = known[judgement.id, judgement.position or 0]
        ratio = max(abs(other.error_ratio or 0.0), other.gap_ratio)
        if not 0.8 * LIMIT < ratio < 1.6 * LIMIT:  # else the rounding, or a bound made of two, may decide
            assert judgement.verdict == other.verdict.value, judgement
    if format_name != "float16":
        assert vectors_plain.result(plain) == (format_name == "float32" and engine_format == "bfloat16")


# --- what the vectors are there for


def played(model: Model, document: Json) -> list[Json]:
    """This package's engine, run as the schedules say."""
    vectors_by_id = {vector["id"]: vector for vector in document["vectors"]}
    engines: dict[str, Engine] = {}
    answers = []
    for name, vector in vectors_by_id.items():
        if name in engines:
            continue
        hint = (vector["schedule"] or [{"kind": "alone"}])[0]
        names = [name, *hint.get("with", ())]
        chunk = {"max_num_batched_tokens": hint["size"], "max_num_seqs": 1} if hint["kind"] == "chunks" else {}
        engine = engines[hint["id"]] if hint["kind"] == "after" else Engine(model, **{"max_num_seqs": 8, **chunk})
        engines |= dict.fromkeys(names, engine)
        for vector_id in names:
            count = len(vectors_by_id[vector_id]["token_ids"])
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)
            engine.add_request(vector_id, vectors_by_id[vector_id]["prompt_token_ids"], params)
        for output in engine.stream():
            if output.finished:
                (only,) = output.outputs
                logprobs = [logprob.logprob for logprob in only.logprobs or ()]
                answers.append({"id": output.request_id, "token_ids": list(only.token_ids), "logprobs": logprobs})
    return answers


def caught(document: Json, vectors: list[Json], model: Model) -> set[str]:
    """The vectors by which an engine that says it computes in float32 is wrong."""
    some = {**document, "vectors": vectors, "scripts": []}
    judged = vectors_plain.judge(some, played(model, some), "float32")
    return {judgement.id for judgement in judged if judgement.verdict in ("BUG", "DRIFT")}


EARLIER, WINDOW = "lfm2np.arithmetic.attention:hide_earlier_positions", "<= positions - window"
WINDOW_ONE_TOO_NARROW = planted(EARLIER, WINDOW, f"{WINDOW} + 1")


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        ("convolution-crosses-requests", "beside-1"),
        ("state-read-by-index-in-the-batch", "beside-3"),
        ("previous-tenants-state-is-read", "slot-short"),
        ("right-padding-enters-the-state", "beside-3"),
        ("short-chunk-leaves-the-state-one-behind", "chunks-of-1"),
        ("chunk-ignores-the-past-state", "chunks-of-2"),
        ("prefix-hit-without-its-state", "prefix-longer"),
        ("only-the-first-token-of-a-block-hashed", "prefix-branch"),
        ("hit-blocks-omitted-from-the-plan", "prefix-same"),
        ("head-norm-reads-strided-rows-as-contiguous", "short-2-ids"),
        ("window-one-too-wide", "window-17"),
        (WINDOW_ONE_TOO_NARROW, "window-17"),
        ("window-ignored", "window-48"),
    ],
)
def test_real_engines_bugs_are_caught_by_the_vectors_for_them(fault: str | faults.Fault, caught_by: str) -> None:
    is_small = caught_by.startswith("window")
    document, model = (read_set(packaged_set("lfm3")), load(FIXTURES / "lfm3")) if is_small else (packaged(), trained())
    wanted = [choice.id for choice in picked(choose(model.config, model.tokenizer, is_small=is_small), [caught_by])]
    vectors = [copy.copy(vector) for vector in document["vectors"] if vector["id"] in wanted]
    with faults.inject(fault):
        assert caught_by in caught(document, vectors, model)


# --- a mixture of experts: fair to engines whose rounding chooses other experts


SOME = ("short-2-text", "border-15", "border-16", "decode-32", "beside-3")  # and all beside it


@pytest.mark.night
@pytest.mark.parametrize("name", PACKAGED)
def test_the_engine_run_as_the_schedules_say_answers_right(name: str) -> None:
    document = read_set(packaged_set(name))
    judged = vectors_plain.judge(document, played(load(FIXTURES / name), document), "float32")
    assert {judgement.verdict for judgement in judged} == {"EXACT"}


@pytest.fixture(scope="module")
def some(published: Model) -> Json:
    return make(published, only=SOME)


@pytest.mark.rounding
def test_a_set_is_written_and_verifies(tmp_path: Path, published: Model, some: Json) -> None:
    (tmp_path / "set.json").write_text(document_text(some))
    known = read_set(tmp_path / "set.json")
    assert verify(published, known) == []
    assert verify(load(published.path, weights="streamed"), known) == []


@pytest.mark.rounding
def test_a_mixture_run_as_the_schedules_say_answers_right(published: Model, some: Json) -> None:
    judged = vectors_plain.judge(some, played(published, some), "float32")
    assert {judgement.verdict for judgement in judged} == {"EXACT"}


@pytest.mark.rounding
@pytest.mark.parametrize(("format_name", "draw"), [("float32", 4), ("bfloat16", 3), ("float16", 4)])
def test_right_engines_that_choose_their_own_experts_are_not_wrong(
    published: Model, some: Json, format_name: str, draw: int
) -> None:
    assert verdict(some, emulated_answers(published, some, format_name, draw), format_name) != 1


@pytest.mark.rounding
def test_an_engine_without_the_experts_bias_is_wrong_in_float32(published: Model, some: Json) -> None:
    with faults.inject("expert-bias-ignored"):
        answers = played(published, some)
    assert verdict(some, answers, "float32") == 1
