"""Law 1 read off the source: which operations the exact path is made of.

A sum of unrounded numbers, or NumPy's own exp, can give the same bits on the machine that runs the tests. So the text
of every file between a token and its logits, log-probabilities and choice is read too: each NumPy function, method of
an array, builtin, power, product and import in it is one of EVERYWHERE, or one that LISTED allows in those functions,
for that reason. What is not in either fails, so what nobody thought of does.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import lfm2np

TOP = Path(lfm2np.__file__).parent
FILES = (
    *(f"truth/{name}.py" for name in ("reference", "integers", "elementary", "rope", "processor")),
    *(f"arithmetic/{name}.py" for name in ("exact", "exact_attention", "grids", "weight_grids", "matrix", "attention")),
    *(f"arithmetic/{name}.py" for name in ("convolution_windows", "pieces", "routing", "shapes")),
    *(f"arithmetic/products/{name}.py" for name in ("product", "exactness", "blas")),
    *("engine/step.py", "engine/uncached.py", "engine/cache.py"),
    *("engine/sampling/choice.py", "engine/sampling/logprobs.py"),
)
ARRAY = {*dir(np.ndarray), *dir(np.ufunc), *dir(float), "getattr"}  # attributes with these names are operations
PRODUCTS = {  # functions that multiply matrices: a call is as much of an operation as `@`
    *("product", "by_tiles", "by_vectors", "turned_round", "rounded_product"),
    *("join_scores", "stacked_scores", "weighted_values"),
}

EVERYWHERE = {
    # elementwise, and defined to the last bit by IEEE 754, or for integers
    *("np.abs", "np.add", "np.clip", "np.frexp", "np.ldexp", "np.maximum", "np.multiply", "np.rint", "np.sqrt"),
    *("math.sqrt", "2**", "2.0**", ".astype", ".view", "np.float32", "np.float64", "np.int32", "np.int64", "np.uint32"),
    *("np.isfinite", "np.array_equal", "float", "int", "bool"),
    # choices among values: whatever the order, the same
    *(".max", ".min", ".any", ".all", "np.any", "np.where", "np.argmax", "np.argwhere", "np.nonzero", "np.flatnonzero"),
    *("np.argsort", "np.unique", "max", "min", "any", "all", "sorted"),
    # memory, shapes, views and copies
    *("np.arange", "np.array", "np.asarray", "np.ascontiguousarray", "np.concatenate", "np.copyto", "np.empty"),
    *("np.full", "np.repeat", "np.split", "np.stack", "np.take_along_axis", "np.zeros", "np.zeros_like"),
    *("np.bool_", "np.dtype", "np.errstate", "np.inf", "np.nan", "np.result_type", "np.ufunc", "np.uint64"),
    *(".T", ".dtype", ".itemsize", ".ndim", ".reshape", ".shape", ".size", ".tolist", ".transpose"),
    # Python
    *("dict", "enumerate", "isinstance", "iter", "len", "list", "object", "property", "range", "slice", "str"),
    *("tuple", "type", "zip", "BaseException", "IndexError", "RuntimeError", "OSError"),
    *("import math", "import numpy as np", "import os", "import threading", "import contextlib"),
    *("functools.cache", "functools.cached_property", "functools.partial", "itertools.pairwise"),
}
TYPES = (
    *("__future__.", "typing.", "collections.", "dataclasses.", "contextvars.", "contextlib.", "pathlib.", "queue."),
    *("numpy.typing.", "scheduler."),
)
NO_ARITHMETIC = (  # of ours
    *("errors", "values", "checkpoint.", "truth.config", "truth.layers", "truth.weights", "truth.reference"),
    *("truth.operations", "engine.sampling.params", "arithmetic.Numerics"),
)

# File, functions ("" outside of any, * in all), and operations that are allowed there only; above them, why.
LISTED = [
    # sums of integers, at most 2**53 together by the function's docstring (int64 sums of integers.py up to 2**54)
    ("arithmetic/grids.py", {"exact_sum", "sum_units"}, {".sum"}),
    ("arithmetic/weight_grids.py", {"largest_row_sum"}, {".sum"}),
    ("truth/integers.py", {"exact_sum", "prepare_matrix", "mix_values"}, {".sum"}),
    ("arithmetic/products/exactness.py", {"operands"}, {".sum"}),
    # products of int64, likewise
    ("truth/integers.py", {"linear", "head_scores", "mix_values"}, {"@"}),
    ("arithmetic/products/exactness.py", {"is_exact"}, {"@"}),
    # products of whatever they are given: the next rows say who gives it to them
    ("arithmetic/products/product.py", {"*"}, {"@", "np.matmul", "by_tiles", "by_vectors", "turned_round"}),
    ("arithmetic/attention.py", {"compute"}, {"join_scores"}),
    ("arithmetic/attention.py", {"join_scores", "weighted_values"}, {"@"}),
    ("arithmetic/products/exactness.py", {""}, {"product"}),
    ("arithmetic/products/exactness.py", {"scores"}, {"join_scores"}),
    ("arithmetic/products/exactness.py", {"values"}, {"weighted_values"}),
    # linear puts its inputs on the matrix's grid, so no sum of products exceeds 2**53
    ("arithmetic/exact.py", {"linear"}, {"rounded_product"}),
    ("arithmetic/exact.py", {"rounded_product"}, {"product"}),
    # of on_grid's queries and keys, and of share_units and value_units, at most 2**53 by their docstrings
    ("arithmetic/exact_attention.py", {"attend_spans"}, {"stacked_scores"}),
    ("arithmetic/exact_attention.py", {"mix"}, {"weighted_values"}),
    # of integer weights, at most 2**62 together; ids; the k-th largest; a place among integers; an exact ratio
    ("engine/sampling/choice.py", {"keep_top_p", "draw"}, {"np.cumsum"}),
    ("engine/sampling/choice.py", {"*"}, {"np.bincount", "np.partition", "np.searchsorted", ".as_integer_ratio"}),
    ("engine/sampling/choice.py", {"*"}, {"np.random.Philox", "import hashlib"}),  # counter-based, of integers
    # of counts of tokens and bytes
    ("engine/uncached.py", {"runs_of"}, {"np.cumsum"}),
    ("engine/cache.py", {"*"}, {"np.diff", "np.prod", "sum"}),
    ("arithmetic/attention.py", {"*"}, {"sum"}),
    # constants, one exact or rounded step
    ("truth/elementary.py", {""}, {"math.factorial", "-1.0**", ".fromhex"}),
    # what the system has; a queue's, not an array's; names of BLAS
    ("arithmetic/pieces.py", {"*"}, {"hasattr", ".put", "lfm2np.system"}),
    ("arithmetic/products/blas.py", {"*"}, {"import ctypes", "getattr", "np.show_config"}),
]


def operations(source: str) -> Iterator[tuple[str, str]]:
    """(function, operation) of each in the text; "" outside functions."""
    yield from below(ast.parse(source), "")


def below(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    match node:
        case ast.FunctionDef():
            function = node.name
        case ast.Attribute():
            name = ast.unparse(node)
            if re.fullmatch(r"(np|math)[.\w]+", name):
                yield function, name
                return
            if node.attr in ARRAY or node.attr.startswith("__"):
                yield function, f".{node.attr}"
        case ast.Name(id=name) if name in ("np", "math") or name in PRODUCTS or hasattr(builtins, name):
            yield function, name  # NumPy itself too: it could be asked for anything
        case ast.BinOp(op=ast.MatMult()) | ast.AugAssign(op=ast.MatMult()):
            yield function, "@"
        case ast.BinOp(left=base, op=ast.Pow()) | ast.AugAssign(target=base, op=ast.Pow()):
            yield function, f"{ast.unparse(base)}**"
        case ast.Call(func=ast.Attribute(attr="argsort"), keywords=given):
            if not any(ast.unparse(keyword) == "kind='stable'" for keyword in given):
                yield function, "argsort that may reorder equal numbers"
        case ast.Import():
            yield from ((function, f"import {ast.unparse(name)}") for name in node.names)
        case ast.ImportFrom():
            yield from ((function, f"{node.module}.{name.name}") for name in node.names)
    for child in ast.iter_child_nodes(node):
        yield from below(child, function)


def is_module(operation: str) -> bool:
    """An import of types or of Python's containers, of the exact path itself, or of what computes nothing."""
    ours = (*(file.removesuffix(".py").replace("/", ".") for file in FILES), *NO_ARITHMETIC)
    return operation.startswith((*TYPES, *(f"lfm2np.{name}" for name in ours)))


