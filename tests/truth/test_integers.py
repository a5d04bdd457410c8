"""`exact` equals `integers` bit for bit, operation by operation.

The one computes by BLAS, in pieces and batches, on threads; the other adds up int64 numbers, one request at a time, and
shares no line with it. tests/arithmetic/test_exact.py compares products and sums of both with Python's integers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operands import FORMS, StartsWithTheFirstProduct, adversarial, kinds, seeds, stored_as

import lfm2np
from lfm2np.arithmetic import attention, exact, exact_attention, grids, matrix, pieces, weight_grids
from lfm2np.arithmetic.products import blas, product
from lfm2np.checkpoint.loaded import lfm3_fixture, moe_fixture, read_model
from lfm2np.engine.digest import digest, digest_prompt
from lfm2np.errors import NumericsError
from lfm2np.truth import elementary, integers, reference
from lfm2np.truth.rope import Rope, rotary_table

FIXTURES = Path(__file__).parents[2] / "fixtures"
UNLIKE = ("all_attention", "all_convolution", "biased_two_taps", "magnitudes", "moe_near_ties", "sharded_mixed_types")

SMALL = {  # sizes so small that drawn operands take every way, are cut into pieces, and give two threads work
    pieces: {"THREADS": 2, "LEAST_PIECE": 8, "THREAD_PIECE": 16, "SMALL_PIECE": 32, "PIECE": 40},
    attention: {"SCORES": 8 * 50, "SMALL_PRODUCT": 40},
    product: {
        "WEIGHTS_AT_ONCE": 90,
        "OUTPUTS_AT_ONCE": 7,
        "IN_PLACE": (blas.blas_kernel(),),
        "TILED_WEIGHTS": 1,
        "TILE": 3,
        "TILE_PRODUCTS": 60,
    },
    matrix: {"STREAMED": 200},
    weight_grids: {"PREPARED": 60},
    exact: {"PRODUCTS": 50},
    elementary: {"BLOCK": 30},
}


def make_small(patch: pytest.MonkeyPatch, is_drawn: bool) -> None:
    """Large operands and whole models, which are not drawn, have two threads, too, and the other sizes as they are.

    And np.empty may hold what was there before: the right result, from the comparison. Here it never does.
    """
    for module, sizes in SMALL.items():
        for name, size in sizes.items():
            if is_drawn or name in ("THREADS", "LEAST_PIECE", "THREAD_PIECE", "IN_PLACE"):
                patch.setattr(module, name, size)
    empty = np.empty

    def filled(*arguments, **named):
        array = empty(*arguments, **named)
        array.fill(np.nan if array.dtype.kind == "f" else 1234567)
        return array

    patch.setattr(np, "empty", filled)


@pytest.fixture(autouse=True)
def small_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, getattr(request.function, "is_hypothesis_test", False))


def same(first: np.ndarray, other: np.ndarray) -> bool:
    return first.dtype == other.dtype and first.shape == other.shape and first.tobytes() == other.tobytes()


@pytest.mark.slow
@given(
    seeds,
    kinds,
    kinds,
    st.sampled_from(FORMS),
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(1, 300) | st.sampled_from([64, 128, 256]),
    st.booleans(),
)
def test_products(seed, x_kind, w_kind, form, tokens, outputs, inputs, has_bias):
    rng = np.random.default_rng(seed)
    weight = stored_as(rng, (outputs, inputs), w_kind, form)
    x, bias = adversarial(rng, (tokens, inputs), x_kind), adversarial(rng, (outputs,), x_kind) if has_bias else None
    with np.errstate(over="ignore"):
        expected = integers.linear(x, integers.prepare_matrix(weight, "w"), bias)
        assert same(exact.linear(x, exact.prepare_matrix(weight, "w"), bias), expected)
        assert same(exact.linear(x, exact.stream_matrix(weight, "w"), bias), expected)


@given(
    seeds,
    kinds,
    st.sampled_from(FORMS),
    st.integers(1, 40),
    st.integers(1, 80) | st.sampled_from([32, 64]),
    st.tuples(st.integers(0, 39), st.integers(0, 39)),
)
def test_prepared_weights(seed, kind, form, outputs, inputs, borders):
    """On the same grids; all of them, or some rows of weights that stay in their file."""
    rng = np.random.default_rng(seed)
    weight = stored_as(rng, (outputs, inputs), kind, form)
    expected = integers.prepare_matrix(weight, "w")
    values = np.stack([np.ldexp(units.astype(np.float64), -shift) for units, shift in expected.slices])
    largest = max(int(np.abs(units).sum(-1).max()) for units, _ in expected.slices)
    prepared, streamed = exact.prepare_matrix(weight, "w"), exact.stream_matrix(weight, "w")
    for weights in (prepared, streamed):
        grid = weights.grid
        assert same(grid.columns, expected.columns)
        assert (grid.slices, grid.activation_bits) == (len(values), expected.input_bits)
        assert grid.row_sum_bits == (max(1, largest) - 1).bit_length()
        assert (weights.outputs, weights.inputs) == weight.shape
    assert np.array_equal(prepared.values.reshape(values.shape), values)
    rows = slice(*sorted(min(border, outputs) for border in borders))
    assert np.array_equal(streamed.values.prepared(rows).reshape(len(values), -1, inputs), values[:, rows])


@given(st.sampled_from([0, 1]), st.sampled_from([2, 32, 64, 1024]))
def test_weights_that_sum_to_about_a_power_of_two(more, inputs):
    """In units of their grid, of which 1 is 2**19; a second row keeps the last column of one size with the others."""
    weight = np.ones((2, inputs + 1))
    weight[1, :inputs], weight[0, -1] = 0.0, more * 2.0**-19
    expected = integers.prepare_matrix(weight, "w")
    assert np.abs(expected.slices[0][0]).sum(-1).max() == 2**19 * inputs + more
    assert exact.prepare_matrix(weight, "w").grid.activation_bits == expected.input_bits


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"), [(1, 600, 999), (5, 600, 999), (8, 640, 1153), (40, 700, 1153), (100, 96, 4608)]
)
@pytest.mark.parametrize("form", FORMS)
def test_large_products(tokens, outputs, inputs, form):
    rng = np.random.default_rng(1)
    weight = stored_as(rng, (outputs, inputs), "outlier", form)
    x, bias = adversarial(rng, (tokens, inputs), "wide"), adversarial(rng, (outputs,), "normal")
    expected = integers.linear(x, integers.prepare_matrix(weight, "w"), bias)
    assert same(exact.linear(x, exact.prepare_matrix(weight, "w"), bias), expected)


@given(seeds, st.integers(1, 9), st.integers(1, 40), st.integers(1, 60))
def test_ways_to_multiply_are_products_of_integers(seed, tokens, outputs, inputs):
    """Those, too, that only other arithmetics choose."""
    rng = np.random.default_rng(seed)
    x, weights = rng.integers(-(2**22), 2**22, (tokens, inputs)), rng.integers(-(2**22), 2**22, (outputs, inputs))
    operands = x.astype(np.float64), weights.astype(np.float64)
    for way in (product.product, product.by_vectors, product.turned_round):
        assert same(way(*operands), (x @ weights.T).astype(np.float64))


def test_too_many_terms_too_coarse_inputs_and_matrices_without_a_grid_are_refused():
    with pytest.raises(NumericsError, match="a matrix without a grid"):
        exact.linear(np.ones((1, 2), np.float32), matrix.Matrix(np.ones((3, 2))))
    for exact_sum in (grids.exact_sum, integers.exact_sum):
        with pytest.raises(NumericsError, match=r"a sum of 262145 terms: at most 262144"):
            exact_sum(np.zeros((1, 1, 2**18 + 1)))
        assert exact_sum(np.ones((1, 2**18))) == 2.0**18
    wide = np.full((1, 2**18), 1.99, np.float32)
    for arithmetic in (exact, integers):
        with pytest.raises(NumericsError, match=r"^w: rows of 262144 weights sum to 2\*\*38 units .* leaves 15 bits"):
            arithmetic.prepare_matrix(wide, "w")
    assert exact.prepare_matrix(wide[:, ::2], "w").grid.activation_bits == integers.LEAST_BITS
    assert integers.prepare_matrix(wide[:, ::2], "w").input_bits == integers.LEAST_BITS


OPERATIONS: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {  # on x and y [rows, width]
    "add": lambda x, y: (exact.add(x, y), integers.add(x, y)),
    "multiply": lambda x, y: (exact.multiply(x, y), integers.multiply(x, y)),
    "swiglu": lambda x, y: (exact.swiglu(x, y), integers.swiglu(x, y)),
    "rms_norm": lambda x, y: (exact.rms_norm(x, y[0], 1e-5), integers.rms_norm(x, y[0], 1e-5)),
    "sigmoid": lambda x, y: (exact.sigmoid(x), integers.sigmoid(x)),
    "add_expert_bias": lambda x, y: (exact.add_expert_bias(x, y[0]), integers.add_expert_bias(x, y[0])),
    "log_softmax": lambda x, y: (exact.log_softmax(x), integers.log_softmax(x)),
    "log_softmax of one": lambda x, y: (exact.log_softmax(x[0]), integers.log_softmax(x[0])),
    "embed": lambda x, y: (exact.embed(x.astype(np.float64)), integers.embed(x.astype(np.float64))),
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(seed=seeds, kind=kinds, other=kinds, rows=st.integers(1, 9), width=st.integers(1, 80))
def test_operations_on_rows(name, seed, kind, other, rows, width):
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        mine, expected = OPERATIONS[name](adversarial(rng, (rows, width), kind), adversarial(rng, (rows, width), other))
    assert same(mine, expected)


@given(st.integers(2, 30))
def test_pieces_that_other_threads_compute_are_waited_for(count):
    done, caller = np.zeros(count, bool), threading.get_ident()

    def compute(rows: slice) -> None:
        time.sleep(0.0 if threading.get_ident() == caller else 0.01)
        done[rows] = True

    pieces.over_pieces(compute, count, 8)
    assert done.all()


@given(seeds, kinds, st.integers(1, 3), st.integers(1, 3), st.integers(1, 40))
def test_sums_and_norms_of_heads(seed, kind, rows, heads, terms):
    rng = np.random.default_rng(seed)
    x = adversarial(rng, (rows, heads, terms), kind)
    wide = x * np.exp2(rng.integers(-30, 30, x.shape))
    assert same(grids.exact_sum(wide), integers.exact_sum(wide))
    assert same(grids.exact_sum(np.abs(wide), signed=False), integers.exact_sum(np.abs(wide)))
    weight = adversarial(rng, (terms,), "wide")
    with np.errstate(over="ignore"):
        assert same(exact.rms_norm(x, weight, 1e-5), integers.rms_norm(x, weight, 1e-5))


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 70))
def test_products_of_a_blas_whose_sums_of_zeros_are_negative(tokens, outputs, inputs):
    weight, x = -np.ones((outputs, inputs), np.float32), np.zeros((tokens, inputs), np.float32)
    prepared = exact.prepare_matrix(weight, "w")
    sly = matrix.Matrix(prepared.values.view(StartsWithTheFirstProduct), prepared.grid)
    assert np.signbit(x @ sly.values.T).all(), "the control"
    assert same(exact.linear(x, sly), integers.linear(x, integers.prepare_matrix(weight, "w")))


@given(seeds, kinds, st.integers(1, 6), st.integers(1, 3), st.integers(1, 8), st.integers(0, 100_000))
def test_rotation(seed, kind, tokens, heads, half, first):
    x = adversarial(np.random.default_rng(seed), (tokens, heads, 2 * half), kind)
    table = rotary_table(np.arange(first, first + tokens), 2 * half, Rope(1e6))
    assert same(exact.rotate(x, *table), integers.rotate(x, *table))


@given(
    seeds,
    kinds,
    kinds,
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(1, 5),
    st.booleans(),
)
def test_convolution_of_several_requests(seed, kind, taps_kind, lengths, width, taps, has_bias):
    rng = np.random.default_rng(seed)
    filters = adversarial(rng, (width, taps), taps_kind)
    bias = adversarial(rng, (width,), kind) if has_bias else None
    windows = [adversarial(rng, (taps - 1 + length, width), kind) for length in lengths]
    with np.errstate(over="ignore", invalid="ignore"):
        together = exact.convolve_ragged(windows, filters, bias)
        alone = [integers.convolve(window[: taps - 1], window[taps - 1 :], filters, bias) for window in windows]
        assert same(together, np.concatenate(alone))
        assert same(exact.convolve(windows[0][: taps - 1], windows[0][taps - 1 :], filters, bias), alone[0])


@given(seeds, kinds, kinds, st.integers(1, 5), st.integers(1, 9), st.sampled_from([2, 4, 6, 8, 10, 16, 32, 64, 80]))
def test_attention_scores(seed, q_kind, k_kind, tokens, context, head_dim):
    """In float64, whose last bits the outputs do not show."""
    rng = np.random.default_rng(seed)
    queries, keys = adversarial(rng, (tokens, 1, head_dim), q_kind), adversarial(rng, (context, 1, head_dim), k_kind)
    shift = rng.integers(-9, 9, head_dim).astype(np.int32)
    scores = exact_attention.on_grid(queries, -shift)[:, 0] @ exact_attention.on_grid(keys, shift)[:, 0].T + 0.0
    assert same(scores * (1.0 / np.sqrt(head_dim)), integers.head_scores(queries[:, 0], keys[:, 0], shift))


@pytest.mark.slow
@given(
    seeds,
    st.tuples(kinds, kinds, kinds),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([2, 4, 6, 16]),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 7)), min_size=1, max_size=4),
    st.integers(1, 9),
)
def test_attention_of_several_requests_whose_positions_come_in_parts(
    seed, operand_kinds, groups, shared, head_dim, sizes, block
):
    """Each request: tokens that the cache has, and new ones; the first rows beside them belong to no request."""
    rng, heads = np.random.default_rng(seed), groups * shared
    q_norm, k_norm = (adversarial(rng, (head_dim,), "wide") for _ in range(2))
    scale = integers.attention_scale(q_norm, k_norm, adversarial(rng, (groups * head_dim, 5), "wide"))
    rows, cached, expected, first = [], [], [], 7
    queries = adversarial(rng, (first + sum(new for _, new in sizes), heads, head_dim), operand_kinds[0])
    for before, new in sizes:
        keys, values = (adversarial(rng, (before + new, groups, head_dim), kind) for kind in operand_kinds[1:])
        entries = exact.cache_entries(keys, values, scale)
        rows.append(slice(first, first + new))
        starts = range(0, before + new, block)
        cached.append([tuple(array[start : start + block] for array in entries) for start in starts])
        expected.append(integers.attend(queries[rows[-1]], keys, values, scale))
        assert same(exact.attend(queries[rows[-1]], keys, values, scale), expected[-1])
        first += new
    together = exact.attend_ragged(queries, rows, cached, scale)
    assert same(together[7:], np.concatenate(expected))
    assert not together[:7].any() and not exact.attend_ragged(queries, [], [], scale).any()


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 6]))
def test_attention_of_a_blas_whose_sums_of_zeros_are_negative(tokens, groups, head_dim):
    ones, zeros = np.ones((tokens, groups, head_dim), np.float32), np.zeros((groups, head_dim), np.int32)
    scale = integers.AttentionScale(zeros[0], zeros)
    units = exact_attention.value_units(-0.0 * ones, scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_attention, "value_units", lambda *_: (units[0].view(StartsWithTheFirstProduct), units[1]))
        assert same(exact.attend(ones, ones, -0.0 * ones, scale), integers.attend(ones, ones, -0.0 * ones, scale))


@pytest.mark.parametrize("what", ["queries", "keys", "values"])
def test_attention_of_a_number_that_is_not_finite_is_refused(what: str):
    """A hidden infinity would make rows before it NaN, which a chunk that ends before it could not see."""
    scale = integers.AttentionScale(np.zeros(4, np.int32), np.zeros((2, 4), np.int32))
    for bad in (np.inf, -np.inf, np.nan):
        operands = {name: np.ones((6, 2, 4), np.float32) for name in ("queries", "keys", "values")}
        operands[what][4, 1, 3] = bad
        with pytest.raises(NumericsError, match=rf"{what}\[4, 1, 3\] is {bad}, expected finite"):
            exact.attend(*operands.values(), scale)
        with pytest.raises(NumericsError, match=what):
            integers.attend(*operands.values(), scale)


@given(seeds, kinds, st.integers(1, 6), st.integers(1, 4), st.integers(0, 12), st.booleans(), st.booleans())
def test_routes(seed, kind, tokens, chosen, more, normalised, has_ties):
    rng, experts = np.random.default_rng(seed), chosen + more
    scores = integers.sigmoid(adversarial(rng, (tokens, experts), kind))
    if has_ties:
        scores = np.round(scores, 1)
    best = exact.top_k(scores, chosen)
    assert same(best, integers.top_k(scores, chosen))
    chosen_scores = np.take_along_axis(scores, best, axis=-1)
    weights = exact.routing_weights(chosen_scores, normalised, 2.5)
    assert same(weights, integers.routing_weights(chosen_scores, normalised, 2.5))
    outputs = adversarial(rng, (tokens, chosen, 7), kind)
    assert same(exact.combine_experts(outputs, weights), integers.combine_experts(outputs, weights))


SLOW = {"all_attention", "biased_two_taps", "sharded_mixed_types"}  # as others in what a digest sums


@pytest.mark.parametrize(
    "name",
    [
        "hand",
        "draft",
        *(pytest.param(f"torture/{name}", marks=pytest.mark.night if name in SLOW else ()) for name in UNLIKE),
    ],
)
def test_end_to_end(name: str):
    """The engine's tests compare all fixtures with the reference, which computes in integers; digests are longer."""
    models = [read_model(FIXTURES / name, numerics) for numerics in ("exact", "integers")]
    for length in (1, 3, 17, 64):
        prompt = digest_prompt(length, models[0].config.vocab_size)
        mine, expected = (reference.logits(model.weights, model.config, model.numerics, prompt) for model in models)
        assert same(mine, expected)
        assert same(*(model.numerics.log_softmax(mine[-1]) for model in models))


def digest_of(path: Path, numerics: str) -> str:
    model = read_model(path, numerics)
    return digest(model.weights, model.config, model.numerics)


@pytest.mark.kernels
@pytest.mark.parametrize("numerics", [pytest.param("exact", marks=pytest.mark.night), "integers"])  # exact: test_bits
def test_the_digests_of_the_readme(numerics: str):
    readme = (FIXTURES.parent / "README.md").read_text(encoding="utf-8")
    assert digest_of(lfm2np.trained_fixture(), numerics) in readme
    assert digest_of(moe_fixture(), numerics) in readme
    assert digest_of(lfm3_fixture(), numerics) in readme
