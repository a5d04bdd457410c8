"""The tokens of an answer, by the candidate's tokenizer; or why they can't be known.

Ids that a server reports are taken as they are; else the tokens' texts, if each names one id; else the whole text,
tokenised. A model may sample other tokens than the tokenizer would give the same text: where the server counts its
tokens, such answers show and are left out. A text that breaks off may end within a token, so its last is left out,
whatever it is. The end of an answer is a token too: without it, answers that happen to be long would count for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.dialects.vllm import id_of_key
from lfm2np.oracle.vet.provider_answers import Reply

STOP, LENGTH = "stop", "length"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Tokens:
    """Ids [R] and what was reported of them, None where nothing was.

    are_certain  whether the server named them; else they are those of the text, tokenised again
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    are_certain: bool = True

    def __len__(self) -> int:
        return len(self.token_ids)


class LeftOut(Exception):
    """An answer that says nothing, and why, in words that are counted."""


def tokens_of(reply: Reply, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> Tokens:
    """LeftOut with the reason if they are not certain."""
    if reply.error is not None:
        raise LeftOut(reply.error)
    if reply.token_ids is not None:
        return with_end(reply, reply.token_ids, reply.logprobs, tokenizer, eos_token_ids)
    if reply.tokens is not None:
        ids = [id_of_text(tokenizer, text) for text in reply.tokens]
        if None not in ids:
            known = tuple(token_id for token_id in ids if token_id is not None)
            return with_end(reply, known, reply.logprobs, tokenizer, eos_token_ids)
    tokens = with_end(reply, ids_of_text(reply, tokenizer), None, tokenizer, eos_token_ids)
    return replace(tokens, are_certain=False)


def ids_of_text(reply: Reply, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not reply.text:
        if reply.finish_reason == STOP and reply.text == "":
            return ()
        raise LeftOut("empty answers")
    if REPLACEMENT in reply.text:
        raise LeftOut("texts with a broken character")
    try:
        ids = tokenizer.encode_more(reply.text)
    except RequestError as problem:
        raise LeftOut(f"texts that can't be tokenised: {problem}") from None
    if tokenizer.decode(ids) != reply.text:
        raise LeftOut("texts that the tokenizer does not give back")
    if reply.completion_tokens is not None:
        ends = reply.finish_reason == STOP
        if reply.completion_tokens not in ({len(ids), len(ids) + 1} if ends else {len(ids)}):
            raise LeftOut("texts of another number of tokens than the server counts")
    if reply.finish_reason != STOP:
        ids = ids[:-1]
    return tuple(ids)


def with_end(
    reply: Reply,
    ids: Sequence[int],
    logprobs: Sequence[float | None] | None,
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
) -> Tokens:
    """With the token that ends the answer, if it ended by itself and only one can do that."""
    for token_id in ids:
        if token_id >= tokenizer.vocab_size:
            raise LeftOut("answers with ids outside the vocabulary")
    reported = tuple(logprobs) if logprobs is not None and len(logprobs) == len(ids) else (None,) * len(ids)
    ends = reply.finish_reason == STOP and not (ids and ids[-1] in eos_token_ids)
    if ends and len(eos_token_ids) == 1:
        ids, reported = (*ids, eos_token_ids[0]), (*reported, None)
    if not ids:
        raise LeftOut("empty answers")
    return Tokens(tuple(ids), reported)


def id_of_text(tokenizer: Tokenizer, text: str) -> int | None:
    """The only id of a token's text; None where none or several have it."""
    token_id = id_of_key(text)
    return ids_by_text(tokenizer).get(text) if token_id is None and REPLACEMENT not in text else token_id


@lru_cache(maxsize=4)
def ids_by_text(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Every token by its text, None where several have it; special tokens by their names."""
    ids: dict[str, int | None] = {}
    for token_id in range(tokenizer.vocab_size):
        entry = tokenizer.token(token_id)
        if entry is None:
            continue
        spelled = tokenizer.token_bytes(token_id)
        text = spelled.decode("utf-8", "replace") if spelled else entry
        ids[text] = None if text in ids else token_id
    return ids
