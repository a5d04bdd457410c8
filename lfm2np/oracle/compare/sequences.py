"""What is scored: prompts with their completions, or windows of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.checkpoint.text.tokenizer import Tokenizer, require_ids
from lfm2np.errors import RequestError

MOST_WINDOW = 2048  # tokens, unless another is asked for
REQUESTS, TEXT = "requests", "windows of the text"


@dataclass(frozen=True)
class Scored:
    """Rows start to stop - 1 of a sequence are compared; row t predicts token t + 1."""

    source: str  # REQUESTS or TEXT
    name: str
    token_ids: tuple[int, ...]
    start: int
    stop: int

    def item(self, quantised: Sequence[str]) -> dict[str, Any]:
        """As work: see positions.py. `quantised`: SHA-256 of the checkpoints."""
        ids = list(self.token_ids)
        return {"token_ids": ids, "start": self.start, "stop": self.stop, "quantised": list(quantised)}


def of_request(name: str, prompt: Sequence[int], completion: Sequence[int], longest: int) -> Scored:
    """With a completion the rows that predict it, without one all rows: the last predicts the answer's first token."""
    ids = (*prompt, *completion)
    fed = len(ids) - bool(completion)
    if fed > longest:
        raise RequestError(f"{len(ids)} tokens: expected at most max_position_embeddings={longest}")
    return Scored(REQUESTS, name, ids, len(prompt) - 1 if completion else 0, fed)


def of_text(
    tokenizer: Tokenizer, vocab_size: int, text: str, source: str, window: int | None, longest: int
) -> list[Scored]:
    """Consecutive windows of a text, each after the BOS; all tokens but a window's first are scored.

    RequestError for a window that the context does not hold, or a text without a token to score.
    """
    size = min(longest, MOST_WINDOW) if window is None else window
    if not 2 <= size <= longest:
        raise RequestError(f"--window {size}: expected 2 to max_position_embeddings={longest}")
    ids = require_ids(text_ids(tokenizer, text), vocab_size) if text else []
    before = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    step = size - len(before)
    pieces = [(*before, *ids[start : start + step]) for start in range(0, len(ids), step)]
    windows = [
        Scored(TEXT, f"window {number}", ids, 0, len(ids) - 1) for number, ids in enumerate(pieces) if len(ids) > 1
    ]
    if not windows:
        raise RequestError(f"{source}: {len(ids)} tokens, expected a text with at least one to score")
    return windows


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text of any length: if it is too long for the tokenizer, it is cut at ends of lines."""
    return [token for part in cut_at_lines(text, tokenizer.most_characters) for token in tokenizer.encode_more(part)]


def cut_at_lines(text: str, most: int) -> Iterator[str]:
    """Pieces of at most so many characters; one ends within a line only if the line alone is longer."""
    start = 0
    while start < len(text):
        stop = min(len(text), start + most)
        if stop < len(text):
            line = text.rfind("\n", start, stop)
            stop = stop if line < 0 else line + 1
        yield text[start:stop]
        start = stop
