"""The command line as people and scripts see it: output, help, exit codes. What is refused: test_refused.py."""

import argparse
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import (
    SPECIALS,
    overflowing_at_token_seven,
    safetensors_bytes,
    stored,
    stored_weights,
    tiny_config,
    write_tokenizer,
)
from torture_table import MIXTURES

import lfm2np
from lfm2np.arithmetic import numerics_named
from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.commands.cli import main, program, summary
from lfm2np.commands.cli.program import COMMANDS, build_parser
from lfm2np.truth.weights import MixtureWeights, ModelWeights, named_weights

TOP = Path(__file__).parents[3]
TORTURE = TOP / "fixtures" / "torture"


@pytest.fixture
def completion(answer):
    """The only sample of the only request, and the ids of its prompt."""

    def completed(*words):
        (request,) = answer("generate", *words)["outputs"]
        (sample,) = request["outputs"]
        return {"prompt_token_ids": request["prompt_token_ids"], **sample}

    return completed


def test_control_characters_in_a_message_reach_no_terminal(model, failure):
    """Pinned: an escape sequence in a template's raise_exception."""
    write_tokenizer(model, "{{ raise_exception('no\\x1b[31m system\\u202e role') }}")
    code, message = failure("generate", "--model", str(model), "--chat", "hi")
    assert code == 3 and "no<U+001B>[31m system<U+202E> role" in message
    _, message = failure("info", "--model", "/nowhere\x9b2J")
    assert "/nowhere<U+009B>2J" in message


