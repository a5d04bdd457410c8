"""A small LFM2 engine with one bug, for `lfm2np check` and `lfm2np locate` to find; `mended` is the same without it.

    lfm2np check lfm2np.oracle.wrong_engine:factory
    lfm2np check lfm2np.oracle.wrong_engine:mended

Plain NumPy in float32, greedy, one request at a time: the prompt in one step, then a step for each token, with a cache.
It reads checkpoints with this package, and shares no arithmetic with it. The bug is typical of hybrids: the convolution
state for the next step is taken from this step's tokens alone, with zeros before them. After a prompt that is right;
after a step of one token the token before it is forgotten. The tutorial is docs/engine/1-tutorial.md.

T tokens of a step, C of the sequence up to them, D hidden, H query heads, G key/value heads, E head_dim, V vocabulary,
L convolution taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lfm2np
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.stored import widen
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.oracle.recorders import Recorder

Array = NDArray[Any]


def state_of_the_step(window: Array, u: Array) -> Array:
    """The convolution state for the next step, [L-1, D]. Wrong: `u` [T, D] is this step's input alone."""
    return np.pad(u, ((len(window) - len(u), 0), (0, 0)))[len(u) :]


def state_of_the_sequence(window: Array, u: Array) -> Array:
    """Right: `window` [L-1+T, D] is the state from before the step, then `u`."""
    return window[len(u) :]


def factory(model: str, sizes: dict[str, Any]) -> SmallEngine:
    return SmallEngine(model, state_of_the_step)


def mended(model: str, sizes: dict[str, Any]) -> SmallEngine:
    return SmallEngine(model, state_of_the_sequence)


