"""What files call our tensors: an LFM3's, and those of a model that also sees.

Source: transformers 5.24, models/lfm3, models/lfm2_vl and models/lfm3_vl: AutoModel of text_config under
model.language_model, and the head beside it; older files have language_model.model and language_model.lm_head.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set

from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.errors import CheckpointError
from lfm2np.values import plain

OF_LFM3 = {  # our names of tensors in a layer -> theirs
    "self_attn.out_proj.": "self_attn.o_proj.",
    "self_attn.q_layernorm.": "self_attn.q_norm.",
    "self_attn.k_layernorm.": "self_attn.k_norm.",
}
PREFIXES = {  # of the language model's tensors in the file of a model that also sees -> in one of it alone
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}


def in_file(name: str) -> str:
    """What an LFM3's file calls the tensor that is called so here."""
    for ours, theirs in OF_LFM3.items():
        name = name.replace(ours, theirs)
    return name


def in_ours(name: str) -> str:
    """The name here of an LFM3's tensor that its file calls so, or of a part of a quantised one."""
    for ours, theirs in OF_LFM3.items():
        name = name.replace(theirs, ours)
    return name.replace("self_attn.gate_proj.", "self_attn.g_proj.")  # as transformers renames it, too


def language_tensors(tensors: Mapping[str, StoredTensor], source: str) -> dict[str, StoredTensor]:
    """Those of a model that also sees which its language model has alone; a warning says how many others there are."""
    language: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
            add(language, PREFIXES[prefix] + name.removeprefix(prefix), tensor, source)
    left_out = f"{len(tensors) - len(language)} of vision and projector are left out"
    warnings.warn(f"{source}: the language model alone, {len(language)} tensors; {left_out}", stacklevel=2)
    return language


def lfm3_tensors(tensors: Mapping[str, StoredTensor], source: str) -> dict[str, StoredTensor]:
    """An LFM3's by the names of truth/weights.py; each keeps the file's own, for messages and quantisers' settings."""
    ours: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if in_file(name) != name:
            raise CheckpointError(f"{source}: {plain(name)}: expected {plain(in_file(name))} in an lfm3")
        add(ours, in_ours(name), tensor, source)
    return ours


def add(tensors: dict[str, StoredTensor], name: str, tensor: StoredTensor, source: str) -> None:
    if name in tensors:
        both = f"{plain(tensor.name)} and {plain(tensors[name].name)}"
        raise CheckpointError(f"{source}: {both}: expected one of them")
    tensors[name] = tensor


def listed(names: Set[str]) -> str:
    """The first of them, for messages."""
    return ", ".join(plain(name) for name in sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
