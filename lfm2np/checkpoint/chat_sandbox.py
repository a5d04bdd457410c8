"""A checkpoint's chat template, rendered in a child process that can do little harm: see chat_worker.py.

To start Python and jinja2 takes twenty times as long as to render: so the processes that fork these children stay.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lfm2np.errors import TokenizerError

WORKER = Path(__file__).with_name("chat_worker.py")
CAN_FORK = hasattr(os, "fork")
MOST_IDLE = 4  # a core each; more are ended when they have answered
PATIENCE = 30  # seconds of waiting; the worker's own limit is on processor time
OLDEST_JINJA = (3, 1, 6)  # before it, the sandbox has known escapes; transformers refuses it too


def render_template(
    source: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str], name: str
) -> str:
    """The template's output for a conversation with add_generation_prompt; TokenizerError naming the file otherwise."""
    version = importlib.metadata.version("jinja2")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < OLDEST_JINJA:
        raise TokenizerError(f"jinja2 {version}: its sandbox has known escapes, expected at least 3.1.6")
    variables: dict[str, object] = {**special_tokens, "messages": [dict(message) for message in messages]}
    variables |= {"tools": None, "documents": None, "add_generation_prompt": True}
    answer = _ask_worker({"template": source, "variables": variables})
    if "text" not in answer:
        raise TokenizerError(f"{name}: the chat template failed: {answer['error']}")
    return answer["text"]


# Processes that wait for a template; they have a session of their own, as an interrupt from the terminal is not theirs,
# and end when their stdin does, so that none outlives this process.
_idle: list[subprocess.Popen[bytes]] = []


def _ask_worker(request: Mapping[str, object]) -> dict[str, str]:
    """The worker's answer, or an error in its place if it was stopped."""
    try:
        worker = _taken() or _started()
    except OSError as problem:
        return {"error": f"its process can't be started: {problem}"}
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        _kill(worker)

    timer = threading.Timer(PATIENCE, stop)
    timer.start()
    try:
        line = _exchanged(worker, json.dumps(request).encode() + b"\n")
    except BaseException:
        _kill(worker)  # nobody waits for its answer
        raise
    finally:
        timer.cancel()
    if not line.endswith(b"\n"):
        _kill(worker)
        told = worker.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]
        ended = f"its process ended with exit code {worker.returncode}: {told}"
        return {"error": f"no end after {PATIENCE} seconds" if is_late.is_set() else ended}
    if CAN_FORK and len(_idle) < MOST_IDLE:
        _idle.append(worker)
    else:
        worker.communicate()
    answer: dict[str, str] = json.loads(line)
    if "stopped" in answer:
        return {"error": f"it was stopped for the time or memory it used (exit code {answer['stopped']})"}
    return answer


def _taken() -> subprocess.Popen[bytes] | None:
    """An idle one that still lives."""
    with suppress(IndexError):  # of several threads one takes the last
        while _idle:
            worker = _idle.pop()
            if worker.poll() is None:
                return worker
            worker.communicate()
    return None


def _started() -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    words = [sys.executable, "-P", str(WORKER)]
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)


def _exchanged(worker: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Its answer's line; cut short, or none, if it ended."""
    assert worker.stdin is not None and worker.stdout is not None
    with suppress(OSError):  # it has ended
        worker.stdin.write(line)
        worker.stdin.flush()
    return worker.stdout.readline()


def _kill(worker: subprocess.Popen[bytes]) -> None:
    """And what it forked."""
    with suppress(OSError):
        if CAN_FORK:
            os.killpg(worker.pid, signal.SIGKILL)
        else:
            worker.kill()


def _end_idle() -> None:
    while (worker := _taken()) is not None:
        worker.communicate()


def _forget_idle() -> None:
    """In a forked child, whose processes they are not."""
    for worker in _idle:
        worker.returncode = 0
    _idle.clear()


atexit.register(_end_idle)
if CAN_FORK:
    os.register_at_fork(after_in_child=_forget_idle)
