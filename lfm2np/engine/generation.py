"""Greedy generation of one prompt, by the engine: what `Model.generate` and `Model.stream` are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.engine.engine import Engine
from lfm2np.engine.sampling.logprobs import TokenLogprobs
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import error_told
from lfm2np.values import Progress, require_count


@dataclass(frozen=True, eq=False)
class GeneratedToken:
    token_id: int
    logits: NDArray[Any]  # [V], the row that it was chosen from
    finish_reason: str | None  # "stop" or "length" with the last token
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Completion:
    """What a request came to. `token_ids` includes the end-of-sequence token, `text` does not."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str  # "stop": an end-of-sequence token; "length": max_tokens or the longest context
    logprobs: tuple[TokenLogprobs, ...] | None


def stream(
    model: LoadedModel,
    prompt_ids: Sequence[int],
    max_tokens: int,
    logprobs: int | None = None,
    progress: Progress | None = None,
) -> Iterator[GeneratedToken]:
    """Greedy tokens until an end-of-sequence token, `max_tokens` or the longest context. Checks before it starts.

    The cache has room for this request, and for nothing else.
    """
    max_tokens = require_count("max_tokens", max_tokens, 1, None)
    if logprobs is not None:
        logprobs = require_count("logprobs", logprobs, 0, model.config.vocab_size)
    positions = len(prompt_ids) + min(max_tokens, model.room_after(prompt_ids))
    rows: list[NDArray[Any]] = []
    engine = Engine(
        model,
        room_for=[positions],
        max_num_seqs=1,
        prefix_caching=False,
        on_logits=lambda name, position, row, token: rows.append(row),
        progress=progress,
    )
    engine.add_request("0", prompt_ids, SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=logprobs))
    return _tokens(engine, rows)


def _tokens(engine: Engine, rows: list[NDArray[Any]]) -> Iterator[GeneratedToken]:
    """One token a step of the engine's only request; `rows` gets the logits that it was chosen from."""
    for output in engine.stream():
        (sample,) = output.outputs
        if sample.error:
            raise error_told(sample.error)
        chosen = sample.logprobs[-1] if sample.logprobs else None
        yield GeneratedToken(sample.token_ids[-1], rows.pop(), sample.finish_reason, chosen)


def collect(
    prompt_ids: Sequence[int], tokens: Iterable[GeneratedToken], tokenizer: Tokenizer | None = None
) -> Completion:
    """The completion that a stream amounts to; without a tokenizer its text is None. Keeps no logits."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason = None
    for token in tokens:
        token_ids.append(token.token_id)
        logprobs += [token.logprobs] if token.logprobs else []
        finish_reason = token.finish_reason
    assert finish_reason is not None, "a stream ends with a finish reason"
    shown = token_ids[:-1] if finish_reason == "stop" else token_ids
    return Completion(
        prompt_token_ids=tuple(prompt_ids),
        token_ids=tuple(token_ids),
        text=tokenizer.decode(shown) if tokenizer else None,
        finish_reason=finish_reason,
        logprobs=tuple(logprobs) if logprobs else None,
    )
