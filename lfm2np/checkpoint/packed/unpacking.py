"""Our matrices, found among the tensors of a directory by what its config.json says of them."""

from __future__ import annotations

from collections.abc import Mapping

from lfm2np.checkpoint.packed import auto, compressed, mlx
from lfm2np.checkpoint.packed.auto_settings import AutoSettings
from lfm2np.checkpoint.packed.compressed_settings import CompressedSettings
from lfm2np.checkpoint.packed.rows import PackedRows
from lfm2np.checkpoint.packed.settings import Settings
from lfm2np.checkpoint.stored import DTYPES, StoredTensor
from lfm2np.errors import CheckpointError
from lfm2np.model.config import ModelConfig
from lfm2np.model.layers import layout_of
from lfm2np.model.weights import HEAD
from lfm2np.values import plain


def unpacked(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, settings: Settings | None, source: str
) -> dict[str, StoredTensor]:
    """Under our names; what is none of ours keeps its own. CheckpointError names the file, the tensor and the key."""
    if settings is None and not mlx.has_their_names(tensors):
        return mlx.with_our_taps(tensors, config)
    if isinstance(settings, CompressedSettings):
        found = compressed.with_matrices(tensors, config, settings, source)
    elif isinstance(settings, AutoSettings):
        found = auto.with_matrices(tensors, config, settings, source)
    else:
        found = mlx.in_our_names(tensors, config, settings, source)
    known = layout_of(config).keys() | {HEAD}
    for name in sorted(found.keys() & known):  # others are refused as unexpected
        one = found[name]
        if not isinstance(one.values, PackedRows) and one.dtype not in DTYPES:
            raise CheckpointError(
                f"{one.source}: {plain(one.name)}: dtype {one.dtype}, expected one of {', '.join(DTYPES)} of what is "
                "not quantised"
            )
    return found
