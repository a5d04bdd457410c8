"""What config.json says about quantised tensors: by which program they were written, and in which formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from lfm2np.checkpoint.packed import mlx_settings
from lfm2np.checkpoint.packed.auto_settings import AutoSettings, awq_settings, gptq_settings
from lfm2np.checkpoint.packed.compressed_settings import METHOD, CompressedSettings, compressed_settings
from lfm2np.checkpoint.packed.mlx_settings import MlxSettings
from lfm2np.checkpoint.strict_json import is_present, read_object
from lfm2np.errors import ConfigError
from lfm2np.values import show

Settings = MlxSettings | CompressedSettings | AutoSettings
METHODS: dict[str, Callable[[Mapping[str, object]], Settings]] = {  # by quant_method
    METHOD: compressed_settings,
    "gptq": gptq_settings,
    "awq": awq_settings,
}
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
        return _of_method(raw)
    except ConfigError as problem:
        raise ConfigError(f"{source}: {problem}") from None


def _of_method(raw: Mapping[str, object]) -> Settings | None:
    found = [key for key in KEYS if raw.get(key) is not None]
    if not found:
        return None
    key, settings = found[0], raw[found[0]]
    if len(found) > 1 and raw[found[1]] != settings:
        raise ConfigError(f"{found[1]}: {show(raw[found[1]])} contradicts {key}, expected one of them")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if not isinstance(settings, Mapping) or not isinstance(method, str) or method not in METHODS:
        shown = show(settings) if method is None else f"quant_method {show(method)}"
        raise ConfigError(f"{key}: {shown} is not implemented, expected a quant_method of {', '.join(METHODS)}")
    try:
        return METHODS[method](settings)
    except ConfigError as problem:
        raise ConfigError(f"{key}.{problem}") from None


def settings_in(directory: Path) -> Settings | None:
    """None also where there is no config.json: then its ModelConfig is from elsewhere."""
    path = directory / "config.json"
    return settings_of(read_object(path, ConfigError), str(path)) if is_present(path, ConfigError) else None


def without_settings(raw: Mapping[str, object], source: str) -> dict[str, object]:
    """What is left for the ModelConfig, once all that stands under KEYS was found to be implemented."""
    settings_of(raw, source)
    return {key: value for key, value in raw.items() if key not in KEYS}
