"""A tiny checkpoint, and commands as they are typed: what they print, and how they fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import raw_config, safetensors_bytes, stored, stored_weights, tiny_config, write_model

from lfm2np.commands.cli import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def overflowing(model: Path) -> Path:
    """Finite weights whose logits are not: a head of 3e38 everywhere."""
    (model / "config.json").write_text(json.dumps(raw_config(tie_word_embeddings=False)))
    tensors = stored_weights(tiny_config(tie_word_embeddings=False))
    tensors["lm_head.weight"] = stored(np.full((300, 16), 3e38, np.float32), "BF16")
    (model / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return model


@pytest.fixture
def failure(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str]]:
    """Of a command that must fail: its exit code and one line on stderr; it prints nothing else."""

    def failed(*words: str) -> tuple[object, str]:
        try:
            code: object = main(words)
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("lfm2np: ") and captured.err.count("\n") == 1, captured.err
        return code, captured.err

    return failed


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The one JSON object that a command prints with --json; NaN and Infinity are none."""

    def answered(*words: str, code: int = 0) -> Any:
        assert main([*words, "--json"]) == code
        (line,) = capsys.readouterr().out.splitlines()
        return json.loads(line, parse_constant=pytest.fail)

    return answered
