"""Weight files with a mixture of experts: fused or one tensor an expert, the same; all else refused by name and key.

What is refused is one line with the tensor, its shape, and the key of config.json that says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import Stored, raw_mixture, safetensors_bytes, stored, stored_weights, tiny_config, write_shards

from lfm2np.arithmetic import numerics_named
from lfm2np.checkpoint.config_json import parse_config
from lfm2np.checkpoint.names import FUSED
from lfm2np.checkpoint.stored import DTYPES, StoredTensor
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.errors import CheckpointError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import expected_tensors

CONFIG = parse_config(raw_mixture(), "config.json")  # layer 0 dense; N 4, K 2, X 6, D 16
WITHOUT_BIAS = parse_config(raw_mixture(use_expert_bias=False), "config.json")
SPARSE, DENSE = "model.layers.1.feed_forward.", "model.layers.0.feed_forward."
EXPERTS = SPARSE + "experts."

Change = Callable[[dict[str, Stored]], object]


def array(tensor: Stored) -> np.ndarray:
    dtype, shape, content = tensor
    return np.frombuffer(content, DTYPES[dtype]).reshape(shape)


def fused(tensors: dict[str, Stored], layer: int = 1, keep: bool = False) -> None:
    """Joins the experts of a layer as transformers holds them; `keep` leaves the single ones there."""
    prefix = f"model.layers.{layer}.feed_forward.experts."
    parts = {which: [array(tensors[f"{prefix}{e}.{which}.weight"]) for e in range(4)] for which in ("w1", "w2", "w3")}
    dtype = tensors[f"{prefix}0.w1.weight"][0]
    gate_up = np.stack([np.concatenate(both) for both in zip(parts["w1"], parts["w3"], strict=True)])
    for name in [name for name in tensors if name.startswith(prefix) and not keep]:
        del tensors[name]
    for name, values in ((FUSED[0], gate_up), (FUSED[1], np.stack(parts["w2"]))):
        tensors[prefix + name] = (dtype, values.shape, values.tobytes())


def written(directory: Path, config: ModelConfig, *changes: Change, dtype: str = "BF16") -> Path:
    tensors = stored_weights(config, dtype)
    for change in changes:
        change(tensors)
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return directory


def plain(tensors: dict[str, StoredTensor]) -> dict[str, tuple[str, str, tuple[int, ...], bytes]]:
    """All but the source."""
    return {
        name: (tensor.name, tensor.dtype, tensor.values.shape, np.ascontiguousarray(tensor.values).tobytes())
        for name, tensor in tensors.items()
    }


def test_expected_shapes_follow_the_config() -> None:
    shapes = expected_tensors(CONFIG)
    assert shapes[DENSE + "w1.weight"] == (24, 16) and DENSE + "gate.weight" not in shapes
    assert shapes[SPARSE + "gate.weight"] == (4, 16) and shapes[SPARSE + "expert_bias"] == (4,)
    assert shapes[EXPERTS + "3.w1.weight"] == shapes[EXPERTS + "3.w3.weight"] == (6, 16)
    assert shapes[EXPERTS + "3.w2.weight"] == (16, 6) and EXPERTS + "4.w1.weight" not in shapes
    assert SPARSE + "w1.weight" not in shapes
    assert SPARSE + "expert_bias" not in expected_tensors(WITHOUT_BIAS)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("layers", [(1,), (2,), (1, 2)])
def test_fused_experts_are_the_single_ones(tmp_path: Path, layers: tuple[int, ...], dtype: str) -> None:
    """Layer by layer: a checkpoint may have both kinds."""
    (tmp_path / "single").mkdir(), (tmp_path / "fused").mkdir()
    single = open_checkpoint(written(tmp_path / "single", CONFIG, dtype=dtype), CONFIG)
    changes = [lambda tensors, layer=layer: fused(tensors, layer) for layer in layers]
    joined = open_checkpoint(written(tmp_path / "fused", CONFIG, *changes, dtype=dtype), CONFIG)
    assert list(joined) == list(single) == list(expected_tensors(CONFIG))
    assert plain(joined) == plain(single)
    assert not any(tensor.values.flags.writeable for tensor in joined.values())
    model = [prepare_weights(one, CONFIG, numerics_named("exact")) for one in (single, joined)]
    for layer in (1, 2):
        for expert in range(4):
            left, right = (weights.layers[layer].feed_forward.expert(expert) for weights in model)  # type: ignore[union-attr]
            assert left.gate_up_proj.values.tobytes() == right.gate_up_proj.values.tobytes()
            assert left.down_proj.values.tobytes() == right.down_proj.values.tobytes()


def test_fused_experts_are_views_of_the_file(tmp_path: Path) -> None:
    """Else opening a large checkpoint would read it."""
    tensors = open_checkpoint(written(tmp_path, CONFIG, fused), CONFIG)
    assert not any(tensor.values.flags.owndata for tensor in tensors.values())


def test_fused_experts_may_stand_in_two_shards(tmp_path: Path) -> None:
    tensors = stored_weights(CONFIG)
    fused(tensors)
    names = sorted(tensors)
    cut = names.index(EXPERTS + FUSED[1]) + 1
    write_shards(
        tmp_path,
        {
            "a.safetensors": {name: tensors[name] for name in names[:cut]},
            "b.safetensors": {name: tensors[name] for name in names[cut:]},
        },
    )
    assert plain(open_checkpoint(tmp_path, CONFIG))[EXPERTS + "3.w3.weight"][3] == (
        array(stored_weights(CONFIG)[EXPERTS + "3.w3.weight"]).tobytes()
    )


def put(name: str, values: np.ndarray | list[float]) -> Change:
    return lambda tensors: tensors.__setitem__(name, stored(np.asarray(values, np.float32), "F32"))


def without(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


def expert_number(number: int) -> Change:
    """One expert more."""
    shapes = {"w1": (6, 16), "w2": (16, 6), "w3": (6, 16)}
    return lambda tensors: [put(f"{EXPERTS}{number}.{w}.weight", np.ones(s))(tensors) for w, s in shapes.items()]


def no_experts(tensors: dict[str, Stored]) -> None:
    for name in [name for name in tensors if ".experts." in name]:
        del tensors[name]


GATE_UP, DOWN = EXPERTS + FUSED[0], EXPERTS + FUSED[1]
ONE_NAN = np.where(np.arange(4 * 16 * 6).reshape(4, 16, 6) == 200, np.nan, 1.0)
BY_EXPERTS = "num_hidden_layers=3, layer_types[1]="
GATE, BIAS = SPARSE + "gate.weight", SPARSE + "expert_bias"
FIRST, LAST = EXPERTS + "0.{}.weight", EXPERTS + "3.{}.weight"
REFUSED: list[tuple[list[Change], str]] = [  # what was changed, and what the message names
    ([without(LAST.format("w2"))], f"missing 1 of the 51 tensors: {LAST.format('w2')} (the first of shape (16, 6)"),
    ([without(*map(LAST.format, ("w1", "w2", "w3")))], f"w3.weight (the first of shape (6, 16); {BY_EXPERTS}"),
    ([no_experts], f"missing 24 of the 51 tensors: {EXPERTS}0.w1.weight, "),
    ([expert_number(4)], f"3 unexpected beside the 51 tensors: {EXPERTS}4.w1.weight, "),
    ([expert_number(10**30)], BY_EXPERTS),
    (
        [put(FIRST.format("w1"), np.ones((7, 16)))],
        "0.w1.weight: shape (7, 16), expected (6, 16) from moe_intermediate_",
    ),
    ([put(FIRST.format("w2"), np.ones((6, 16)))], "(16, 6) from hidden_size=16, moe_intermediate_size=6"),
    (
        [put(FIRST.format("w3"), np.full((6, 16), np.inf))],
        f"{FIRST.format('w3')}: inf at index (0, 0), expected finite",
    ),
    ([put(GATE, np.ones((5, 16)))], f"{GATE}: shape (5, 16), expected (4, 16) from num_experts=4"),
    ([without(GATE)], f"{GATE} (the first of shape (4, 16); {BY_EXPERTS}"),
    ([put(SPARSE + "gate.bias", np.ones(4))], f"1 unexpected beside the 51 tensors: {SPARSE}gate.bias"),
    ([without(BIAS)], f"missing 1 of the 51 tensors: {BIAS} (the first of shape (4,); {BY_EXPERTS}"),
    ([put(BIAS, np.ones(5))], f"{BIAS}: shape (5,), expected (4,) from num_experts=4"),
    ([put(BIAS, [1.0, np.nan, 0.0, 0.0])], f"{BIAS}: nan at index (1,), expected finite numbers"),
    ([put(SPARSE + "w1.weight", np.ones((24, 16)))], f"{SPARSE}w1.weight (the first of shape (24, 16); {BY_EXPERTS}"),
    ([put(DENSE + "gate.weight", np.ones((4, 16)))], f"{DENSE}gate.weight (the first of shape (4, 16); "),
    ([put(DENSE + "experts." + FUSED[0], np.ones((4, 12, 16)))], f"experts.{FUSED[0]} (the first of shape (4, 12, 16)"),
    ([without(DENSE + "w1.weight")], f"missing 1 of the 51 tensors: {DENSE}w1.weight"),
    ([lambda t: fused(t, keep=True)], f"12 unexpected beside the 41 tensors: {EXPERTS}0.w1.weight, "),
    ([fused, put(EXPERTS + "7.w2.weight", np.ones((16, 6)))], f"1 unexpected beside the 41 tensors: {EXPERTS}7.w2"),
    ([fused, without(DOWN)], f"missing 1 of the 41 tensors: {DOWN} (the first of shape (4, 16, 6); "),
    ([fused, without(GATE_UP)], f"missing 1 of the 41 tensors: {GATE_UP} (the first of shape (4, 12, 16); "),
    (
        [fused, put(GATE_UP, np.ones((5, 12, 16)))],
        f"{GATE_UP}: shape (5, 12, 16), expected (4, 12, 16) from num_experts",
    ),
    ([fused, put(GATE_UP, np.ones((4, 16, 12)))], "(4, 12, 16) from 2*moe_intermediate_size=12, hidden_size=16"),
    ([fused, put(DOWN, np.ones((4, 16, 7)))], "expected (4, 16, 6) from moe_intermediate_size=6"),
    ([fused, put(DOWN, ONE_NAN)], f"{DOWN}[2]: {EXPERTS}2.w2.weight: nan at index (1, 2), expected finite numbers"),
]


@pytest.mark.parametrize(("changes", "fragment"), REFUSED)
def test_a_wrong_mixture_is_refused_in_one_line(tmp_path: Path, changes: list[Change], fragment: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        prepare_weights(open_checkpoint(written(tmp_path, CONFIG, *changes), CONFIG), CONFIG, numerics_named("exact"))
    text = str(caught.value)
    assert text.startswith(str(tmp_path / "model.safetensors")) and fragment in text
    assert "\n" not in text


def test_a_bias_that_the_config_denies_is_refused(tmp_path: Path) -> None:
    """transformers would ignore it, and choose other experts than the model was trained with."""
    written(tmp_path, CONFIG)
    with pytest.raises(CheckpointError, match=r"2 unexpected .*\(the first of shape \(4,\); .*use_expert_bias=false\)"):
        open_checkpoint(tmp_path, WITHOUT_BIAS)


def test_experts_in_a_dense_model_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    written(tmp_path, config, put(SPARSE + "gate.weight", np.ones((4, 16))))
    with pytest.raises(CheckpointError, match=r"gate\.weight \(the first of shape \(4, 16\); .*model_type=lfm2\)"):
        open_checkpoint(tmp_path, config)


def test_a_fused_expert_of_another_dtype_than_its_layer_is_read(tmp_path: Path) -> None:
    """As the bias is float32 among bfloat16: each tensor has its own."""
    tensors = stored_weights(CONFIG, "F32")
    fused(tensors)
    values = np.round(array(tensors[GATE_UP]) * 8) / 8
    tensors[GATE_UP] = stored(values, "F16")
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    tensor = open_checkpoint(tmp_path, CONFIG)[EXPERTS + "1.w3.weight"]
    assert tensor.dtype == "F16" and np.array_equal(tensor.values.astype(np.float32), values[1, 6:])
