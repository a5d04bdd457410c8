"""`--format auto`: what an engine computes in, from how its checkpoint stores weights and from the engine's name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.errors import RequestError

AUTO = "auto"
FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
GGML = "llama.cpp"  # as its dialect's name begins
OTHERS = ("vllm", "sglang", "transformers", "mlx")


class Taken(NamedTuple):
    """A name of FORMATS, and why."""

    name: str
    why: str


def taken_format(tensors: Mapping[str, StoredTensor], is_gguf: bool, is_told: bool, engine: str) -> Taken:
    """Of an engine that runs this checkpoint and says that it is `engine`.

    RequestError where that can't be told: llama.cpp runs a GGUF file, of which a directory says nothing.
    """
    matrices = Counter(one.dtype for one in tensors.values() if len(one.shape) == 2)
    most = matrices.most_common(1)[0][0]
    norms = tensors["model.embedding_norm.weight"].dtype  # which no checkpoint has quantised
    said = engine.lower()
    if is_gguf and said.startswith(OTHERS):
        return Taken("float16", f"the engine is {engine}, the weights {most}: it multiplies them by float16")
    if is_gguf:
        known = "" if said.startswith(GGML) else "no engine that is known is named, so llama.cpp is assumed; "
        return Taken("q8", f"{known}the weights are {most} of a GGUF, whose products it gives inputs to match")
    if said.startswith(GGML):
        raise RequestError(
            f"--format auto: the engine is {engine}, which runs a GGUF file, and --model is a directory: expected "
            "--model FILE.gguf, or the format"
        )
    if most in FLOATS:
        return Taken(FLOATS[most], f"the weights are {most}")
    if is_told and not said.startswith("transformers"):
        return Taken("w8a8", f"the weights are {most}, and the checkpoint tells how inputs are rounded to 8 bits")
    return Taken(FLOATS[norms], f"the weights are {most}, the norms {norms}")
