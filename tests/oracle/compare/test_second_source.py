"""The figures of `lfm2np compare` another way: reference.py's logits, plain NumPy, files with one part changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_file import gguf_bytes, model_keys
from quantise import tensors_of
from sides import FIXTURES, LINES, MOE, TRAINED, figures, partly, quantised, theirs, written

import lfm2np
from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.stored import widen
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.oracle.recorders.lfm2np_recorder import record

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
def test_figures_of_positions_tokens_layers_and_routes(directory: Path, files: Path, capsys: Any):
    path = files / f"{directory.name}-Q4_0.gguf"
    (comparison,) = figures(capsys, directory, path, "--requests", files / "r.jsonl", "--by", "none")["quantised"]
    plain = Plain(lfm2np.load(directory), lfm2np.load(path))
    kl = np.sort(plain.kl)
    assert comparison["positions"] == len(kl) > 10
    expected = {"mean": kl.mean(), "median": kl[(len(kl) + 1) // 2 - 1], "p99": kl[-1], "largest": kl[-1]}
    assert (
        all(close(comparison["kl"][name], value) for name, value in expected.items())
        and comparison["kl"]["mean"] > 1e-5
    )
    flipped = plain.best[0] != plain.best[1]
    assert comparison["flips"]["count"] == flipped.sum() == len(comparison["listed_flips"])
    assert comparison["flips"]["agreement"] == (len(kl) - flipped.sum()) / len(kl)
    base, other = plain.logprobs
    assert close(comparison["logprobs"]["mean"], (other - base).mean())
    assert close(comparison["logprobs"]["rms"], np.sqrt(((other - base) ** 2).mean()))
    assert (comparison["logprobs"]["tokens"], comparison["logprobs"]["lowest"]) == (
        len(base),
        pytest.approx(float((other - base).min())),
    )
    (perplexity,) = comparison["perplexities"]
    assert close(perplexity["base"], np.exp(-base.mean())) and close(perplexity["quantised"], np.exp(-other.mean()))
    assert close(perplexity["ratio"], np.exp((base - other).mean()))
    one, two = ([record(side, ids[:stop]) for ids, _, stop in plain.sequences] for side in (plain.base, plain.other))
    starts = [start for _, start, _ in plain.sequences]

    def rows(dumps: list[Any], name: str) -> np.ndarray:
        return np.concatenate([dump[name][start:] for dump, start in zip(dumps, starts, strict=True)]).astype(
            np.float64
        )

    layers = [f"model.layers.{index}" for index in range(plain.base.config.num_hidden_layers)]
    for entry, name in zip(comparison["layers"], ["model.embed_tokens", *layers, "model.embedding_norm"], strict=True):
        before, after = rows(one, name), rows(two, name)
        assert close(entry["error"], np.sqrt(((after - before) ** 2).sum() / (before**2).sum())), name
    for entry in comparison["routes"] or []:
        name = f"model.layers.{entry['layer']}.feed_forward.experts_chosen"
        chosen = [np.sort(rows(side, name), axis=1) for side in (one, two)]
        assert entry["moved"] == (chosen[0] != chosen[1]).any(axis=1).sum() and entry["rows"] == len(kl)
    assert (comparison["routes"] is None) == (directory == TRAINED)


def test_a_part_alone_costs_what_a_file_with_that_part_alone_costs(files: Path, tmp_path: Path, capsys: Any):
    """Bit for bit: an embedding that is the head as well, a layer, a tensor of a product of three."""
    path, requests = files / "trained-Q4_0.gguf", ["--requests", files / "two.jsonl"]
    by = {
        kind: {
            part["name"]: part
            for part in figures(capsys, TRAINED, path, *requests, "--by", kind)["quantised"][0]["parts"]
        }
        for kind in ("layer", "tensor")
    }
    asked: list[tuple[str, str, Callable[[str], bool]]] = [
        ("layer", "embedding", lambda name: name == "token_embd.weight"),
        ("layer", "layer 2", lambda name: name.startswith("blk.2.")),
        ("tensor", "model.layers.2.self_attn.k_proj.weight", lambda name: name == "blk.2.attn_k.weight"),
    ]
    for kind, name, is_taken in asked:
        alone = partly(TRAINED, "Q4_0", tmp_path / "alone.gguf", is_taken)
        (comparison,) = figures(capsys, TRAINED, alone, *requests, "--by", "none")["quantised"]
        entry = by[kind][name]
        assert (entry["kl"], entry["largest"]) == (comparison["kl"]["mean"], comparison["kl"]["largest"]) and entry[
            "kl"
        ] > 0
        assert entry["flips"] == comparison["flips"]["count"]
    norms = by["tensor"]["model.layers.2.ffn_norm.weight"]
    assert (norms["changed"], norms["kl"], norms["flips"]) == (False, 0.0, 0)


def test_experts_alone_take_their_scale_with_them(files: Path, tmp_path: Path, capsys: Any):
    """routed_scaling_factor stands in the file's weights: within the float32 roundings that this moves."""
    report = figures(capsys, MOE, files / "moe-Q4_0.gguf", "--requests", files / "two.jsonl", "--by", "tensor")
    parts = {part["name"]: part for part in report["quantised"][0]["parts"]}
    name = "model.layers.3.feed_forward.experts.w2.weight"
    alone = partly(MOE, "Q4_0", tmp_path / "alone.gguf", lambda one: one == theirs(name))
    (expected,) = figures(capsys, MOE, alone, "--requests", files / "two.jsonl", "--by", "none")["quantised"]
    assert parts[name]["changed"] and close(parts[name]["kl"], expected["kl"]["mean"], 1e-2)
    assert not parts["model.layers.3.feed_forward.gate.weight"]["changed"]


