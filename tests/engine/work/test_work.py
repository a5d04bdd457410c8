"""Work on executors and in files: the same bits as here, resumed, merged, and refused where they differ."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lfm2np
from lfm2np.commands.cli.shared.work import WORKS
from lfm2np.engine.loading import Model, load
from lfm2np.engine.teacher_forcing import SCORE, score_many
from lfm2np.engine.work import place as work
from lfm2np.engine.work.place import Place, Work, Workers, compute, model_of, source_of
from lfm2np.engine.work.results_file import LineFile, ResultsFile, decoded, encoded, merged, spot_check
from lfm2np.errors import ProofError, RequestError, WorkerError
from scheduler.checksum import json_sha256, sealed

pytestmark = pytest.mark.slow

SEQUENCES = [[random.Random(seed).randrange(8, 500) for _ in range(3 + seed % 9)] for seed in range(40)]


@pytest.fixture(scope="module")
def model() -> Model:
    return lfm2np.load()


@pytest.fixture(scope="module")
def alone(model: Model) -> str:
    return repr([model.score(ids) for ids in SEQUENCES])


def test_scores_have_the_same_bits_on_an_executor(model: Model, alone: str) -> None:
    with ThreadPoolExecutor(3) as executor:
        assert repr(score_many(model, SEQUENCES, Place(executor, max_num_batched_tokens=32))) == alone
        assert repr(score_many(model, SEQUENCES, executor)) == alone


def test_a_worker_process_that_is_killed_midway_changes_nothing(model: Model, alone: str, tmp_path: Path) -> None:
    """One is killed as soon as the first results come, before the last shards are sent."""
    killed: list[int] = []

    def kill_one(done: int, total: int) -> None:
        if done and not killed:
            killed.append(next(iter(workers._pool._processes)))
            os.kill(killed[0], signal.SIGKILL)

    with ResultsFile(tmp_path / "results.jsonl", model) as record, Workers(2) as workers:
        first = workers._pool
        place = Place(workers, record, max_num_batched_tokens=8)
        assert repr(score_many(model, SEQUENCES, place, kill_one)) == alone
        assert len(record.entries) == len(SEQUENCES)
        assert workers._pool is not first, "the control: a pool broke"


def test_a_broken_executor_leaves_a_file_from_which_another_goes_on(model: Model, alone: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"

    def kill_all(done: int, total: int) -> None:
        for process in list(executor._processes) if done else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    executor = ProcessPoolExecutor(2, mp_context=get_context("spawn"))
    with ResultsFile(path, model) as record, executor, pytest.raises(WorkerError, match="takes no work: Broken"):
        score_many(model, SEQUENCES, Place(executor, record, max_num_batched_tokens=8), kill_all)
    kept = len(path.read_text().splitlines())
    assert 0 < kept < len(SEQUENCES)
    with ResultsFile(path, model) as record, ThreadPoolExecutor(2) as threads:
        place = Place(threads, record)
        assert repr(score_many(model, SEQUENCES, place)) == alone
        known = [entry.line["item"] for entry in list(record.entries.values())[:kept]]
    assert place.num_tokens == sum(len(ids) - 1 for ids in SEQUENCES) - sum(len(ids) - 1 for ids in known)


# --- the model of a worker


def test_a_worker_with_another_checkpoint_refuses(model: Model, tmp_path: Path) -> None:
    """The directory has other weights by now than those that the parent loaded."""
    directory = shutil.copytree(model.path, tmp_path / "model")
    changed = load(directory)
    assert changed.sha256 == model.sha256
    shutil.copy(lfm2np.draft_fixture() / "model.safetensors", directory)
    shutil.copy(lfm2np.draft_fixture() / "config.json", directory)
    expected = rf"weights of SHA-256 {load(directory).sha256}, expected {model.sha256}"
    with ThreadPoolExecutor(1) as executor, pytest.raises(WorkerError, match=expected):
        score_many(changed, SEQUENCES[:2], executor)


def test_a_worker_loads_a_model_once(model: Model) -> None:
    source = source_of(load(model.path, weights="streamed"))
    work.load_source.cache_clear()
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(model_of, [source] * 8))
    assert all(item is models[0] for item in models)
    assert models[0].sha256 == model.sha256
    assert models[0].where_weights == "streamed", "as the parent has them"


def test_config_and_weights_make_the_checkpoints_hash(model: Model, tmp_path: Path) -> None:
    directory = shutil.copytree(model.path, tmp_path / "model")
    (directory / "config.json").write_text((directory / "config.json").read_text() + "\n")
    assert load(directory).sha256 != model.sha256


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_result_too_few_is_no_result(model: Model, is_apart: bool) -> None:
    work_of_one = Work("ids", lambda model, items: list(items)[1:], len)
    with ThreadPoolExecutor(1) as executor, pytest.raises(ValueError, match="shorter"):
        compute(work_of_one, model, SEQUENCES, executor if is_apart else None)


# --- files of results


NUMBERS = st.floats(allow_nan=False, width=64) | st.sampled_from([0.0, -0.0, 5e-324, float("inf")])
ARRAYS = st.builds(
    lambda values, dtype: np.array(values).astype(dtype),
    st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=4),
    st.sampled_from(["<f8", "<f4"]),
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | ARRAYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.filterwarnings("ignore:overflow")
@given(PLAIN)
def test_plain_data_comes_back_from_json_bit_for_bit(value: Any) -> None:
    text = json.dumps(encoded(value))
    again = decoded(json.loads(text), "here")
    assert json.dumps(encoded(again)) == text
    assert json_sha256(json.loads(text)) == json_sha256(encoded(value))


def lines_for(model: Model, path: Path, sequences: Sequence[list[int]]) -> list[dict[str, Any]]:
    with ResultsFile(path, model) as record:
        score_many(model, sequences, Place(record=record))
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_threads_that_append_to_one_file_lose_no_line(tmp_path: Path) -> None:
    """As a check's do: one writes answers, one what it computed of earlier ones."""
    lines, count = LineFile(tmp_path / "results.jsonl"), 50
    lines.claim()

    def append(number: int) -> None:
        for index in range(count):
            lines.append(json.dumps({"number": number, "index": index, "more": "x" * 20000}).encode() + b"\n")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(4)))
    lines.close()
    found = [json.loads(line) for _, line in LineFile(lines.path).read()]
    assert sorted((each["number"], each["index"]) for each in found) == list(itertools.product(range(4), range(count)))


