"""`quantization_config` of the methods gptq and awq, as AutoGPTQ (GPTQModel) and AutoAWQ write them.

Keys that tell how the numbers were found, or which kernel to run, change nothing. Source: AutoGPTQ,
quantization/config.py; AutoAWQ, models/_config.py; vLLM, auto_gptq.py and auto_awq.py (which keys count).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lfm2np.checkpoint.strict_json import require_done
from lfm2np.errors import ConfigError
from lfm2np.model.config_values import require_bool
from lfm2np.values import plain, same, show

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


def gptq_settings(told: Mapping[str, object]) -> AutoSettings:
    """ConfigError names the key and the value."""
    known = ("bits", "group_size", "desc_act", "sym", "checkpoint_format")
    _require_known(told, (*known, *GPTQ_IGNORED), GPTQ_ONLY, "gptq")
    form = told.get("checkpoint_format") or told.get("format") or "gptq"
    if not isinstance(form, str) or form not in GPTQ_FORMATS:
        raise ConfigError(
            f"checkpoint_format: {show(form)} is not implemented, expected one of {', '.join(GPTQ_FORMATS)}"
        )
    if told.get("format") not in (None, form):
        raise ConfigError(f"format: {show(told['format'])} contradicts checkpoint_format={form}")
    return AutoSettings(
        "gptq",
        _bits(told, "bits", (4, 8)),
        _group_size(told, "group_size"),
        symmetric=require_bool("sym", told.get("sym")),
        has_order=require_bool("desc_act", told.get("desc_act")),
        zero_offset=GPTQ_FORMATS[form],
    )


def awq_settings(told: Mapping[str, object]) -> AutoSettings:
    """ConfigError names the key and the value."""
    bits, size = (next((name for name in names if name in told), names[0]) for names in AWQ_NAMES)
    _require_known(told, (bits, size, "version", "zero_point", "modules_to_not_convert", *AWQ_IGNORED), {}, "awq")
    version = told.get("version", "gemm")
    require_done(isinstance(version, str) and version.lower() == "gemm", "version", version, "gemm")
    require_done(same(told.get("zero_point"), True), "zero_point", told.get("zero_point"), "true")
    skipped = [] if told.get("modules_to_not_convert") is None else told["modules_to_not_convert"]
    if not isinstance(skipped, list) or not all(isinstance(one, str) for one in skipped):
        raise ConfigError(f"modules_to_not_convert: {show(skipped)}, expected a list of parts of names, or null")
    return AutoSettings("awq", _bits(told, bits, (4,)), _group_size(told, size), skipped=tuple(skipped))


AWQ_NAMES = (("bits", "w_bit"), ("group_size", "q_group_size"))


def _require_known(
    told: Mapping[str, object], known: tuple[str, ...], only: Mapping[str, tuple[object, ...]], method: str
) -> None:
    for key, value in told.items():
        if key in only:
            is_done = any(same(value, allowed) for allowed in only[key])
            require_done(is_done, key, value, f"{show(only[key][-1])} or no key")
        elif key not in known:
            raise ConfigError(f"{plain(key)}: {show(value)}: not a key of {method} that is known here")


def _bits(told: Mapping[str, object], key: str, widths: tuple[int, ...]) -> int:
    value = told.get(key)
    if type(value) is not int or value not in widths:
        raise ConfigError(f"{key}: {show(value)} is not implemented, expected {' or '.join(map(str, widths))}")
    return value


def _group_size(told: Mapping[str, object], key: str) -> int:
    value = told.get(key)
    if type(value) is not int or value < -1 or value == 0:
        raise ConfigError(f"{key}: {show(value)}, expected a positive integer, or -1 for whole rows")
    return max(value, 0)
