"""The command line: a file for each command or two, shared/ is what several of them need. Public: `main`."""

from lfm2np.commands.cli.program import main

__all__ = ["main"]
