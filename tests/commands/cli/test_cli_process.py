"""The command line as a process: pipes, terminals, closed and full outputs, interrupts."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

import pytest

pytestmark = pytest.mark.slow


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lfm2np", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def said(text: str) -> list[dict]:
    """The outputs that --json printed on one line, without the times that they took."""
    (line,) = text.splitlines()
    return [
        {name: value for name, value in output.items() if name != "metrics"} for output in json.loads(line)["outputs"]
    ]


def test_a_prompt_is_utf8_whatever_the_locale(model):
    """Pinned: under LC_ALL=C without Python's UTF-8 mode it was called a lone surrogate."""
    command = ["generate", "--model", str(model), "--prompt", "a\u00eb\U0001f642", "--max-tokens", "2", "--json"]
    modes = [dict(os.environ, LC_ALL="C", PYTHONUTF8=mode) for mode in "01"]
    ascii_only, utf8 = (run(*command, env=mode) for mode in modes)
    assert (ascii_only.returncode, ascii_only.stderr) == (0, "")
    assert said(ascii_only.stdout) == said(utf8.stdout)


CLOSED = (">&-", 1, "lfm2np: standard output is closed\n")
FULL = (">/dev/full", 1, "lfm2np: the output can't be written: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    ("command", "redirection", "code", "error"),
    [
        ("info --digest", *CLOSED),
        ("info", *FULL),
        ("generate --prompt a", *CLOSED),
        ("generate --prompt a", *FULL),
        ("generate --prompt a", ">/dev/null 2>&-", 0, ""),
        ("score --prompt a", ">/dev/full 2>/dev/full", 1, ""),
        ("generate --prompt-ids 999", "2>&-", 2, ""),  # an error never goes where the answer goes
        # pinned: 1, the verdict "wrong", of commands that judge
        ("rollouts rollouts.jsonl", ">&-", 3, CLOSED[2]),
        ("fuzz lfm2np.teaching.tutorial:right --examples 1 --max-model-len 60", ">/dev/full", 3, FULL[2]),
    ],
)
def test_closed_and_full_outputs_are_said_in_one_line(model, command, redirection, code, error):
    words = f"{sys.executable} -m lfm2np {command} --model {model} {redirection}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", error)


