"""What config.json says about quantised tensors: by which program they were written, and in which formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lfm2np.checkpoint.packed import mlx_settings
from lfm2np.checkpoint.packed.mlx_settings import MlxSettings
from lfm2np.checkpoint.strict_json import is_present, read_object
from lfm2np.errors import ConfigError
from lfm2np.values import show

Settings = MlxSettings
OLD_KEY = "compression_config"  # as compressed-tensors once called quantization_config
KEYS = (mlx_settings.KEY, mlx_settings.COPY, OLD_KEY)


def settings_of(raw: Mapping[str, object], source: str) -> Settings | None:
    """None of a checkpoint that says nothing. ConfigError names the file, the key and the value."""
    try:
        if raw.get(mlx_settings.KEY) is not None:
            if raw.get(OLD_KEY) is not None:
                raise ConfigError(
                    f"{OLD_KEY}: {show(raw[OLD_KEY])} contradicts {mlx_settings.KEY}, expected one of them"
                )
            return mlx_settings.mlx_settings(raw)
        for key in KEYS:
            if raw.get(key) is not None:
                raise ConfigError(f"{key}: {show(raw[key])} is not implemented")
    except ConfigError as problem:
        raise ConfigError(f"{source}: {problem}") from None
    return None


def settings_in(directory: Path) -> Settings | None:
    """None also where there is no config.json: then its ModelConfig is from elsewhere."""
    path = directory / "config.json"
    return settings_of(read_object(path, ConfigError), str(path)) if is_present(path, ConfigError) else None


def without_settings(raw: Mapping[str, object], source: str) -> dict[str, object]:
    """What is left for the ModelConfig, once all that stands under KEYS was found to be implemented."""
    settings_of(raw, source)
    return {key: value for key, value in raw.items() if key not in KEYS}
