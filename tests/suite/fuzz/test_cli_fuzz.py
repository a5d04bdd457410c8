"""`lfm2np fuzz` as people and scripts see it, against servers that are processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from faults import inject
from served_here import folder, serving

from lfm2np.commands.cli import main
from lfm2np.commands.cli.shared.terminal import command_line
from lfm2np.engine.loading import Model
from lfm2np.oracle.engines.records import Answer
from lfm2np.oracle.engines.target import TargetError
from lfm2np.suite.adapters import Own, own
from lfm2np.suite.fuzz import campaign, started
from lfm2np.suite.fuzz.campaign import Campaign
from lfm2np.suite.fuzz.sizes import GENERATING
from lfm2np.suite.fuzz.started import StartedServer

pytestmark = [pytest.mark.rounding, pytest.mark.slow]
FIXTURES = Path(__file__).parents[3] / "fixtures"
OWN = "lfm2np.suite.adapters:own"
SMALL = ("--block-size", "4", "--max-num-batched-tokens", "16", "--max-num-seqs", "2", "--max-model-len", "28")
KEYS = {"engine", "format", "why_format", "traces", "replays", "requests", "tokens", "seconds", "sizes", "assumed"}
ROW = {"folder", "failed", "replays", "requests", "tokens", "drawn_requests", "drawn_tokens", "traces", "same_tokens"}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a folder of its own, with as few replays as tell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(campaign, "FIRST_REPLAYS", 1)
    monkeypatch.setattr(campaign, "LAST_REPLAYS", 2)


@pytest.fixture
def port() -> Iterator[int]:
    """Kept from others by a socket that does not listen, beside which a server that is started may bind it."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        number = kept.getsockname()[1]
        if sys.platform != "linux":  # where nothing binds beside it
            kept.close()
        yield number


@contextlib.contextmanager
def served_process(*arguments: str) -> Iterator[str]:
    command = [sys.executable, str(FIXTURES / "served.py"), "--model", str(folder()), "--numerics", "exact", *arguments]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def run(*arguments: str) -> int:
    return main(["fuzz", *arguments, "--model", str(folder())])


TOO_FAR = '{"requests": [{"prompt_token_ids": [300], "max_tokens": 1}]}'


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ftp://x"], "ftp"),
        (["http://127.0.0.1:1"], "127.0.0.1:1"),
        (["no.module:factory"], "no.module:factory"),
        ([OWN, "--examples", "0"], "--examples 0: expected at least 1"),
        ([OWN, "--without", "aborted,stops"], "--without 'stops': expected some of aborted, cold,"),
        ([OWN, "--minutes", "0"], "--minutes 0.0: expected more than 0"),
        ([OWN, "--start-seconds", "10"], "--start-seconds: only with --start"),
        (["http://127.0.0.1:1", "--start", "x", "--start-seconds", "0"], "--start-seconds 0.0"),
        ([OWN, "--name", "x"], "--name: only with a server as TARGET"),
        ([OWN, "--shrink-minutes", "-1"], "--shrink-minutes -1.0: expected at least 0"),
        ([OWN, "--max-model-len", "3"], "--max-model-len 3: expected at least 4"),
        ([OWN, "--max-model-len", "129"], "--max-model-len 129: expected at most 128: max_position_embeddings"),
        ([OWN, "--start", "x"], "--start: expected a server as TARGET"),
        (["http://127.0.0.1:1", "--start", ""], "--start: expected a command"),
        (["http://127.0.0.1:1", "--start", "'"], "--start"),
        (["http://127.0.0.1:1", "--start", "/no/such/program"], "--start /no/such/program: No such file or directory"),
        ([OWN, "--replay", "none.json"], "none.json"),
        *(
            ([OWN, "--replay", "far.json", name, "3"], f"{name}: not with --replay, which generates nothing")
            for name in ("--examples", "--minutes", "--seed", "--findings")
        ),
        ([OWN, "--replay", "far.json"], "requests[0].prompt_token_ids: token 300, expected ids below vocab_size=300"),
        (["failing_engine:make"], "TargetError: failing_engine:make: ValueError: no memory"),
        ([OWN, "--output", "/dev/null/x"], "/dev/null/x: /dev/null is no folder"),
        ([OWN, "--output", "/proc/x"], "/proc/x: /proc can't be written to: "),  # also by root, who has access
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_3(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started, "GRACE", 0.1)
    Path("far.json").write_text(TOO_FAR)
    Path("failing_engine.py").write_text("def make(model, sizes):\n    raise ValueError('no memory')\n")
    code = run(*arguments)
    captured = capsys.readouterr()
    assert (code, captured.out) == (3, "")
    assert captured.err.startswith("lfm2np") and captured.err.count("\n") == 1 and told in captured.err


def test_the_command_that_replays_a_finding_has_no_option_that_it_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["lfm2np", "fuzz", OWN, "--examples", "9", "--replay=a", "--seed=3", "--findings", "2", "--without", "text"]
    monkeypatch.setattr(sys, "argv", words)
    left_out = {f"--{name}" for name in ("replay", *GENERATING)}
    assert command_line(left_out) == f"lfm2np fuzz {OWN} --without text"
    assert command_line() == " ".join(words)


