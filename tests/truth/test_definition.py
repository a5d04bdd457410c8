"""What docs/why/arithmetic.md says of the definition and no other test holds; and that the tests it names are there."""

from __future__ import annotations

import ast
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from lfm2np.arithmetic import exact
from lfm2np.arithmetic.ieee import round_to_bfloat16
from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.loaded import trained_fixture
from lfm2np.errors import ConfigError
from lfm2np.truth import integers
from lfm2np.truth.layers import matrix_parts

TOP = Path(__file__).parents[2]
PAGE = TOP / "docs" / "why" / "arithmetic.md"
NAMED = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")


@pytest.mark.parametrize("arithmetic", [exact, integers])
def test_a_bias_is_rounded_after_the_sum(arithmetic):
    """1 + 2**-24 + 2**-60 rounds to 1 in float64 first, and then the tie goes to even."""
    x = np.array([[1.0, 2.0**-12]], np.float32)
    matrix = arithmetic.prepare_matrix(x, "w")
    assert arithmetic.linear(x, matrix, np.array([2.0**-60], np.float32)) == 1.0
    once, following = 1 + Fraction(1, 2**24) + Fraction(1, 2**60), 1 + Fraction(1, 2**23)
    assert following - once < once - 1, "the control: rounded once, it would be the next float32"


def test_an_outlier_channel_takes_no_bits_from_the_others():
    """One column 2**16 times the others, of bfloat16: all are held. In the control one row's 20 bits lose some."""
    rng = np.random.default_rng(0)
    weight = round_to_bfloat16(rng.uniform(1, 2, (8, 16)).astype(np.float32))
    weight[:, 3] *= 2.0**16
    matrix = integers.prepare_matrix(weight, "w")
    ((units, shift),) = matrix.slices
    assert np.array_equal(np.ldexp(units.astype(np.float64), matrix.columns - shift), weight)
    row_units = np.ldexp(weight.astype(np.float64), 20 - integers.exponent_of(weight))
    assert not np.array_equal(np.rint(row_units), row_units)


def test_what_shares_an_input_is_one_product():
    parts = {
        tuple(name.rpartition("layers.")[2][2:] for name in names)
        for names in matrix_parts(load_config(trained_fixture()))
    }
    assert ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight") in parts
    assert ("feed_forward.w1.weight", "feed_forward.w3.weight") in parts
    assert sum(len(names) > 1 for names in parts) == 2


@pytest.mark.parametrize(("key", "most"), [("vocab_size", 2**17), ("max_position_embeddings", integers.TERMS)])
def test_vocabulary_and_context_are_capped_at_the_longest_exact_sum(key: str, most: int, tmp_path: Path):
    text = (trained_fixture() / "config.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(re.sub(rf'("{key}": )\d+', rf"\g<1>{most + 1}", text), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{key}: {most + 1}, expected .*{most}"):
        load_config(tmp_path)
    assert integers.TERMS == 262_144


@pytest.mark.slow
def test_every_section_of_the_page_names_tests_and_they_are_there():
    text = PAGE.read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert any(name for _, name in NAMED.findall(section)), section.splitlines()[0]
    for file, name in NAMED.findall(text):
        assert not name or name in functions(TOP / file), f"{file}::{name}"
        assert (TOP / file).exists(), file


def functions(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}
