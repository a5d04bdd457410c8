"""The same bits under other BLAS kernels, thread counts and SIMD paths, each in its own process.

`OPENBLAS_CORETYPE` chooses the kernels of NumPy's OpenBLAS, `NPY_DISABLE_CPU_FEATURES` switches off NumPy's own
vector code. The control runs the same check on the plain float32 path, which has to fail it.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lfm2np.digest import digest
from lfm2np.loading import load, trained_fixture

FIXTURES = Path(__file__).parent.parent / "fixtures"
CHECKPOINTS = [*sorted((FIXTURES / "torture").iterdir()), FIXTURES / "trained"]
KERNELS = ("SkylakeX", "Haswell", "Sandybridge", "Nehalem", "Prescott")

# The digest of the trained fixture, as the README states it: any machine must print the same.
TRAINED_DIGEST = "136f92dd3c4ce250ee24dd1caa520afb56e172056dd04727c5dec57039bc8199"

x86_only = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="the kernels and features named here are x86's"
)

WORKER = """
import json, sys
from lfm2np.digest import digest
from lfm2np.loading import load
found = {}
for path in sys.argv[2:]:
    model = load(path, sys.argv[1])
    found[path] = digest(model.weights, model.config, model.numerics)
print(json.dumps(found))
"""


def digests(numerics: str, **environment: str) -> dict[str, str]:
    """The digest of every fixture, from a fresh process with these variables."""
    command = [sys.executable, "-c", WORKER, numerics, *map(str, CHECKPOINTS)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def disabled_features() -> str:
    """Every feature that this NumPy dispatches on and this CPU has."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    groups = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
    return " ".join(groups)


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The digests of this process's own environment."""
    found = {}
    for path in CHECKPOINTS:
        model = load(path)
        found[str(path)] = digest(model.weights, model.config, model.numerics)
    return found


@x86_only
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_bits_are_the_same_under_every_blas_kernel_and_thread_count(expected, kernel: str, threads: str):
    assert digests("exact", OPENBLAS_CORETYPE=kernel, OPENBLAS_NUM_THREADS=threads) == expected


@x86_only
def test_the_bits_are_the_same_without_numpys_vector_code(expected):
    assert disabled_features(), "this CPU has vector features that NumPy can be told not to use"
    assert digests("exact", NPY_DISABLE_CPU_FEATURES=disabled_features()) == expected


@x86_only
def test_plain_float32_fails_the_same_check():
    """The control. Were it to pass, the variables would not reach the BLAS and the tests above would prove nothing."""
    found = [digests("float32", OPENBLAS_CORETYPE=kernel) for kernel in KERNELS]
    assert any(other != found[0] for other in found[1:])


def test_the_trained_fixture_has_the_digest_that_the_readme_states(expected):
    assert expected[str(FIXTURES / "trained")] == TRAINED_DIGEST
    assert TRAINED_DIGEST in (FIXTURES.parent / "README.md").read_text()


def test_a_sequence_alone_has_the_bits_of_its_prefix_in_a_longer_one():
    model = load(trained_fixture())
    ids = list(np.random.default_rng(0).integers(0, model.config.vocab_size, 40))
    whole = model.logits([int(i) for i in ids])
    for length in (1, 2, 3, 17, 39):
        assert model.logits([int(i) for i in ids[:length]]).tobytes() == whole[:length].tobytes()
