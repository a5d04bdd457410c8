"""Keys of config.json that nothing reads: the known ones say nothing of the network, others are reported once."""

import ast
import inspect
import json
import warnings
from pathlib import Path

import pytest

import lfm2np
from lfm2np.checkpoint import config_json
from lfm2np.checkpoint.config_json import IGNORED, READ, load_config

CONFIGS = sorted(Path(__file__).parents[2].joinpath("fixtures").rglob("config.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_no_fixture_has_a_key_that_nobody_knows(path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(path.parent)


def test_an_unknown_key_is_reported_once_with_its_file(tmp_path: Path):
    raw = json.loads((Path(lfm2np.trained_fixture()) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "conv_dilation": 2, "attn_temperature": 1, "later": None}))
    with pytest.warns(UserWarning, match=r"config\.json: attn_temperature, conv_dilation: not read") as caught:
        load_config(tmp_path)
    assert len(caught) == 1


def test_no_key_is_both_read_and_ignored():
    assert not IGNORED & READ


def test_every_key_that_the_code_names_counts_as_read():
    """raw.get("key") and raw["key"]."""
    named = set()
    for node in ast.walk(ast.parse(inspect.getsource(config_json))):
        if isinstance(node, ast.Subscript):
            named |= strings([node.slice]) if name_of(node.value) == "raw" else set()
        elif isinstance(node, ast.Call):
            on = node.func.value if isinstance(node.func, ast.Attribute) else None
            if name_of(on) == "raw" or (node.args and name_of(node.args[0]) == "raw"):
                named |= strings(node.args[:2])
    assert named <= READ


def strings(nodes: list[ast.expr]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def name_of(node: ast.expr | None) -> str | None:
    return node.id if isinstance(node, ast.Name) else None
