"""Golden vectors: made alike twice, verified, and damaged in every way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vector_sets import FEW, FIXTURES, SIX, few, packaged, run, six, trained

from lfm2np.engine.loading import load
from lfm2np.errors import Lfm2npError, ProofError, RequestError
from lfm2np.oracle import vectors_plain
from lfm2np.oracle.vectors import golden, set_files
from lfm2np.oracle.vectors.chosen import choose, mentioned
from lfm2np.oracle.vectors.golden import make, verify
from lfm2np.oracle.vectors.golden import NOTES
from lfm2np.oracle.vectors.scripts import scripts_of
from lfm2np.oracle.vectors.set_files import (
    DOCUMENT,
    PACKAGED,
    TENSORS,
    VectorsError,
    VectorSet,
    packaged_set,
    read_set,
    write_set,
)
from lfm2np.system import write_whole
from scheduler.checksum import sealed

pytestmark = pytest.mark.rounding


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_set(few(), tmp_path / "set")
    return tmp_path / "set"


EXACT_ROWS, MODEL_FACTS = cache(golden.exact_rows), cache(golden.model_facts)


@pytest.fixture
def computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model says of the few vectors is the same in each test: the set's values are what changes."""
    monkeypatch.setattr(golden, "exact_rows", EXACT_ROWS)
    monkeypatch.setattr(golden, "model_facts", MODEL_FACTS)


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((folder / DOCUMENT).read_text())
    edit(document)
    (folder / DOCUMENT).write_text(json.dumps(sealed(document)))


# --- make


def test_the_same_bytes_twice(tmp_path: Path, folder: Path) -> None:
    """The second time by the command's function anew, over a folder that holds a set already."""
    again = tmp_path / "again"
    write_set(few(), again)
    write_set(make(six(), only=FEW), again)
    for name in (DOCUMENT, TENSORS):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "set"]


def test_another_seed_draws_other_prompts() -> None:
    first, second = (choose(six().config, None, seed) for seed in (0, 1))
    assert [choice.id for choice in first] == [choice.id for choice in second]
    assert all(choice.prompt_token_ids != other.prompt_token_ids for choice, other in zip(first, second, strict=True))


def test_what_a_schedule_names_is_made_too() -> None:
    assert [vector["id"] for vector in few().document["vectors"]] == [
        *("short-1-text", "short-2-text", "border-15", "prefix-cold", "prefix-same")
    ]
    with pytest.raises(RequestError, match="vector 'nothing': expected some of short-1-text"):
        make(six(), only=["nothing"])


def test_a_short_context_leaves_out_what_does_not_fit_and_what_names_it() -> None:
    config = replace(six().config, max_position_embeddings=60)
    chosen = {choice.id: choice for choice in choose(config, None)}
    assert "slot-long" not in chosen and "slot-short" not in chosen and "slot-again" not in chosen
    assert all(mentioned(choice) <= chosen.keys() for choice in chosen.values())


def test_an_interrupt_between_the_files_leaves_what_does_not_verify(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path, content: bytes) -> None:
        if path.name == DOCUMENT:
            raise KeyboardInterrupt
        write_whole(path, content)

    new = VectorSet(few().document, {**few().tensors, "border-15/logits": few().tensors["prefix-cold/logits"]}, "")
    monkeypatch.setattr(set_files, "write_whole", interrupt)
    for target in (folder, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            write_set(new, target)
    assert "tensors.sha256" in {difference.what for difference in verify(six(), read_set(folder))}
    with pytest.raises(VectorsError, match=r"new/vectors\.json: does not exist"):
        read_set(tmp_path / "new")


def test_a_folder_with_other_things_in_it_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "thesis.txt").write_text("mine")
    with pytest.raises(RequestError, match=r"holds thesis.txt, expected nothing but vectors.json and vectors.safe"):
        write_set(few(), tmp_path / "set")
    with pytest.raises(RequestError, match="no directory"):
        run("make", "-o", str(tmp_path / "a" / "b"), "--model", str(SIX))


def test_only_exact_arithmetic_makes_and_verifies() -> None:
    with pytest.raises(RequestError, match="numerics float32: expected exact"):
        make(load(SIX, "float32"))


