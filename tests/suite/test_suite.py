"""The suite on our own engine, on a broken one, and as a plugin of pytest."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.protocol import lacking, load_factory, missing
from lfm2np.suite import adapters
from lfm2np.suite.again import Request, SamplingParams, Scenario, TinyModel, check
from lfm2np.suite.catalogue import ALL, by_id
from lfm2np.suite.plugin import known_failures
from lfm2np.suite.properties.rounding import Rounding
from lfm2np.suite.runner import run_property, script_of, short
from lfm2np.suite.schedulers.demands import DEMANDS
from lfm2np.suite.strategies.features import fit
from lfm2np.teaching import tutorial
from scheduler.protocol import POLICIES

pytestmark = pytest.mark.slow


class OtherNoise(adapters.Own):
    """Draws its tokens with other noise than the reference's, and says so."""

    is_lfm2np = property()  # asked as a stranger
    lacks = frozenset({"reference-noise"})

    def __init__(self, model, sizes):
        super().__init__(adapters.load_once(Path(model)), sizes)

    def add(self, request):
        seed = request.params.seed
        super().add(replace(request, params=replace(request.params, seed=None if seed is None else 1000 + seed)))


ENGINES = {"own": adapters.own, "other noise": OtherNoise}
ENGINES |= {name: Rounding(getattr(adapters, f"own_{name}"), name) for name in ("float32", "bfloat16")}


@pytest.mark.night
@pytest.mark.parametrize(
    "engine",
    ["own", "other noise", *(pytest.param(name, marks=pytest.mark.rounding) for name in ("float32", "bfloat16"))],
)
@pytest.mark.parametrize("prop", ALL, ids=lambda case: case.id)
def test_our_engine_has_every_property(prop, engine):
    result = run_property(prop, ENGINES[engine], "quick")
    if "verify" in prop.needs and isinstance(ENGINES[engine], Rounding):
        assert (result.status, result.message) == ("skipped", "the engine has no verify()")
    else:
        assert (result.status, result.message) == ("passed", "") and result.examples >= 1


@pytest.mark.night
@pytest.mark.rounding
def test_a_failure_prints_a_script_that_shows_it_again():
    result = run_property(by_id("equals-reference"), Rounding(tutorial.wrong, "float32"), "ci")
    script = result.message[result.message.index("from lfm2np") :].partition("\nshrunk for")[0]  # on a slow machine
    assert result.size is not None
    assert result.size < 60

    def run(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)

    ended, right = run(script), run(script.replace("tutorial:wrong", "tutorial:right"))
    assert "Violation: " in ended.stderr
    assert (ended.returncode, right.returncode, right.stderr) == (1, 0, "")


def test_an_example_is_written_with_what_differs_from_the_default():
    scenario = Scenario(TinyModel(taps=2), (Request("a", (3,), SamplingParams(n=2)),), {"block_size": 1}, (("step",),))
    text = short((scenario, [1, (True,)]))
    assert text == (
        "(Scenario(model=TinyModel(taps=2), requests=(Request(request_id='a', prompt_token_ids=(3,), "
        "params=SamplingParams(n=2)),), sizes={'block_size': 1}, ops=(('step',),)), [1, (True,)])"
    )
    assert eval(text)[0] == scenario


def test_check_is_silent_for_what_holds():
    scenario = Scenario(TinyModel(), (Request("a", (3, 4), SamplingParams(temperature=0.0, max_tokens=3)),))
    check("equals-reference", "lfm2np.suite.adapters:own", scenario)
    with pytest.raises(RequestError, match="property 'nothing'"):
        check("nothing", "lfm2np.suite.adapters:own", None)


class Greedy:
    """An engine that lacks much: it repeats the last token."""

    lacks = frozenset({"sampling", "samples", "processors", "stops", "odd-shapes"})

    def generate(self, requests):
        for request in requests:
            assert request.params.temperature == 0.0
            assert request.params.n == 1
            assert request.params.repetition_penalty == 1.0
            assert not request.params.stop_token_ids
        return [[adapters.Answer((request.prompt_token_ids[-1],) * request.params.max_tokens)] for request in requests]


@pytest.mark.night
def test_examples_are_drawn_without_what_an_engine_lacks():
    results = {prop.id: run_property(prop, lambda model, sizes: Greedy(), "quick") for prop in ALL}
    assert results["equals-reference"].status == "failed"
    assert "the reference has" in results["equals-reference"].message
    assert results["every-schedule"].message == "the engine has no add()"
    assert results["noise-differs"].message == "the engine lacks sampling"
    assert results["one-bos"].message == "the engine has no encode()"
    assert fit(TinyModel(layers="cc"), Greedy.lacks).layers == "ccA"


def test_unknown_engines_and_features_are_refused():
    for name, fragment in (
        ("nothing", "expected package.module:factory"),
        ("nothing:x", "can't be imported"),
        ("json:nothing", "can't be imported"),
        ("sys:version", "str, expected a factory"),
    ):
        with pytest.raises(RequestError, match=fragment):
            load_factory(name)

    class Wrong:
        lacks = frozenset({"everything"})

    with pytest.raises(RequestError, match="lacks 'everything'"):
        lacking(Wrong())
    assert missing(Greedy(), ("steps",)) == "the engine has no add()"


