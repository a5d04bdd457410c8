"""Which prompts are golden vectors, and why each of them is; notes.json has the classes of bug that their flags name.

Everything is derived by SHA-256 from one seed, so the same model and seed give the same prompts on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, product
from typing import Any

from lfm2np.checkpoint.text.tokenizer import Tokenizer, exact_text
from lfm2np.errors import RequestError
from lfm2np.truth.config import SLIDING, ModelConfig

NEW = 8  # new tokens of a vector, unless it says otherwise
BLOCK = 16  # tokens of a block in most engines
Hint = dict[str, Any]  # one thing to arrange in the engine: see schemas/vectors.schema.json
SMALL = (  # the vectors of a small set, beside those that they name and those of windows
    *("short-1-ids", "short-2-text", "border-16", "decode-32", "chunks-none", "chunks-of-2"),
    *("prefix-branch", "slot-again", "beside-3"),
)
TEXTS = (
    "recall: n = 4, d = 9, p = 2, z = 7; d -> 9",
    "copy: lamo tide rusa -> lamo tide rusa",
    "count: 31 to 38 -> 31 32 33 34 35 36 37 38",
    "sort: 5 3 8 1 -> 1 3 5 8",
    "story: They meet at the lake. Ann has a blue boat. Sam has a pink hat. What does Sam have? -> Sam has a pink hat.",
    "add: 52 + 19 -> 71",
)
TASKS = {  # as fixtures/corpus.py asks them: id, flag, question, new tokens, comment
    "task-recall": (
        "attention-distance",
        "recall: b = 3, k = 7, m = 1, t = 9, z = 4, d = 0, g = 8; b",
        2,
        "One value is to be found far back by its letter: without attention over that distance the digit is another.",
    ),
    "task-story": (
        "attention-distance",
        "story: They meet at the park. Mia has a red kite. Tom has a blue drum. Who has the drum?",
        7,
        "A question about one sentence of several: attention binds the thing to its owner.",
    ),
    "task-copy": (
        "convolution-order",
        "copy: kiba mozu tedo gipa",
        13,
        "Which token comes after which is all that counts: the convolution binds each to the one before it.",
    ),
    "task-sort": (
        "convolution-order",
        "sort: 7 2 9 4 1 8",
        7,
        "Counting on from the digit before: the state has to advance with each new token.",
    ),
    "task-count": (
        "decode-state",
        "count: 17 to 23",
        15,
        "A long answer to a short prompt: decoding is most of the work.",
    ),
    "task-add": ("convolution-order", "add: 34 + 58", 3, "One wrong digit is a wrong sum: computed, not looked up."),
}


@dataclass(frozen=True)
class Chosen:
    """One vector before anything is computed."""

    id: str
    flags: tuple[str, ...]
    comment: str
    prompt_token_ids: tuple[int, ...]
    prompt_text: str | None = None
    new: int = NEW
    schedule: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class Prompts:
    """Draws prompts for one model; `label` separates draws."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    seed: int

    def random(self, length: int, label: str) -> tuple[int, ...]:
        """Random ids, without the special tokens, which come first."""
        low = min(8, self.config.vocab_size - 1)
        drawn = (self.number(f"{label}:{index}") for index in range(length))
        return tuple(low + number % (self.config.vocab_size - low) for number in drawn)

    def text(self, length: int, label: str) -> tuple[int, ...]:
        """The beginning of a text of the tasks; random ids without a tokenizer."""
        if self.tokenizer is None:
            return self.random(length, label)
        start = self.number(label) % len(TEXTS)
        ids = self.tokenizer.encode(TEXTS[start])
        for text in cycle(TEXTS[start + 1 :] + TEXTS[: start + 1]):
            if len(ids) >= length:
                break
            ids += self.tokenizer.encode_more("\n" + text)
        return tuple(ids[:length])

    def number(self, label: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{label}".encode()).digest(), "big")


def choose(config: ModelConfig, tokenizer: Tokenizer | None, seed: int = 0, is_small: bool = False) -> list[Chosen]:
    """All vectors that fit into the model's context.

    is_small  those of SMALL and what they name, from which all scripts can still be made
    """
    prompts = Prompts(config, tokenizer, seed)
    room = config.max_position_embeddings
    every = chain(of_lengths(prompts), of_schedules(prompts), of_contents(prompts))
    kept = {vector.id: vector for vector in every if len(vector.prompt_token_ids) + vector.new <= room}
    while lost := [name for name, vector in kept.items() if not mentioned(vector) <= kept.keys()]:
        kept = {name: vector for name, vector in kept.items() if name not in lost}
    chosen = list(kept.values())
    if tokenizer is not None:
        texts = [vector.prompt_text or exact_text(tokenizer, vector.prompt_token_ids) for vector in chosen]
        chosen = [replace(vector, prompt_text=text) for vector, text in zip(chosen, texts, strict=True)]
    if is_small:
        wanted = [vector.id for vector in chosen if vector.id in SMALL or "sliding-window" in vector.flags]
        return picked(chosen, wanted)
    return chosen


def picked(chosen: Sequence[Chosen], only: Collection[str] | None) -> list[Chosen]:
    """In their order, with all vectors that their schedules name."""
    by_id = {vector.id: vector for vector in chosen}
    wanted = set(by_id if only is None else only)
    for name in sorted(wanted - by_id.keys()):
        raise RequestError(f"vector {name!r}: expected some of {', '.join(by_id)}")
    while more := {name for vector in chosen if vector.id in wanted for name in mentioned(vector)} - wanted:
        wanted |= more
    return [vector for vector in chosen if vector.id in wanted]


def mentioned(vector: Chosen) -> set[str]:
    """The vectors that its schedule names."""
    return {name for hint in vector.schedule for name in (hint.get("id"), *hint.get("with", ())) if name is not None}


def vector(name: str, flags: str, ids: Sequence[int], comment: str, hint: Hint | None = None, **fields: Any) -> Chosen:
    """With its flags as words and at most one hint of a schedule."""
    schedule = () if hint is None else (hint,)
    return Chosen(name, tuple(flags.split()), comment, tuple(ids), schedule=schedule, **fields)


def after(name: str) -> Hint:
    return {"kind": "after", "id": name}


def together(name: str, names: Sequence[str]) -> Hint:
    return {"kind": "together", "with": [other for other in names if other != name]}


ALONE: Hint = {"kind": "alone"}


def of_lengths(prompts: Prompts) -> Iterator[Chosen]:
    """1 to L+1 tokens, of a text and at random; around one, two and four blocks; around the window of an LFM3's layers
    of sliding attention, and far behind it."""
    config, taps, window = prompts.config, prompts.config.conv_L_cache, prompts.config.sliding_window
    for length in sorted({1, 2, 3, max(1, taps - 1), taps, taps + 1}):
        where = f"{length} of the {taps} tokens that the convolution sees" if length < taps else f"{length} tokens"
        for kind, draw, how in (("text", prompts.text, "as a text begins"), ("ids", prompts.random, "drawn at random")):
            ids = draw(length, f"short-{length}")
            flags = "start-of-sequence" if length <= taps else "wrong-row start-of-sequence"
            flags += " one-token" * (length == 1) + " beginning-token" * (ids[0] == config.bos_token_id)
            comment = f"{where}, {how}: what is before them is 0."
            yield vector(f"short-{length}-{kind}", flags, ids, comment, ALONE)
    for blocks, (off, where) in product((1, 2, 4), ((-1, "one less than"), (0, "exactly"), (1, "one more than"))):
        length, draw = blocks * BLOCK + off, prompts.text if off else prompts.random
        name = f"border-{length}"
        comment = f"{length} tokens, {where} {blocks * BLOCK}: a border of blocks of {BLOCK}, and the new ones go on."
        yield vector(name, "block-border", draw(length, name), comment)
    if window is not None and config.layers_of(SLIDING):
        for length in sorted({max(window - 1, 1), window, window + 1, 3 * window}):
            ids = prompts.random(length, f"window-{length}")
            comment = f"{length} tokens, where some layers see the last {window} only, a token's own included."
            yield vector(f"window-{length}", "sliding-window", ids, comment)


def of_schedules(prompts: Prompts) -> Iterator[Chosen]:
    """Prompts whose state goes on from step to step, from the cache, beside others and behind others."""
    text, random = prompts.text, prompts.random
    comment = "Many new tokens after few: an error of the state that each step leaves adds up."
    yield vector("decode-32", "decode-state block-border", text(6, "decoding"), comment, ALONE, new=32)

    # One prompt with several chunk sizes: the answers have to be the same.
    ids = text(23, "chunks")
    comment = "The prompt in one step: what the same prompt in chunks has to equal."
    yield vector("chunks-none", "chunk-state", ids, comment, ALONE)
    for size, why in (
        (1, "no chunk fills the convolution's window, so each keeps a part of the older state"),
        (2, "chunks as short as a window of 3 is deep"),
        (5, "odd places, none of them at a block's border"),
    ):
        hint = {"kind": "chunks", "size": size}
        yield vector(f"chunks-of-{size}", "chunk-state", ids, f"Chunks of {size}: {why}.", hint)

    # Cold, then warm: the same blocks, from the cache.
    ids, warm = text(3 * BLOCK, "prefix"), after("prefix-cold")
    comment = "Three whole blocks, computed with nothing in the cache."
    yield vector("prefix-cold", "prefix-state", ids, comment, {"kind": "cold"})
    comment = "The same prompt again: all of its blocks are cached, and the last token is still to be computed."
    yield vector("prefix-same", "whole-prompt-cached prefix-state", ids, comment, warm)
    comment = "It goes on from the cached prompt: keys and values are there, and the state at that place has to be too."
    yield vector("prefix-longer", "prefix-state", (*ids, *random(9, "prefix-longer")), comment, warm)
    branch = (*ids[:25], *random(14, "prefix-branch"))
    comment = "It leaves the cached prompt at token 25, within a block: only the first block may be taken over."
    yield vector("prefix-branch", "prefix-branch prefix-state", branch, comment, warm)
    comment = "It begins with the cached second and third block: the same tokens, but nothing is before them here."
    yield vector("prefix-inner", "prefix-branch", (*ids[BLOCK:], *ids[:3]), comment, warm)

    # One beginning with several ends, at the same time.
    start, names = text(2 * BLOCK + 1, "branches"), [f"branch-{index}" for index in range(3)]
    for own, name in zip((1, 3, 5), names, strict=True):
        comment = f"{own} own tokens behind 33 common ones, all three in flight: what one writes is its own."
        ids = (*start, *random(own, name))
        yield vector(name, "shared-block prefix-branch", ids, comment, together(name, names))

    # Long, short, long, one at a time, so that they follow each other in one slot.
    comment = "It leaves a full state behind for the next one in its slot."
    yield vector("slot-long", "stale-slot", text(90, "slot-long"), comment, ALONE)
    comment = "One token where ninety were: all but it of the convolution's window would be the old tenant's."
    yield vector("slot-short", "stale-slot", random(1, "slot-short"), comment, after("slot-long"))
    comment = "Longer again, in the slot that the short one has left: its pages hold less than is read now."
    yield vector("slot-again", "stale-slot", random(40, "slot-again"), comment, after("slot-short"))

    # Five prompts of different lengths in one batch, which they leave at different times.
    lengths = (17, 1, 40, 3, 2)
    names = [f"beside-{length}" for length in lengths]
    for length, name in zip(lengths, names, strict=True):
        others = ", ".join(str(other) for other in lengths if other != length)
        comment = f"{length} tokens beside {others}, which end earlier or later: alone it is the same."
        ids = (text if length > 3 else random)(length, name)
        fields = {"new": NEW - 3 * (length % 3)}
        yield vector(name, "ragged-batch padding slot-index", ids, comment, together(name, names), **fields)


def of_contents(prompts: Prompts) -> Iterator[Chosen]:
    """Tokens that repeat; questions of the trained fixture's corpus in the chat layout, which any model can take as
    text; long prompts."""
    first, second = prompts.random(2, "repeated")
    comment = "One token forty times: every block has the same tokens, and every row but the first the same window."
    yield vector("repeat-one", "repeated-token prefix-branch", (first,) * 40, comment)
    comment = "Two tokens in turn: exchanged taps, and windows that are one off, see the other token."
    yield vector("repeat-two", "repeated-token convolution-order", (first, second) * 20, comment)
    if tokenizer := prompts.tokenizer:
        for name, (flag, question, new, comment) in TASKS.items():
            messages = [{"role": "user", "content": question}]
            ids, text = tokenizer.encode_chat(messages), tokenizer.render_chat(messages)
            shown = text if tokenizer.encode(text) == ids else None
            yield vector(name, f"{flag} beginning-token", ids, comment, prompt_text=shown, new=new)
    long = prompts.text(300, "long")
    comment = "Three hundred tokens: several steps of a small budget, many blocks, positions far from the first."
    yield vector("long-300", "long-prompt attention-distance", long, comment, ALONE)
    comment = "The same in chunks of 64, beside which the state is carried four times."
    yield vector("long-300-chunks", "long-prompt chunk-state", long, comment, {"kind": "chunks", "size": 64})
