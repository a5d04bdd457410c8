"""`--format`: the number format of the engine under test, and of the keys and values in its cache."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from lfm2np.checkpoint.files import is_gguf, read_config, read_tensors
from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.tensors import input_roundings
from lfm2np.commands.cli.shared.parser import add, meant
from lfm2np.errors import RequestError
from lfm2np.oracle.engines import dialects
from lfm2np.oracle.engines.named import TRANSFORMERS
from lfm2np.oracle.judging.formats import FORMATS, KEPT, KV, format_named


def add_options(parser: argparse.ArgumentParser) -> None:
    text = (
        f"number format of the engine, which determines the error it may have (float32): {', '.join(FORMATS)}, or "
        f"{AUTO}, by the checkpoint's weights and the engine's name; 'bfloat16{KV}float8' also names that of keys and "
        f"values: {', '.join(KEPT)}"
    )
    add(parser, "--format FORMAT", text, default="float32", type=declared)


def declared(text: str) -> str:
    """The `type` of --format: as formats.format_named takes it, or with auto for the first of its two names."""
    base, kv, kept = text.partition(KV)
    try:
        format_named(("float32" if base == AUTO else base) + kv + kept)
    except RequestError as problem:
        is_base = base not in (*FORMATS, AUTO)
        also = f" or {AUTO}{meant(base, [*FORMATS, AUTO])}" if is_base else meant(kept, KEPT)
        raise argparse.ArgumentTypeError(f"{problem}{also}") from None
    return text


def format_of(arguments: argparse.Namespace, engine: str) -> Taken:
    """The format's name, and for auto the reason. RequestError if it can't be derived, or is impossible."""
    path = checkpoint_path(arguments.model)
    config = read_config(path, arguments.rope)
    has_input_roundings = bool(input_roundings(path, config))
    base, kv, kept = arguments.format.partition(KV)
    if base != AUTO:
        if FORMATS[base].inputs == "stated" and not has_input_roundings:
            raise RequestError(f"--format {base}: {path} does not say how inputs are rounded")
        return Taken(arguments.format, "")
    taken = taken_format(read_tensors(path, config), is_gguf(path), has_input_roundings, engine)
    return taken._replace(name=taken.name + kv + kept)


def computed_in(arguments: argparse.Namespace) -> str:
    """The format in which transformers is to compute, if it is the TARGET; else nothing."""
    is_asked = arguments.target.partition(":")[0] == TRANSFORMERS
    return format_of(arguments, TRANSFORMERS).name.partition(KV)[0] if is_asked else ""


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