def helps(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of commands that run."""
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)] or (None,)
    for each in commands.choices.values() if commands else ():
        yield from helps(each)
    if not commands:
        yield parser


def test_every_help_text_has_an_example_and_exit_codes_and_fits_sixty_lines(monkeypatch) -> None:
    """And is the same where a command is loaded without the others."""
    monkeypatch.setenv("COLUMNS", "120")
    alone = {parser.prog: parser.format_help() for name in COMMANDS for parser in helps(build_parser(name))}
    for parser in helps(build_parser()):
        text = parser.format_help()
        assert text == alone[parser.prog]
        assert text.count("\n") <= 60, (parser.prog, text.count("\n"))
        assert f"usage: {parser.prog} [options]" in text
        is_short = parser.prog.startswith("lfm2np vectors")
        assert is_short or (f"example:\n  {parser.prog}" in text and "exit codes: 0" in text), parser.prog


def test_the_program_has_few_commands_and_options() -> None:
    """As many as a person can hold; a new option takes the place of another."""
    parsers = helps(build_parser())
    options = {p.prog: {word for action in p._actions for word in action.option_strings[-1:]} for p in parsers}
    assert len(COMMANDS) <= 16 and len(set().union(*options.values())) <= 98 and len(options["lfm2np check"]) <= 24


@pytest.mark.slow
def test_a_command_is_loaded_without_the_others() -> None:
    code = "import sys\nfrom lfm2np.commands.cli import main\nmain(['info', '--json'])\n"
    code += "print(*sorted(name for name in sys.modules if name in sys.argv[1:]), file=sys.stderr)"
    modules = sorted(set(COMMANDS.values()))
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["lfm2np.commands.cli.info"]


def test_without_a_command_it_says_where_to_start(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 4 and [line.split()[0] for line in shown] == ["check", "test", "learn", "all"]


@pytest.mark.rounding
@pytest.mark.parametrize("way", [[], ["--sequential"]])
@pytest.mark.parametrize("numerics", ["exact", "float32", "bfloat16"])
def test_weights_that_overflow_end_in_exit_code_4(overflowing, failure, capsys, numerics, way):
    arguments = ["generate", "--model", str(overflowing), "--prompt-ids", "1,2", "--numerics", numerics, *way]
    code, message = failure(*arguments)
    assert code == 4
    assert f"overflow {'integers' if way and numerics == 'exact' else numerics}" in message
    assert main([*arguments, "--json"]) == 4
    captured = capsys.readouterr()
    (sample,) = json.loads(captured.out)["outputs"][0]["outputs"]
    assert sample["finish_reason"] == "error"
    assert captured.err == message == f"lfm2np: {sample['error']}\n"


@pytest.mark.parametrize("way", [[], ["--sequential"], ["--prove"]])
def test_an_overflow_of_one_prompt_harms_no_other_and_ends_in_exit_code_4(model, completion, capsys, way):
    overflowing_at_token_seven(model)
    seven = lfm2np.load(model).tokenizer.decode([7])
    arguments = ["--model", str(model), "--max-tokens", "3", *way]
    alone = completion(*arguments, "--prompt", "a")["text"]
    assert main(["generate", *arguments, "--prompt", seven, "--prompt", "a"]) == 4
    captured = capsys.readouterr()
    first, second = captured.out.split("\n")[:2]
    assert "[NumericsError: " in first
    assert second == f"{'a':<38}{' '.join(alone.split())}"
    assert captured.err.startswith("lfm2np: NumericsError: 1 of the samples failed: request 0: ")
    assert captured.err.count("\n") == 1


def test_generate_prints_the_text_of_the_ids_that_json_shows_and_without_a_tokenizer_ids(
    model, completion, failure, capsys
):
    arguments = ["--model", str(model), "--prompt", "hello", "--max-tokens", "9"]
    shown = completion(*arguments)
    assert main(["generate", *arguments]) == 0
    assert capsys.readouterr().out == f"{shown['text']}\n"
    (model / "tokenizer.json").unlink()
    assert failure("generate", *arguments)[0] == 3
    arguments = ["--model", str(model), "--prompt-ids", "1,2", "--max-tokens", "3"]
    shown = completion(*arguments)
    assert shown["text"] is None
    assert main(["generate", *arguments]) == 0
    assert capsys.readouterr().out == ",".join(map(str, shown["token_ids"])) + "\n"


def test_score_agrees_with_the_logprobs_of_generation(model, completion, answer, capsys):
    shown = completion("--model", str(model), "--prompt", "a", "--max-tokens", "5", "--logprobs", "1")
    ids = ",".join(map(str, [*shown["prompt_token_ids"], *shown["token_ids"]]))
    scores = answer("score", "--model", str(model), "--prompt-ids", ids)["scores"][-5:]
    assert [s["logprob"] for s in scores] == [p["logprob"] for p in shown["logprobs"]]
    assert all(s["rank"] == 1 and s["margin"] >= 0 for s in scores)
    assert main(["score", "--model", str(model), "--prompt-ids", ids]) == 0
    assert "total log-probability" in capsys.readouterr().out


def test_score_shows_the_tokens_of_a_completion_only(model, completion, answer):
    """Behind a prompt of three messages: what --system and --chat say, and what the model is to say."""
    options = ["score", "--model", str(model), "--chat", "hi", "--system", "be"]
    whole = answer(*options, "--completion", "hello")
    prompt = completion(*options[1:], "--max-tokens", "1")["prompt_token_ids"]
    assert prompt.count(SPECIALS.index("<|im_start|>")) == 3
    added = whole["token_ids"][len(prompt) :]
    assert whole["token_ids"][: len(prompt)] == prompt
    assert [(s["position"], s["token_id"]) for s in whole["scores"]] == [*enumerate(added, len(prompt))]
    same = answer(*options, "--completion-ids", ",".join(map(str, added)))
    assert same["total_logprob"] == whole["total_logprob"]


def test_prompts_come_from_files_and_standard_input(model, completion, tmp_path, monkeypatch):
    text = tmp_path / "prompt.txt"
    text.write_text("hé\n")
    options = ["--model", str(model), "--max-tokens", "1"]
    from_file = completion(*options, "--prompt-file", str(text))["prompt_token_ids"]
    assert from_file == completion(*options, "--prompt", "hé\n")["prompt_token_ids"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("hé\n".encode())))
    assert completion(*options, "--prompt-file", "-")["prompt_token_ids"] == from_file


def test_the_version_is_that_of_the_changelog_and_of_the_citation(capsys):
    with pytest.raises(SystemExit) as ending:
        main(["--version"])
    assert (ending.value.code, capsys.readouterr().out) == (0, f"lfm2np {lfm2np.__version__}\n")
    newest = re.search(r"^## (\S+) \((\S+)\)$", (TOP / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest and newest[1] == lfm2np.__version__
    cited = (TOP / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert {f"version: {newest[1]}", f"date-released: {newest[2]}"} <= set(cited)


def test_a_warning_is_shown_once_a_command_wherever_it_comes_from(capsys):
    show = program.warnings_shown_once()
    for text in ("read otherwise", "torn", "read otherwise"):
        show(UserWarning(text), UserWarning, "config.py", 1)
    assert capsys.readouterr().err == "lfm2np: warning: read otherwise\nlfm2np: warning: torn\n"


def test_info_refuses_a_norm_that_is_not_finite(model, failure):
    tensors = stored_weights(tiny_config())
    tensors["model.embedding_norm.weight"] = stored(np.full(16, np.nan), "BF16")
    (model / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    code, message = failure("info", "--model", str(model))
    assert code == 3 and "model.embedding_norm.weight: nan at index (0,)" in message


def test_info_counts_parameters_and_proves_every_product(model, answer, capsys):
    shown = answer("info", "--model", str(model))
    assert shown["parameters"] == 300 * 16 + 16 + 2 * (32 + 3 * 24 * 16) + 16 * 48 + 16 * 3 + 16 * 16 + 8 + 16 * 48
    assert all(b["row_sum_bits"] + b["activation_bits"] <= 53 for b in shown["bounds"])
    assert len(shown["bounds"]) == 9
    assert main(["info", "--model", str(model)]) == 0
    assert "Proved" in capsys.readouterr().out


def test_a_mixture_is_described_and_json_has_every_product(answer, capsys):
    assert main(["info", "--model", str(TORTURE / "moe_published")]) == 0
    lines = capsys.readouterr().out.splitlines()
    for label, value in (
        ("parameters", "45,752"),
        ("active for one token", "25,016"),
        ("experts, a token, width", "8, 2, 16"),
        ("dense layers, sparse layers", "2, 3"),
        ("bias, normalised, scaling", "true, true, 1"),
    ):
        assert f"{label:<30}{value}" in lines
    assert sum(line.endswith("once every expert was chosen") for line in lines) == 4
    report = answer("info", "--model", str(TORTURE / "moe_published"))
    assert (report["parameters"], report["active_parameters"]) == (45_752, 25_016)
    assert report["config"]["mixture"]["num_experts"] == 8
    assert sum(".experts." in bound["tensors"][0] for bound in report["bounds"]) == 3 * 8 * 2
    dense = answer("info", "--model", str(TORTURE / "minimal_config"))
    assert dense["config"]["mixture"] is None and dense["active_parameters"] == dense["parameters"]


def bytes_in(weights: ModelWeights, experts: int) -> int:
    """Of all arrays, every expert prepared; a tied head counts, the embedding's rows do not."""
    parts = [weights.final_norm, weights.head]
    for layer in weights.layers:
        parts += [value for _, value in named_weights(layer)]
        if isinstance(layer.feed_forward, MixtureWeights):
            pairs = map(layer.feed_forward.expert, range(experts))
            parts += [matrix for pair in pairs for matrix in (pair.gate_up_proj, pair.down_proj)]
    return sum(getattr(part, "values", part).nbytes for part in parts)


@pytest.mark.parametrize("name", [*MIXTURES, "all_convolution"])
def test_memory_is_what_the_prepared_weights_take(name: str) -> None:
    config = load_config(TORTURE / name)
    tensors = open_checkpoint(TORTURE / name, config)
    stated = summary.weight_bytes(config, summary.proved_bounds(tensors, config))
    experts = 0 if config.mixture is None else config.mixture.num_experts
    for arithmetic in ("exact", "float32", "float64"):
        weights = prepare_weights(tensors, config, numerics_named(arithmetic))
        assert bytes_in(weights, experts) == stated[arithmetic], arithmetic