def test_an_interrupt_ends_in_exit_code_130_without_a_traceback(model):
    """Each line of output is followed by a pause, so that the signal comes in the middle."""
    arguments = ["generate", "--model", str(model), "--prompt-ids", "1,2", "--max-tokens", "126", "--logprobs", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "lfm2np: interrupted\n"


@pytest.mark.parametrize("module", ["lfm2np.commands.cli.program", "lfm2np.commands.cli.info"])
def test_an_interrupt_of_the_imports_does_so_too(module):
    """Pinned: a traceback. They take a second."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT, module, "info"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "lfm2np: interrupted\n")


INTERRUPTED_IMPORT = """
import sys
class Finder:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from lfm2np.commands.cli import main
raise SystemExit(main(sys.argv[2:]))
"""


INTERRUPTED = """
import sys, time
from lfm2np.commands import cli
from lfm2np.commands.cli.shared import generate_output as cli_shown
line = cli_shown.logprobs_line
cli_shown.logprobs_line = lambda *a: (time.sleep(0.2), line(*a))[1]
sys.stdout.reconfigure(line_buffering=True)
raise SystemExit(cli.main(sys.argv[1:]))
"""


def on_a_terminal(script: str, *arguments: str) -> str:
    """What a process shows on a terminal of 80 columns that is its stdout and stderr."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=child, stderr=child)
    os.close(child)
    shown = b""
    with contextlib.suppress(OSError):  # Linux ends a terminal whose other side has closed with an error
        while piece := os.read(parent, 4096):
            shown += piece
    os.close(parent)
    assert process.wait() == 0
    return shown.decode()


PLAIN = "import sys; from lfm2np.commands.cli import main; sys.exit(main(sys.argv[1:]))"
SLOW = """
import sys, time
from lfm2np.commands import cli
from lfm2np.truth import reference
feed_forward = reference.feed_forward
reference.feed_forward = lambda *a: (time.sleep(1.3), feed_forward(*a))[1]
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.night
def test_what_takes_over_two_seconds_shows_a_bar_on_a_terminal(model):
    arguments = ["generate", "--model", str(model), "--prompt-ids", "1,2", "--max-tokens", "2", "--json"]
    slow, fast = on_a_terminal(SLOW, *arguments), on_a_terminal(PLAIN, *arguments)
    assert "prompt:" in slow
    assert "generating:" in slow
    last = slow.splitlines()[-1]
    assert said(last[last.index("{") :]) == said(fast), "the bars are gone when the answer comes"
    assert fast.startswith("{")


def test_several_requests_are_redrawn_on_a_terminal_and_then_shown_as_when_piped():
    arguments = ["generate", "--chat", "sort: 7 2 9 4", "--chat", "add: 20 + 97", "--max-tokens", "4"]
    shown = on_a_terminal(PLAIN, *arguments)
    *drawn, last = shown.split("\r\x1b[2A\x1b[J")
    assert len(drawn) == 4, "one a step"
    assert last.replace("\r\n", "\n") == run(*arguments).stdout


def test_control_characters_do_not_reach_a_terminal(model):
    """A model may say anything: here a token that clears the screen."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    options = ["generate", "--model", str(model), "--prompt-ids", "1", "--max-tokens", "1"]
    (token_id,) = json.loads(run(*options, "--json").stdout)["outputs"][0]["outputs"][0]["token_ids"]
    vocabulary = tokenizer["model"]["vocab"]
    letter = next(letter for letter, other in vocabulary.items() if other == token_id)
    escape = chr(0x100 + 27)  # byte-level BPE's letter for ESC
    vocabulary[letter], vocabulary[escape] = vocabulary[escape], vocabulary[letter]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "\x1b" in run(*options).stdout, "the control: a file gets what the model said"
    assert "\x1b" not in on_a_terminal(PLAIN, *options)


def test_every_command_starts_without_the_extras():
    """A core install has none of them."""
    extras = ("hypothesis", "pytest", "torch", "transformers", "jsonschema", "distributed")
    extras += ("starlette", "uvicorn", "pydantic")
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({extras}))\n"
        "from lfm2np.commands.cli.program import COMMANDS, build_parser\n"
        "for name in COMMANDS: build_parser(name)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


SHOWN = """
import argparse
from lfm2np.commands.cli.shared.terminal import show_report
from lfm2np.errors import ProofError
from lfm2np.oracle.report.report import WRONG, Report
try:
    show_report(argparse.Namespace(json=False), Report("check", "BUG", WRONG))
except ProofError as error:
    raise SystemExit(error.exit_code)
"""


ENDED = """
import sys
from lfm2np.commands.cli import main, rollouts
def run(arguments):
    raise %s
rollouts.run_rollouts = run
sys.exit(main(["rollouts", "x"]))
"""


@pytest.mark.parametrize(
    ("words", "code"), [(["-m", "lfm2np", "info"], 0), (["-c", SHOWN], 1), (["-c", ENDED % "BrokenPipeError"], 3)]
)
def test_a_reader_that_goes_away_is_no_error_and_changes_no_verdicts_exit_code(words, code) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_command_that_judges_does_not_call_an_engine_wrong_when_memory_runs_out() -> None:
    done = subprocess.run([sys.executable, "-c", ENDED % "MemoryError"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "lfm2np: out of memory\n")


@pytest.mark.night
def test_a_terminal_that_knows_only_ascii_gets_question_marks_and_json_is_the_same(model):
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    options = ["generate", "--model", str(model), "--prompt", "a", "--max-tokens", "30"]
    plain, ascii_only = run(*options), run(*options, env=environment)
    assert not plain.stdout.isascii(), "the control: this output has other characters"
    assert ascii_only.stdout == "".join(c if c.isascii() else "?" for c in plain.stdout)
    assert said(run(*options, "--json", env=environment).stdout) == said(run(*options, "--json").stdout)
