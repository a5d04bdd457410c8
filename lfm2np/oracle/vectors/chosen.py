"""Which prompts are golden vectors, why each of them is, and the classes of bug that they expose.

Everything is derived by SHA-256 from one seed, so the same model and seed give the same prompts on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.oracle.workloads import exact_text
from lfm2np.truth.config import ModelConfig

NEW = 8  # new tokens of a vector, unless it says otherwise
BLOCK = 16  # tokens of a block in most engines
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
        *("attention-distance", "recall: b = 3, k = 7, m = 1, t = 9, z = 4, d = 0, g = 8; b", 2),
        "One value is to be found far back by its letter: without attention over that distance the digit is another.",
    ),
    "task-story": (
        *(
            "attention-distance",
            "story: They meet at the park. Mia has a red kite. Tom has a blue drum. Who has the drum?",
        ),
        *(7, "A question about one sentence of several: attention binds the thing to its owner."),
    ),
    "task-copy": (
        *("convolution-order", "copy: kiba mozu tedo gipa", 13),
        "Which token comes after which is all that counts: the convolution binds each to the one before it.",
    ),
    "task-sort": (
        *("convolution-order", "sort: 7 2 9 4 1 8", 7),
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
    """One vector before anything is computed.

    keep  tensors to store: "" none, "logits" the rows of the new tokens, "blocks" also each block's output for the
    prompt,
          "all" every tensor that recorders/lfm2np_recorder.py names
    """

    id: str
    flags: tuple[str, ...]
    comment: str
    prompt_token_ids: tuple[int, ...]
    prompt_text: str | None = None
    new: int = NEW
    schedule: tuple[dict[str, Any], ...] = ()
    keep: str = ""


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


def choose(config: ModelConfig, tokenizer: Tokenizer | None, seed: int = 0) -> list[Chosen]:
    """All vectors that fit into the model's context."""
    prompts = Prompts(config, tokenizer, seed)
    makers = (short, borders, decoding, chunks, prefixes, branches, slots, neighbours, repeated, tasks, long_ones)
    vectors = [vector for maker in makers for vector in maker(prompts)]
    room = config.max_position_embeddings
    kept = {vector.id: vector for vector in vectors if len(vector.prompt_token_ids) + vector.new <= room}
    while lost := [name for name, vector in kept.items() if not mentioned(vector) <= kept.keys()]:
        kept = {name: vector for name, vector in kept.items() if name not in lost}
    for name, vector in kept.items():
        if tokenizer is not None and vector.prompt_text is None:
            kept[name] = replace(vector, prompt_text=exact_text(tokenizer, vector.prompt_token_ids))
    return list(kept.values())


def mentioned(vector: Chosen) -> set[str]:
    """The vectors that its schedule names."""
    return {name for hint in vector.schedule for name in (hint.get("id"), *hint.get("with", ())) if name is not None}


def alone() -> dict[str, Any]:
    return {"kind": "alone"}


def after(name: str) -> dict[str, Any]:
    return {"kind": "after", "id": name}


def short(prompts: Prompts) -> Iterator[Chosen]:
    """1 to L+1 tokens, of a text and at random."""
    taps = prompts.config.conv_L_cache
    lengths = sorted({1, 2, 3, max(1, taps - 1), taps, taps + 1})
    for length in lengths:
        where = f"{length} of the {taps} tokens that the convolution sees" if length < taps else f"{length} tokens"
        for kind in ("text", "ids"):
            ids = (prompts.text if kind == "text" else prompts.random)(length, f"short-{length}")
            flags = ["start-of-sequence"] if length <= taps else ["wrong-row", "start-of-sequence"]
            flags += ["one-token"] if length == 1 else []
            flags += ["beginning-token"] if ids[0] == prompts.config.bos_token_id else []
            comment = (
                f"{where}, {'as a text begins' if kind == 'text' else 'drawn at random'}: what is before them is 0."
            )
            keep = "all" if kind == "text" and length in (2, taps + 1) else "logits"
            yield Chosen(f"short-{length}-{kind}", tuple(flags), comment, ids, schedule=(alone(),), keep=keep)


