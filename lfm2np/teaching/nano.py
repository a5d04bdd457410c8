"""A whole engine for LFM2: paged, prefix-cached, chunked, continuously batched, preempting; greedy, in float32.

    for sequence in Engine("path/to/LFM2-350M").generate([[1, 17, 42], [1, 17, 5, 6]], max_tokens=8):
        print(sequence.new_token_ids)

Read it from top to bottom: a request, the blocks, the scheduler, the network. `truth/reference.py` is the network
without an engine, `engine/` and `scheduler/` are an engine with every option.

HYBRID marks where this differs from an engine for a transformer. Ten of the sixteen layers of LFM2-350M have no
attention: each is a convolution over a token and the L-1 before it. So a request has two kinds of memory. Keys and
values grow with each token, and what is written stays right. The state of a convolution, its last L-1 inputs, has one
size, and each token overwrites it: it is right at one position only, and nothing in it says at which.

T tokens of a step, t of them one request's, C tokens of a request up to the last of these, D hidden, H query heads,
G key/value heads, E head_dim, V vocabulary, L convolution taps, N blocks, P block size, S slots.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.stored import widen

Array = np.ndarray[Any, Any]
Ids = list[int] | tuple[int, ...]


@dataclass(eq=False)
class Sequence:
    """A request: what was wanted, what came of it, and the memory that it holds while it runs."""

    request_id: str
    token_ids: list[int]  # the prompt, then the new ones
    num_prompt_tokens: int
    max_tokens: int
    stop_token_ids: Ids
    logprobs: list[float] = field(default_factory=list)  # of the new tokens
    finish_reason: str | None = None
    num_computed_tokens: int = 0  # whose keys and values are in its blocks; its states are those behind the last
    block_table: list[int] = field(default_factory=list)  # the block of positions 0 to P-1, of P to 2P-1, ...
    slot: int | None = None  # of its states; None while it waits

    @property
    def new_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def content(self, stop: int) -> bytes:
        """Of the block that ends before position `stop`, and of the states there: a hash of ALL tokens up to it."""
        return hashlib.sha256(np.array(self.token_ids[:stop]).tobytes()).digest()


class Chunk(NamedTuple):
    """Positions start to stop-1 of a sequence, which this step computes."""

    sequence: Sequence
    start: int
    stop: int
    rows: slice  # which of the step's T tokens these are
    places: Array  # [C], where the cache has each token of the sequence up to stop-1: block * P + offset
    filled: list[tuple[int, int]]  # each block that it fills, and the position behind it


class Blocks:
    """Which block is in use, free, or free with content that can be found again: numbers only, no arrays.

    HYBRID: a block is P tokens of keys and values AND the states of all convolutions behind the last of them. Both have
    one number and one hash, and are evicted together, so there is no prefix whose state is missing.
    """

    def __init__(self, count: int) -> None:
        self.num_users = [0] * count  # sequences that have it in their table
        self.free = OrderedDict.fromkeys(range(count))  # without users; the first is handed out next
        self.hash_of, self.block_of = dict[int, bytes](), dict[bytes, int]()

    def allocate(self) -> int:
        block, _ = self.free.popitem(last=False)
        if block in self.hash_of:  # evicted
            del self.block_of[self.hash_of.pop(block)]
        self.num_users[block] = 1
        return block

    def share(self, block: int) -> None:
        """Only full blocks are shared. No one writes into these any more, so none has to be copied."""
        self.free.pop(block, None)
        self.num_users[block] += 1

    def release(self, table: list[int]) -> None:
        """What can't be found is handed out first, then what was released longest ago, the end of a prefix first."""
        for block in reversed(table):
            self.num_users[block] -= 1
            if not self.num_users[block]:
                self.free[block] = None
                self.free.move_to_end(block, last=block in self.hash_of)

    def publish(self, block: int, content: bytes) -> None:
        """It can be found from now on, unless another block with this content can."""
        if content not in self.block_of:
            self.hash_of[block], self.block_of[content] = content, block


