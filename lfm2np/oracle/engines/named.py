"""TARGET of the command line, and the engine of lfm2np.check, as what answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.exec_target import ExecTarget
from lfm2np.oracle.engines.http_target import HttpTarget
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.target import Target
from lfm2np.oracle.engines.transformers_target import TransformersTarget
from lfm2np.values import show

PADDED = "padded:"
TRANSFORMERS = "transformers"


def target_named(
    text: str,
    model: Path,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    computed_in: str,
    model_name: str | None = None,
    at_once: int | None = None,
    timeout: float = 60.0,
    sizes: Mapping[str, Any] | None = None,
    chat: bool = False,
) -> Target:
    """RequestError for a text of no known form.

    model        checkpoint for a factory or a process; servers need none
    computed_in  the number format of transformers
    chat         a server's chat completions are meant
    sizes        hints for a factory, by the names of protocol.SIZES
    """
    if chat and not str(text).startswith("http"):
        raise RequestError(f"target {show(text)}: expected http(s)://HOST:PORT for a chat")
    kind, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind in ("http", "https"):
        return HttpTarget(text, tokenizer, model_name, at_once, timeout, chat=chat)
    if kind == "exec":
        return ExecTarget(rest, model, vocab_size, timeout)
    if kind == TRANSFORMERS:
        directory = rest.removeprefix(PADDED)
        path = checkpoint_path(directory) if directory else model
        return TransformersTarget(path, computed_in, rest.startswith(PADDED))
    if kind and re.fullmatch(r"[\w.]+:[^\W\d][\w.]*", text):
        return PythonTarget(text, model, sizes, at_once)
    expected = "http://HOST:PORT, package.module:factory, transformers:, exec:COMMAND or, for check and vet, FILE.jsonl"
    raise RequestError(f"target {show(text)}: expected {expected}")