def borders(prompts: Prompts) -> Iterator[Chosen]:
    """Around one, two and four blocks."""
    for blocks in (1, 2, 4):
        for off, where in ((-1, "one less than"), (0, "exactly"), (1, "one more than")):
            length = blocks * BLOCK + off
            comment = (
                f"{length} tokens, {where} {blocks * BLOCK}: a border of blocks of {BLOCK}, and the new ones go on."
            )
            draw = prompts.text if off else prompts.random
            flags = ("block-border",)
            keep = "logits" if blocks == 1 else ""
            yield Chosen(f"border-{length}", flags, comment, draw(length, f"border-{length}"), keep=keep)


def decoding(prompts: Prompts) -> Iterator[Chosen]:
    comment = "Many new tokens after few: an error of the state that each step leaves adds up."
    ids = prompts.text(6, "decoding")
    yield Chosen("decode-32", ("decode-state", "block-border"), comment, ids, new=32, schedule=(alone(),))


def chunks(prompts: Prompts) -> Iterator[Chosen]:
    """One prompt with several chunk sizes: the answers have to be the same."""
    ids = prompts.text(23, "chunks")
    whole = "The prompt in one step: what the same prompt in chunks has to equal."
    yield Chosen("chunks-none", ("chunk-state",), whole, ids, schedule=(alone(),), keep="blocks")
    for size, why in (
        (1, "no chunk fills the convolution's window, so each keeps a part of the older state"),
        (2, "chunks as short as a window of 3 is deep"),
        (5, "odd places, none of them at a block's border"),
    ):
        hint = {"kind": "chunks", "size": size}
        yield Chosen(f"chunks-of-{size}", ("chunk-state",), f"Chunks of {size}: {why}.", ids, schedule=(hint,))


def prefixes(prompts: Prompts) -> Iterator[Chosen]:
    """Cold, then warm: the same blocks, from the cache."""
    ids = prompts.text(3 * BLOCK, "prefix")
    comment = "Three whole blocks, computed with nothing in the cache."
    yield Chosen("prefix-cold", ("prefix-state",), comment, ids, schedule=({"kind": "cold"},), keep="logits")
    comment = "The same prompt again: all of its blocks are cached, and the last token is still to be computed."
    flags = ("whole-prompt-cached", "prefix-state")
    yield Chosen("prefix-same", flags, comment, ids, schedule=(after("prefix-cold"),), keep="logits")
    longer = (*ids, *prompts.random(9, "prefix-longer"))
    comment = "It goes on from the cached prompt: keys and values are there, and the state at that place has to be too."
    yield Chosen("prefix-longer", ("prefix-state",), comment, longer, schedule=(after("prefix-cold"),))
    branch = (*ids[:25], *prompts.random(14, "prefix-branch"))
    comment = "It leaves the cached prompt at token 25, within a block: only the first block may be taken over."
    yield Chosen("prefix-branch", ("prefix-branch", "prefix-state"), comment, branch, schedule=(after("prefix-cold"),))
    inner = (*ids[BLOCK:], *ids[:3])
    comment = "It begins with the cached second and third block: the same tokens, but nothing is before them here."
    yield Chosen("prefix-inner", ("prefix-branch",), comment, inner, schedule=(after("prefix-cold"),))


def branches(prompts: Prompts) -> Iterator[Chosen]:
    """One beginning with several ends, at the same time."""
    start = prompts.text(2 * BLOCK + 1, "branches")
    names = [f"branch-{index}" for index in range(3)]
    for index, name in enumerate(names):
        together = {"kind": "together", "with": [other for other in names if other != name]}
        comment = f"{1 + 2 * index} own tokens behind 33 common ones, all three in flight: what one writes is its own."
        ids = (*start, *prompts.random(1 + 2 * index, name))
        yield Chosen(name, ("shared-block", "prefix-branch"), comment, ids, schedule=(together,))


