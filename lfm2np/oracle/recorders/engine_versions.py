"""What recorders share: they require no older version of the engine than they were run with, since they depend on its
internals, and valid requests; and they run between an engine's functions and those who call them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lfm2np.checkpoint.files import is_gguf
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.target import TargetError
from lfm2np.truth.config import ModelConfig


def require_version(package: str, known: Sequence[str], installed: str | None = None) -> None:
    """TargetError if a package is missing, or older than the versions that the recorder was run with (`known`, the
    newest last); a warning if it is newer.

    installed  its version, if the package itself says it; else as it was installed
    """
    try:
        installed = installed or version(package)
    except PackageNotFoundError:
        raise TargetError(f"{package}: not installed, expected {package}=={known[-1]}") from None
    if installed.partition("+")[0] in known:
        return
    if release(installed) <= release(known[-1]):
        raise TargetError(f"{package}: version {installed}, expected {' or '.join(known)}, or newer")
    warnings.warn(
        f"{package}: version {installed} is newer than {known[-1]}, which it was last recorded with: if its operations "
        f"have other names now, the dump holds fewer of them; install {package}=={known[-1]} to be sure",
        stacklevel=3,
    )


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what marks a build or a pre-release."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in leading[0].split(".")) if leading else ()


def require_request(prompts: Sequence[Sequence[int]], request: int, max_tokens: int, config: ModelConfig) -> None:
    """RequestError for what no engine can run, before one returns nonsense or ends the process."""
    if not 0 <= request < len(prompts):
        raise RequestError(f"request {request}: expected one of {len(prompts)}, from 0 on")
    if max_tokens < 1:
        raise RequestError(f"max_tokens {max_tokens}: expected at least 1")
    most = config.max_position_embeddings
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise RequestError(f"prompt {number}: empty, expected at least one token")
        wrong = [token_id for token_id in prompt if not 0 <= token_id < config.vocab_size]
        if wrong:
            raise RequestError(f"prompt {number}: token {wrong[0]}, expected ids below vocab_size={config.vocab_size}")
        if len(prompt) + max_tokens > most:
            tokens = f"{len(prompt)} tokens and {max_tokens} new ones"
            raise RequestError(f"prompt {number}: {tokens}, expected at most max_position_embeddings={most}")


def require_model_type(config: ModelConfig, engine: str, known: Sequence[str] = ("lfm2",)) -> None:
    """RequestError for a model whose operations are not recorded there yet: its dump would name other tensors."""
    if config.model_type not in known:
        raise RequestError(
            f"{engine}: a model of type {config.model_type} can't be recorded there, expected {' or '.join(known)}"
        )


def require_directory(path: Path, engine: str) -> Path:
    """RequestError for a GGUF file, for engines that run checkpoint directories. (transformers reads some such files,
    but widens all weights to float32: that is what `lfm2np:float32` does.)
    """
    if is_gguf(path):
        raise RequestError(f"{path}: {engine} is recorded of a checkpoint directory, not of a GGUF file ({engine}:DIR)")
    return path


def require_format(format: str, known: Sequence[str]) -> None:
    if format not in known:
        raise RequestError(f"format {format!r}: expected one of {', '.join(known)}")


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> Any:
    """A context manager: while it lasts, owner.name(...) is wrapper(original, ...)."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        return wrapper(original, *arguments, **options)

    return patch.object(owner, name, wrapped)
