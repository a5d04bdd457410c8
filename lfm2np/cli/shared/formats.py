"""`--format` and `--kv-format`: what the engine that is held against the oracle computes in."""

from __future__ import annotations

import argparse

from lfm2np.checkpoint.files import is_gguf, read_config, read_tensors
from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.checkpoint.packed.activations import input_roundings
from lfm2np.errors import RequestError
from lfm2np.oracle.auto_format import AUTO, Taken, taken_format
from lfm2np.oracle.judging.formats import FORMATS, KEPT, with_kv


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=[*FORMATS, AUTO],
        default="float32",
        help="what the engine computes in, which says how far off it may be (float32); auto takes it from the "
        "checkpoint's weights and the engine's name, and says what it took (the property suite's "
        "--number-format says the same; --numerics is the arithmetic of lfm2np itself)",
    )
    parser.add_argument(
        "--kv-format",
        choices=list(KEPT),
        help="what it keeps keys and values in (as it computes; with q8 float16, which is llama.cpp's default)",
    )


def format_of(arguments: argparse.Namespace, engine: str) -> Taken:
    """The format's name, and why if it was not declared. RequestError where it can't be told, or can't be."""
    path = checkpoint_path(arguments.model)
    config = read_config(path)
    is_told = bool(input_roundings(path, config))
    if arguments.format != AUTO:
        if FORMATS[arguments.format].inputs == "stated" and not is_told:
            raise RequestError(f"--format {arguments.format}: {path} does not tell how inputs are rounded")
        return Taken(with_kv(arguments.format, arguments.kv_format), "")
    taken = taken_format(read_tensors(path, config), is_gguf(path), is_told, engine)
    return taken._replace(name=with_kv(taken.name, arguments.kv_format))
