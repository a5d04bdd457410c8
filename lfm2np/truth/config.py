"""What an LFM2 or LFM3 is: its sizes, its kinds of layers, its rotations, its experts.

checkpoint/config_json.py reads it from config.json, checkpoint/gguf/gguf_config.py from a GGUF file. Source:
transformers, models/lfm2, Lfm2Config, models/lfm2_moe, Lfm2MoeConfig, and models/lfm3, Lfm3Config.
"""

from __future__ import annotations

from dataclasses import dataclass

from lfm2np.errors import ConfigError
from lfm2np.truth.config_values import REALS, SIZES, require_bool, require_real, require_size, require_token_id
from lfm2np.truth.rope import Rope
from lfm2np.values import show_json

CONV, ATTENTION, SLIDING = "conv", "full_attention", "sliding_attention"
LAYER_TYPES = {"lfm2": (CONV, ATTENTION), "lfm2_moe": (CONV, ATTENTION), "lfm3": (CONV, ATTENTION, SLIDING)}
MODEL_TYPES = tuple(LAYER_TYPES)
BOOLS = ("conv_bias", "tie_word_embeddings", "use_sandwich_norm", "use_attention_gate", "attention_bias")
MOST_EXPERTS = 2**15  # of all layers: generous, and too few for a hostile table of tensors


@dataclass(frozen=True)
class MixtureConfig:
    """Experts of all layers from `num_dense_layers` on; construction checks every value and raises ConfigError.

    moe_intermediate_size is an expert's width. A token's experts are those with the largest score,
    plus `expert_bias` if there is one; their weights are the scores alone, divided by their sum if `norm_topk_prob`,
    times routed_scaling_factor.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_dense_layers: int
    use_expert_bias: bool
    norm_topk_prob: bool
    routed_scaling_factor: float

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_dense_layers"):
            require_size(name, getattr(self, name))
        for name in ("use_expert_bias", "norm_topk_prob"):
            require_bool(name, getattr(self, name))
        require_real("routed_scaling_factor", self.routed_scaling_factor)
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok: {self.num_experts_per_tok}, expected at most num_experts={self.num_experts}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """One LFM2 model; construction checks every value and raises ConfigError.

    feed_forward_size is the effective width (rows of w1) of dense layers; layer_types has one of LAYER_TYPES per layer;
    mixture is None where all layers are dense.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    feed_forward_size: int
    conv_L_cache: int
    conv_bias: bool
    layer_types: tuple[str, ...]
    norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    mixture: MixtureConfig | None = None
    model_type: str = "lfm2"
    sliding_window: int | None = None  # positions that layers of sliding attention see, a token's own included
    sliding_rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0  # of full attention: see rope.Rope
    sliding_partial_rotary_factor: float = 1.0
    use_sandwich_norm: bool = False
    use_attention_gate: bool = False
    attention_bias: bool = False
    is_rope_relabelled: bool = False  # config.json labels a partial rotation "default": see checkpoint/config_json.py
    is_sliding_factor_ignored: bool = False  # and that of sliding attention, which turns whole heads

    def is_sparse(self, layer: int) -> bool:
        """Whether that layer's feed-forward is a mixture of experts."""
        return self.mixture is not None and layer >= self.mixture.num_dense_layers

    def layers_of(self, *kinds: str) -> tuple[int, ...]:
        """The numbers of the layers of some of LAYER_TYPES."""
        return tuple(layer for layer, kind in enumerate(self.layer_types) if kind in kinds)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return self.layers_of(ATTENTION, SLIDING)

    def rope(self, kind: str) -> Rope:
        """The rotation of layers of one kind of attention."""
        is_lfm3 = self.model_type == "lfm3"
        if kind == SLIDING:
            return Rope(self.sliding_rope_theta, self.sliding_partial_rotary_factor, is_lfm3)
        return Rope(self.rope_theta, self.partial_rotary_factor, is_lfm3)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The numbers of those layers; there may be none in an lfm2_moe, too."""
        return tuple(filter(self.is_sparse, range(self.num_hidden_layers)))

    def __post_init__(self) -> None:
        for name in (key for key in SIZES if getattr(self, key, None) is not None):
            require_size(name, getattr(self, name))
        for name in (key for key in REALS if hasattr(self, key)):
            require_real(name, getattr(self, name))
        for name in BOOLS:
            require_bool(name, getattr(self, name))
        require_layer_types(self.layer_types, self.num_hidden_layers, LAYER_TYPES[self.model_type])
        if self.sliding_window is not None:
            require_size("sliding_window", self.sliding_window)
        elif SLIDING in self.layer_types:
            raise ConfigError(f"sliding_window: null, expected a size for layers of {SLIDING}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads: {self.num_attention_heads}, expected a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: {self.head_dim}, expected an even number (RoPE turns halves)")
        for name in ("bos_token_id", "pad_token_id"):
            if getattr(self, name) is not None:
                require_token_id(name, getattr(self, name), self.vocab_size)
        sparse = len(self.sparse_layers)
        if self.mixture is not None and sparse * self.mixture.num_experts > MOST_EXPERTS:
            raise ConfigError(
                f"num_experts: {self.mixture.num_experts} in each of {sparse} layers, expected at most {MOST_EXPERTS} "
                "in all"
            )
        for token_id in self.eos_token_ids:
            require_token_id("eos_token_id", token_id, self.vocab_size)


def require_layer_types(types: tuple[object, ...], layers: int, allowed: tuple[str, ...]) -> None:
    """One of those that the model may have for each layer."""
    for index, kind in enumerate(types):
        if kind not in allowed:
            raise ConfigError(f"layer_types[{index}]: {show_json(kind)}, expected one of {', '.join(allowed)}")
    if len(types) != layers:
        raise ConfigError(f"layer_types: {len(types)} entries, expected num_hidden_layers={layers}")
