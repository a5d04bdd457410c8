"""`lfm2np info`: what a checkpoint is; `--digest`: the hash by which machines compare their bits."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.commands.cli import summary, trusted
from lfm2np.commands.cli.shared.parser import Commands, add, add_command, add_modes, refuse_unused
from lfm2np.commands.cli.shared.prompts import add_arithmetic_options, load_model, named
from lfm2np.commands.cli.shared.terminal import print_result, progress_bar
from lfm2np.engine import digest

WITH_DIGEST = "goes with --digest"


def run_info(arguments: argparse.Namespace) -> None:
    if arguments.digest:
        print_digest(arguments)
        return
    refuse_unused(arguments, WITH_DIGEST)
    if arguments.trust:
        print_trusted(arguments)
        return
    path = checkpoint_path(arguments.model)
    config = read_config(path, arguments.rope)
    tensors = read_tensors(path, config)
    with progress_bar("proving bounds") as show:
        bounds = summary.proved_bounds(tensors, config, show)
    fields = {"model": str(path), **summary.as_json(config, tensors, bounds)}
    print_result(arguments, fields, f"{'model':<30}{path}\n{summary.as_text(config, tensors, bounds)}")


def print_trusted(arguments: argparse.Namespace) -> None:
    files, lines = trusted.trusted_files(), []
    for is_reading, what in ((False, "the reference, in integers"), (True, "reading checkpoints, and errors")):
        group = [file for file in files if file.is_reading == is_reading]
        lines.append(f"{sum(file.lines for file in group):>6}  {what}")
        lines += [f"{file.lines:>8}  lfm2np/{file.file}" for file in group]
    print_result(arguments, list(map(asdict, files)), "\n".join(lines))


def add_info(commands: Commands) -> None:
    example = "lfm2np info --json\n  lfm2np info --trust\n  lfm2np info --digest --model LFM2-350M"
    parser = add_command(commands, "info", run_info, "shape, memory and proved bounds of a checkpoint", example)
    trust = "list the files that have to be trusted, with line counts; all others are checked against these"
    group = parser.add_mutually_exclusive_group()
    add(group, "--trust", trust)
    add(group, "--digest", "print the SHA-256 of the logits' bits for a fixed set of prompts: equal on every machine")
    add_arithmetic_options(parser)
    add_modes(parser, {WITH_DIGEST: ("numerics", "weights")})


def print_digest(arguments: argparse.Namespace) -> None:
    model = load_model(arguments)
    with progress_bar("digest") as show:
        value = digest.digest(model.weights, model.config, model.numerics, show)
    fields = {"sha256": value, "prompt_lengths": digest.lengths(model.config)}
    print_result(arguments, {**named(model), **fields}, value)
