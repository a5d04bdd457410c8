"""Recipes whose engine is our own behind fixtures/served.py, in this Python: python engines_here.py MARK ARGUMENTS.

The variable MARK stands in the environment of all that is started, so that what is left behind can be found.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from recipe import REFUSED, RIGHT, Recipe, Refused, Room, Variant

PROGRAM = "{python} {here}/../served.py --port {port}"
SERVED = f"{PROGRAM} --numerics {{format}} --model {{model}}"
FUZZ = "--max-model-len 28 --block-size 4"
TARGET = "http://127.0.0.1:{port}"


def unprepared(room: Room, checkpoint: Path, format_name: str) -> Path:
    raise Refused(f"no {checkpoint.name} in {format_name} here")


NUMPY = Recipe(
    name="ours",
    title="lfm2np",
    installs=(),
    shown=("numpy",),
    variants=(
        Variant("right", TARGET, RIGHT, SERVED, formats=("float32", "bfloat16"), fuzz=FUZZ),
        Variant("unprepared", TARGET, REFUSED, SERVED, prepare=unprepared),
        Variant("dies", TARGET, REFUSED, f"{PROGRAM} --model {{here}}/no-such-model"),
    ),
)
ELSEWHERE = Recipe(
    "other", "another", ("no-such-distribution==1.0.0",), ("numpy",), (Variant("alone", "transformers:", RIGHT),)
)
RECIPES = (NUMPY, ELSEWHERE)
GIVEN = [f"--python={recipe.name}={sys.executable}" for recipe in RECIPES]

if __name__ == "__main__":
    import run

    os.environ["MARK"] = sys.argv.pop(1)
    sys.exit(run.main([*sys.argv[1:], *GIVEN], RECIPES))
