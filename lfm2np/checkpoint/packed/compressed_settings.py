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
MIXED = "mixed-precision"  # then each group has a format of its own
STRATEGIES = ("tensor", "channel", "group", "block")  # of weights
Allowed = tuple[dict[str, tuple[int, ...]], tuple[str, ...]]  # types of codes with the bits of each, and strategies
OF_FORMATS: dict[str, Allowed] = {  # of weights
    "pack-quantized": ({"int": (4, 8)}, ("channel", "group")),
    "int-quantized": ({"int": tuple(range(2, 9))}, STRATEGIES),
    "float-quantized": ({"float": (8,)}, STRATEGIES),
    "naive-quantized": ({"int": tuple(range(2, 9)), "float": (8,)}, STRATEGIES),
}
OF_INPUTS: Allowed = ({"int": (8,), "float": (8,)}, ("tensor", "token", "group"))
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


def compressed_settings(raw: Mapping[str, object]) -> CompressedSettings:
    """ConfigError names the key and the value."""
    for key, value in raw.items():
        if key in ONLY:
            require_done(any(same(value, allowed) for allowed in ONLY[key]), key, value, show_json(ONLY[key][0]))
        elif key not in (*IGNORED, "config_groups", "format", "ignore"):
            raise ConfigError(f"{plain(key)}: {show_json(value)}: not a key of compressed-tensors that is known here")
    form, groups = raw.get("format"), raw.get("config_groups")
    require_done(form in (*OF_FORMATS, MIXED), "format", form, f"one of {', '.join(OF_FORMATS)}")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"config_groups: {show_json(groups)}, expected an object of schemes")
    schemes = tuple(_scheme(value, f"config_groups.{plain(name)}", str(form)) for name, value in groups.items())
    return CompressedSettings(schemes, _targets([] if raw.get("ignore") is None else raw["ignore"], "ignore"))


def _scheme(raw: object, key: str, form: str) -> Scheme:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{key}: {show_json(raw)}, expected an object with targets and weights")
    _require_known(raw, OF_SCHEME, key)
    its_format, inputs, outputs = raw.get("format"), raw.get("input_activations"), raw.get("output_activations")
    require(its_format is None or form in (its_format, MIXED), f"{key}.format", its_format, f"format={form} or null")
    form = str(its_format) if form == MIXED else form
    require_done(form in OF_FORMATS, f"{key}.format", its_format, f"one of {', '.join(OF_FORMATS)}")
    require_done(outputs is None, f"{key}.output_activations", outputs, "null")
    targets = _targets(raw.get("targets"), f"{key}.targets")
    weights = _weights(raw.get("weights"), f"{key}.weights", form)
    return Scheme(targets, weights, None if inputs is None else _inputs(inputs, f"{key}.input_activations"), form)


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


def _weights(raw: object, key: str, form: str) -> Args:
    args, order = _args(raw, key, OF_FORMATS[form], f" of weights in format {form}")
    require(not args.dynamic, f"{key}.dynamic", args.dynamic, "false of weights")
    is_order = order is None or same(order, False) or (isinstance(order, str) and order in ORDERS)
    require(is_order, f"{key}.actorder", order, f"null or one of {', '.join(ORDERS)}")
    is_done = not args.has_order or (form == "pack-quantized" and args.strategy == "group")
    require_done(is_done, f"{key}.actorder", order, "none but in groups of pack-quantized")
    return args


def _inputs(raw: object, key: str) -> Args:
    args, order = _args(raw, key, OF_INPUTS, " of inputs")
    require(order is None, f"{key}.actorder", order, "null of inputs")
    is_done = args.dynamic or args.strategy == "tensor"
    require_done(is_done, f"{key}.strategy", args.strategy, "tensor of static scales")
    return args


def _args(raw: object, key: str, allowed: Allowed, where: str) -> tuple[Args, object]:
    """Without and with what is still to be checked: the order of columns."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{key}: {show_json(raw)}, expected an object with num_bits, type and strategy")
    _require_known({name: raw[name] for name in raw if name not in ARGS_IGNORED}, OF_ARGS, key)
    (types, strategies), kind, bits = allowed, raw.get("type", "int"), raw.get("num_bits", 8)
    is_kind = isinstance(kind, str) and kind in types
    require_done(is_kind, f"{key}.type", kind, f"{' or '.join(types)}{where}")
    widths = types[str(kind)]
    is_width = type(bits) is int and bits in widths
    require_done(is_width, f"{key}.num_bits", bits, f"one of {', '.join(map(str, widths))}{where}")
    symmetric = require_bool(f"{key}.symmetric", raw.get("symmetric", True))
    require_done(symmetric or kind == "int", f"{key}.symmetric", symmetric, "true of type float")
    dynamic, order = require_bool(f"{key}.dynamic", raw.get("dynamic", False)), raw.get("actorder")
    strategy, size = _strategy(raw, key, strategies, where)
    has_order = isinstance(order, str) and ORDERS.get(order, False)
    block = _block(raw.get("block_structure"), key, strategy)
    return Args(str(kind), int(str(bits)), symmetric, strategy, size, block, dynamic, has_order, key), order


def _strategy(raw: Mapping[str, object], key: str, known: tuple[str, ...], where: str) -> tuple[str, int]:
    """And the size of a group; a strategy that is not named follows from that, as in QuantizationArgs."""
    size, strategy = raw.get("group_size"), raw.get("strategy")
    is_size = size is None or (type(size) is int and size != 0 and size >= -1)
    require(is_size, f"{key}.group_size", size, "a positive integer, -1 or null")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    require_done(strategy in known, f"{key}.strategy", strategy, f"one of {', '.join(known)}{where}")
    has_size = isinstance(size, int) and size > 0
    if has_size != (strategy == "group"):
        raise ConfigError(f"{key}.group_size: {show_json(size)} contradicts strategy={strategy}")
    return str(strategy), size if has_size and isinstance(size, int) else 0


def _block(blocks: object, key: str, strategy: str) -> tuple[int, int]:
    if strategy != "block":
        if blocks is not None:
            raise ConfigError(f"{key}.block_structure: {show_json(blocks)} contradicts strategy={strategy}")
        return 0, 0
    most = SIZES["hidden_size"][1]
    is_pair = isinstance(blocks, list) and len(blocks) == 2
    if not is_pair or not all(type(size) is int and 0 < size <= most for size in blocks):  # type: ignore[attr-defined]
        raise ConfigError(f"{key}.block_structure: {show_json(blocks)}, expected two integers from 1 to {most}")
    return blocks[0], blocks[1]  # type: ignore[index]
