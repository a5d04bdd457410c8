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


def uneven_chunks(script: Script) -> None:
    script.recompute("chunks-none", (1, 2, 5, 7))
    script.finish("chunks-none")


def chunks_beside_decoding(script: Script) -> None:
    script.step(("beside-3", 3))
    for _ in range(5):
        script.step(("beside-3", 1), ("beside-40", 7))
    script.step(("beside-40", 5), ("beside-3", 1))
    script.finish("beside-3", "beside-40")


def preempted_decoding(script: Script) -> None:
    script.recompute("slot-again", (40, 1, 1))
    script.preempt("slot-again")
    script.recompute("slot-short", (1, 1))
    script.recompute("slot-again")
    script.finish("slot-short", "slot-again")


def preempted_prompt(script: Script) -> None:
    script.step(("prefix-cold", 20))
    script.step(("prefix-cold", 9))
    script.preempt("prefix-cold")
    script.step(("beside-40", 40))
    script.step(("beside-40", 1), ("prefix-cold", 17))
    script.step(("prefix-cold", 31), ("beside-40", 1))
    script.finish("beside-40", "prefix-cold")


def rejected_drafts(script: Script) -> None:
    script.step(("decode-32", 6))
    for accepted, rejected in cycle(DRAFTS):
        if not (left := script.left("decode-32")):
            return
        script.step(("decode-32", min(1 + accepted, left), rejected))


def rejected_beside_others(script: Script) -> None:
    names = "beside-3", "border-16"
    script.step((names[0], 3), (names[1], 16))
    while any(map(script.left, names)):
        number = len(script.steps)
        script.step(*((name, 1, (number + index) % 3) for index, name in enumerate(names) if script.left(name)))


def undone_chunk(script: Script) -> None:
    script.step(("border-16", 9))
    script.rollback("border-16", 5)
    script.step(("border-16", 3))
    script.step(("border-16", 7))
    script.rollback("border-16", 14)
    script.recompute("border-16")  # one token before the first read, so that this sees the state directly
    script.finish("border-16")


Make = Callable[[Script], None]
SCRIPTS: dict[str, tuple[Make, str, Sequence[str]]] = {  # what makes it, its comment, its flags
    "uneven-chunks": (
        uneven_chunks,
        "A prompt of 23 tokens in chunks of 1, 2, 5, 7 and 8.",
        ("chunk-state",),
    ),
    "chunks-beside-decoding": (
        chunks_beside_decoding,
        "Each step has a chunk of one prompt and a new token of another sequence, first one first, then the other.",
        ("chunk-state", "ragged-batch", "slot-index"),
    ),
    "preempted-decoding": (
        preempted_decoding,
        "A sequence is preempted after four tokens, another takes its place, and it comes back beside that.",
        ("preemption", "stale-slot"),
    ),
    "preempted-prompt": (
        preempted_prompt,
        "A prompt is preempted between its chunks, and computed anew in others, beside a sequence that came between.",
        ("preemption", "chunk-state"),
    ),
    "rejected-drafts": (
        rejected_drafts,
        "Speculation by up to eight drafts: some are accepted, up to seven rejected, also across borders of blocks.",
        ("rollback", "block-border"),
    ),
    "rejected-beside-others": (
        rejected_beside_others,
        "Two sequences in one batch, of which now one, now the other, now both have drafts rejected.",
        ("rollback", "ragged-batch", "slot-index"),
    ),
    "undone-chunk": (
        undone_chunk,
        "A chunk of a prompt is partly undone, within a block, and computed anew; so is the last token of another.",
        ("rollback", "chunk-state"),
    ),
}


def scripts_of(vectors: Sequence[Mapping[str, Any]]) -> list[Json]:
    """All scripts whose vectors are there: see schemas/vectors.schema.json."""
    by_id, scripts = {vector["id"]: vector for vector in vectors}, []
    for name, (make, text, flags) in SCRIPTS.items():
        script = Script(by_id)
        with contextlib.suppress(KeyError):  # of a vector that does not fit into the context, or was not asked for
            make(script)
            scripts.append({"id": name, "flags": list(flags), "comment": text, "steps": script.steps})
    return scripts
