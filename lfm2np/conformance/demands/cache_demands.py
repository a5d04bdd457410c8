"""Demands on the cache's arrays that no token shows: their shapes, and how much memory is asked for."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

from hypothesis import strategies as st

from lfm2np.conformance.demands.demands import Property
from lfm2np.conformance.machines.compare import demand
from lfm2np.conformance.protocol import Factory
from lfm2np.conformance.trials.models import TinyModel, loaded
from lfm2np.conformance.trials.strategies import models
from lfm2np.network.cache import Cache, bytes_per_block, default_blocks, make_cache
from lfm2np.numerics import numerics_named
from scheduler import SchedulerConfig

GIBIBYTE = 1024**3


@st.composite
def cache_sizes(draw: st.DrawFn) -> tuple[TinyModel, str, SchedulerConfig]:
    config = SchedulerConfig(
        num_blocks=draw(st.integers(1, 5)),
        block_size=draw(st.integers(1, 4)),
        max_num_seqs=draw(st.integers(1, 4)),
        prefix_caching=draw(st.booleans()),
        num_host_blocks=draw(st.integers(0, 3)),
    )
    return draw(models()), draw(st.sampled_from(("exact", "float32", "float64", "bfloat16"))), config


def cache_is_sized(factory: Factory, example: tuple[TinyModel, str, SchedulerConfig]) -> None:
    """Everything that the sizes ask for, and nothing else; `bytes_per_block` is what one block more costs."""
    model, name, sizes = example
    config, numerics = loaded(model).config, numerics_named(name)
    cache = make_cache(config, numerics, sizes)
    attention = [kind for kind in config.layer_types if kind == "full_attention"]
    state = (len(config.layer_types) - len(attention), config.conv_L_cache - 1, config.hidden_size)
    demand(cache.states.shape, (sizes.max_num_seqs, *state), "shape of the states", name)
    demand(cache.checkpoints.shape, (sizes.num_blocks * sizes.prefix_caching, *state), "of the checkpoints", name)
    demand(cache.host_states.shape, (sizes.num_host_blocks, *state), "of the host states", name)
    wide = name == "float64"
    demand({one.dtype.itemsize for one in (cache.states, cache.checkpoints)}, {8 if wide else 4}, "bytes", name)
    for layers, count in ((cache.blocks, sizes.num_blocks), (cache.host_blocks, sizes.num_host_blocks)):
        demand(len(layers), len(attention), "layers with keys and values", name)
        for array in (array for layer in layers for array in layer):
            demand(array.shape[:2], (count, sizes.block_size), "blocks and their size", name)
    demand(cache == make_cache(config, numerics, sizes), False, "is another cache:", name)
    try:
        cache.states = cache.checkpoints  # type: ignore[misc]
    except FrozenInstanceError:
        pass
    else:
        raise AssertionError("the arrays of a cache can be exchanged")
    demand(cache.nbytes, sum(array.nbytes for array in arrays_of(cache)), "bytes in all", name)
    of_blocks = [cache.checkpoints, *(array for layer in cache.blocks for array in layer)]
    one_block = sum(array.nbytes for array in of_blocks) // sizes.num_blocks
    demand(bytes_per_block(config, numerics, sizes), one_block, "bytes of a block", name)
    whole = -(-config.max_position_embeddings // sizes.block_size) * sizes.max_num_seqs
    fitting = whole if one_block == 0 else min(whole, GIBIBYTE // one_block)
    demand(default_blocks(config, numerics, sizes), fitting, "blocks by default", name)


def arrays_of(cache: Cache) -> list[Any]:
    layers = (*cache.blocks, *cache.host_blocks)
    return [cache.states, cache.checkpoints, cache.host_states, *(array for layer in layers for array in layer)]


def memory_is_bounded(factory: Factory, example: int) -> None:
    """With contexts of a million tokens the blocks fill a gibibyte, but for less than one block; one is the least."""
    config, numerics = loaded(TinyModel()).config, numerics_named("exact")
    sizes = SchedulerConfig(num_blocks=1, block_size=example, max_num_seqs=10**7)
    one = bytes_per_block(config, numerics, sizes)
    demand(default_blocks(config, numerics, sizes), max(1, GIBIBYTE // one), "blocks by default", example)


CACHE_DEMANDS: tuple[Property, ...] = (
    Property(
        "cache-is-sized",
        "The cache has the arrays that the sizes ask for, and knows what they cost.",
        7,
        ("own",),
        ("SGLang 35270",),
        cache_sizes,
        cache_is_sized,
        5.0,
    ),
    Property(
        "memory-is-bounded",
        "Without being asked for a size, the cache takes at most a gibibyte, or one block.",
        7,
        ("own",),
        (),
        lambda: st.sampled_from((1, 16, 2**40)),
        memory_is_bounded,
    ),
)