class Engine:
    """Of a dense LFM2, a directory or a GGUF file: `add` requests at any time, `step` until none is `unfinished`."""

    def __init__(
        self,
        model: str | Path,
        block_size: int = 16,
        num_blocks: int = 512,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        prefix_caching: bool = True,
    ) -> None:
        self.config = config = read_config(Path(model))
        if config.model_type != "lfm2":
            raise ValueError(f"{model}: model_type {config.model_type}, expected lfm2: no experts, no windows")
        self.weights: dict[str, Array] = {
            name.removesuffix(".weight"): widen(tensor.values, tensor.dtype).astype(np.float32, copy=False)
            for name, tensor in read_tensors(Path(model), config).items()
        }
        self.block_size, self.max_num_batched_tokens = block_size, max_num_batched_tokens
        self.prefix_caching = prefix_caching
        self.max_model_len = min(config.max_position_embeddings, num_blocks * block_size)
        self.unfinished: dict[str, Sequence] = {}
        self.waiting: deque[Sequence] = deque()  # the next to be admitted first
        self.running: list[Sequence] = []  # the oldest first
        self.blocks, self.free_slots = Blocks(num_blocks), list(range(max_num_seqs))
        entry = num_blocks * block_size, config.num_key_value_heads, config.head_dim
        state = len(config.layers_of("conv")), config.conv_L_cache - 1, config.hidden_size
        self.keys = np.zeros((len(config.attention_layers), *entry), np.float32)  # [layers, N*P, G, E]
        self.values = np.zeros_like(self.keys)
        self.states = np.zeros((max_num_seqs, *state), np.float32)  # [S, layers, L-1, D], as they are now
        self.block_states = np.zeros((num_blocks, *state), np.float32)  # [N, layers, L-1, D], behind a block's end

    def add(self, request_id: str, prompt: Ids, max_tokens: int, stop_token_ids: Ids = ()) -> Sequence:
        """A request, whose tokens come with the steps. ValueError for one that can't be met, and harms no other."""
        is_valid = 0 < len(prompt) < self.max_model_len and 0 <= min(prompt) <= max(prompt) < self.config.vocab_size
        if request_id in self.unfinished or max_tokens < 1 or not is_valid:
            expected = f"a new id, 1 to {self.max_model_len - 1} tokens below {self.config.vocab_size}, at least 1 more"
            raise ValueError(f"request {request_id!r}: {prompt} and {max_tokens} more tokens, expected {expected}")
        most = min(max_tokens, self.max_model_len - len(prompt))  # so by itself it fits into the blocks
        self.unfinished[request_id] = sequence = Sequence(request_id, list(prompt), len(prompt), most, stop_token_ids)
        self.waiting.append(sequence)
        return sequence

    def generate(self, prompts: list[Ids], max_tokens: int) -> list[Sequence]:
        sequences = [self.add(str(index), prompt, max_tokens) for index, prompt in enumerate(prompts)]
        while self.unfinished:
            self.step()
        return sequences

    def step(self) -> list[Sequence]:
        """Computes one batch; the sequences that got a token by it."""
        chunks, grown = self.schedule(), list[Sequence]()
        if not chunks:
            return grown
        logits = self.forward(chunks)  # [T, V]
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.stop
            for block, stop in chunk.filled:
                self.blocks.publish(block, chunk.sequence.content(stop))  # HYBRID: not before, as hits copy the states
            if chunk.stop == len(chunk.sequence.token_ids):
                self.append_token(chunk.sequence, logits[chunk.rows.stop - 1])
                grown.append(chunk.sequence)
        return grown

    def append_token(self, sequence: Sequence, logits: Array) -> None:
        """The likeliest token behind the last, by its logits [V]."""
        token, shifted = int(logits.argmax()), logits - logits.max()
        sequence.token_ids.append(token)
        sequence.logprobs.append(float(shifted[token] - np.log(np.exp(shifted).sum())))
        if token in sequence.stop_token_ids:
            self.finish(sequence, "stop")
        elif len(sequence.new_token_ids) == sequence.max_tokens:
            self.finish(sequence, "length")

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Ends it, at any moment."""
        sequence.finish_reason = reason
        del self.unfinished[sequence.request_id]
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self.release(sequence)

    def schedule(self) -> list[Chunk]:
        """Those that run, the oldest first, then those that wait, as far as max_num_batched_tokens goes.

        One that decodes has one token to compute, one in prefill as many as are left of the step. Where blocks run
        out, the youngest is preempted, so the oldest always gets on.
        """
        chunks, used = list[Chunk](), 0
        for sequence in list(self.running):
            while sequence.slot is not None and used < self.max_num_batched_tokens:
                if chunk := self.chunk(sequence, used):
                    chunks.append(chunk)
                    used = chunk.rows.stop
                    break
                self.preempt(self.running[-1])  # which may be this one
        while self.waiting and self.free_slots and used < self.max_num_batched_tokens:
            sequence = self.admit()
            if not (chunk := self.chunk(sequence, used)):
                self.preempt(sequence)
                break
            chunks.append(chunk)
            used = chunk.rows.stop
        return chunks

    def chunk(self, sequence: Sequence, first: int) -> Chunk | None:
        """Its next tokens, as a step with `first` rows can take them, with blocks; None if too few blocks are free."""
        start, size, table = sequence.num_computed_tokens, self.block_size, sequence.block_table
        stop = min(len(sequence.token_ids), start + self.max_num_batched_tokens - first)
        missing = -(-stop // size) - len(table)
        if missing > len(self.blocks.free):
            return None
        table += [self.blocks.allocate() for _ in range(missing)]
        places = (np.array(table)[:, None] * size + np.arange(size)).ravel()[:stop]
        filled = [(table[index], (index + 1) * size) for index in range(start // size, stop // size)]
        return Chunk(sequence, start, stop, slice(first, first + stop - start), places, filled)

    def admit(self) -> Sequence:
        """Gives the next that waits a slot, and the cached blocks of its longest prefix, perhaps its own of before.

        HYBRID: sharing the blocks would do for a transformer. Here the slot has the states of its last tenant; they
        have to become those at the end of the prefix, or zeros at the start. They are saved behind full blocks only.
        """
        sequence, hit = self.waiting.popleft(), list[int]()
        most = len(sequence.token_ids) - 1 if self.prefix_caching else 0  # the last is computed: the next comes of it
        for stop in range(self.block_size, most + 1, self.block_size):
            if (block := self.blocks.block_of.get(sequence.content(stop))) is None:
                break
            self.blocks.share(block)
            hit.append(block)
        sequence.block_table, sequence.num_computed_tokens = hit, len(hit) * self.block_size
        sequence.slot = self.free_slots.pop()
        self.states[sequence.slot] = self.block_states[hit[-1]] if hit else 0.0
        self.running.append(sequence)
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Takes its memory. It is the next to be admitted, and computes again what is not in the cache by then.

        HYBRID: its states, mostly in the midst of a block, are lost. It begins again with those behind the last block
        that it still finds, and the tokens from there on bring them to where they were, but for rounding.
        """
        self.release(sequence)
        self.waiting.appendleft(sequence)

    def release(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        self.blocks.release(sequence.block_table)
        sequence.slot, sequence.block_table, sequence.num_computed_tokens = None, [], 0

    @np.errstate(over="ignore")  # of exp(-gate), where silu is 0
    def forward(self, chunks: list[Chunk]) -> Array:
        """Logits [T, V] of all chunks, one behind the other in one flat batch: no padding.

        Products, norms and rotation look at each row by itself, so they don't care whose it is. HYBRID: tokens of a
        sequence meet in two places, not only in attention. Both go through the chunks one by one.
        """
        ids = [token for chunk in chunks for token in chunk.sequence.token_ids[chunk.start : chunk.stop]]
        x = self.weights["model.embed_tokens"][ids]  # [T, D]
        kinds = self.config.layer_types
        for layer, kind in enumerate(kinds):
            name, number = f"model.layers.{layer}", kinds[:layer].count(kind)  # among the layers of its kind
            h = self.norm(x, f"{name}.operator_norm")
            if kind == "conv":
                x = x + self.convolution(h, f"{name}.conv", number, chunks)
            else:
                x = x + self.attention(h, f"{name}.self_attn", number, chunks)
            h = self.norm(x, f"{name}.ffn_norm")
            gate, up = (self.linear(h, f"{name}.feed_forward.{part}") for part in ("w1", "w3"))
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, f"{name}.feed_forward.w2")
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return self.linear(self.norm(x, "model.embedding_norm"), head)

    def convolution(self, h: Array, name: str, number: int, chunks: list[Chunk]) -> Array:
        """Gated short convolution, [T, D] -> [T, D]."""
        joined = self.linear(h, f"{name}.in_proj")
        gate_in, gate_out, value = np.split(joined, 3, axis=1)
        u, taps = gate_in * value, self.weights[f"{name}.conv"][:, 0].T  # [T, D], [L, D]
        mixed = np.concatenate([self.convolve(chunk, number, u[chunk.rows], taps) for chunk in chunks])
        mixed += self.weights.get(f"{name}.conv.bias", np.float32(0))
        return self.linear(gate_out * mixed, f"{name}.out_proj")

    def convolve(self, chunk: Chunk, number: int, new: Array, taps: Array) -> Array:
        """A chunk's new inputs [t, D], convolved with taps [L, D]; leaves the states behind it, and behind full blocks.

        HYBRID: the first L-1 of them meet the state of their sequence, not the rows that lie before them in the batch,
        which are another's; no mask of attention could mend that.
        """
        state = self.states[chunk.sequence.slot, number]  # [L-1, D]
        window = np.concatenate([state, new])  # [L-1+t, D]
        for block, stop in chunk.filled:
            self.block_states[block, number] = self.state_after(state, new[: stop - chunk.start])
        self.states[chunk.sequence.slot, number] = self.state_after(state, new)
        return np.asarray(sum(tap * window[k : k + len(new)] for k, tap in enumerate(taps)))

    def state_after(self, state: Array, new: Array) -> Array:
        """The last L-1 inputs [L-1, D] of the sequence: with fewer new ones [t, D], some of the state before."""
        return np.concatenate([state, new])[len(new) :]

    def attention(self, h: Array, name: str, number: int, chunks: list[Chunk]) -> Array:
        """Grouped-query attention over the blocks, [T, D] -> [T, D]."""
        size = self.config.head_dim
        queries, keys, values = (self.linear(h, f"{name}.{part}_proj").reshape(len(h), -1, size) for part in "qkv")
        positions = np.concatenate([np.arange(chunk.start, chunk.stop, dtype=np.float32) for chunk in chunks])
        queries = rotated(self.norm(queries, f"{name}.q_layernorm"), positions, self.config.rope_theta)
        keys = rotated(self.norm(keys, f"{name}.k_layernorm"), positions, self.config.rope_theta)
        written = np.concatenate([chunk.places[chunk.start :] for chunk in chunks])  # [T]
        self.keys[number, written], self.values[number, written] = keys, values
        cached = [(self.keys[number, chunk.places], self.values[number, chunk.places]) for chunk in chunks]  # [C, G, E]
        mixed = np.concatenate([attend(queries[chunk.rows], *pair) for chunk, pair in zip(chunks, cached, strict=True)])
        return self.linear(mixed.reshape(len(h), -1), f"{name}.out_proj")

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[name].T + self.weights.get(f"{name}.bias", np.float32(0))

    def norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(self.config.norm_eps))
        return np.asarray(x / scale * self.weights[name])


def attend(queries: Array, keys: Array, values: Array) -> Array:
    """The last t tokens of a sequence over all C of it: [t, H, E], twice [C, G, E] -> [t, H, E]."""
    t, heads, size = queries.shape
    context, groups, _ = keys.shape
    grouped = queries.reshape(t, groups, -1, size).transpose(1, 2, 0, 3)  # [G, H/G, t, E]
    scores = grouped @ keys.transpose(1, 2, 0)[:, None] * np.float32(size**-0.5)  # [G, H/G, t, C]
    scores[..., np.arange(context) > np.arange(context - t, context)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Array = weights @ values.transpose(1, 0, 2)[:, None]  # [G, H/G, t, E]
    return mixed.transpose(2, 0, 1, 3).reshape(t, heads, size)


def rotated(x: Array, positions: Array, theta: float) -> Array:
    """[T, heads, E] at these positions [T]."""
    size = x.shape[-1]
    angles = positions[:, None, None] / np.float32(theta) ** (np.arange(0, size, 2, dtype=np.float32) / size)
    cos, sin, (low, high) = np.cos(angles), np.sin(angles), np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
