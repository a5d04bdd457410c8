"""`lfm2np info` and `lfm2np digest`: what a checkpoint is, and the hash by which machines compare their bits."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from lfm2np import trusted
from lfm2np.checkpoint import summary
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.cli.shared.parser import Commands, add, add_command
from lfm2np.cli.shared.prompts import add_arithmetic_options, load_model, print_json
from lfm2np.cli.shared.terminal import progress_bar
from lfm2np.network import digest


def run_info(arguments: argparse.Namespace) -> None:
    if arguments.trust:
        show_trusted(arguments.json)
        return
    path = checkpoint_path(arguments.model)
    config = read_config(path, arguments.rope)
    tensors = read_tensors(path, config)
    with progress_bar("proving bounds") as show:
        bounds = summary.proved_bounds(tensors, config, show)
    if arguments.json:
        print(json.dumps({"model": str(path), **summary.as_json(config, tensors, bounds)}))
    else:
        print(f"{'model':<30}{path}\n{summary.as_text(config, tensors, bounds)}")


def show_trusted(as_json: bool) -> None:
    files = trusted.trusted_files()
    if as_json:
        print(json.dumps([asdict(file) for file in files]))
        return
    for is_reading, what in ((False, "the reference, in integers"), (True, "reading checkpoints, and errors")):
        group = [file for file in files if file.is_reading == is_reading]
        print(f"{sum(file.lines for file in group):>6}  {what}")
        for file in group:
            print(f"{file.lines:>8}  lfm2np/{file.file}")


def add_info(commands: Commands) -> None:
    example = "lfm2np info --json\n  lfm2np info --trust"
    parser = add_command(commands, "info", run_info, "shape, memory and proved bounds of a checkpoint", example)
    trust = "list the files that have to be trusted, with line counts; all others are checked against these"
    add(parser, "--trust", trust)


def run_digest(arguments: argparse.Namespace) -> None:
    model = load_model(arguments)
    with progress_bar("digest") as show:
        value = digest.digest(model.weights, model.config, model.numerics, show)
    if arguments.json:
        print_json(model, {"sha256": value, "prompt_lengths": digest.lengths(model.config)})
    else:
        print(value)


def add_digest(commands: Commands) -> None:
    text = "SHA-256 of the logits' bits for a fixed set of prompts"
    parser = add_command(commands, "digest", run_digest, text, "lfm2np digest --model LFM2-350M")
    add_arithmetic_options(parser)
