"""Conditions under which an answer must stay the same, each as traces that hold the questions again.

A relation takes the questions with their answers alone, and gives the traces to play with the places where a question,
or what follows of it, stands in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lfm2np.oracle.engines.records import MOMENT, Pair, Request, Trace, changed, greedy
from lfm2np.suite.itself.questions import Sizes, filler

CONTINUED = 4  # tokens that a continuation asks for
LONGEST_CONTINUED = 3  # questions whose answers are asked for from each of their tokens on
FILLS = 4  # times the slots: long requests that push everything out of a cache of unknown size
SEED = 7
TEMPERATURE = 1.0
QUESTION, START, SCORED, LIKELIEST = "question", "start", "is_scored", "is_likeliest"  # tags of a request
STOP_SIZES = (3, 1)  # characters


@dataclass
class Building:
    """Collects the requests of a trace. One that holds a question has tags: QUESTION, its number, and what is compared.

    START      it goes on from this token of the question's answer
    SCORED     the log-probabilities of its prompt are compared, not its answer
    LIKELIEST  its tokens are compared with the likeliest that it reports
    """

    requests: list[Request] = field(default_factory=list)

    def add(self, request: Request, question: int | None = None, **tags: Any) -> int:
        noted = {} if question is None else {QUESTION: question, **tags}
        self.requests.append(replace(request, tags=noted))
        return len(self.requests) - 1

    def then(self, request: Request, question: int | None = None, **tags: Any) -> None:
        """After the end of the request before it."""
        after = len(self.requests) - 1 if self.requests else None
        request = replace(request, after=after, after_tokens=None, pause=0 if after is None else MOMENT)
        self.add(request, question, **tags)

    def repeat(self, alone: Sequence[Pair], **fields: Any) -> None:
        """All questions one after another, with other fields."""
        for index, (question, _) in enumerate(alone):
            self.then(changed(question, **fields), index)

    def done(self) -> list[Trace]:
        return [Trace(tuple(self.requests))]


NEEDS = {  # what an engine may not take, and what is said then
    "scored": "the engine reports no log-probabilities of prompts",
    "streamed": "the engine does not stream",
    "aborts": "a request can't be aborted",
    "seeds": "the engine takes no seeds",
    "samples": "the engine takes no n > 1",
    "stops": "the engine takes no stop strings",
    "sizes": "only an engine in Python that steps is made again in other sizes",
    "varied": "no --vary was given",
}
Build = Callable[[Sequence[Pair], Sizes], list[Trace]]


@dataclass(frozen=True)
class Relation:
    """One condition.

    name      of --relations
    sentence  what must hold
    needs     what the engine must take: of NEEDS
    measures  "batch": nothing but the batch differs, so it measures the spread; "other": sums are taken in another
              order for another reason, which bounds that
    samples   0: greedy questions; 1: drawn with a seed; more: so many answers to each
    player    which of Asking.players plays it
    keeps     if it looks broken, the first questions are asked again, not others: an engine may be wrong from some
              request on
    """

    name: str
    sentence: str
    build: Build
    needs: tuple[str, ...] = ()
    measures: str = ""
    samples: int = 0
    player: str = ""
    keeps: bool = False


def in_turn(requests: Sequence[Request]) -> Trace:
    """One after another, each on an idle engine."""
    building = Building()
    for request in requests:
        building.then(request)
    return Trace(tuple(building.requests))


def repeat(alone: Sequence[Pair], sizes: Sizes, times: int = 1, **fields: Any) -> list[Trace]:
    building = Building()
    for _ in range(times):
        building.repeat(alone, **fields)
    return building.done()


def order(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    building = Building()
    for index in reversed(range(len(alone))):
        building.then(alone[index][0], index)
    return building.done()


def batch(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Together in three sizes, each question at several places."""
    asked = []
    for count, shift in ((2, 0), (4, 1), (len(alone), 3)):
        indices = [(index + shift) % len(alone) for index in range(len(alone))]
        for first in range(0, len(alone), count):
            building = Building()
            for index in indices[first : first + count]:
                building.add(alone[index][0], index)
            asked += building.done()
    return asked


