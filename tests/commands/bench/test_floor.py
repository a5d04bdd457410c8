"""The floor computes what the model computes, and the filled cache is what a prefill leaves."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import lfm2np
from lfm2np.checkpoint.config_json import load_config, parse_config
from lfm2np.commands.bench.random_checkpoint import SMALL, published_config
from lfm2np.commands.bench.sides.cells import DECODE, PREFILL, Cell, cell_named
from lfm2np.commands.bench.sides.engine_side import EngineSide
from lfm2np.commands.bench.sides.filled_engines import (
    decoding_engine,
    greedy,
    make_engine,
    random_entries,
    random_prompt,
)
from lfm2np.commands.bench.sides.floor_side import Attention, FloorSide, linear_products
from lfm2np.engine.cache import block_runs, read_tokens
from lfm2np.truth.layers import matrix_parts

TORTURE = Path(__file__).parents[3] / "fixtures" / "torture"
CHECKPOINTS = sorted(path.name for path in TORTURE.iterdir())
CELLS = [Cell(PREFILL, 1, 9), Cell(DECODE, 3, 17)]
VECTORS = 33 * 1024 + 12 * 64 + 10 * 3 * 1024  # norms of layers and output, of queries and keys; taps
FLOORS = {"exact": "float64", "float32": "float32"}


class Counting:
    """An arithmetic that also notes, of every linear map, how many products of numbers it takes."""

    def __init__(self, inner):
        self.inner, self.linear_maps = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def linear(self, x, matrix, bias=None):
        self.linear_maps.append(len(x) * matrix.values.size)
        return self.inner.linear(x, matrix, bias)


def counted_step(directory, numerics, cell):
    """The linear maps of one step of the engine in that cell."""
    model = lfm2np.load(directory, numerics)
    counting = Counting(model.numerics)
    model = dataclasses.replace(model, numerics=counting)
    if cell.kind == PREFILL:
        engine = make_engine(model, 1, cell.context + 1)
        engine.add_request("0", random_prompt(model, cell.context, 0), greedy(1))
    else:
        engine = decoding_engine(model, cell.requests, cell.context, 1, random_entries(model, cell.context))
        assert counting.linear_maps == []
    engine.step()
    return counting.linear_maps


@pytest.mark.rounding
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("numerics", sorted(FLOORS))
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_floor_has_the_model_s_linear_maps(checkpoint, numerics, cell):
    floor = FloorSide(FLOORS[numerics])
    floor.load(TORTURE / checkpoint, 1)
    pairs = floor.linear_operands(cell)
    sizes, counted = [len(x) * weight.size for x, weight in pairs], counted_step(TORTURE / checkpoint, numerics, cell)
    if load_config(TORTURE / checkpoint).mixture is None:
        assert sizes == counted
    else:  # tokens go to experts at random there
        assert sum(sizes) == sum(counted)
    assert all(x.shape[1] == weight.shape[1] for x, weight in pairs)
    assert all(x.dtype == weight.dtype == FLOORS[numerics] for x, weight in pairs)


def test_the_products_of_lfm2_350m_have_the_size_of_its_matrices():
    products = list(linear_products(parse_config(published_config(SMALL), "config.json"), cell_named("decode-5x8")))
    assert len(products) == 4 * 16 + 1
    assert {product.rows for product in products} == {5}
    assert sum(product.inputs * product.outputs for product in products) == 354_483_968 - VECTORS


def test_the_floor_s_attention_has_the_engine_s_sizes():
    """Queries [S, G, H/G t, E] against keys [S, G, C, E] of every attention layer, the new token's included."""
    config = lfm2np.load(TORTURE / "six_heads_two_kv", "float32").config  # layers caca, H 6, G 2, E 10
    attention = Attention(config, cell_named("decode-3x17"), "float64")
    assert attention.queries.shape == (3, 2, 3, 10)
    assert attention.weights.shape == (1, 1, 2 * 3, 18)
    assert [keys.shape for keys, _ in attention.layers] == [(3, 2, 18, 10)] * 2
    attention = Attention(config, cell_named("prefill-17"), "float32")
    assert (attention.queries.shape, attention.weights.shape) == ((1, 2, 51, 10), (1, 1, 51, 17))