class SmallEngine:
    """Levels a and b of lfm2np/oracle/engines/protocol.py."""

    lacks = frozenset({"sampling", "samples", "processors", "stops", "mixture-of-experts", "lfm3", "overflow"})

    def __init__(self, model: str, next_state: Callable[[Array, Array], Array]) -> None:
        self.config, self.next_state = read_config(Path(model)), next_state
        if self.config.mixture is not None:
            raise ValueError("a mixture of experts: this engine computes dense layers only")
        self.weights: dict[str, Array] = {
            name.removesuffix(".weight"): widen(tensor.values, tensor.dtype).astype(np.float32, copy=False)
            for name, tensor in read_tensors(Path(model), self.config).items()
        }

    def generate(self, requests: Sequence[Request]) -> list[list[Answer]]:
        return [[self.run(request.prompt_token_ids, request.params.max_tokens or 1)] for request in requests]

    def score(self, token_ids: Sequence[int]) -> list[float]:
        return list(self.run(token_ids, 1).prompt_logprobs or ())

    def record(self, prompts: Sequence[Sequence[int]], request: int, max_tokens: int, recorder: Recorder) -> None:
        """For `lfm2np record` and `lfm2np check --locate`."""
        self.run(prompts[request], max_tokens, recorder)

    def run(self, prompt: Sequence[int], new: int, recorder: Recorder | None = None) -> Answer:
        """The greedy completion by `new` tokens; the recorder gets some tensors, step by step."""
        cache: dict[str, Any] = {}
        recorder = recorder or Recorder()  # discarded
        rows = log_softmax(self.step(prompt, 0, cache, recorder))
        prompt_logprobs = tuple(float(rows[row, token]) for row, token in enumerate(prompt[1:]))
        ids, logprobs = [int(rows[-1].argmax())], [float(rows[-1].max())]
        while len(ids) < new:
            rows = log_softmax(self.step(ids[-1:], len(prompt) + len(ids) - 1, cache, recorder))
            ids.append(int(rows[-1].argmax()))
            logprobs.append(float(rows[-1].max()))
        return Answer(tuple(ids), finish_reason="length", logprobs=tuple(logprobs), prompt_logprobs=prompt_logprobs)

    @np.errstate(over="ignore")  # of silu, which is 0 there
    def step(self, ids: Sequence[int], start: int, cache: dict[str, Any], recorder: Recorder) -> Array:
        """Logits [T, V] of the tokens from position `start` on."""
        recorder.step(ids, start)
        x = self.weights["model.embed_tokens"][list(ids)]  # [T, D]
        for index, kind in enumerate(self.config.layer_types):
            layer = f"model.layers.{index}"
            h = self.norm(x, f"{layer}.operator_norm")
            if kind == "conv":
                x = x + self.convolution(h, f"{layer}.conv", cache, recorder)
            else:
                x = x + self.attention(h, f"{layer}.self_attn", cache, start)
            h = self.norm(x, f"{layer}.ffn_norm")
            gate, up = (self.linear(h, f"{layer}.feed_forward.{part}") for part in ("w1", "w3"))
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, f"{layer}.feed_forward.w2")
            recorder.keep(layer, x)
        tied = self.config.tie_word_embeddings
        logits = self.linear(self.norm(x, "model.embedding_norm"), "model.embed_tokens" if tied else "lm_head")
        recorder.keep("lm_head", logits)
        return logits

    def convolution(self, h: Array, name: str, cache: dict[str, Any], recorder: Recorder) -> Array:
        """[T, D] -> [T, D]."""
        joined = self.linear(h, f"{name}.in_proj")
        gate_in, gate_out, value = np.split(joined, 3, axis=1)
        u, taps = gate_in * value, self.weights[f"{name}.conv"][:, 0].T  # [T, D], [L, D]
        state = cache.get(name, np.zeros_like(u, shape=(len(taps) - 1, u.shape[1])))
        window = np.concatenate([state, u])
        mixed = sum(tap * window[k : k + len(u)] for k, tap in enumerate(taps)) + self.bias(f"{name}.conv")
        cache[name] = self.next_state(window, u)
        recorder.keep(f"{name}.in_proj", joined)
        recorder.keep(f"{name}.u", u)
        recorder.keep(f"{name}.state", state[None])
        recorder.keep(f"{name}.conv", mixed)
        return self.linear(gate_out * mixed, f"{name}.out_proj")

    def attention(self, h: Array, name: str, cache: dict[str, Any], start: int) -> Array:
        """[T, D] -> [T, D]."""
        size = self.config.head_dim
        queries, keys, values = (self.linear(h, f"{name}.{part}_proj").reshape(len(h), -1, size) for part in "qkv")
        positions = np.arange(start, start + len(h), dtype=np.float32)
        queries = rotated(self.norm(queries, f"{name}.q_layernorm"), positions, self.config.rope_theta)
        keys = rotated(self.norm(keys, f"{name}.k_layernorm"), positions, self.config.rope_theta)
        if name in cache:
            keys, values = (np.concatenate(pair) for pair in zip(cache[name], (keys, values), strict=True))
        cache[name] = keys, values  # [C, G, E]
        shared = queries.shape[1] // keys.shape[1]
        scores = np.einsum("the,che->htc", queries, keys.repeat(shared, axis=1)) * np.float32(size**-0.5)
        scores[:, positions[:, None] < np.arange(len(keys))] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("htc,che->the", weights, values.repeat(shared, axis=1))
        return self.linear(mixed.reshape(len(h), -1), f"{name}.out_proj")

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[name].T + self.bias(name)

    def bias(self, name: str) -> Array | np.float32:
        return self.weights.get(f"{name}.bias", np.float32(0))

    def norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(self.config.norm_eps))
        normed: Array = x / scale * self.weights[name]
        return normed


def rotated(x: Array, positions: Array, theta: float) -> Array:
    """[T, heads, E] at these positions."""
    size = x.shape[-1]
    angles = positions[:, None, None] / np.float32(theta) ** (np.arange(0, size, 2, dtype=np.float32) / size)
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate(
        [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], axis=-1
    )


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    normalised: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


def dump(path: str, make_engine: Callable[[str, dict[str, Any]], SmallEngine] = factory, new: int = 8) -> None:
    """Records one request on the trained model, in the form that `lfm2np locate` reads."""
    model = lfm2np.load()
    prompt = model.tokenizer.encode("copy: tivu zo sa")
    with Recorder(path) as recorder:
        make_engine(str(model.path), {}).run(prompt, new, recorder)
