"""Work on Dask's workers, one of which is killed midway: the bits are those of this process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster
from distributed.cfexecutor import _cascade_future

import lfm2np
from lfm2np.commands.cli import main
from lfm2np.commands.cli.shared import work
from lfm2np.engine.loading import Model
from lfm2np.engine.work.place import map_shards, source_of
from lfm2np.engine.work.results_file import ResultsFile
from lfm2np.errors import WorkerError
from lfm2np.oracle.check import check
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.vectors.golden import verify
from lfm2np.oracle.vectors.set_files import packaged_set, read_set

VERSION = lfm2np.__version__
pytestmark = pytest.mark.peers

SEQUENCES = [[random.Random(seed).randrange(8, 500) for _ in range(3 + seed % 9)] for seed in range(60)]


@contextlib.contextmanager
def three_workers() -> Iterator[Client]:
    """Processes on this machine. One that is killed while its nanny starts it never comes back, so a test that kills
    any has a cluster of its own and does not wait for three.
    """
    with LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with three_workers() as client:
        yield client


@pytest.fixture(scope="module")
def model() -> Model:
    return lfm2np.load()


def workers(client: Client) -> set[int]:
    return set(client.run(os.getpid).values())


class LostWhileItsResultCame:
    """A future of Dask: the result is fetched, and then its worker dies, so that the task waits again."""

    status = "pending"

    def __init__(self, result: object) -> None:
        self.result = result

    async def _result(self, raiseit: bool) -> object:
        return self.result


class LosingFirst(Executor):
    """Dask's executor, but the first worker dies while its result comes."""

    def __init__(self, client: Client) -> None:
        self.client, self.has_lost = client, False

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        if self.has_lost:
            return self.client.get_executor(pure=False).submit(function, *arguments, **named)  # type: ignore[no-any-return]
        self.has_lost, future = True, Future[Any]()
        self.client.loop.add_callback(_cascade_future, LostWhileItsResultCame(function(*arguments, **named)), future)
        return future


def test_a_result_that_dask_takes_for_an_exception_is_a_lost_one(client: Client) -> None:
    kept: list[tuple[int, Any]] = []
    names = ["first", "second", "third"]
    map_shards(int, ["1", "2", "3"], LosingFirst(client), lambda *result: kept.append(result), names)
    assert sorted(kept) == [(0, 1), (1, 2), (2, 3)]
    with pytest.raises(ValueError, match="invalid literal"):
        map_shards(int, ["x"], LosingFirst(client), lambda *result: kept.append(result), names)


def always_killed(shard: int) -> int:
    if shard == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return shard


def test_a_shard_that_kills_every_worker_is_named() -> None:
    names = [f"shard {shard}" for shard in range(6)]
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),  # one death each time: none is being started
        three_workers() as client,
        pytest.raises(WorkerError, match=r"shard 4: lost 3 times, .*KilledWorker"),
    ):
        map_shards(always_killed, range(6), client.get_executor(pure=False), lambda *_: None, names)


def test_check_and_vectors_run_there_too(client: Client, model: Model) -> None:
    target = PythonTarget("lfm2np.suite.adapters:own", model.path)
    executor = client.get_executor(pure=False)
    judgement = check(model, target, "float32", cases=["short-prompts"], executor=executor)
    assert str(judgement.total.verdict) == "EXACT" and judgement.total.worst == 0.0
    assert verify(model, read_set(packaged_set()), executor=executor) == []


# --- --workers ADDRESS


@pytest.fixture
def requests(tmp_path: Path) -> str:
    """60 shards, so that some wait while others are computed."""
    lines = [json.dumps({"prompt_token_ids": ids * 40}) + "\n" for ids in SEQUENCES]
    (tmp_path / "requests.jsonl").write_text("".join(lines))
    return str(tmp_path / "requests.jsonl")


