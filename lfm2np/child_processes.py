"""Child processes that end with all that they started, by the means of POSIX or of Windows.

On POSIX such a child leads a session, whose number reaches all of it. Windows has neither sessions nor SIGTERM: the
child leads a process group, which gets Ctrl-Break, and `taskkill` ends it with its descendants.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from typing import Any

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
