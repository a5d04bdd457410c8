"""`ModelConfig` from the config.json of an LFM3, and what its file calls the tensors.

Source: transformers 5.24, models/lfm3, Lfm3Config, Lfm3Attention and Lfm3RotaryEmbedding.

Released checkpoints label the rotation of full attention "default" beside a partial_rotary_factor of 0.5. What was
trained is the "proportional" rotation, in which so many pairs of a head turn; transformers ignores the factor under
"default", and turns all. Here such an entry is proportional whatever its label, unless the reading is "transformers".
Of an entry of sliding attention nobody says that something else was trained: it is read as transformers reads it.
Source of what was trained: NVIDIA NeMo AutoModel, components/models/lfm3, which relabels the entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lfm2np.checkpoint.strict_json import naming, require, require_done
from lfm2np.errors import ConfigError
from lfm2np.truth.config import ATTENTION, CONV, SLIDING
from lfm2np.truth.config_values import require_bool, require_real, require_size
from lfm2np.values import same, show_json

LABEL_IN_DOUBT = {ATTENTION: "is_rope_relabelled", SLIDING: "is_sliding_factor_ignored"}  # fields of ModelConfig
READINGS = ("trained", "transformers")  # of the label "default" beside a partial_rotary_factor
DEFAULT_ROPES: dict[str, dict[str, object]] = {
    ATTENTION: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
REFUSED = (
    "block_ff_dim",
    "block_multiple_of",
    "block_ffn_dim_multiplier",
    "block_auto_adjust_ff_dim",
    "full_attn_idxs",
)
FILE_NAMES = {  # our names of tensors in a layer -> theirs
    "self_attn.out_proj.": "self_attn.o_proj.",
    "self_attn.q_layernorm.": "self_attn.q_norm.",
    "self_attn.k_layernorm.": "self_attn.k_norm.",
}


def in_file(name: str) -> str:
    """What an LFM3's file calls the tensor that is called so here."""
    for ours, theirs in FILE_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def in_ours(name: str) -> str:
    """The name here of an LFM3's tensor that its file calls so, or of a part of a quantised one."""
    for ours, theirs in FILE_NAMES.items():
        name = name.replace(theirs, ours)
    return name.replace("self_attn.gate_proj.", "self_attn.g_proj.")  # as transformers renames it, too


def default_layer_types(layers: int) -> tuple[str, ...]:
    return tuple(ATTENTION if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else CONV for i in range(layers))


def lfm3_fields(raw: Mapping[str, object], layer_types: tuple[str, ...], reading: str) -> dict[str, Any]:
    """The fields of ModelConfig that an LFM3 has beside an LFM2, and its rotations."""
    for key in REFUSED:
        require(raw.get(key) is None, key, raw.get(key), "no such key in an lfm3")
    window = raw.get("sliding_window", 256)
    kinds = tuple(kind for kind in (ATTENTION, SLIDING) if kind in layer_types)
    return {
        "sliding_window": None if window is None else require_size("sliding_window", window),
        "use_sandwich_norm": require_bool("use_sandwich_norm", raw.get("use_sandwich_norm", True)),
        "use_attention_gate": require_bool("use_attention_gate", raw.get("use_attention_gate", True)),
        "attention_bias": require_bool("attention_bias", raw.get("attention_bias", False)),
        **parse_ropes(raw, kinds, reading),
    }


def parse_ropes(raw: Mapping[str, object], kinds: tuple[str, ...], reading: str) -> dict[str, object]:
    """The fields of ModelConfig that say how queries and keys are rotated; `kinds` are those of the layers."""
    keys = (key for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None)
    entries = raw[key] if (key := next(keys, None)) else DEFAULT_ROPES
    if not isinstance(entries, Mapping) or not all(isinstance(entries.get(kind), Mapping) for kind in kinds):
        raise ConfigError(f"rope_parameters: {show_json(entries)}, expected an object for each of {', '.join(kinds)}")
    fields: dict[str, object] = {}
    for kind, prefix in ((ATTENTION, ""), (SLIDING, "sliding_")):
        if kind in kinds:
            theta, share, relabelled = rope_of(f"rope_parameters.{kind}", dict(entries[kind]), kind, reading)
            fields |= {f"{prefix}rope_theta": theta, f"{prefix}partial_rotary_factor": share}
            fields |= {LABEL_IN_DOUBT[kind]: True} if relabelled else {}
    return {"rope_theta": 1e6} | fields


def rope_of(key: str, entry: Mapping[str, object], kind: str, reading: str) -> tuple[float, float, bool]:
    """Theta, the share of a head's pairs that turn, and whether the label says otherwise."""
    for name in entry:
        if name not in ("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"):
            raise ConfigError(f"{key}.{show_json(name)}: not a parameter of LFM3's rotations")
    label = entry.get("rope_type", entry.get("type", "default"))
    require(label in ("default", "proportional"), f"{key}.rope_type", label, "'default' or 'proportional'")
    is_one = any(same(entry.get("factor"), value) for value in (None, 1.0))
    require_done(is_one, f"{key}.factor", entry.get("factor"), "1.0 or no such key")
    if "rope_theta" not in entry:
        raise ConfigError(f"{key}.rope_theta: absent, expected a number")
    factor = entry.get("partial_rotary_factor")
    with naming(key, joint="."):
        theta = require_real("rope_theta", entry["rope_theta"], integers=True)
        share = 1.0 if factor is None else require_real("partial_rotary_factor", factor, integers=True)
    if label == "proportional" or share == 1.0:
        return theta, share, False
    as_trained = kind == ATTENTION and reading == "trained"
    return theta, share if as_trained else 1.0, True