def score(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    """Exit code, outputs, and the lines on stderr that are not progress."""
    code = main(["score", "--json", *words])
    captured = capsys.readouterr()
    return code, json.loads(captured.out)["outputs"] if captured.out else None, captured.err


def after_the_first_result(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """When it is in the file, and no other is."""
    extend = ResultsFile.extend

    def first(self: ResultsFile, *result: Any) -> None:
        extend(self, *result)
        monkeypatch.setattr(ResultsFile, "extend", extend)
        act()

    monkeypatch.setattr(ResultsFile, "extend", first)


def test_the_command_line_gives_the_same_bits_though_a_worker_is_killed_midway(
    requests: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGKILL; results of its shards that were not fetched are lost."""
    results, killed = tmp_path / "results.jsonl", list[int]()
    options = ["--requests", requests]
    with three_workers() as client:
        address = client.scheduler.address

        def kill() -> None:
            killed.append(min(workers(client)))
            os.kill(killed[0], signal.SIGKILL)

        after_the_first_result(monkeypatch, kill)
        code, printed, _ = score(capsys, *options, "--workers", address, "--save", str(results))
        assert code == 0 and printed == score(capsys, *options)[1]
        assert killed[0] not in workers(client)
        merge = ["score", "--merge", str(results), "-o", str(tmp_path / "merged.jsonl"), "--spot-check", "5"]
        assert main([*merge, "--workers", address]) == 0
    assert capsys.readouterr().out.endswith("60 items from 1 files; 5 computed again\n")


def test_a_cluster_without_workers_ends_the_run_and_what_was_computed_stays(
    requests: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "WITHOUT_WORKERS", 1.0)
    results = tmp_path / "results.jsonl"
    options = ["--requests", requests, "--save", str(results)]
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        scheduler = str(tmp_path / "scheduler.json")
        Path(scheduler).write_text(json.dumps({"address": cluster.scheduler_address}))
        after_the_first_result(monkeypatch, lambda: cluster.scale(0))
        code, _, message = score(capsys, *options, "--workers", scheduler)
        assert code == 1 and "had no worker for 1 seconds; with --save FILE, the same command resumes" in message
        kept = results.read_bytes().count(b"\n")
        assert 0 < kept < len(SEQUENCES)
        code, _, message = score(capsys, *options, "--workers", scheduler)
        assert code == 1 and "no worker within 1 seconds" in message
    code, printed, _ = score(capsys, *options)
    assert code == 0 and printed == score(capsys, "--requests", requests)[1]


def test_an_address_where_no_scheduler_answers_is_one_line(
    requests: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "CONNECTING", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        addresses = [f"tcp://127.0.0.1:{mute.getsockname()[1]}", "tcp://127.0.0.1:1", "http://h:1", "missing.json"]
        for address in addresses:
            code, _, message = score(capsys, "--requests", requests, "--workers", address)
            assert code == 2
            assert message.splitlines()[-1].startswith(f"lfm2np: RequestError: --workers {address}: no Dask scheduler")


def test_a_worker_that_cannot_compute_is_named_before_any_work(
    client: Client, requests: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> str:
        code, _, message = score(capsys, "--requests", requests, "--workers", client.scheduler.address)
        assert code == 1
        return message.splitlines()[-1]

    for changed, expected in (
        ({"sha256": "0" * 64}, f"expected {'0' * 64}"),
        ({"path": "/nowhere"}, "CheckpointError: /nowhere"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(work, "source_of", lambda model, changed=changed: replace(source_of(model), **changed))
            assert "WorkerError: worker tcp://" in (message := refused()) and expected in message
    with monkeypatch.context() as patched:
        patched.setattr(lfm2np, "__version__", "9.9")
        assert refused().endswith(f"lfm2np {VERSION}, expected 9.9, as where the command runs")
        check = ["check", "lfm2np.suite.adapters:own", "--workers", client.scheduler.address]
        assert main(check) == 3  # 1 would say that the engine is wrong
    client.run(lambda: sys.modules.update(lfm2np=None))  # type: ignore[call-overload]
    try:
        assert "ModuleNotFoundError" in refused()
    finally:
        client.restart()
