"""The same bits under other BLAS kernels, thread counts and SIMD paths, each in its own process.

`OPENBLAS_CORETYPE` chooses the kernels of NumPy's OpenBLAS, `NPY_DISABLE_CPU_FEATURES` switches off NumPy's own
vector code. Each has a control that has to fail the same check: the plain float32 path, and NumPy's own exp.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import blas
import pytest

import lfm2np

FIXTURES = Path(__file__).parent.parent / "fixtures"
CHECKPOINTS = [*sorted((FIXTURES / "torture").iterdir()), *(FIXTURES / name for name in ("moe", "lfm3", "trained"))]
KERNELS = [one for one in blas.KERNELS if blas.can_run(one) and one != "Zen"]  # whose are Haswell's

# The digests of the trained fixtures, as the README states them: any machine must print the same.
TRAINED_DIGEST = "23cd8b8395bb7a2048cbc726a7ca94185b1bd2c5b10ca3c4ca8b7718ec27a428"
MOE_DIGEST = "bd40174d2188a425425b4aa554a8a7a77c99987617003649a0d6abe2ae5ea8b4"
LFM3_DIGEST = "f968365024a3d66b2101bcf5cdb8b7faec70e31a47313c3293b0bedceb0129ae"

FEATURES = " ".join(blas.dispatched_features())
kernels_only = pytest.mark.skipif(len(KERNELS) < 2, reason=f"no kernels to choose from: NumPy has {blas.here().blas}")

WORKER = """
import hashlib, json, sys
import numpy as np
from lfm2np.engine.loading import load
from lfm2np.commands.cli.shared.work import WORKS
from lfm2np.arithmetic import exact, grids
from lfm2np.truth import elementary
from lfm2np.engine.work.results_file import encoded
from scheduler.checksum import json_sha256

def sha(*arrays):
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()

found = {}
for path in sys.argv[2:]:
    model = load(path, sys.argv[1])
    found[path] = model.digest()
ids = list(range(7, 60))
items = {
    "score": ids,
    "truth-rows": {"token_ids": ids, "wanted": [[row, [5, 6]] for row in range(len(ids) - 1)]},
    "vector": {"prompt": ids[:40], "token_ids": ids[40:], "tensors": None},
}
for kind, item in items.items():  # of the last checkpoint
    found[kind] = json_sha256(encoded(WORKS[kind].function(model, [item])))
random = np.random.Generator(np.random.Philox(7))
x = (random.integers(-(2**40), 2**40, (50, 999)) * 2.0**-36)
found["exp"], found["log"] = sha(elementary.exp(x)), sha(elementary.log(np.abs(x) + 2.0**-30))
found["cos_sin"] = sha(*elementary.cos_sin((x * 5000).astype(np.float32)))
found["sums"] = sha(grids.exact_sum(x), exact.log_softmax(x.astype(np.float32)))
found["products"] = []
for mask in (0xFFFF0000, 0xFFFFFFFF):  # one slice of weights, and two
    weight = (random.integers(-(2**24), 2**24, (640, 999)) * 2.0**-30).astype(np.float32)
    weight = (weight.view(np.uint32) & np.uint32(mask)).view(np.float32)
    matrix, few = exact.prepare_matrix(weight, "w"), x[0].astype(np.float32)
    for count in (8, 17, 300):
        rows = exact.on_matrix_grid(few * np.arange(1, count + 1, dtype=np.float32)[:, None], matrix.grid)
        result = np.empty((count, 640), np.float32)
        exact.rounded_product(rows, matrix.values, result, matrix.grid.slices, None)
        found["products"].append([matrix.grid.slices, sha(result)])
print(json.dumps({"ours": found, "numpy's exp": sha(np.exp(x))}))
"""


def digests(numerics: str, **environment: str) -> dict[str, dict[str, Any]]:
    """From a fresh process with these variables: digests of every fixture and of raw float64 results."""
    command = [sys.executable, "-c", WORKER, numerics, *map(str, CHECKPOINTS)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module")
def here() -> dict[str, dict[str, Any]]:
    """The same from this process's own environment; products of one slice and of two are among them."""
    found = digests("exact")
    assert [slices for slices, _ in found["ours"]["products"]] == [1, 1, 1, 2, 2, 2]
    return found


@pytest.mark.night
@kernels_only
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_bits_are_the_same_under_every_blas_kernel_and_thread_count(here, kernel: str, threads: str):
    assert digests("exact", OPENBLAS_CORETYPE=kernel, OPENBLAS_NUM_THREADS=threads)["ours"] == here["ours"]


@pytest.mark.night
@pytest.mark.skipif(not FEATURES, reason="NumPy has no other vector code for this CPU than what it was built for")
def test_the_bits_are_the_same_without_numpys_vector_code(here):
    assert digests("exact", NPY_DISABLE_CPU_FEATURES=FEATURES)["ours"] == here["ours"]


@pytest.mark.night
@kernels_only
@pytest.mark.rounding
def test_plain_float32_fails_the_same_check():
    """The control. Were it to pass, the variables would not reach the BLAS and the tests above would prove nothing."""
    hashes = [digests("float32", OPENBLAS_CORETYPE=kernel)["ours"] for kernel in KERNELS]
    assert any(other != hashes[0] for other in hashes[1:])


@pytest.mark.night
@pytest.mark.skipif(
    not {"X86_V4", "AVX512_SKX", "AVX512F"} & set(FEATURES.split()),  # by NumPy's version
    reason="NumPy's exp has other code only for AVX-512, which this CPU or this NumPy does without",
)
def test_numpys_own_exp_fails_the_check_without_vector_code(here):
    """The control of the other variable, and the reason for elementary.py."""
    assert digests("exact", NPY_DISABLE_CPU_FEATURES=FEATURES)["numpy's exp"] != here["numpy's exp"]


@pytest.mark.parametrize(("name", "digest"), [("trained", TRAINED_DIGEST), ("moe", MOE_DIGEST), ("lfm3", LFM3_DIGEST)])
def test_a_trained_fixture_has_the_digest_that_the_readme_states(name: str, digest: str):
    assert lfm2np.load(FIXTURES / name).digest() == digest
    assert f"\n{digest}\n" in (FIXTURES.parent / "README.md").read_text()
