"""The command line as people and scripts see it: output, exit codes, one-line errors."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import (
    SPECIALS,
    raw_config,
    safetensors_bytes,
    stored,
    stored_weights,
    tiny_config,
    write_checkpoint,
    write_tokenizer,
)
from test_checkpoint import CORRUPT
from test_config import REFUSALS

from lfm2np.cli import main

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole tiny checkpoint, tokenizer included, in a directory of its own."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw_config()))
    write_checkpoint(directory, tiny_config())
    write_tokenizer(directory)
    return directory


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
    (["generate", "--prompt-ids-file", "/nowhere"], "/nowhere: does not exist"),
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
    (["score", "--prompt-ids", "1"], "1 tokens to score: expected 2 to max_position_embeddings=128"),
    (["score", "--prompt-ids", ",".join(["1"] * 129)], "129 tokens to score"),
    (["score", "--prompt-ids", "1,300"], "300"),
]


@pytest.mark.parametrize(("arguments", "fragment"), BAD_REQUESTS)
def test_a_request_that_cannot_be_met_ends_in_exit_code_2_and_one_line(model, capsys, arguments, fragment):
    code, message = failure(capsys, *arguments, "--model", str(model))
    assert code == 2
    assert fragment in message


BAD_USAGE = [
    [],
    ["sing"],
    ["generate"],
    ["generate", "--prompt"],
    ["generate", "--prompt", "a", "--prompt-ids", "1"],
    ["generate", "--prompt", "a", "--chat", "b"],
    ["generate", "--prompt", "a", "--numerics", "float8"],
    ["generate", "--prompt", "a", "--max-tokens", "many"],
    ["generate", "--prompt", "a", "--logprobs", "1.5"],
    ["score"],
    ["digest", "--prompt", "a"],
    ["info", "--numerics", "exact"],
]


@pytest.mark.parametrize("arguments", BAD_USAGE)
def test_unknown_or_contradictory_options_end_in_exit_code_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("lfm2np: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "score", "digest", "info"])
def test_every_help_text_has_an_example_and_the_exit_codes(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"  lfm2np {command}" in text
    assert "exit codes:" in text


def overflowing(directory: Path) -> None:
    """Finite weights whose logits are not: a head of 3e38 everywhere."""
    (directory / "config.json").write_text(json.dumps(raw_config(tie_word_embeddings=False)))
    tensors = stored_weights(tiny_config(tie_word_embeddings=False))
    tensors["lm_head.weight"] = stored(np.full((300, 16), 3e38, np.float32), "BF16")
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))


@pytest.mark.parametrize("numerics", ["exact", "float32", "bfloat16"])
def test_weights_that_overflow_end_in_exit_code_4(model, capsys, numerics):
    overflowing(model)
    code, message = failure(capsys, "generate", "--model", str(model), "--prompt-ids", "1,2", "--numerics", numerics)
    assert code == 4
    assert f"overflow {numerics}" in message


def test_generate_prints_the_text_of_the_ids_that_json_shows(model, capsys):
    arguments = ["generate", "--model", str(model), "--prompt", "hello", "--max-tokens", "9"]
    shown = answer(capsys, *arguments)
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{shown['text']}\n"
    assert set(shown) >= {"prompt_token_ids", "token_ids", "text", "finish_reason", "logprobs", "model", "numerics"}
    assert shown["finish_reason"] in ("stop", "length")
    assert shown["logprobs"] is None


def test_generate_without_a_tokenizer_takes_and_prints_ids(model, capsys):
    (model / "tokenizer.json").unlink()
    arguments = ["generate", "--model", str(model), "--prompt-ids", "1,2", "--max-tokens", "3"]
    shown = answer(capsys, *arguments)
    assert shown["text"] is None
    assert main(arguments) == 0
    ids = shown["token_ids"]
    assert isinstance(ids, list)
    assert capsys.readouterr().out == ",".join(map(str, ids)) + "\n"
    code, message = failure(capsys, "generate", "--model", str(model), "--prompt", "a")
    assert code == 3
    assert "tokenizer.json" in message


def test_chat_renders_the_template_with_one_bos(model, capsys):
    shown = answer(capsys, "generate", "--model", str(model), "--chat", "hi", "--system", "be", "--max-tokens", "1")
    ids = shown["prompt_token_ids"]
    assert isinstance(ids, list)
    assert ids[0] == SPECIALS.index("<|startoftext|>")
    assert ids.count(ids[0]) == 1
    assert ids.count(SPECIALS.index("<|im_start|>")) == 3


def test_logprobs_are_the_best_tokens_in_order(model, capsys):
    shown = answer(capsys, "generate", "--model", str(model), "--prompt", "a", "--max-tokens", "4", "--logprobs", "3")
    logprobs = shown["logprobs"]
    assert isinstance(logprobs, list)
    for position, token_id in zip(logprobs, shown["token_ids"], strict=True):
        assert position["top"][0] == [token_id, position["logprob"]]
        values = [logprob for _, logprob in position["top"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
        assert values[0] < 0
    assert main(["generate", "--model", str(model), "--prompt", "a", "--max-tokens", "4", "--logprobs", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(logprobs)


def test_score_agrees_with_the_logprobs_of_generation(model, capsys):
    shown = answer(capsys, "generate", "--model", str(model), "--prompt", "a", "--max-tokens", "5", "--logprobs", "1")
    ids = [*shown["prompt_token_ids"], *shown["token_ids"]]
    scored = answer(capsys, "score", "--model", str(model), "--prompt-ids", ",".join(map(str, ids)))
    scores = scored["scores"][-5:]
    assert [s["logprob"] for s in scores] == [p["logprob"] for p in shown["logprobs"]]
    assert all(s["rank"] == 1 and s["margin"] >= 0 for s in scores)
    assert main(["score", "--model", str(model), "--prompt-ids", ",".join(map(str, ids))]) == 0
    assert "total log-probability" in capsys.readouterr().out


def test_digest_is_64_hex_digits_and_depends_on_the_weights(model, capsys):
    assert main(["digest", "--model", str(model)]) == 0
    printed = capsys.readouterr().out.strip()
    assert len(bytes.fromhex(printed)) == 32
    assert answer(capsys, "digest", "--model", str(model))["sha256"] == printed
    other = answer(capsys, "digest", "--model", str(FIXTURES / "torture" / "all_attention"))
    assert other["sha256"] != printed


def test_info_counts_parameters_and_proves_every_product(model, capsys):
    shown = answer(capsys, "info", "--model", str(model))
    assert shown["parameters"] == 300 * 16 + 16 + 2 * (32 + 3 * 24 * 16) + 16 * 48 + 16 * 3 + 16 * 16 + 8 + 16 * 48
    assert all(b["row_sum_bits"] + b["activation_bits"] <= 53 for b in shown["bounds"])
    assert len(shown["bounds"]) == 9
    assert main(["info", "--model", str(model)]) == 0
    assert "Proved" in capsys.readouterr().out


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lfm2np", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def test_nothing_but_the_answer_is_printed_when_piped(model):
    done = run("generate", "--model", str(model), "--prompt", "a", "--max-tokens", "3")
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_reader_that_goes_away_is_no_error(model):
    command = f"{sys.executable} -m lfm2np info --model {model} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize("command", [["digest"], ["info"], ["generate", "--prompt", "a"], ["score", "--prompt", "a"]])
@pytest.mark.parametrize(
    ("redirection", "code", "error"),
    [
        (">&-", 1, "lfm2np: standard output is closed\n"),
        (">/dev/full", 1, "lfm2np: the output can't be written: [Errno 28] No space left on device\n"),
        (">/dev/null 2>&-", 0, ""),
        (">/dev/full 2>/dev/full", 1, ""),
    ],
)
def test_closed_and_full_outputs_are_said_in_one_line(model, command, redirection, code, error):
    words = " ".join([sys.executable, "-m", "lfm2np", *command, "--model", str(model), redirection])
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", error)


def test_an_error_never_goes_where_the_answer_goes(model):
    words = f"{sys.executable} -m lfm2np generate --prompt-ids 999 --model {model} 2>&-"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


def test_prompts_come_from_files_and_standard_input(model, capsys, tmp_path):
    ids, text = tmp_path / "ids.txt", tmp_path / "prompt.txt"
    ids.write_text("1, 2\n3\n")
    text.write_text("hé\n")
    options = ["generate", "--model", str(model), "--max-tokens", "1"]
    assert answer(capsys, *options, "--prompt-ids-file", str(ids))["prompt_token_ids"] == [1, 2, 3]
    from_file = answer(capsys, *options, "--prompt-file", str(text))["prompt_token_ids"]
    assert from_file == answer(capsys, *options, "--prompt", "hé\n")["prompt_token_ids"]
    done = run(*options, "--json", "--prompt-ids-file", "-", input="7,8")
    assert json.loads(done.stdout)["prompt_token_ids"] == [7, 8]


def test_score_shows_the_tokens_of_a_completion_only(model, capsys):
    options = ["score", "--model", str(model), "--chat", "hi"]
    whole = answer(capsys, *options, "--completion", "hello")
    assert isinstance(whole["token_ids"], list)
    prompt = answer(capsys, "generate", *options[1:], "--max-tokens", "1")["prompt_token_ids"]
    assert isinstance(prompt, list)
    completion = whole["token_ids"][len(prompt) :]
    assert whole["token_ids"][: len(prompt)] == prompt
    assert [s["token_id"] for s in whole["scores"]] == completion
    assert [s["position"] for s in whole["scores"]] == list(range(len(prompt), len(prompt) + len(completion)))
    same = answer(capsys, *options, "--completion-ids", ",".join(map(str, completion)))
    assert same["total_logprob"] == whole["total_logprob"]


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_dangling_link_is_not_an_absent_file(model, capsys, name):
    """An interrupted download leaves them; without eos ids or the template the answer would be another."""
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(model / "gone")
    code, message = failure(capsys, "generate", "--model", str(model), "--chat", "a")
    assert code == 3
    assert f"{name}: does not exist" in message


def test_info_refuses_a_norm_that_is_not_finite(model, capsys):
    tensors = stored_weights(tiny_config())
    tensors["model.embedding_norm.weight"] = stored(np.full(16, np.nan), "BF16")
    (model / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    code, message = failure(capsys, "info", "--model", str(model))
    assert code == 3
    assert "model.embedding_norm.weight: nan at index (0,)" in message


def test_the_missing_template_engine_is_said_in_one_line(model):
    script = (
        "import sys; sys.modules['jinja2'] = None; from lfm2np.cli import main; raise SystemExit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "generate", "--model", str(model), "--chat", "a", "--max-tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr.startswith("lfm2np: warning: ")
    assert done.stderr.count("\n") == 1
    assert "install the extra `chat`" in done.stderr


def test_an_interrupt_ends_in_exit_code_130_without_a_traceback(model):
    """A prompt of many tokens on a model of many layers takes seconds; the first byte of output comes at once."""
    arguments = ["generate", "--model", str(model), "--prompt-ids", "1,2", "--max-tokens", "126", "--logprobs", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run with & would ignore it
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "lfm2np: interrupted\n"


INTERRUPTED = """
import sys, time
from lfm2np import cli
line = cli.logprobs_line
cli.logprobs_line = lambda *a: (time.sleep(0.2), line(*a))[1]
sys.stdout.reconfigure(line_buffering=True)
raise SystemExit(cli.main(sys.argv[1:]))
"""


def test_output_is_the_same_in_a_locale_without_utf_8(model):
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = run("generate", "--model", str(model), "--prompt", "a", "--max-tokens", "30", env=environment)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_a_config_with_a_thousand_million_layers_allocates_nothing(model, capsys):
    (model / "config.json").write_text(json.dumps(raw_config(num_hidden_layers=10**9, layer_types=None)))
    code, message = failure(capsys, "info", "--model", str(model))
    assert code == 3
    assert "num_hidden_layers: 1000000000" in message
