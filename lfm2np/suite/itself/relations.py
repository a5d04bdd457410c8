"""Conditions under which an answer must stay the same, each as traces that hold the questions again.

A relation takes the questions with their answers alone, and gives the traces to play. A request of these that holds a
question has tags: QUESTION, its number, and what is compared:

START      it goes on from this token of the question's answer
SCORED     the log-probabilities of its prompt are compared, not its answer
LIKELIEST  its tokens are compared with the likeliest that it reports
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lfm2np.oracle.engines.records import MOMENT, Answer, Pair, Request, Trace, changed, greedy
from lfm2np.suite.fuzz.trace import in_turn
from lfm2np.suite.itself.questions import Sizes, filler

CONTINUED = 4  # tokens that a continuation asks for
LONGEST_CONTINUED = 3  # questions whose answers are asked for from each of their tokens on
FILLS = 4  # times the slots: long requests that push everything out of a cache of unknown size
SEED = 7
TEMPERATURE = 1.0
QUESTION, START, SCORED, LIKELIEST = "question", "start", "is_scored", "is_likeliest"  # tags of a request
STOP_SIZES = (3, 1)  # characters
NEEDS = {  # fields of Abilities and names of players, and what is said where the engine has none
    "tells_prompt_logprobs": "the engine reports no log-probabilities of prompts",
    "is_streaming": "the engine does not stream",
    "can_abort": "a request can't be aborted",
    "takes_sampling": "the engine takes no seeds",
    "takes_seeds": "the engine takes no seeds",
    "takes_samples": "the engine takes no n > 1",
    "takes_stops": "the engine takes no stop strings",
    "sizes": "only an engine in Python that steps is made again in other sizes",
}
Build = Callable[[Sequence[Pair], Sizes], list[Trace]]


@dataclass(frozen=True)
class Relation:
    """One condition.

    name      of --cases, with --against
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


def again(alone: Sequence[Pair], index: int, start: int = 0, **fields: Any) -> Request:
    """A question with other fields; its prompt goes on with `start` tokens of its answer."""
    question, answer = alone[index]
    prompt = question.prompt_token_ids + answer.ids[:start]
    tags = {QUESTION: index, START: start, **fields.pop("tags", {})}
    return changed(question, prompt_token_ids=prompt, tags=tags, **fields)


def whole(request: Request, answer: Answer) -> Request:
    """The answer's tokens as a prompt, whose log-probabilities are reported."""
    return greedy("", request.prompt_token_ids + answer.ids, 1, cold=True, prompt_logprobs=0)


def repeat(alone: Sequence[Pair], sizes: Sizes, times: int = 1, **fields: Any) -> list[Trace]:
    return [in_turn([again(alone, index, **fields) for _ in range(times) for index in range(len(alone))])]


