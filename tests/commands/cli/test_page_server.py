"""The smallest server of docs/engine/2-targets.md, whose full check the page itself shows, also under `fuzz`."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lfm2np.commands.cli.program import main

pytestmark = pytest.mark.rounding

PAGE = Path(__file__).parents[3] / "docs" / "engine" / "2-targets.md"


@contextlib.contextmanager
def page_server(folder: Path, before: str = "", after: str = "") -> Iterator[str]:
    """The URL of the page's server; with a change."""
    found = re.search(r":caption: server.py\n\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None and before in found[1]
    (folder / "server.py").write_text(found[1].replace(before, after) if before else found[1])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, "server.py", str(port)], cwd=folder) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.mark.slow  # the page shows the whole check
def test_the_smallest_server_passes_what_it_refuses_and_what_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with page_server(tmp_path) as url:
        assert main(["check", url, "--cases", "stops,seeds"]) == 0
        shown = capsys.readouterr().out
        assert "EXACT" in shown and "stop strings" in shown and "seeds" in shown
        assert main(["fuzz", url, "--examples", "4", "--out", str(tmp_path / "findings")]) == 0
        assert "texts are not judged" not in capsys.readouterr().err


def test_a_server_whose_texts_are_empty_is_fuzzed_without_them_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with page_server(tmp_path, '"finish_reason"', '"text": "", "finish_reason"') as url:
        assert main(["fuzz", url, "--examples", "2", "--out", str(tmp_path / "findings")]) == 0
    assert "texts are not judged" in capsys.readouterr().err
