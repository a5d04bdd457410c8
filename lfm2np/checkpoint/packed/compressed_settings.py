"""`quantization_config` of method compressed-tensors, as llm-compressor writes it and vLLM reads it.

Groups of modules with a scheme each: how their weights are stored, and how their inputs are to be rounded. Source: the
package compressed-tensors, quantization/quant_config.py, quant_scheme.py, quant_args.py, utils/match.py; vLLM,
compressed_tensors/utils.py (a module's name is matched before its class).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lfm2np.checkpoint.strict_json import require, require_done
from lfm2np.errors import ConfigError
from lfm2np.truth.config_values import SIZES, require_bool
from lfm2np.values import plain, same, show_json

METHOD = "compressed-tensors"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
MIXED = "mixed-precision"  # then each group has a format of its own
STRATEGIES = ("tensor", "channel", "group", "block")  # of weights
INPUT_STRATEGIES = ("tensor", "token", "group")
ORDERS = {"weight": False, "static": False, "group": True, "dynamic": True}  # whether columns have a weight_g_idx
NOTHING: tuple[object, ...] = (None, {}, [])
ONLY: dict[str, tuple[object, ...]] = {  # keys that would change the computation, and the values that don't
    "kv_cache_scheme": NOTHING,
    "sparsity_config": (*NOTHING, {"format": "dense"}),
    "transform_config": NOTHING,
    "moe_sparsity_config": NOTHING,
    "quantization_status": ("compressed",),
}
IGNORED = ("quant_method", "global_compression_ratio", "version", "run_compressed")
OF_SCHEME = ("targets", "weights", "input_activations", "output_activations", "format")
OF_ARGS = ("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder")
ARGS_IGNORED = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")  # of what made the numbers


@dataclass(frozen=True)
class Weights:
    """`group_size` of strategy group, `block` of strategy block; `key` for messages."""

    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int]
    has_order: bool
    key: str


@dataclass(frozen=True)
class Inputs:
    """How the inputs of a product are rounded: kind int8 or float8, one scale for a tensor, a token or a group."""

    kind: str
    strategy: str
    group_size: int
    dynamic: bool
    symmetric: bool
    key: str


@dataclass(frozen=True)
class Scheme:
    targets: tuple[str, ...]
    weights: Weights
    inputs: Inputs | None
    format: str
    key: str


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


def compressed_settings(raw: Mapping[str, object]) -> CompressedSettings:
    """ConfigError names the key and the value."""
    for key, value in raw.items():
        if key in ONLY:
            require_done(any(same(value, allowed) for allowed in ONLY[key]), key, value, show_json(ONLY[key][0]))
        elif key not in (*IGNORED, "config_groups", "format", "ignore"):
            raise ConfigError(f"{plain(key)}: {show_json(value)}: not a key of compressed-tensors that is known here")
    form = raw.get("format")
    require_done(form in (*FORMATS, MIXED), "format", form, f"one of {', '.join(FORMATS)}")
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"config_groups: {show_json(groups)}, expected an object of schemes")
    schemes = tuple(_scheme(value, f"config_groups.{plain(name)}", str(form)) for name, value in groups.items())
    return CompressedSettings(schemes, _targets([] if raw.get("ignore") is None else raw["ignore"], "ignore"))


def _scheme(raw: object, key: str, form: str) -> Scheme:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{key}: {show_json(raw)}, expected an object with targets and weights")
    _require_known(raw, OF_SCHEME, key)
    its_format = raw.get("format")
    require(its_format is None or form in (its_format, MIXED), f"{key}.format", its_format, f"format={form} or null")
    if form == MIXED:
        form = str(its_format)
    require_done(form in FORMATS, f"{key}.format", its_format, f"one of {', '.join(FORMATS)}")
    if raw.get("output_activations") is not None:
        raise ConfigError(f"{key}.output_activations: {show_json(raw['output_activations'])} is not implemented")
    targets = _targets(raw.get("targets"), f"{key}.targets")
    weights = _weights(raw.get("weights"), f"{key}.weights", form)
    inputs = raw.get("input_activations")
    return Scheme(targets, weights, None if inputs is None else _inputs(inputs, f"{key}.input_activations"), form, key)


def _targets(raw: object, key: str) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(target, str) for target in raw):
        raise ConfigError(f"{key}: {show_json(raw)}, expected a list of names, classes and re:expressions")
    for target in raw:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except (re.error, OverflowError, RecursionError) as problem:
            raise ConfigError(f"{key}: {show_json(target)}: not a regular expression: {plain(str(problem))}") from None
    return tuple(raw)


def _require_known(raw: Mapping[str, object], known: tuple[str, ...], key: str) -> None:
    for name in raw:
        require_done(name in known, f"{key}.{plain(name)}", raw[name], ", ".join(known))


def _args(raw: object, key: str) -> Mapping[str, object]:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{key}: {show_json(raw)}, expected an object with num_bits, type and strategy")
    _require_known({name: raw[name] for name in raw if name not in ARGS_IGNORED}, OF_ARGS, key)
    return raw


def _strategy(raw: Mapping[str, object], key: str, known: tuple[str, ...]) -> tuple[str, int]:
    """And the size of a group; a strategy that is not named follows from that, as in QuantizationArgs."""
    size, strategy = raw.get("group_size"), raw.get("strategy")
    is_size = size is None or (type(size) is int and size != 0 and size >= -1)
    require(is_size, f"{key}.group_size", size, "a positive integer, -1 or null")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    require_done(strategy in known, f"{key}.strategy", strategy, f"one of {', '.join(known)}")
    has_size = isinstance(size, int) and size > 0
    if has_size != (strategy == "group"):
        raise ConfigError(f"{key}.group_size: {show_json(size)} contradicts strategy={strategy}")
    return str(strategy), size if has_size and isinstance(size, int) else 0


def _weights(raw: object, key: str, form: str) -> Weights:
    args = _args(raw, key)
    kind, bits = args.get("type", "int"), args.get("num_bits", 8)
    symmetric = require_bool(f"{key}.symmetric", args.get("symmetric", True))
    is_float = kind == "float"
    widths = (4, 8) if form == "pack-quantized" else (8,) if is_float else tuple(range(2, 9))
    if kind not in ("int", "float") or (is_float and form in ("pack-quantized", "int-quantized")):
        raise ConfigError(f"{key}.type: {show_json(kind)} is not implemented in format {form}, expected int")
    if not is_float and form == "float-quantized":
        raise ConfigError(f"{key}.type: {show_json(kind)} is not implemented in format {form}, expected float")
    if type(bits) is not int or bits not in widths:
        listed = ", ".join(map(str, widths))
        raise ConfigError(
            f"{key}.num_bits: {show_json(bits)} is not implemented in format {form}, expected one of {listed}"
        )
    if is_float and not symmetric:
        raise ConfigError(f"{key}.symmetric: false is not implemented of type float, expected true")
    require(same(args.get("dynamic", False), False), f"{key}.dynamic", args.get("dynamic"), "false of weights")
    strategy, size = _strategy(args, key, STRATEGIES)
    if form == "pack-quantized" and strategy not in ("channel", "group"):
        raise ConfigError(f"{key}.strategy: {strategy} is not implemented in format {form}, expected channel or group")
    order = args.get("actorder")
    is_order = order is None or same(order, False) or (isinstance(order, str) and order in ORDERS)
    require(is_order, f"{key}.actorder", order, f"null or one of {', '.join(ORDERS)}")
    has_order = isinstance(order, str) and ORDERS[order]
    if has_order and (form != "pack-quantized" or strategy != "group"):
        raise ConfigError(f"{key}.actorder: {show_json(order)} is not implemented but in groups of pack-quantized")
    return Weights(bits, is_float, symmetric, strategy, size, _block(args, key, strategy), has_order, key)


def _block(args: Mapping[str, object], key: str, strategy: str) -> tuple[int, int]:
    blocks = args.get("block_structure")
    if strategy != "block":
        if blocks is not None:
            raise ConfigError(f"{key}.block_structure: {show_json(blocks)} contradicts strategy={strategy}")
        return 0, 0
    most = SIZES["hidden_size"][1]
    if (
        not isinstance(blocks, list)
        or len(blocks) != 2
        or not all(type(size) is int and 0 < size <= most for size in blocks)
    ):
        raise ConfigError(f"{key}.block_structure: {show_json(blocks)}, expected two integers from 1 to {most}")
    return blocks[0], blocks[1]


def _inputs(raw: object, key: str) -> Inputs:
    args = _args(raw, key)
    kind, bits, dynamic = args.get("type", "int"), args.get("num_bits", 8), args.get("dynamic", False)
    require_done(kind in ("int", "float"), f"{key}.type", kind, "int or float")
    require_done(same(bits, 8), f"{key}.num_bits", bits, "8")
    require_bool(f"{key}.dynamic", dynamic)
    for name in ("actorder", "block_structure"):
        require(args.get(name) is None, f"{key}.{name}", args.get(name), "null of inputs")
    symmetric = require_bool(f"{key}.symmetric", args.get("symmetric", True))
    if kind == "float" and not symmetric:
        raise ConfigError(f"{key}.symmetric: false is not implemented of type float, expected true")
    strategy, size = _strategy(args, key, INPUT_STRATEGIES)
    if not dynamic and strategy != "tensor":
        raise ConfigError(f"{key}.strategy: {strategy} is not implemented of static scales, expected tensor")
    return Inputs(f"{kind}8", strategy, size, bool(dynamic), symmetric, key)
