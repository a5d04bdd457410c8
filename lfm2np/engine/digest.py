"""One hash that says whether this machine computes the same bits as every other."""

from __future__ import annotations

import hashlib

from lfm2np.arithmetic import Numerics
from lfm2np.truth import reference
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.weights import ModelWeights
from lfm2np.values import Progress

LENGTHS = (1, 2, 3, 4, 5, 8, 17, 64, 500)


def digest_prompt(length: int, vocab_size: int) -> list[int]:
    """Token i of the prompt of that length: SHA-256 of "length:i" modulo the vocabulary's size."""
    hashes = (hashlib.sha256(f"{length}:{i}".encode()).digest() for i in range(length))
    return [int.from_bytes(value, "big") % vocab_size for value in hashes]


def lengths(config: ModelConfig) -> list[int]:
    """Those of LENGTHS that the context allows."""
    return [length for length in LENGTHS if length <= config.max_position_embeddings]


def digest(
    weights: ModelWeights,
    config: ModelConfig,
    numerics: Numerics,
    progress: Progress | None = None,
) -> str:
    """SHA-256, in hex, of the prompts of LENGTHS, as far as the context allows.

    For each, the logits [T, V] as float32 (as they are under `float64`), and the last row's log-probabilities [V] as
    float64, all little-endian.
    """
    sha = hashlib.sha256()
    chosen = lengths(config)
    for done, length in enumerate(chosen, start=1):
        logits = reference.logits(weights, config, numerics, digest_prompt(length, config.vocab_size))
        sha.update(logits.astype(logits.dtype.newbyteorder("<")).tobytes())
        sha.update(numerics.log_softmax(logits[-1]).astype("<f8").tobytes())
        if progress:
            progress(done, len(chosen))
    return sha.hexdigest()
