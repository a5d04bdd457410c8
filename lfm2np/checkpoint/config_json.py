"""`ModelConfig` from config.json: old and new spellings, the effective feed-forward width, refusals instead of guesses.

Source: transformers models/lfm2, Lfm2Config and Lfm2MLP, and models/lfm2_moe, Lfm2MoeConfig, Lfm2MoeTopKRouter and
Lfm2MoeSparseMoeBlock. Absent keys take the defaults of the model_type's class; keys that change nothing in the
computation are ignored; a key that asks for another computation, or two keys that contradict each other where
transformers would silently ignore one, raise ConfigError.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.config_keys import unread_keys
from lfm2np.checkpoint.lfm3 import default_layer_types, lfm3_fields
from lfm2np.checkpoint.packed.quantization_config import without_settings
from lfm2np.checkpoint.strict_json import is_present, naming, read_object, require, require_done
from lfm2np.checkpoint.vision_language import language_config
from lfm2np.errors import ConfigError
from lfm2np.truth.config import (
    ATTENTION,
    CONV,
    LAYER_TYPES,
    MODEL_TYPES,
    MixtureConfig,
    ModelConfig,
    require_layer_types,
)
from lfm2np.truth.config_values import SIZES, require_bool, require_real, require_size
from lfm2np.values import same, show_json

ONLY: dict[str, tuple[object, ...]] = {
    # Keys that would change the computation, and the values under which they don't; absent is fine.
    "block_use_swiglu": (True, None),
    "use_pos_enc": (True, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "hidden_act": ("silu", None),
    "hidden_activation": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (None, 1.0, 1),
    "is_causal": (True,),  # transformers 5.24 attends both ways under false
    "use_bidirectional_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "per_layer_config": (None,),
}
ECHOES: dict[str, str] = {
    # Old, redundant keys that transformers ignores: they must repeat the key that counts.
    "block_dim": "hidden_size",
    "conv_dim": "hidden_size",
    "conv_dim_out": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "block_norm_eps": "norm_eps",
    "rms_norm_eps": "norm_eps",
    "theta": "rope_theta",
}
MIXTURE_ECHOES = {"block_ff_dim": "feed_forward_size"}  # ignored in an lfm2_moe only
LFM3_ONLY: dict[str, tuple[object, ...] | None] = {  # the same of an lfm3; None: as it likes
    "sliding_window": None,
    "attention_bias": None,
    "use_sliding_window": (True, None),
}
LFM2_CLASSES = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration")  # the last: its text part
CAUSAL = {  # the classes that a config.json may name, by its model_type
    "lfm2": LFM2_CLASSES,
    "lfm2_moe": LFM2_CLASSES,
    "lfm3": ("Lfm3ForCausalLM", "Lfm3VlForConditionalGeneration"),
}
LFM2_DEFAULTS = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DEFAULTS = {  # of absent keys: transformers Lfm2Config, Lfm2MoeConfig, Lfm3Config
    "lfm2": LFM2_DEFAULTS,
    "lfm2_moe": LFM2_DEFAULTS | {"hidden_size": 2048, "intermediate_size": 7168},
    "lfm3": {
        "vocab_size": 128_000,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 7680,
        "conv_L_cache": 7,
        "bos_token_id": 124_894,
        "eos_token_id": 124_900,
        "pad_token_id": 124_893,
    },
}
MIXTURE_KEYS: dict[
    str, tuple[Callable[[str, object], object], object]
] = {  # of an lfm2_moe: how each is checked, and Lfm2MoeConfig's default
    "num_experts": (require_size, 32),
    "num_experts_per_tok": (require_size, 4),
    "moe_intermediate_size": (require_size, 1792),
    "num_dense_layers": (require_size, 2),
    "use_expert_bias": (require_bool, True),
    "norm_topk_prob": (require_bool, True),
    "routed_scaling_factor": (require_real, 1.0),
}
OF_ROUTERS = (  # a key with one of these is about them, as other families' configs show
    *("expert", "rout", "moe", "topk", "scor", "n_group", "gate_"),
    *("dense_replace", "sparse_step", "mlp_only"),
)
NOT_OF_ROUTERS = ("num_local_experts", "output_router_logits", "router_aux_loss_coef")  # the last two for training
DENSE_ONLY: dict[str, tuple[object, ...]] = {
    # Lfm2Config's adjustment of the feed-forward's width, which Lfm2MoeConfig does not know, and where it does nothing.
    "block_auto_adjust_ff_dim": (False, None),
    "block_ffn_dim_multiplier": (None, 1.0, 1),
}
READ = {  # all keys that count
    *(*SIZES, *ONLY, *ECHOES, *MIXTURE_KEYS, *DENSE_ONLY, "num_local_experts"),
    *("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "layer_types", "full_attn_idxs"),
    *("head_dim", "conv_bias", "norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "tie_embedding"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "intermediate_size", "block_ff_dim"),
    *("block_multiple_of", "use_sandwich_norm", "use_attention_gate"),
}
_Raw = Mapping[str, object]


def load_config(directory: Path, rope: str = "trained") -> ModelConfig:
    """ModelConfig of a checkpoint's directory; the eos ids are config.json's, then generation_config.json's.

    rope  how an LFM3's partial rotation that is labelled "default" is read, one of lfm3.READINGS

    What config.json says of quantised tensors is read by packed/: it is no property of the model.
    """
    path = directory / "config.json"
    raw = without_settings(language_config_of(path), str(path))
    config = parse_config(raw, str(path), rope)
    if unread := unread_keys(raw, READ):
        warnings.warn(
            f"{path}: {', '.join(unread)}: not read, as no published config of these models has such keys", stacklevel=2
        )
    if reading := reading_of(config):
        warnings.warn(f"{path}: {reading}", stacklevel=2)
    generation = directory / "generation_config.json"
    if not is_present(generation, ConfigError):
        return config
    more = _eos_ids(read_object(generation, ConfigError), str(generation), None)
    with naming(generation):
        return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))


def language_config_of(path: Path) -> Mapping[str, object]:
    """config.json, or of a model that also sees its language model's part."""
    with naming(path):
        return language_config(read_object(path, ConfigError))