def slots(prompts: Prompts) -> Iterator[Chosen]:
    """Long, short, long, one at a time, so that they follow each other in one slot."""
    comment = "It leaves a full state behind for the next one in its slot."
    yield Chosen("slot-long", ("stale-slot",), comment, prompts.text(90, "slot-long"), schedule=(alone(),))
    comment = "One token where ninety were: all but it of the convolution's window would be the old tenant's."
    ids = prompts.random(1, "slot-short")
    yield Chosen("slot-short", ("stale-slot",), comment, ids, schedule=(after("slot-long"),), keep="logits")
    comment = "Longer again, in the slot that the short one has left: its pages hold less than is read now."
    ids = prompts.random(40, "slot-again")
    yield Chosen("slot-again", ("stale-slot",), comment, ids, schedule=(after("slot-short"),))


def neighbours(prompts: Prompts) -> Iterator[Chosen]:
    """Five prompts of different lengths in one batch, which they leave at different times."""
    lengths = (17, 1, 40, 3, 2)
    names = [f"beside-{length}" for length in lengths]
    for length, name in zip(lengths, names, strict=True):
        together = {"kind": "together", "with": [other for other in names if other != name]}
        flags = ("ragged-batch", "padding", "slot-index")
        others = ", ".join(str(other) for other in lengths if other != length)
        comment = f"{length} tokens beside {others}, which end earlier or later: alone it is the same."
        draw = prompts.text if length > 3 else prompts.random
        new, keep = NEW - 3 * (length % 3), "logits" if length < 4 else ""
        yield Chosen(name, flags, comment, draw(length, name), new=new, schedule=(together,), keep=keep)


def repeated(prompts: Prompts) -> Iterator[Chosen]:
    first_token, other = prompts.random(2, "repeated")
    comment = "One token forty times: every block has the same tokens, and every row but the first the same window."
    yield Chosen("repeat-one", ("repeated-token", "prefix-branch"), comment, (first_token,) * 40)
    comment = "Two tokens in turn: exchanged taps, and windows that are one off, see the other token."
    yield Chosen("repeat-two", ("repeated-token", "convolution-order"), comment, (first_token, other) * 20)


def tasks(prompts: Prompts) -> Iterator[Chosen]:
    """Questions of the trained fixture's corpus in the chat layout; any model can take them as text."""
    if prompts.tokenizer is None:
        return
    for name, (flag, question, new, comment) in TASKS.items():
        messages = [{"role": "user", "content": question}]
        ids, text = prompts.tokenizer.encode_chat(messages), prompts.tokenizer.render_chat(messages)
        shown = text if prompts.tokenizer.encode(text) == ids else None
        yield Chosen(name, (flag, "beginning-token"), comment, tuple(ids), shown, new)


def long_ones(prompts: Prompts) -> Iterator[Chosen]:
    comment = "Three hundred tokens: several steps of a small budget, many blocks, positions far from the first."
    ids = prompts.text(300, "long")
    yield Chosen("long-300", ("long-prompt", "attention-distance"), comment, ids, schedule=(alone(),))
    comment = "The same in chunks of 64, beside which the state is carried four times."
    hint = {"kind": "chunks", "size": 64}
    yield Chosen("long-300-chunks", ("long-prompt", "chunk-state"), comment, ids, schedule=(hint,))


# --- the classes of bug, with the public issues in which engines had them


def note(bug_class: str, description: str, *references: str) -> dict[str, Any]:
    return {"bug_class": bug_class, "description": description, "references": list(references)}


