"""The catalogue of faults: each fits the code and is undone, and what fits no code is an error."""

import builtins
import dis
from collections import Counter
from pathlib import Path
from types import CodeType

import pytest

import lfm2np
from faults import FAULTS, VARIANTS, Edit, Fault, by_name, find, inject, packaged
from lfm2np import RequestError
from lfm2np.teaching.drawings.runs.leaks import BROKEN
from lfm2np.teaching.faults import parse_faults
from lfm2np.teaching.lab.settings import TEACHING_FAULTS

# Injected by docs/start/first-check.md, docs/engine/3-verdicts.md and 5-property-suite.md, which run installed copies.
OF_PAGES = (
    *("one-token-prompt-reads-the-previous-tenants-state", "state-dropped-after-the-prompt"),
    *("slot-index-wraps-modulo-2", "parent-key-not-hashed"),
)


@pytest.mark.parametrize("change", (*FAULTS, *VARIANTS), ids=lambda change: change.name)
def test_every_edit_fits_the_code_and_is_undone(change: Fault) -> None:
    before = {edit.where: find(edit.where).__code__ for edit in change.edits}
    with inject(change.name):
        for where, code in before.items():
            assert find(where).__code__ is not code
            assert names_of(find(where).__code__) <= {*find(where).__globals__, *vars(builtins)}  # else it only raises
    with pytest.raises(ZeroDivisionError), inject(change):
        raise ZeroDivisionError
    for where, code in before.items():
        assert find(where).__code__ is code


def names_of(code: CodeType) -> set[str]:
    """Of what stands outside of the function: globals, built-in names."""
    inner = [names_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}.union(*inner)


def test_names_are_unique_and_everything_says_what_it_changes() -> None:
    assert set(Counter(each.name for each in (*FAULTS, *VARIANTS)).values()) == {1}
    assert {fault.section for fault in FAULTS} == set("ABCDE")
    for fault in FAULTS:
        assert fault.edits and fault.sentence.endswith(".")
    for variant in VARIANTS:
        assert bool(variant.edits) + bool(variant.sizes) + bool(variant.environment) == 1


def test_the_package_holds_the_faults_that_it_needs_and_no_others() -> None:
    assert packaged.FAULTS.keys() == {*TEACHING_FAULTS, *BROKEN.values(), *OF_PAGES}


@pytest.mark.parametrize(
    ("edit", "fragment"),
    [
        (Edit("lfm2np.engine.cache:commit", "no such text", ""), "stands there 0 times, expected once"),
        (Edit("lfm2np.engine.cache:commit", "entry", ""), "times, expected once"),
        (Edit("lfm2np.engine.cache:nothing", "", ""), "there is no such function"),
        (Edit("lfm2np.engine.cache:DEFAULT_BYTES", "", ""), "int, expected a function"),
    ],
)
def test_an_edit_that_does_not_fit_is_an_error_and_changes_nothing(edit: Edit, fragment: str) -> None:
    first = Edit("lfm2np.engine.cache:move", 'case "zero_state":', 'case "nothing":')
    before = find(first.where).__code__
    with pytest.raises(RequestError, match=fragment), inject(Fault("x", "A", "X.", (), (first, edit))):
        pass
    assert find(first.where).__code__ is before


def test_an_edit_follows_its_function_to_other_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit knows the function and the text in it, and neither a line nor what else the module holds."""
    monkeypatch.syspath_prepend(tmp_path)
    halved = Fault("halved", "E", "It halves.", (), (Edit("{}:Some.number", "return 4", "return 2"),))
    for name, above in (("as_it_was", ""), ("moved", "def renamed():\n    return 4\n\n\n")):
        text = f"{above}class Some:\n    def number(self):\n        return 4\n"
        (tmp_path / f"{name}.py").write_text(text)
        edits = tuple(Edit(edit.where.format(name), edit.old, edit.new) for edit in halved.edits)
        with inject(Fault(halved.name, halved.section, halved.sentence, (), edits)):
            assert __import__(name).Some().number() == 2


def test_a_patch_is_an_edit_of_the_lines_that_go_and_stay() -> None:
    text = "section B\n\n# a comment\n\nname\nA sentence\nof two lines.\nseen in: vLLM 1; vLLM 2\n@@ m:f\n"
    text += "  if a:\n-     b\n+     c\n+     d\n@@ m:g\n- x\n+ y\n"
    edits = (Edit("m:f", "if a:\n    b", "if a:\n    c\n    d"), Edit("m:g", "x", "y"))
    assert parse_faults(text) == (Fault("name", "B", "A sentence of two lines.", ("vLLM 1", "vLLM 2"), edits),)


@pytest.mark.parametrize(("patch", "fragment"), [("m:f\nb", "'b', expected '- '"), ("guard", "nothing below it")])
def test_what_is_no_patch_is_an_error_that_names_it(patch: str, fragment: str) -> None:
    with pytest.raises(RequestError, match=fragment):
        parse_faults(f"name\nA sentence.\n@@ {patch}")


def test_an_unknown_fault_is_an_error_that_names_it() -> None:
    with pytest.raises(RequestError, match="fault 'nothing': expected one of convolution"), packaged.inject("nothing"):
        pass
    with pytest.raises(KeyError, match="nothing"):
        by_name("nothing")


def test_a_fault_changes_what_the_engine_says_and_only_while_it_is_there() -> None:
    def tokens() -> list[tuple[int, ...]]:
        llm = lfm2np.LLM(block_size=2)
        params = lfm2np.SamplingParams(temperature=0.0, max_tokens=6)
        prompts = ["copy: tivu zo sa di ->", "count: 23 to 31 ->"]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    right = tokens()
    with inject("state-never-advanced"):
        assert tokens() != right
    assert tokens() == right


def test_no_hook_stands_in_the_engine() -> None:
    """An unused fault costs nothing: nothing outside lfm2np/teaching/faults.py and its users knows of it."""
    package = Path(lfm2np.__file__).parent
    users = {
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        if "lfm2np.teaching.faults" in path.read_text(encoding="utf-8")
    }
    assert users == {"teaching"}
