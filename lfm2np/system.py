"""What the system under Python has and does: threads and processes, memory, child processes, files written whole.

In a browser (WebAssembly) there are neither processes nor threads. The one place that decides; who needs either asks
here, and has another way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from lfm2np.errors import RequestError

IS_WASM = sys.platform in ("emscripten", "wasi")
HAS_THREADS = not IS_WASM


def cache_directory() -> Path:
    """Where this program keeps what it can make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lfm2np"


# --- memory


ENVIRONMENT = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")  # by which a user decides it
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST, LARGEST_BEFORE, MOST_KEPT = 2**28, 2**25, 2**29  # bytes: of an array, with a glibc before 2.35, at the end


def keep_freed_memory() -> bool:
    """Lets glibc keep what arrays leave for the next ones, at its heap's end up to half a gigabyte; whether it does.

    Otherwise it gives the memory of a step's large arrays back, and the system maps and clears it anew in each step: a
    tenth of the time of a short prefill in float32. For a whole process, so whoever owns it calls this: the command
    line does, a program that imports the package may. Nothing happens where the environment has a word on it, or with
    another C library; a browser's is not asked.

    Source: mallopt(3).
    """
    if IS_WASM or any(name in os.environ for name in ENVIRONMENT):
        return False
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no such library, or no such function in it
        mallopt = ctypes.CDLL(None).mallopt
        kept = mallopt(M_MMAP_THRESHOLD, LARGEST) or mallopt(M_MMAP_THRESHOLD, LARGEST_BEFORE)
        return bool(kept and mallopt(M_TRIM_THRESHOLD, MOST_KEPT))
    return False


# --- child processes


# A child ends with all that it started. On POSIX it leads a session, whose number reaches all of it. Windows has
# neither sessions nor SIGTERM: the child leads a process group, which gets Ctrl-Break, and `taskkill` ends the rest.

IS_WINDOWS = os.name == "nt"


def split_command(command: str) -> list[str]:
    """The words of a command line, as a shell would split it; on Windows a backslash is part of a path.

    ValueError for a quotation that does not end.
    """
    words = shlex.shlex(command, posix=True, punctuation_chars=False)
    words.whitespace_split, words.commenters = True, ""
    if IS_WINDOWS:
        words.escape = ""
    return list(words)


def session() -> dict[str, Any]:
    """Arguments of Popen for a child that an interrupt from the terminal does not reach."""
    if IS_WINDOWS:
        return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    return {"start_new_session": True}


def terminate_session(process: subprocess.Popen[bytes]) -> None:
    """Asks a child started with `session`, and what it started, to end. Nothing if they are gone."""
    with contextlib.suppress(OSError):
        if IS_WINDOWS:
            process.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))
        else:
            os.killpg(process.pid, signal.SIGTERM)


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Ends a child started with `session`, and what it started. Nothing if they are gone.

    On Windows the descendants of a child that has ended can't be found, and stay.
    """
    with contextlib.suppress(OSError):
        if IS_WINDOWS:
            command, nothing = ["taskkill", "/F", "/T", "/PID", str(process.pid)], subprocess.DEVNULL
            subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, check=False)
        else:
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        process.kill()


# --- files


@contextlib.contextmanager
def replaced(target: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the target's place, on the disk, when the block ends, and is gone if that fails.

    It keeps the mode of a file that it replaces, also while it is written; a link stays one, to the new file.
    """
    target = target.resolve()
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    try:
        with open(beside, "xb", opener=partial(os.open, mode=0o666 if mode is None else mode & 0o666)) as file:
            if mode is not None:
                beside.chmod(mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes a file so that it is there as a whole or as it was before. RequestError that names it if it can't be.

    A name for something else than a file (a device, a pipe) is written to directly, not replaced.
    """
    target, data = Path(path), content.encode("utf-8") if isinstance(content, str) else content
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        with replaced(target) as file:
            file.write(data)
    except OSError as problem:
        raise RequestError(f"{path}: can't be written: {problem.strerror or problem}") from None