# --- the packaged set


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_set_is_what_its_model_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("verify", name)
    assert capsys.readouterr().out.startswith("verdict    EXACT\n")


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_set_is_what_choose_the_scripts_and_the_notes_say(name: str) -> None:
    """What can change without the numbers: run `lfm2np vectors make` after a change (docs/why/fixture.md)."""
    document, model = read_set(packaged_set(name)).document, load(FIXTURES / name)
    chosen = choose(model.config, model.tokenizer, is_small=name != "trained")
    for choice, vector in zip(chosen, document["vectors"], strict=True):
        assert len(vector["token_ids"]) == choice.new
        assert choice.keep == "all" or golden.kept_names(model, choice.keep) == vector["tensors"]
        said = golden.vector_json(choice, tuple(vector["token_ids"]), vector["positions"], vector["tensors"])
        assert said == vector
    assert document["scripts"] == scripts_of(document["vectors"]) and len(document["scripts"]) == 7
    used = {flag for entry in (*document["vectors"], *document["scripts"]) for flag in entry["flags"]}
    assert document["notes"] == {flag: note for flag, note in NOTES.items() if flag in used}
    assert sum(path.stat().st_size for path in packaged_set(name).iterdir()) < (1.5e6 if name == "trained" else 6e5)


def test_the_tasks_are_answered_right() -> None:
    """So a comment that says what a vector needs is about a model that has it."""
    texts = {vector["id"]: trained().tokenizer.decode(vector["token_ids"]) for vector in packaged()["vectors"]}
    assert texts["task-recall"] == "3" and texts["task-copy"] == "kiba mozu tedo gipa"
    assert texts["task-sort"] == "1 2 4 7 8 9" and texts["task-add"] == "92"
    assert texts["task-story"] == "Tom has the drum." and texts["task-count"] == "17 18 19 20 21 22 23"


# --- damage


def test_a_changed_document_is_refused_also_without_the_package(folder: Path) -> None:
    """A bound of noise, which nothing computes again, twice as large: answers that are off would be right."""
    path = folder / DOCUMENT
    document = json.loads(path.read_text())
    document["vectors"][0]["positions"][0]["noise"]["float32"]["logprob"] *= 2
    path.write_text(json.dumps(document))
    with pytest.raises(
        VectorsError, match=r"vectors\.json: sha256 '\w{64}', expected \w{64} of its other fields: changed"
    ):
        read_set(folder)
    with pytest.raises(vectors_plain.PlainError, match=r"vectors\.json: sha256 '\w{64}', expected \w{64} of its other"):
        vectors_plain.read_document(str(path))


@pytest.mark.usefixtures("computed_once")
def test_a_sound_set_verifies(folder: Path) -> None:
    assert verify(six(), read_set(folder)) == []


@pytest.mark.usefixtures("computed_once")
def test_one_bit_of_a_logit_in_the_tensors_is_named(folder: Path) -> None:
    content = bytearray((folder / TENSORS).read_bytes())
    content[-1] ^= 1  # the last number of the last tensor
    (folder / TENSORS).write_bytes(content)
    first, second = verify(six(), read_set(folder))
    assert first.vector == "short-2-text" and "model.layers.3.self_attn" in first.what
    assert re.search(r"0x.*expected.*0x", str(first))
    assert second.what == "tensors.sha256"


@pytest.mark.usefixtures("computed_once")
def test_one_bit_of_a_row_of_logits_names_vector_position_and_token(folder: Path) -> None:
    known = read_set(folder)
    rows = known.tensors["prefix-cold/logits"].copy()
    rows.view(np.uint32)[3, 5] ^= 1
    (found,) = verify(
        six(), VectorSet(known.document, {**known.tensors, "prefix-cold/logits": rows}, few().tensors_sha256)
    )
    assert (found.vector, found.position) == ("prefix-cold", 3)
    assert found.what == "logit of token 5, first of 1"
    assert re.fullmatch(r"-?[\d.]+ \(-?0x[\d.a-fp+-]+\)", found.found), found.found


@pytest.mark.usefixtures("computed_once")
def test_a_nan_in_the_tensors_is_a_difference(folder: Path) -> None:
    known = read_set(folder)
    rows = known.tensors["border-15/logits"].copy()
    rows[0, 0] = np.nan
    changed = VectorSet(known.document, {**known.tensors, "border-15/logits": rows}, few().tensors_sha256)
    assert [mismatch.vector for mismatch in verify(six(), changed)] == ["border-15"]


def next_float(value: float) -> float:
    return float(np.nextafter(value, np.inf))


