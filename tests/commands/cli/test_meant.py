"""A command or an option that is misspelt, and a checkpoint that is not there: the line says what was meant."""

import shlex

import pytest

from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.commands.cli import main
from lfm2np.errors import CheckpointError


@pytest.mark.parametrize(
    ("words", "code", "meant"),
    [
        ("chek http://127.0.0.1:9", 2, "check"),
        ("check a:b --modle x", 3, "--model"),
        ("check a:b --formt=bfloat16", 3, "--format"),
        ("check a:b --format bfloat61", 3, "bfloat16"),
        ("vectors mak", 3, "make"),
        ("vectors make --modl x -o y", 3, "--model"),
        ("vectors verify -o x", 3, None),  # an option of make
        ("lab --model x", 2, None),
        ("zzzz", 2, None),
        ("digest -q", 2, None),
    ],
)
def test_what_was_meant_is_named(words, code, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    line = capsys.readouterr().err
    assert ended.value.code == code and line.count("\n") == 1
    assert (f"; did you mean {meant}? (see lfm2np " in line) if meant else ("did you mean" not in line)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("LFM2-350M", "hf download LiquidAI/LFM2-350M --local-dir LFM2-350M"),
        ("my models/LFM2-8B-A1B", "hf download LiquidAI/LFM2-8B-A1B --local-dir 'my models/LFM2-8B-A1B'"),
        ("LFM2.5-1.2B-Instruct", "hf download LiquidAI/LFM2.5-1.2B-Instruct --local-dir LFM2.5-1.2B-Instruct"),
        (
            "x/LFM2-350M-Q4_K_M.gguf",
            "hf download LiquidAI/LFM2-350M-GGUF LFM2-350M-Q4_K_M.gguf --local-dir x",
        ),
        ("my-model", None),
        ("LFM2-350M-4bit", None),  # not by Liquid AI
    ],
)
def test_how_a_published_checkpoint_is_fetched(name, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as error:
        checkpoint_path(name)
    assert str(error.value).startswith(f"{name}: not a directory, expected one with config.json")
    assert str(error.value).endswith(command) if command else "hf" not in str(error.value)
