"""What worker.js calls, under Pyodide: the laboratory's pages, and proofs on the visitor's own machine. JSON out."""

from __future__ import annotations

import json
import platform
import sys
from functools import cache

import numpy as np

import lfm2np
from lfm2np.engine.loading import load
from lfm2np.oracle.report.markup import element
from lfm2np.teaching.lab.lab_page import SOURCES, Host, reply
from lfm2np.teaching.lab.models import Models, load_models
from lfm2np.teaching.lab.proof import prove

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


@cache
def models() -> Models:
    return load_models()


def page(query: str) -> str:
    """{"status", "text"} of a link, as the server's worker gives them."""
    status, text = reply(query, models(), HOST)
    return json.dumps({"status": status, "text": text})


def proof(query: str) -> str:
    """{"right", "sentence"}: the link's run held against each request alone."""
    result = prove(query, models())
    return json.dumps({"right": result.right, "sentence": result.sentence})


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
