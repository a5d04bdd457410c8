"""`ModelConfig` from config.json: one table of keys, old and new spellings, refusals instead of guesses.

Source: transformers 5.24, models/lfm2 (Lfm2Config, Lfm2MLP), models/lfm2_moe (Lfm2MoeConfig, Lfm2MoeTopKRouter,
Lfm2MoeSparseMoeBlock), models/lfm3 (Lfm3Config, Lfm3RotaryEmbedding), models/lfm2_vl and models/lfm3_vl. Absent keys
take the defaults of the model_type's class. A key that asks for another computation, or two keys that contradict each
other where transformers would silently ignore one, raise ConfigError; keys that nobody knows are one warning.

Released LFM3 checkpoints label the rotation of full attention "default" beside a partial_rotary_factor of 0.5. What was
trained is the "proportional" rotation, in which so many pairs of a head turn; transformers ignores the factor under
"default", and turns all. Here such an entry is proportional whatever its label, unless the reading is "transformers".
Of an entry of sliding attention nobody says that something else was trained: it is read as transformers reads it.
Source of what was trained: NVIDIA NeMo AutoModel, components/models/lfm3, which relabels the entry.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.strict_json import is_present, naming, read_object, require
from lfm2np.errors import ConfigError
from lfm2np.truth.config import (
    ATTENTION,
    CONV,
    LAYER_TYPES,
    MODEL_TYPES,
    SLIDING,
    MixtureConfig,
    ModelConfig,
    require_layer_types,
)
from lfm2np.truth.config_values import require_bool, require_real, require_size
from lfm2np.values import same, show_json

READINGS = ("trained", "transformers")  # of the label "default" beside a partial_rotary_factor
_Raw = Mapping[str, object]


def optional_id(key: str, value: object) -> int | None:
    require(value is None or type(value) is int, key, value, "an integer or null")
    return value  # type: ignore[return-value]


def token_ids(key: str, value: object) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    require(all(type(token_id) is int for token_id in ids), key, value, "an integer, a list of integers or null")
    return tuple(dict.fromkeys(ids))


def optional_size(key: str, value: object) -> int | None:
    return None if value is None else require_size(key, value)


Read = Callable[[str, object], Any]
NONE = object()  # no such key, or one from which the field follows in another way
KEYS: dict[str, tuple[str, Read, object, object, object]] = {
    # key: field of ModelConfig or MixtureConfig, how it is checked, default of an lfm2, an lfm2_moe, an lfm3
    "vocab_size": ("vocab_size", require_size, 65_536, 65_536, 128_000),
    "hidden_size": ("hidden_size", require_size, 2560, 2048, 2048),
    "num_hidden_layers": ("num_hidden_layers", require_size, 32, 32, 24),
    "num_attention_heads": ("num_attention_heads", require_size, 32, 32, 16),
    "num_key_value_heads": ("num_key_value_heads", require_size, 8, 8, 4),
    "head_dim": ("head_dim", require_size, NONE, NONE, 128),  # see _head_dim
    "intermediate_size": ("feed_forward_size", require_size, NONE, 7168, 7680),  # see effective_width
    "conv_L_cache": ("conv_L_cache", require_size, 3, 3, 7),
    "conv_bias": ("conv_bias", require_bool, False, False, False),
    "norm_eps": ("norm_eps", require_real, 1e-5, 1e-5, 1e-5),
    "max_position_embeddings": ("max_position_embeddings", require_size, 128_000, 128_000, 128_000),
    "tie_word_embeddings": ("tie_word_embeddings", require_bool, True, True, True),
    "bos_token_id": ("bos_token_id", optional_id, 1, 1, 124_894),
    "eos_token_id": ("eos_token_ids", token_ids, 2, 2, 124_900),
    "pad_token_id": ("pad_token_id", optional_id, 0, 0, 124_893),
    "sliding_window": ("sliding_window", optional_size, NONE, NONE, 256),
    "use_sandwich_norm": ("use_sandwich_norm", require_bool, NONE, NONE, True),
    "use_attention_gate": ("use_attention_gate", require_bool, NONE, NONE, True),
    "attention_bias": ("attention_bias", require_bool, NONE, NONE, False),
    "num_experts": ("num_experts", require_size, NONE, 32, NONE),
    "num_experts_per_tok": ("num_experts_per_tok", require_size, NONE, 4, NONE),
    "moe_intermediate_size": ("moe_intermediate_size", require_size, NONE, 1792, NONE),
    "num_dense_layers": ("num_dense_layers", require_size, NONE, 2, NONE),
    "use_expert_bias": ("use_expert_bias", require_bool, NONE, True, NONE),
    "norm_topk_prob": ("norm_topk_prob", require_bool, NONE, True, NONE),
    "routed_scaling_factor": ("routed_scaling_factor", require_real, NONE, 1.0, NONE),
}
OF_MIXTURES = tuple(field.name for field in dataclasses.fields(MixtureConfig))
REPLACED = {"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"}  # the second counts
ECHOES = {  # old, redundant keys that transformers ignores: they must repeat the field that counts
    "block_dim": "hidden_size",
    "conv_dim": "hidden_size",
    "conv_dim_out": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "block_norm_eps": "norm_eps",
    "rms_norm_eps": "norm_eps",
    "theta": "rope_theta",
}
OFF, ANY = (False, None), None
ONE = (None, 1.0, 1)
ONLY: dict[str, tuple[tuple[object, ...] | None, ...]] = {
    # Keys that would change the computation, and the values under which they don't in an lfm2, an lfm2_moe, an lfm3;
    # absent is fine. ANY: the key is read, or changes nothing.
    "block_use_swiglu": ((True, None),) * 3,
    "use_pos_enc": ((True, None),) * 3,
    "sliding_window": ((None,), (None,), ANY),
    "use_sliding_window": (OFF, OFF, (True, None)),
    "hidden_act": (("silu", None),) * 3,
    "hidden_activation": (("silu", None),) * 3,
    "attention_bias": (OFF, OFF, ANY),
    "mlp_bias": (OFF,) * 3,
    "partial_rotary_factor": (ONE,) * 3,
    "final_logit_softcapping": ((None,),) * 3,
    "attn_logit_softcapping": ((None,),) * 3,
    "attention_multiplier": ((None,),) * 3,
    "logits_scaling": (ONE,) * 3,
    "logit_scale": (ONE,) * 3,
    "embedding_multiplier": (ONE,) * 3,
    "residual_multiplier": (ONE,) * 3,
    "is_causal": ((True,),) * 3,  # transformers 5.24 attends both ways under false
    "use_bidirectional_attention": (OFF,) * 3,
    "is_encoder_decoder": (OFF,) * 3,
    "quantization_config": ((None,),) * 3,
    "compression_config": ((None,),) * 3,
    "per_layer_config": ((None,),) * 3,
    "num_experts": ((0, None), ANY, (0, None)),
    "num_local_experts": ((0, None), ANY, (0, None)),
    "full_attn_idxs": (ANY, ANY, (None,)),
    "block_ff_dim": (ANY, ANY, (None,)),
    "block_multiple_of": (ANY, ANY, (None,)),
    "block_auto_adjust_ff_dim": (ANY, OFF, (None,)),
    "block_ffn_dim_multiplier": (ANY, ONE, (None,)),
}
OF_ROUTERS = (  # a key with one of these is about them, as other families' configs show
    *("expert", "rout", "moe", "topk", "scor", "n_group", "gate_"),
    *("dense_replace", "sparse_step", "mlp_only"),
)
NOT_OF_ROUTERS = ("num_local_experts", "output_router_logits", "router_aux_loss_coef")  # the last two for training
LFM2_CLASSES = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration")  # the last: its text part
CAUSAL = {  # the classes that a config.json may name, by its model_type
    "lfm2": LFM2_CLASSES,
    "lfm2_moe": LFM2_CLASSES,
    "lfm3": ("Lfm3ForCausalLM", "Lfm3VlForConditionalGeneration"),
}
QUANTISATION = ("quantization", "quantization_config")
LANGUAGE_MODEL = {"lfm2_vl": "lfm2", "lfm3_vl": "lfm3"}  # model_type -> that of its text_config
OF_BOTH = (  # keys beside text_config that are about the language model, too
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "tie_embedding", "dtype", "torch_dtype"),
    *(*QUANTISATION, "architectures", "auto_map"),
)
LABEL_IN_DOUBT = {ATTENTION: "is_rope_relabelled", SLIDING: "is_sliding_factor_ignored"}  # fields of ModelConfig
DEFAULT_ROPES: dict[str, dict[str, object]] = {  # of an lfm3
    ATTENTION: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
READ = {  # all keys that count
    *(*KEYS, *REPLACED.values(), *ECHOES, *ONLY, "model_type", "architectures", "auto_map"),
    *("dtype", "torch_dtype", "layer_types", "rope_theta", "rope_parameters", "rope_scaling"),
}
KEYS_WITHOUT_EFFECT = """
    initializer_range block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init
    attention_dropout hidden_dropout dropout router_aux_loss_coef output_router_logits gradient_checkpointing
    unsloth_fixed unsloth_version _name_or_path name_or_path transformers_version _attn_implementation_autoset
    _attn_implementation attn_implementation _experts_implementation use_cache tokenizer_class is_decoder
    output_attentions output_hidden_states return_dict id2label label2id problem_type torchscript image_token_id
    do_sample temperature top_k top_p min_length max_length repetition_penalty sep_token_id pruned_heads
    """
# How weights were drawn before training, how they were trained, what transformers' classes do besides, and how they
# generate: nothing of that is of the network.
IGNORED = frozenset(KEYS_WITHOUT_EFFECT.split())


def load_config(directory: Path, rope: str = "trained") -> ModelConfig:
    """ModelConfig of a checkpoint's directory; the eos ids are config.json's, then generation_config.json's.

    rope  how an LFM3's partial rotation that is labelled "default" is read, one of READINGS

    What config.json says of quantised tensors is read by packed/: it is no property of the model.
    """
    path = directory / "config.json"
    raw = {key: value for key, value in language_config_of(path).items() if key not in QUANTISATION}
    config = parse_config(raw, str(path), rope)
    if unread := sorted(key for key, value in raw.items() if value is not None and key not in READ | IGNORED):
        why = "not read, as no published config of these models has such keys"
        warnings.warn(f"{path}: {', '.join(unread)}: {why}", stacklevel=2)
    if config.model_type != "lfm3" and raw.get("rope_theta", config.rope_theta) != config.rope_theta:
        why = f"not used, since rope_parameters or rope_scaling has {config.rope_theta}, as in transformers"
        warnings.warn(f"{path}: rope_theta {show_json(raw['rope_theta'])}: {why}", stacklevel=2)
    if reading := reading_of(config):
        warnings.warn(f"{path}: {reading}", stacklevel=2)
    generation = directory / "generation_config.json"
    if not is_present(generation, ConfigError):
        return config
    with naming(generation):
        more = token_ids("eos_token_id", read_object(generation, ConfigError).get("eos_token_id"))
        return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))


def language_config_of(path: Path) -> _Raw:
    """config.json; of a model that also sees, text_config with what stands above it for both parts."""
    with naming(path):
        whole = read_object(path, ConfigError)
        model_type = whole.get("model_type")
        if not isinstance(model_type, str) or model_type not in LANGUAGE_MODEL:
            return whole
        text, kind = whole.get("text_config"), LANGUAGE_MODEL[model_type]
        if not isinstance(text, dict):
            raise ConfigError(f"text_config: {show_json(text)}, expected an object with the config of an {kind}")
        its_type = text.get("model_type", kind)
        require(its_type in (kind, "lfm2_moe"), "text_config.model_type", its_type, repr(kind))
        above = {key: whole[key] for key in OF_BOTH if whole.get(key) is not None}
        inside = {k: value for k, value in text.items() if value is not None and k not in ("architectures", "auto_map")}
        return {"model_type": kind, **above, **inside}


def is_vision_language(directory: Path) -> bool:
    path = directory / "config.json"
    return is_present(path, ConfigError) and read_object(path, ConfigError).get("model_type") in LANGUAGE_MODEL


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
        fields = _fields(raw, rope)
        config = ModelConfig(**fields)
        # An lfm2_moe ignores this one, of which an lfm2's width is made.
        echoes = ECHOES | ({"block_ff_dim": "feed_forward_size"} if config.mixture else {})
        for key, name in echoes.items():
            value, meant = raw.get(key), getattr(config, name)
            require(value is None or same(value, meant), key, value, f"{name}={meant}")
        return config


def _require_known(raw: _Raw) -> None:
    model_type = raw.get("model_type")
    require(model_type in MODEL_TYPES, "model_type", model_type, f"one of {', '.join(MODEL_TYPES)}")
    _require_causal(raw)
    for key, by_type in ONLY.items():
        allowed = by_type[MODEL_TYPES.index(str(model_type))]
        if allowed is not ANY and key in raw:
            expected = f"{show_json(allowed[0])} or no such key in an {model_type}"
            require(any(same(raw[key], value) for value in allowed), key, raw[key], expected)
    for key in ("dtype", "torch_dtype"):  # the dtype of each tensor is read from the weight file
        require(isinstance(raw.get(key), str | None), key, raw.get(key), "a string or null")


def _require_causal(raw: _Raw) -> None:
    """Published encoders say lfm2, too, with a class that looks ahead in attention and convolution."""
    classes, causal = raw.get("architectures"), CAUSAL[str(raw["model_type"])]
    if not isinstance(classes, list | tuple | None):
        raise ConfigError(f"architectures: {show_json(classes)}, expected a list of class names or null")
    expected = f"one of {', '.join(causal)}, for model_type {show_json(raw['model_type'])}"
    for name in classes or ():
        why = "" if any(name in of_type for of_type in CAUSAL.values()) else ": lfm2np computes no encoder"
        require(name in causal, "architectures", name, expected + why)
    beside = f"{expected} in architectures beside it: the code that it names may compute anything"
    require(bool(classes) or not raw.get("auto_map"), "auto_map", raw.get("auto_map"), beside)


def _fields(raw: _Raw, rope: str) -> dict[str, Any]:
    """Of ModelConfig, by the tables."""
    model_type = str(raw["model_type"])
    fields: dict[str, Any] = {"model_type": model_type}
    for key, (field, read, *defaults) in KEYS.items():
        if (default := defaults[MODEL_TYPES.index(model_type)]) is not NONE:
            spelled = REPLACED.get(key, key) if key == "tie_word_embeddings" and REPLACED[key] in raw else key
            fields[field] = read(spelled, raw.get(spelled, default))
    fields["layer_types"] = _layer_types(raw, fields["num_hidden_layers"])
    if model_type == "lfm3":
        return fields | _rotations(raw, fields["layer_types"], rope)
    fields["rope_theta"] = _rope_theta(raw)
    fields["head_dim"] = _head_dim(raw, fields["hidden_size"], fields["num_attention_heads"])
    if model_type == "lfm2_moe":
        return fields | {"mixture": _mixture(raw, {name: fields.pop(name) for name in OF_MIXTURES})}
    return fields | {"feed_forward_size": effective_width(raw)}


def effective_width(raw: _Raw) -> int:
    """Rows of w1 of an lfm2: multiplier and rounding act only inside the adjustment. Source: Lfm2MLP.__init__."""
    key = REPLACED["intermediate_size"] if REPLACED["intermediate_size"] in raw else "intermediate_size"
    width = require_size(key, raw.get(key, 12288))
    multiple = require_size("block_multiple_of", raw.get("block_multiple_of", 256))
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


def _mixture(raw: _Raw, fields: dict[str, Any]) -> MixtureConfig:
    for key in raw:
        if key not in (*OF_MIXTURES, *NOT_OF_ROUTERS) and any(part in key for part in OF_ROUTERS):
            known = f"expected one of {list(OF_MIXTURES)}"
            raise ConfigError(f"{show_json(key)}: {show_json(raw[key])}: not a key of LFM2's router, {known}")
    mixture, local = MixtureConfig(**fields), raw.get("num_local_experts")
    is_right = local is None or same(local, mixture.num_experts)
    require(is_right, "num_local_experts", local, f"num_experts={mixture.num_experts}")
    return mixture


def _head_dim(raw: _Raw, hidden_size: int, heads: int) -> int:
    if raw.get("head_dim") is not None:  # null: as absent
        return require_size("head_dim", raw["head_dim"])
    expected = f"a multiple of num_attention_heads={heads}, or head_dim"
    require(hidden_size % heads == 0, "hidden_size", hidden_size, expected)
    return hidden_size // heads


def _layer_types(raw: _Raw, layers: int) -> tuple[str, ...]:
    """layer_types, or what full_attn_idxs means; attention everywhere without either, as in transformers."""
    model_type, named, indices = str(raw["model_type"]), raw.get("layer_types"), raw.get("full_attn_idxs")
    if indices is not None:
        if not isinstance(indices, list | tuple) or not all(type(i) is int for i in indices):
            raise ConfigError(f"full_attn_idxs: {show_json(indices)}, expected a list of integers or null")
        for index in indices:
            require(0 <= index < layers, "full_attn_idxs", index, f"0 to num_hidden_layers-1={layers - 1}")
        require(len(set(indices)) == len(indices), "full_attn_idxs", indices, "no index twice")
        of_indices = tuple(ATTENTION if i in set(indices) else CONV for i in range(layers))
    if named is None:
        if model_type == "lfm3":
            return tuple(ATTENTION if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else CONV for i in range(layers))
        if indices is None and model_type == "lfm2_moe":
            said = "null" if "layer_types" in raw else "absent"
            raise ConfigError(f"layer_types: {said}, expected a list of layer types (lfm2_moe has no default)")
        return (ATTENTION,) * layers if indices is None else of_indices
    if not isinstance(named, list | tuple):
        raise ConfigError(f"layer_types: {show_json(named)}, expected a list of layer types or null")
    # transformers renames the legacy "attention" likewise
    types = tuple(ATTENTION if kind == "attention" else kind for kind in named)
    require_layer_types(types, layers, LAYER_TYPES[model_type])
    if indices is not None and types != of_indices:
        attention = show_json([i for i, kind in enumerate(types) if kind == ATTENTION])
        why = f"contradicts layer_types, which has attention in {attention}"
        raise ConfigError(f"full_attn_idxs: {show_json(indices)} {why}")
    return types


# --- rotations


def _rotation(key: str, entry: object, labels: tuple[str, ...], theta: object = None) -> tuple[str, float, float]:
    """Its label, theta (`theta` where it has none), and the share of a head's pairs that turn."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key}: {show_json(entry)}, expected an object")
    for name in entry:
        if name not in ("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"):
            raise ConfigError(f"{key}.{show_json(name)}: not a parameter of {' or '.join(labels)} rotations")
    for name in ("type", "rope_type"):
        require(entry.get(name, labels[0]) in labels, f"{key}.{name}", entry.get(name), " or ".join(labels))
    is_one = any(same(entry.get("factor"), value) for value in (None, 1.0))
    require(is_one, f"{key}.factor", entry.get("factor"), "1.0 or no such key")
    factor = entry.get("partial_rotary_factor")
    if theta is None and "rope_theta" not in entry:
        raise ConfigError(f"{key}.rope_theta: absent, expected a number")
    with naming(key, joint="."):
        share = 1.0 if factor is None else require_real("partial_rotary_factor", factor, integers=True)
        theta = require_real("rope_theta", entry.get("rope_theta", theta), integers=True)
    return str(entry.get("rope_type", entry.get("type", labels[0]))), theta, share


