"""The command line: a file for each command or two, shared/ is what several of them need. Public: `main`.

What has to stand in the environment before NumPy loads its BLAS is set here, for commands and the processes that they
start: after a product OpenBLAS's threads go on asking for work for 2**26 cycles, 26 ms, and so keep their cores from
the threads that compute elementwise pieces (arithmetic/pieces.py) in between. 2**20 cycles, 0.4 ms, are more than lie
between two products of a small step. A program that imports lfm2np keeps OpenBLAS's own choice unless it sets the
variable itself. No bit depends on it.

Source: OpenBLAS, driver/others/blas_server.c (thread_timeout).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. An interrupt is one line, also while modules are imported, which takes a
    second."""
    try:
        from lfm2np.commands.cli.program import main as run

        return run(argv)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError, AttributeError):  # standard error is closed
            sys.stderr.write("lfm2np: interrupted\n")
        return 130
