"""The catalogue of faults: those of lfm2np.teaching.faults and of the text files here; variants that change no answer.

    with faults.inject("slot-freed-twice"):
        ...                     # every engine of this process now has that bug

The files have the form of lfm2np/teaching/faults.txt. In them, "@@ NAME" stands for the patches of guards.txt
below that name, which many faults need.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lfm2np.teaching import faults as packaged
from lfm2np.teaching.faults import Edit, Fault, find, parse_faults

__all__ = ["FAULTS", "FILES", "VARIANTS", "Edit", "Fault", "Variant", "by_name", "find", "inject", "of_file"]

HERE = Path(__file__).parent
FILES = ("state", "cache", "pool", "scheduling", "sampling", "texts", "model", "mixture", "lfm3")


@dataclass(frozen=True)
class Variant(Fault):
    """A change that must not change any answer: edits, sizes that override those asked for, or the environment."""

    sizes: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)  # needs a fresh process


def of_file(name: str) -> tuple[Fault, ...]:
    """The faults of one text file."""
    text = (HERE / f"{name}.txt").read_text(encoding="utf-8")
    for guard, patches in GUARDS.items():
        text = re.sub(f"^@@ {guard}$", lambda _, patches=patches: patches, text, flags=re.MULTILINE)
    return parse_faults(text)


def inject(change: str | Fault) -> AbstractContextManager[None]:
    """Runs a block with a change. KeyError for an unknown name, RequestError for an edit that does not fit the code."""
    return packaged.inject(by_name(change) if isinstance(change, str) else change)


def by_name(name: str) -> Fault:
    """KeyError for a name that is neither a fault's nor a variant's."""
    return {each.name: each for each in (*FAULTS, *VARIANTS)}[name]


blocks = (HERE / "guards.txt").read_text(encoding="utf-8").strip().split("\n\n")[1:]
GUARDS = {name: patches for name, _, patches in (block.partition("\n") for block in blocks)}
FAULTS: tuple[Fault, ...] = (*packaged.FAULTS.values(), *(fault for name in FILES for fault in of_file(name)))


def sized(name: str, sentence: str, **sizes: Any) -> Variant:
    return Variant(name, "", sentence, (), (), sizes)


def under(name: str, sentence: str, **environment: str) -> Variant:
    return Variant(name, "", sentence, (), (), {}, environment)


# Names of all x86 wheels of NumPy, each of which ignores those that it does not know.
VECTOR_CODE = "AVX2 FMA3 X86_V3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4"
VARIANTS: tuple[Variant, ...] = (
    sized("blocks-of-one-token", "Every position is a block of its own.", block_size=1, num_blocks=2048),
    sized("blocks-of-seven-tokens", "Blocks end at odd places.", block_size=7, num_blocks=512),
    sized("one-token-a-step", "No step computes more than one token.", max_num_batched_tokens=1),
    sized("whole-prompts", "No prompt is cut into chunks.", max_num_batched_tokens=100_000),
    sized("one-request-at-a-time", "Every batch has one request.", max_num_seqs=1),
    sized("no-prefix-cache", "Every prompt is computed anew.", prefix_caching=False),
    sized("high-watermark", "Half of the pool is kept for those that run.", watermark=0.5),
    sized("prompt-lookup", "Tokens are guessed from the prompt and checked.", drafter="ngram"),
    *(Variant(each.name, "", each.sentence, (), each.edits) for each in of_file("variants")),
    under("one-thread", "OpenBLAS computes on one thread.", OPENBLAS_NUM_THREADS="1"),
    under("kernels-of-2004", "OpenBLAS uses SSE3.", OPENBLAS_CORETYPE="Prescott"),
    under("kernels-of-2013", "OpenBLAS uses AVX2 and FMA, which the CPU must have.", OPENBLAS_CORETYPE="Haswell"),
    under("no-vector-code", "NumPy does without its AVX2 and AVX-512 code.", NPY_DISABLE_CPU_FEATURES=VECTOR_CODE),
)
