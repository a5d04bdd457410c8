"""The requests that are asked under every condition: prompts around the borders of the engine's blocks and chunks."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lfm2np.oracle.engines.records import Ids, Request, greedy

DEFAULT_VOCAB = 256  # ids that every vocabulary has, where its size is unknown
CONTROL = 8  # ids below it are control tokens of many vocabularies
LONG_CHUNKS = 3  # chunks of the longest prompt, if the context allows


@dataclass(frozen=True)
class Sizes:
    """Of the engine.

    block   tokens of a cache block
    chunk   most tokens of a step
    slots   requests that run at once
    longest most tokens of prompt and answer
    vocab   token ids below it are asked
    """

    block: int = 16
    chunk: int = 512
    slots: int = 8
    longest: int = 2048
    vocab: int = DEFAULT_VOCAB


def questions(sizes: Sizes, seed: int) -> list[Request]:
    """Greedy requests, cold: prompts of one token to several chunks, and answers that cross a block's border.

    Three share tokens, so that a prefix cache meets what it may confuse: a block of which only the second token
    differs, and blocks of an earlier prompt at the beginning of another.
    """
    block, chunk = sizes.block, sizes.chunk
    new = min(max(8, block + 4), 40, max(1, sizes.longest // 4))
    lengths = (3, block, 1, chunk + 1, 2 * block + 1, 2, block - 1, LONG_CHUNKS * chunk - 1)
    room = max(1, sizes.longest - new)
    prompts = [tokens(sizes, seed * 1000 + index, max(1, min(length, room))) for index, length in enumerate(lengths)]
    *_, cut, inner, _, _, longest = prompts
    if block + 1 < len(cut) <= len(longest):
        cut = (*longest[: block + 1], cut[block + 1], *longest[block + 2 : len(cut)])
    if 3 * block + 1 <= len(cut):
        inner = cut[block : 3 * block + 1]
    prompts[3:5] = cut, inner
    return [greedy("", prompt, new, cold=True) for prompt in prompts]


def tokens(sizes: Sizes, seed: int, length: int) -> Ids:
    choice = random.Random(seed)
    return tuple(choice.randrange(min(CONTROL, sizes.vocab - 1), sizes.vocab) for _ in range(length))


def filler(sizes: Sizes, seed: int, length: int, new: int = 1) -> Request:
    """A request that is not judged: tokens of its own, so that it shares no prefix."""
    length = max(1, min(length, sizes.longest - new))
    return greedy("", tokens(sizes, 1_000_003 + seed, length), new)
