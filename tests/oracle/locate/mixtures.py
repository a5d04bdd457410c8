"""Small random checkpoints with a mixture of experts, for the tests of `locate`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from builders import raw_config, safetensors_bytes, stored

from lfm2np.checkpoint.config import load_config
from lfm2np.checkpoint.layout import expected_tensors

HOME = TemporaryDirectory(prefix="mixtures-")  # until the process ends
PLAIN, BARE, SCALED = "plain", "bare", "scaled"
CHANGES: dict[str, dict[str, object]] = {
    PLAIN: {},
    BARE: {"use_expert_bias": False, "norm_topk_prob": False, "num_experts_per_tok": 1},
    SCALED: {"routed_scaling_factor": 2.5, "num_experts_per_tok": 3, "num_dense_layers": 1},
    "all": {"num_experts": 4, "num_experts_per_tok": 4},
}
LAYER = "model.layers.1.feed_forward"  # the first sparse one


@cache
def mixture(name: str, dtype: str = "F32") -> Path:
    """A directory with the checkpoint: three layers of which the first is dense, 8 experts, 2 of a token."""
    directory = Path(HOME.name) / f"{name}-{dtype}"
    directory.mkdir()
    raw = raw_config(
        model_type="lfm2_moe",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        num_dense_layers=1,
        use_expert_bias=True,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    )
    del raw["block_auto_adjust_ff_dim"]
    (directory / "config.json").write_text(json.dumps(raw | CHANGES[name]))
    random = np.random.default_rng(7)
    tensors = {}
    for key, shape in expected_tensors(load_config(directory)).items():
        drawn = random.standard_normal(shape).astype(np.float32)
        if key.endswith("norm.weight"):
            values = 1.0 + 0.1 * drawn
        elif key.endswith("expert_bias"):
            values = 0.15 * drawn
        else:
            values = drawn / np.sqrt(shape[-1]) * (1.5 if ".gate." in key else 1.0)
        tensors[key] = stored(values, "F32" if key.endswith("expert_bias") else dtype)
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return directory