# --- the plugin


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-rsxX", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.night
def test_nobody_elses_options_are_touched(tmp_path: Path):
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    for name in ('--model', '--profile', '--engine', '--scheduler', '--max-num-batched-tokens'):\n"
        "        parser.addoption(name, choices=['mine'])\n"
    )
    (tmp_path / "test_mine.py").write_text(
        "def test_mine(request):\n    assert request.config.getoption('--profile') == 'mine'\n"
    )
    ended = run_pytest(tmp_path, "--profile", "mine", "--model", "mine")
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.night
def test_the_plugin_tests_a_broken_engine_and_takes_known_failures(tmp_path: Path):
    """As another engine's author would run it: from an empty folder, with a file of known failures."""
    (tmp_path / "mine.py").write_text(
        "from lfm2np.suite import adapters\n"
        "from lfm2np.teaching.faults import inject\n"
        "class Engine:\n"
        "    def __init__(self, model, sizes):\n"
        "        self.own = adapters.own(model, sizes)\n"
        "    def generate(self, requests):\n"
        "        with inject('slot-index-wraps-modulo-2'):\n"
        "            return self.own.generate(requests)\n"
    )
    ours = ["--pyargs", "lfm2np.suite", "-k"]
    wanted = [*ours, "wide-batches or scores or noise-differs", "--engine", "mine:Engine"]
    first = run_pytest(tmp_path, *wanted)
    assert first.returncode == 1
    assert "1 failed, 1 passed, 1 skipped" in first.stdout
    assert "check('wide-batches', 'mine:Engine'" in first.stdout
    assert "the engine has no score()" in first.stdout
    assert "runs of an engine" in first.stdout
    xfails = tmp_path / "known.txt"
    xfails.write_text("# ours\nwide-batches  # issue 17\n\n")
    second = run_pytest(tmp_path, *wanted, "--xfails", str(xfails))
    assert second.returncode == 0
    assert "1 passed, 1 skipped" in second.stdout
    assert "issue 17" in second.stdout
    third = run_pytest(tmp_path, *ours, "noise-differs", "--xfails", str(xfails))
    assert third.returncode == 0


CONSOLE = {"lfm2np": "from lfm2np.commands.cli import main", "pytest": "from pytest import main"}
SUITE = ["-p", "no:cacheprovider", "--pyargs", "lfm2np.suite", "-k", "one-bos", "--engine"]
ASKED = {
    "check": ("lfm2np", ["check", "engine_here:factory", "--cases", "short-prompts"], "verdict    EXACT"),
    "suite": ("pytest", [*SUITE, "engine_here:factory"], "1 passed"),
}


def console(folder: Path, name: str, *arguments: str, options: str = "") -> subprocess.CompletedProcess[str]:
    """As pip installs it: a script elsewhere, whose own folder Python searches in the place of the current one."""
    script = folder / "bin" / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"{CONSOLE[name]}\nraise SystemExit(main())\n")
    command = [sys.executable, *options.split(), str(script), *arguments]
    checkout = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, cwd=folder, env=os.environ | checkout, capture_output=True, text=True, check=False)


@pytest.mark.night
@pytest.mark.parametrize("asked", ASKED)
def test_a_console_command_finds_an_engine_in_the_current_folder(tmp_path: Path, asked: str):
    script, arguments, sentence = ASKED[asked]
    (tmp_path / "neighbour.py").write_text("from lfm2np.suite.adapters import own\n")
    (tmp_path / "engine_here.py").write_text(
        "def factory(model, sizes):\n    import neighbour\n\n    return neighbour.own(model, sizes)\n"
    )
    done = console(tmp_path, script, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sentence in done.stdout


def test_the_current_folder_is_not_searched_where_python_must_not(tmp_path: Path):
    (tmp_path / "engine_here.py").write_text("from lfm2np.suite.adapters import own as factory\n")
    done = console(tmp_path, "lfm2np", *ASKED["check"][1], options="-P")
    assert done.returncode == 3
    assert "engine 'engine_here:factory': can't be imported: No module named 'engine_here'" in done.stderr


def in_this_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--pyargs", "lfm2np.suite", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_plugin_names_an_engine_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    code, printed = in_this_process(capsys, "-k", "one-bos", "--engine", "nothing:x")
    assert code != 0 and "engine 'nothing:x': can't be imported" in printed


def test_a_missing_file_of_known_failures_and_an_unknown_name_in_it_are_named(tmp_path: Path):
    with pytest.raises(pytest.UsageError, match=r"--xfails missing\.txt: .*No such file"):
        known_failures("missing.txt", ())
    (tmp_path / "known.txt").write_text("every-schedule\nnothing\n")
    with pytest.raises(pytest.UsageError, match="line 2: 'nothing' is no property"):
        known_failures(str(tmp_path / "known.txt"), [prop.id for prop in ALL])


def test_the_properties_can_be_listed(capsys: pytest.CaptureFixture[str]):
    code, listed = in_this_process(capsys, "--properties")
    assert code == 0 and "every-schedule  (law 2; needs steps)" in listed
    assert re.findall(r"^\S+(?=  \()", listed, re.MULTILINE) == [prop.id for prop in ALL]
    code, listed = in_this_process(capsys, "--properties", "--scheduler", "lfm2np.suite.schedulers.own:factory")
    assert code == 0 and re.findall(r"^\S+", listed, re.MULTILINE) == [*DEMANDS, *POLICIES]


def test_a_factory_that_a_function_made_is_not_printed_as_if_it_could_be_imported():
    def made(model, sizes):
        return adapters.own(model, sizes)

    assert f"check('scores', '{__name__}:FACTORY', ())" in script_of("scores", made, ())
    assert "check('scores', 'lfm2np.suite.adapters:own', ())" in script_of("scores", adapters.own, ())


def test_the_script_of_a_failure_names_the_format():
    assert script_of("scores", Rounding(adapters.own, "float32"), ()).endswith("own', (), 'float32')")
