"""A stranger's first run: an adapter of fifteen lines for transformers, which has not said all that it lacks."""

import pytest

from lfm2np.oracle.engines.records import Answer
from lfm2np.suite.catalogue import by_id
from lfm2np.suite.properties.rounding import Rounding
from lfm2np.suite.runner import run_property

pytestmark = pytest.mark.peers

GREEDY = frozenset({"sampling", "samples", "processors", "stops"})


class Adapter:
    lacks = GREEDY | {"mixture-of-experts"}  # whose grouped products refuse most drawn widths

    def __init__(self, model, sizes):
        import torch
        from transformers import AutoModelForCausalLM

        self.engine = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def generate(self, requests):
        return [[Answer(self.run(list(request.prompt_token_ids), request.params.max_tokens))] for request in requests]

    def run(self, ids, most):
        import torch

        with torch.no_grad():
            out = self.engine.generate(torch.tensor([ids]), max_new_tokens=most, do_sample=False, eos_token_id=None)
        return tuple(out[0, len(ids) :].tolist())


class Published(Adapter):
    lacks = GREEDY | {"odd-shapes", "overflow"}


def test_transformers_is_told_what_it_does_not_declare_and_holds_the_rest():
    engine = Rounding(Adapter, "float32")
    result = run_property(by_id("equals-reference"), engine, "quick")
    assert result.status == "failed"
    assert "can only be called on Attention layers" in result.message
    assert "\n    odd-shapes: models of shapes that no published" in result.message
    for name in ("equals-reference", "speculative-is-plain", "prefix-hits", "wide-batches"):
        later = run_property(by_id(name), Rounding(Published, "float32"), "quick")
        assert (later.status, later.message) == ("passed", ""), name
