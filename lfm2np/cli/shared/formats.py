"""`--format` and `--kv-format`: the number format of the engine under test."""

from __future__ import annotations

import argparse

from lfm2np.checkpoint.files import is_gguf, read_config, read_tensors
from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.checkpoint.packed.activations import input_roundings
from lfm2np.cli.shared.parser import add
from lfm2np.errors import RequestError
from lfm2np.oracle.auto_format import AUTO, Taken, taken_format
from lfm2np.oracle.judging.formats import FORMATS, KEPT, with_kv


def add_options(parser: argparse.ArgumentParser) -> None:
    text = (
        "number format of the engine, which determines the error it may have (float32); auto derives it from the "
        "checkpoint's weights and the engine's name, and reports it (--number-format in the property suite; "
        "--numerics is the arithmetic of lfm2np itself)"
    )
    add(parser, "--format", text, choices=[*FORMATS, AUTO], default="float32")
    kv_text = "number format of keys and values in its cache (as --format; with q8 float16, llama.cpp's default)"
    add(parser, "--kv-format", kv_text, choices=list(KEPT))


def format_of(arguments: argparse.Namespace, engine: str) -> Taken:
    """The format's name, and for auto the reason. RequestError if it can't be derived, or is impossible."""
    path = checkpoint_path(arguments.model)
    config = read_config(path, arguments.rope)
    has_input_roundings = bool(input_roundings(path, config))
    if arguments.format != AUTO:
        if FORMATS[arguments.format].inputs == "stated" and not has_input_roundings:
            raise RequestError(f"--format {arguments.format}: {path} does not say how inputs are rounded")
        return Taken(with_kv(arguments.format, arguments.kv_format), "")
    taken = taken_format(read_tensors(path, config), is_gguf(path), has_input_roundings, engine)
    return taken._replace(name=with_kv(taken.name, arguments.kv_format))
