"""--model: a checkpoint of one's own in the place of drawn ones; and the other options of the plugin."""

import subprocess
import sys
from pathlib import Path

import pytest
from faults import inject

import lfm2np
from lfm2np.suite import adapters
from lfm2np.suite.again import Checkpoint, Request, SamplingParams, Scenario, TinyModel, check
from lfm2np.suite.catalogue import ALL
from lfm2np.suite.runner import Terms, run_property, short
from lfm2np.suite.strategies.features import place
from lfm2np.suite.strategies.tiny_models import checkpoint

TRAINED = Checkpoint(str(lfm2np.load().path))
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("prop", ALL, ids=lambda case: case.id)
def test_our_engine_has_every_property_on_the_trained_checkpoint(prop):
    result = run_property(prop, adapters.own, "quick", terms=Terms(TRAINED))
    if "drawn" in prop.needs:
        assert (result.status, result.message) == ("skipped", "it draws models of its own: not with --model")
    else:
        assert (result.status, result.message) == ("passed", "")


def test_requests_draw_from_its_vocabulary_and_properties_keep_their_shape():
    params = SamplingParams(
        logit_bias={6: 2.0}, allowed_token_ids=(0, 3), banned_token_ids=(7,), stop_token_ids=(8, 9), n=2
    )
    drawn = Scenario(TinyModel(), (Request("a", (3, 4, 3, 23), params),), {"block_size": 2}, (("add", 0),))
    placed = place(drawn, TRAINED)
    assert placed.model == TRAINED
    assert (placed.sizes, placed.ops) == (drawn.sizes, drawn.ops)
    (request,) = placed.requests
    assert request.prompt_token_ids == (158, 168, 158, 358)
    assert request.params.logit_bias == ((188, 2.0),)
    assert (request.params.allowed_token_ids, request.params.banned_token_ids) == ((128, 158), (198,))
    assert request.params.stop_token_ids == (208, 218)
    assert place((1, drawn.requests, None), TRAINED) == (1, placed.requests, None)
    assert place(drawn, None) is drawn


def test_a_small_vocabulary_keeps_the_drawn_ids():
    small = Checkpoint(str(checkpoint(TinyModel())))
    assert place(Request("a", (3, 23), GREEDY), small).prompt_token_ids == (3, 23)


@pytest.mark.slow
def test_a_failure_on_it_is_shown_again_by_its_script():
    with inject("state-never-advanced"):
        result = run_property(
            next(p for p in ALL if p.id == "equals-reference"), adapters.own, "ci", terms=Terms(TRAINED)
        )
    assert result.status == "failed"
    assert f"Scenario(model=Checkpoint(path={TRAINED.path!r})" in result.message
    scenario = Scenario(TRAINED, (Request("a", (158, 168), GREEDY),))
    assert eval(short(scenario)) == scenario
    check("equals-reference", "lfm2np.suite.adapters:own", scenario)


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False)


SUITE = ("--pyargs", "lfm2np.suite")


@pytest.mark.slow
def test_the_plugin_takes_a_checkpoint_and_sizes(tmp_path: Path):
    sizes = ("--block-size", "8", "--max-num-batched-tokens", "24", "--max-num-seqs", "2", "--max-model-len", "64")
    ended = run_pytest(tmp_path, *SUITE, "--model", TRAINED.path, *sizes, "-k", "equals-reference or one-bos")
    assert ended.returncode == 0, ended.stdout
    assert "1 passed, 1 skipped" in ended.stdout
    assert "it draws models of its own: not with --model" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--model", "nowhere"], "nowhere"),
        (["--block-size", "none"], "--block-size: block_size 'none': expected a whole number of at least 1"),
        (["--max-model-len", "8"], "--max-model-len: max_model_len 8: expected a whole number of at least 32"),
    ],
)
def test_the_plugin_names_wrong_sizes_and_checkpoints(tmp_path: Path, arguments: list[str], fragment: str):
    ended = run_pytest(tmp_path, *SUITE, "-k", "one-bos", *arguments)
    assert ended.returncode != 0
    assert fragment in ended.stdout + ended.stderr
    assert "INTERNALERROR" not in ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ("lacks = {'bias'}", "lacks 'bias': expected names of FEATURES or SIZES"),
        ("sizes = {'block_size': 0}", "sizes of the engine: block_size 0: expected a whole number of at least 1"),
    ],
)
def test_what_an_engine_says_wrongly_of_itself_is_one_line(tmp_path: Path, attribute: str, said: str):
    (tmp_path / "wrong.py").write_text(
        f"class Engine:\n    {attribute}\n    def __init__(self, model, sizes): pass\n    def generate(self): pass\n"
    )
    ended = run_pytest(tmp_path, *SUITE, "--engine", "wrong:Engine", "-k", "equals-reference")
    assert f"\n{said}\n" in ended.stdout
    assert "Traceback" not in ended.stdout


@pytest.mark.slow
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
