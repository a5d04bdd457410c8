"""Engines' answers to golden vectors: right and wrong ones, by the plain checker and by the one with the model."""

from __future__ import annotations

import ast
import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
from truths import truth_of
from vector_sets import FIXTURES, PLAIN, few, packaged, run, six, trained

from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.engine.engine import Engine
from lfm2np.engine.loading import Model, load
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import InconclusiveError, ProofError
from lfm2np.oracle import vectors_plain
from lfm2np.oracle.engines.records import Answer, greedy
from lfm2np.oracle.judging.emulate import emulated
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.noise import noise_of
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.vectors import golden
from lfm2np.oracle.vectors.chosen import choose, picked
from lfm2np.oracle.vectors.set_files import DOCUMENT, PACKAGED, VectorsError, packaged_set, read_set
from lfm2np.truth.weights import AttentionWeights


def right_answers(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "id": vector["id"],
            "token_ids": list(vector["token_ids"]),
            "logprobs": [p["logprob"] for p in vector["positions"]],
        }
        for vector in document["vectors"]
    ]


def verdict(document: dict[str, Any], answers: list[dict[str, Any]], format_name: str) -> int:
    return vectors_plain.result(vectors_plain.judge(document, answers, format_name))


def place(document: dict[str, Any], wanted: Callable[[dict[str, Any]], bool]) -> tuple[int, int]:
    """Vector and position of the first that is wanted."""
    return next(
        (number, index)
        for number, vector in enumerate(document["vectors"])
        for index, position in enumerate(vector["positions"])
        if wanted(position)
    )


def flipped(document: dict[str, Any], number: int, index: int, rank: int = 1) -> list[dict[str, Any]]:
    """The runner-up instead of the expected token, with its own log-probability; nothing after it."""
    answers, top = right_answers(document), document["vectors"][number]["positions"][index]["top"]
    answers[number]["token_ids"][index:] = [top[rank][0]]
    answers[number]["logprobs"][index:] = [top[rank][1]]
    return answers


@pytest.mark.parametrize("format_name", golden.BOUNDED)
def test_right_answers_pass_with_and_without_logprobs(format_name: str) -> None:
    answers = right_answers(packaged())
    assert verdict(packaged(), answers, format_name) == 0
    for answer in answers:
        del answer["logprobs"]
    assert verdict(packaged(), answers, format_name) == 0
    judged = vectors_plain.judge(packaged(), answers, format_name)
    *_, tokens_only, not_run = vectors_plain.report(packaged(), judged, answers)
    assert tokens_only.startswith("tokens only") and not_run.startswith("scripts not run: uneven-chunks, ")


@pytest.mark.parametrize("format_name", golden.BOUNDED)
def test_a_wrong_token_where_it_must_match_fails(format_name: str) -> None:
    answers = flipped(packaged(), *place(packaged(), lambda position: position["result"] == "must_match"))
    assert verdict(packaged(), answers, format_name) == 1


def test_a_tie_of_bfloat16_is_one_for_bfloat16_only() -> None:
    def wanted(position: dict[str, Any]) -> bool:
        most = vectors_plain.allowances(position, "bfloat16", packaged())[1]
        return position["may_tie_in"] == ["bfloat16"] and position["margin"] <= most

    answers = flipped(packaged(), *place(packaged(), wanted))
    assert [verdict(packaged(), answers, name) for name in golden.BOUNDED] == [1, 0, 1]


def test_behind_a_tie_nothing_is_judged_and_of_a_tie_any_later_tokens_are_right() -> None:
    number, index = place(packaged(), lambda position: "bfloat16" in position["may_tie_in"])
    answers = flipped(packaged(), number, index)
    answers[number]["token_ids"] += [0]
    answers[number]["logprobs"] += [-50.0]
    assert verdict(packaged(), answers, "bfloat16") == 0


def test_a_logprob_further_off_than_the_format_explains_is_drift() -> None:
    answers = right_answers(packaged())
    noise = packaged()["vectors"][5]["positions"][2]["noise"]
    answers[5]["logprobs"][2] -= 5 * noise["bfloat16"]["logprob"]
    assert verdict(packaged(), answers, "bfloat16") == 0
    assert verdict(packaged(), answers, "float32") == 1


