"""The command line as people and scripts see it: output, exit codes, one-line errors."""

import argparse
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from builders import (
    SPECIALS,
    overflowing_at_token_seven,
    raw_config,
    safetensors_bytes,
    stored,
    stored_weights,
    tiny_config,
    write_model,
    write_tokenizer,
)
from test_checkpoint import CORRUPT
from test_config import REFUSALS

import lfm2np
from lfm2np.commands.cli import main, program
from lfm2np.commands.cli.program import COMMANDS, build_parser

FIXTURES = Path(__file__).parents[3] / "fixtures"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one line on stderr of a command that must fail and print nothing else."""
    code = main(arguments)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lfm2np: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return code, captured.err


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    parsed: dict[str, object] = json.loads(capsys.readouterr().out)
    return parsed


def completion(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """The only sample of the only request, and the ids of its prompt."""
    (request,) = answer(capsys, "generate", *arguments)["outputs"]
    (sample,) = request["outputs"]
    return {"prompt_token_ids": request["prompt_token_ids"], **sample}


@pytest.mark.parametrize(("corrupt", "fragment"), CORRUPT)
def test_a_corrupt_checkpoint_ends_in_exit_code_3_and_one_line(tmp_path, capsys, corrupt, fragment):
    directory = tmp_path / "model"
    directory.mkdir()
    corrupt(directory)
    if directory.is_dir():
        (directory / "config.json").write_text(json.dumps(raw_config()))
    code, message = failure(capsys, "generate", "--model", str(directory), "--prompt-ids", "1,2")
    assert code == 3
    assert str(directory) in message


@pytest.mark.parametrize(("changes", "fragment"), REFUSALS)
def test_a_refused_config_ends_in_exit_code_3_and_one_line(model, capsys, changes, fragment):
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)  # one case is a number of thousands of digits
    (model / "config.json").write_text(json.dumps(raw_config() | changes))
    sys.set_int_max_str_digits(limit)
    code, message = failure(capsys, "info", "--model", str(model))
    assert code == 3
    assert "config.json" in message


BAD_REQUESTS = [
    (["generate", "--prompt-ids", ""], "--prompt-ids ''"),
    (["generate", "--prompt-ids", "1,,2"], "whole numbers with commas"),
    (["generate", "--prompt-ids", "1.5"], "whole numbers with commas"),
    (["generate", "--prompt-ids", "9" * 5000], "whole numbers with commas"),
    (["generate", "--prompt-ids", "1_0"], "whole numbers with commas"),
    (["generate", "--prompt-ids", "+1"], "whole numbers with commas"),
    (["generate", "--prompt-ids", "\u0661"], "whole numbers with commas"),
    (["generate", "--prompt-file", "/nowhere"], "/nowhere: does not exist"),
    (["generate", "--prompt-file", "/"], "/: is not a regular file"),
    (["score", "--prompt", "a", "--completion-ids", "x"], "--completion-ids 'x'"),
    (["generate", "--prompt-ids", "300"], "300"),
    (["generate", "--prompt-ids", "-1"], "-1"),
    (["generate", "--prompt-ids", "1", "--max-tokens", "0"], "max_tokens 0: expected a whole number, at least 1"),
    (["generate", "--prompt-ids", "1", "--max-tokens", "-5"], "max_tokens -5"),
    (["generate", "--prompt-ids", "1", "--logprobs", "-1"], "logprobs -1: expected a whole number, 0 to 300"),
    (["generate", "--prompt-ids", "1", "--logprobs", "301"], "logprobs 301"),
    (["generate", "--prompt-ids", ",".join(["1"] * 128)], "prompt of 128 tokens"),
    (["generate", "--prompt", "a" * 500], "prompt of 501 tokens"),
    (["generate", "--prompt", "\udcff"], "surrogate"),
    (["generate", "--prompt", "a", "--system", "b"], "--system goes with --chat"),
    (["score", "--prompt-ids", "1"], "1 token to score: expected 2 to max_position_embeddings=128"),
    (["score", "--prompt-ids", ",".join(["1"] * 129)], "129 tokens to score"),
    (["score", "--prompt-ids", "1,300"], "300"),
]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        *BAD_REQUESTS,
        *(([*words, "--sequential"], words_of) for words, words_of in BAD_REQUESTS if words[0] == "generate"),
    ],
)
def test_a_request_that_cannot_be_met_ends_in_exit_code_2_and_one_line(model, capsys, arguments, fragment):
    """The engine and the reference refuse the same."""
    code, message = failure(capsys, *arguments, "--model", str(model))
    assert code == 2
    assert fragment in message


CHECK = ["check", "lfm2np.teaching.tutorial:right", "--cases", "short-prompts"]
VET = ["vet", "http://127.0.0.1:9", "--candidate", "a=nowhere"]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        *(([*command, "--timeout", each], "--timeout") for command in (CHECK, VET) for each in ("nan", "inf", "1e10")),
        *(([*CHECK, "--seed", each], "--seed") for each in ("-1", "99999999999999999999")),
    ],
)
def test_numbers_that_no_clock_or_generator_takes_are_one_line(capsys, arguments, fragment):
    code, message = failure(capsys, *arguments)
    assert code == 3 and f"{fragment} " in message


def test_control_characters_in_a_message_reach_no_terminal(tmp_path, capsys):
    """Pinned: an escape sequence in a template's raise_exception."""
    directory = write_model(tmp_path / "model")
    write_tokenizer(directory, "{{ raise_exception('no\\x1b[31m system\\u202e role') }}")
    code, message = failure(capsys, "generate", "--model", str(directory), "--chat", "hi")
    assert code == 3
    assert "no<U+001B>[31m system<U+202E> role" in message
    _, message = failure(capsys, "info", "--model", "/nowhere\x9b2J")
    assert "/nowhere<U+009B>2J" in message


