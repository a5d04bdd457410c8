"""Prepared matrices in a file: the same bits, never those of another checkpoint, and no damaged one."""

from __future__ import annotations

import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.arithmetic import NAMES, exact
from lfm2np.arithmetic.matrix import Matrix
from lfm2np.checkpoint import loaded, prepared_file, weights
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.prepared_file import VERSION, Origin, read, write
from lfm2np.commands.cli import main
from lfm2np.engine.loading import load
from lfm2np.engine.work.place import load_source, model_of, source_of
from lfm2np.errors import CheckpointError, RequestError

TORTURE = Path(__file__).parents[2] / "fixtures" / "torture"
SMALL, MIXTURE = TORTURE / "magnitudes", TORTURE / "moe_minimal_config"
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
ORIGIN = Origin("0" * 64, "exact")


def head(model: LoadedModel) -> Matrix:
    return model.weights.head


def is_mapped(matrix: Matrix) -> bool:
    values = matrix.values
    while isinstance(values, np.ndarray) and not isinstance(values, np.memmap):
        values = values.base
    return isinstance(values, np.memmap)


@pytest.mark.parametrize("path", [SMALL, MIXTURE])
@pytest.mark.parametrize("numerics", ["exact", *(pytest.param(name, marks=pytest.mark.rounding) for name in NAMES[1:])])
def test_weights_from_the_file_are_those_that_were_prepared(path: Path, numerics: str, tmp_path: Path) -> None:
    plain = load(path, numerics)
    for _ in range(2):  # written and read, then only read
        kept = load(path, numerics, prepared=tmp_path)
        assert kept.logits(IDS).tobytes() == plain.logits(IDS).tobytes()
        assert is_mapped(head(kept)) and not is_mapped(head(plain))
        assert kept.prepared_directory == tmp_path
    assert [file.name for file in tmp_path.iterdir()] == [Origin(plain.sha256, numerics).file_name]


@pytest.mark.parametrize("moment", ["prepared", "read_config"])
def test_a_checkpoint_that_changes_while_it_is_read_is_not_kept(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file takes its place: before its weights are mapped, or after."""
    place = shutil.copytree(SMALL, tmp_path / "checkpoint")
    changed = bytearray(next(place.glob("*.safetensors")).read_bytes())
    changed[-2] ^= 1
    module = weights if moment == "prepared" else loaded
    inner = getattr(module, moment)

    def late(*arguments: Any, **named: Any) -> Any:
        (weight_file,) = place.glob("*.safetensors")
        other = place / "other"
        other.write_bytes(changed)
        other.replace(weight_file)
        return inner(*arguments, **named)

    monkeypatch.setattr(module, moment, late)
    with pytest.raises(CheckpointError, match="the checkpoint changed meanwhile"):
        load(place, prepared=tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_place_that_can_not_be_written_is_known_before_anything_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(weight: object, what: str) -> Matrix:
        raise AssertionError(what)

    monkeypatch.setattr(exact, "prepare_matrix", never)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="can't be written"):
        load(SMALL, prepared=tmp_path / "file" / "below")


def test_what_is_in_the_file_is_not_prepared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(SMALL, prepared=tmp_path)

    def never(weight: object, what: str) -> Matrix:
        raise AssertionError(what)

    monkeypatch.setattr(exact, "prepare_matrix", never)
    load(SMALL, prepared=tmp_path)
    with pytest.raises(AssertionError, match="model"):
        load(SMALL)


def test_a_checkpoint_whose_weights_changed_is_prepared_anew(tmp_path: Path) -> None:
    """Under the same name, with the same sizes, and as old as before."""
    path, kept = shutil.copytree(SMALL, tmp_path / "model"), tmp_path / "kept"
    before = load(path, prepared=kept).logits(IDS)
    weights = path / "model.safetensors"
    content, times = bytearray(weights.read_bytes()), weights.stat()
    content[-1] ^= 0x80  # a sign
    weights.unlink()
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = load(path, prepared=kept)
    assert after.logits(IDS).tobytes() == load(path).logits(IDS).tobytes()
    assert after.logits(IDS).tobytes() != before.tobytes(), "the control: it does matter"
    assert len(list(kept.iterdir())) == 2


def some_matrices() -> dict[str, Matrix]:
    weight = np.random.default_rng(0).normal(size=(70, 90))
    return {
        "first": exact.prepare_matrix(weight.astype(np.float32), "first"),
        "second": exact.prepare_matrix(weight[:3, :5], "second"),
        "third": Matrix(weight.astype(np.float32)),
    }


def told(matrices: dict[str, Matrix]) -> list[object]:
    contents: list[object] = []
    for name, matrice in matrices.items():
        assert isinstance(matrice.values, np.ndarray)
        grid = matrice.grid and (
            matrice.grid.columns.tobytes(),
            matrice.grid.slices,
            matrice.grid.row_sum_bits,
            matrice.grid.activation_bits,
        )
        contents.append((name, matrice.values.tobytes(), matrice.values.shape, matrice.values.dtype, grid))
    return contents


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_changes_a_matrix(where: float, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It is an error, or lies between the matrices."""
    file = tmp_path_factory.getbasetemp() / "flipped"
    matrices = some_matrices()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_file, "CHUNK", 1000)
        write(file, ORIGIN, matrices)
        content = bytearray(file.read_bytes())
        assert told(read(file, ORIGIN)) == told(matrices), "the control"
        position = int(where * len(content))
        content[position] ^= 1 << bit
        file.write_bytes(content)
        try:
            assert told(read(file, ORIGIN)) == told(matrices)
        except CheckpointError as error:
            assert str(file) in str(error) and "\n" not in str(error)


