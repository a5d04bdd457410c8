"""Vector sets for the tests: a few vectors of a torture fixture, and the packaged set."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from lfm2np.commands.cli import vectors
from lfm2np.commands.cli.program import build_parser
from lfm2np.engine.loading import Model, load
from lfm2np.oracle import vectors_plain
from lfm2np.oracle.vectors.golden import make
from lfm2np.oracle.vectors.set_files import packaged_set, read_set

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
SIX = FIXTURES / "torture" / "six_heads_two_kv"
FEW = ("short-1-text", "short-2-text", "border-15", "prefix-same")  # and prefix-cold, which the last one names
PLAIN = Path(vectors_plain.__file__)


@cache
def six() -> Model:
    return load(SIX)


@cache
def few() -> dict[str, Any]:
    return make(six(), only=FEW)


@cache
def trained() -> Model:
    return load()


@cache
def packaged() -> dict[str, Any]:
    return read_set(packaged_set())


def run(*words: str) -> None:
    vectors.run(build_parser("vectors").parse_args(["vectors", *words]))
