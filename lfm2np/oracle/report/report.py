"""A verdict with what it rests on, as plain data: each command that judges makes one, the renderers beside show it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import lfm2np
from lfm2np.arithmetic.products.blas import blas_kernel, blas_library

RIGHT, WRONG, OPEN = 0, 1, 2  # exit codes: what was judged is right, is wrong, or can't be told from what was seen


@dataclass(frozen=True)
class Finding:
    """One reason for the verdict, the most important first.

    kind      what it is, one word for programs: cause, mismatch, relation ...
    words     one sentence or less
    where     what it is about: a request, a position, a tensor
    evidence  numbers, for programs
    """

    kind: str
    words: str
    where: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """With where it is."""
        return f"{self.where}: {self.words}" if self.where else self.words


@dataclass(frozen=True)
class Table:
    """
    rows   cells as they are shown: numbers are made words by `number`
    words  columns of text, aligned to the left
    shown  rows that a terminal shows; a page shows PAGE_ROWS, JSON has the numbers themselves
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    words: Sequence[int] = (0,)
    shown: int = 20


@dataclass(frozen=True)
class Code:
    """Lines that keep their blanks."""

    lines: Sequence[str]


Block = str | Table | Code


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; strings are paragraphs. `is_long`: on the page only."""

    heading: str
    blocks: Sequence[Block]
    is_long: bool = False


@dataclass(frozen=True)
class Case:
    """One request, relation or rollout, as JUnit's test cases have it.

    failed   why it is wrong, or None
    skipped  why it could not be judged, or None
    lines    more about the failure
    """

    group: str
    name: str
    failed: str | None = None
    skipped: str | None = None
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """
    command     its name: check, fuzz, compare ...
    verdict     one word in capitals, or a short sentence
    exit_code   RIGHT, WRONG or OPEN
    means       what the verdict means, a sentence
    findings    why, the most important first
    facts       what was judged: engine, format, numbers of requests and positions; shown as they are
    next_steps  what to do now: commands, or sentences
    not_tested  what the verdict does not cover
    figures     everything that a program may want, as JSON has it
    looks       RIGHT, WRONG or OPEN: sign and colour on a page, where they are not the exit code's
    """

    command: str
    verdict: str
    exit_code: int
    means: str = ""
    findings: Sequence[Finding] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    next_steps: Sequence[str] = ()
    not_tested: Sequence[str] = ()
    sections: Sequence[Section] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    cases: Sequence[Case] = ()
    looks: int | None = None


def environment() -> dict[str, str]:
    """The versions that affect a verdict, BLAS's kernels, and the platform; no names of machines or users."""
    kernel = blas_kernel()  # of which the rounding is
    return {
        "lfm2np": lfm2np.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": blas_library() + (f", kernels {kernel}" if kernel else ""),
        "platform": platform.platform(),
    }


def number(value: float | None) -> str:
    """Three digits; a dash for what was not reported."""
    return "-" if value is None else f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """1 token, 2 tokens, 2 log-probabilities."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("ty") else f"{count} {noun}s"


def are(count: int, noun: str) -> str:
    return f"{plural(count, noun)} {'is' if count == 1 else 'are'}"