@pytest.mark.rounding
@pytest.mark.parametrize("numerics", sorted(FLOORS))
def test_a_filled_engine_holds_the_entries_and_decodes_next(numerics):
    model = lfm2np.load(TORTURE / "six_heads_two_kv", numerics)
    entries = random_entries(model, 37)
    engine = decoding_engine(model, 3, 37, 4, entries)
    assert len(entries) == model.config.layer_types.count("full_attention")
    assert engine.scheduler.num_preemptions == 0
    for request in engine.scheduler.running:
        assert (request.is_decoding, request.num_computed_tokens) == (True, 37)
        nothing = tuple(array[:0] for array in entries[0])
        for layer, expected in enumerate(entries):
            parts = read_tokens(engine.cache, layer, block_runs(request.block_table), 37, nothing)
            actual = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
            assert all(np.array_equal(x, y) for x, y in zip(actual, expected, strict=True))
        assert (engine.cache.states[request.slot] == 1.0).all()
    for _ in range(4):
        assert len(engine.step()) == 3
    assert not engine.has_unfinished


def test_no_prompt_of_a_prefill_cell_is_found_in_the_cache():
    """Else a warm prefix would be timed."""
    model = lfm2np.load(TORTURE / "six_heads_two_kv", "float32")
    assert random_prompt(model, 40, 0)[:16] != random_prompt(model, 40, 1)[:16]
    assert random_prompt(model, 40, 0) == random_prompt(model, 40, 0)


@pytest.mark.rounding
@pytest.mark.parametrize("side", [EngineSide("exact"), EngineSide("float32"), FloorSide("float64")])
def test_a_side_times_as_many_steps_as_it_is_asked_for(side):
    side.load(TORTURE / "sharded_mixed_types", 1)
    for cell in CELLS:
        steps = side.time(cell, 2)
        assert len(steps) == 2
        assert all(step["seconds"] > 0.0 for step in steps)
        assert all(("linear" in step) == isinstance(side, FloorSide) for step in steps)


def test_prefill_memory_counts_the_cache_of_the_prompt():
    side = EngineSide("exact")
    side.load(TORTURE / "six_heads_two_kv", 1)
    short, long = (side.prefill_memory(length)["cache_bytes"] for length in (16, 160))
    assert long == 10 * short > 0


@pytest.mark.rounding
def test_the_floor_of_a_mixture_has_each_experts_rows_and_no_others():
    """8 experts, 2 a token, in three of five layers: as many rows as tokens times 2, whatever the spread."""
    config = lfm2np.load(TORTURE / "moe_published", "float32").config
    for name, tokens in (("decode-3x17", 3), ("prefill-9", 9)):
        cell = cell_named(name)
        products = list(linear_products(config, cell))
        assert len(products) == len(list(matrix_parts(config)))
        of_experts = [product for product in products if product.outputs == 2 * config.mixture.moe_intermediate_size]
        assert sum(expert.rows for expert in of_experts) == 3 * 2 * tokens
        assert all(expert.rows <= tokens for expert in of_experts)
        side = FloorSide("float32")
        side.load(TORTURE / "moe_published", 1)
        assert [x.shape + w.shape for x, w in side.linear_operands(cell)] == [
            (product.rows, product.inputs, product.outputs, product.inputs) for product in products
        ]


@pytest.mark.rounding
def test_requests_of_a_mixture_go_to_different_experts():
    """Else a decode of many would read the weights of few."""
    side = EngineSide("float32")
    side.load(TORTURE / "moe_published", 1)
    few, many = (side.time(cell_named(f"decode-{count}x17"), 2) for count in (1, 6))
    assert all(cell["experts"] == 2.0 for cell in few)
    assert all(cell["experts"] > 3.0 for cell in many)
