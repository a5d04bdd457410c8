"""The requests of a check, chosen so that each class of bug shows: lengths around borders, alone and beside others,
cold and warm, long after short, beside aborted requests. CASES is the table of them: which case is there for what. What
a check did not test follows from it, too.

All cases are sent by default but `long`, which costs too much.
Everything is drawn from one seed, so two checks of one model send the same requests.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.text.tokenizer import Tokenizer, text_of
from lfm2np.engine.uncached import common_prefix
from lfm2np.errors import TokenizerError
from lfm2np.oracle.engines.records import Request, Trace, changed, greedy
from lfm2np.truth.config import ModelConfig
from lfm2np.values import require_count

BATCH = 8  # requests together in most cases: larger batches have a case of their own
NEW = 16  # tokens generated a request, unless the case says otherwise
BORDERS = (8, 16, 32, 64, 128, 256)  # of blocks and chunks in today's engines
TEXTS = (
    "The first thing that the captain saw when the fog lifted was a small green island with one tall tree on it.",
    "To make bread you need flour, water, salt and time; everything else is a matter of taste and of patience.",
    "sort: 7 2 9 4 1 8",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))\n",
    "copy: k w b m q z",
    "Question: which river flows through Vienna? Answer:",
    "add: 34 + 58",
    "Once upon a time there was a fox who lived near a lake. One day the fox met a bear and said: good morning!",
    "1 2 3 5 8 13 21 34 55 89",
    "It was not the wind, and it was not the rain. It was something else that knocked at the door, three times.",
)


STOPPED = (0, 7, 9)  # of TEXTS: those that go on longest
SEEDS = (4, 5, 6, 7, 70, 90, 120, 150)  # lengths of prompts, each with a seed of its own; some go in several chunks
DRAWN = 24  # prompts whose tokens are drawn once: a first token tells most of how it is drawn
DRAWN_AT_1, DRAWN_TOKENS = 96, 5  # such prompts at temperature 1, and the tokens of each: fewer hide a top_p of 0.9
HALF = 0.5  # the temperature of such tokens, too
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 2.0, "frequency_penalty": 2.0}
BIAS = 20.0  # of one token, which the greedy answer then repeats
HOT = 2.0  # a temperature at which tokens come that end within a character; vLLM takes no higher one
FILTERS: tuple[dict[str, float], ...] = (  # at the higher temperature a token beyond the third comes more often
    {"top_k": 3, "temperature": HOT},
    {"top_p": 0.5},
    {"min_p": 0.5},
    {"top_p": 0.5, "temperature": HALF},
    {"min_p": 0.3, "temperature": HALF},
    {"top_k": 8, "top_p": 0.5, "temperature": 0.7},
)
PENALISED, FILTERED = 3, 12  # rounds with all kinds, and with filters, of which few tokens tell little
PROCESSED = ("top_k", "top_p", "min_p", *PENALTIES, "logit_bias")
MANY = "🦥🫠🧿🪐"  # characters of several tokens
STEP = 1024  # tokens that an engine in this process is to take in one step, if it heeds hints
REPEATED = (24, 64, 264)  # tokens of prompts that come back, one of them whole blocks; a hit with blocks of up to 256
FILLERS, FILLING = 8, 96  # prompts, and their tokens, that push others out of a small cache
SAMPLES = "samples"
SHORT_CHAT = [{"role": "user", "content": "add: 3 + 4"}]
LONG = "long"  # the case of long prompts
LENGTHS = (4096, 32768)  # of its longest prompts; and as many tokens as the model takes
FAR_BORDERS = (16, 32, 64, 128, 256, 512, 2048, 8192)  # of blocks and chunks, far from the beginning
ABORT_AFTER = 3  # tokens of a request that is cancelled
FEW = 4  # tokens generated a request: with one prefill for all of a length, late positions cost little
SCORED = ("short-prompts", "borders", "long-prompts", "neighbours")  # elsewhere engines must be free to skip prompts


@dataclass(eq=False)
class Writer:
    """Draws prompts for one model, and numbers the requests."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    most_at_once: int
    seed: int = 0
    max_model_len: int | None = None  # tokens of a long request and its response; None: as many as the model takes
    random: np.random.Generator = field(init=False)
    count: int = 0
    case: str = ""  # whose requests are made

    @property
    def at_once(self) -> int:
        """Of the cases whose number of requests depends on it."""
        return min(BATCH, self.most_at_once)

    def __post_init__(self) -> None:
        require_count("max_model_len", self.positions, FEW + 1, None)
        self.random = np.random.Generator(np.random.Philox(key=[self.seed, 6]))

    @property
    def positions(self) -> int:
        """Of the longest request of the case `long`."""
        most = self.config.max_position_embeddings
        return most if self.max_model_len is None else min(most, self.max_model_len)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that leaves room to go on."""
        return max(1, self.config.max_position_embeddings - 2 * NEW)

    def random_ids(self, shape: int | tuple[int, int]) -> NDArray[np.int64]:
        """Without the special tokens, which stand at the front."""
        return self.random.integers(min(8, self.config.vocab_size - 1), self.config.vocab_size, shape)

    def drawn_ids(self, length: int) -> list[int]:
        """Random ids, as many as fit."""
        ids: list[int] = self.random_ids(min(length, self.longest)).tolist()
        return ids

    def text_ids(self, text: str) -> list[int]:
        """Of a text, as many as fit; there has to be a tokenizer."""
        assert self.tokenizer is not None
        return self.tokenizer.encode(text)[: self.longest]

    def ids(self, length: int) -> tuple[int, ...]:
        """A prompt of that many tokens: of a text, as far as it reaches, every other time; else random ids."""
        length = min(length, self.longest)
        drawn = self.random_ids(length)
        if self.tokenizer is None or self.random.integers(2):
            return tuple(map(int, drawn))
        start = int(self.random.integers(len(TEXTS)))
        text: list[int] = self.tokenizer.encode("")  # the BOS, if there is one
        for index in range(len(TEXTS)):
            text += self.tokenizer.encode_more(TEXTS[(start + index) % len(TEXTS)])
        return tuple((text * (1 + length // len(text)))[:length])

    def request(self, ids: Sequence[int], new: int = NEW, seed: int | None = None, **tags: Any) -> Request:
        self.count += 1
        return greedy(
            f"{self.case}-{self.count}",
            tuple(ids),
            max(1, min(new, self.config.max_position_embeddings - len(ids))),
            case=self.case,
            prompt_text=None if self.tokenizer is None else text_of(self.tokenizer, ids),
            seed=seed,
            temperature=0.0 if seed is None else 1.0,
            prompt_logprobs=0 if self.case in SCORED and len(ids) > 1 else None,
            tags={"length": len(ids), **tags},
        )

    def long_ids(self, length: int) -> tuple[int, ...]:
        """A prompt of that many tokens in which the same passages return again and again, so that far tokens count."""
        if self.tokenizer is None:
            passages = self.random_ids((len(TEXTS), 32))
            order = self.random.integers(len(TEXTS), size=1 + length // passages.shape[1])
            return tuple(passages[order].ravel()[:length].tolist())
        ids: list[int] = []
        text = ""
        while len(ids) < length:
            order = self.random.integers(len(TEXTS), size=8 + len(ids) // 16)
            text += "".join(TEXTS[index] + "\n" for index in order.tolist())
            ids = self.tokenizer.encode(text)
        return tuple(ids[:length])

    def each(self, prompts: Iterable[Sequence[int]], new: int = NEW, **tags: Any) -> list[Request]:
        """One request a prompt."""
        return [self.request(ids, new, **tags) for ids in prompts]


Make = Callable[[Writer], Iterator[list[Request]]]  # what is sent together, in turn


@dataclass(frozen=True)
class Case:
    """One row of the table: its requests, why they are sent (the docstring of `make`), what they suspect.

    suspect        what a wrong answer in this case, and in no simpler one, points to
    option         what a request needs that an engine may lack: not tested if none was sent; else the case's name
    is_default     whether it is sent without being asked for by name
    needs_batches  whether it is left out for an engine that takes one request at a time
    """

    make: Make
    suspect: str
    option: str = ""
    is_default: bool = True
    needs_batches: bool = False


CASES: dict[str, Case] = {}  # the simplest first


def case(
    suspect: str, option: str = "", is_default: bool = True, needs_batches: bool = False
) -> Callable[[Make], Make]:
    """Puts a function into the table, under its name."""

    def put(make: Make) -> Make:
        CASES[make.__name__.replace("_", "-")] = Case(make, suspect, option, is_default, needs_batches)
        return make

    return put


@case("the start of a sequence: zeros before the first token, prompts below L")
def short_prompts(writer: Writer) -> Iterator[list[Request]]:
    """1 to L+2 tokens, each alone."""
    for length in range(1, writer.config.conv_L_cache + 3):
        for _ in range(2):
            yield writer.each([writer.ids(length)])


@case("lengths around the borders of blocks and chunks")
def borders(writer: Writer) -> Iterator[list[Request]]:
    """One token less than a border, the border, one more; each alone."""
    for border in BORDERS:
        for length in (border - 1, border, border + 1):
            if length <= writer.longest:
                yield writer.each([writer.ids(length)])


@case("state or positions at the border of a chunk")
def long_prompts(writer: Writer) -> Iterator[list[Request]]:
    """Prompts of several chunks, alone and beside short ones."""
    for length in (300, 515):
        if length <= writer.longest:
            yield writer.each([writer.ids(length)])
    if writer.at_once > 1:
        yield writer.each(map(writer.ids, (200, 3, 130, 1)))


@case("rows of a ragged batch that leak into each other, or padding that does", needs_batches=True)
def neighbours(writer: Writer) -> Iterator[list[Request]]:
    """The same kinds of prompt together: a ragged batch whose members end at different times."""
    lengths = [1, 2, 3, writer.config.conv_L_cache + 1, 15, 16, 17, 33, 64, 100]
    for turn in range(4):
        yield [  # more than fit at once: later ones take over slots that are left
            writer.request(writer.ids(lengths[(index * 3 + turn) % len(lengths)]), NEW - (index % 4) * 3)
            for index in range(writer.at_once + 2)
        ]


@case("state of a slot's previous tenant")
def slot_reuse(writer: Writer) -> Iterator[list[Request]]:
    """Short requests where long ones have been, and the other way round."""
    for turn in range(3):
        for length in (90, 2, 40, 1):
            requests = writer.each([writer.ids(length + index % 2) for index in range(writer.at_once)], 8)
            yield requests[: 2 + turn] if turn else requests


@case("the prefix cache: a hit without the state that belongs to it")
def prefixes(writer: Writer) -> Iterator[list[Request]]:
    """The same prompt three times, then a longer one, one that branches off, and one with another first token."""
    for length in (17, 32, 50, 64, 96):
        ids = writer.ids(length)
        for prefix in ("cold", "warm", "warm"):
            yield writer.each([ids], prefix=prefix)
        yield writer.each([(*ids, *writer.ids(9))[: writer.longest]], prefix="warm")
        yield writer.each([(*ids[: len(ids) // 2 + 1], *writer.ids(7))[: writer.longest]], prefix="warm")
        yield writer.each([(ids[1], *ids[1:])], prefix="twin")  # the same blocks behind another beginning: no hit


@case("shared blocks that are written", needs_batches=True)
def families(writer: Writer) -> Iterator[list[Request]]:
    """Prompts with a common beginning and different ends, all at once."""
    for length in (16, 33):
        start = writer.ids(length)
        prompts = [(*start, *writer.ids(1 + 2 * index))[: writer.longest] for index in range(writer.at_once)]
        yield writer.each(prompts, prefix="shared")


@case("memory of an aborted request that is freed too early", needs_batches=True)
def aborts(writer: Writer) -> Iterator[list[Request]]:
    """Half of the requests are cancelled midway; neither the others nor later ones may be affected."""
    for turn in range(3):
        requests = [
            writer.request(writer.ids(5 + 11 * index + turn), 4 * NEW if index % 2 else NEW)
            for index in range(writer.at_once)
        ]
        requests[1::2] = [replace(request, abort_after=ABORT_AFTER) for request in requests[1::2]]
        yield requests
        yield writer.each([writer.ids(3 + 13 * index) for index in range(writer.at_once)])


@case(f"rows or slots that only batches of more than {BATCH} requests have", needs_batches=True)
def wide_batches(writer: Writer) -> Iterator[list[Request]]:
    """As many short requests together as the engine takes, and two more: rows and slots that no other case uses."""
    if writer.most_at_once > BATCH:
        yield writer.each([writer.ids(1 + index % 18) for index in range(writer.most_at_once + 2)], BATCH)


@case("where a text is cut at a stop string", "stop strings")
def stops(writer: Writer) -> Iterator[list[Request]]:
    """Texts, each alone; sending.stop_rounds sends each again, with a stop string from the answer."""
    for index in STOPPED if writer.tokenizer is not None else ():
        yield writer.each([writer.text_ids(TEXTS[index])])


@case("random numbers that depend on more than a request's own seed", "seeds")
def seeds(writer: Writer) -> Iterator[list[Request]]:
    """Sampled tokens, twice with the same seed alone, then beside each other; and more with other seeds. The prompts
    are random: a token that is certain is drawn with any seed.
    """
    numbered = [(seed, writer.drawn_ids(length)) for seed, length in enumerate((*SEEDS, *[4] * DRAWN_AT_1))]
    for prefix in ("cold", "warm"):
        for seed, ids in numbered[: len(SEEDS)]:
            yield [writer.request(ids, 2, seed, prefix=prefix)]
    for start in range(0, len(numbered), writer.at_once) if writer.at_once > 1 else ():
        prefix, new = ("warm", 2) if start < len(SEEDS) else ("cold", DRAWN_TOKENS)
        together = numbered[start : start + writer.at_once]
        yield [writer.request(ids, new, seed, prefix=prefix) for seed, ids in together]


@case("the prefix cache takes blocks without what stands before them")
def unchained(writer: Writer) -> Iterator[list[Request]]:
    """Two prompts, then blocks of both in one, and the later blocks of one as a beginning: neither is a hit."""
    half = min(64, writer.longest // 2)
    first, second = (writer.drawn_ids(2 * half + 1) for _ in range(2))
    for ids in (first, second):
        yield writer.each([ids], FEW)
    for ids in ([*first[:half], *second[half:]], first[half:]):
        yield writer.each([ids[: writer.longest]], FEW, prefix="twin")


@case("samples of one request that share keys, state or random numbers", "several samples (n > 1)")
def samples(writer: Writer) -> Iterator[list[Request]]:
    """A chat, whose answer ends soon (see sending.past_ends); then three samples of a prompt that ends within a block,
    alone and two such requests together; and of short prompts, whose first tokens tell how each sample is drawn."""
    if writer.tokenizer is not None:
        with contextlib.suppress(TokenizerError):  # no chat template, or none that can be rendered
            yield writer.each([writer.tokenizer.encode_chat(SHORT_CHAT)[: writer.longest]], 2 * NEW)
    prompts = [writer.drawn_ids(length) for length in (6, 21, 19, 37)]
    asked = [changed(writer.request(ids, 8, 1000 + index), n=3) for index, ids in enumerate(prompts)]
    yield from ([asked[0]], [asked[1]], asked[2:])
    short = [changed(writer.request(writer.drawn_ids(4), 2, 1100 + 3 * index), n=3) for index in range(DRAWN)]
    yield from (short[start : start + writer.at_once] for start in range(0, DRAWN, writer.at_once))


@case(f"a temperature other than 0 and 1 ({HALF:g}), or log-probabilities after it", "temperatures other than 0 and 1")
def temperatures(writer: Writer) -> Iterator[list[Request]]:
    """Sampled tokens again, at another temperature, of random prompts."""
    for start in range(0, 2 * DRAWN, writer.at_once):
        drawn = range(2000 + start, 2000 + min(start + writer.at_once, 2 * DRAWN))
        yield [changed(writer.request(writer.drawn_ids(3), 2, seed), temperature=HALF) for seed in drawn]


@case("penalties, filters or biases that are ignored, or are another request's", "penalties, filters and logit_bias")
def processors(writer: Writer) -> Iterator[list[Request]]:
    """Greedy answers with a penalty or a bias, and a few drawn tokens with a filter: one of each alone, then all kinds
    beside each other and beside plain requests."""
    seeds = itertools.count(int(writer.random.integers(2**30)))

    def one_of_each() -> list[Request]:
        biased = {int(writer.random_ids((1, 1))[0, 0]): BIAS}
        greedy_ones = [{name: value} for name, value in PENALTIES.items()] + [{"logit_bias": biased}]
        requests = [changed(writer.request(writer.ids(9), 2 * NEW), **params) for params in greedy_ones]
        drawn = [(writer.request(writer.drawn_ids(3), 2, next(seeds)), params) for params in FILTERS]
        return requests + [changed(request, **params) for request, params in drawn]

    yield from ([request] for request in one_of_each())
    requests = [request for _ in range(PENALISED) for request in [*one_of_each(), writer.request(writer.ids(9))]]
    for _ in range(FILTERED - PENALISED):
        requests += one_of_each()[-len(FILTERS) :]
    for start in range(0, len(requests), writer.at_once):
        yield requests[start : start + writer.at_once]


@case(
    "events of a stream: log-probabilities of other tokens, characters cut between tokens",
    "streamed answers (stream: true)",
)
def streams(writer: Writer) -> Iterator[list[Request]]:
    """Greedy answers, then sampled ones that are also asked for in one piece: few others have characters of several
    tokens."""
    text = [] if writer.tokenizer is None else [writer.text_ids(MANY)]
    for ids in (writer.ids(5), writer.ids(33), *text):
        yield [replace(writer.request(ids), streamed=True)]
    prompts = [(seed, writer.drawn_ids(3)) for seed in range(3000, 3000 + DRAWN)]
    for is_streamed in (False, True):
        for start in range(0, DRAWN, writer.at_once):
            requests = [writer.request(ids, 8, seed) for seed, ids in prompts[start : start + writer.at_once]]
            yield [changed(request, temperature=HOT, streamed=is_streamed) for request in requests]


@case("rows that only steps of more than 256 tokens have", needs_batches=True)
def large_steps(writer: Writer) -> Iterator[list[Request]]:
    """More than 512 tokens together, behind short prompts that decode as soon as they can."""
    lengths = (1, 2, 280, 300)
    if max(lengths) <= writer.longest:
        yield writer.each(map(writer.drawn_ids, lengths), FEW, step=STEP)


@case("the prefix cache: a hit on the wrong state or blocks, or on what was evicted or never finished")
def hits(writer: Writer) -> Iterator[list[Request]]:
    """Prompts once; then again, the last first; then cut within a block and continued otherwise; one that was cancelled
    midway, again; and all once more behind others. prefix_hits.py counts which of them the engine took from its cache.
    """
    prompts = [writer.ids(length) for length in REPEATED]
    for ids in prompts:
        yield writer.each([ids], FEW)
    cut = [(*ids[:-5], *writer.ids(4)) for ids in prompts]
    for ids in (*reversed(prompts), *cut):
        yield writer.each([ids], FEW, prefix="warm")
    ids = writer.ids(REPEATED[1])
    yield [replace(writer.request(ids), abort_after=ABORT_AFTER)]
    yield writer.each([ids], FEW, prefix="warm")
    for _ in range(FILLERS):
        yield writer.each([writer.ids(FILLING)], 1)
    for ids in (*prompts, *cut):
        yield writer.each([ids], FEW, prefix="warm")


@case(
    "what only late positions show: large angles, a window's blocks reused, state kept after many blocks",
    is_default=False,
)
def long(writer: Writer) -> Iterator[list[Request]]:
    """For each length one long prompt, cold and warm; then beginnings of it, around borders far out; then two prompts
    that leave it late, together. All share its tokens, so that the truth needs one prefill, and a prefix cache as well.
    """
    for length in long_lengths(writer.positions):
        ids = writer.long_ids(length)
        for prefix in ("cold", "warm"):
            yield writer.each([ids], FEW, prefix=prefix)
        for point in far_points(length, writer.config.sliding_window):
            yield writer.each([ids[:point]], FEW, prefix="warm")
        leave = [point for point in (length // 2 // 16 * 16, length - length // 8 - 5) if 0 < point < length - 8]
        late = writer.each([(*ids[:point], *writer.ids(8)) for point in leave], FEW, prefix="warm")
        yield from [late] if writer.at_once > 1 and late else [[request] for request in late]


def long_lengths(positions: int) -> list[int]:
    """Tokens of the longest prompts, FEW less than the positions that they and their responses take."""
    sizes = {*(length for length in LENGTHS if length <= positions), positions}
    return [size - FEW for size in sorted(sizes) if size > FEW]


def far_points(length: int, window: int | None) -> list[int]:
    """Lengths around the last odd multiple of each border and of the window: one token less, as many, one more. Odd, so
    that a border of 16 is not one of 32 as well. And a few on the way, which show where a late error begins.
    """
    points = {4**power for power in range(2, 12)}
    for size in {*FAR_BORDERS, window or FAR_BORDERS[0]}:
        border = ((length // size + 1) // 2 * 2 - 1) * size
        points.update((border - 1, border, border + 1))
    return sorted(point for point in points if 0 < point < length)


DEFAULT_CASES = tuple(name for name, case in CASES.items() if case.is_default)


def rounds(writer: Writer, cases: Sequence[str] | None = None) -> Iterator[Trace]:
    """The whole check, the simplest cases first."""
    for name, case in CASES.items():
        is_wanted = name in (DEFAULT_CASES if cases is None else cases)
        if is_wanted and (writer.at_once > 1 or not case.needs_batches):
            writer.case = name
            for requests in case.make(writer):
                beside = sum(request.params.n for request in requests) > 1
                yield Trace(tuple(changed(request, tags={"beside": beside}) for request in requests))


def option_of(request: Request) -> str:
    """The most demanding of what a greedy request in one piece lacks; empty for such a request."""
    options = {
        " and ".join(request.processors): bool(request.processors),
        "stop": request.stop is not None,
        "samples": request.params.n > 1,
        "stream": request.streamed,
        "temperature": request.params.temperature not in (0.0, 1.0),
        "sampled": request.is_sampled,
    }
    return next((name for name, is_there in options.items() if is_there), "")


def noted(plan: Iterable[Trace]) -> list[Trace]:
    """The same requests, with tags that only the whole plan knows, by which bugs are distinguished:

    order  its index among all
    place  its index in its trace, and `together` the size of that
    seen   how many of its first tokens an earlier prompt, or one before it in the round, shares
    abort  "beside" requests that are cancelled, or "after" such, or "none"
    """
    batches: list[Trace] = []
    prompts: list[tuple[int, ...]] = []
    abort = "none"
    for batch in plan:
        requests = []
        is_cut = any(request.abort_after is not None for request in batch.requests)
        for place, request in enumerate(batch.requests):
            seen = max((common_prefix(request.prompt_token_ids, other) for other in prompts), default=0)
            now = "beside" if is_cut else abort
            notes = {"place": place, "seen": seen, "abort": now, "order": len(prompts), "together": len(batch.requests)}
            requests.append(changed(request, tags=notes))
            prompts.append(request.prompt_token_ids)
        abort = "after" if is_cut else abort
        batches.append(Trace(tuple(requests)))
    return batches


def noted_behind(requests: Sequence[Request], orders: Iterator[int]) -> Trace:
    """A trace that a plan can't know, made of requests of it: its own place, company and order, not those of the
    requests that it comes from. `orders` gives numbers that no other request has."""
    noted_requests = []
    for place, request in enumerate(requests):
        abort = "none" if request.tags.get("abort", "none") == "none" else "after"
        notes = {"place": place, "abort": abort, "order": next(orders), "together": len(requests)}
        noted_requests.append(changed(request, tags={**notes, "beside": len(requests) > 1}))
    return Trace(tuple(noted_requests))
