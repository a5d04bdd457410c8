"""The mixture of experts of a config.json whose model_type is lfm2_moe.

Source: transformers models/lfm2_moe, Lfm2MoeConfig, Lfm2MoeTopKRouter and Lfm2MoeSparseMoeBlock.
"""

from __future__ import annotations

from collections.abc import Mapping

from lfm2np.errors import ConfigError
from lfm2np.model.config import MixtureConfig
from lfm2np.model.config_values import require_bool, require_real, require_size
from lfm2np.values import same, show

KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "num_dense_layers",
    "use_expert_bias",
    "norm_topk_prob",
    "routed_scaling_factor",
)
OF_ROUTERS = (  # a key with one of these is about them, as other families' configs show
    *("expert", "rout", "moe", "topk", "scor", "n_group", "gate_"),
    *("dense_replace", "sparse_step", "mlp_only"),
)
IGNORED = ("output_router_logits", "router_aux_loss_coef")  # for training
DENSE_ONLY: dict[str, tuple[object, ...]] = {
    # Lfm2Config's adjustment of the feed-forward's width, which Lfm2MoeConfig does not know, and where it does nothing.
    "block_auto_adjust_ff_dim": (False, None),
    "block_ffn_dim_multiplier": (None, 1.0, 1),
}


def parse_mixture(raw: Mapping[str, object]) -> MixtureConfig:
    """From the parsed config.json of an lfm2_moe; absent keys take Lfm2MoeConfig's defaults."""
    for key in raw:
        if key not in KEYS + IGNORED and key != "num_local_experts" and any(part in key for part in OF_ROUTERS):
            raise ConfigError(
                f"{show(key)}: {show(raw[key])}: not a key of LFM2's router, expected one of {list(KEYS)}"
            )
    for key, allowed in DENSE_ONLY.items():
        if key in raw and not any(same(raw[key], value) for value in allowed):
            raise ConfigError(f"{key}: {show(raw[key])}, expected {show(allowed[0])} or no such key in an lfm2_moe")
    mixture = MixtureConfig(
        num_experts=require_size("num_experts", raw.get("num_experts", 32)),
        num_experts_per_tok=require_size("num_experts_per_tok", raw.get("num_experts_per_tok", 4)),
        moe_intermediate_size=require_size("moe_intermediate_size", raw.get("moe_intermediate_size", 1792)),
        num_dense_layers=require_size("num_dense_layers", raw.get("num_dense_layers", 2)),
        use_expert_bias=require_bool("use_expert_bias", raw.get("use_expert_bias", True)),
        norm_topk_prob=require_bool("norm_topk_prob", raw.get("norm_topk_prob", True)),
        routed_scaling_factor=require_real("routed_scaling_factor", raw.get("routed_scaling_factor", 1.0)),
    )
    if raw.get("num_local_experts") is not None and not same(raw["num_local_experts"], mixture.num_experts):
        raise ConfigError(
            f"num_local_experts: {show(raw['num_local_experts'])}, expected num_experts={mixture.num_experts}"
        )
    return mixture