Edit = Callable[[dict[str, Any]], None]
VALUES: dict[str, tuple[Edit, str]] = {
    "token": (
        lambda it: it["vectors"][2]["token_ids"].__setitem__(4, (it["vectors"][2]["token_ids"][4] + 1) % 20),
        r"^border-15 position 4: token: \d+, expected \d+$",
    ),
    "logprob": (
        lambda it: it["vectors"][1]["positions"][2].update(
            logprob=next_float(it["vectors"][1]["positions"][2]["logprob"])
        ),
        r"^short-2-text position 2: logprob: -\d.*, expected -\d",
    ),
    "top logit": (
        lambda it: it["vectors"][1]["positions"][7]["top"][3].__setitem__(2, 0.5),
        r"^short-2-text position 7: top\[3\]\[2\]: 0.5, expected",
    ),
    "margin": (
        lambda it: it["vectors"][0]["positions"][0].update(margin=0.0),
        r"^short-1-text position 0: margin: 0.0",
    ),
    "result": (
        lambda it: it["vectors"][3]["positions"][1].update(result="may_tie", may_tie_in=["float32"]),
        r"^prefix-cold position 1: may_tie_in|^prefix-cold position 1: result: ",
    ),
    "bound": (
        lambda it: it["vectors"][3]["positions"][1]["noise"]["float32"]["gaps"].__setitem__(0, 99.0),
        r"^prefix-cold position 1: (result|may_tie_in)",
    ),
    "limit": (lambda it: it.update(limit=11.0), r"^set: limit: 11.0, expected 10.0"),
    "config": (lambda it: it["model"].update(config_sha256="0" * 64), r'^set: model.config_sha256: "000'),
    "weights": (
        lambda it: it["model"]["weights"].update({"model.safetensors": "1" * 64}),
        r'^set: model.weights.model.safetensors: "111',
    ),
    "digest": (lambda it: it["model"].update(digest="2" * 64), r'^set: model.digest: "222'),
    "tensors": (lambda it: it["tensors"].update(sha256="3" * 64), r"^set: tensors.sha256: 333"),
    "scripts": (lambda it: it.update(scripts=[{"id": "x"}]), r"^set: scripts: \[{"),
}


@pytest.mark.usefixtures("computed_once")
@pytest.mark.parametrize("name", VALUES)
def test_a_changed_value_is_a_difference_that_names_its_place(folder: Path, name: str) -> None:
    edit, message = VALUES[name]
    change(folder, edit)
    assert re.search(message, str(verify(six(), read_set(folder))[0]))


def test_the_command_prints_the_differences_and_ends_with_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, message = VALUES["token"]
    change(folder, edit)
    with pytest.raises(ProofError) as error:
        run("verify", str(folder), "--model", str(SIX))
    because = re.search("^because +(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert because and re.search(message, because[1])
    assert error.value.exit_code == 1


def first(it: dict[str, Any]) -> dict[str, Any]:
    return it["vectors"][0]  # type: ignore[no-any-return]


FORMS: dict[str, tuple[Edit, str]] = {  # the schema says more: see tests/test_file_schemas.py
    "missing field": (lambda it: first(it).pop("token_ids"), "not a sound vector set: KeyError: 'token_ids'"),
    "no list": (lambda it: it.update(vectors=None), "not a sound vector set: TypeError"),
    "another version": (lambda it: it.update(format_version=2), "format_version 2, expected 3: make it again"),
    "fewer positions": (lambda it: first(it)["positions"].pop(), "not a sound vector set: IndexError"),
    "missing gap": (
        lambda it: first(it)["positions"][0]["noise"]["float16"]["gaps"].pop(),
        "not a sound vector set: ValueError",
    ),
    "missing format": (lambda it: first(it)["positions"][0]["noise"].pop("float16"), "KeyError: 'float16'"),
    "unlisted tensor": (lambda it: first(it).update(tensors=[]), r"tensor short-1-text/logits: there, but not"),
    "lost tensor": (lambda it: first(it).update(tensors=["logits", "x"]), r"tensor short-1-text/x: missing"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_document_of_another_form_is_refused(folder: Path, name: str) -> None:
    edit, message = FORMS[name]
    change(folder, edit)
    with pytest.raises(VectorsError, match=message) as error:
        run("verify", str(folder), "--model", str(SIX))
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (DOCUMENT, lambda content: content[:-30], "not JSON"),
        (DOCUMENT, lambda content: b"[]", "a JSON array, expected an object"),
        (DOCUMENT, lambda content: b"\xff", "not UTF-8"),
        (DOCUMENT, lambda content: content.replace(b'"margin": ', b'"margin": NaN, "was": ', 1), "NaN is not JSON"),
        (DOCUMENT, lambda content: content.replace(b'"margin": ', b'"margin": 1e999, "was": ', 1), "overflows"),
        (DOCUMENT, lambda content: content.replace(b'"seed"', b'"limit": 1, "seed"', 1), "stands twice"),
        (DOCUMENT, None, "does not exist"),
        (TENSORS, lambda content: content[:-1], "not a sound safetensors file"),
        (TENSORS, lambda content: content[:5], "not a sound safetensors file"),
        (TENSORS, lambda content: content.replace(b'"F32"', b'"I32"', 1), "dtype I32, expected F32"),
        (TENSORS, None, "does not exist"),
    ],
)
def test_a_broken_file_is_named(folder: Path, name: str, damage: Callable[[bytes], bytes] | None, message: str) -> None:
    path = folder / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Lfm2npError, match=message) as error:
        run("verify", str(folder), "--model", str(SIX))
    assert error.value.exit_code == 3 and name in str(error.value)