@given(keep=st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_off_is_refused(keep: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "cut"
    write(file, ORIGIN, some_matrices())
    with file.open("r+b") as opened:
        opened.truncate(int(keep * file.stat().st_size))
    with pytest.raises(CheckpointError, match=r"damaged.*once it is deleted, the weights are prepared anew"):
        read(file, ORIGIN)


@pytest.mark.parametrize(
    "origin", [Origin("1" * 64, "exact"), Origin("0" * 64, "float64"), Origin("0" * 64, "exact", 0)]
)
def test_a_file_under_another_s_name_is_refused(origin: Origin, tmp_path: Path) -> None:
    write(tmp_path / "one", origin, some_matrices())
    with pytest.raises(CheckpointError, match=f"prepared weights of .*{origin.numerics}.*, as its name says"):
        read(tmp_path / "one", ORIGIN)
    (tmp_path / "two").write_text("text")
    with pytest.raises(CheckpointError, match="damaged"):
        read(tmp_path / "two", ORIGIN)


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written_stays(problem: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise problem

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises((RequestError, KeyboardInterrupt), match=r"can't be written: No space left|^$"):
        write(tmp_path / "one", ORIGIN, some_matrices())
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["info", "--digest", "--model", str(SMALL), "--prepared", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{tmp_path / 'file'}" in error


def test_streamed_weights_are_not_kept(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="expected weights 'resident', streamed ones are not kept"):
        load(SMALL, weights="streamed", prepared=tmp_path)


def test_several_at_once_write_one_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(lambda _: load(SMALL, prepared=tmp_path).logits(IDS).tobytes(), range(4)))
    assert set(outputs) == {load(SMALL).logits(IDS).tobytes()}
    assert len(list(tmp_path.iterdir())) == 1


def test_workers_map_the_file_of_their_parent(tmp_path: Path) -> None:
    load_source.cache_clear()
    worker = model_of(source_of(load(SMALL, prepared=tmp_path)))
    assert worker.prepared_directory == tmp_path and is_mapped(head(worker))
    assert not is_mapped(head(model_of(source_of(load(SMALL)))))


def test_commands_take_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["info", "--digest", "--model", str(SMALL), "--prepared", str(tmp_path)]) == 0
    assert set(capsys.readouterr().out.split()) == {load(SMALL).digest()}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_change_of_what_is_prepared_raises_the_version(tmp_path: Path) -> None:
    """Exact matrices are the same bits everywhere. If these are others, files of the old ones exist: raise VERSION."""
    model = load(prepared=tmp_path)
    digest = hashlib.sha256()
    for name, value in read(tmp_path / Origin(model.sha256, "exact").file_name, Origin(model.sha256, "exact")).items():
        assert isinstance(value.values, np.ndarray) and value.grid is not None
        digest.update(f"{name} {value.values.shape} {value.grid.slices} {value.grid.row_sum_bits}".encode())
        digest.update(value.grid.columns.astype("<i4").tobytes())
        digest.update(value.values.astype("<f8").tobytes())
    assert (VERSION, digest.hexdigest()[:16]) == (1, "46246bd0d62737f2")