NOTES: dict[str, dict[str, Any]] = {
    "start-of-sequence": note(
        "convolution state",
        "Before the first token the convolution sees zeros. Prompts of fewer tokens than the window read what is not "
        "there: a state that was never cleared, or columns before the array.",
        *("SGLang 24717", "vLLM 32118"),
    ),
    "one-token": note(
        "model",
        "One row hides strides, masks and ragged indices that are wrong for two. Compare the prompts of 1, 2 and 3 "
        "tokens: an engine that is right for the first only takes a strided input for a contiguous one.",
        *("mistral.rs 2306", "llama.cpp 14670"),
    ),
    "beginning-token": note(
        "text",
        "The prompt is taken as it is: an engine that puts a second beginning-of-sequence token before it is another "
        "context off.",
        *("vLLM 16081", "vLLM 55288", "SGLang 888"),
    ),
    "block-border": note(
        "paged cache",
        "One token less than a block, a full block, one more: a page too many or too few, the half-filled page "
        "published, the wrong block size passed to the kernel.",
        *("pegainfer 291", "SGLang 38319", "vLLM 27547"),
    ),
    "decode-state": note(
        "convolution state",
        "The state goes on from the prompt into the new tokens: dropped, or its offset never advanced, it shows at the "
        "second new token and stays.",
        *("vmlx-swift 211", "nntrainer 3998"),
    ),
    "chunk-state": note(
        "convolution state",
        "A chunk of a prompt reads the state that the chunk before it left; a chunk shorter than the window keeps part "
        "of the older one.",
        *("transformers 45513", "transformers 46084", "transformers 46741", "vLLM 56196"),
    ),
    "prefix-state": note(
        "prefix cache",
        "A hit on cached keys and values without the convolution state that belongs to that place, or with one of "
        "another step.",
        *("vLLM 43090", "vLLM 47861", "vLLM 53912", "LMCache 4247", "vLLM 53505", "SGLang 34760"),
    ),
    "whole-prompt-cached": note(
        "prefix cache",
        "All blocks of the prompt are cached, and still the last token has to be computed, once.",
        *("vLLM 3239", "vLLM 11186"),
    ),
    "prefix-branch": note(
        "prefix cache",
        "Prompts part within a block: nothing behind the last whole common block may be taken over, and a block's hash "
        "has to cover all before it.",
        *("vLLM 12621", "ferrox 37", "vllm-mlx 380"),
    ),
    "shared-block": note(
        "paged cache",
        "Requests that share blocks write behind them: a shared page written without a copy shows in the others.",
        *("vLLM 417", "xLLM 1984", "mini-sglang 142"),
    ),
    "stale-slot": note(
        "convolution state",
        "A new request in a slot that another has left reads that one's state unless it is cleared.",
        *("SGLang 24717", "vLLM 32118", "vLLM 43090", "vLLM 56524", "vllm-ascend 10558"),
    ),
    "slot-index": note(
        "convolution state",
        "The state's row is chosen by another number than the request's own: it works alone, and not beside others.",
        *("SGLang 23975", "mistral.rs 2306", "mlx-lm 1169", "mlx-lm 1736"),
    ),
    "ragged-batch": note(
        "convolution state",
        "Prompts stand one behind the other in one array, and the convolution runs across the border: the first rows "
        "of each but the first are wrong.",
        *("transformers 46588", "transformers 46633"),
    ),
    "padding": note(
        "convolution state",
        "Prompts of unlike length are padded: a mask hides the padding from attention, not from the convolution.",
        *("transformers 41790", "transformers 46773", "transformers 47086", "transformers 48256", "mlx-vlm 1946"),
    ),
    "attention-distance": note(
        "model",
        "The answer stands far back in the prompt, where only attention reaches: mask, rotary base, positions, pages.",
        *("mlx-lm 908", "vLLM 27547"),
    ),
    "convolution-order": note(
        "model",
        "The answer depends on which token follows which, what the convolution binds: taps in the wrong order, gates "
        "exchanged, a state that is one off.",
        *("vmlx-swift 211", "nntrainer 3998"),
    ),
    "repeated-token": note(
        "model",
        "The tokens are all alike, so positions and the start of the sequence alone tell rows apart.",
        *("mlx-lm 908", "vLLM 12621"),
    ),
    "long-prompt": note(
        "scheduling",
        "More tokens than one step may take, and than many a table was tested with.",
        *("vLLM 56196", "llama.cpp 23652"),
    ),
    "wrong-row": note(
        "sampling",
        "The logits of the prompt's last token are asked for: those of another row of the step are as plausible.",
        "transformers 40692",
    ),
}
