"""The smallest server of docs/engine/2-targets.md, whose whole check the page itself shows, under `fuzz`."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lfm2np.commands.cli.program import main

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "engine" / "2-targets.md"


@pytest.mark.rounding
def test_a_server_whose_texts_are_empty_is_fuzzed_without_them_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r":caption: server.py\n\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None and '"finish_reason"' in found[1]
    (tmp_path / "server.py").write_text(found[1].replace('"finish_reason"', '"text": "", "finish_reason"'))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, "server.py", str(port)], cwd=tmp_path) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1):
                    break
                time.sleep(0.1)
            url = f"http://127.0.0.1:{port}"
            assert main(["fuzz", url, "--examples", "2", "--output", str(tmp_path / "findings")]) == 0
        finally:
            process.kill()
    assert "texts are not judged" in capsys.readouterr().err
