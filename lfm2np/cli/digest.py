"""`lfm2np digest`: the hash by which machines compare their bits."""

from __future__ import annotations

import argparse

from lfm2np.cli.shared.parser import AddCommand
from lfm2np.cli.shared.prompts import add_arithmetic_options, load_model, print_json
from lfm2np.cli.shared.terminal import progress_bar
from lfm2np.network import digest


def run_digest(arguments: argparse.Namespace) -> None:
    model = load_model(arguments)
    with progress_bar("digest") as show:
        value = digest.digest(model.weights, model.config, model.numerics, show)
    if arguments.json:
        print_json(model, {"sha256": value, "prompt_lengths": digest.lengths(model.config)})
    else:
        print(value)


def add_digest(command: AddCommand) -> None:
    sub = command(
        "digest",
        run_digest,
        "SHA-256 of the logits' bits for a fixed set of prompts",
        "lfm2np digest --model LFM2-350M",
    )
    add_arithmetic_options(sub)
