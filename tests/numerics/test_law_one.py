"""Law 1 read off the source: which operations the exact path is made of.

A sum of unrounded numbers, or NumPy's own exp, can give the same bits on the machine that runs the tests. So the
tests look at the text as well: every NumPy function, every `.sum` and every matrix product is one that is allowed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from lfm2np import numerics

FOLDER = Path(numerics.__file__).parent
FILES = (
    "exact.py",
    "grids.py",
    "weight_grids.py",
    "routing.py",
    "elementary.py",
    "rope.py",
    "attention.py",
    "products/product.py",
    "products/tiles.py",
    "ragged.py",
)

# Elementwise operations that IEEE 754 defines to the last bit, choices among values, and array bookkeeping.
ALLOWED = {
    *("abs", "add", "clip", "floor", "frexp", "ldexp", "maximum", "max", "multiply", "rint", "sqrt", "where"),
    "argsort",  # of equal numbers the first comes first: see below
    *("isfinite", "isnan", "any", "arange", "argwhere", "asarray", "ascontiguousarray", "concatenate", "copyto"),
    *("empty", "full", "pad", "repeat", "result_type", "zeros", "zeros_like", "errstate"),
    *("float32", "float64", "int32", "int64", "uint32", "inf"),
}
MAY_SUM = {"exact_sum", "sum_exponent", "largest_row_sum"}
PRODUCTS = {
    *("without_tiles", "by_vectors", "turned_round", "products_of_blocks"),
    *("join_scores", "weighted_values"),
}
ASK_PRODUCTS = {  # and who does it for others
    *("rounded_product", "by_whole_products", "by_tiles", "product", "product_of_tiles", "stacked_scores"),
}
# Whose operands are on grids by the proof in their docstring, and which of the products they ask for.
MAY_MULTIPLY_MATRICES = {
    "linear": {"rounded_product"},
    "rounded_product": {"by_tiles", "by_whole_products"},
    "by_whole_products": {"without_tiles"},
    "attend_spans": {"stacked_scores", "weighted_values"},
    "mix_values": {"weighted_values"},  # within attend_spans
}


def functions(file: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse((FOLDER / file).read_text())):
        if isinstance(node, ast.FunctionDef):
            yield node


@pytest.mark.parametrize("file", FILES)
def test_the_exact_path_calls_no_function_whose_last_bits_depend_on_the_machine(file: str):
    used = {
        node.attr
        for node in ast.walk(ast.parse((FOLDER / file).read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "np"
    }
    assert used <= ALLOWED | ({"matmul"} if file == "products/product.py" else set())
    assert used, "the control: NumPy is used under this name"


@pytest.mark.parametrize("file", FILES)
def test_only_sums_of_integers_are_summed(file: str):
    for function in functions(file):
        methods = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
        assert not methods & {"mean", "dot", "cumsum", "prod", "var", "std"}, function.name
        assert "sum" not in methods or function.name in MAY_SUM, function.name


@pytest.mark.parametrize("file", FILES)
def test_matrix_products_are_taken_of_grid_values_only(file: str):
    for function in functions(file):
        products = [n for n in ast.walk(function) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult)]
        assert not products or function.name in PRODUCTS, function.name
        asked = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)} & (PRODUCTS | ASK_PRODUCTS)
        if file == "exact.py":
            assert asked == MAY_MULTIPLY_MATRICES.get(function.name, set()), function.name


def test_sorting_keeps_the_order_of_equal_numbers():
    sorts = [
        node
        for file in FILES
        for node in ast.walk(ast.parse((FOLDER / file).read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "np.argsort"
    ]
    assert sorts
    assert all("kind='stable'" in ast.unparse(one) for one in sorts)


def test_the_places_that_sum_and_multiply_are_all_there():
    """The control of the two tests above: their lists name real functions that do what they are listed for."""
    found = {function.name: ast.unparse(function) for file in FILES for function in functions(file)}
    assert all(".sum(" in found[name] for name in MAY_SUM)
    assert all(" @ " in found[name] for name in PRODUCTS)
    assert found.keys() >= ASK_PRODUCTS
    assert found.keys() >= MAY_MULTIPLY_MATRICES.keys()
