"""The parent's end of a side: one process, one question at a time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from lfm2np.arithmetic.pieces import THREAD_VARIABLES
from lfm2np.errors import Lfm2npError

GRACE = 5.0  # seconds for a process to end when its input has ended
STDERR_BYTES = 4000


class SideError(Lfm2npError):
    """The process of a side died, or could not do what it was asked."""

    exit_code = 1


class SideProcess:
    """A side in a process of its own; it ends with the `with` block, whatever happens."""

    def __init__(self, name: str, directory: Path, threads: int) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close())
        environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
        command = [sys.executable, "-m", "lfm2np.commands.bench.sides.side", name, str(directory), str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True, env=environment
        )

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def ask(self, ask: str, **fields: object) -> dict[str, Any]:
        """Its answer. SideError if it is gone, or says that it can't."""
        assert self._process.stdin is not None and self._process.stdout is not None
        doing = " ".join([ask, *(str(value) for value in fields.values())])
        with contextlib.suppress(OSError):  # gone: it does not answer
            self._process.stdin.write(json.dumps({"ask": ask, **fields}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise SideError(f"{self.name}: {doing}: its process {self._ending()}")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise SideError(f"{self.name}: {doing}: {said['error']}")
        return said

    def _ending(self) -> str:
        """How it ended, and its last words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        code = self._process.returncode
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - STDERR_BYTES))
        lines = self._stderr.read().decode(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "nothing")
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        memory = " (9 is what the system sends when memory runs out)" if code == -9 else ""
        return f"{how}{memory}; last on stderr: {said}"

    def close(self) -> None:
        """Ends it: by the end of its input, or by force if it is busy."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()
