"""`python -O` drops every `assert`, and -OO the docstrings: the answers and the errors stay the same.

So an `assert` in the package may only say what is known already, for the type checker: that a name is not None, or of
what class it is. What a user's input or the machine can make false is an `if` that raises.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TOP = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("lfm2np", "scheduler") for path in (TOP / folder).rglob("*.py"))


def narrows(test: ast.expr) -> bool:
    """`x is not None`, `isinstance(x, C)`, `not isinstance(x, C)`, or several of them joined by `and`."""
    match test:
        case ast.BoolOp(ast.And(), parts):
            return all(map(narrows, parts))
        case ast.UnaryOp(ast.Not(), ast.Call(ast.Name("isinstance"))) | ast.Call(ast.Name("isinstance")):
            return True
        case ast.Compare(_, [ast.IsNot()], [ast.Constant(None)]):
            return True
    return False


def checks(source: str) -> list[int]:
    """Lines of what the options change: asserts that check something, __debug__, docstrings that are read."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Assert) and not narrows(node.test))
        or (isinstance(node, ast.Name) and node.id in ("__debug__", "__doc__"))
        or (isinstance(node, ast.Attribute) and node.attr in ("__doc__", "getdoc"))
    ]


def test_no_check_is_an_assert():
    lines_by_file = {path.relative_to(TOP).as_posix(): checks(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {file: lines for file, lines in lines_by_file.items() if lines} == {}


@pytest.mark.parametrize(
    "source", ["assert x", "assert x > 0", "assert x is not None or y", "if __debug__: pass", "f.__doc__", "getdoc(f)"]
)
def test_the_control_finds_what_the_optimiser_drops(source: str):
    assert checks(source.replace("getdoc", "inspect.getdoc")) == [1]


COMMANDS = (
    ["info", "--digest", "--model", "fixtures/draft"],
    ["--help"],
    ["generate", "--prompt-ids", "1,999999"],
)
SCRIPT = """
import contextlib, io, json, sys
from lfm2np.commands.cli import main
for arguments in json.loads(sys.argv[1]):
    said, complaints, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaints):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
    print(json.dumps([arguments, code, said.getvalue(), complaints.getvalue()]))
"""


def test_without_asserts_and_docstrings_the_commands_say_the_same():
    """Output, errors and exit code; the help, too, which argparse could have taken from docstrings."""
    said = []
    for options in ([], ["-OO"]):
        command = [sys.executable, *options, "-c", SCRIPT, json.dumps(COMMANDS)]
        ended = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=300, check=True)
        said.append([json.loads(line) for line in ended.stdout.splitlines()])
    plain, optimised = said
    assert optimised == plain
    assert [row[0] for row in plain] == list(COMMANDS)
    assert all(out or err for _, _, out, err in plain)
    assert [code for _, code, _, _ in plain] == [0, 0, 2]