def test_an_engine_that_reports_no_tokens_is_inconclusive(capsys: pytest.CaptureFixture[str]) -> None:
    def text_only(handler: Any) -> bool:
        body = b"{}"
        if handler.command == "POST":
            fields = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
            if isinstance(fields.get("prompt"), str):
                body = b'{"choices": [{"text": "x", "finish_reason": "length"}]}'
        handler.send(200, body, "application/json")
        return True

    with serving() as here:
        here.trouble = text_only
        assert run(here.url, "--examples", "1") == 2
    assert "does not report token ids" in capsys.readouterr().err


def test_a_right_engine_ends_with_0_and_leaves_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(OWN, *SMALL, "--examples", "5") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("verdict    no finding\n") and "played     5 traces and 0 replays" in printed
    assert "max_num_batched_tokens 16 (given), " in printed and "not tested" not in printed
    assert list(tmp_path.iterdir()) == []


def one_line(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    code = run(*arguments, "--json")
    return code, json.loads(capsys.readouterr().out)


def script(path: Path, url: str) -> int:
    (path.parent / "empty").mkdir(exist_ok=True)
    command = [sys.executable, "-I", str(path), url]
    return subprocess.run(command, capture_output=True, cwd=path.parent / "empty", check=False).returncode


@pytest.mark.night
def test_a_fault_in_a_server_is_found_shrunk_handed_over_and_shown_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with served_process("--fault", "rotation-backwards") as url:
        code, report = one_line(url, *SMALL, "--examples", "50", "--output", "found", capsys=capsys)
        assert code == 1 and set(report["figures"]) == KEYS
        (finding,) = report["findings"]
        row = finding["evidence"]
        assert set(row) == ROW | {"seconds", "shrinking_seconds"}
        assert (finding["kind"], row["requests"], row["failed"], row["replays"]) == ("wrong", 1, 2, 2)
        assert row["folder"] == str(Path("found") / "wrong-1")
        directory = tmp_path / "found" / "wrong-1"
        names = ["issue.md", "report.html", "reproduce.py", "trace.json"]
        assert sorted(path.name for path in directory.iterdir()) == names
        assert script(directory / "reproduce.py", url) == 1
        again = ("--replay", str(directory / "trace.json"), "--output", "again")
        code, report = one_line(url, *SMALL, *again, capsys=capsys)
        assert (code, report["figures"]["traces"], report["findings"][0]["kind"]) == (1, 1, "wrong")
        code, report = one_line(url, *SMALL, "--examples", "50", "--output", "found", capsys=capsys)
        assert (code, report["figures"]["traces"]) == (1, 1)  # the earlier failure comes first
    with serving() as here:
        assert script(directory / "reproduce.py", here.url) == 0
        code, report = one_line(here.url, *SMALL, *again, capsys=capsys)
        assert (code, report["figures"]["traces"], report["findings"]) == (0, 10, [])
    assert script(directory / "reproduce.py", url) == 2
    assert run(url, *again) == 3
    capsys.readouterr()


def test_an_interrupt_while_shrinking_keeps_what_was_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Campaign.replay

    def replay(self: Campaign, *arguments: Any) -> Any:
        if self.counts.replays == 3:
            raise KeyboardInterrupt
        return play(self, *arguments)

    monkeypatch.setattr(Campaign, "replay", replay)
    with inject("convolution-crosses-requests"):
        assert run(OWN, *SMALL, "--output", "found") == 130
    captured = capsys.readouterr()
    directory = tmp_path / "found" / "wrong-1"
    assert sorted(path.name for path in directory.iterdir()) == ["issue.md", "report.html", "trace.json"]
    assert captured.out.startswith("verdict    1 finding\n") and str(directory.relative_to(tmp_path)) in captured.out
    assert captured.err.endswith("lfm2np: interrupted\n") and "lfm2np: found: " in captured.err


DYING = """
import os, sys
sys.path.insert(0, {fixtures!r})
import served
params_of = served.params_of
def dying(fields):
    if len(fields["prompt"]) > 8:
        os._exit(7)
    return params_of(fields)
served.params_of = dying
served.main()
"""


@pytest.mark.night
def test_a_server_that_dies_is_started_anew(capsys: pytest.CaptureFixture[str], tmp_path: Path, port: int) -> None:
    (tmp_path / "dying.py").write_text(DYING.format(fixtures=str(FIXTURES)))
    start = f"{sys.executable} dying.py --model {folder()} --numerics exact --port {port}"
    url = f"http://127.0.0.1:{port}"
    code, report = one_line(url, *SMALL, "--shrink-minutes", "0", "--start", start, capsys=capsys)
    (finding,) = report["findings"]
    row = finding["evidence"]
    assert (code, finding["kind"], row["failed"], row["replays"]) == (1, "dead", 2, 2)
    text = (tmp_path / row["folder"] / "issue.md").read_text()
    assert "# The server is gone.\n" in text and "on an engine that had just been started" in text
    assert not is_up(port)  # it was ended


# Sizes that nobody gave


def test_a_run_without_a_finding_warns_of_sizes_that_were_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(OWN, "--examples", "2") == 0
    verdict, *_, sizes, not_tested = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert "max_num_batched_tokens 64 (assumed)" in sizes
    assert verdict == "verdict    no finding" and not_tested.startswith("not tested ")
    assert "assumed: give --block-size, --max-num-batched-tokens" in not_tested


class Heeds(Own):
    """Makes itself in the sizes of its hints, and reports them."""

    def __init__(self, model: Model, sizes: dict[str, Any]) -> None:
        super().__init__(model, sizes)
        self.sizes = {name: sizes[name] for name in ("block_size", "max_num_batched_tokens", "max_num_seqs")}


class Reports(Own):
    sizes: ClassVar = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 2, "max_model_len": 28}


