"""The figures of `lfm2np compare` another way: reference.py's logits, plain NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sides import FIXTURES, LINES, MOE, TRAINED, figures, written

import lfm2np
from lfm2np.arithmetic import exact
from lfm2np.oracle.compare.positions import divergence

Sequence = tuple[list[int], int, int]  # ids, first compared row, the row behind the last


def sequences(model: lfm2np.Model) -> list[Sequence]:
    """LINES, by hand: with a completion the rows that predict it, else all."""
    windows = []
    for line in LINES:
        prompt = model.prompt_ids(line.get("prompt", line.get("prompt_token_ids")))
        more = line.get("completion_token_ids", model.tokenizer.encode_more(line.get("completion", "")))
        windows.append((prompt + more, len(prompt) - 1 if more else 0, len(prompt) + len(more) - bool(more)))
    return windows


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.longdouble)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def close(actual: float, expected: Any, within: float = 1e-9) -> bool:
    return bool(abs(actual - expected) <= within * abs(expected) + 1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("directory", [TRAINED, MOE], ids=["dense", "mixture"])
def test_figures_of_positions_and_tokens(directory: Path, files: Path, capsys: Any):
    path = files / f"{directory.name}-Q4_0.gguf"
    (comparison,) = figures(capsys, directory, path, "--requests", files / "r.jsonl")["quantised"]
    sides = [lfm2np.load(side) for side in (directory, path)]
    windows = sequences(sides[0])
    one, two = (log_softmax(np.concatenate([side.logits(ids[:b])[a:] for ids, a, b in windows])) for side in sides)
    kl = np.sort((np.exp(one) * (one - two)).sum(axis=1))
    assert comparison["positions"] == len(kl) > 10
    expected = {"mean": kl.mean(), "median": kl[(len(kl) + 1) // 2 - 1], "p99": kl[-1], "largest": kl[-1]}
    assert (
        all(close(comparison["kl"][name], value) for name, value in expected.items())
        and comparison["kl"]["mean"] > 1e-5
    )
    flipped = one.argmax(axis=1) != two.argmax(axis=1)
    assert comparison["mismatches"]["count"] == flipped.sum()
    assert comparison["mismatches"]["agreement"] == (len(kl) - flipped.sum()) / len(kl)
    following = np.array([n for ids, a, b in windows for n in [*ids[a + 1 : b + 1], *[-1] * (b - len(ids) + 1)]])
    rows = np.flatnonzero(following >= 0)
    base, other = (side[rows, following[rows]] for side in (one, two))
    (perplexity,) = comparison["perplexities"]
    assert close(perplexity["base"], np.exp(-base.mean())) and close(perplexity["quantised"], np.exp(-other.mean()))
    assert close(perplexity["ratio"], np.exp((base - other).mean()))


@pytest.mark.slow
def test_windows_of_a_text_are_sequences_that_begin_with_the_bos(files: Path, capsys: Any):
    """As one request each, whose ids are given; perplexity is of all tokens but the BOS."""
    text = (FIXTURES / "compared.jsonl").read_text(encoding="utf-8")[:400]
    (files / "text.txt").write_text(text)
    model = lfm2np.load(TRAINED)
    ids = model.tokenizer.encode_more(text)
    windows = [[1, *ids[start : start + 39]] for start in range(0, len(ids), 39)]
    path = files / "trained-Q4_0.gguf"
    report = figures(capsys, TRAINED, path, "--text", files / "text.txt", "--window", "40")
    assert report["scored"] == [{"source": "windows of the text", "sequences": len(windows), "positions": len(ids)}]
    lines = [{"prompt_token_ids": window[:1], "completion_token_ids": window[1:]} for window in windows]
    as_requests = figures(capsys, TRAINED, path, "--requests", written(files / "w.jsonl", lines))
    of_text, of_requests = report["quantised"][0], as_requests["quantised"][0]
    assert of_text["kl"] == of_requests["kl"]
    assert of_text["perplexities"][0]["ratio"] == of_requests["perplexities"][0]["ratio"]
    assert of_text["perplexities"][0]["tokens"] == len(ids)


# --- KL divergence against arbitrary-precision arithmetic


def by_mpmath(base: np.ndarray, other: np.ndarray) -> float:
    """From the logits themselves."""
    with mpmath.workdps(60):
        a, b = ([mpmath.mpf(float(v)) for v in row] for row in (base, other))
        p, q = ([mpmath.exp(v) for v in row] for row in (a, b))
        sum_p, sum_q = mpmath.fsum(p), mpmath.fsum(q)
        return float(mpmath.fsum(v / sum_p * mpmath.log(v / sum_p / (w / sum_q)) for v, w in zip(p, q, strict=True)))


def found(base: np.ndarray, other: np.ndarray) -> float:
    base, other = (exact.log_softmax(side[None].astype(np.float32)) for side in (base, other))
    return float(divergence(base, other)[0])


def drawn(spread: float, size: float) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    base = random.normal(0.0, spread, 300).astype(np.float32)
    return [base, (base + random.normal(0.0, size, 300)).astype(np.float32)]


@pytest.mark.parametrize(
    ("base", "other"),
    [
        *(drawn(spread, size) for spread in (1.0, 8.0, 30.0) for size in (40.0, 3.0, 0.1, 1e-3, 1e-5)),
        ([0.0, -1.0, 900.0], [1200.0, 3.0, 2.0]),  # beyond the reach of an exponential
        ([0.0, 1.0, -900.0], [0.0, 2.0, -100.0]),
        ([0.0, 0.0, -600.0], [499.0, -499.0, 502.0]),
        ([3000.0, 0.0], [-3e30, 3e30]),
        ([3e38, -3e38], [-3e38, 3e38]),
    ],
)
def test_it_is_the_divergence_of_the_logits(base: Any, other: Any):
    base, other = np.array(base, np.float32), np.array(other, np.float32)
    assert found(base, other) == pytest.approx(by_mpmath(base, other), rel=1e-12, abs=1e-14)


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(-2e3, 2e3, width=32), st.floats(-2e3, 2e3, width=32)), min_size=1, max_size=40))
def test_it_is_never_negative_and_depends_on_no_order(pairs: list[tuple[float, float]]):
    base, other = np.array(pairs, np.float32).T
    value = found(base, other)
    assert value >= 0.0 and np.isfinite(value) and found(base, base) == 0.0
    assert found(base[::-1].copy(), other[::-1].copy()) == value