def helps() -> Iterator[argparse.ArgumentParser]:
    """The parsers of commands that run: those that print an example."""
    waiting = [build_parser()]
    for parser in waiting:
        (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)] or (None,)
        waiting += commands.choices.values() if commands else ()
        if not commands:
            yield parser


def test_every_help_text_has_an_example_and_exit_codes_and_fits_sixty_lines(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for parser in helps():
        text = parser.format_help()
        assert text.count("\n") <= 60, (parser.prog, text.count("\n"))
        assert f"usage: {parser.prog} [options]" in text
        assert parser.prog.startswith("lfm2np vectors") or f"example:\n  {parser.prog}" in text, parser.prog
        assert parser.prog.startswith("lfm2np vectors") or "exit codes: 0" in text, parser.prog


def test_the_program_has_few_commands_and_options() -> None:
    """As many as a person can hold; a new option takes the place of another."""
    options = {word for parser in helps() for action in parser._actions for word in action.option_strings[-1:]}
    assert len(COMMANDS) <= 16 and len(options) <= 103, len(options)


def test_without_a_command_it_says_where_to_start(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 4 and [line.split()[0] for line in shown] == ["check", "test", "learn", "all"]


def overflowing(directory: Path) -> None:
    """Finite weights whose logits are not: a head of 3e38 everywhere."""
    (directory / "config.json").write_text(json.dumps(raw_config(tie_word_embeddings=False)))
    tensors = stored_weights(tiny_config(tie_word_embeddings=False))
    tensors["lm_head.weight"] = stored(np.full((300, 16), 3e38, np.float32), "BF16")
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))


