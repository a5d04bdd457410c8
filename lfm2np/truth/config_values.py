"""Checks of single values of config.json: sizes, reals, truth values, token ids."""

from __future__ import annotations

from lfm2np.errors import ConfigError
from lfm2np.values import show_json

SIZES: dict[str, tuple[int, int]] = {
    # Smallest and largest size accepted: generous for any real model, too small for a hostile allocation or loop.
    # 2**18 positions are also the most terms that exact arithmetic adds: of a softmax over the context.
    "vocab_size": (1, 2**17),
    "hidden_size": (1, 2**17),
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 1024),
    "num_key_value_heads": (1, 1024),
    "head_dim": (2, 2**12),
    "intermediate_size": (1, 2**18),  # as the file spells it, before the adjustment
    "block_ff_dim": (1, 2**18),
    "block_multiple_of": (1, 2**17),
    "feed_forward_size": (1, 2**17),
    "conv_L_cache": (1, 64),
    "sliding_window": (1, 2**17),
    "max_position_embeddings": (1, 2**18),
    "num_experts": (1, 1024),
    "num_experts_per_tok": (1, 1024),
    "moe_intermediate_size": (1, 2**17),
    "num_dense_layers": (0, 1024),
}
REALS: dict[str, tuple[float, float]] = {
    "norm_eps": (1e-30, 1.0),
    "rope_theta": (1.0, 1e30),
    "sliding_rope_theta": (1.0, 1e30),
    "partial_rotary_factor": (0.0, 1.0),
    "sliding_partial_rotary_factor": (0.0, 1.0),
    "block_ffn_dim_multiplier": (1e-6, 1e3),
    "routed_scaling_factor": (1e-6, 1e6),
}


def require_size(name: str, value: object) -> int:
    """An integer within SIZES[name]; True and "12" are not integers."""
    low, high = SIZES[name]
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name}: {show_json(value)}, expected an integer from {low} to {high}")
    return value


def require_real(name: str, value: object, integers: bool = False) -> float:
    """A float (or an integer where transformers takes one) within REALS[name]; NaN and infinity are outside."""
    low, high = REALS[name]
    if not (type(value) is float or (integers and type(value) is int)) or not low <= value <= high:
        raise ConfigError(
            f"{name}: {show_json(value)}, expected a {'number' if integers else 'float'} from {low} to {high}"
        )
    return float(value)


def require_bool(name: str, value: object) -> bool:
    """True or False, nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: {show_json(value)}, expected true or false")
    return value


def require_token_id(name: str, value: object, vocab_size: int) -> None:
    """An integer in [0, vocab_size)."""
    if type(value) is not int or not 0 <= value < vocab_size:
        raise ConfigError(f"{name}: {show_json(value)}, expected an integer from 0 to vocab_size-1={vocab_size - 1}")