def neighbours(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Each between others of the same length."""

    def other(question: Request, seed: int) -> Request:
        return filler(sizes, seed, min(len(question.prompt_token_ids), 4 * sizes.block), question.max_tokens)

    return between(alone, other)


def between(alone: Sequence[Pair], other: Callable[[Request, int], Request]) -> list[Trace]:
    """Each question between two others, which are made for it and a seed."""
    asked = []
    for index, (question, _) in enumerate(alone):
        building = Building()
        building.add(other(question, 2 * index))
        building.add(question, index)
        building.add(other(question, 2 * index + 1))
        asked += building.done()
    return asked


def continued(alone: Sequence[Pair], sizes: Sizes, is_cold: bool) -> list[Trace]:
    """Prompt and the first k tokens of the answer as a prompt, for every k: what follows must be the same."""
    asked = []
    for index, (question, answer) in list(enumerate(alone))[:LONGEST_CONTINUED]:
        ids, building = answer.token_ids or (), Building()
        if not is_cold:
            building.then(replace(question, cold=False), index)
        for start in range(1, len(ids)):
            prompt = question.prompt_token_ids + ids[:start]
            most = min(CONTINUED, len(ids) - start)
            building.then(changed(question, prompt_token_ids=prompt, max_tokens=most, cold=is_cold), index, start=start)
        if building.requests:
            asked += building.done()
    return asked


def score(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    building = Building()
    for index, (question, answer) in enumerate(alone):
        ids = answer.token_ids or ()
        if len(question.prompt_token_ids) + len(ids) < sizes.longest:
            for is_cold in (True, False, False):  # of a cached prompt, too
                building.then(
                    greedy("", question.prompt_token_ids + ids, 1, cold=is_cold, prompt_logprobs=0),
                    index,
                    is_scored=True,
                )
    return building.done()


def warm_together(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """At once, with their prefixes cached, some from within the answer on."""
    building = Building()
    for index, (question, answer) in enumerate(alone):
        ids = answer.token_ids or ()
        start = len(ids) // 2 if index % 2 else 0
        most = len(ids) - start if start else question.max_tokens
        prompt = question.prompt_token_ids + ids[:start]
        building.add(
            changed(question, prompt_token_ids=prompt, max_tokens=max(1, most), cold=False), index, start=start
        )
    return building.done()


def branches(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """After a request that shares only the question's first k tokens, where each slot held the state of k others.

    Neither that state nor the other branch's may be gone on from. llama.cpp's server does so with k = 1.
    """
    building = Building()
    for number, shared in enumerate((1, 2, sizes.block, 2 * sizes.block)):
        for slot in range(sizes.slots):
            for length in (shared, shared + 4):  # the longer goes on from the shorter
                building.then(filler(sizes, 800 + number * sizes.slots + slot, length))
        for index, (question, _) in enumerate(alone):
            prompt = question.prompt_token_ids
            if shared < len(prompt):
                building.then(greedy("", (*prompt[:shared], other(prompt[shared], sizes)), 1))
                building.then(replace(question, cold=False), index)
    return building.done()


def other(token: int, sizes: Sizes) -> int:
    """Another id."""
    return token - 1 if token + 1 == sizes.vocab else token + 1


def evicted(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Warm, pushed out by long requests, and warm again."""
    building = Building()
    length = min(sizes.longest - 1, max(4 * sizes.chunk, 8 * sizes.block))
    building.repeat(alone, cold=False)
    for seed in range(FILLS * sizes.slots):
        building.then(filler(sizes, 100 + seed, length))
    building.repeat(alone, cold=False)
    return building.done()


def reuse(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Short after long: each question follows requests that were longer, in every slot."""
    asked = []
    length = min(sizes.longest // 2, max(2 * sizes.chunk, 4 * sizes.block))
    for start in range(0, len(alone), 4):
        building = Building()
        last = [building.add(filler(sizes, 300 + slot, length, 2)) for slot in range(sizes.slots)][-1]
        for index in range(start, min(start + 4, len(alone))):
            building.add(replace(alone[index][0], after=last, pause=MOMENT), index)
        asked += building.done()
    return asked


def stop(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Each with a stop string from the middle or the end of its text: one after another, together, and streamed."""
    singly, together, streamed = Building(), Building(), Building()
    for index, (question, answer) in enumerate(alone):
        piece = piece_of(answer.text or "", at_end=index % 2 == 1)
        if piece is not None:
            singly.then(changed(question, stop=piece), index)
            together.add(changed(question, stop=piece), index)
            streamed.then(changed(question, stop=piece, streamed=True), index)
    return [*singly.done(), *together.done(), *streamed.done()] if together.requests else []


def piece_of(text: str, at_end: bool) -> str | None:
    """Plain characters of a text; None if it has none. Long ones are of several tokens, perhaps."""
    for size in STOP_SIZES:
        starts = range(len(text) - size, -1, -1) if at_end else range(len(text) // 2, len(text) - size + 1)
        for piece in (text[start : start + size] for start in starts):
            if piece.isascii() and piece.isprintable() and piece == piece.strip():
                return piece
    return None


def likeliest(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    building = Building()
    for index, (question, _) in enumerate(alone):
        building.then(question, index, is_likeliest=True)
    return building.done()


def mixed(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Each between two that are sampled."""

    def sampled(question: Request, seed: int) -> Request:
        other = filler(sizes, 1000 + seed, sizes.block, question.max_tokens)
        return changed(other, temperature=TEMPERATURE, seed=SEED)

    return between(alone, sampled)


def chunks(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Each arrives while others decode, so that its prompt shares steps with them and is cut otherwise."""
    asked = []
    for index, (question, _) in enumerate(alone):
        building = Building()
        busy = building.add(filler(sizes, 500 + index, 3, min(24, sizes.longest - 3)))
        building.add(filler(sizes, 600 + index, sizes.block, min(16, max(1, sizes.longest // 4))))
        building.add(replace(question, after=busy, after_tokens=2 + index % 3), index)
        asked += building.done()
    return asked


def burst(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Three times as many as there are slots, at once: they wait, and memory runs out."""
    building = Building()
    for number in range(max(len(alone), 3 * sizes.slots)):
        building.add(alone[number % len(alone)][0], number % len(alone))
    return building.done()


def aborts(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Beside requests that are aborted within their prompts and later, and after them in their slots; then, for prompts
    of several chunks, after the same prompt was aborted while a part of it was computed, and may be cached."""
    building = Building()
    for index, (question, _) in enumerate(alone):
        building.add(question, index)
        length = 2 * sizes.chunk if index % 4 == 0 else (1 + index % 3) * sizes.block
        building.add(replace(filler(sizes, 700 + index, length, 16), abort_after=index % 4))
        building.add(replace(question, after=len(building.requests) - 1), index)
    asked = building.done()
    for index, (question, _) in enumerate(alone):
        if len(question.prompt_token_ids) > sizes.chunk:
            building, again = beside_decode(question, sizes, 900 + index), replace(question, cold=False)
            left = building.add(replace(again, abort_after=0))
            building.add(replace(again, after=left), index)
            asked += building.done()
    return asked


def beside_decode(question: Request, sizes: Sizes, seed: int) -> Building:
    """With a request that decodes meanwhile, so that chunks do not end where blocks do."""
    building = Building()
    building.add(filler(sizes, seed, 3, question.max_tokens))
    return building


def twins(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Each twice at once."""
    asked = []
    for index, (question, _) in enumerate(alone):
        building = beside_decode(question, sizes, 800 + index)
        for _ in range(2):
            building.add(replace(question, cold=False), index)
        asked += building.done()
    return asked


def seeds(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Again alone, then together."""
    return repeat(alone, sizes) + batch(alone, sizes)[-1:]


decode = partial(continued, is_cold=True)
RELATIONS = (
    Relation("batch", "alone = together with others, at any place", batch, measures="batch"),
    Relation("neighbours", "alone = between others, whatever they are", neighbours, measures="batch"),
    Relation(
        "decode", "decode = prefill: an answer's tokens, sent as a prompt, go on as it does", decode, measures="other"
    ),
    Relation("repeat", "the same request again", repeat, keeps=True),
    Relation("order", "one after another in another order", order, keeps=True),
    Relation("score", "log-probabilities of a prompt = those reported while it was generated", score, ("scored",)),
    Relation("stream", "streamed = in one piece", partial(repeat, streamed=True), ("streamed",)),
    Relation("stop", "with a stop string = cut where its text first has that", stop, ("stops",)),
    Relation("greedy", "a greedy answer's tokens = the likeliest that it reports", likeliest),
    Relation("mixed", "greedy beside sampled requests = alone", mixed, ("seeds",)),
    Relation("chunks", "a prompt in one piece = cut, beside requests that decode", chunks),
    Relation("aborts", "beside and after aborted requests = alone", aborts, ("aborts",)),
    Relation("twins", "the same prompt twice at once, not cached before = alone", twins),
    Relation("warm", "with cached prefixes = without", partial(repeat, times=2, cold=False)),
    Relation("prefixes", "a cached prefix of every length = without", partial(continued, is_cold=False)),
    Relation("warm-batch", "cached prefixes together with others = alone without", warm_together),
    Relation("branches", "after a request that shares a part of the prompt only = without", branches),
    Relation("reuse", "short after long in the same slots = alone", reuse),
    Relation("burst", "more requests than slots, waiting and preempted = alone", burst),
    Relation("evicted", "cached, pushed out and cached again = without a cache", evicted),
    Relation("seeds", "a sampled request with a seed, again and together = alone", seeds, ("seeds",), samples=1),
    Relation(
        "samples", "n samples of a request = their tokens sent as a prompt", score, ("samples", "scored"), samples=3
    ),
    Relation("sizes", "another instance, of other chunks and slots", batch, ("sizes",), player="sizes"),
    Relation("varied", "with the fields of --vary = without", repeat, ("varied",), player="varied"),
    Relation("later", "the same request at the end of everything", repeat, keeps=True),
)
OTHER = Relation("other", "two engines, each request alone", repeat)
NAMES = tuple(relation.name for relation in RELATIONS)