@pytest.mark.rounding
@pytest.mark.parametrize("way", [[], ["--sequential"]])
@pytest.mark.parametrize("numerics", ["exact", "float32", "bfloat16"])
def test_weights_that_overflow_end_in_exit_code_4(model, capsys, numerics, way):
    overflowing(model)
    arguments = ["generate", "--model", str(model), "--prompt-ids", "1,2", "--numerics", numerics, *way]
    code, message = failure(capsys, *arguments)
    assert code == 4
    computed = "integers" if way and numerics == "exact" else numerics
    assert f"overflow {computed}" in message
    assert main([*arguments, "--json"]) == 4
    captured = capsys.readouterr()
    assert captured.err == message
    (sample,) = json.loads(captured.out)["outputs"][0]["outputs"]
    assert sample["finish_reason"] == "error"
    assert message == f"lfm2np: {sample['error']}\n"


@pytest.mark.parametrize("way", [[], ["--sequential"], ["--prove"]])
def test_an_overflow_of_one_prompt_harms_no_other_and_ends_in_exit_code_4(model, capsys, way):
    overflowing_at_token_seven(model)
    seven = lfm2np.load(model).tokenizer.decode([7])
    arguments = ["generate", "--model", str(model), "--max-tokens", "3", *way]
    alone = str(completion(capsys, *arguments[1:], "--prompt", "a")["text"])
    assert main([*arguments, "--prompt", seven, "--prompt", "a"]) == 4
    captured = capsys.readouterr()
    first, second = captured.out.split("\n")[:2]
    assert "[NumericsError: " in first
    assert second == f"{'a':<38}{' '.join(alone.split())}"
    assert captured.err.startswith("lfm2np: NumericsError: 1 of the samples failed: request 0: ")
    assert captured.err.count("\n") == 1


def test_generate_prints_the_text_of_the_ids_that_json_shows(model, capsys):
    arguments = ["--model", str(model), "--prompt", "hello", "--max-tokens", "9"]
    shown = completion(capsys, *arguments)
    assert main(["generate", *arguments]) == 0
    assert capsys.readouterr().out == f"{shown['text']}\n"
    assert shown["finish_reason"] in ("stop", "length")
    assert shown["logprobs"] is None


def test_generate_without_a_tokenizer_takes_and_prints_ids(model, capsys):
    (model / "tokenizer.json").unlink()
    arguments = ["--model", str(model), "--prompt-ids", "1,2", "--max-tokens", "3"]
    shown = completion(capsys, *arguments)
    assert shown["text"] is None
    assert main(["generate", *arguments]) == 0
    ids = shown["token_ids"]
    assert isinstance(ids, list)
    assert capsys.readouterr().out == ",".join(map(str, ids)) + "\n"
    code, message = failure(capsys, "generate", "--model", str(model), "--prompt", "a")
    assert code == 3
    assert "tokenizer.json" in message


def test_chat_renders_the_template_with_one_bos(model, capsys):
    shown = completion(capsys, "--model", str(model), "--chat", "hi", "--system", "be", "--max-tokens", "1")
    ids = shown["prompt_token_ids"]
    assert isinstance(ids, list)
    assert ids[0] == SPECIALS.index("<|startoftext|>")
    assert ids.count(ids[0]) == 1
    assert ids.count(SPECIALS.index("<|im_start|>")) == 3


def test_score_agrees_with_the_logprobs_of_generation(model, capsys):
    shown = completion(capsys, "--model", str(model), "--prompt", "a", "--max-tokens", "5", "--logprobs", "1")
    ids = [*shown["prompt_token_ids"], *shown["token_ids"]]
    scored = answer(capsys, "score", "--model", str(model), "--prompt-ids", ",".join(map(str, ids)))
    scores = scored["scores"][-5:]
    assert [s["logprob"] for s in scores] == [p["logprob"] for p in shown["logprobs"]]
    assert all(s["rank"] == 1 and s["margin"] >= 0 for s in scores)
    assert main(["score", "--model", str(model), "--prompt-ids", ",".join(map(str, ids))]) == 0
    assert "total log-probability" in capsys.readouterr().out


def test_digest_is_64_hex_digits_and_depends_on_the_weights(model, capsys):
    assert main(["info", "--digest", "--model", str(model)]) == 0
    printed = capsys.readouterr().out.strip()
    assert len(bytes.fromhex(printed)) == 32
    assert answer(capsys, "info", "--digest", "--model", str(model))["sha256"] == printed
    other = answer(capsys, "info", "--digest", "--model", str(FIXTURES / "torture" / "all_attention"))
    assert other["sha256"] != printed


