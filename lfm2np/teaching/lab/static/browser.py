"""What worker.js calls, under Pyodide: the laboratory's pages, and proofs on the visitor's own machine. JSON out."""

from __future__ import annotations

import json
import platform
import sys

import numpy as np

import lfm2np
from lfm2np.engine.loading import load
from lfm2np.oracle.report.markup import element
from lfm2np.teaching.lab.page import SOURCES, Host, compute, typed_of
from lfm2np.teaching.lab.run import MODELS, chosen, prove, require_fits
from lfm2np.teaching.lab.settings import Problems, settings_of

FIXTURES = {"trained": lfm2np.trained_fixture, "moe": lfm2np.moe_fixture, "lfm3": lfm2np.lfm3_fixture}
NEEDS = (
    "This page computes in your own browser, for which it needs JavaScript and WebAssembly. What is drawn below stays."
)
PAGE = "drawings.html"  # of the demo, which build.py draws
HOST = Host(
    ("lab.js", "static/static.js"),
    sources=f"{SOURCES}; worker-src 'self'",
    above=element(
        "div",
        element("output", NEEDS, id="host-state", role="status", tabindex=-1),
        element("progress", id="host-progress", max=1, aria_label="Loading", hidden=True),
        element("button", "Stop", type="button", id="host-stop", hidden=True),
        element("button", "Prove it here", type="button", id="host-prove", hidden=True),
        element("a", "A longer run", href=PAGE),
        element("section", id="host-proof", aria_label="Proof on this machine", hidden=True),
        class_="host",
    ),
)


def load_models() -> None:
    """So that the first run need not."""
    for name in MODELS:
        chosen(name)


def page(query: str) -> str:
    """{"status", "text"} of a link, as the server gives them."""
    status, text = compute(query, HOST)
    return json.dumps({"status": status, "text": text})


def proof(query: str) -> str:
    """{"right", "sentence"}: the link's run held against each request alone."""
    try:
        settings = settings_of(typed_of(query))
        require_fits(settings)
    except Problems as problem:
        return json.dumps({"right": False, "sentence": str(problem)})
    return json.dumps(vars(prove(settings)))


def digest(fixture: str) -> str:
    """{"value"}: SHA-256 over the bits of its logits, as `lfm2np info --digest` prints it."""
    return json.dumps({"value": load(FIXTURES[fixture]()).digest()})


def versions() -> str:
    """{name: version} of all that computes."""
    return json.dumps(
        {
            "lfm2np": lfm2np.__version__,
            "Python": platform.python_version(),
            "NumPy": np.__version__,
            "machine": f"{platform.machine()}, pointers of {sys.maxsize.bit_length() + 1} bits, {sys.byteorder}-endian",
        }
    )
