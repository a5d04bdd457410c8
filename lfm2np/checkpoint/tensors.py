"""The weights of a checkpoint directory: plain.py reads the files, packed/ the matrices that are quantised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from lfm2np.checkpoint.config_json import is_vision_language, language_config_of
from lfm2np.checkpoint.names import PREFIXES
from lfm2np.checkpoint.packed import auto, compressed, mlx
from lfm2np.checkpoint.packed.matrix_parts import modules, with_matrices
from lfm2np.checkpoint.packed.settings import AutoSettings, CompressedSettings, MlxSettings, Settings, settings_of
from lfm2np.checkpoint.plain import language_part, selected
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.strict_json import is_present
from lfm2np.errors import CheckpointError, ConfigError
from lfm2np.truth.config import ModelConfig

READERS: dict[type[Settings], Callable[..., StoredTensor | None]] = {
    MlxSettings: mlx.read_matrix,
    CompressedSettings: compressed.read_matrix,
    AutoSettings: auto.read_matrix,
}


def open_checkpoint(directory: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Name -> tensor for exactly `expected_tensors(config)`; raises CheckpointError naming the file.

    Nothing is read but headers (and a redundant tied `lm_head.weight`, which must equal the embedding). The files
    must not shrink while the views live: that is a bus error in any memory map.
    """
    try:
        settings = settings_in(directory)
        tensors, source = language_part(directory)
        if isinstance(settings, MlxSettings):
            mlx.require_modules(tensors, config, settings, source)
        if settings is not None:
            read = partial(READERS[type(settings)], settings=settings)
            tensors = with_matrices(tensors, source, config, read)
        return selected(tensors, config, source)
    except OSError as problem:
        raise CheckpointError(f"{directory}: cannot be read: {problem}") from None


def settings_in(directory: Path) -> Settings | None:
    """How matrices are quantised; None also where there is no config.json: then its ModelConfig is from elsewhere.

    Of a model that also sees, what is said of its language model; modules have the file's names, with its prefix.
    """
    path = directory / "config.json"
    if not is_present(path, ConfigError):
        return None
    settings = settings_of(language_config_of(path), str(path))
    if isinstance(settings, MlxSettings) and is_vision_language(directory):
        kept = {name: form for name, form in settings.modules.items() if f"{name}.".startswith(tuple(PREFIXES))}
        return replace(settings, modules=kept)
    return settings


def input_roundings(path: Path, config: ModelConfig) -> dict[str, compressed.InputRounding]:
    """By our name of a product's weights; empty of a checkpoint that does not say so, as all other kinds.

    Products that an engine makes one of several (q, k, v) may have different static scales: vLLM takes the largest.
    ConfigError or CheckpointError names the file.
    """
    settings = settings_in(path) if path.is_dir() else None
    if not isinstance(settings, CompressedSettings) or not any(scheme.inputs for scheme in settings.schemes):
        return {}
    roundings = {}
    for name, parts, _ in modules(*language_part(path), config):
        scheme = settings.of(parts.names, compressed.class_of(parts.name))
        if scheme is not None and scheme.inputs is not None and "weight_scale" in parts:
            roundings[name] = compressed.rounding_of_inputs(parts, scheme.inputs)
    return roundings
