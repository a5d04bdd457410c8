"""The language model of a checkpoint that also sees: its own config and tensors, without those of vision and projector.

Source: transformers 5.24, models/lfm2_vl and models/lfm3_vl: AutoModel of text_config under model.language_model, and
the head beside it; older files have language_model.model and language_model.lm_head.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.strict_json import is_present, read_object
from lfm2np.errors import CheckpointError, ConfigError
from lfm2np.values import show_json

LANGUAGE_MODEL = {"lfm2_vl": "lfm2", "lfm3_vl": "lfm3"}  # model_type -> that of its text_config
PREFIXES = {  # of a tensor's name in the file -> in a checkpoint of the language model alone
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
OF_BOTH = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "tie_embedding", "dtype", "torch_dtype"),
    *("quantization", "quantization_config", "compression_config", "architectures", "auto_map"),
)


def language_config(raw: Mapping[str, object]) -> Mapping[str, object]:
    """text_config with what stands above it for both parts; the whole where nothing sees."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in LANGUAGE_MODEL:
        return raw
    text = raw.get("text_config")
    expected = f"an object with the config of an {LANGUAGE_MODEL[kind]}"
    if not isinstance(text, dict):
        raise ConfigError(f"text_config: {show_json(text)}, expected {expected}")
    if text.get("model_type", LANGUAGE_MODEL[kind]) not in (LANGUAGE_MODEL[kind], "lfm2_moe"):
        raise ConfigError(f"text_config.model_type: {show_json(text['model_type'])}, expected {LANGUAGE_MODEL[kind]!r}")
    above = {key: raw[key] for key in OF_BOTH if raw.get(key) is not None}
    above_only = ("architectures", "auto_map")
    inside = {key: value for key, value in text.items() if value is not None and key not in above_only}
    return {"model_type": LANGUAGE_MODEL[kind], **above, **inside}


def language_tensors(tensors: dict[str, StoredTensor], directory: Path, source: str) -> dict[str, StoredTensor]:
    """Those of the language model, by the names that it has alone; a warning says how many others are left out."""
    path = directory / "config.json"
    if not is_present(path, ConfigError) or read_object(path, ConfigError).get("model_type") not in LANGUAGE_MODEL:
        return tensors
    language: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is not None:
            our_name = PREFIXES[prefix] + name.removeprefix(prefix)
            if our_name in language:
                raise CheckpointError(f"{source}: {name} and {language[our_name].name}: expected one of them")
            language[our_name] = tensor
    left_out = len(tensors) - len(language)
    warnings.warn(
        f"{source}: the language model alone, {len(language)} tensors; {left_out} of vision and projector are left out",
        stacklevel=2,
    )
    return language