def test_prompts_come_from_files_and_standard_input(model, capsys, tmp_path, monkeypatch):
    text = tmp_path / "prompt.txt"
    text.write_text("hé\n")
    options = ["--model", str(model), "--max-tokens", "1"]
    from_file = completion(capsys, *options, "--prompt-file", str(text))["prompt_token_ids"]
    assert from_file == completion(capsys, *options, "--prompt", "hé\n")["prompt_token_ids"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("hé\n".encode())))
    assert completion(capsys, *options, "--prompt-file", "-")["prompt_token_ids"] == from_file


def test_score_shows_the_tokens_of_a_completion_only(model, capsys):
    options = ["score", "--model", str(model), "--chat", "hi"]
    whole = answer(capsys, *options, "--completion", "hello")
    assert isinstance(whole["token_ids"], list)
    prompt = completion(capsys, *options[1:], "--max-tokens", "1")["prompt_token_ids"]
    assert isinstance(prompt, list)
    added = whole["token_ids"][len(prompt) :]
    assert whole["token_ids"][: len(prompt)] == prompt
    assert [s["token_id"] for s in whole["scores"]] == added
    assert [s["position"] for s in whole["scores"]] == list(range(len(prompt), len(prompt) + len(added)))
    same = answer(capsys, *options, "--completion-ids", ",".join(map(str, added)))
    assert same["total_logprob"] == whole["total_logprob"]


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_dangling_link_is_not_an_absent_file(model, capsys, name):
    """An interrupted download leaves them; without eos ids or the template the answer would be another."""
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(model / "gone")
    code, message = failure(capsys, "generate", "--model", str(model), "--chat", "a")
    assert code == 3
    assert f"{name}: does not exist" in message


def test_a_config_with_a_thousand_million_layers_allocates_nothing(model, capsys):
    (model / "config.json").write_text(json.dumps(raw_config(num_hidden_layers=10**9, layer_types=None)))
    code, message = failure(capsys, "info", "--model", str(model))
    assert code == 3
    assert "num_hidden_layers: 1000000000" in message