def order(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    return [in_turn([again(alone, index) for index in reversed(range(len(alone)))])]


def batch(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Together in three sizes, each question at several places."""
    asked = []
    for count, shift in ((2, 0), (4, 1), (len(alone), 3)):
        questions = [again(alone, (index + shift) % len(alone)) for index in range(len(alone))]
        asked += [Trace(tuple(questions[first : first + count])) for first in range(0, len(alone), count)]
    return asked


def neighbours(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Each between others of the same length."""

    def other(question: Request, seed: int) -> Request:
        return filler(sizes, seed, min(len(question.prompt_token_ids), 4 * sizes.block), question.max_tokens)

    return between(alone, other)


def mixed(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Each between two that are sampled."""

    def sampled(question: Request, seed: int) -> Request:
        other = filler(sizes, 1000 + seed, sizes.block, question.max_tokens)
        return changed(other, temperature=TEMPERATURE, seed=SEED)

    return between(alone, sampled)


def between(alone: Sequence[Pair], other: Callable[[Request, int], Request]) -> list[Trace]:
    """Each question between two others, which are made for it and a seed."""
    return [
        Trace((other(question, 2 * index), again(alone, index), other(question, 2 * index + 1)))
        for index, (question, _) in enumerate(alone)
    ]


def continued(alone: Sequence[Pair], sizes: Sizes, is_cold: bool) -> list[Trace]:
    """Prompt and the first k tokens of the answer as a prompt, for every k: what follows must be the same."""
    asked = []
    for index, (_, answer) in list(enumerate(alone))[:LONGEST_CONTINUED]:
        count = answer.num_tokens
        requests = [
            again(alone, index, start, max_tokens=min(CONTINUED, count - start), cold=is_cold)
            for start in range(1, count)
        ]
        requests = requests if is_cold else [again(alone, index, cold=False), *requests]
        asked += [in_turn(requests)] if requests else []
    return asked


def score(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Cold, and twice as cached prompts."""
    requests = [
        changed(whole(question, answer), cold=is_cold, tags={QUESTION: index, SCORED: True})
        for index, (question, answer) in enumerate(alone)
        if len(question.prompt_token_ids) + answer.num_tokens < sizes.longest
        for is_cold in (True, False, False)
    ]
    return [in_turn(requests)]


def warm_together(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """At once, with their prefixes cached, some from within the answer on."""
    requests = []
    for index, (question, answer) in enumerate(alone):
        start = answer.num_tokens // 2 if index % 2 else 0
        most = answer.num_tokens - start if start else question.max_tokens
        requests.append(again(alone, index, start, max_tokens=max(1, most), cold=False))
    return [Trace(tuple(requests))]


def branches(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """After a request that shares only the question's first k tokens, where each slot held the state of k others.

    Neither that state nor the other branch's may be gone on from. llama.cpp's server does so with k = 1.
    """
    requests = []
    for number, shared in enumerate((1, 2, sizes.block, 2 * sizes.block)):
        for slot in range(sizes.slots):
            for length in (shared, shared + 4):  # the longer goes on from the shorter
                requests.append(filler(sizes, 800 + number * sizes.slots + slot, length))
        for index, (question, _) in enumerate(alone):
            prompt = question.prompt_token_ids
            if shared < len(prompt):
                token = prompt[shared]
                other = token - 1 if token + 1 == sizes.vocab else token + 1
                requests += [greedy("", (*prompt[:shared], other), 1), again(alone, index, cold=False)]
    return [in_turn(requests)]


def evicted(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Warm, pushed out by long requests, and warm again."""
    length = min(sizes.longest - 1, max(4 * sizes.chunk, 8 * sizes.block))
    warm = [again(alone, index, cold=False) for index in range(len(alone))]
    return [in_turn([*warm, *(filler(sizes, 100 + seed, length) for seed in range(FILLS * sizes.slots)), *warm])]


def reuse(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Short after long: each question follows requests that were longer, in every slot."""
    length = min(sizes.longest // 2, max(2 * sizes.chunk, 4 * sizes.block))
    long = [filler(sizes, 300 + slot, length, 2) for slot in range(sizes.slots)]
    short = [again(alone, index, after=sizes.slots - 1, pause=MOMENT) for index in range(len(alone))]
    return [Trace((*long, *short[start : start + 4])) for start in range(0, len(alone), 4)]


def stop(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Each with a stop string from the middle or the end of its text: one after another, together, and streamed."""
    pieces = [piece_of(answer.text or "", at_end=index % 2 == 1) for index, (_, answer) in enumerate(alone)]
    requests = [again(alone, index, stop=piece) for index, piece in enumerate(pieces) if piece is not None]
    if not requests:
        return []
    return [
        in_turn(requests),
        Trace(tuple(requests)),
        in_turn([replace(request, streamed=True) for request in requests]),
    ]


def piece_of(text: str, at_end: bool) -> str | None:
    """Plain characters of a text; None if it has none. Long ones are of several tokens, perhaps."""
    for size in STOP_SIZES:
        starts = range(len(text) - size, -1, -1) if at_end else range(len(text) // 2, len(text) - size + 1)
        for piece in (text[start : start + size] for start in starts):
            if piece.isascii() and piece.isprintable() and piece == piece.strip():
                return piece
    return None


def chunks(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Each arrives while others decode, so that its prompt shares steps with them and is cut otherwise."""
    asked = []
    for index in range(len(alone)):
        busy = filler(sizes, 500 + index, 3, min(24, sizes.longest - 3))
        other = filler(sizes, 600 + index, sizes.block, min(16, max(1, sizes.longest // 4)))
        asked.append(Trace((busy, other, again(alone, index, after=0, after_tokens=2 + index % 3))))
    return asked


def burst(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Three times as many as there are slots, at once: they wait, and memory runs out."""
    count = max(len(alone), 3 * sizes.slots)
    return [Trace(tuple(again(alone, number % len(alone)) for number in range(count)))]


def aborts(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Beside requests that are aborted within their prompts and later, and after them in their slots; then, for prompts
    of several chunks, after the same prompt was aborted while a part of it was computed, and may be cached. Another
    request decodes meanwhile, so that chunks do not end where blocks do."""
    requests: list[Request] = []
    asked: list[Trace] = []
    for index, (question, _) in enumerate(alone):
        length = 2 * sizes.chunk if index % 4 == 0 else (1 + index % 3) * sizes.block
        left = replace(filler(sizes, 700 + index, length, 16), abort_after=index % 4)
        requests += [again(alone, index), left, again(alone, index, after=len(requests) + 1)]
        if len(question.prompt_token_ids) > sizes.chunk:
            left = replace(question, cold=False, abort_after=0)
            asked.append(Trace((beside(question, sizes, 900 + index), left, again(alone, index, cold=False, after=1))))
    return [Trace(tuple(requests)), *asked]


def twins(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Each twice at once, while another request decodes."""
    return [
        Trace((beside(question, sizes, 800 + index), *[again(alone, index, cold=False)] * 2))
        for index, (question, _) in enumerate(alone)
    ]


def beside(question: Request, sizes: Sizes, seed: int) -> Request:
    return filler(sizes, seed, 3, question.max_tokens)


def seeds(alone: Sequence[Pair], sizes: Sizes) -> list[Trace]:
    """Again alone, then together."""
    return repeat(alone, sizes) + batch(alone, sizes)[-1:]


SEEDS = ("takes_sampling", "takes_seeds")
RELATIONS = (
    Relation("batch", "alone = together with others, at any place", batch, measures="batch"),
    Relation("neighbours", "alone = between others, whatever they are", neighbours, measures="batch"),
    Relation(
        "decode",
        "decode = prefill: an answer's tokens, sent as a prompt, go on as it does",
        partial(continued, is_cold=True),
        measures="other",
    ),
    Relation("repeat", "the same request again", repeat, keeps=True),
    Relation("order", "one after another in another order", order, keeps=True),
    Relation(
        "score",
        "log-probabilities of a prompt = those reported while it was generated",
        score,
        ("tells_prompt_logprobs",),
    ),
    Relation("stream", "streamed = in one piece", partial(repeat, streamed=True), ("is_streaming",)),
    Relation("stop", "with a stop string = cut where its text first has that", stop, ("takes_stops",)),
    Relation(
        "greedy",
        "a greedy answer's tokens = the likeliest that it reports",
        partial(repeat, tags={LIKELIEST: True}),
    ),
    Relation("mixed", "greedy beside sampled requests = alone", mixed, SEEDS),
    Relation("chunks", "a prompt in one piece = cut, beside requests that decode", chunks),
    Relation("aborts", "beside and after aborted requests = alone", aborts, ("can_abort",)),
    Relation("twins", "the same prompt twice at once, not cached before = alone", twins),
    Relation("warm", "with cached prefixes = without", partial(repeat, times=2, cold=False)),
    Relation("prefixes", "a cached prefix of every length = without", partial(continued, is_cold=False)),
    Relation("warm-batch", "cached prefixes together with others = alone without", warm_together),
    Relation("branches", "after a request that shares a part of the prompt only = without", branches),
    Relation("reuse", "short after long in the same slots = alone", reuse),
    Relation("burst", "more requests than slots, waiting and preempted = alone", burst),
    Relation("evicted", "cached, pushed out and cached again = without a cache", evicted),
    Relation("seeds", "a sampled request with a seed, again and together = alone", seeds, SEEDS, samples=1),
    Relation(
        "samples",
        "n samples of a request = their tokens sent as a prompt; each has random numbers of its own",
        score,
        ("takes_samples", "tells_prompt_logprobs"),
        samples=3,
    ),
    Relation("sizes", "another instance, of other chunks and slots", batch, player="sizes"),
    Relation("later", "the same request at the end of everything", repeat, keeps=True),
)
ALONE = Relation("alone", "a request alone gets an answer that a right engine may give", repeat)  # always seen
OTHER = Relation("other", "another engine, each request alone", repeat, player="other")
NAMES = tuple(relation.name for relation in RELATIONS)
