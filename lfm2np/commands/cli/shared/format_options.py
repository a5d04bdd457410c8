"""`--format` and `--kv-format`: the number format of the engine under test."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from lfm2np.checkpoint.files import is_gguf, read_config, read_tensors
from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.tensors import input_roundings
from lfm2np.commands.cli.shared.parser import add
from lfm2np.errors import RequestError
from lfm2np.oracle.engines import dialects
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


AUTO = "auto"
FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
FLOAT16_OF_GGUF = ("transformers", "mlx")  # what an engine's name begins with, beside those of DIALECTS


class Taken(NamedTuple):
    """A name of FORMATS, and why."""

    name: str
    why: str


def taken_format(tensors: Mapping[str, StoredTensor], is_gguf: bool, is_told: bool, engine: str) -> Taken:
    """Of an engine that runs this checkpoint and says that it is `engine`.

    RequestError where that can't be told: llama.cpp runs a GGUF file, of which a directory says nothing.
    """
    matrices = Counter(tensor.dtype for tensor in tensors.values() if len(tensor.shape) == 2)
    most = matrices.most_common(1)[0][0]
    norms = tensors["model.embedding_norm.weight"].dtype  # which no checkpoint has quantised
    name = engine.lower()
    dialect = next((dialect for dialect in dialects.DIALECTS if name.startswith(dialect.name)), None)
    gguf_format = None if dialect is None else dialect.gguf_format
    if name.startswith(FLOAT16_OF_GGUF):
        gguf_format = "float16"
    if is_gguf and gguf_format is not None and gguf_format != "q8":
        return Taken(gguf_format, f"the engine is {engine}, the weights {most}: it multiplies them by {gguf_format}")
    if is_gguf:
        known = "" if gguf_format else "no engine that is known is named, so llama.cpp is assumed; "
        return Taken("q8", f"{known}the weights are {most} of a GGUF, whose products it gives inputs to match")
    if dialect is not None and dialect.gguf_only:
        raise RequestError(
            f"--format auto: the engine is {engine}, which runs a GGUF file, and --model is a directory: expected "
            "--model FILE.gguf, or the format"
        )
    if most in FLOATS:
        return Taken(FLOATS[most], f"the weights are {most}")
    if is_told and not name.startswith("transformers"):
        return Taken("w8a8", f"the weights are {most}, and the checkpoint tells how inputs are rounded to 8 bits")
    return Taken(FLOATS[norms], f"the weights are {most}, the norms {norms}")