def reading_of(config: ModelConfig) -> str:
    """How labels of partial rotations were read, for people; empty where there is only one reading."""
    label = 'labelled "default" beside a partial_rotary_factor below 1, read as '
    whole = f"{label}transformers reads it: all of each head is rotated"
    trained = f'{label}"proportional", as it was trained: {config.partial_rotary_factor:g} of each head is rotated'
    readings = []
    if config.is_rope_relabelled:
        readings.append(f"rope_parameters.full_attention: {trained if config.partial_rotary_factor < 1.0 else whole}")
    if config.is_sliding_factor_ignored:
        readings.append(f"rope_parameters.sliding_attention: {whole}")
    return "; ".join(readings)


def parse_config(raw: _Raw, source: str, rope: str = "trained") -> ModelConfig:
    """ModelConfig from the parsed config.json; `source` names the file in ConfigErrors; `rope` as in load_config."""
    with naming(source):
        _require_known(raw)
        config = _build(raw, source, rope)
        for key, name in (ECHOES | (MIXTURE_ECHOES if config.mixture else {})).items():
            value, meant = raw.get(key), getattr(config, name)
            require(value is None or same(value, meant), key, value, f"{name}={meant}")
        return config


def _build(raw: _Raw, source: str, rope: str) -> ModelConfig:
    """Of an LFM2 the head's size follows from the hidden size, and the width is adjusted; of an LFM3 neither."""
    model_type = str(raw["model_type"])
    defaults = DEFAULTS[model_type]
    sizes: dict[str, Any] = {key: _size(raw, key, default) for key, default in defaults.items() if key in SIZES}
    width = sizes.pop("intermediate_size") if "intermediate_size" in sizes else effective_width(raw)
    if "head_dim" not in sizes:
        sizes["head_dim"] = _head_dim(raw, sizes["hidden_size"], sizes["num_attention_heads"])
    layer_types = _layer_types(raw, sizes["num_hidden_layers"])
    more = lfm3_fields(raw, layer_types, rope) if model_type == "lfm3" else {"rope_theta": _rope_theta(raw)}
    tie_key = "tie_embedding" if "tie_embedding" in raw else "tie_word_embeddings"
    return ModelConfig(
        model_type=model_type,
        feed_forward_size=width,
        conv_bias=require_bool("conv_bias", raw.get("conv_bias", False)),
        layer_types=layer_types,
        norm_eps=require_real("norm_eps", raw.get("norm_eps", 1e-5)),
        max_position_embeddings=_size(raw, "max_position_embeddings", 128_000),
        tie_word_embeddings=require_bool(tie_key, raw.get(tie_key, True)),
        bos_token_id=_optional_id(raw, "bos_token_id", defaults["bos_token_id"]),
        eos_token_ids=_eos_ids(raw, source, defaults["eos_token_id"]),
        pad_token_id=_optional_id(raw, "pad_token_id", defaults["pad_token_id"]),
        mixture=parse_mixture(raw) if model_type == "lfm2_moe" else None,
        **sizes,
        **more,
    )


