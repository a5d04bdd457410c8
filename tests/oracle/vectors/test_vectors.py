"""Golden vectors: made alike twice, verified, and damaged in every way."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vector_sets import FEW, FIXTURES, SIX, few, run, six, trained

from lfm2np.engine.loading import load
from lfm2np.errors import Lfm2npError, ProofError, RequestError
from lfm2np.oracle import vectors_plain
from lfm2np.oracle.vectors import golden
from lfm2np.oracle.vectors.chosen import choose, mentioned
from lfm2np.oracle.vectors.golden import NOTES, make, verify
from lfm2np.oracle.vectors.scripts import scripts_of
from lfm2np.oracle.vectors.set_files import PACKAGED, VectorsError, document_text, packaged_set, read_set
from scheduler.checksum import sealed

pytestmark = [pytest.mark.rounding, pytest.mark.slow]
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "set.json").write_text(document_text(few()))
    return tmp_path / "set.json"


# --- make


def test_the_same_bytes_twice_which_verify(file: Path) -> None:
    assert document_text(make(six(), only=FEW)) == file.read_text()
    assert verify(six(), read_set(file)) == []


def test_what_a_schedule_names_is_made_too_and_what_does_not_fit_leaves_out_what_names_it() -> None:
    made = [vector["id"] for vector in few()["vectors"]]
    assert made == ["short-1-text", "short-2-text", "border-15", "prefix-cold", "prefix-same"]
    chosen = {choice.id: choice for choice in choose(replace(six().config, max_position_embeddings=60), None)}
    assert not {"slot-long", "slot-short", "slot-again"} & chosen.keys()
    assert all(mentioned(choice) <= chosen.keys() for choice in chosen.values())


def test_what_cannot_be_made_is_refused() -> None:
    refusals: dict[str, Callable[[], Any]] = {
        "numerics float32: expected exact": lambda: make(load(SIX, "float32")),
        "vector 'nothing': expected some of short-1-text": lambda: make(six(), only=["nothing"]),
        "seed -1: expected at least 0": lambda: make(six(), -1),
    }
    for message, wrong in refusals.items():
        with pytest.raises(RequestError, match=message):
            wrong()


# --- the packaged sets


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_set_is_what_its_model_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("verify", name)
    assert capsys.readouterr().out.startswith("verdict    EXACT\n")


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_set_is_what_choose_the_scripts_and_the_notes_say(name: str) -> None:
    """What can change without the numbers: run `lfm2np vectors make` after a change (docs/why/fixture.md)."""
    document, model = read_set(packaged_set(name)), load(FIXTURES / name)
    chosen = choose(model.config, model.tokenizer, is_small=name != "trained")
    for choice, vector in zip(chosen, document["vectors"], strict=True):
        assert len(vector["token_ids"]) == choice.new
        said = golden.vector_json(choice, tuple(vector["token_ids"]), vector["positions"])
        assert said == vector
    assert document["scripts"] == scripts_of(document["vectors"]) and len(document["scripts"]) == 7
    used = {flag for entry in (*document["vectors"], *document["scripts"]) for flag in entry["flags"]}
    assert document["notes"] == {flag: note for flag, note in NOTES.items() if flag in used}
    assert packaged_set(name).stat().st_size < (4e5 if name == "trained" else 2e5)


# --- damage


def position(it: dict[str, Any], vector: int, index: int) -> dict[str, Any]:
    return it["vectors"][vector]["positions"][index]  # type: ignore[no-any-return]


def next_float(it: dict[str, Any]) -> None:
    place = position(it, 1, 2)
    place["logprob"] = float(np.nextafter(place["logprob"], np.inf))


def other_token(it: dict[str, Any]) -> None:
    tokens = it["vectors"][2]["token_ids"]
    tokens[4] = (tokens[4] + 1) % 20


VALUES: dict[str, tuple[Edit, str]] = {
    "token": (other_token, r"^border-15 position 4: token: \d+, expected \d+$"),
    "logprob": (next_float, r"^short-2-text position 2: logprob: -\d.*, expected -\d"),
    "top logit": (
        lambda it: position(it, 1, 7)["top"][3].__setitem__(2, 0.5),
        r"^short-2-text position 7: top\[3\]\[2\]: 0.5, expected",
    ),
    "margin": (lambda it: position(it, 0, 0).update(margin=0.0), r"^short-1-text position 0: margin: 0.0"),
    "result": (
        lambda it: position(it, 3, 1).update(result="may_tie", may_tie_in=["float32"]),
        r"^prefix-cold position 1: (may_tie_in|result): ",
    ),
    "bound": (
        lambda it: position(it, 3, 1)["noise"]["float32"]["gaps"].__setitem__(0, 99.0),
        r"^prefix-cold position 1: (may_tie_in|result): ",
    ),
    "limit": (lambda it: it.update(limit=11.0), r"^set: limit: 11.0, expected 10.0"),
    "config": (lambda it: it["model"].update(config_sha256="0" * 64), r'^set: model.config_sha256: "000'),
    "weights": (
        lambda it: it["model"]["weights"].update({"model.safetensors": "1" * 64}),
        r'^set: model.weights.model.safetensors: "111',
    ),
    "digest": (lambda it: it["model"].update(digest="2" * 64), r'^set: model.digest: "222'),
    "scripts": (lambda it: it.update(scripts=[{"id": "x"}]), r"^set: scripts: \[{"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_changed_value_is_a_difference_that_names_its_place(name: str) -> None:
    edit, message = VALUES[name]
    document = copy.deepcopy(few())
    edit(document)
    assert re.search(message, str(verify(six(), document)[0]))


def test_a_prompt_that_its_text_does_not_make_is_a_difference() -> None:
    known = read_set(packaged_set())
    vectors = [vector for vector in known["vectors"] if vector["id"] == "border-15"]
    vectors[0]["prompt_token_ids"] = vectors[0]["prompt_token_ids"][:14]
    differences = verify(trained(), {**known, "vectors": vectors})
    assert str(differences[0]).startswith("border-15: prompt_token_ids, by prompt_text: [")


def change(file: Path, edit: Edit) -> None:
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(sealed(document)))


def test_the_command_prints_the_differences_and_ends_with_an_error(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(file, other_token)
    with pytest.raises(ProofError):
        run("verify", str(file), "--model", str(SIX))
    because = re.search("^because +(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert because and re.search(VALUES["token"][1], because[1])


FORMS: dict[str, tuple[Edit, str]] = {  # the schema says more: see tests/test_file_schemas.py
    "missing field": (lambda it: it["vectors"][0].pop("token_ids"), "not a sound vector set: KeyError: 'token_ids'"),
    "no list": (lambda it: it.update(vectors=None), "not a sound vector set: TypeError"),
    "another version": (lambda it: it.update(format_version=3), "not a vector set of format_version 4"),
    "fewer positions": (lambda it: it["vectors"][0]["positions"].pop(), "not a sound vector set: IndexError"),
    "missing gap": (
        lambda it: position(it, 0, 0)["noise"]["float16"]["gaps"].pop(),
        "not a sound vector set: ValueError",
    ),
    "missing format": (lambda it: position(it, 0, 0)["noise"].pop("float16"), "KeyError: 'float16'"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_document_of_another_form_is_refused(file: Path, name: str) -> None:
    edit, message = FORMS[name]
    change(file, edit)
    with pytest.raises(VectorsError, match=message):
        run("verify", str(file), "--model", str(SIX))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-30], "not JSON"),
        (lambda content: b"[]", "not a vector set"),
        (lambda content: b"\xff", "can't be read: .*utf-8"),
        (lambda content: content.replace(b'"margin": ', b'"margin": NaN, "was": ', 1), "NaN is no JSON"),
        (lambda content: content.replace(b'"margin": ', b'"margin": 1e999, "was": ', 1), "1e999 is no JSON"),
        (lambda content: content.replace(b'"seed"', b'"limit": 1, "seed"', 1), "stands twice"),
        (lambda content: content.replace(b'"limit": 1', b'"limit": 2', 1), r"sha256 '\w{64}', expected"),
        (None, "can't be read"),
    ],
)
def test_a_broken_file_is_named_also_without_the_package(
    file: Path, damage: Callable[[bytes], bytes] | None, message: str
) -> None:
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(Lfm2npError, match=message) as error:
        run("verify", str(file), "--model", str(SIX))
    assert error.value.exit_code == 3 and file.name in str(error.value)
    with pytest.raises(vectors_plain.PlainError, match=message):
        vectors_plain.read_document(str(file))
