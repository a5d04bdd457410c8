"""config.json and ids against transformers: the same raw input, the same meaning; chats are in test_prompts_peer.py."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from builders import OLD_350M, VOCAB_SIZE, raw_config, raw_mixture, tiny_config, write_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lfm2np.checkpoint.config_json import OF_MIXTURES as KEYS
from lfm2np.checkpoint.config_json import load_config, parse_config
from lfm2np.checkpoint.names import FUSED
from lfm2np.checkpoint.text.tokenizer import load_tokenizer
from lfm2np.truth.layers import expected_tensors, parameter_count

pytestmark = pytest.mark.peers

ROPE = {"rope_type": "default", "rope_theta": 5e5}
CHANGES: list[dict[str, object]] = [
    {},
    {"block_ff_dim": 40},
    {"block_ff_dim": 40, "block_auto_adjust_ff_dim": True},
    {"layer_types": None, "full_attn_idxs": [0]},
    {"layer_types": None, "full_attn_idxs": []},
    {"layer_types": None},
    {"layer_types": ["attention", "conv"]},
    {"layer_types": ["conv", "conv"], "full_attn_idxs": []},
    {"tie_embedding": False},
    {"tie_embedding": False, "tie_word_embeddings": True},
    {"tie_embedding": True, "tie_word_embeddings": False},
    {"tie_word_embeddings": False},
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "theta": 5e5},
    {"rope_theta": 500000},
    {"rope_parameters": ROPE},
    {"rope_parameters": ROPE, "rope_theta": 1e4},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e4},
    {"rope_parameters": {}},
    {"rope_parameters": None, "rope_scaling": None, "rope_theta": 1e4},
    {"rope_scaling": {"type": "default"}, "rope_theta": 1e4},
    {"rope_scaling": {"rope_theta": 1e4}},
    {"rope_scaling": {"rope_theta": 1e4}, "rope_parameters": {"rope_theta": 1e4}, "rope_theta": 2.0},
    {"head_dim": 32},
    {"head_dim": 6, "hidden_size": 17},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
    {"conv_bias": True, "conv_L_cache": 5},
    {"conv_L_cache": 1},
    {"eos_token_id": [4, 2]},
    {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None},
    {"norm_eps": 1e-6, "max_position_embeddings": 7},
    {"torch_dtype": "float32", "use_cache": False, "never_heard_of": 3},
]
SPARSE: list[dict[str, object]] = [
    {},
    {"use_expert_bias": False},
    {"norm_topk_prob": False, "routed_scaling_factor": 2.5, "num_experts_per_tok": 4},
    {"num_dense_layers": 0},
    {"num_dense_layers": 3},
    {"num_dense_layers": 9},
    {"tie_embedding": False},
    {"tie_embedding": False, "tie_word_embeddings": True},
    {"rope_theta": 5e6},
    {"rope_theta": 5e6, "theta": 5e6},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000}},
    {"head_dim": 6, "conv_bias": True, "conv_L_cache": 4},
    {"layer_types": ["attention", "conv", "conv"]},
    {"eos_token_id": [4, 2], "norm_eps": 1e-6},
    {"block_ff_dim": 24, "block_multiple_of": 7, "num_local_experts": 4, "router_aux_loss_coef": 0.1},
]
A1B = {"num_hidden_layers": 24, "layer_types": ["conv"] * 18 + ["full_attention"] * 6}  # the order changes no count
FULL: list[dict[str, object]] = [OLD_350M, {"model_type": "lfm2", "num_hidden_layers": 2, "hidden_size": 64}]
FULL += [{"model_type": "lfm2_moe"} | A1B]
RAW = [*(raw_config(**changes) for changes in CHANGES), *(raw_mixture(**changes) for changes in SPARSE), *FULL]


@pytest.mark.parametrize("raw", RAW)
def test_our_config_is_what_transformers_builds(raw: dict[str, object]) -> None:
    ours = parse_config(copy.deepcopy(raw), "config.json")
    kind = "Lfm2Moe" if raw["model_type"] == "lfm2_moe" else "Lfm2"
    theirs = getattr(transformers, f"{kind}Config")(**copy.deepcopy(raw))
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(theirs)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if ours.tie_word_embeddings:
        shapes.pop("lm_head.weight")
    assert expected_tensors(ours) == single(shapes)
    assert parameter_count(ours) == sum(parameter.numel() for parameter in model.parameters())
    if ours.mixture is not None:
        assert {name: getattr(theirs, name) for name in KEYS} == {name: getattr(ours.mixture, name) for name in KEYS}
    else:
        assert model.model.rotary_emb.rope_type == "default"
        assert model.model.rotary_emb.inv_freq.shape == (ours.head_dim // 2,)
    assert ours.layer_types == tuple(theirs.layer_types)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings == is_tied
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.norm_eps == model.model.embedding_norm.variance_epsilon
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert (ours.bos_token_id, ours.pad_token_id) == (theirs.bos_token_id, theirs.pad_token_id)
    eos = theirs.eos_token_id
    assert list(ours.eos_token_ids) == ([] if eos is None else eos if isinstance(eos, list) else [eos])


def single(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of fused experts as those of one tensor an expert."""
    split_shapes = {}
    for name, shape in shapes.items():
        prefix, _, what = name.rpartition(".")
        if what == FUSED[0]:
            half = (shape[1] // 2, shape[2])
            split_shapes |= {f"{prefix}.{e}.{which}.weight": half for e in range(shape[0]) for which in ("w1", "w3")}
        elif what == FUSED[1]:
            split_shapes |= {f"{prefix}.{e}.w2.weight": shape[1:] for e in range(shape[0])}
        else:
            split_shapes[name] = shape
    return split_shapes


@given(
    width=st.integers(8, 400),  # smaller ones may be adjusted to 0, which is refused here
    adjust=st.booleans(),
    multiple=st.integers(1, 300),
    multiplier=st.floats(0.5, 4, allow_nan=False) | st.integers(1, 4),
)
def test_any_width_is_adjusted_as_in_transformers(width: int, adjust: bool, multiple: int, multiplier: float) -> None:
    raw = raw_config(
        intermediate_size=width,
        block_auto_adjust_ff_dim=adjust,
        block_multiple_of=multiple,
        block_ffn_dim_multiplier=multiplier,
        num_hidden_layers=1,
        layer_types=["conv"],
    )
    with torch.device("meta"):
        model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**raw))
    assert model.model.layers[0].feed_forward.w1.out_features == tiny_config(**raw).feed_forward_size


def test_a_config_saved_by_transformers_loads(tmp_path: Path) -> None:
    for raw in (OLD_350M, raw_config()):
        transformers.Lfm2Config(**raw).save_pretrained(tmp_path)
        assert load_config(tmp_path) == parse_config(raw, "config.json")


@given(text=st.text(max_size=20), ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_and_text_are_those_of_transformers(tmp_path: Path, text: str, ids: list[int]) -> None:
    if not (tmp_path / "tokenizer.json").exists():
        write_tokenizer(tmp_path)
    ours = load_tokenizer(tmp_path, tiny_config())
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
