"""Law 8: one record for a request and one for an answer, one way to run an engine, one report. Counted in the sources
of what judges engines; a second one has to be named here, with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
JUDGES = ("oracle", "suite")
SOURCES = {
    path.relative_to(TOP / "lfm2np").as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((TOP / "lfm2np").rglob("*.py"))
}


def fields_of(node: ast.AST) -> set[str]:
    """The annotated fields of a class."""
    if not isinstance(node, ast.ClassDef):
        return set()
    annotated = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
    return {target.id for target in annotated if isinstance(target, ast.Name)}


def calls(node: ast.AST, name: str) -> bool:
    """Whether something in it calls a function or method of that name."""
    called = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(getattr(each, "attr", getattr(each, "id", None)) == name for each in called)


def imports(node: ast.AST, module: str) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith(module)
    return isinstance(node, ast.Import) and any(each.name.startswith(module) for each in node.names)


def defines(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name


def judging(path: str) -> bool:
    return path.startswith(JUDGES)


ONES: dict[str, tuple[Callable[[str], bool], Callable[[ast.AST], bool], tuple[str, ...]]] = {
    "request record": (
        judging,
        lambda node: {"prompt_token_ids", "params"} <= fields_of(node),
        ("oracle/engines/records.py",),
    ),
    "answer record": (
        judging,
        lambda node: {"token_ids", "logprobs"} <= fields_of(node),
        ("oracle/engines/records.py",),
    ),
    "HTTP client": (judging, lambda node: imports(node, "http.client"), ("oracle/engines/http_client.py",)),
    "stepping loop": (  # of an engine under test; recorders and vectors step our own, as their subject
        # driver.py also preempts and forks between two steps, and raises what an engine raises
        lambda path: path.startswith(("oracle/engines", "suite")),
        lambda node: isinstance(node, ast.While) and (calls(node, "step") or calls(node, "_step")),
        ("oracle/engines/stepping.py", "suite/properties/driver.py"),
    ),
    "builder of pages": (lambda path: True, lambda node: imports(node, "html"), ("oracle/report/markup.py",)),
    "text of a report": (judging, lambda node: defines(node, "as_text"), ("oracle/report/as_text.py",)),
    "JSON of a report": (judging, lambda node: defines(node, "as_json"), ("oracle/report/as_json.py",)),
    "page of a report": (judging, lambda node: defines(node, "as_html"), ("oracle/report/as_html.py",)),
    "JUnit of a report": (judging, lambda node: defines(node, "as_junit"), ("oracle/report/as_junit.py",)),
}


def found(where: Callable[[str], bool], is_one: Callable[[ast.AST], bool]) -> Iterator[str]:
    for path, tree in SOURCES.items():
        if where(path):
            yield from (path for node in ast.walk(tree) if is_one(node))


@pytest.mark.parametrize("name", ONES)
def test_there_is_one(name: str) -> None:
    where, is_one, expected = ONES[name]
    assert tuple(found(where, is_one)) == expected