def test_what_is_not_reported_is_inconclusive() -> None:
    answers = right_answers(packaged())
    assert verdict(packaged(), answers[:-1], "float32") == 2
    assert verdict(packaged(), [*answers[:-1], {"id": answers[-1]["id"], "error": "out of memory"}], "float32") == 2
    answers[3]["token_ids"].pop()
    answers[3]["logprobs"].pop()
    assert verdict(packaged(), answers, "float32") == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"id": "short-1-ids", "token_ids": [1], "logprobs": [NaN]}', "line 1: not JSON: NaN"),
        ('{"id": "short-1-ids", "token_ids": [1], "logprobs": [1e999]}', "line 1: not JSON: 1e999"),
        ('{"id": "short-1-ids", "token_ids": [1], "logprobs": []}', "logprobs: 0 for 1 token_ids"),
        ('{"id": "short-1-ids", "token_ids": [true]}', "token_ids: expected a list of whole numbers"),
        ('{"id": "short-1-ids", "logprob": []}', "field 'logprob', expected one of id, script, token_ids"),
        ('{"token_ids": [1]}', "expected an object with a vector's id"),
        ('{"id": "decode-32", "script": 1}', "script: expected text"),
        ('{"id": "decode-32", "script": "no-such"}', "the set has no script 'no-such' with 'decode-32'"),
        ('{"id": "beside-3", "script": "rejected-drafts"}', "no script 'rejected-drafts' with 'beside-3'"),
        ('{"id": "no-such", "token_ids": [1]}', "id 'no-such' is not in the vector set"),
        ('{"id": "short-1-ids", "token_ids": [1,1,1,1,1,1,1,1,1]}', "9 tokens, expected at most 8"),
    ],
)
def test_answers_that_are_none_are_refused(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(line + "\n")
    if "9 tokens" in message:
        file.write_text(line.replace("1,1", f"{packaged()['vectors'][1]['token_ids'][0]},1", 1))
    with pytest.raises(VectorsError, match=re.escape(message)):
        run("verify", "--answers", str(file))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *product(("vectors", "formats", "limit", "float32_units"), (None, [], "", [{"id": "a"}])),
        *product(("scripts",), (None, [{"id": "a"}])),
    ],
)
def test_a_document_that_is_no_set_is_refused_by_the_plain_checker(field: str, value: Any) -> None:
    document = {**packaged(), field: value}
    with pytest.raises(
        vectors_plain.PlainError, match=r"not a sound vector set|is not in the vector set|format 'float32'"
    ):
        vectors_plain.judge(document, right_answers(packaged()), "float32")


