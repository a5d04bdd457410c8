"""The language model of a checkpoint that also sees: the same model as alone; what else is in it is left out."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lfm3_models import MODELS
from safetensors.numpy import load_file, save_file

import lfm2np
from lfm2np import CheckpointError, ConfigError
from lfm2np.suite.strategies.tiny_models import TinyModel, checkpoint, loaded

IDS = [5, 17, 3, 3, 9, 22, 11, 8]
ALONE = {"lfm3": MODELS["all kinds of layers"], "lfm2": TinyModel(layers="cA")}
UNTIED = {"lfm3": MODELS["no window, untied, two taps"], "lfm2": TinyModel(layers="cA", tied=False)}
CLASSES = {"lfm3": "Lfm3VlForConditionalGeneration", "lfm2": "Lfm2VlForConditionalGeneration"}
NEW = {"model.": "model.language_model.", "lm_head.": "lm_head."}
OLD = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
VISION = {"model.vision_tower.patch_embed.weight": (3, 4), "model.multi_modal_projector.linear_1.bias": (5,)}


def written(directory: Path, tiny: TinyModel, kind: str, names: dict[str, str], **config: Any) -> Path:
    """The tiny model as the language model of one that sees."""
    alone = checkpoint(tiny)
    text = json.loads((alone / "config.json").read_text())
    text.pop("architectures")
    raw = {"model_type": f"{kind}_vl", "architectures": [CLASSES[kind]], "text_config": text, "vision_config": {}}
    (directory / "config.json").write_text(json.dumps({**raw, "image_token_id": 3, **config}))
    tensors = {}
    for name, values in load_file(alone / "model.safetensors").items():
        prefix = next(prefix for prefix in names if name.startswith(prefix))
        tensors[names[prefix] + name.removeprefix(prefix)] = values
    vision = {name: np.ones(shape, np.float32) for name, shape in VISION.items()}
    save_file({**tensors, **vision}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("names", [NEW, OLD], ids=["new names", "old names"])
@pytest.mark.parametrize("kind", ["lfm2", "lfm3"])
@pytest.mark.parametrize("models", [ALONE, UNTIED], ids=["tied", "untied"])
def test_it_is_the_same_model_as_alone(tmp_path: Path, models: dict[str, TinyModel], kind: str, names: dict[str, str]):
    directory = written(tmp_path, models[kind], kind, names)
    with pytest.warns(UserWarning, match=r"the language model alone, \d+ tensors; 2 of vision and projector"):
        model = lfm2np.load(directory)
    assert model.logits(IDS).tobytes() == loaded(models[kind]).logits(IDS).tobytes()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"text_config": None}, "text_config: null, expected an object with the config of an lfm3"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type: 'llama', expected 'lfm3'"),
        ({"architectures": ["Lfm3VlModelWithAnotherHead"]}, "architectures: 'Lfm3VlModelWithAnotherHead'"),
    ],
)
def test_what_is_no_language_model_of_ours_is_refused(tmp_path: Path, config: dict[str, Any], message: str):
    directory = written(tmp_path, ALONE["lfm3"], "lfm3", NEW, **config)
    with pytest.raises(ConfigError, match=re.escape(str(directory / "config.json")) + ".*" + re.escape(message)):
        lfm2np.load(directory)


def test_a_tensor_under_both_names_is_refused(tmp_path: Path):
    directory = written(tmp_path, ALONE["lfm3"], "lfm3", NEW)
    tensors = load_file(directory / "model.safetensors")
    tensors["language_model.model.embed_tokens.weight"] = tensors["model.language_model.embed_tokens.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected one of them"):
        lfm2np.load(directory)


def test_the_gate_may_have_its_older_name(tmp_path: Path):
    """transformers 5.24 renames gate_proj (conversion_mapping.py)."""
    alone = checkpoint(ALONE["lfm3"])
    (tmp_path / "config.json").write_bytes((alone / "config.json").read_bytes())
    tensors = load_file(alone / "model.safetensors")
    renamed = {name.replace(".g_proj.", ".gate_proj."): values for name, values in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    assert lfm2np.load(tmp_path).logits(IDS).tobytes() == loaded(ALONE["lfm3"]).logits(IDS).tobytes()
    save_file({**tensors, **renamed}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2 unexpected beside .*1\.self_attn\.g_proj\.weight, "):
        lfm2np.load(tmp_path)