def effective_width(raw: _Raw) -> int:
    """Rows of w1: multiplier and rounding act only inside the adjustment. Source: transformers Lfm2MLP.__init__."""
    key = "block_ff_dim" if "block_ff_dim" in raw else "intermediate_size"
    width = _size(raw, key, 12288)
    multiple = _size(raw, "block_multiple_of", 256)
    multiplier = raw.get("block_ffn_dim_multiplier", 1.0)
    if multiplier is not None:
        multiplier = require_real("block_ffn_dim_multiplier", multiplier, integers=True)
    if not require_bool("block_auto_adjust_ff_dim", raw.get("block_auto_adjust_ff_dim", True)):
        return width
    width = int(2 * width / 3)
    if multiplier is not None:
        width = int(multiplier * width)
        width = multiple * ((width + multiple - 1) // multiple)
    return width


def parse_mixture(raw: _Raw) -> MixtureConfig:
    for key in raw:
        if key not in (*MIXTURE_KEYS, *NOT_OF_ROUTERS) and any(part in key for part in OF_ROUTERS):
            known = f"expected one of {list(MIXTURE_KEYS)}"
            raise ConfigError(f"{show_json(key)}: {show_json(raw[key])}: not a key of LFM2's router, {known}")
    for key, allowed in DENSE_ONLY.items():
        is_right = key not in raw or any(same(raw[key], value) for value in allowed)
        require(is_right, key, raw.get(key), f"{show_json(allowed[0])} or no such key in an lfm2_moe")
    fields: dict[str, Any] = {key: check(key, raw.get(key, value)) for key, (check, value) in MIXTURE_KEYS.items()}
    mixture, local = MixtureConfig(**fields), raw.get("num_local_experts")
    is_right = local is None or same(local, mixture.num_experts)
    require(is_right, "num_local_experts", local, f"num_experts={mixture.num_experts}")
    return mixture


def _require_known(raw: _Raw) -> None:
    model_type = raw.get("model_type")
    require(model_type in MODEL_TYPES, "model_type", model_type, f"one of {', '.join(MODEL_TYPES)}")
    _require_causal(raw)
    for key, allowed in (ONLY | (LFM3_ONLY if model_type == "lfm3" else {})).items():
        if allowed is not None:
            is_done = key not in raw or any(same(raw[key], value) for value in allowed)
            require_done(is_done, key, raw.get(key), f"{show_json(allowed[0])} or no such key")
    for key in ("num_experts", "num_local_experts") if model_type != "lfm2_moe" else ():
        is_right = raw.get(key) is None or same(raw[key], 0)
        require(is_right, key, raw.get(key), "no such key, or model_type 'lfm2_moe'")
    for key in ("dtype", "torch_dtype"):  # the dtype of each tensor is read from the weight file
        require(isinstance(raw.get(key), str | None), key, raw.get(key), "a string or null")


def _require_causal(raw: _Raw) -> None:
    """Published encoders say lfm2, too, with a class that looks ahead in attention and convolution."""
    classes = raw.get("architectures")
    if classes is not None and not isinstance(classes, list | tuple):
        raise ConfigError(f"architectures: {show_json(classes)}, expected a list of class names or null")
    causal = CAUSAL[str(raw["model_type"])]
    expected = f"one of {', '.join(causal)}, for model_type {show_json(raw['model_type'])}"
    for name in classes or ():
        of_another_type = any(name in classes_of_type for classes_of_type in CAUSAL.values())
        why = "" if of_another_type else ": lfm2np computes no encoder"
        require(name in causal, "architectures", name, expected + why)
    beside = f"{expected} in architectures beside it: the code that it names may compute anything"
    require(bool(classes) or not raw.get("auto_map"), "auto_map", raw.get("auto_map"), beside)


def _head_dim(raw: _Raw, hidden_size: int, heads: int) -> int:
    if raw.get("head_dim") is not None:  # null: as absent
        return _size(raw, "head_dim", 0)
    expected = f"a multiple of num_attention_heads={heads}, or head_dim"
    require(hidden_size % heads == 0, "hidden_size", hidden_size, expected)
    return hidden_size // heads


def _layer_types(raw: _Raw, layers: int) -> tuple[str, ...]:
    """layer_types, or what full_attn_idxs means; attention everywhere without either, as in transformers."""
    indices = raw.get("full_attn_idxs")
    from_indices: tuple[str, ...] | None = None
    if indices is not None:
        if not isinstance(indices, list | tuple) or not all(type(i) is int for i in indices):
            raise ConfigError(f"full_attn_idxs: {show_json(indices)}, expected a list of integers or null")
        for index in indices:
            require(0 <= index < layers, "full_attn_idxs", index, f"0 to num_hidden_layers-1={layers - 1}")
        require(len(set(indices)) == len(indices), "full_attn_idxs", indices, "no index twice")
        from_indices = tuple(ATTENTION if i in set(indices) else CONV for i in range(layers))
    named = raw.get("layer_types")
    if named is None and raw["model_type"] == "lfm3":
        return default_layer_types(layers)
    if named is None and from_indices is None and raw["model_type"] == "lfm2_moe":
        raise ConfigError("layer_types: absent, expected a list of layer types (lfm2_moe has no default)")
    if named is None:
        return from_indices if from_indices is not None else (ATTENTION,) * layers
    if not isinstance(named, list | tuple):
        raise ConfigError(f"layer_types: {show_json(named)}, expected a list of layer types or null")
    # transformers renames the legacy "attention" likewise
    types = tuple(ATTENTION if kind == "attention" else kind for kind in named)
    require_layer_types(types, layers, LAYER_TYPES[str(raw["model_type"])])
    if from_indices is not None and types != from_indices:
        attention_layers = show_json([i for i, kind in enumerate(types) if kind == ATTENTION])
        raise ConfigError(
            f"full_attn_idxs: {show_json(indices)} contradicts layer_types, which has attention in {attention_layers}"
        )
    return types


def _rope_theta(raw: _Raw) -> float:
    """rope_scaling or rope_parameters win over the top-level rope_theta, as in transformers."""
    top = require_real("rope_theta", raw.get("rope_theta", 1e6), integers=True)
    thetas: dict[str, float] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key)
        if value is not None and value != {}:
            thetas[key] = _theta_of(key, value, top)
    if len(set(thetas.values())) > 1:
        raise ConfigError(f"rope_scaling: {show_json(raw['rope_scaling'])} contradicts rope_parameters")
    return next(iter(thetas.values()), top)


