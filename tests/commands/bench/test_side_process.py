"""A side in its own process: it answers, and it ends, whatever happens to it or to us."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lfm2np.commands.bench.sides.side_process import SideError, SideProcess

MODEL = Path(__file__).parents[3] / "fixtures" / "torture" / "minimal_config"


def children() -> list[int]:
    """Processes whose parent is this one, ended but not waited for included."""
    processes = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            processes.append(int(stat.parent.name))
    return processes


@pytest.fixture
def others() -> list[int]:
    return children()


def test_a_side_answers_says_what_it_can_t_do_and_leaves_no_process_behind(others):
    with SideProcess("exact", MODEL, 1) as side:
        loaded = side.ask("load")
        assert set(loaded) == {"load_seconds", "peak_bytes", "versions"}
        with pytest.raises(SideError, match="exact: time prefill-0 1: RequestError: cell 'prefill-0'"):
            side.ask("time", cell="prefill-0", steps=1)  # and it lives on
        timed = side.ask("time", cell="decode-2x5", steps=3)
        assert (len(timed["steps"]), set(timed)) == (3, {"steps", "peak_bytes"})
        assert side.ask("prefill_memory", length=9)["cache_bytes"] > 0
        assert side.ask("answer", way="padded", longest=2)["seconds"] > 0
    assert children() == others


def test_a_killed_side_is_one_error_that_says_how_it_ended(others):
    with SideProcess("floor-float32", MODEL, 1) as side:
        side.ask("load")
        (pid,) = set(children()) - set(others)
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(SideError, match="floor-float32: time decode-1x5 1: its process was ended by signal 9"):
                side.ask("time", cell="decode-1x5", steps=1)
    assert children() == others


def test_a_crash_says_the_last_line_of_its_traceback(others):
    with SideProcess("floor-float99", MODEL, 1) as side, pytest.raises(SideError, match=r"code 1; .*float99"):
        side.ask("load")
    assert children() == others


def test_a_checkpoint_that_can_t_be_loaded_is_said(tmp_path):
    with (
        SideProcess("exact", tmp_path, 1) as side,
        pytest.raises(SideError, match=f"exact: load: ConfigError: {tmp_path}"),
    ):
        side.ask("load")


def test_a_busy_side_is_ended_by_force(others, monkeypatch):
    monkeypatch.setattr("lfm2np.commands.bench.sides.side_process.GRACE", 0.2)
    with SideProcess("exact", MODEL, 1) as side:
        side.ask("load")
        assert side._process.stdin
        side._process.stdin.write('{"ask": "answer", "way": "without-cache", "longest": 900}\n')
        side._process.stdin.flush()
    assert children() == others


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_sides_end_with_their_parent(sign, tmp_path):
    """Also when nobody tells them: their input ends."""
    command = [sys.executable, "-m", "lfm2np", "bench", "--model", str(MODEL), "--rounds", "10000", "--without-peers"]
    parent = subprocess.Popen(
        [*command, "--cells", "decode-1x5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run with & would ignore it
    )
    mine = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    while len(sides := mine.read_text().split()) < 4:
        time.sleep(0.01)
    parent.send_signal(sign)
    out, error = parent.communicate()
    assert out == b""
    if sign == signal.SIGINT:
        assert (parent.returncode, error) == (130, b"lfm2np: interrupted\n")
    while any(is_running(int(pid)) for pid in sides):
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return b"lfm2np.commands.bench.sides.side" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
