"""The process that computes: it is ended when it hangs, made anew when it dies, and never left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from living import lives, wait_until_gone

from lfm2np.teaching.lab.child import MEMORY
from lfm2np.teaching.lab.lab_page import answer
from lfm2np.teaching.lab.models import Models
from lfm2np.teaching.lab.worker import MOST_KEPT, Reply, Worker

MISBEHAVING = (sys.executable, str(Path(__file__).with_name("misbehaving_child.py")))
PAPER = "model=paper&prompt=the cat&tokens=2"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(command=MISBEHAVING) as shared:
        yield shared


def test_a_page_is_that_of_this_process(worker: Worker, models: Models):
    assert worker.reply(PAPER) == Reply(*answer(PAPER, models))
    assert worker.reply("slots=0") == Reply(*answer("slots=0", models))
    assert worker.reply("slots=0").status == 400


def test_what_a_run_prints_is_no_part_of_its_page(worker: Worker, models: Models):
    assert worker.reply("print") == Reply(*answer("print", models))


def test_the_process_is_kept_between_runs(worker: Worker):
    first = worker.pid
    worker.reply("slots=0&blocks=0")
    assert first is not None and worker.pid == first


@pytest.mark.slow
def test_a_run_that_hangs_is_ended_and_the_next_one_has_a_new_process(models: Models):
    with Worker(seconds=2.5, command=MISBEHAVING) as worker:
        first = worker.pid
        assert first is not None
        assert worker.reply("hang") == Reply(504, "the run took longer than 2.5 s and was stopped")
        assert not lives(first)
        assert worker.reply(PAPER) == Reply(*answer(PAPER, models))
        assert worker.pid not in (None, first)


def test_a_process_that_dies_is_told_and_made_anew(worker: Worker):
    reply = worker.reply("crash")
    assert reply == Reply(500, "the process that computes the run died; the next run has a new one")
    assert worker.reply("slots=0").status == 400


def test_memory_that_runs_out_is_told_and_the_process_made_anew(worker: Worker):
    worker.reply("slots=0")
    first = worker.pid
    assert worker.reply("memory") == Reply(507, "the run needed more memory than it may have")
    assert worker.reply("slots=0&x=1").status == 400
    assert worker.pid not in (None, first)


def test_a_defect_is_told_by_its_name(worker: Worker):
    assert worker.reply("defect") == Reply(500, "KeyError: a defect of the laboratory")


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="the system does not tell limits")
def test_the_process_has_a_limit_of_memory(worker: Worker):
    worker.reply("slots=0&d=1")  # one that is there
    limits = Path(f"/proc/{worker.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert int(line.split()[3]) <= MEMORY


def test_finished_pages_are_kept_and_failures_are_not(worker: Worker):
    first = worker.reply("slots=0&a=1")
    assert worker.kept("slots=0&a=1") is first
    for number in range(MOST_KEPT):
        worker.reply(f"slots=0&b={number}")
    assert worker.kept("slots=0&a=1") is None and worker.kept("slots=0&b=0") is not None
    worker.reply("defect")
    assert worker.kept("defect") is None


@pytest.mark.slow
def test_a_kept_page_is_there_while_another_run_computes(worker: Worker):
    worker.reply("slots=0&c=1")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(worker.reply, "sleep")
        time.sleep(0.1)
        assert worker.kept("slots=0&c=1") is not None
        assert not asked.done()
        assert asked.result().status == 400


def test_runs_are_one_at_a_time(worker: Worker, models: Models):
    queries = [
        PAPER,
        "model=paper&prompt=a&tokens=3",
        "slots=0",
        "model=paper&prompt=a&fault=convolution-crosses-requests",
    ]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(worker.reply, queries)) == [Reply(*answer(query, models)) for query in queries]


def test_closing_ends_the_process_in_the_middle_of_a_run():
    threads = threading.active_count()
    with Worker(command=MISBEHAVING) as worker, ThreadPoolExecutor(1) as pool:
        worker.reply("slots=0")
        pid = worker.pid
        asked = pool.submit(worker.reply, "hang")
        time.sleep(0.2)
        worker.close()
        assert pid is not None and not lives(pid)
        assert asked.result(10).status == 500
        assert worker.reply("slots=1") == Reply(500, "the laboratory has ended")
    until = time.monotonic() + 30
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)  # the watch of the reply that was cut ends by itself
    assert worker.pid is None and threading.active_count() <= threads


OWNER = """
import sys
from lfm2np.teaching.lab.worker import Worker
with Worker(command=sys.argv[1:]) as worker:
    worker.reply("slots=0")
    print(worker.pid, flush=True)
    worker.reply("hang")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_process_ends_with_its_owner_even_in_the_middle_of_a_run(how: signal.Signals):
    command = [sys.executable, "-c", OWNER, *MISBEHAVING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        time.sleep(0.2)
        assert lives(pid)
        owner.send_signal(how)
        owner.wait(20)
    assert wait_until_gone(pid)
