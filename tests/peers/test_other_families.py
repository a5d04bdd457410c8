"""`check --against itself` calls transformers' own models of other families right: padded batches, random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lfm2np.commands.cli import main

pytestmark = pytest.mark.peers
LOGITS = 3.0  # their standard deviation
PLAIN = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
DELTA = {"layer_types": [LINEAR, FULL] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MAMBA = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {  # by transformers' model_type, what differs from PLAIN
    "llama": {},
    "gemma3_text": {
        "sliding_window": 16,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        "query_pre_attn_scalar": 32,
    },
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "falcon_h1": MAMBA,
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64},
    "olmo_hybrid": {**DELTA, "pad_token_id": 0, "eos_token_id": 2},
    "qwen3_moe": EXPERTS,
}


@pytest.mark.night
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_engine_of_another_family_holds(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = AutoConfig.for_model(family, **{**PLAIN, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:  # each product keeps the size of its input
                scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5 * (LOGITS if "lm_head" in name else 1.0)
                weight.normal_(0.0, scale)
    model.save_pretrained(tmp_path)
    sizes = ("--block-size", "8", "--max-num-batched-tokens", "32", "--max-num-seqs", "4", "--max-model-len", "192")
    target = (f"transformers:padded:{tmp_path}", "--model", str(tmp_path), "--vocab-size", "512")
    code = main(["check", *target, "--against", "itself", "--format", "bfloat16", *sizes, "--json"])
    relations = json.loads(capsys.readouterr().out)["figures"]["relations"]
    assert code == 0 and "BROKEN" not in {each["outcome"] for each in relations}, relations
    assert sum(each.get("positions", 0) for each in relations) > 500
