"""How a checkpoint tells an engine to round the inputs of its products: W8A8 and FP8 of compressed-tensors.

The weights of a product are then codes, and so are its inputs: int8 or float8 (E4M3) times a scale, which is told
(static) or found anew in each run (dynamic). Nothing here computes; the exact model does not round its inputs so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lfm2np.checkpoint.packed.compressed import class_of, input_scale
from lfm2np.checkpoint.packed.matrix_parts import modules
from lfm2np.checkpoint.packed.settings import CompressedSettings
from lfm2np.checkpoint.plain import language_part
from lfm2np.checkpoint.tensors import settings_in
from lfm2np.truth.config import ModelConfig


@dataclass(frozen=True)
class InputRounding:
    """Of one product's inputs: each is  scale * (code - zero)  with the nearest code.

    kind        "int8" (codes -128 to 127) or "float8" (E4M3, to 448)
    of          what shares a scale: "tensor" (all inputs of a step), "token" (a row), or "group" of columns in a row
    group_size  columns of a group; 0 of the other two
    scale       the static one; None where it is dynamic: of the largest input, or of the least and the largest if
                not symmetric, by a rule of the engine
    zero        with a static scale; 0 if symmetric
    symmetric   whether the zero is 0
    """

    kind: str
    of: str
    group_size: int
    scale: float | None
    zero: int
    symmetric: bool


def input_roundings(path: Path, config: ModelConfig) -> dict[str, InputRounding]:
    """By our name of a product's weights; empty of a checkpoint that does not say so, as all other kinds.

    Products that an engine makes one of several (q, k, v) may have different static scales: vLLM takes the largest.
    ConfigError or CheckpointError names the file.
    """
    settings = settings_in(path) if path.is_dir() else None
    if not isinstance(settings, CompressedSettings) or not any(each.inputs for each in settings.schemes):
        return {}
    tensors, source = language_part(path)
    roundings = {}
    for name, parts, _ in modules(tensors, config, source):
        scheme = settings.of(parts.names, class_of(parts.name))
        if scheme is not None and scheme.inputs is not None and "weight_scale" in parts:
            inputs = scheme.inputs
            scale, zero = input_scale(parts, inputs)
            roundings[name] = InputRounding(
                f"{inputs.type}{inputs.bits}", inputs.strategy, inputs.group_size, scale, zero, inputs.symmetric
            )
    return roundings
