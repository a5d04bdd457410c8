"""The fixtures' config.json through transformers: what vLLM reads off Lfm2Config, and what train.py writes."""

from __future__ import annotations

from pathlib import Path

import make_goldens
import pytest
import train
import transformers
from engine_keys import spelled
from tokenizers import Tokenizer

from lfm2np.checkpoint.config_json import load_config

pytestmark = pytest.mark.peers

NAMES = ("trained", "draft", "hand")
# vLLM 0.32.0, models/lfm2.py and layers/mamba/short_conv.py: all that is read there of the config.
VLLM_READS = {
    "architectures",
    "block_auto_adjust_ff_dim",
    "block_dim",
    "block_ffn_dim_multiplier",
    "block_multiple_of",
    "conv_L_cache",
    "conv_bias",
    "conv_dim",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "norm_eps",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rope_parameters",
    "vocab_size",
}


@pytest.mark.parametrize("name", NAMES)
def test_lfm2config_keeps_what_vllm_reads_off_it(name: str, tmp_path: Path) -> None:
    """`block_dim` and `conv_dim` are no fields of Lfm2Config: they are there because the file says them."""
    folder = make_goldens.FIXTURES / name
    read = transformers.AutoConfig.from_pretrained(folder)
    assert {key for key in VLLM_READS if not hasattr(read, key)} == set()
    meant = spelled(load_config(folder))
    for key in VLLM_READS & set(meant):
        assert getattr(read, key) == meant[key], key
    read.save_pretrained(tmp_path)
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert {key: getattr(again, key) for key in VLLM_READS} == {key: getattr(read, key) for key in VLLM_READS}
    assert load_config(tmp_path).layer_types == load_config(folder).layer_types


@pytest.mark.parametrize("name", ["draft", "lfm3", "moe", "trained"])
def test_train_writes_the_fixtures_files_beside_the_weights(name: str, tmp_path: Path) -> None:
    folder = make_goldens.FIXTURES / name
    config = train.config_of(name)
    train.save(train.make_model(config), config, Tokenizer.from_file(str(folder / "tokenizer.json")), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in folder.iterdir()}
    for written in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / written).read_bytes() == (folder / written).read_bytes(), written