def test_files_are_merged_by_their_lines_and_computed_again_by_a_seed(model: Model, alone: str, tmp_path: Path) -> None:
    lines_for(model, tmp_path / "one.jsonl", SEQUENCES[:22])
    lines_for(model, tmp_path / "two.jsonl", SEQUENCES[18:])
    entries = list(merged([tmp_path / "two.jsonl", tmp_path / "one.jsonl"], model).values())
    assert len(entries) == len(SEQUENCES), "those that both have stand once"
    checked = spot_check(model, entries, WORKS, 5, seed=3)
    assert checked == spot_check(model, entries, WORKS, 5, seed=3) != spot_check(model, entries, WORKS, 5, seed=4)
    with pytest.raises(RequestError, match="41 items to compute again: expected 0 to 40"):
        spot_check(model, entries, WORKS, 41, seed=0)


def flip_a_bit(line: dict[str, Any]) -> None:
    logprobs = decoded(line["result"]["logprobs"], "")
    logprobs.view(np.int64)[1] ^= 1
    line["result"]["logprobs"] = encoded(logprobs)


def test_a_result_of_a_machine_that_computes_otherwise_is_refused(model: Model, tmp_path: Path) -> None:
    """When it is computed again, and beside a file that contradicts it."""
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    lines = lines_for(model, one, SEQUENCES[:6])
    right = lines[4]["sha256"]
    flip_a_bit(lines[4])
    lines[4] = sealed(lines[4])
    write(two, lines)
    where = rf"two.jsonl line 5: score of \[{SEQUENCES[4][0]}, .*"
    refusal = rf"{where}: a line of SHA-256 {lines[4]['sha256']}, expected {right}, as "
    with pytest.raises(ProofError, match=refusal + "c"):
        spot_check(model, list(merged([two], model).values()), WORKS, 6, seed=0)
    with pytest.raises(ProofError, match=refusal + ".*one.jsonl line 5 has"):
        merged([one, two], model)