def test_errors_of_the_weights(files: Path, capsys: Any):
    (comparison,) = figures(capsys, MOE, files / "moe-Q4_0.gguf", "--requests", files / "r.jsonl", "--by", "none")[
        "quantised"
    ]
    path = files / "moe-Q4_0.gguf"
    base, other = open_checkpoint(MOE, load_config(MOE)), read_tensors(path, read_config(path))
    tensors = {tensor["name"]: tensor for tensor in comparison["tensors"]}

    def error(names: list[str], factor: float) -> float:
        one, two = (
            np.concatenate([widen(side[name].values, side[name].dtype).astype(np.float64).ravel() for name in names])
            for side in (base, other)
        )
        return float(np.sqrt(((two - factor * one) ** 2).sum() / ((factor * one) ** 2).sum()))

    for name, factor in {"w1": 1.0, "w2": 1.5}.items():
        experts = [f"model.layers.2.feed_forward.experts.{number}.{name}.weight" for number in range(8)]
        assert close(tensors[f"model.layers.2.feed_forward.experts.{name}.weight"]["error"], error(experts, factor))
    assert close(tensors["model.embed_tokens.weight"]["error"], error(["model.embed_tokens.weight"], 1.0))
    assert tensors["model.layers.2.feed_forward.gate.weight"]["error"] == 0.0
    kinds = tensors["model.embed_tokens.weight"]
    assert (kinds["base_type"], kinds["type"], kinds["weights"]) == ("BF16", "Q4_0", 512 * 128)


def test_greedy_answers_part_where_both_networks_answers_do(files: Path, capsys: Any):
    """A checkpoint far off, so that they do: the mixture in Q4_0, on ids of no text."""
    lines = [{"request_id": str(n), "prompt_token_ids": [1, *range(20 + n, 24 + n)]} for n in (0, 24, 48)]
    requests = written(files / "odd.jsonl", lines)
    path = files / "moe-Q4_0.gguf"
    (comparison,) = figures(capsys, MOE, path, "--requests", requests, "--max-tokens", "9", "--by", "none")["quantised"]
    one, two = lfm2np.load(MOE), lfm2np.load(path)
    for line, answer in zip(lines, comparison["greedy"]["answers"], strict=True):
        before, after = (side.generate(line["prompt_token_ids"], 9).token_ids for side in (one, two))
        same = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(before))
        assert (answer["tokens"], answer["same"]) == (len(before), same)
        if same < len(before):
            assert (answer["base_token_id"], answer["token_id"]) == (before[same], after[same])
    totals = comparison["greedy"]
    assert totals["diverged"] == sum(entry["token_id"] is not None for entry in totals["answers"]) > 0
    assert totals["same"] == sum(entry["same"] for entry in totals["answers"]) < totals["tokens"]


def test_windows_of_a_text_are_sequences_that_begin_with_the_bos(files: Path, capsys: Any):
    """As one request each, whose ids are given; perplexity is of all tokens but the BOS."""
    text = (FIXTURES / "compared.jsonl").read_text(encoding="utf-8")[:400]
    (files / "text.txt").write_text(text)
    model = lfm2np.load(TRAINED)
    ids = model.tokenizer.encode_more(text)
    windows = [[1, *ids[start : start + 39]] for start in range(0, len(ids), 39)]
    path = files / "trained-Q4_0.gguf"
    report = figures(capsys, TRAINED, path, "--text", files / "text.txt", "--window", "40", "--by", "none")
    assert report["scored"] == [{"source": "text", "sequences": len(windows), "positions": len(ids)}]
    lines = [{"prompt_token_ids": window[:1], "completion_token_ids": window[1:]} for window in windows]
    as_requests = figures(capsys, TRAINED, path, "--requests", written(files / "w.jsonl", lines), "--by", "none")
    of_text, of_requests = report["quantised"][0], as_requests["quantised"][0]
    assert of_text["kl"] == of_requests["kl"]
    assert of_text["perplexities"][0]["ratio"] == of_requests["perplexities"][0]["ratio"]
    assert of_text["perplexities"][0]["tokens"] == len(ids)


def test_an_untied_head_is_a_separate_part(files: Path, tmp_path: Path, capsys: Any):
    """llama.cpp's mixes may store the head beside the embedding, in another type: here the embedding is the base's."""
    config = load_config(TRAINED)
    tensors = tensors_of(TRAINED, config, "F32")
    head = tensors_of(TRAINED, config, "Q4_0")["token_embd.weight"]
    path = tmp_path / "untied.gguf"
    path.write_bytes(gguf_bytes(model_keys(config), {**tensors, "output.weight": head}))
    (comparison,) = figures(capsys, TRAINED, path, "--requests", files / "r.jsonl")["quantised"]
    parts = {part["name"]: part for part in comparison["parts"]}
    assert [name for name, part in parts.items() if part["changed"]] == ["head"]
    assert (parts["head"]["kl"], parts["head"]["flips"]) == (comparison["kl"]["mean"], comparison["flips"]["count"])
    assert comparison["kl"]["mean"] > 0 and all(layer["error"] == 0 for layer in comparison["layers"])
