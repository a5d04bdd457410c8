"""`lfm2np info`: shape, memory and proved bounds of a checkpoint."""

from __future__ import annotations

import argparse
import json

from lfm2np.checkpoint import summary
from lfm2np.checkpoint.config import load_config
from lfm2np.checkpoint.loaded import checkpoint_directory
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.cli.shared.parser import AddCommand
from lfm2np.cli.shared.terminal import progress_bar


def run_info(arguments: argparse.Namespace) -> None:
    directory = checkpoint_directory(arguments.model)
    config = load_config(directory)
    with progress_bar("proving bounds") as show:
        bounds = summary.proved_bounds(open_checkpoint(directory, config), config, show)
    if arguments.json:
        print(json.dumps({"model": str(directory), **summary.as_json(config, bounds)}))
    else:
        print(f"{'model':<30}{directory}\n{summary.as_text(config, bounds)}")


def add_info(command: AddCommand) -> None:
    command("info", run_info, "shape, memory and proved bounds of a checkpoint", "lfm2np info --json")