def _theta_of(key: str, value: object, top: float) -> float:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}: {show_json(value)}, expected an object or null")
    if value.keys() & {ATTENTION, CONV}:  # nested by layer type: only attention layers rotate
        inner = value.get(ATTENTION)
        if not isinstance(inner, Mapping) or value.keys() - {ATTENTION, CONV}:
            raise ConfigError(f"{key}: {show_json(value)}, expected an object under full_attention and nothing else")
        is_right = value.get(CONV) is None or value[CONV] == inner
        require(is_right, f"{key}.conv", value.get(CONV), "null or the same as full_attention")
        return _theta_of(f"{key}.full_attention", dict(inner), top)
    for name in ("rope_type", "type"):
        require_done(value.get(name, "default") == "default", f"{key}.{name}", value.get(name), "'default'")
    unknown = [k for k in value if k not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")]
    if unknown:
        raise ConfigError(f"{key}.{show_json(unknown[0])}: not a parameter of the default RoPE, expected rope_theta")
    factor = value.get("partial_rotary_factor")
    is_whole = any(same(factor, whole) for whole in ONLY["partial_rotary_factor"])
    require(is_whole, f"{key}.partial_rotary_factor", factor, "1.0")
    return require_real("rope_theta", value.get("rope_theta", top), integers=True)


def _optional_id(raw: _Raw, key: str, default: int) -> int | None:
    value = raw.get(key, default)
    if value is not None and type(value) is not int:
        raise ConfigError(f"{key}: {show_json(value)}, expected an integer or null")
    return value


def _eos_ids(raw: _Raw, source: str, default: int | None) -> tuple[int, ...]:
    value = raw.get("eos_token_id", default)
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    are_integers = all(type(token_id) is int for token_id in ids)
    require(are_integers, f"{source}: eos_token_id", value, "an integer, a list of integers or null")
    return tuple(dict.fromkeys(ids))


def _size(raw: _Raw, key: str, default: int) -> int:
    return require_size(key, raw.get(key, default))