CHANGED = "sha256 '.*', expected .* of its other fields"
DAMAGED = [  # where, and what (None: one bit); in `ranks` the line's hash fits
    ("result.logprobs.base64", None, ProofError, f"{CHANGED}: changed since it was written"),
    ("item", [1, 2, 3], ProofError, CHANGED),
    ("kind", "truth", ProofError, CHANGED),
    ("format_version", 1, RequestError, "format_version 1, expected 2$"),
    ("format_version", True, RequestError, "format_version True, expected 2$"),
    ("checkpoint", "0" * 64, RequestError, "of the checkpoint of SHA-256 '0000.*', expected .*, that of /"),
    ("more", 2, RequestError, "item, kind, more, result, sha256: expected checkpoint, format_version"),
    ("result.ranks.dtype", "|O", RequestError, r"an array of dtype '\|O', expected one of"),
    ("result.ranks.shape", [7], RequestError, "an array that can't be read"),
    ("result.ranks.base64", "?", RequestError, "an array that can't be read"),
]


@pytest.mark.parametrize(("path", "value", "error", "message"), DAMAGED)
def test_a_damaged_line_is_named(
    model: Model, tmp_path: Path, path: str, value: Any, error: type[Exception], message: str
) -> None:
    file = tmp_path / "results.jsonl"
    lines = lines_for(model, file, SEQUENCES[:3])
    if value is None:
        flip_a_bit(lines[1])
    else:
        *way, last = path.split(".")
        functools.reduce(lambda row, name: row[name], way, lines[1])[last] = value
    if path.startswith("result.ranks"):
        lines[1] = sealed(lines[1])
    write(file, lines)
    with pytest.raises(error, match=rf"results.jsonl line 2: .*{message}"), ResultsFile(file, model) as record:
        score_many(model, SEQUENCES[:3], Place(record=record))


def test_only_exact_results_are_kept(model: Model, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="numerics float32, expected exact"):
        ResultsFile(tmp_path / "results.jsonl", load(None, "float32"))
    rounded = dataclasses.replace(SCORE, is_exact=False)
    with ResultsFile(tmp_path / "results.jsonl", model) as record:
        compute(rounded, model, SEQUENCES[:2], Place(record=record))
    assert (tmp_path / "results.jsonl").read_bytes() == b""


def test_a_second_run_on_the_same_file_is_refused_before_it_computes(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, model) as first:
        second = ResultsFile(path, model)
        with pytest.raises(RequestError, match=r"results\.jsonl: .* another run writes to it"), second:
            pass
        score_many(model, SEQUENCES[:1], Place(record=first))
    late = ResultsFile(path, model)
    lines_for(model, path, SEQUENCES[:2])
    with pytest.raises(RequestError, match=r"results\.jsonl: .* bytes, expected .*"), late:
        pass
    assert len(merged([path], model)) == 2


def test_a_torn_last_line_is_computed_again(model: Model, alone: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines_for(model, path, SEQUENCES)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(UserWarning, match="line 40: torn"), ResultsFile(path, model) as record:
        assert repr(score_many(model, SEQUENCES, Place(record=record))) == alone
    assert len(path.read_text().splitlines()) == len(SEQUENCES)


def test_a_kind_of_work_that_is_not_known_is_refused(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines = lines_for(model, path, SEQUENCES[:1])
    write(path, [sealed({**lines[0], "kind": "guess"})])
    with pytest.raises(RequestError, match=re.escape("'guess': no known kind of work, expected one of score, truth")):
        spot_check(model, list(merged([path], model).values()), WORKS, 1, 0)
