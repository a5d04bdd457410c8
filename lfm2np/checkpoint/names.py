"""What safetensors files call our tensors: an LFM3's, those of a model that also sees, experts fused, mlx-lm's.

Source: transformers 5.24, models/lfm2_moe, models/lfm3, models/lfm2_vl and models/lfm3_vl: AutoModel of text_config
under model.language_model, and the head beside it; older files have language_model.model and language_model.lm_head.
mlx_lm/models/lfm2.py and lfm2_moe.py, sanitize: taps are [D, L, 1], and a mixture's w1, w2, w3 are called gate_proj,
down_proj, up_proj, those of a layer's experts stacked under switch_mlp.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

from lfm2np.checkpoint.layout import Place, Plan
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.errors import CheckpointError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import Dim, layout_of
from lfm2np.truth.weights import EMBEDDING, HEAD
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
FUSED = ("gate_up_proj", "down_proj")  # as transformers holds an lfm2_moe's experts: [E, 2F, D], w1 then w3; [E, D, F]
OF_MLX = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
FEED_FORWARD = re.compile(r"(model\.layers\.[0-9]+\.feed_forward)(?:\.experts\.([0-9]+))?\.(w[123])\.weight")


def in_file(name: str) -> str:
    """What an LFM3's file calls the tensor that is called so here."""
    for ours, theirs in OF_LFM3.items():
        name = name.replace(ours, theirs)
    return name


def plan_of(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> Plan:
    """Where ours stand among a file's. A head counts where the file has one, too: a tied model's may repeat it."""
    layout = layout_of(config)
    if any(name.startswith(HEAD.removesuffix("weight")) for name in tensors):
        layout[HEAD] = layout[EMBEDDING]
    if config.mixture is not None:
        is_mlx = any(f".{theirs}.weight" in name for name in tensors for theirs in OF_MLX.values())
        return {name: (_of_mixture(name, dims, tensors, is_mlx), dims) for name, dims in layout.items()}
    called = in_file if config.model_type == "lfm3" else str
    plan = {name: (_taps(called(name), dims, tensors), dims) for name, dims in layout.items()}
    if any(".self_attn.gate_proj." in name for name in tensors):  # an older name of g_proj, which transformers reads
        for name, (place, dims) in plan.items():
            plan[name] = place._replace(name=place.name.replace(".g_proj.", ".gate_proj.")), dims
    return plan


def _of_mixture(name: str, dims: tuple[Dim, ...], tensors: Mapping[str, StoredTensor], is_mlx: bool) -> Place:
    if (matched := FEED_FORWARD.fullmatch(name)) is None:
        return _taps(name, dims, tensors)
    folder, expert, part = matched.groups()
    if is_mlx:
        stack = "" if expert is None else "switch_mlp."
        return Place(f"{folder}.{stack}{OF_MLX[part]}.weight", None if expert is None else int(expert))
    fused = [f"{folder}.experts.{each}" for each in FUSED]
    if expert is None or not any(each in tensors for each in fused):
        return Place(name)
    if part == "w2":
        return Place(fused[1], int(expert))
    width, origin = dims[0]
    return Place(fused[0], int(expert), width if part == "w3" else 0, (2 * width, f"2*{origin}"))


def _taps(name: str, dims: tuple[Dim, ...], tensors: Mapping[str, StoredTensor]) -> Place:
    is_turned = len(dims) == 3 and name in tensors and tensors[name].shape == (dims[0][0], dims[2][0], 1)
    return Place(name, axes=(0, 2, 1) if is_turned else None)


def language_tensors(tensors: Mapping[str, StoredTensor], source: str) -> dict[str, StoredTensor]:
    """Those of a model that also sees which its language model has alone; a warning says how many others there are."""
    language: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
            alone = PREFIXES[prefix] + name.removeprefix(prefix)
            if alone in language:
                both = f"{plain(name)} and {plain(language[alone].name)}"
                raise CheckpointError(f"{source}: {both}: expected one of them")
            language[alone] = tensor
    left_out = f"{len(tensors) - len(language)} of vision and projector are left out"
    warnings.warn(f"{source}: the language model alone, {len(language)} tensors; {left_out}", stacklevel=2)
    return language
