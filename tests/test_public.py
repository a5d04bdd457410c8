"""What `import lfm2np` shows, and `lfm2np.check`, the command as a function."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lfm2np
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.target import TargetError
from lfm2np.teaching.tutorial import wrong


def test_what_is_listed_is_public_and_there():
    assert set(dir(lfm2np)) == {*lfm2np.__all__, "__version__"}
    for name in lfm2np.__all__:
        assert callable(getattr(lfm2np, name)), name
    with pytest.raises(AttributeError, match="no attribute 'chek'"):
        lfm2np.chek  # noqa: B018


def test_the_import_leaves_the_oracle_for_its_first_use():
    code = "import sys, lfm2np; sys.exit(any(name.startswith('lfm2np.oracle') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.rounding
def test_an_engine_is_reached_by_its_factory_or_its_name():
    model = lfm2np.load()
    engines = (wrong, "lfm2np.teaching.tutorial:wrong")
    by_factory, by_name = (lfm2np.check(engine, model, cases=["stops"]) for engine in engines)
    assert by_factory["verdict"] == by_name["verdict"] == "INCONCLUSIVE"  # it has no stop strings
    assert by_factory["findings"] == by_name["findings"]


@pytest.mark.night
@pytest.mark.rounding
def test_a_wrong_engine_is_called_wrong():
    figures = lfm2np.check(wrong, cases=["short-prompts"])
    assert figures["verdict"] == "BUG" and "decode" in figures["findings"][0]["words"]


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        (3, {}, "target 3: expected http://HOST:PORT, package.module:factory"),
        ("answers.jsonl", {}, "target 'answers.jsonl': expected"),
        (wrong, {"cases": ["nonsense"]}, r"cases \['nonsense'\]: expected a list of some of short-prompts"),
        (wrong, {"cases": "seeds"}, "cases 'seeds': expected a list"),
        (wrong, {"format": "fp8"}, "format 'fp8': expected one of float32"),
        (wrong, {"seed": "a"}, "seed 'a': expected a whole number"),
        (wrong, {"max_num_seqs": 0}, "max_num_seqs 0: expected a whole number"),
    ],
)
def test_what_can_not_be_checked_is_one_line(engine, options, words):
    with pytest.raises(RequestError, match=rf"^{words}"):
        lfm2np.check(engine, **options)


def test_a_factory_that_fails_is_named():
    def broken(model, sizes):
        raise OSError("no GPU")

    with pytest.raises(TargetError, match=r"broken: .*no GPU"):
        lfm2np.check(broken)


def test_what_editors_see_is_what_is_imported() -> None:
    tree = ast.parse(Path(lfm2np.__file__).read_text(encoding="utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: line.module for line in typed.body if isinstance(line, ast.ImportFrom) for alias in line.names}
    assert seen == lfm2np._WHERE