LENGTH = ", max_model_len 128 (the model's)"
REPORTED: dict[str, tuple[type[Own], tuple[str, ...], str]] = {
    "sizes of its own": (Reports, (), ", ".join(f"{name} {size} (reported)" for name, size in Reports.sizes.items())),
    "those of its hints": (
        Heeds,
        (),
        f"block_size 16 (reported), max_num_batched_tokens 64 (reported), max_num_seqs 8 (reported){LENGTH}",
    ),
    "those of its hints, one given": (
        Heeds,
        ("--max-num-batched-tokens", "32"),
        f"block_size 16 (reported), max_num_batched_tokens 32 (given), max_num_seqs 8 (reported){LENGTH}",
    ),
}


@pytest.mark.parametrize("name", REPORTED)
def test_sizes_that_an_engine_reports_are_not_assumed_and_what_is_assumed_are_its_hints(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned: chunks of 512, which most prompts of a small model do not fill."""
    engine, options, expected = REPORTED[name]
    monkeypatch.setattr("lfm2np.suite.adapters.Own", engine)
    code, report = one_line(OWN, "--examples", "1", *options, capsys=capsys)
    assert (code, report["figures"]["assumed"], report["facts"]["sizes"]) == (0, [], expected)
    assert list(map(str, report["figures"]["sizes"].values())) == re.findall(r"\d+", expected)


class Silent:
    """Reports no log-probabilities."""

    lacks = frozenset({"sampling", "samples", "processors", "stops", "logprobs"})

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        self.inner = own(model, sizes)

    def generate(self, requests: Any) -> list[list[Answer]]:
        return [[Answer(answer.token_ids, finish_reason="length")] for (answer,) in self.inner.generate(requests)]


def test_without_log_probabilities_the_report_says_that_only_tokens_were_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("test_cli_fuzz:Silent", *SMALL, "--examples", "2", "--without", "text") == 0
    assert "not tested tokens only: no log-probabilities were reported" in capsys.readouterr().out


@pytest.mark.night
def test_a_stale_state_after_preemption_is_found_without_any_option(capsys: pytest.CaptureFixture[str]) -> None:
    """24 traces around blocks of 16 and chunks of 512 alone had not found it."""
    assert main(["fuzz", "stale_engine:factory", "--examples", "24", "--shrink-minutes", "0", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    row = finding["evidence"]
    assert (finding["kind"], row["failed"]) == ("wrong", 2)
    assert main(["fuzz", "stale_engine:right", "--examples", str(row["traces"]), "--output", "right"]) == 0


# The process of --start


STUB = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def stub(tmp_path: Path, port: int) -> StartedServer:
    (tmp_path / "stub.py").write_text(STUB)
    return StartedServer(f"{sys.executable} -S stub.py {port}", lambda: is_up(port), 30.0)


def is_up(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_is_started_ended_and_started_again(tmp_path: Path, port: int) -> None:
    server = stub(tmp_path, port)
    server.start()
    first = server._process
    assert first is not None and is_up(port) and 0 < server.took < 30
    os.kill(first.pid, signal.SIGKILL)
    server.start()
    assert server._process is not None and server._process.pid != first.pid and is_up(port)
    server.start()
    assert is_up(port)
    server.close()
    server.close()
    assert not is_up(port)


def test_somebody_else_on_its_port_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started, "GRACE", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = stub(tmp_path, other.getsockname()[1])
        with pytest.raises(TargetError, match="another server answers there already"):
            server.start()
        assert server._process is None


def test_a_server_that_ends_or_never_answers_is_reported(tmp_path: Path) -> None:
    ends = StartedServer(f"{sys.executable} -S -c 'raise SystemExit(5)'", lambda: False, 30.0)
    with pytest.raises(TargetError, match="it ended with 5 before it answered"):
        ends.start()
    silent = StartedServer(f"{sys.executable} -S -c 'import time; time.sleep(600)'", lambda: False, 0.05)
    with pytest.raises(TargetError, match=r"no answer within 0\.05 s"):
        silent.start()
    assert silent._process is None
