"""Checkpoints to compare: the trained fixtures in GGUF types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from of_schema import validator
from quantise import write_types

from lfm2np.commands.cli import main

FIXTURES = Path(__file__).parents[3] / "fixtures"
TRAINED, MOE = FIXTURES / "trained", FIXTURES / "moe"
LINES: list[dict[str, Any]] = [
    {"request_id": "add", "prompt": "add: 34 + 58 ->", "completion": " 92<|im_end|>"},
    {"request_id": "sort", "prompt": "sort: 7 2 9 4 1 ->"},
    {"request_id": "one token", "prompt_token_ids": [1]},
    {"request_id": "copy", "prompt": "copy: tivu zo sa di ->", "completion_token_ids": [9, 8, 300, 301]},
]


def written(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def quantised(directory: Path, name: str, folder: Path) -> Path:
    return write_types(directory, [name], folder)[0]


def figures(capsys: Any, *arguments: object, code: int = 0) -> dict[str, Any]:
    """The figures that `lfm2np compare --json` prints, which are of their schema."""
    assert main(["compare", *map(str, arguments), "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert validator("report").is_valid(report) and report["command"] == "compare"
    found: dict[str, Any] = report["figures"]
    assert [f"{list(error.path)}: {error.message}" for error in validator("compare").iter_errors(found)] == []
    return found


def refused(capsys: Any, *arguments: object, code: int = 2) -> str:
    """The one line that it says, and nothing else."""
    assert main(["compare", *map(str, arguments)]) == code
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == ""
    return line
