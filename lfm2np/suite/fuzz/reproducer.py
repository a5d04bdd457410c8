"""The script that reproduces a failure on a server: standard library only, one trace, the right answers, exit code 1.

It is reproduce.txt with its gaps (@@NAME@@) filled in. For an engine in Python there is none: `lfm2np fuzz --replay`
plays its trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from lfm2np.oracle.engines.dialects.dialect import Dialect


def reproducer(
    title: str,
    dialect: Dialect,
    timeout: float,
    requests: Sequence[Mapping[str, Any]],
    server: str = "",
    before: int = 0,
    is_alone: bool = False,
) -> str:
    """The script.

    requests  body, moments and right, as reproduce.txt says
    server    a sentence that says on what server it failed
    before    so many of the first requests are not judged
    is_alone  what is expected is what the server answers to a request alone
    """
    rows = ",\n ".join(json.dumps(request, allow_nan=False) for request in requests)
    filled = {
        "TITLE": title.replace("\\", "/").replace('"""', "'''"),
        "EXPECTED": "its answers to each request alone" if is_alone else "exact arithmetic",
        "SERVER": server,
        "BEFORE": str(before),
        "TIMEOUT": repr(timeout),
        "PATH": json.dumps(dialect.path),
        "REQUESTS": f"[{rows}]",
        "ANSWER": dialect.reproducer,
    }
    template = (resources.files("lfm2np.suite.fuzz") / "reproduce.txt").read_text(encoding="utf-8")
    return re.sub("@@([A-Z]+)@@", lambda mark: filled[mark[1]], template)  # all at once: a title may hold a mark
