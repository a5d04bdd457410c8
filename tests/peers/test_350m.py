"""A checkpoint with the exact shapes of LFM2-350M and random weights, made by transformers, read by lfm2np.

All of it takes about two minutes, 3 GB of memory and 0.7 GB of disk.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from builders import OLD_350M
from numpy.typing import NDArray
from safetensors import safe_open

import lfm2np
from lfm2np.arithmetic import numerics_named
from lfm2np.checkpoint.config_json import load_config
from lfm2np.truth.layers import expected_tensors, parameter_count

pytestmark = [pytest.mark.peers, pytest.mark.slow]

Array = NDArray[Any]
PARAMETERS = 354_483_968
DECIDED = 1e-4  # a token counts where its float64 margin is larger
FORCED = 64  # teacher-forced positions
GENERATED = 12
EMBEDDING_SCALE = 2.0 / 32.0  # logits deviate by about 2, since the last norm gives states of length sqrt(1024) = 32

MEASURE = """
import json, resource, sys, time
import lfm2np
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
imported, began = peak(), time.monotonic()
lfm2np.load(sys.argv[1], sys.argv[2])
print(json.dumps({"seconds": time.monotonic() - began, "bytes": peak() - imported, "imported": imported}))
"""
# Linux counts the memory of the process that forked as the child's own peak: a small one must stand in between.
IN_BETWEEN = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"


@dataclass(frozen=True)
class Peer:
    """What transformers says in float32, and the float64 logits of the same tokens."""

    forced: list[int]  # ids
    forced_float32: Array  # [FORCED, V]
    forced_float64: Array
    prompts: list[list[int]]
    generated: list[list[int]]  # greedy, by float32, with transformers' own cache
    generated_float64: list[Array]  # [GENERATED, V], of the rows that the generated tokens are chosen from


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The checkpoint; config.json is transformers' own, from the first published one with its old spellings."""
    path = tmp_path_factory.mktemp("LFM2-350M")
    torch.manual_seed(350)
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**cast(dict[str, Any], OLD_350M))).bfloat16()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.normal_(1.0, 0.1)
            elif name.endswith("embed_tokens.weight"):
                weight.normal_(0.0, EMBEDDING_SCALE)
            elif name.endswith("conv.conv.weight"):
                weight.normal_(0.0, 0.6)
            else:
                weight.normal_(0.0, 1.0 / weight.shape[1] ** 0.5)
    model.save_pretrained(path)
    del model
    yield path
    shutil.rmtree(path)  # pytest keeps the files of its last three runs


def load_peer(directory: Path, dtype: torch.dtype) -> Any:
    return transformers.Lfm2ForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def logits_of(model: Any, ids: list[int]) -> Array:
    with torch.no_grad():
        array: Array = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return array


@pytest.fixture(scope="module")
def peer(directory: Path) -> Peer:
    """One model at a time: float64 alone takes 2.8 GB."""
    rng = np.random.default_rng(350)
    forced = rng.integers(0, 65536, FORCED).tolist()
    prompts = [rng.integers(0, 65536, length).tolist() for length in (5, 17)]
    model = load_peer(directory, torch.float32)
    forced_float32 = logits_of(model, forced)
    options = {"do_sample": False, "max_new_tokens": GENERATED, "eos_token_id": None}
    whole = [model.generate(torch.tensor([ids]), **options)[0].tolist() for ids in prompts]
    del model
    model = load_peer(directory, torch.float64)
    return Peer(
        forced,
        forced_float32,
        logits_of(model, forced),
        prompts,
        [ids[len(prompt) :] for ids, prompt in zip(whole, prompts, strict=True)],
        [logits_of(model, ids)[len(prompt) - 1 : -1] for ids, prompt in zip(whole, prompts, strict=True)],
    )


def is_decided(float64_logits: Array) -> Array:
    """Rows whose best logit leads by more than DECIDED."""
    top = np.partition(float64_logits, -2, axis=-1)[..., -2:]
    return np.asarray(top[..., 1] - top[..., 0] > DECIDED)


def test_transformers_saves_exactly_the_tensors_that_the_config_calls_for(directory: Path) -> None:
    config = load_config(directory)
    with safe_open(str(directory / "model.safetensors"), framework="numpy") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert saved == expected_tensors(config)
    assert len(saved) == 148
    assert parameter_count(config) == PARAMETERS
    assert config.feed_forward_size == 4608


def test_info_counts_the_parameters(directory: Path) -> None:
    command = [sys.executable, "-m", "lfm2np", "info", "--json", "--model", str(directory)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(shown)["parameters"] == PARAMETERS


@pytest.mark.parametrize("numerics", ["exact", "float32"])
def test_loading_peaks_at_little_more_than_the_prepared_weights(
    directory: Path, numerics: str, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Apart from the imports, and from the mapped file, whose pages the system may drop."""
    command = [sys.executable, "-c", IN_BETWEEN, sys.executable, "-c", MEASURE, str(directory), numerics]
    measured = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    file_bytes = (directory / "model.safetensors").stat().st_size
    memory_bytes = measured["bytes"] - file_bytes
    weight_bytes = numerics_named(numerics).weight_bytes
    record_property("seconds", measured["seconds"])
    record_property("bytes", measured["bytes"])
    with capsys.disabled():
        print(
            f"\n{numerics}: loaded in {measured['seconds']:.1f} s, peak {measured['bytes'] / 1e9:.2f} GB over "
            f"{measured['imported'] / 1e6:.0f} MB of imports, {memory_bytes / PARAMETERS:.2f} bytes a parameter "
            "without the file"
        )
    assert measured["imported"] < 300e6
    assert memory_bytes <= 1.25 * weight_bytes * PARAMETERS


@pytest.mark.parametrize("numerics", ["exact", "float32"])
def test_greedy_tokens_are_transformers_wherever_float64_decides(
    directory: Path, peer: Peer, numerics: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = lfm2np.load(directory, numerics)
    ours = model.logits(peer.forced)
    decided = is_decided(peer.forced_float64)
    assert decided.mean() > 0.9
    assert ours.argmax(-1)[decided].tolist() == peer.forced_float32.argmax(-1)[decided].tolist()
    our_error, peer_error = (np.abs(x - peer.forced_float64).max() for x in (ours, peer.forced_float32))
    different = set()
    for prompt, tokens, wide in zip(peer.prompts, peer.generated, peer.generated_float64, strict=True):
        generated = [
            token.token_id for token, _ in zip(model.stream(prompt, GENERATED), range(GENERATED), strict=False)
        ]
        agreed = next(
            (i for i, pair in enumerate(zip(generated, tokens, strict=True)) if pair[0] != pair[1]), GENERATED
        )
        assert not is_decided(wide[agreed : agreed + 1]).any(), f"token {agreed} of {generated}, expected {tokens}"
        different |= set(generated)
    with capsys.disabled():
        print(
            f"\n{numerics}: logits (deviation {peer.forced_float64.std():.2f}) off by {our_error:.1e}, transformers "
            f"float32 by {peer_error:.1e}; {decided.sum()} of {FORCED} forced positions decided; "
            f"{len(different)} different tokens generated"
        )
    if numerics == "exact":
        assert our_error <= peer_error
    assert len(different) >= GENERATED // 2
