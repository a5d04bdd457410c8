"""Engines with a prefix cache, right or with one bug: a hit computes what its blocks hold, not what was asked.

caching:make_WAY is a factory. Level a of lfm2np/oracle/engines/protocol.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from http_player import said

from lfm2np.oracle.engines.records import Answer, Ids, Request

BLOCK, CAPACITY = 16, 32  # tokens of a block, and blocks
WAYS = ("right", "never-hits", "silent", "other-state", "border", "evicted")


class Caching:
    """The least recently used of CAPACITY blocks goes first. `contents` are the tokens that a block's memory holds."""

    lacks = frozenset({"sampling", "samples", "processors", "stops", "logprobs"})

    def __init__(self, way: str) -> None:
        self.way = way
        self.blocks: OrderedDict[Ids, Ids] = OrderedDict()  # by all tokens up to its end
        self.gone: dict[Ids, Ids] = {}  # evicted blocks, and what was written over them
        self.state: Ids = ()  # of whom the newest block is

    def generate(self, requests: Sequence[Request]) -> list[list[Answer]]:
        return [[self.answer(request.prompt_token_ids, request.max_tokens)] for request in requests]

    def answer(self, prompt: Ids, new: int) -> Answer:
        count, held = self.cached(prompt)
        answer = said((*held, *prompt[count:]), new)
        self.publish(prompt)
        return answer if self.way == "silent" else replace(answer, cached_tokens=count)

    def cached(self, prompt: Ids) -> tuple[int, Ids]:
        """How many tokens hit, never the last, and what stands there for them."""
        if self.way == "never-hits":
            return 0, ()
        held: list[int] = []
        count = 0
        for stop in range(BLOCK, len(prompt), BLOCK):
            known = {**self.gone, **self.blocks} if self.way == "evicted" else self.blocks
            if prompt[:stop] not in known:
                break
            held += known[prompt[:stop]]
            count = stop
        if count and self.way == "other-state":
            held[-2:] = self.state[-2:]
        if count and self.way == "border" and len(prompt) == count + BLOCK:  # the last block is full and recomputed
            held = [*held[:-1], prompt[0]]
        return count, tuple(held)

    def publish(self, prompt: Ids) -> None:
        for stop in range(BLOCK, len(prompt) + 1, BLOCK):
            if prompt[:stop] not in self.blocks and len(self.blocks) == CAPACITY:
                evicted, _ = self.blocks.popitem(last=False)
                self.gone[evicted] = prompt[stop - BLOCK : stop]
            self.blocks[prompt[:stop]] = prompt[stop - BLOCK : stop]
            self.blocks.move_to_end(prompt[:stop])
            self.state = prompt[:stop]


def __getattr__(name: str) -> Any:
    make, _, way = name.replace("_", "-").partition("-")
    if make != "make" or way not in WAYS:
        raise AttributeError(name)
    return lambda model, sizes: Caching(way)
