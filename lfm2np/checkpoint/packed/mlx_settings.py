"""The key `quantization` of a config.json that mlx-lm wrote: the format of each quantised module.

Source: mlx_lm/utils.py, quantize_model, save_config and load_model; mlx.core.quantize. `quantization_config` is its
copy. A key beside the three of all modules is the path of one: an object of its own three, true (as all), or false.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lfm2np.errors import ConfigError
from lfm2np.values import plain, same, show

KEY, COPY = "quantization", "quantization_config"
GROUPS, BITS = (32, 64, 128), (1, 2, 3, 4, 5, 6, 8)  # of affine
ONE_FORM = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}  # group_size and bits
MODES = ("affine", *ONE_FORM)
OF_ALL = ("group_size", "bits", "mode")
OFF = ("quantize_input", "global_scale")  # of a module: another computation, if true


@dataclass(frozen=True)
class MlxFormat:
    """`key` is where config.json says it, for messages."""

    mode: str
    bits: int
    group_size: int
    key: str


@dataclass(frozen=True)
class MlxSettings:
    """`modules` has those that are not as `default`; None of one that is not quantised."""

    default: MlxFormat
    modules: Mapping[str, MlxFormat | None]

    def of(self, module: str) -> MlxFormat | None:
        return self.modules.get(module, self.default)


def mlx_settings(raw: Mapping[str, object]) -> MlxSettings:
    """ConfigError names the key and the value."""
    settings = raw[KEY]
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{KEY}: {show(settings)}, expected an object")
    if raw.get(COPY) is not None and raw[COPY] != settings:
        raise ConfigError(f"{COPY}: {show(raw[COPY])} contradicts {KEY}, whose copy it is in a directory of mlx-lm")
    if not any(same(raw.get("quantize_activations"), allowed) for allowed in (None, False)):
        raise ConfigError(
            f"quantize_activations: {show(raw['quantize_activations'])} is not implemented, expected false or no key"
        )
    default = _format({name: settings[name] for name in OF_ALL if name in settings}, KEY)
    modules: dict[str, MlxFormat | None] = {}
    for path, value in settings.items():
        key = f"{KEY}.{show(path)}"
        if path in OF_ALL or value is True:
            continue
        if value is not False and not isinstance(value, Mapping):
            raise ConfigError(f"{key}: {show(value)}, expected an object, true or false for a module")
        modules[path] = None if value is False else _format(value, key)
    return MlxSettings(default, modules)


def _format(told: Mapping[str, object], key: str) -> MlxFormat:
    for name in told:
        if name not in OF_ALL and not (name in OFF and told[name] is False):
            raise ConfigError(
                f"{key}.{plain(name)}: {show(told[name])} is not implemented, expected {', '.join(OF_ALL)}"
            )
    mode, bits, size = told.get("mode", "affine"), told.get("bits"), told.get("group_size")
    if mode not in MODES or not isinstance(mode, str):
        raise ConfigError(f"{key}.mode: {show(mode)} is not implemented, expected one of {', '.join(MODES)}")
    one = ONE_FORM.get(mode)
    for name, value, allowed in (
        ("bits", bits, BITS if one is None else one[1:]),
        ("group_size", size, GROUPS if one is None else one[:1]),
    ):
        if type(value) is not int or value not in allowed:
            listed = ", ".join(map(str, allowed))
            raise ConfigError(f"{key}.{name}: {show(value)}, expected {'one of ' * (not one)}{listed} of mode {mode}")
    assert isinstance(bits, int) and isinstance(size, int)
    return MlxFormat(mode, bits, size, key)
