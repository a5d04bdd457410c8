"""What every recorder refuses, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import PLAIN, mixture
from recorders.requirements import config_of, numbers, require_version

from lfm2np.checkpoint.config_json import load_config
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.recorders import Recorder
from lfm2np.oracle.recorders.registry import require_request

FIXTURES = Path(__file__).parents[3] / "fixtures"
CONFIG = load_config(FIXTURES / "trained")


def test_a_package_that_is_not_there_is_named_with_its_version() -> None:
    with pytest.raises(TargetError, match="no_such_engine: not installed, expected no_such_engine==2"):
        require_version("no_such_engine", ("1", "2"))


def test_an_older_version_is_refused_a_newer_one_named_and_the_known_one_taken() -> None:
    import numpy

    require_version("numpy", (numpy.__version__,))
    with pytest.raises(TargetError, match=f"numpy: version {numpy.__version__}, expected 10.1 or 10.2, or newer"):
        require_version("numpy", ("10.1", "10.2"))
    with pytest.warns(UserWarning, match=f"numpy: version {numpy.__version__} is newer than 1.10.2, which it was last"):
        require_version("numpy", ("1.9.9", "1.10.2"))
    assert [numbers(text) for text in ("5.24.0", "0.32.0+cpu", "2.0rc1", "main")] == [
        [5, 24, 0],
        [0, 32, 0],
        [2, 0],
        [],
    ]


@pytest.mark.parametrize(
    ("prompts", "request_number", "max_tokens", "message"),
    [
        ([[1]], 1, 1, "request 1: expected one of 1"),
        ([[1]], -1, 1, "request -1: expected one of 1"),
        ([[1]], 0, 0, "max_tokens 0: expected at least 1"),
        ([[1], []], 0, 1, "ids: none, expected at least one"),
        ([[1], [2, 512]], 0, 1, "512, expected 0 to vocab_size-1=511"),
        ([[1], [-1]], 0, 1, "-1, expected 0 to"),
        ([[1] * 1000], 0, 25, "1025 tokens with new ones, max_position_embeddings=1024"),
    ],
)
def test_requests_that_no_engine_can_run_are_refused(
    prompts: list[list[int]], request_number: int, max_tokens: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        require_request(prompts, request_number, max_tokens, CONFIG)


def test_a_request_that_just_fits_is_taken() -> None:
    require_request([[1] * 1000, [511]], 1, 24, CONFIG)


@pytest.mark.parametrize(
    ("model", "format", "words"),
    [
        (mixture(PLAIN), "float32", r"vllm: a model of type lfm2_moe can't be recorded there, expected lfm2$"),
        (FIXTURES / "lfm3", "float32", r"vllm: a model of type lfm3 can't be recorded there"),
        (FIXTURES / "trained", "q8", "format 'q8': expected one of float32, bfloat16"),
    ],
)
def test_what_an_engines_recorder_does_not_know_is_refused(model: Path, format: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        config_of(model, "vllm", Recorder(format=format), ("float32", "bfloat16"))
    assert config_of(FIXTURES / "trained", "vllm", Recorder(format="float32"), ("float32",)) == CONFIG
