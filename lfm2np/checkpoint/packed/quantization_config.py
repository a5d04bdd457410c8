"""What config.json says about quantised tensors: by which program they were written, and in which formats.

mlx-lm writes the key `quantization`, the format of each quantised module, and `quantization_config`, its copy. A key
beside the three of all modules is the path of one: an object of its own three, true (as all), or false. Source:
mlx_lm/utils.py, quantize_model, save_config and load_model; mlx.core.quantize.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lfm2np.checkpoint.packed.auto import AutoSettings, awq_settings, gptq_settings
from lfm2np.checkpoint.packed.compressed_settings import METHOD, CompressedSettings, compressed_settings
from lfm2np.checkpoint.strict_json import naming, require_done
from lfm2np.errors import ConfigError
from lfm2np.values import plain, show_json

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

    def of(self, names: tuple[str, ...]) -> tuple[str | None, MlxFormat | None]:
        """Which of a module's names has settings of its own, if any, and its format."""
        key = next((name for name in names if name in self.modules), None)
        return key, self.default if key is None else self.modules[key]


def mlx_settings(raw: Mapping[str, object]) -> MlxSettings:
    """ConfigError names the key and the value."""
    settings = raw[KEY]
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{KEY}: {show_json(settings)}, expected an object")
    if raw.get(COPY) is not None and raw[COPY] != settings:
        raise ConfigError(
            f"{COPY}: {show_json(raw[COPY])} contradicts {KEY}, whose copy it is in a directory of mlx-lm"
        )
    activations = raw.get("quantize_activations")
    require_done(activations is None or activations is False, "quantize_activations", activations, "false or no key")
    default = _format({name: settings[name] for name in OF_ALL if name in settings}, KEY)
    modules: dict[str, MlxFormat | None] = {}
    for path, value in settings.items():
        key = f"{KEY}.{show_json(path)}"
        if path in OF_ALL or value is True:
            continue
        if value is not False and not isinstance(value, Mapping):
            raise ConfigError(f"{key}: {show_json(value)}, expected an object, true or false for a module")
        modules[path] = None if value is False else _format(value, key)
    return MlxSettings(default, modules)


def _format(raw: Mapping[str, object], key: str) -> MlxFormat:
    for name in raw:
        is_done = name in OF_ALL or (name in OFF and raw[name] is False)
        require_done(is_done, f"{key}.{plain(name)}", raw[name], ", ".join(OF_ALL))
    mode, bits, size = raw.get("mode", "affine"), raw.get("bits"), raw.get("group_size")
    if mode not in MODES or not isinstance(mode, str):
        raise ConfigError(f"{key}.mode: {show_json(mode)} is not implemented, expected one of {', '.join(MODES)}")
    only_form = ONE_FORM.get(mode)
    for name, value, allowed in (
        ("bits", bits, BITS if only_form is None else only_form[1:]),
        ("group_size", size, GROUPS if only_form is None else only_form[:1]),
    ):
        if type(value) is not int or value not in allowed:
            listed = ", ".join(map(str, allowed))
            raise ConfigError(
                f"{key}.{name}: {show_json(value)}, expected {'one of ' * (not only_form)}{listed} of mode {mode}"
            )
    assert isinstance(bits, int) and isinstance(size, int)
    return MlxFormat(mode, bits, size, key)


# --- by which program a directory was written

Settings = MlxSettings | CompressedSettings | AutoSettings
METHODS: dict[str, Callable[[Mapping[str, object]], Settings]] = {  # by quant_method
    METHOD: compressed_settings,
    "gptq": gptq_settings,
    "awq": awq_settings,
}
OLD_KEY = "compression_config"  # as compressed-tensors once called quantization_config
KEYS = (KEY, COPY, OLD_KEY)


def settings_of(raw: Mapping[str, object], source: str) -> Settings | None:
    """None of a checkpoint that says nothing. ConfigError names the file, the key and the value."""
    with naming(source):
        if raw.get(KEY) is not None:
            if raw.get(OLD_KEY) is not None:
                raise ConfigError(f"{OLD_KEY}: {show_json(raw[OLD_KEY])} contradicts {KEY}, expected one of them")
            return mlx_settings(raw)
        return _of_method(raw)


def _of_method(raw: Mapping[str, object]) -> Settings | None:
    keys = [key for key in KEYS if raw.get(key) is not None]
    if not keys:
        return None
    key, settings = keys[0], raw[keys[0]]
    if len(keys) > 1 and raw[keys[1]] != settings:
        raise ConfigError(f"{keys[1]}: {show_json(raw[keys[1]])} contradicts {key}, expected one of them")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if not isinstance(settings, Mapping) or not isinstance(method, str) or method not in METHODS:
        shown = show_json(settings) if method is None else f"quant_method {show_json(method)}"
        raise ConfigError(f"{key}: {shown} is not implemented, expected a quant_method of {', '.join(METHODS)}")
    with naming(key, joint="."):
        return METHODS[method](settings)
