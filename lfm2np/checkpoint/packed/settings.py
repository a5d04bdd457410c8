"""What config.json says about quantised tensors: by which program they were written, and in which formats.

mlx-lm writes `quantization`, the format of each quantised module, and `quantization_config`, its copy. The others write
`quantization_config` with a quant_method. A key that may ask for another computation is refused; those that say how
the numbers were found, or which kernel to run, change nothing.
Source: mlx_lm/utils.py; the package compressed-tensors, quantization/quant_config.py, quant_scheme.py, quant_args.py,
utils/match.py; vLLM, compressed_tensors/utils.py (a module's name is matched before its class), auto_gptq.py and
auto_awq.py; AutoGPTQ, quantization/config.py; AutoAWQ, models/_config.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lfm2np.checkpoint.strict_json import naming, require
from lfm2np.errors import ConfigError
from lfm2np.truth.config_values import SIZES
from lfm2np.values import plain, show_json

Raw = Mapping[str, object]
Allowed = tuple[object, ...] | Callable[[Any], bool]
BOOLS = (True, False)


class Keys:
    """An object of config.json whose keys are taken one by one; what nobody takes is refused."""

    def __init__(self, raw: object, where: str = ""):
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where.rstrip('.')}: {show_json(raw)}, expected an object")
        self.left, self.where = dict(raw), where

    def take(self, name: str, allowed: Allowed, expected: str = "", default: object = None) -> Any:
        """The value, or `default` if there is no such key; ConfigError unless it is one of `allowed`, of its type."""
        value = self.left.pop(name, default)
        if isinstance(allowed, tuple):
            is_right = any(type(value) is type(each) and value == each for each in allowed)
            expected = expected or f"one of {', '.join(map(show_json, allowed))}"
        else:
            is_right = allowed(value)
        require(is_right, f"{self.where}{plain(name)}", value, expected)
        return value

    def end(self, *ignored: str) -> None:
        for name in (name for name in self.left if name not in ignored):
            require(False, f"{self.where}{plain(name)}", self.left[name], "no such key")


def is_group_size(value: object) -> bool:
    return type(value) is int and (value == -1 or value > 0)


def is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


# --- MLX

KEY, COPY = "quantization", "quantization_config"
GROUPS, BITS = (32, 64, 128), (1, 2, 3, 4, 5, 6, 8)  # of affine
ONE_FORM = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}  # group_size and bits
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


def mlx_settings(raw: Raw) -> MlxSettings:
    """A key beside the three of all modules is the path of one: an object of its own, true (as all), or false."""
    settings, copy = Keys(raw[KEY], f"{KEY}.").left, raw.get(COPY)
    if copy is not None and copy != settings:
        raise ConfigError(f"{COPY}: {show_json(copy)} contradicts {KEY}, whose copy it is in a directory of mlx-lm")
    Keys(raw).take("quantize_activations", (None, False))
    modules: dict[str, MlxFormat | None] = {}
    for path, value in settings.items():
        if path not in OF_ALL and value is not True:
            modules[path] = None if value is False else _mlx_format(value, f"{KEY}.{show_json(path)}")
    return MlxSettings(_mlx_format({name: settings[name] for name in OF_ALL if name in settings}, KEY), modules)


def _mlx_format(raw: object, key: str) -> MlxFormat:
    keys = Keys(raw, f"{key}.")
    mode = keys.take("mode", ("affine", *ONE_FORM), default="affine")
    sizes, widths = (GROUPS, BITS) if mode == "affine" else ((each,) for each in ONE_FORM[mode])
    bits = keys.take("bits", widths, f"{', '.join(map(str, widths))} of mode {mode}")
    size = keys.take("group_size", sizes, f"{', '.join(map(str, sizes))} of mode {mode}")
    for name in OFF:
        keys.take(name, (False,), default=False)
    keys.end()
    return MlxFormat(mode, bits, size, key)


# --- compressed-tensors

MIXED = "mixed-precision"  # then each group has a format of its own
STRATEGIES = ("tensor", "channel", "group", "block")  # of weights
Codes = tuple[dict[str, tuple[int, ...]], tuple[str, ...]]  # types of codes with the bits of each, and strategies
OF_FORMATS: dict[str, Codes] = {  # of weights
    "pack-quantized": ({"int": (4, 8)}, ("channel", "group")),
    "int-quantized": ({"int": tuple(range(2, 9))}, STRATEGIES),
    "float-quantized": ({"float": (8,)}, STRATEGIES),
    "naive-quantized": ({"int": tuple(range(2, 9)), "float": (8,)}, STRATEGIES),
}
OF_INPUTS: Codes = ({"int": (8,), "float": (8,)}, ("tensor", "token", "group"))
ORDERED = ("group", "dynamic")  # of actorder: columns have a weight_g_idx
NOTHING: tuple[object, ...] = (None, {}, [])


@dataclass(frozen=True)
class Args:
    """How numbers are rounded: codes of type int or float, and what shares a scale.

    group_size  of strategy group, else 0
    block       of strategy block: rows and columns, else (0, 0)
    dynamic     of inputs: each run finds its own scales
    has_order   of weights: columns have a weight_g_idx
    key         where config.json says it, for messages
    """

    type: str
    bits: int
    symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int]
    dynamic: bool
    has_order: bool
    key: str

    @property
    def is_float(self) -> bool:
        return self.type == "float"


@dataclass(frozen=True)
class Scheme:
    targets: tuple[str, ...]
    weights: Args
    inputs: Args | None
    format: str


@dataclass(frozen=True)
class CompressedSettings:
    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]

    def is_ignored(self, names: tuple[str, ...], kind: str) -> bool:
        return kind in self.ignore or any(_matches(names, target) for target in self.ignore)

    def of(self, names: tuple[str, ...], kind: str) -> Scheme | None:
        """The scheme of a module, by its names and its class: the first that names it, else the first for its class."""
        if self.is_ignored(names, kind):
            return None
        for scheme in self.schemes:
            if any(_matches(names, target) for target in scheme.targets):
                return scheme
        return next((scheme for scheme in self.schemes if kind in scheme.targets), None)


def _matches(names: tuple[str, ...], target: str) -> bool:
    if target.startswith("re:"):
        return any(re.match(target[3:], name) for name in names)
    return target in names


def compressed_settings(raw: Raw) -> CompressedSettings:
    keys = Keys(raw)
    for name in ("kv_cache_scheme", "transform_config", "moe_sparsity_config"):
        keys.take(name, NOTHING)
    keys.take("sparsity_config", (*NOTHING, {"format": "dense"}))
    keys.take("quantization_status", ("compressed",), default="compressed")
    form = keys.take("format", (*OF_FORMATS, MIXED))
    groups = keys.take("config_groups", lambda value: isinstance(value, dict) and bool(value), "an object of schemes")
    ignore = keys.take("ignore", lambda value: value is None or _are_targets(value), TARGETS)
    keys.end("quant_method", "global_compression_ratio", "version", "run_compressed")
    schemes = tuple(_scheme(value, f"config_groups.{plain(name)}", form) for name, value in groups.items())
    return CompressedSettings(schemes, tuple(ignore or ()))


TARGETS = "a list of names, classes and re:expressions"


def _are_targets(value: object) -> bool:
    if not isinstance(value, list) or not is_list_of_texts(value):
        return False
    try:
        return all(re.compile(target[3:]) for target in value if target.startswith("re:"))
    except (re.error, OverflowError, RecursionError):
        return False


def _scheme(raw: object, key: str, form: str) -> Scheme:
    keys = Keys(raw, f"{key}.")
    form = keys.take("format", tuple(OF_FORMATS) if form == MIXED else (None, form)) or form
    keys.take("output_activations", (None,))
    targets = tuple(keys.take("targets", _are_targets, TARGETS))
    weights, inputs = keys.left.pop("weights", None), keys.left.pop("input_activations", None)
    keys.end()
    rounding = None if inputs is None else _args(inputs, f"{key}.input_activations", OF_INPUTS, None)
    return Scheme(targets, _args(weights, f"{key}.weights", OF_FORMATS[form], form), rounding, form)


def _args(raw: object, key: str, codes: Codes, form: str | None) -> Args:
    """`form` is the format of weights; None of inputs."""
    keys, (types, strategies) = Keys(raw, f"{key}."), codes
    of = " of inputs" if form is None else f" of weights in format {form}"
    kind = keys.take("type", tuple(types), " or ".join(types) + of, "int")
    bits = keys.take("num_bits", types[kind], f"one of {', '.join(map(str, types[kind]))}{of}", 8)
    symmetric = keys.take("symmetric", BOOLS if kind == "int" else (True,), default=True)
    size = keys.take("group_size", lambda value: value is None or is_group_size(value), "a positive integer, -1, null")
    if keys.left.get("strategy") is None:  # it follows from the size, as in QuantizationArgs
        keys.left["strategy"] = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = keys.take("strategy", strategies, f"one of {', '.join(strategies)}{of}")
    if ((size or 0) > 0) != (strategy == "group"):
        raise ConfigError(f"{key}.group_size: {show_json(size)} contradicts strategy={strategy}")
    dynamic = keys.take("dynamic", (False,) if form else BOOLS if strategy == "tensor" else (True,), default=False)
    is_ordered = form == "pack-quantized" and strategy == "group"
    orders = (None, False, "weight", "static", *(ORDERED if is_ordered else ())) if form else (None,)
    order = keys.take("actorder", orders)
    sizes, expected = range(1, SIZES["hidden_size"][1] + 1), "two sizes of strategy=block, else null"
    block = keys.take("block_structure", lambda value: _is_block(value, sizes, strategy), expected) or (0, 0)
    keys.end("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    of_group = size if strategy == "group" else 0
    return Args(kind, bits, symmetric, strategy, of_group, tuple(block), dynamic, order in ORDERED, key)


def _is_block(value: object, sizes: range, strategy: str) -> bool:
    if strategy != "block" or not isinstance(value, list):
        return strategy != "block" and value is None
    return len(value) == 2 and all(type(size) is int and size in sizes for size in value)


# --- AutoGPTQ and AutoAWQ

GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero
OF_GPTQ = """
    quant_method damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name
    lm_head meta dataset tokenizer batch_size pad_token_id model_seqlen module_name_preceding_first_block
    block_name_to_quantize modules_in_block_to_quantize backend use_cuda_fp16 use_exllama disable_exllama exllama_config
    max_input_length cache_block_outputs
    """
GPTQ_IGNORED = OF_GPTQ.split()
AWQ_IGNORED = ("quant_method", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "lm_head")
SIZE = "a positive integer, or -1 for whole rows"


@dataclass(frozen=True)
class AutoSettings:
    """group_size is 0 where a row is one group; zero_offset and symmetric are of gptq, skipped of awq."""

    method: str
    bits: int
    group_size: int
    symmetric: bool = False
    has_order: bool = False
    zero_offset: int = 0
    skipped: tuple[str, ...] = ()


def gptq_settings(raw: Raw) -> AutoSettings:
    keys = Keys(raw)
    keys.take("is_marlin_format", (None, False))
    keys.take("dynamic", (None, {}))
    keys.take("pack_dtype", (None, "int32"))
    form = keys.take("checkpoint_format", (None, *GPTQ_FORMATS)) or keys.left.get("format") or "gptq"
    keys.take("format", (None, form) if form in tuple(GPTQ_FORMATS) else tuple(GPTQ_FORMATS))
    bits, size = keys.take("bits", (4, 8)), keys.take("group_size", is_group_size, SIZE)
    symmetric, has_order = keys.take("sym", BOOLS), keys.take("desc_act", BOOLS)
    keys.end(*GPTQ_IGNORED)
    return AutoSettings("gptq", bits, max(size, 0), symmetric, has_order, GPTQ_FORMATS[form])


def awq_settings(raw: Raw) -> AutoSettings:
    keys = Keys(raw)
    bits = keys.take("bits" if "bits" in raw else "w_bit", (4,))
    size = keys.take("group_size" if "group_size" in raw else "q_group_size", is_group_size, SIZE)
    keys.take("version", ("gemm", "GEMM"), default="gemm")
    keys.take("zero_point", (True,))
    skipped = keys.take(
        "modules_to_not_convert", lambda v: v is None or is_list_of_texts(v), "a list of parts of names"
    )
    keys.end(*AWQ_IGNORED)
    return AutoSettings("awq", bits, max(size, 0), skipped=tuple(skipped or ()))


# --- by which program a directory was written

Settings = MlxSettings | CompressedSettings | AutoSettings
METHODS: dict[str, Callable[[Raw], Settings]] = {  # by quant_method
    "compressed-tensors": compressed_settings,
    "gptq": gptq_settings,
    "awq": awq_settings,
}


def settings_of(raw: Raw, source: str) -> Settings | None:
    """None of a checkpoint that says nothing. ConfigError names the file, the key and the value."""
    with naming(source):
        if raw.get(KEY) is not None:
            return mlx_settings(raw)
        if raw.get(COPY) is None:
            return None
        method = Keys(raw[COPY], COPY).left.get("quant_method")
        require(method in tuple(METHODS), f"{COPY}.quant_method", method, f"one of {', '.join(METHODS)}")
        with naming(COPY, joint="."):
            return METHODS[str(method)](raw[COPY])  # type: ignore[arg-type]