def test_the_plain_checker_needs_neither_numpy_nor_this_package() -> None:
    imported = {
        name
        for node in ast.walk(ast.parse(PLAIN.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {"__future__", "collections.abc", "hashlib", "json", "math", "sys", "typing"}


@pytest.mark.parametrize(("damage", "code"), [("", 0), ("token", 1), ("missing", 2), ("format", 3)])
def test_the_file_alone_says_the_same_as_the_command(tmp_path: Path, damage: str, code: int) -> None:
    """As an engine's CI runs it: a copy, an isolated interpreter without site-packages."""
    answers = right_answers(packaged())
    if damage == "token":
        answers = flipped(packaged(), *place(packaged(), lambda position: position["result"] == "must_match"))
    file, copied = tmp_path / "answers.jsonl", tmp_path / "vectors_plain.py"
    file.write_text("".join(json.dumps(answer) + "\n" for answer in answers[damage == "missing" :]))
    copied.write_text(PLAIN.read_text())
    format_name = "bfloat17" if damage == "format" else "float16"
    words = [str(copied), str(packaged_set() / DOCUMENT), str(file), "--format", format_name]
    done = subprocess.run([sys.executable, "-I", "-S", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    if damage != "format":
        errors = {1: ProofError, 2: InconclusiveError}
        if code:
            with pytest.raises(errors[code]):
                run("verify", "--answers", str(file), "--format", format_name)
        else:
            run("verify", "--answers", str(file), "--format", format_name)


def emulated_answers(model: Model, document: dict[str, Any], format_name: str, draw: int) -> list[dict[str, Any]]:
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
    document = few().document
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
    plain = [
        judgement
        for judgement in vectors_plain.judge(document, answers, format_name)
        if judgement.verdict != "INCONCLUSIVE"
    ]
    assert plain
    for judged in plain:
        assert judged.position is not None
        ratio = max(
            abs(known[judged.id, judged.position].error_ratio or 0.0), known[judged.id, judged.position].gap_ratio
        )
        if not 0.8 * LIMIT < ratio < 1.6 * LIMIT:  # else the rounding, or a bound made of two, may decide
            assert judged.verdict == known[judged.id, judged.position].verdict.value, judged
    expected = 0 if (format_name, engine_format) != ("float32", "bfloat16") else 1
    if format_name != "float16":
        assert vectors_plain.result(plain) == expected


@pytest.mark.rounding
def test_stored_bounds_are_those_of_the_noise() -> None:
    """Two digits are off by 5 % at most; the rest is for products of other shapes, which kernels round otherwise."""
    keys = {(*entry["prompt_token_ids"], *entry["token_ids"]): entry for entry in few().document["vectors"]}
    truths = [truth_of(six(), ids, {}) for ids in keys]
    for vector, truth, noise in zip(keys.values(), truths, noise_of(six(), truths, "float16"), strict=True):
        for index, position in enumerate(vector["positions"]):
            row = len(vector["prompt_token_ids"]) - 1 + index
            best, second = (truth.at(row, position["top"][rank][0]) for rank in (0, 1))
            known = position["noise"]["float16"]
            gaps = noise.gap_scales(np.full(len(truth.best), best))
            assert known["logprob"] == pytest.approx(noise.scales(truth)[row, best], rel=0.1)
            assert known["gaps"][0] == pytest.approx(gaps[row, second], rel=0.1)


# --- what the vectors are there for


def played(model: Model, document: dict[str, Any]) -> list[dict[str, Any]]:
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


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGED)
def test_the_engine_run_as_the_schedules_say_answers_right(name: str) -> None:
    document = read_set(packaged_set(name)).document
    judged = vectors_plain.judge(document, played(load(FIXTURES / name), document), "float32")
    assert {judgement.verdict for judgement in judged} == {"EXACT"}


@pytest.mark.parametrize(("window", "caught_by"), [(15, "window-17"), (17, "window-17"), (1024, "window-48")])
def test_a_wrong_window_is_caught(window: int, caught_by: str) -> None:
    document, model = read_set(packaged_set("lfm3")).document, load(FIXTURES / "lfm3")
    document["vectors"] = [vector for vector in document["vectors"] if "sliding-window" in vector["flags"]]
    layers = [
        replace(layer, operator=replace(layer.operator, scale=layer.operator.scale._replace(window=window)))
        if isinstance(layer.operator, AttentionWeights) and layer.operator.scale.window
        else layer
        for layer in model.weights.layers
    ]
    weights = replace(model.weights, layers=tuple(layers))
    wrong = replace(model, weights=weights, config=replace(model.config, sliding_window=window))
    judged = vectors_plain.judge({**document, "scripts": []}, played(wrong, document), "float32")
    assert any(judgement.id == caught_by and judgement.verdict in ("BUG", "DRIFT") for judgement in judged)


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
    ],
)
def test_real_engines_bugs_are_caught_by_the_vectors_for_them(fault: str, caught_by: str) -> None:
    """In an engine that says it computes in float32."""
    wanted = [choice.id for choice in picked(choose(trained().config, trained().tokenizer), [caught_by])]
    document = copy.copy(packaged())
    document["vectors"] = [vector for vector in document["vectors"] if vector["id"] in wanted]
    with faults.inject(fault):
        judged = vectors_plain.judge(document, played(trained(), document), "float32")
    assert any(judgement.id == caught_by and judgement.verdict in ("BUG", "DRIFT") for judgement in judged)
