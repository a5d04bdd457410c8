"""The weights of a checkpoint directory: plain.py reads the files, packed/ the matrices that are quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from lfm2np.checkpoint.config_json import is_vision_language, language_config_of
from lfm2np.checkpoint.names import PREFIXES
from lfm2np.checkpoint.packed import auto, compressed, mlx
from lfm2np.checkpoint.packed.matrix_parts import with_matrices
from lfm2np.checkpoint.packed.rows import DTYPES as PACKED_DTYPES
from lfm2np.checkpoint.packed.settings import AutoSettings, CompressedSettings, MlxSettings, Settings, settings_of
from lfm2np.checkpoint.plain import selected, under_our_names
from lfm2np.checkpoint.stored import DTYPES, StoredTensor
from lfm2np.checkpoint.strict_json import is_present
from lfm2np.errors import CheckpointError, ConfigError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import layout_of
from lfm2np.truth.weights import HEAD
from lfm2np.values import plain

ALL_DTYPES = DTYPES | PACKED_DTYPES


def open_checkpoint(directory: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Name -> tensor for exactly `expected_tensors(config)`; raises CheckpointError naming the file.

    Nothing is read but headers (and a redundant tied `lm_head.weight`, which must equal the embedding). The files
    must not shrink while the views live: that is a bus error in any memory map.
    """
    try:
        settings = settings_in(directory)
        tensors, source = under_our_names(directory, config, DTYPES if settings is None else ALL_DTYPES)
        return selected(unpacked(tensors, config, settings, source), config, source)
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


def unpacked(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, settings: Settings | None, source: str
) -> dict[str, StoredTensor]:
    """Under our names; what is none of ours keeps its own. CheckpointError names the file, the tensor and the key."""
    if settings is None and not mlx.has_their_names(tensors):
        return mlx.with_our_taps(tensors, config)
    if isinstance(settings, CompressedSettings):
        ours = with_matrices(tensors, config, source, partial(compressed.read_matrix, settings=settings))
    elif isinstance(settings, AutoSettings):
        ours = with_matrices(tensors, config, source, partial(auto.read_matrix, settings=settings))
    else:
        ours = mlx.in_our_names(tensors, config, settings, source)
    known = layout_of(config).keys() | {HEAD}
    for name in sorted(ours.keys() & known):  # others are refused as unexpected
        tensor = ours[name]
        if not tensor.is_quantised and tensor.dtype not in DTYPES:
            expected = f"one of {', '.join(DTYPES)} of what is not quantised"
            raise CheckpointError(f"{tensor.source}: {plain(tensor.name)}: dtype {tensor.dtype}, expected {expected}")
    return ours
