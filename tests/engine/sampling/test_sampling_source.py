"""What the source of lfm2np.engine.sampling.choice may call: only what has the same bits on every machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from lfm2np.engine.sampling import choice

ALLOWED = {
    *("ldexp", "rint", "clip", "where", "isfinite", "errstate"),  # elementwise, IEEE
    *("partition", "argsort", "argmax", "searchsorted", "bincount"),  # choices and counts
    *("zeros", "asarray", "inf", "bool_", "float32", "float64", "int64", "uint64"),
    *("cumsum", "random"),  # of integers, and for Philox: the next tests
}
ADDS_INTEGERS = {"keep_top_p", "draw"}


def functions() -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(Path(choice.__file__).read_text())):
        if isinstance(node, ast.FunctionDef):
            yield node


def attributes(node: ast.AST) -> Iterator[ast.Attribute]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute))


def test_sampling_calls_no_function_whose_last_bits_depend_on_the_machine():
    tree = ast.parse(Path(choice.__file__).read_text())
    used = {node.attr for node in attributes(tree) if isinstance(node.value, ast.Name) and node.value.id == "np"}
    assert used <= ALLOWED
    assert used & {"ldexp", "cumsum"}, "the control: NumPy is used under this name"
    random = {ast.unparse(node) for node in attributes(tree) if ast.unparse(node).startswith("np.random.")}
    assert random == {"np.random.Philox"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)]


def test_only_integer_weights_are_added_up():
    """And those are int64: internal_properties/sampling.py compares them with fractions."""
    adding = set()
    for function in functions():
        names = {node.attr for node in attributes(function)}
        assert not names & {"mean", "dot", "prod", "var", "std", "reduce", "accumulate"}, function.name
        calls = {ast.unparse(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)}
        if names & {"sum", "cumsum"} or calls & {"sum", "math.fsum"}:
            adding.add(function.name)
    assert adding == ADDS_INTEGERS
