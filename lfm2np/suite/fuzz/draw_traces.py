"""Draws traces of kinds that have broken engines, around the borders of the engine's blocks, chunks and slots.

The same prefix cold, warm and evicted; prompts that differ in the last token of a block; long after short; more
requests than slots; requests aborted in prefill and in decode; repeats; multiple samples; stop strings; one long
prompt among decodes; the same request beside other neighbours; requests that cross positions at which engines switch
their method, whatever their blocks and chunks are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.oracle.engines.records import Ids, Request, Trace, greedy
from lfm2np.suite.fuzz.trace import STOP_IN

TINY = (1, 2, 3, 4, 5)  # below, at and above the taps of the convolution
TEXTS = "text"
FAR = (256, 512)  # positions that requests cross: common sizes of tiles, partitions and windows
MOST_TOKENS_OF_A_TRACE = 1500
MOST_NEW = 64  # tokens of an answer
# Of a request, by weight.
SPECIAL = (*("",) * 5, "aborted", "aborted", "cold", "sampled", "samples", "stop", "streamed")
DRAWN = 32  # requests of a trace that tests sampling,
SELDOM = 16  # which is one trace in so many
CROWDED = 8  # one trace in so many is a crowd
STEMS = 2  # texts that the prompts of one trace begin with


@dataclass(frozen=True)
class Around:
    """Sizes of the engine, around which lengths are drawn, and what it supports.

    block     tokens of a cache block
    chunk     most tokens of a step
    slots     requests that run at once
    longest   most tokens of prompt and answer
    alphabet  token ids of prompts
    first     the BOS, or nothing
    needs_first  each prompt begins with it, as a server that takes texts adds it by itself
    stops     stop strings; empty: none is drawn
    without   what else is not drawn, of SPECIAL; TEXTS: texts are not compared
    is_assumed  some of the sizes
    """

    block: int
    chunk: int
    slots: int
    longest: int
    alphabet: tuple[int, ...]
    first: Ids = ()
    needs_first: bool = False
    stops: tuple[str, ...] = ()
    samples: bool = False
    sampling: bool = False
    without: tuple[str, ...] = ()
    is_assumed: bool = False


def content(around: Around, seed: int, length: int) -> Ids:
    """Random tokens; of two lengths with the same seed the longer begins with the shorter."""
    choice = random.Random(seed)
    return tuple(choice.choice(around.alphabet) for _ in range(length))


def lengths(around: Around) -> st.SearchStrategy[int]:
    """Of prompts: tiny, around multiples of a block or of a chunk, up to half of the context; and those from which the
    answer crosses one of FAR, if the context is that long."""
    most = max(1, min(around.longest // 2, MOST_TOKENS_OF_A_TRACE // 2))
    blocks = st.builds(lambda count, off: count * around.block + off, st.integers(1, 4), st.sampled_from([0, -1, 1]))
    chunks = st.builds(lambda count, off: count * around.chunk + off, st.integers(1, 2), st.sampled_from([1, 0, -1]))
    anything = (st.sampled_from(TINY), blocks, blocks, st.integers(1, 3 * around.block), chunks)
    near = [drawn.map(lambda length: max(1, min(length, most))) for drawn in anything]
    offs = st.sampled_from([1, 0, -1, -4, around.block, 3 * around.block])
    far = [
        st.builds(lambda off, border: min(border + off, around.longest - 2), offs, st.just(border))
        for border in FAR
        if border + 2 < around.longest  # room for an answer behind it
    ]
    return st.one_of(*near, *far)


@st.composite
def prompts(draw: st.DrawFn, around: Around, earlier: Sequence[Ids]) -> Ids:
    """A new prompt; a stem that others share, and some tokens; or an earlier prompt: again, longer, or with a different
    last token."""
    kind = draw(st.sampled_from(["stem", "own", "stem", "again", "longer", "last"]))
    tail = content(around, draw(st.integers(0, 9)), draw(st.sampled_from([0, 1, 1, 2, 5])))
    if kind in ("again", "longer", "last") and earlier:
        old = earlier[draw(st.integers(0, len(earlier) - 1))]
        if kind == "again":
            return old
        return (*old, *tail) if kind == "longer" else (*old[:-1], *content(around, draw(st.integers(0, 9)), 1))
    seed = draw(st.integers(0, STEMS - 1)) if kind == "stem" else draw(st.integers(100, 10_000))
    first = around.first if around.needs_first or seed % 2 else ()
    return (*first, *content(around, seed, draw(lengths(around))), *(tail if kind == "stem" else ()))


@st.composite
def moments(draw: st.DrawFn, sent: Sequence[Request]) -> dict[str, Any]:
    """When a request is sent: with those before it, while one of them decodes, or when one has ended."""
    kind = draw(st.sampled_from(["at once", "at once", "ended", "ended", "tokens"])) if sent else "at once"
    if kind == "at once":
        return {}
    after = draw(st.integers(0, len(sent) - 1))
    pause = draw(st.sampled_from([0, 0, 0, 5, 50]))
    if kind == "ended":
        return {"after": after, "pause": pause}
    return {"after": after, "after_tokens": draw(st.integers(1, max(1, sent[after].max_tokens))), "pause": pause}


@st.composite
def requests(draw: st.DrawFn, around: Around, sent: Sequence[Request]) -> Request:
    prompt = draw(prompts(around, [earlier.prompt_token_ids for earlier in sent]))[: around.longest - 1]
    room = around.longest - len(prompt)
    new = draw(st.sampled_from([1, 2, 4, 8, around.block + 1, 2 * around.block]))
    max_tokens = max(1, min(new, room, MOST_NEW))
    fields: dict[str, Any] = draw(moments(sent))
    special = draw(st.sampled_from([kind for kind in SPECIAL if kind not in around.without]))
    if special == "aborted":
        fields |= {"abort_after": draw(st.integers(0, max_tokens // 2))}
    elif special in ("sampled", "samples") and around.sampling:
        fields |= {"temperature": 1.0, "seed": draw(st.integers(0, 3))}
        fields |= {"n": draw(st.integers(2, 3))} if special == "samples" and around.samples else {}
    elif special == "stop" and around.stops:
        fields |= {"stop": draw(st.sampled_from(around.stops))}
        place = draw(st.sampled_from([None, 0, 1, 2, 3]))
        fields |= {} if place is None else {"tags": {STOP_IN: place}}
    elif special in ("cold", "streamed"):
        fields |= {special: True}
    return greedy("", prompt, max_tokens, **fields)


@st.composite
def traces(draw: st.DrawFn, around: Around) -> Trace:
    """Up to three more requests than there are slots, of at most MOST_TOKENS_OF_A_TRACE together; or, now and then,
    many short sampled ones."""
    if around.sampling and "sampled" not in around.without and draw(st.integers(1, SELDOM)) == SELDOM:
        return draws(around, draw(st.integers(100, 10_000)))
    sent: list[Request] = []
    budget = MOST_TOKENS_OF_A_TRACE
    for _ in range(draw(st.integers(1, min(12, around.slots + 3)))):
        request = draw(requests(around, sent))
        budget -= request.num_tokens
        if budget < 0 and sent:
            break
        sent.append(request)
    return Trace(tuple(sent))


@st.composite
def crowds(draw: st.DrawFn, around: Around) -> Trace:
    """Requests of one length, all at once, that fill the budget: a small pool runs out of blocks while they decode, and
    what is preempted is short, so that a wrong beginning still shows in its answer."""
    count = draw(st.integers(2, min(12, around.slots + 3)))
    whole = min(around.longest, MOST_TOKENS_OF_A_TRACE // count)
    new = max(1, min(MOST_NEW, whole // 2))
    length = max(1, whole - new - len(around.first) - draw(st.integers(0, around.block)))
    seed = draw(st.integers(100, 10_000))
    prompts = [(*around.first, *content(around, seed + index, length)) for index in range(count)]
    return Trace(tuple(greedy("", prompt[: around.longest - new], new) for prompt in prompts))


def traces_around(around: Around) -> st.SearchStrategy[Trace]:
    """Where sizes are assumed, now and then a crowd: that fills a pool whatever its sizes."""
    if not around.is_assumed:
        return traces(around)
    return st.sampled_from([traces] * (CROWDED - 1) + [crowds]).flatmap(lambda draw: draw(around))


def draws(around: Around, seed: int) -> Trace:
    """Sampled requests with different seeds: their tokens together show the distribution."""
    length = max(1, min(4, around.longest - len(around.first) - 2))
    prompts = [(*around.first, *content(around, seed + index, length)) for index in range(DRAWN)]
    return Trace(tuple(greedy("", prompt, 2, temperature=1.0, seed=seed + i) for i, prompt in enumerate(prompts)))


def unfit(around: Around, vocab_size: int, trace: Trace) -> str | None:
    """Why a right engine may refuse the trace, or answer otherwise; None for each that is drawn."""
    for index, request in enumerate(trace.requests):
        where, first = f"requests[{index}]", around.first
        tokens = len(request.prompt_token_ids) + request.max_tokens
        if tokens > around.longest:
            return f"{where}: {tokens} tokens of prompt and answer, expected at most {around.longest}"
        if max(request.prompt_token_ids) >= vocab_size:
            token = max(request.prompt_token_ids)
            return f"{where}.prompt_token_ids: token {token}, expected ids below vocab_size={vocab_size}"
        ids = request.prompt_token_ids
        if around.needs_first and (ids[: len(first)] != first or len(ids) == len(first)):
            return f"{where}.prompt_token_ids: expected {first} and more, as the server puts that before each text"
        place = request.tags.get(STOP_IN, 0)
        if type(place) is not int or place < 0:
            return f"{where}.tags.{STOP_IN} {place!r}: expected a whole number, at least 0"
        if request.stop is not None and not around.stops:
            return f"{where}.stop {request.stop!r}: this engine takes none"
        if request.is_sampled and not around.sampling:
            return f"{where}.temperature {request.params.temperature:g}: this engine is asked greedily only"
        if request.params.n > 1 and not around.samples:
            return f"{where}.n {request.params.n}: this engine gives one"
    return None


LARGEST, TRIED, CONTROL = 64, 4000, 8  # without a tokenizer, ids below CONTROL count as control tokens


def alphabet_of(tokenizer: Tokenizer | None, vocab_size: int, seed: int = 0) -> tuple[int, ...]:
    """At most LARGEST token ids, the same for the same seed."""
    ids = list(range(min(CONTROL, vocab_size - 1), vocab_size))
    random.Random(seed).shuffle(ids)
    if tokenizer is None:
        return tuple(ids[:LARGEST])
    chosen: list[int] = []
    for token in ids[:TRIED]:
        if len(chosen) == LARGEST:
            break
        if is_plain(tokenizer, token) and all(row_text(tokenizer, row) is not None for row in rows_with(chosen, token)):
            chosen.append(token)
    return tuple(chosen) if len(chosen) > 1 else tuple(ids[:LARGEST])


def rows_with(chosen: list[int], token: int) -> list[list[int]]:
    """Sequences in which the token is next to itself and to each of those chosen, on both sides."""
    around = [each for other in chosen for each in (other, token)]
    return [[token], [token, token], [token, *around, *chosen]]


def is_plain(tokenizer: Tokenizer, token: int) -> bool:
    """Whole printable characters: no special token, no piece of a character, no control."""
    try:
        text = tokenizer.token_bytes(token).decode()
    except UnicodeDecodeError:
        return False
    return bool(text) and text.isprintable()


def row_text(tokenizer: Tokenizer, ids: list[int]) -> str | None:
    """The text that the tokenizer turns into these ids, without a BOS; None if there is none."""
    text = tokenizer.decode(ids)
    return text if text and tokenizer.encode_more(text) == ids else None
