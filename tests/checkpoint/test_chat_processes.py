"""Processes that render chat templates: they stay, give nobody another's answer, and end with their owner."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from living import wait_until_gone

from lfm2np.checkpoint.text import chat_sandbox
from lfm2np.checkpoint.text.chat_sandbox import render_template
from lfm2np.errors import TokenizerError


def rendered(template: str) -> str:
    return render_template(template, [], {}, "chat_template.jinja")


def test_where_no_process_can_be_forked_each_rendering_starts_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chat_sandbox, "CAN_FORK", False)
    worker_that(monkeypatch, tmp_path / "w.py", "if hasattr(os, 'fork'): del os.fork")
    assert [rendered(text) for text in ("one", "two")] == ["one", "two"]
    with pytest.raises(TokenizerError, match="line 1: unexpected 'end of template'"):
        rendered("{{")
    monkeypatch.setattr(chat_sandbox, "PATIENCE", 0.5)
    with pytest.raises(TokenizerError, match=r"no end after 0\.5 seconds"):
        rendered("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    worker_that(monkeypatch, tmp_path / "w.py", "raise OSError('no library')")
    with pytest.raises(TokenizerError, match="its process ended with exit code 1: OSError: no library"):
        rendered("x")


stays = pytest.mark.skipif(not chat_sandbox.CAN_FORK, reason="processes that can't fork render once")


@pytest.mark.slow
@stays
def test_the_process_stays_and_one_that_died_is_replaced() -> None:
    assert rendered("1") == "1"
    worker = chat_sandbox._idle[-1]
    with pytest.raises(TokenizerError, match="time or memory"):
        rendered("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    assert rendered("2") == "2"
    assert chat_sandbox._idle[-1] is worker
    worker.process.kill()
    worker.process.wait()
    assert rendered("3") == "3"
    assert worker not in chat_sandbox._idle


@stays
def test_what_has_no_end_is_stopped_and_the_next_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered("1")
    worker = chat_sandbox._idle[-1]
    with monkeypatch.context() as short:
        short.setattr(chat_sandbox, "PATIENCE", 0.01)
        with pytest.raises(TokenizerError, match=r"no end after 0\.01 seconds"):
            rendered("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    assert rendered("2") == "2"
    assert chat_sandbox._idle[-1] is worker


def worker_that(monkeypatch: pytest.MonkeyPatch, path: Path, first: str, renders: str = "") -> None:
    """Does this when it starts, and before each rendering."""
    folder, hole = str(chat_sandbox.WORKER.parent), "def render(source, variables, original=chat_worker.render):\n"
    hole += textwrap.indent(f"{renders}\nreturn original(source, variables)", "    ")
    lines = ["import os, sys", first, f"sys.path.insert(0, {folder!r})", "import chat_worker"]
    path.write_text("\n".join([*lines, hole, "chat_worker.render = render", "chat_worker.main()"]))
    monkeypatch.setattr(chat_sandbox, "WORKER", path)
    monkeypatch.setattr(chat_sandbox, "_idle", [])


@stays
@pytest.mark.parametrize("end", ["\\n", ""])
def test_what_a_worker_prints_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str) -> None:
    """As site customisation may, at its start; and what fills a pipe that nobody reads."""
    other = '{"id": "of nobody", "answer": {"text": "forged"}}'
    first = f"print('welcome\\n{other}', end='{end}', flush=True); sys.stderr.write('x' * 300000)"
    worker_that(monkeypatch, tmp_path / "w.py", first, "print('to come')")
    assert [rendered(text) for text in ("one", "two", "three")] == ["one", "two", "three"]
    assert len(chat_sandbox._idle) == 1


@stays
def test_who_breaks_out_of_the_sandbox_reaches_nobody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has nothing that is open but the pipe for its own answer; what it writes there is an answer, or none."""
    holes = """
import contextlib
nothing, found = os.stat(os.devnull), []
for descriptor in range(30):
    with contextlib.suppress(OSError):
        own = os.fstat(descriptor)
        found += [descriptor] if (own.st_dev, own.st_ino) != (nothing.st_dev, nothing.st_ino) else []
if source == "count":
    return str(len(found))
if source == "escape":
    os.write(found[0], b'\\n{"id": "x", "answer": {"text": "forged"}}\\n')
"""
    worker_that(monkeypatch, tmp_path / "w.py", "", holes)
    assert rendered("count") == "1"
    with pytest.raises(TokenizerError, match="said what is no answer"):
        rendered("escape")
    assert [rendered(text) for text in ("one", "two")] == ["one", "two"]
    assert len(chat_sandbox._idle) == 1


@stays
def test_a_worker_that_dies_at_its_start_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker_that(monkeypatch, tmp_path / "w.py", "sys.stderr.write('x' * 300000); raise OSError('no library')")
    with pytest.raises(TokenizerError, match="its process ended with exit code 1: OSError: no library"):
        rendered("x")
    assert not chat_sandbox._idle


@stays
def test_an_interrupt_ends_the_process_that_renders() -> None:
    script = """
import os, signal, threading
from lfm2np.checkpoint.text import chat_sandbox as c
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in what runs in the background
c.render_template("x", [], {}, "t")
worker = c._idle[0]
threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    c.render_template("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", [], {}, "t")
except KeyboardInterrupt:
    print(worker.process.returncode, c._idle, c._workers)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("-9 [] set()\n", "")


def test_threads_get_their_own_answers() -> None:
    texts = [str(number) * 1000 for number in range(24)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(rendered, texts)) == texts
    assert len(chat_sandbox._idle) <= chat_sandbox.MOST_IDLE


LEAVES = """
import os, sys
from lfm2np.checkpoint.text import chat_sandbox
assert chat_sandbox.render_template("x", [], {}, "t") == "x"
worker = chat_sandbox._idle[0]
if sys.argv[1] == "fork" and os.fork() == 0:
    assert not chat_sandbox._idle
    assert chat_sandbox.render_template("y", [], {}, "t") == "y"
    os._exit(0)
if sys.argv[1] == "fork":
    assert os.wait()[1] == 0
    assert chat_sandbox.render_template("z", [], {}, "t") == "z" and chat_sandbox._idle == [worker]
print(worker.process.pid, flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@stays
@pytest.mark.parametrize("how", ["end", "kill", "fork"])
def test_no_process_outlives_its_owner(how: str) -> None:
    words = [sys.executable, "-W", "error", "-c", LEAVES, how]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL if how == "kill" else 0, "")
    assert wait_until_gone(int(done.stdout))
