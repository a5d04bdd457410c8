"""A checkpoint of either form, a directory in the Hugging Face format or a GGUF file: config, tensors, files, hash."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.gguf.container import open_container
from lfm2np.checkpoint.gguf.gguf_config import config_of
from lfm2np.checkpoint.gguf.names import named_tensors
from lfm2np.checkpoint.gguf.vocabulary import chat_of, has_tables, template_of, tokenizer_json
from lfm2np.checkpoint.plain import INDEX, SINGLE, read_weight_map
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.strict_json import is_present
from lfm2np.checkpoint.tensors import open_checkpoint, settings_in
from lfm2np.checkpoint.text.tokenizer import TOKENIZER, Tokenizer, load_tokenizer
from lfm2np.errors import CheckpointError, TokenizerError
from lfm2np.truth.config import ModelConfig

GGUF = ".gguf"


def is_gguf(path: Path) -> bool:
    """By its name; whether it is there, and what is in it, shows when it is read."""
    return path.suffix == GGUF and not path.is_dir()


def directory_of(path: Path) -> Path:
    """Where tokenizer.json and the like stand: in the directory, or beside the file."""
    return path.parent if is_gguf(path) else path


def read_config(path: Path, rope: str = "trained") -> ModelConfig:
    """ConfigError or CheckpointError names the file. `rope`: see load_config."""
    if is_gguf(path):
        return config_of(open_container(path))
    settings_in(path)  # refused here, too, if nobody can read them
    return load_config(path, rope)


def read_tensors(path: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Name -> tensor for exactly `expected_tensors(config)`; CheckpointError names the file."""
    return named_tensors(open_container(path), config) if is_gguf(path) else open_checkpoint(path, config)


def has_tokenizer(path: Path, named: Path | None = None) -> bool:
    """Whether there is one; it is read, and may turn out corrupt, by `read_tokenizer`. `named`: see there."""
    if named is not None or is_present(directory_of(path) / TOKENIZER, TokenizerError):
        return True
    return is_gguf(path) and has_tables(open_container(path))


def read_tokenizer(path: Path, config: ModelConfig, named: Path | None = None) -> Tokenizer:
    """That of the directory `named`, else the tokenizer.json in the directory or beside the file, else the GGUF's own.

    Where such a directory has no chat template, the GGUF's is taken. TokenizerError names the file.
    """
    container = open_container(path) if is_gguf(path) else None
    directory = directory_of(path) if named is None else named
    if container is None or named is not None or is_present(directory / TOKENIZER, TokenizerError):
        tokenizer = load_tokenizer(directory, config)
        if container is not None and tokenizer.chat.template is None and (template := template_of(container)):
            tokenizer.chat = replace(tokenizer.chat, template=template[0], source=template[1])
        return tokenizer
    if not has_tables(container):
        raise TokenizerError(
            f"{path}: no tables of a tokenizer in it and no {TOKENIZER} beside it; name a directory that has one"
        )
    tokenizer = Tokenizer(tokenizer_json(container, config).encode(), config, str(path))
    tokenizer.chat = chat_of(container, config, tokenizer.token)
    return tokenizer


def tokenizer_place(named: str | Path | None) -> Path | None:
    """The directory that was named for its tokenizer.json; TokenizerError if it has none."""
    place = None if named is None else Path(named)
    if place is not None and not is_present(place / TOKENIZER, TokenizerError):
        raise TokenizerError(f"{place}: has no {TOKENIZER}, expected the directory of a tokenizer")
    return place


def config_file(path: Path) -> Path:
    """What says the config: config.json, or the GGUF itself."""
    return path if is_gguf(path) else path / "config.json"


def weight_files(path: Path) -> list[str]:
    """The GGUF; or as plain.py chooses them: the single file, else the index and its shards."""
    if is_gguf(path):
        return [path.name]
    if is_present(path / SINGLE, CheckpointError):
        return [SINGLE]
    return [INDEX, *sorted(set(read_weight_map(path / INDEX).values()))]


def file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be read: {problem}") from None


def checkpoint_sha256(path: Path) -> str:
    """SHA-256, in hex, of config.json and the weight files: of one line "SHA-256  name" each, as sha256sum has them."""
    names = weight_files(path) if is_gguf(path) else ["config.json", *weight_files(path)]
    lines = "".join(f"{file_sha256(directory_of(path) / name)}  {name}\n" for name in names)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()  # a name is bytes
