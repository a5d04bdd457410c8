"""Our matrices among the tensors of AutoGPTQ and AutoAWQ: `qweight`, `qzeros`, `scales`, of gptq also `g_idx`.

Both hold matrices turned around, inputs first. gptq packs codes along the inputs and zeros along the outputs, each from
the lowest bit on; in checkpoint_format gptq a zero is stored less one, in gptq_v2 as it is. awq's gemm packs both along
the outputs, eight in the order 0, 2, 4, 6, 1, 3, 5, 7. A weight is scale * (code - zero) in both.

Readers of checkpoint_format gptq disagree on the largest stored zero (15 of 4 bits is 16, or 0 again), and on `sym`,
where some read no zeros but take the middle: files in which that makes a difference are refused.
Keys of `quantization_config` that tell how the numbers were found, or which kernel to run, change nothing.
Source: AutoGPTQ, nn_modules/qlinear and quantization/config.py; GPTQModel, utils/model.py; AutoAWQ,
utils/packing_utils.py and models/_config.py; vLLM, auto_gptq.py and auto_awq.py (which keys count).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.packed.matrix_parts import INTEGERS, Dims, Parts, groups_of_columns, packed_dim
from lfm2np.checkpoint.packed.rows import PackedRows, unpacked
from lfm2np.checkpoint.stored import DTYPES, StoredTensor
from lfm2np.checkpoint.strict_json import require_done
from lfm2np.errors import CheckpointError, ConfigError
from lfm2np.truth.config_values import require_bool
from lfm2np.truth.layers import Dim
from lfm2np.values import plain, same, show_json

AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of eight outputs in their order, where each stands
GPTQ_IGNORED = (
    *("quant_method", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path"),
    *("model_file_base_name", "lm_head", "meta", "dataset", "tokenizer", "batch_size", "pad_token_id", "model_seqlen"),
    *("module_name_preceding_first_block", "block_name_to_quantize", "modules_in_block_to_quantize", "backend"),
    *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "cache_block_outputs"),
)
AWQ_IGNORED = (
    *("quant_method", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "lm_head"),
)
GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero
GPTQ_ONLY: dict[str, tuple[object, ...]] = {
    "is_marlin_format": (None, False),
    "dynamic": (None, {}),
    "pack_dtype": (None, "int32"),
    "format": (None, "gptq", "gptq_v2"),
}
AWQ_NAMES = (("bits", "w_bit"), ("group_size", "q_group_size"))


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


def gptq_settings(raw: Mapping[str, object]) -> AutoSettings:
    """ConfigError names the key and the value."""
    known = ("bits", "group_size", "desc_act", "sym", "checkpoint_format")
    _require_known(raw, (*known, *GPTQ_IGNORED), GPTQ_ONLY, "gptq")
    form = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    if not isinstance(form, str) or form not in GPTQ_FORMATS:
        raise ConfigError(
            f"checkpoint_format: {show_json(form)} is not implemented, expected one of {', '.join(GPTQ_FORMATS)}"
        )
    if raw.get("format") not in (None, form):
        raise ConfigError(f"format: {show_json(raw['format'])} contradicts checkpoint_format={form}")
    return AutoSettings(
        "gptq",
        _bits(raw, "bits", (4, 8)),
        _group_size(raw, "group_size"),
        symmetric=require_bool("sym", raw.get("sym")),
        has_order=require_bool("desc_act", raw.get("desc_act")),
        zero_offset=GPTQ_FORMATS[form],
    )


def awq_settings(raw: Mapping[str, object]) -> AutoSettings:
    """ConfigError names the key and the value."""
    bits, size = (next((name for name in names if name in raw), names[0]) for names in AWQ_NAMES)
    _require_known(raw, (bits, size, "version", "zero_point", "modules_to_not_convert", *AWQ_IGNORED), {}, "awq")
    version = raw.get("version", "gemm")
    require_done(isinstance(version, str) and version.lower() == "gemm", "version", version, "gemm")
    require_done(same(raw.get("zero_point"), True), "zero_point", raw.get("zero_point"), "true")
    skipped = [] if raw.get("modules_to_not_convert") is None else raw["modules_to_not_convert"]
    if not isinstance(skipped, list) or not all(isinstance(part, str) for part in skipped):
        raise ConfigError(f"modules_to_not_convert: {show_json(skipped)}, expected a list of parts of names, or null")
    return AutoSettings("awq", _bits(raw, bits, (4,)), _group_size(raw, size), skipped=tuple(skipped))


def _require_known(
    raw: Mapping[str, object], known: tuple[str, ...], only: Mapping[str, tuple[object, ...]], method: str
) -> None:
    for key, value in raw.items():
        if key in only:
            is_done = any(same(value, allowed) for allowed in only[key])
            require_done(is_done, key, value, f"{show_json(only[key][-1])} or no key")
        elif key not in known:
            raise ConfigError(f"{plain(key)}: {show_json(value)}: not a key of {method} that is known here")


def _bits(raw: Mapping[str, object], key: str, widths: tuple[int, ...]) -> int:
    value = raw.get(key)
    if type(value) is not int or value not in widths:
        raise ConfigError(f"{key}: {show_json(value)} is not implemented, expected {' or '.join(map(str, widths))}")
    return value


def _group_size(raw: Mapping[str, object], key: str) -> int:
    value = raw.get(key)
    if type(value) is not int or value < -1 or value == 0:
        raise ConfigError(f"{key}: {show_json(value)}, expected a positive integer, or -1 for whole rows")
    return max(value, 0)


# --- matrices


def read_matrix(parts: Parts, dims: Dims, settings: AutoSettings) -> StoredTensor | None:
    """None of a module that is not quantised. CheckpointError names the file, the tensor and the key."""
    if "qweight" not in parts:
        return None
    names = parts.module.names
    if skipped := next((part for part in settings.skipped if any(part in name for name in names)), None):
        raise parts.wrong(
            "qweight", f"expected none from modules_to_not_convert, which has {show_json(skipped)} (config.json)"
        )
    if "weight" in parts:
        both = f"{parts.called('weight')} stands beside {parts.called('qweight')}"
        raise CheckpointError(f"{parts.source}: {both}, expected one of them")
    (rows, row_origin), (columns, origin), bits = *dims, settings.bits
    size = settings.group_size or columns
    if columns % size:
        expected = f"a multiple of group_size={size} (config.json)"
        raise parts.wrong("qweight", f"rows of {origin}={columns} numbers, expected {expected}")
    is_gptq = settings.method == "gptq"
    if not is_gptq and (rows % 8 or columns % 8):
        sizes = f"{row_origin}={rows}, {origin}={columns}"
        raise parts.wrong("qweight", f"{sizes}, expected multiples of 8 from version=gemm")
    groups, words = (columns // size, f"{origin}/group_size"), packed_dim(dims[0], bits, "bits")
    stored_dims = (packed_dim(dims[1], bits, "bits"), dims[0]) if is_gptq else (dims[1], words)
    weight = parts.take("qweight", "quant_method", ("I32",), stored_dims)
    zeros = parts.take("qzeros", "quant_method", ("I32",), (groups, words))
    scales = parts.take("scales", "quant_method", tuple(DTYPES), (groups, dims[0]))
    packed = PackedRows(
        f"{bits} bits",
        columns,
        weight.array.T if is_gptq else _awq_rows(weight),
        scales.array.T,
        scales.dtype,
        zeros=_gptq_zeros(zeros, rows, settings) if is_gptq else _awq_order(zeros),
        group_of=_gptq_groups(parts, dims[1], size, settings) if is_gptq else None,
    )
    form = f"{settings.method}-{bits}bit-{f'g{settings.group_size}' if settings.group_size else 'channel'}"
    return replace(weight, name=parts.called("weight"), dtype=form, values=packed)


def _gptq_zeros(stored: StoredTensor, rows: int, settings: AutoSettings) -> NDArray[np.integer]:
    """[rows, groups]"""
    stored_codes = unpacked(stored.array, settings.bits)[:, :rows]
    top, middle = 2**settings.bits - 1, 2 ** (settings.bits - 1)
    if settings.zero_offset and np.any(stored_codes == top):
        means = f"{top + 1} to some readers and 0 to others"
        raise stored.wrong(f"a zero of {top} in checkpoint_format gptq, which is {means}")
    zeros = stored_codes.T.astype(np.int16) + np.int16(settings.zero_offset)
    if settings.symmetric and np.any(zeros != middle):
        other = int(zeros[zeros != middle][0])
        raise stored.wrong(f"a zero of {other}, expected {middle} from sym=true (config.json)")
    return zeros


def _gptq_groups(parts: Parts, columns: Dim, size: int, settings: AutoSettings) -> NDArray[np.int64] | None:
    """The group of each column: those of g_idx, which files without desc_act may leave out."""
    key, expected = "desc_act=true", np.arange(columns[0], dtype=np.int64) // size
    if settings.has_order:
        return groups_of_columns(parts, "g_idx", key, columns, int(expected[-1]))
    if "g_idx" in parts:
        stored = parts.take("g_idx", key, INTEGERS, (columns,))
        if not np.array_equal(stored.array.astype(np.int64), expected):
            why = f"group_size={size} of each group in turn from desc_act=false (config.json)"
            raise stored.wrong(f"columns in another order, expected {why}")
    return None


def _awq_rows(stored: StoredTensor) -> NDArray[np.uint8]:
    """Codes packed anew, rows first, two in a byte: a slice of rows would else begin within words."""
    codes = np.ascontiguousarray(_awq_order(stored))  # [rows, columns]
    return codes[:, ::2] | codes[:, 1::2] << np.uint8(4)


def _awq_order(stored: StoredTensor) -> NDArray[np.uint8]:
    """[n, outputs/8] packed -> [outputs, n]"""
    codes = unpacked(stored.array, 4)
    return codes.reshape(len(codes), -1, 8)[:, :, AWQ_PLACES].reshape(len(codes), -1).T