def refused(file: str, source: str) -> set[tuple[str, str]]:
    listed = {(place, name) for path, places, names in LISTED if path == file for place in places for name in names}
    return {
        (function, name)
        for function, name in operations(source)
        if name not in EVERYWHERE and not listed & {(function, name), ("*", name)} and not is_module(name)
    }


@pytest.mark.parametrize("file", FILES)
def test_every_operation_of_the_exact_path_is_one_that_is_allowed(file: str):
    assert refused(file, (TOP / file).read_text(encoding="utf-8")) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        *("math.e ** x", "x ** y", "x ** 2", "x **= 0.5", "pow(2.0, x)", "math.pow(2.0, x)", "math.exp(x)"),
        *("math.log(x)", "math.fsum(x)", "np.exp(x)", "np.log(x)", "np.sin(x)", "np.sum(x)", "np.mean(x)"),
        *("np.dot(x, y)", "x @ y", "np.einsum('i,i', x, y)", "np.add.reduce(x)", "np.linalg.norm(x)", "x @= y"),
        *("x.sum()", "x.mean()", "x.dot(y)", "x.std()", "x.cumsum()", "x.trace()", "total = x.sum"),
        *("np.float32.__pow__(x, y)", "x.__matmul__(y)"),
        *("sum(x)", "getattr(np, 'exp')(x)", "vars(np)", "numpy = np", "operation.reduce(x)", "eval('x')"),
        *("from numpy import exp", "from math import exp", "import operator", "from functools import reduce"),
        *("from lfm2np.arithmetic.ieee import FLOAT32", "import scipy", "weighted_values(x, y)", "np.argsort(x)"),
    ],
)  # fmt: skip
def test_what_could_round_by_the_order_or_by_the_machine_is_refused(line: str):
    """In an operation of exact.py that sums nothing, and outside functions."""
    file = "arithmetic/exact.py"
    source = (TOP / file).read_text(encoding="utf-8")
    body = '    """gate / (1 + exp(-gate)) * up; computed in float64, then rounded to float32."""\n'
    assert body in source
    assert refused(file, source.replace(body, f"{body}    {line}\n"))
    assert refused(file, f"{source}\n{line}\n")


def test_nothing_is_allowed_that_is_not_used():
    """Else a list outlives its reason. The control of `below`, too: it finds all of them."""
    used = {file: [*operations((TOP / file).read_text(encoding="utf-8"))] for file in FILES}
    assert {name for operations in used.values() for _, name in operations} >= EVERYWHERE
    for file, places, names in LISTED:
        assert {(place, name) for place in places for name in names} <= {
            (place, name) for function, name in used[file] for place in (function, "*")
        }, file
