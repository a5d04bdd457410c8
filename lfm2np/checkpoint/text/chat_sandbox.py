"""A checkpoint's chat template, rendered in a child process that can do little harm: see chat_worker.py.

Where the system has no processes, this one renders: in a browser, whose tab can do no more harm than a child could.
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
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lfm2np import system
from lfm2np.errors import TokenizerError

WORKER = Path(__file__).with_name("chat_worker.py")
CAN_FORK = hasattr(os, "fork")
MOST_IDLE = 4  # some 20 MB each; those beyond are ended when they have answered
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
    answer = ask_renderer({"template": source, "variables": variables})
    if "text" in answer:
        return str(answer["text"])
    raise TokenizerError(f"{name}: the chat template failed: {answer.get('error')}")


def ask_renderer(request: Mapping[str, object]) -> dict[str, Any]:
    """What chat_worker.py answers, in the one way that the system has."""
    if not system.HAS_PROCESSES:
        return _ask_here(request)
    return _ask_worker(request) if CAN_FORK else _ask_once(request)


class Worker:
    """A process of chat_worker.py. It has a session of its own, as an interrupt from the terminal is not its; and it
    ends when its stdin does, so that it does not outlive this process."""

    def __init__(self) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by `end`; a pipe that nobody reads fills up
        words, pipe = [sys.executable, "-P", str(WORKER)], subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                words, bufsize=0, stdin=pipe, stdout=pipe, stderr=self.errors, start_new_session=True
            )
        except BaseException:
            self.errors.close()
            raise

    def ask(self, line: bytes, name: str) -> dict[str, Any] | None:
        """The answer with that id, whatever else is said; None if the process ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        rest, said = memoryview(line), bytearray()
        with suppress(OSError):  # it has ended
            while rest:
                rest = rest[self.process.stdin.write(rest) :]
        while part := self.process.stdout.read(2**16):
            said += part
            for output_line in said.splitlines() if part.endswith(b"\n") else ():
                with suppress(ValueError, TypeError, KeyError):
                    reply = json.loads(output_line)
                    if reply["id"] == name:
                        return {**reply["answer"]}
        return None

    def end(self) -> str:
        """With what it forked; the last line of its errors."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.errors.seek(0)
        message = last_line(self.errors.read())
        self.errors.close()
        return message

    def forget(self) -> None:
        """In a forked child, whose process it is not: it must not keep it alive."""
        self.process.returncode = 0
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                pipe.close()


_lock = threading.Lock()  # of the two below
_workers: set[Worker] = set()  # that live
_idle: list[Worker] = []  # of them those that nobody asks


def _ask_worker(request: Mapping[str, object]) -> dict[str, Any]:
    """The worker's result, or an error. An idle worker may have died: then a new one gets the request."""
    name = uuid.uuid4().hex
    line = json.dumps({"id": name, "seconds": PATIENCE, **request}).encode() + b"\n"
    while True:
        try:
            worker, is_new = _taken()
        except OSError as problem:
            return {"error": f"its process can't be started: {problem}"}
        answer = None
        try:
            answer = worker.ask(line, name)
        finally:
            last_words = _put_back(worker, answer is not None)
        if answer is not None:
            return answer
        if is_new:
            return {"error": f"its process ended with exit code {worker.process.returncode}: {last_words}"}


def _taken() -> tuple[Worker, bool]:
    """An idle one, or a new one; and whether it is new."""
    with _lock:
        if _idle:
            return _idle.pop(), False
        worker = Worker()
        _workers.add(worker)
        return worker, True


def _put_back(worker: Worker, is_well: bool) -> str:
    """Keeps it, or ends it and returns the last line of its errors."""
    with _lock:
        if is_well and len(_idle) < MOST_IDLE:
            _idle.append(worker)
            return ""
        _workers.discard(worker)
    return worker.end()


def _ask_once(request: Mapping[str, object]) -> dict[str, Any]:
    """The same of a process for this request, where none can be forked."""
    line = json.dumps({"id": "", **request}).encode() + b"\n"
    words = [sys.executable, "-P", str(WORKER)]
    try:
        done = subprocess.run(words, input=line, capture_output=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {PATIENCE} seconds"}
    except OSError as problem:
        return {"error": f"its process can't be started: {problem}"}
    if done.returncode != 0:
        return {"error": f"its process ended with exit code {done.returncode}: {last_line(done.stderr)}"}
    answer: dict[str, Any] = json.loads(done.stdout)["answer"]
    return answer


def _ask_here(request: Mapping[str, object]) -> dict[str, Any]:
    """The same in this process, without limits of time and memory."""
    from lfm2np.checkpoint.text import chat_worker  # needs jinja2

    return chat_worker.answered(dict(request))


def last_line(errors: bytes) -> str:
    return errors.decode(errors="replace").strip().rpartition("\n")[2]


def _end_all() -> None:
    """When the interpreter ends: no other thread that it waits for is left."""
    for worker in list(_workers):
        worker.end()


def _forget_all() -> None:
    """In a forked child."""
    global _lock
    _lock = threading.Lock()
    for worker in _workers:
        worker.forget()
    _workers.clear()
    _idle.clear()


atexit.register(_end_all)
if CAN_FORK:
    os.register_at_fork(after_in_child=_forget_all)
