"""Where vLLM has what `locate` reads: hooks on its modules, and its caches as they are read.

A forward pass is one flat batch of the rows of all its requests; the runner's list gives a request's rows. What differs
from `locate`: q, k, v and w1, w3 are one product each; a norm adds the residual and returns the pair (norm, sum); `u`
and the convolution's output are an argument and the result of a kernel, for decodes and prefills separately; keys and
values are in blocks, in an order that the kernel chooses. Not available: attention's scores and weights, which no
tensor of vLLM's holds.

T rows of a pass, D hidden, G key/value heads, E head_dim, L convolution taps, P tokens of a block of the cache, B
blocks, C tokens that the request sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.recorders.engine_versions import around

Array = NDArray[Any]
Tensors = dict[str, Any]  # by the names of `locate`, a tensor of PyTorch's each, [T, ...]
Reading = Callable[[Any, Any], Tensors]  # of inputs and output of a module

DIGIT = 128  # whole numbers up to it are exact in every format


@dataclass
class Step:
    """The tensors of one pass, whose rows are the positions from `start` on."""

    start: int
    count: int
    tensors: dict[str, Array] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.count


# --- where a request's rows are


@dataclass(frozen=True)
class Place:
    """One request in one pass."""

    index: int  # among the pass's requests: those that decode come first
    start: int  # its first position
    rows: slice  # its rows of the flat batch

    @property
    def count(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def seen(self) -> int:
        """Tokens that it sees: its cache and its rows."""
        return self.start + self.count


def place_of(name: str, names: Sequence[str], borders: Sequence[int], computed: Sequence[int]) -> Place | None:
    """Where the request is, among `names` in the batch's order; None if it has no rows.

    borders    the first row of each request, and the end
    computed   of each request, the tokens before its rows
    """
    if name not in names:
        return None
    index = list(names).index(name)
    return Place(index, int(computed[index]), slice(int(borders[index]), int(borders[index + 1])))


def state_slot(index: int, decodes: Sequence[int], prefills: Sequence[int], begun: Sequence[int]) -> int | None:
    """The block with the convolution's state of request `index`; None: it starts from zeros.

    decodes, prefills   blocks of those that decode, and of the others, which come behind them
    begun               of those others, whether they have a state
    """
    if index < len(decodes):
        return int(decodes[index])
    index -= len(decodes)
    return int(prefills[index]) if begun[index] else None


def as_list(tensor: Any, count: int) -> list[int]:
    """The first `count` numbers of a tensor of any shape; none of None."""
    return [] if tensor is None else tensor.flatten().tolist()[:count]


# --- what the modules make: of inputs and output of a module, tensors by name


def readings(model: Any) -> Iterator[tuple[Any, Reading]]:
    """Modules of an Lfm2ForCausalLM, each with what to record of its call."""
    last = f"model.layers.{len(model.model.layers) - 1}"
    yield model.model.embed_tokens, partial(named, "model.embed_tokens")
    for index, layer in enumerate(model.model.layers):
        prefix, before = f"model.layers.{index}", f"model.layers.{index - 1}"
        yield layer.operator_norm, partial(summed_norm, f"{prefix}.operator_norm", before)
        yield from attention_readings(prefix, layer) if hasattr(layer, "self_attn") else conv_readings(prefix, layer)
        yield layer.ffn_norm, partial(summed_norm, f"{prefix}.ffn_norm", f"{prefix}.residual")
        mlp = f"{prefix}.feed_forward"
        w13, w2 = layer.feed_forward.w13, layer.feed_forward.w2
        yield w13, partial(parted, (f"{mlp}.w1", f"{mlp}.w3"), w13.output_sizes)
        yield w2, partial(with_input, f"{mlp}.gated", f"{mlp}.w2")
    yield model.model.embedding_norm, partial(summed_norm, "model.embedding_norm", last)


def conv_readings(prefix: str, layer: Any) -> Iterator[tuple[Any, Reading]]:
    conv, prefix = layer.short_conv, f"{prefix}.conv"
    yield conv.in_proj, partial(named, f"{prefix}.in_proj")
    yield conv.out_proj, partial(with_input, f"{prefix}.gated", f"{prefix}.out_proj")


def attention_readings(prefix: str, layer: Any) -> Iterator[tuple[Any, Reading]]:
    """The rotated are what attention is called with: the rotation is one module for all layers."""
    attention, prefix = layer.self_attn, f"{prefix}.self_attn"
    names = [f"{prefix}.{part}_proj" for part in "qkv"]
    yield attention.qkv_proj, partial(parted, names, (attention.q_size, attention.kv_size, attention.kv_size))
    for part, norm in (("q", attention.q_layernorm), ("k", attention.k_layernorm)):
        yield norm, partial(named, f"{prefix}.{part}_layernorm")
    yield attention.attn, lambda given, output: {f"{prefix}.q_rotated": given[0], f"{prefix}.k_rotated": given[1]}
    yield attention.out_proj, partial(with_input, f"{prefix}.attended", f"{prefix}.out_proj")


def first(output: Any) -> Any:
    """Linear modules return (output, bias), norms (norm, sum)."""
    return output[0] if isinstance(output, tuple) else output


def named(name: str, given: Any, output: Any) -> Tensors:
    return {name: first(output)}


def with_input(entering: str, name: str, given: Any, output: Any) -> Tensors:
    return {entering: given[0], name: first(output)}


def summed_norm(norm: str, total: str, given: Any, output: Any) -> Tensors:
    """The first norm has nothing to add, and returns no pair."""
    return {norm: output[0], total: output[1]} if isinstance(output, tuple) else {norm: output}


def parted(names: Sequence[str], widths: Sequence[int], given: Any, output: Any) -> Tensors:
    """Outputs of a merged projection, one behind another."""
    ends = np.cumsum([0, *widths])
    return {name: first(output)[:, start:end] for name, start, end in zip(names, ends[:-1], ends[1:], strict=True)}


# --- the hooks


class Tap:
    """Records the request's rows of each pass."""

    def __init__(self, runner: Any, name: str) -> None:
        self.model, self._runner, self._name = runner.model, runner, name
        self._layouts: dict[str, tuple[Array, Array]] = {}
        self._place: Place | None = None
        self.convolved: list[tuple[Any, Any]] = []  # of the layer that runs: rows of u and of the output, [t, D]
        self.steps: list[Step] = []

    def begin(self, *_: Any) -> None:
        """A pass begins."""
        batch, borders = self._runner.input_batch, self._runner.query_start_loc.np
        self._place = place_of(self._name, batch.req_ids, borders, batch.num_computed_tokens_cpu)
        if self._place is not None:
            self.steps.append(Step(self._place.start, self._place.count))

    def _put(self, name: str, rows: Any) -> None:
        self.steps[-1].tensors[name] = to_numpy(rows)

    def keep(self, tensors: Tensors) -> None:
        """The request's rows of each, heads side by side."""
        if self._place is not None:
            for name, tensor in tensors.items():
                self._put(name, tensor[self._place.rows].flatten(1))

    def keep_called(self, read: Reading, _: Any, given: Any, output: Any) -> None:
        self.keep(read(given, output))

    def keep_logits(self, _: Any, given: Any, logits: Any) -> None:
        """One row for each request: its last."""
        if self._place is not None:
            self._put("lm_head", logits[[self._place.index]])

    def keep_state(self, prefix: str, conv: Any, *_: Any) -> None:
        """Before a ShortConv runs: [1, L-1, D]."""
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        self.convolved.clear()
        if self._place is None:
            return
        metadata, blocks = metadata_of(conv.prefix), conv.kv_cache[0]
        states = (blocks.transpose(-1, -2) if is_conv_state_dim_first() else blocks)[:, : conv.L_cache - 1]
        decodes = as_list(metadata.state_indices_tensor_d, metadata.num_decodes)
        prefills = as_list(metadata.state_indices_tensor_p, metadata.num_prefills)
        begun = as_list(metadata.has_initial_states_p, metadata.num_prefills)
        slot = state_slot(self._place.index, decodes, prefills, begun)
        self._put(f"{prefix}.state", states.new_zeros(1, *states.shape[1:]) if slot is None else states[[slot]])

    def keep_convolved(self, prefix: str, *_: Any) -> None:
        """After a ShortConv ran: it calls the kernel for prefills first, but puts decodes' rows first."""
        import torch

        if self.convolved:
            u, mixed = (torch.cat(parts[::-1]) for parts in zip(*self.convolved, strict=True))
            self.keep({f"{prefix}.u": u, f"{prefix}.conv": mixed})

    def keep_reads(self, prefix: str, attention: Any, *_: Any) -> None:
        """After attention ran: all that it saw [C, G*E]. Nothing if the cache's format differs from the keys'."""
        place, cache = self._place, attention.kv_cache
        if place is None or cache.dtype != attention.dtype:
            return
        if prefix not in self._layouts:
            self._layouts[prefix] = layout_of(attention)
        size = cache.shape[2]
        blocks = metadata_of(attention.layer_name).block_table[place.index, : -(-place.seen // size)]
        pages = to_numpy(cache[blocks.long()])
        for name, layout in zip(("keys_read", "values_read"), self._layouts[prefix], strict=True):
            self.steps[-1].tensors[f"{prefix}.{name}"] = unpacked(pages, layout)[: place.seen]


def to_numpy(tensor: Any) -> Array:
    """A copy, in float32, which holds every number of a coarser format."""
    return np.array(tensor.detach().float().numpy())


def metadata_of(layer_name: str) -> Any:
    """What the pass gives this layer's kernel."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().attn_metadata[layer_name]


def unpacked(pages: Array, layout: Array) -> Array:
    """[B*P, G*E] of blocks [B, G, P, 2 * E], in which number `layout[i]` of a head is number i of its [P, E]."""
    count, heads = pages.shape[:2]
    size = pages.shape[2]
    cells = pages.reshape(count, heads, -1)[:, :, layout]
    return cells.reshape(count, heads, size, -1).swapaxes(1, 2).reshape(count * size, -1)


def layout_of(attention: Any) -> tuple[Array, Array]:
    """Where a block of this layer's cache has keys and values, found by letting its kernel write consecutive numbers.

    Each [P*E]: the place of number i of a head's [P, E] in the block's [P * 2 * E]. Written digit by digit, as not
    every format holds all numbers.
    """
    import torch

    _, heads, size, width = attention.kv_cache.shape
    numbers = torch.arange(size * width).reshape(size, 1, width)  # a row's first half keys, the rest values
    read = torch.zeros(heads, size * width, dtype=torch.long)
    slots = torch.arange(size, dtype=torch.long)
    scale = 1
    while scale < size * width:
        digits = (numbers // scale % DIGIT).expand(-1, heads, -1).to(attention.kv_cache.dtype)
        page = torch.zeros(1, heads, size, width, dtype=attention.kv_cache.dtype)
        keys, values = (half.contiguous() for half in digits.chunk(2, dim=-1))
        attention.impl.do_kv_cache_update(attention, keys, values, page, slots)
        read += page.reshape(heads, -1).long() * scale
        scale *= DIGIT
    places = np.argsort(read[0].numpy()).reshape(size, 2, -1)
    return places[:, 0].reshape(-1), places[:, 1].reshape(-1)


@contextmanager
def attached(tap: Tap) -> Iterator[None]:
    """Hooks on the model's modules, except Lfm2Model, whose forward vLLM calls directly."""
    model = tap.model
    handles = [model.register_forward_pre_hook(tap.begin)]
    handles += [module.register_forward_hook(partial(tap.keep_called, read)) for module, read in readings(model)]
    handles.append(model.logits_processor.register_forward_hook(tap.keep_logits))
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}"
        if hasattr(layer, "self_attn"):
            attention = layer.self_attn.attn
            handles.append(attention.register_forward_hook(partial(tap.keep_reads, f"{prefix}.self_attn")))
        else:
            conv = layer.short_conv
            handles.append(conv.register_forward_pre_hook(partial(tap.keep_state, f"{prefix}.conv")))
            handles.append(conv.register_forward_hook(partial(tap.keep_convolved, f"{prefix}.conv")))
    try:
        with kernels_kept(tap.convolved):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def kernels_kept(into: list[tuple[Any, Any]]) -> Iterator[None]:
    """Appends inputs and outputs of the convolution's kernels; ShortConv imports them at each call."""
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d as kernels

    def kept(channels_first: bool, original: Any, u: Any, *others: Any, **options: Any) -> Any:  # [D, t], or [t, D]
        given = (u.T if channels_first else u).clone()
        output = original(u, *others, **options)
        into.append((given, (output.T if channels_first else output).clone()))
        return output

    prefill, decode = partial(kept, True), partial(kept, False)
    with around(kernels, "causal_conv1d_fn_cpu", prefill), around(kernels, "causal_conv1d_update_cpu", decode):
        yield
