"""The command line: a file for each command or two, program.py puts them together. Public: `main`.

A command's file has its options (`add_generate`, ...) and what runs it; shared/ is what several of them need.
"""

from lfm2np.cli.program import main

__all__ = ["main"]
