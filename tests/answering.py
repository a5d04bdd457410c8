"""Answers of a target, as tests compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lfm2np.oracle.engines.records import Answer, Request, Trace
from lfm2np.oracle.engines.target import Target


def answers_to(target: Target, requests: Sequence[Request]) -> list[Answer]:
    """To requests that are sent together, one each, without the times when they came."""
    trace = Trace(tuple(requests))
    return [untimed(answer) for _, answer in target.play(trace).pairs(trace)]


def untimed(answer: Answer) -> Answer:
    return replace(answer, sent=None, first=None, ended=None)
