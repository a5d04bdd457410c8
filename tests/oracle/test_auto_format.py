"""`--format auto`: what it takes, and what it says of it."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

import lfm2np
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.commands.cli.shared.format_options import add_options, format_of, taken_format
from lfm2np.commands.cli.shared.parser import add_model
from lfm2np.errors import RequestError


def tensors(matrices: list[str], norms: str) -> dict[str, StoredTensor]:
    rows = np.zeros((2, 210), np.uint8)
    stored = {f"m{index}": StoredTensor(f"m{index}", kind, rows) for index, kind in enumerate(matrices)}
    return stored | {"model.embedding_norm.weight": StoredTensor("n", norms, np.zeros(2, np.uint16))}


TAKEN = [  # kinds of matrices, of norms; is it GGUF, does it tell how inputs are rounded; engine, format, words
    ("Q6_K Q4_K Q4_K", "F32", True, False, "llama.cpp dialect, version b1", "q8", "weights are Q4_K"),
    ("Q8_0", "F32", True, False, "an engine of my own", "q8", "so llama.cpp is assumed; the weights are Q8_0"),
    ("BF16", "F32", False, False, "ours", "bfloat16", "the weights are BF16"),
    ("int8", "BF16", False, True, "transformers 5", "bfloat16", "the norms BF16"),
    ("Q4_0", "F32", True, False, "vllm dialect, version 1", "float16", "the engine is vllm dialect"),
    ("4-bit", "BF16", False, False, "text dialect", "bfloat16", "the weights are 4-bit, the norms BF16"),
    ("int8", "BF16", False, True, "vllm dialect", "w8a8", "the checkpoint tells how inputs are rounded"),
    ("F32", "F32", False, False, "ours", "float32", "the weights are F32"),
    ("F16", "F16", False, False, "ours", "float16", "the weights are F16"),
]


@pytest.mark.parametrize(("matrices", "norms", "is_gguf", "is_told", "engine", "expected", "words"), TAKEN)
def test_the_format_is_that_of_the_weights_and_the_engine(matrices, norms, is_gguf, is_told, engine, expected, words):
    name, why = taken_format(tensors(matrices.split(), norms), is_gguf, is_told, engine)
    assert name == expected and words in why


def test_a_directory_does_not_say_what_llama_cpp_runs() -> None:
    with pytest.raises(RequestError, match=r"llama\.cpp dialect.*expected --model FILE\.gguf, or the format"):
        taken_format(tensors(["BF16"], "BF16"), False, False, "llama.cpp dialect, version b1")


def test_options_are_put_together() -> None:
    parser = argparse.ArgumentParser()
    add_model(parser)
    parser.set_defaults(model=str(lfm2np.trained_fixture()))
    add_options(parser)
    said = {
        "": ("float32", ""),
        "--format=float32 kv:float8": ("float32 kv:float8", ""),
        "--format=auto": ("bfloat16", "the weights are BF16"),
        "--format=auto kv:q8_0": ("bfloat16 kv:q8_0", "the weights are BF16"),
    }
    for option, expected in said.items():
        assert format_of(parser.parse_args([option] if option else []), "ours") == expected
    with pytest.raises(RequestError, match=r"--format w8a8: .*trained does not say how inputs are rounded"):
        format_of(parser.parse_args(["--format", "w8a8"]), "ours")
