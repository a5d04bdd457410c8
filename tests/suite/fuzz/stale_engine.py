"""The small engine of the tutorial, continuously batched, with a pool that preempts; it reports no sizes.

`factory` has a bug: a request that is resumed begins with the convolution state that it had when it was preempted.
"""

from __future__ import annotations

from typing import Any

from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.oracle.recorders import Recorder
from lfm2np.oracle.wrong_engine import SmallEngine, log_softmax, mended

CHUNK, SLOTS, BLOCK, NUM_BLOCKS = 64, 8, 16, 64


class Sequence:
    def __init__(self, request: Request) -> None:
        self.name, self.ids, self.new = request.request_id, list(request.prompt_token_ids), request.params.max_tokens
        self.start, self.computed, self.cache = len(self.ids), 0, {}  # type: int, int, dict[str, Any]
        self.logprobs: list[float] = []
        self.recorder = Recorder()

    def completion(self, reason: str | None) -> list[Answer]:
        return [Answer(tuple(self.ids[self.start :]), finish_reason=reason, logprobs=tuple(self.logprobs))]


class Preempting:
    lacks = SmallEngine.lacks | {"stop-strings", "salts", "priorities"}

    def __init__(self, model: str, keeps_state: bool) -> None:
        self.network, self.keeps_state = mended(model, {}), keeps_state
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(Sequence(request))

    def abort(self, name: str) -> list[Answer]:
        for queue in (self.waiting, self.running):
            for sequence in [each for each in queue if each.name == name]:
                queue.remove(sequence)
                return sequence.completion("abort")
        return []

    def is_over(self) -> bool:
        return sum(-(-min(len(each.ids), each.computed + CHUNK) // BLOCK) for each in self.running) > NUM_BLOCKS

    def preempt(self) -> None:
        sequence = self.running.pop()
        sequence.computed = 0
        sequence.cache = {name: held for name, held in sequence.cache.items() if self.keeps_state and ".conv" in name}
        self.waiting.insert(0, sequence)

    def step(self) -> dict[str, list[Answer]]:
        while self.is_over():
            self.preempt()
        while self.waiting and len(self.running) < SLOTS:
            self.running.append(self.waiting.pop(0))
            if self.is_over():
                self.waiting.insert(0, self.running.pop())
                break
        budget, outputs = CHUNK, {}
        for sequence in list(self.running):
            ids = sequence.ids[sequence.computed :][:budget]
            if ids:
                budget -= len(ids)
                outputs |= self.advance(sequence, ids)
        return outputs

    def advance(self, sequence: Sequence, ids: list[int]) -> dict[str, list[Answer]]:
        row = log_softmax(self.network.step(ids, sequence.computed, sequence.cache, sequence.recorder))[-1]
        sequence.computed += len(ids)
        if sequence.computed < len(sequence.ids):
            return {}
        sequence.ids.append(int(row.argmax()))
        sequence.logprobs.append(float(row.max()))
        is_done = len(sequence.logprobs) == sequence.new
        if is_done:
            self.running.remove(sequence)
        return {sequence.name: sequence.completion("length" if is_done else None)}


def factory(model: str, sizes: dict[str, Any]) -> Preempting:
    return Preempting(model, True)


def right(model: str, sizes: dict[str, Any]) -> Preempting:
    return Preempting(model, False)
