"""The number formats that an engine may declare: what is rounded to what, and where.

A name is one of FORMATS, optionally with a format of the key/value cache: "bfloat16 kv:float8".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from lfm2np.errors import RequestError
from lfm2np.numerics.ieee import round_to_bfloat16, unchanged
from lfm2np.oracle.judging import eight_bits
from lfm2np.oracle.judging.eight_bits import round_to_float16

Array = NDArray[Any]
Rounding = Callable[[Array], Array]
KV = " kv:"  # between a format and that of the cache


@dataclass(frozen=True)
class Kept:
    """How keys and values are kept in the cache, and what meets them in products."""

    keep: Rounding
    queries: Rounding = unchanged
    shares: Rounding = unchanged
    adds_in_float16: bool = False  # the weighted values, position by position, with shares that are not rounded
    may_turn: bool = False  # heads may be rotated before they are rounded: eight_bits.turned


KEPT = {
    "float32": Kept(unchanged),
    "float16": Kept(round_to_float16, round_to_float16, adds_in_float16=True),
    "bfloat16": Kept(round_to_bfloat16, round_to_bfloat16, round_to_bfloat16),
    "float8": Kept(eight_bits.float8),
    "q8_0": Kept(eight_bits.q8_0, eight_bits.q8_0, may_turn=True),
    "q4_0": Kept(eight_bits.q4_0, eight_bits.q8_0, may_turn=True),
}


@dataclass(frozen=True)
class Format:
    """How an engine stores and computes.

    inputs  of products: "" as all activations; "blocks" as llama.cpp rounds them for the weights' type; "stated" as the
            checkpoint states
    kv      a name of KEPT; "" as all activations
    """

    name: str
    keep: Rounding  # rounds activations
    bits: int  # of the significand, the hidden one included
    levels: int = 0  # weights are whole steps of their group's largest / levels; 0: those of the checkpoint
    group: int = 32  # inputs that share a step
    inputs: str = ""
    kv: str = ""

    @property
    def is_fine(self) -> bool:
        """As fine as float32: near ties of a mixture's routes are rare."""
        return self.bits >= 24 and not self.inputs and self.kv in ("", "float32")


FORMATS = {
    form.name: form
    for form in (
        Format("float32", unchanged, 24),
        Format("float16", round_to_float16, 11),
        Format("bfloat16", round_to_bfloat16, 8),
        Format("q8", unchanged, 24, inputs="blocks", kv="float16"),
        Format("w8a8", round_to_bfloat16, 8, inputs="stated"),
        Format("int8", round_to_float16, 11, levels=127),
        Format("int4", round_to_float16, 11, levels=7),
    )
}


def format_named(name: str) -> Format:
    """RequestError for a name that is not in FORMATS, or a cache format that is not in KEPT."""
    base, kv, kept = name.partition(KV)
    if base not in FORMATS:
        raise RequestError(f"format {base!r}: expected one of {', '.join(FORMATS)}")
    if not kv:
        return FORMATS[base]
    if kept not in KEPT:
        raise RequestError(f"format of keys and values {kept!r}: expected one of {', '.join(KEPT)}")
    return replace(FORMATS[base], name=name, kv=kept)


def with_kv(name: str, kept: str | None) -> str:
    """The format's name with this format of the cache, if one is given."""
    return name if kept is None else format_named(name.partition(KV)[0] + KV + kept).name


def others(name: str, in_blocks: bool, states_inputs: bool, is_quantised: bool) -> list[str]:
    """Formats that may explain what `name` does not, with the same format of the cache, the finest first.

    in_blocks      a GGUF file with quantised weights: llama.cpp's rounding comes first, as bfloat16 errs about as much
    states_inputs  the checkpoint states how inputs are rounded
    is_quantised   every bit of the weights is known, which rules out schemes for unknown ones
    """
    base, kv, kept = name.partition(KV)
    tried = {"": True, "blocks": in_blocks, "stated": states_inputs}
    return [
        form.name + kv + kept
        for form in sorted(FORMATS.values(), key=lambda form: form.inputs != "blocks")
        if form.name != base and tried[form.inputs] and not (is_quantised and form.levels)
    ]
