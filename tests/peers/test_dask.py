"""Work on Dask's workers, one of which is killed midway: the bits are those of this process."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

import lfm2np
from lfm2np.cli.shared.work import WORKS
from lfm2np.errors import WorkerError
from lfm2np.loading import Model
from lfm2np.oracle.check import check
from lfm2np.oracle.targets.python_target import PythonTarget
from lfm2np.oracle.vectors.files import packaged_set, read_set
from lfm2np.oracle.vectors.golden import verify
from lfm2np.scoring.teacher_forcing import score_many
from lfm2np.work.place import Place
from lfm2np.work.results_file import ResultsFile, merged, spot_check
from lfm2np.work.shards import map_shards

pytestmark = pytest.mark.peers

SEQUENCES = [[random.Random(seed).randrange(8, 500) for _ in range(3 + seed % 9)] for seed in range(60)]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Three worker processes on this machine."""
    with LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as one:
        yield one


@pytest.fixture(scope="module")
def model() -> Model:
    return lfm2np.load()


def workers(client: Client) -> set[int]:
    return set(client.run(os.getpid).values())


def test_scores_are_the_same_bits_though_a_worker_is_killed_midway(
    client: Client, model: Model, tmp_path: Path
) -> None:
    """One of three, by SIGKILL, when the first results are there and before the last shards are sent."""
    killed: list[int] = []

    def kill_one(done: int, total: int) -> None:
        if done and not killed:
            assert done < total
            killed.append(min(workers(client)))
            os.kill(killed[0], signal.SIGKILL)

    path = tmp_path / "results.jsonl"
    with ResultsFile(path, model) as record:
        place = Place(client.get_executor(pure=False), record, at_once=9, max_num_batched_tokens=16)
        found = score_many(model, SEQUENCES, place, kill_one)
    assert repr(found) == repr([model.score(ids) for ids in SEQUENCES])
    client.wait_for_workers(3)
    assert killed and killed[0] not in workers(client)
    spot_check(model, list(merged([path], model).values()), WORKS, 10, seed=0)


def always_killed(shard: int) -> int:
    if shard == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return shard


def test_a_shard_that_kills_every_worker_is_named(client: Client) -> None:
    with pytest.raises(WorkerError, match=r"shard 4: lost 3 times, .*KilledWorker"):
        map_shards(always_killed, range(6), client.get_executor(pure=False))


def test_check_and_vectors_run_there_too(client: Client, model: Model) -> None:
    target = PythonTarget("lfm2np.conformance.adapters:own", model.path)
    executor = client.get_executor(pure=False)
    found = check(model, target, "float32", cases=["short-prompts"], executor=executor)
    assert str(found.total.verdict) == "EXACT" and found.total.worst == 0.0
    assert verify(model, read_set(packaged_set()), executor=executor) == []
