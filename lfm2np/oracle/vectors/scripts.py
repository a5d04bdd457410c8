"""Scripts: what an engine computes, step by step, so that chunks, preemptions and rollbacks are certain to happen.

A script is made from a set's vectors alone. Each of its sequences is one vector, whose expected tokens are fed whatever
the engine chose. A step does its moves, then computes all its rows in one batch:

{"moves": [{"kind": "preempt", "id": vector}, {"kind": "rollback", "id": vector, "to": n}],
 "rows": [{"id": vector, "start": n, "token_ids": [...], "reads": [[offset, position], ...]}]}

preempt   all that was computed of the sequence is given up: blocks and state may go to others, and it begins anew at 0
rollback  what was computed of its tokens from position n on is undone, in keys, values and convolution states
start     how many tokens of the sequence are computed before this step
reads     the logits behind token_ids[offset] choose the vector's token of that position

A sequence whose last position was read has ended. Rejected drafts are the runners-up, so they are plausible.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

Json = dict[str, Any]
DRAFTS = ((0, 1), (1, 1), (0, 2), (2, 0), (0, 5), (3, 1), (1, 7), (0, 3), (4, 2))  # accepted and rejected, in turn


class Script:
    """The steps of some vectors, with what is computed of each and which position is read next."""

    def __init__(self, vectors: Mapping[str, Any]) -> None:
        self.vectors, self.steps = vectors, list[Json]()
        self._computed, self._read, self._moves = Counter[str](), Counter[str](), list[Json]()

    def left(self, name: str) -> int:
        """Positions that are not read yet."""
        return len(self.vectors[name]["token_ids"]) - self._read[name]

    def step(self, *rows: tuple[str, int] | tuple[str, int, int]) -> None:
        """Rows of a vector's next `count` tokens, and wrong drafts behind them, which are rolled back."""
        moves, self._moves = self._moves, []
        self.steps.append({"moves": moves, "rows": [self._row(*row) for row in rows]})

    def _row(self, name: str, count: int, rejected: int = 0) -> Json:
        vector, start = self.vectors[name], self._computed[name]
        prompt, tokens = vector["prompt_token_ids"], vector["token_ids"]
        stop, first = start + count, len(prompt) - 1
        places = range(max(first + self._read[name], start), min(stop, first + len(tokens)))
        self._computed[name] = stop
        self._read[name] += len(places)
        following = vector["positions"][stop - first - 1 :] if self.left(name) else []
        wrong = [position["top"][1][0] for position in following[:rejected]]
        if wrong:
            self.rollback(name, stop)
        reads = [[place - start, place - first] for place in places]
        return {"id": name, "start": start, "token_ids": [*prompt, *tokens][start:stop] + wrong, "reads": reads}

    def rollback(self, name: str, to: int) -> None:
        self._moves.append({"kind": "rollback", "id": name, "to": to})
        self._computed[name] = to

    def preempt(self, name: str) -> None:
        self._moves.append({"kind": "preempt", "id": name})
        self._computed[name] = 0

    def recompute(self, name: str, chunks: Iterable[int] = ()) -> None:
        """Chunks of so many tokens, then what is missing before the next position."""
        for count in chunks:
            self.step((name, count))
        self.step((name, len(self.vectors[name]["prompt_token_ids"]) + self._read[name] - self._computed[name]))

    def finish(self, *names: str) -> None:
        """One token a step of each until all are read; every other step has them in the other order."""
        while rows := [(name, 1) for name in names if self.left(name)]:
            self.step(*(rows if len(self.steps) % 2 else rows[::-1]))


Make = Callable[[Script], None]
SCRIPTS: dict[str, tuple[Make, tuple[str, ...]]] = {}  # by name: what makes it, whose docstring is its comment; flags


def script(*flags: str) -> Callable[[Make], Make]:
    """Puts a function into the table, under its name."""

    def put(make: Make) -> Make:
        SCRIPTS[make.__name__.replace("_", "-")] = make, flags
        return make

    return put


@script("chunk-state")
def uneven_chunks(run: Script) -> None:
    """A prompt of 23 tokens in chunks of 1, 2, 5, 7 and 8."""
    run.recompute("chunks-none", (1, 2, 5, 7))
    run.finish("chunks-none")


@script("chunk-state", "ragged-batch", "slot-index")
def chunks_beside_decoding(run: Script) -> None:
    """Each step has a chunk of one prompt and a new token of another sequence, first one first, then the other."""
    run.step(("beside-3", 3))
    for _ in range(5):
        run.step(("beside-3", 1), ("beside-40", 7))
    run.step(("beside-40", 5), ("beside-3", 1))
    run.finish("beside-3", "beside-40")


@script("preemption", "stale-slot")
def preempted_decoding(run: Script) -> None:
    """A sequence is preempted after four tokens, another takes its place, and it comes back beside that."""
    run.recompute("slot-again", (40, 1, 1))
    run.preempt("slot-again")
    run.recompute("slot-short", (1, 1))
    run.recompute("slot-again")
    run.finish("slot-short", "slot-again")


@script("preemption", "chunk-state")
def preempted_prompt(run: Script) -> None:
    """A prompt is preempted between its chunks, and computed anew in others, beside a sequence that came between."""
    run.step(("prefix-cold", 20))
    run.step(("prefix-cold", 9))
    run.preempt("prefix-cold")
    run.step(("beside-40", 40))
    run.step(("beside-40", 1), ("prefix-cold", 17))
    run.step(("prefix-cold", 31), ("beside-40", 1))
    run.finish("beside-40", "prefix-cold")


@script("rollback", "block-border")
def rejected_drafts(run: Script) -> None:
    """Speculation by up to eight drafts: some are accepted, up to seven rejected, also across borders of blocks."""
    run.step(("decode-32", 6))
    for accepted, rejected in cycle(DRAFTS):
        if not (left := run.left("decode-32")):
            return
        run.step(("decode-32", min(1 + accepted, left), rejected))


@script("rollback", "ragged-batch", "slot-index")
def rejected_beside_others(run: Script) -> None:
    """Two sequences in one batch, of which now one, now the other, now both have drafts rejected."""
    names = "beside-3", "border-16"
    run.step((names[0], 3), (names[1], 16))
    while any(map(run.left, names)):
        number = len(run.steps)
        run.step(*((name, 1, (number + index) % 3) for index, name in enumerate(names) if run.left(name)))


@script("rollback", "chunk-state")
def undone_chunk(run: Script) -> None:
    """A chunk of a prompt is partly undone, within a block, and computed anew; so is the last token of another."""
    run.step(("border-16", 9))
    run.rollback("border-16", 5)
    run.step(("border-16", 3))
    run.step(("border-16", 7))
    run.rollback("border-16", 14)
    run.recompute("border-16")  # one token before the first read, so that this sees the state directly
    run.finish("border-16")


def scripts_of(vectors: Sequence[Mapping[str, Any]]) -> list[Json]:
    """All scripts whose vectors are there: see schemas/vectors.schema.json."""
    by_id, scripts = {vector["id"]: vector for vector in vectors}, []
    for name, (make, flags) in SCRIPTS.items():
        run = Script(by_id)
        with contextlib.suppress(KeyError):  # of a vector that does not fit into the context, or was not asked for
            make(run)
            scripts.append({"id": name, "flags": list(flags), "comment": make.__doc__, "steps": run.steps})
    return scripts
