"""`locate` on what forward hooks dump of transformers: right in every format and attention, and wrong where broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.models.lfm2 import modeling_lfm2

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.oracle.locate.dump import read_dump
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.locate.operations import OPTIONAL, operations

pytestmark = pytest.mark.peers

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
DIRECTORIES = [
    FIXTURES / "trained",
    FIXTURES / "torture" / "biased_two_taps",
    FIXTURES / "torture" / "six_heads_two_kv",
]
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENS = 40


def loaded(directory: Path, dtype: torch.dtype, attention: str = "eager") -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention).eval()


@contextmanager
def hooked(model: Any, into: dict[str, torch.Tensor]) -> Iterator[None]:
    """Outputs of all modules, by their names, and of the convolution, which 5.x calls as a function."""

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor):
                into[name] = tensor.detach().contiguous().clone()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    original, layers = (
        modeling_lfm2.causal_conv1d_fn,
        iter(index for index, kind in enumerate(model.config.layer_types) if kind == "conv"),
    )

    def convolve(*arguments: Any, **options: Any) -> torch.Tensor:
        output = original(*arguments, **options)
        into[f"model.layers.{next(layers)}.conv.conv"] = output.detach().contiguous().clone()
        return output

    modeling_lfm2.causal_conv1d_fn = convolve
    try:
        yield
    finally:
        modeling_lfm2.causal_conv1d_fn = original
        for handle in handles:
            handle.remove()


def report_of(model: Any, directory: Path, folder: Path) -> Report:
    """Run, dumped to a file, read back and held against its own inputs."""
    config = load_config(directory)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, config.vocab_size, TOKENS))
    dumped: dict[str, torch.Tensor] = {}
    with torch.no_grad(), hooked(model, dumped):
        model(ids[None], use_cache=False)
    dumped = {name: tensor for name, tensor in dumped.items() if not name.endswith("rotary_emb")}
    save_file(dumped | {"token_ids": ids}, folder / "dump.safetensors")
    dump = read_dump(folder / "dump.safetensors", config)
    return locate(open_checkpoint(directory, config), config, dump)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
def test_transformers_is_right_in_every_operation(tmp_path: Path, directory: Path, name: str, attention: str) -> None:
    report = report_of(loaded(directory, TYPES[name], attention), directory, tmp_path)
    assert report.format == name
    assert report.findings == ()
    assert max(check.error for check in report.checks) < 0.7
    names = {operation.name for operation in operations(load_config(directory))}
    between = (".u", ".gated", "_rotated", "attended", "residual", *OPTIONAL)  # no module's output
    assert names - {check.name for check in report.checks} == {key for key in names if key.endswith(between)}


@pytest.mark.parametrize("name", TYPES)
def test_transformers_with_one_weight_changed_is_wrong_in_its_channel(tmp_path: Path, name: str) -> None:
    model = loaded(DIRECTORIES[0], TYPES[name])
    with torch.no_grad():
        model.model.layers[3].feed_forward.w3.weight[17] *= 1.25
    first = report_of(model, DIRECTORIES[0], tmp_path).findings[0]
    assert (first.name, first.channels) == ("model.layers.3.feed_forward.w3", "channel 17 of 256")
