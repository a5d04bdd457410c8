"""One metric by requests a second as a picture, by matplotlib (the extra `curves`)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lfm2np.commands.simulate.result import span
from lfm2np.errors import RequestError
from lfm2np.oracle.report.as_text import visible

FORMATS = ("svg", "png", "pdf")
DASHES = ("-", "--", ":", "-.", (0, (7, 3)), (0, (4, 1, 1, 1, 1, 1)))  # lines differ without their colours, too
MOST_LINES = len(DASHES)
SETTINGS: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "lfm2np", "font.size": 9.0}  # text stays text
Line = Sequence[tuple[float, float]]


def picture(path: str, lines: Mapping[str, Line], metric: str, about: str, target: float | None) -> bytes:
    """The file's content, in the format of its name's ending. RequestError without matplotlib, or for another ending.

    lines   at most MOST_LINES, by name: points of requests a second and seconds, all above 0
    about   a sentence, which is not drawn: the file's description
    target  in seconds, drawn across
    """
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise RequestError(f"--curve {path}: expected a name that ends in .{', .'.join(FORMATS)}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
    except ImportError as problem:
        raise RequestError(f"--curve: {problem}; it needs the extra `curves`: pip install 'lfm2np[curves]'") from None
    with rc_context(SETTINGS):
        figure = Figure(figsize=(6.0, 4.0), layout="constrained")
        axes = figure.subplots()
        axes.set(xscale="log", yscale="log", xlabel="requests a second", ylabel=metric)
        for (name, points), dashes in zip(lines.items(), DASHES, strict=False):
            axes.plot(*zip(*points, strict=True), linestyle=dashes, label=visible(name, 50))
        if target is not None:
            axes.axhline(target, color="gray", linewidth=1.0, label=f"target: {span(target)}")
        rates = sorted({rate for points in lines.values() for rate, _ in points})
        axes.xaxis.set(major_locator=FixedLocator(rates, nbins=8), minor_locator=NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:.4g}"))
        axes.yaxis.set(major_locator=LogLocator(subs=(1.0, 2.0, 5.0)), minor_locator=NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: span(seconds)))
        axes.grid(alpha=0.3)
        figure.legend(loc="outside upper left")
        file = io.BytesIO()
        undated = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}, "pdf": {"CreationDate": None}}
        title = "Subject" if kind == "pdf" else "Description"
        figure.savefig(file, format=kind, metadata={**undated[kind], title: about})
    return file.getvalue()
