"""`lfm2np locate`: the first operation of an engine whose output differs from what its inputs give."""

from __future__ import annotations

import argparse
import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.cli.shared.parser import Commands, add_command
from lfm2np.cli.shared.terminal import print_result, progress_bar
from lfm2np.errors import InconclusiveError, ProofError
from lfm2np.oracle.locate.dump import read_dump, read_names
from lfm2np.oracle.locate.locate import Report, as_text, locate, shortened, why_inconclusive
from lfm2np.oracle.locate.spread import PRECISIONS

EXIT_CODES = """exit codes:
  0    every tensor is within its bound
  1    wrong: a tensor differs from what its inputs give
  2    inconclusive: the dump has too few tensors
  3    the dump or the model can't be read, or they do not match
  130  interrupted"""


def run(arguments: argparse.Namespace) -> None:
    """Prints what was found. ProofError (1) if a tensor is wrong, InconclusiveError (2) if too few can tell.

    DumpError, ConfigError and CheckpointError (3) for files that can't be read or don't fit each other.
    """
    path = checkpoint_path(arguments.model)
    config = read_config(path)
    tensors = read_tensors(path, config)
    names = read_names(Path(arguments.names), config) if arguments.names is not None else {}
    dump = read_dump(Path(arguments.dump), config, names)
    if dump.unknown:
        warnings.warn(f"{arguments.dump}: {len(dump.unknown)} unknown names: {shortened(dump.unknown)}", stacklevel=1)
    with progress_bar("locating") as show:
        report = locate(tensors, config, dump, arguments.format, show)
    print_result(arguments, as_json(report, str(path)), as_text(report))
    if report.findings:
        raise ProofError(f"{report.findings[0].name}: not what its inputs make")
    if not report.is_conclusive:
        raise InconclusiveError(f"{arguments.dump}: {why_inconclusive(report)}")


def as_json(report: Report, model: str) -> dict[str, Any]:
    """Infinities and NaN as text, which JSON has no numbers for."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    fields: dict[str, Any] = plain(dataclasses.asdict(report))
    return {"model": model, "conclusive": report.is_conclusive, **fields}


def add_locate(commands: Commands) -> None:
    parser = add_command(
        commands,
        "locate",
        run,
        "find the first tensor in an engine's activations that differs from what its inputs give",
        "lfm2np locate dump.safetensors --model LFM2-350M --format bfloat16",
        exit_codes=EXIT_CODES,
    )
    parser.add_argument(
        "dump",
        metavar="DUMP",
        help="safetensors file: token_ids [T], and module outputs named as in transformers",
    )
    parser.add_argument(
        "--names",
        metavar="FILE",
        help='JSON object that maps names in the file to those names; "{layer}" stands for a number',
    )
    parser.add_argument(
        "--format",
        choices=list(PRECISIONS),
        help="number format of the engine (default: as the dump says, else its storage format)",
    )
