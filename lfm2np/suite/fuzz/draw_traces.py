"""Draws traces of kinds that have broken engines, around the borders of the engine's blocks, chunks and slots.

The same prefix cold, warm and evicted; prompts that differ in the last token of a block; long after short; more
requests than slots; requests aborted in prefill and in decode; repeats; multiple samples; stop strings; one long
prompt among decodes; the same request beside other neighbours; requests that cross positions at which engines switch
their method, whatever their blocks and chunks are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

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
    assumed   sizes that neither the user nor the engine gave, by the names of engines.protocol.TOLD
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
    assumed: tuple[str, ...] = ()


def content(around: Around, seed: int, length: int) -> Ids:
    """Random tokens; of two lengths with the same seed the longer begins with the shorter."""
    chance = Random(seed)
    return tuple(chance.choice(around.alphabet) for _ in range(length))


def drawn_length(around: Around, chance: Random) -> int:
    """Of a prompt: tiny, around multiples of a block or of a chunk, up to half of the context; or one from which the
    answer crosses one of FAR, if the context is that long."""
    block, chunk = around.block, around.chunk
    near: list[Callable[[], int]] = [
        lambda: chance.choice(TINY),
        lambda: chance.randint(1, 4) * block + chance.choice((0, -1, 1)),
        lambda: chance.randint(1, 4) * block + chance.choice((0, -1, 1)),
        lambda: chance.randint(1, 3 * block),
        lambda: chance.randint(1, 2) * chunk + chance.choice((0, -1, 1)),
    ]
    far = [border for border in FAR if border + 2 < around.longest]  # room for an answer behind it
    kind = chance.randrange(len(near) + len(far))
    if kind >= len(near):
        off = chance.choice((1, 0, -1, -4, block, 3 * block))
        return min(far[kind - len(near)] + off, around.longest - 2)
    return max(1, min(near[kind](), around.longest // 2, MOST_TOKENS_OF_A_TRACE // 2))


def drawn_prompt(around: Around, earlier: Sequence[Ids], chance: Random) -> Ids:
    """A new prompt; a stem that others share, and some tokens; or an earlier prompt: again, longer, or with a different
    last token."""
    kind = chance.choice(("stem", "new", "stem", "again", "longer", "last"))
    tail = content(around, chance.randrange(10), chance.choice((0, 1, 1, 2, 5)))
    if kind in ("again", "longer", "last") and earlier:
        old = chance.choice(earlier)
        if kind == "again":
            return old
        return (*old, *tail) if kind == "longer" else (*old[:-1], *content(around, chance.randrange(10), 1))
    seed = chance.randrange(STEMS) if kind == "stem" else chance.randint(100, 10_000)
    first = around.first if around.needs_first or seed % 2 else ()
    return (*first, *content(around, seed, drawn_length(around, chance)), *(tail if kind == "stem" else ()))


def drawn_moment(sent: Sequence[Request], chance: Random) -> dict[str, Any]:
    """When a request is sent: with those before it, while one of them decodes, or when one has ended."""
    kind = chance.choice(("at once", "at once", "ended", "ended", "tokens")) if sent else "at once"
    if kind == "at once":
        return {}
    after, pause = chance.randrange(len(sent)), chance.choice((0, 0, 0, 5, 50))
    tokens = chance.randint(1, sent[after].max_tokens) if kind == "tokens" else None
    return {"after": after, "after_tokens": tokens, "pause": pause}


def drawn_request(around: Around, sent: Sequence[Request], chance: Random) -> Request:
    prompt = drawn_prompt(around, [earlier.prompt_token_ids for earlier in sent], chance)[: around.longest - 1]
    room = around.longest - len(prompt)
    new = chance.choice((1, 2, 4, 8, around.block + 1, 2 * around.block))
    max_tokens = max(1, min(new, room, MOST_NEW))
    fields = drawn_moment(sent, chance)
    special = chance.choice([kind for kind in SPECIAL if kind not in around.without])
    if special == "aborted":
        fields |= {"abort_after": chance.randint(0, max_tokens // 2)}
    elif special in ("sampled", "samples") and around.sampling:
        fields |= {"temperature": 1.0, "seed": chance.randrange(4)}
        fields |= {"n": chance.randint(2, 3)} if special == "samples" and around.samples else {}
    elif special == "stop" and around.stops:
        fields |= {"stop": chance.choice(around.stops)}
        place = chance.choice((None, 0, 1, 2, 3))
        fields |= {} if place is None else {"tags": {STOP_IN: place}}
    elif special in ("cold", "streamed"):
        fields |= {special: True}
    return greedy("", prompt, max_tokens, **fields)


def drawn_trace(around: Around, seed: str) -> Trace:
    """Up to three more requests than there are slots, of at most MOST_TOKENS_OF_A_TRACE together; now and then many
    short sampled ones, or, where sizes are assumed, a crowd, which fills a pool whatever its sizes."""
    chance = Random(seed)
    if around.assumed and chance.randrange(CROWDED) == 0:
        return crowd(around, chance)
    if around.sampling and "sampled" not in around.without and chance.randrange(SELDOM) == 0:
        return draws(around, chance.randint(100, 10_000))
    sent: list[Request] = []
    budget = MOST_TOKENS_OF_A_TRACE
    for _ in range(chance.randint(1, min(12, around.slots + 3))):
        request = drawn_request(around, sent, chance)
        budget -= request.num_tokens
        if budget < 0 and sent:
            break
        sent.append(request)
    return Trace(tuple(sent))


def crowd(around: Around, chance: Random) -> Trace:
    """Requests of one length, all at once, that fill the budget: a small pool runs out of blocks while they decode, and
    what is preempted is short, so that a wrong beginning still shows in its answer."""
    count = chance.randint(2, min(12, around.slots + 3))
    whole = min(around.longest, MOST_TOKENS_OF_A_TRACE // count)
    new = max(1, min(MOST_NEW, whole // 2))
    length = max(1, whole - new - len(around.first) - chance.randint(0, around.block))
    seed = chance.randint(100, 10_000)
    prompts = [(*around.first, *content(around, seed + index, length)) for index in range(count)]
    return Trace(tuple(greedy("", prompt[: around.longest - new], new) for prompt in prompts))


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
    Random(seed).shuffle(ids)
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