def test_the_version_is_that_of_the_changelog_and_of_the_citation(capsys):
    with pytest.raises(SystemExit) as ending:
        main(["--version"])
    assert (ending.value.code, capsys.readouterr().out) == (0, f"lfm2np {lfm2np.__version__}\n")
    top = FIXTURES.parent
    newest = re.search(r"^## (\S+) \((\S+)\)$", (top / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest and newest[1] == lfm2np.__version__
    cited = (top / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert {f"version: {newest[1]}", f"date-released: {newest[2]}"} <= set(cited)


def test_a_command_is_loaded_without_the_others() -> None:
    """And is the same as with them."""
    code = "import sys\nfrom lfm2np.commands.cli import main\nmain(['info', '--json'])\n"
    code += "print(*sorted(name for name in sys.modules if name in sys.argv[1:]), file=sys.stderr)"
    modules = sorted(set(COMMANDS.values()))
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["lfm2np.commands.cli.info"]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_of_a_command_is_the_same_with_and_without_the_others(name: str) -> None:
    def own_help(parser: argparse.ArgumentParser) -> str:
        (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        return str(commands.choices[name].format_help())

    assert own_help(build_parser(name)) == own_help(build_parser())


def test_a_warning_is_shown_once_a_command_wherever_it_comes_from(capsys):
    show = program.warnings_shown_once()
    for text in ("read otherwise", "torn", "read otherwise"):
        show(UserWarning(text), UserWarning, "config.py", 1)
    assert capsys.readouterr().err == "lfm2np: warning: read otherwise\nlfm2np: warning: torn\n"


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        *((3, [*words, "--unknown"]) for words in (["check", "x"], ["fuzz", "x"], ["rollouts", "x"], ["locate", "x"])),
        *((3, [name]) for name in ("check", "fuzz", "vet", "rollouts", "locate")),
        *(
            (2, words.split())
            for words in ("sing", "serve --port", "lab --port many", "record", "score", "info --prompt a")
        ),
        *(
            (2, ["generate", *words.split()])
            for words in ("", "--prompt", "--prompt a --prompt-ids 1", "--prompt a --chat b")
        ),
        *((2, ["generate", "--prompt", "a", *words.split()]) for words in ("--numerics float8", "--max-tokens many")),
        (2, ["info", "--digest", "--trust"]),
    ],
)
def test_options_that_can_not_be_met_have_the_exit_code_that_the_help_says(capsys, code, arguments):
    """Where 2 is a verdict on an engine, a mistyped option is 3: also one that the command does not know."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == code
    error = capsys.readouterr().err
    assert error.startswith("lfm2np: ") and error.count("\n") == 1


WRITTEN = {  # a command with what it needs, and its option for a file
    *product(["check x:y"], ["--html", "--junit", "--save"]),
    *product(["vet x.jsonl --candidate a=b"], ["--html", "--save"]),
    ("vectors verify", "--save"),
    *product(["simulate"], ["--svg", "--out", "--html"]),
    *(("compare a b", "--html"), ("rollouts a", "--html"), ("score --merge a", "-o"), ("draw --demo", "-o")),
    *(("record lfm2np: --prompt-ids 1", "-o"), ("generate --prompt a", "--trace"), ("serve", "--trace")),
    *(
        ("score --prompt a", "--save"),
        ("vectors make -o a", "--save"),
        ("fuzz x:y", "--save"),
        ("compare a b", "--save"),
    ),
}


@pytest.mark.parametrize(("words", "option"), sorted(WRITTEN))
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, capsys, words, option):
    """Pinned: `check --junit .` said so behind the whole check."""
    for path, why in ((tmp_path, "a directory, expected a file"), (tmp_path / "no" / "file", "no such directory")):
        with pytest.raises(SystemExit) as done:
            main([*words.split(), option, str(path)])
        assert done.value.code in (2, 3)
        assert f"{path}: " in (line := capsys.readouterr().err) and why in line and line.count("\n") == 1


def test_a_file_that_is_no_trace_can_not_be_read_and_one_that_differs_is_wrong(tmp_path, capsys):
    """Pinned: 1 of a replay, 2 of `draw`."""
    trace = tmp_path / "trace.jsonl"
    for content in ("", "hello\n", '{"a": 1}\n'):
        trace.write_text(content)
        for words in (["draw", str(trace), "--replay"], ["draw", str(trace), "--terminal"]):
            code, line = failure(capsys, *words)
            assert code == 3 and line.startswith("lfm2np: TraceError: ")
    trace.write_text("")
    code, line = failure(capsys, "check", str(trace))
    assert code == 3 and "trace.jsonl: no answers, expected " in line


def test_info_refuses_a_norm_that_is_not_finite(model, capsys):
    tensors = stored_weights(tiny_config())
    tensors["model.embedding_norm.weight"] = stored(np.full(16, np.nan), "BF16")
    (model / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    code, message = failure(capsys, "info", "--model", str(model))
    assert code == 3
    assert "model.embedding_norm.weight: nan at index (0,)" in message


def test_info_counts_parameters_and_proves_every_product(model, capsys):
    shown = answer(capsys, "info", "--model", str(model))
    assert shown["parameters"] == 300 * 16 + 16 + 2 * (32 + 3 * 24 * 16) + 16 * 48 + 16 * 3 + 16 * 16 + 8 + 16 * 48
    assert all(b["row_sum_bits"] + b["activation_bits"] <= 53 for b in shown["bounds"])
    assert len(shown["bounds"]) == 9
    assert main(["info", "--model", str(model)]) == 0
    assert "Proved" in capsys.readouterr().out
