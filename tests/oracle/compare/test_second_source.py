"""The figures of `lfm2np compare` another way: reference.py's logits, plain NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sides import FIXTURES, LINES, MOE, TRAINED, figures, quantised, written

import lfm2np

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


class Plain:
    """Predictions of both sides at all compared rows."""

    def __init__(self, base: lfm2np.Model, other: lfm2np.Model) -> None:
        self.base, self.other, self.sequences = base, other, sequences(base)
        logits = [[side.logits(ids[:stop])[start:] for ids, start, stop in self.sequences] for side in (base, other)]
        one, two = (log_softmax(np.concatenate(side)) for side in logits)
        self.kl = (np.exp(one) * (one - two)).sum(axis=1)
        self.best = [side.argmax(axis=1) for side in (one, two)]
        following = np.array(
            [n for ids, a, b in self.sequences for n in [*ids[a + 1 : b + 1], *[-1] * (b - len(ids) + 1)]]
        )
        rows = np.flatnonzero(following >= 0)
        self.logprobs = [side[rows, following[rows]] for side in (one, two)]


def close(actual: float, expected: Any, within: float = 1e-9) -> bool:
    return bool(abs(actual - expected) <= within * abs(expected) + 1e-13)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both fixtures in Q4_0, and requests."""
    folder = tmp_path_factory.mktemp("compared")
    for directory in (TRAINED, MOE):
        quantised(directory, "Q4_0", folder)
    written(folder / "r.jsonl", LINES)
    written(folder / "two.jsonl", [LINES[0], LINES[3]])
    return folder


@pytest.mark.parametrize("directory", [TRAINED, MOE], ids=["dense", "mixture"])
def test_figures_of_positions_and_tokens(directory: Path, files: Path, capsys: Any):
    path = files / f"{directory.name}-Q4_0.gguf"
    (comparison,) = figures(capsys, directory, path, "--requests", files / "r.jsonl")["quantised"]
    plain = Plain(lfm2np.load(directory), lfm2np.load(path))
    kl = np.sort(plain.kl)
    assert comparison["positions"] == len(kl) > 10
    expected = {"mean": kl.mean(), "median": kl[(len(kl) + 1) // 2 - 1], "p99": kl[-1], "largest": kl[-1]}
    assert (
        all(close(comparison["kl"][name], value) for name, value in expected.items())
        and comparison["kl"]["mean"] > 1e-5
    )
    flipped = plain.best[0] != plain.best[1]
    assert comparison["mismatches"]["count"] == flipped.sum()
    assert comparison["mismatches"]["agreement"] == (len(kl) - flipped.sum()) / len(kl)
    base, other = plain.logprobs
    (perplexity,) = comparison["perplexities"]
    assert close(perplexity["base"], np.exp(-base.mean())) and close(perplexity["quantised"], np.exp(-other.mean()))
    assert close(perplexity["ratio"], np.exp((base - other).mean()))


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
