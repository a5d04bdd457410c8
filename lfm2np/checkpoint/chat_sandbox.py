"""A checkpoint's chat template, rendered in a child process that can do little harm: see chat_worker.py."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lfm2np.errors import TokenizerError

WORKER = Path(__file__).with_name("chat_worker.py")
PATIENCE = 30  # seconds of waiting; the worker's own limit is on processor time
OLDEST_JINJA = (3, 1, 6)  # before it, the sandbox has known escapes; transformers refuses it too


def render_template(
    source: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str], name: str
) -> str:
    """The template's output for a conversation with add_generation_prompt; TokenizerError naming the file otherwise."""
    version = importlib.metadata.version("jinja2")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < OLDEST_JINJA:
        raise TokenizerError(f"jinja2 {version}: its sandbox has known escapes, expected at least 3.1.6")
    variables: dict[str, object] = {**special_tokens, "messages": [dict(message) for message in messages]}
    variables |= {"tools": None, "documents": None, "add_generation_prompt": True}
    answer = _ask_worker({"template": source, "variables": variables})
    if "text" not in answer:
        raise TokenizerError(f"{name}: the chat template failed: {answer['error']}")
    return answer["text"]


def _ask_worker(request: Mapping[str, object]) -> dict[str, str]:
    """The worker's answer, or an error in its place if it was stopped."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(WORKER)],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=PATIENCE,
            check=False,
            start_new_session=True,  # an interrupt from the terminal is this process's, which may want the answer still
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {PATIENCE} seconds"}
    except OSError as problem:
        return {"error": f"its process can't be started: {problem}"}
    if done.returncode != 0:
        last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        if done.returncode < 0 or "MemoryError" in last_line:
            return {"error": f"it was stopped for the time or memory it used (exit code {done.returncode})"}
        return {"error": f"its process ended with exit code {done.returncode}: {last_line}"}
    answer: dict[str, str] = json.loads(done.stdout)
    return answer