def _rope_theta(raw: _Raw) -> float:
    """Of an lfm2: rope_scaling or rope_parameters win over the top-level rope_theta, as in transformers."""
    top = require_real("rope_theta", raw.get("rope_theta", 1e6), integers=True)
    thetas: dict[str, float] = {}
    for key in ("rope_scaling", "rope_parameters"):
        entry = raw.get(key)
        if entry is None or entry == {}:
            continue
        if isinstance(entry, Mapping) and ATTENTION in entry:  # nested by layer type: only attention layers rotate
            is_right = entry.keys() <= {ATTENTION, CONV} and entry.get(CONV) in (None, entry[ATTENTION])
            require(is_right, key, entry, "an object under full_attention, the same or null under conv")
            key, entry = f"{key}.{ATTENTION}", entry[ATTENTION]
        _, thetas[key], share = _rotation(key, entry, ("default",), top)
        require(share == 1.0, f"{key}.partial_rotary_factor", share, "1.0")
    if len(set(thetas.values())) > 1:
        raise ConfigError(f"rope_scaling: {show_json(raw['rope_scaling'])} contradicts rope_parameters")
    return next(iter(thetas.values()), top)


def _rotations(raw: _Raw, layer_types: tuple[str, ...], reading: str) -> dict[str, object]:
    """Of an lfm3: the fields that say how queries and keys are rotated in each kind of attention that there is."""
    keys = (key for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None)
    entries = raw[key] if (key := next(keys, None)) else DEFAULT_ROPES
    kinds = [kind for kind in (ATTENTION, SLIDING) if kind in layer_types]
    if not isinstance(entries, Mapping) or not all(isinstance(entries.get(kind), Mapping) for kind in kinds):
        raise ConfigError(f"rope_parameters: {show_json(entries)}, expected an object for each of {', '.join(kinds)}")
    fields: dict[str, object] = {"rope_theta": 1e6}
    for kind in kinds:
        label, theta, share = _rotation(f"rope_parameters.{kind}", entries[kind], ("default", "proportional"))
        if label == "default" and share != 1.0:
            fields[LABEL_IN_DOUBT[kind]] = True
            share = share if kind == ATTENTION and reading == "trained" else 1.0
        prefix = "" if kind == ATTENTION else "sliding_"
        fields |= {f"{prefix}rope_theta": theta, f"{prefix}partial_rotary_factor": share}
    return fields
