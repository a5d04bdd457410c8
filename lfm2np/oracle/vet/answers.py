"""What an engine is sent, and which tokens came back.

A text without token ids is tokenised again. The model may have sampled other tokens of the same text, so they are
uncertain, and the last of a text that breaks off is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, product

import numpy as np

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.file_target import Transcript
from lfm2np.oracle.engines.records import Answer, Pair, Request, Trace, failed
from lfm2np.oracle.engines.target import Target
from lfm2np.oracle.engines.validate import validate
from lfm2np.oracle.sending import answered

BROKEN = "\N{REPLACEMENT CHARACTER}"  # for bytes that are no character: a part of a token
ROUND = 8  # requests between two looks at the evidence
QUESTIONS = (  # open ones: where a model is sure of its answer, 4 bits give the same tokens
    ("Tell a story about", "Write a poem about", "Invent names for", "Guess the secret of", "Go on: It was late for"),
    ("an old", "a red", "a quiet", "a clever", "a tired", "a golden", "a hungry", "a tall", "a lost", "a brave"),
    ("fox", "captain", "baker", "robot", "owl", "gardener", "miner", "cat", "teacher", "thief", "whale", "ghost"),
    ("by the lake", "in the forest", "on the island", "at the market", "in the desert", "near the mill"),
)


def questions_of(seed: int) -> list[str]:
    """All different, so that no cached answer counts twice."""
    every = list(map(" ".join, product(*QUESTIONS)))
    return [every[index] for index in np.random.default_rng([seed, 20]).permutation(len(every))]


def requests_of(
    model: LoadedModel, questions: Sequence[str], sampling: SamplingParams, max_tokens: int, as_text: bool = False
) -> Iterator[Request]:
    """Each question as the first message of a chat.

    as_text  as a text to go on with, for an engine that takes no ids: none has the template's tokens
    """
    params = replace(sampling, max_tokens=max_tokens, logprobs=0, ignore_eos=True)
    encode, encode_chat = model.tokenizer.encode, model.tokenizer.encode_chat
    for number, text in enumerate(questions):
        ids = encode(text) if as_text else encode_chat([{"role": "user", "content": text}])
        yield Request(f"vet-{number}", tuple(ids), params, message=text)


def rounds_of(target: Target, requests: Iterator[Request], transcript: Transcript | None) -> Iterator[list[Pair]]:
    """Requests and answers, a few at a time; what the transcript has is not sent again.

    TargetError if the engine is gone.
    """
    while some := list(islice(requests, ROUND)):
        known = [each for each in some if transcript and (old := transcript.known(each)) and old.error is None]
        new = tuple(each for each in some if each not in known)
        traces = [*(Trace((each,)) for each in known), *([Trace(new)] if new else [])]
        yield list(chain.from_iterable(answered(target, trace, transcript) for trace in traces))


def with_tokens(request: Request, answer: Answer, model: LoadedModel) -> Answer:
    """With all tokens that were sampled, as far as they can be known, or the `error` why they can't.

    The end of an answer is a token too: without it, answers that happen to be long would count for more. `text` is
    left where the tokens are those of it.
    """
    config, answer = model.config, validate(request, answer, model.config.vocab_size)
    ids, ends, has_ended = answer.token_ids, config.eos_token_ids, answer.finish_reason == "stop"
    if answer.error is not None:
        return answer
    if ids is None:
        try:
            ids = tuple(model.tokenizer.encode_more(answer.text or ""))
        except RequestError as problem:
            return failed(f"a text that can't be tokenised: {problem}")
        if BROKEN in (answer.text or "") or model.tokenizer.decode(ids) != (answer.text or ""):
            return failed("a text that the tokenizer does not give back")
        ids = ids if has_ended else ids[:-1]
    logprobs, text = answer.logprobs, None if answer.token_ids is not None else answer.text
    if has_ended and len(ends) == 1 and ids[-1:] != tuple(ends):
        ids, logprobs = (*ids, *ends), logprobs and (*logprobs, math.nan)
    if not ids:
        return failed("an empty answer")
    if max(request.prompt_token_ids) >= config.vocab_size or request.num_tokens > config.max_position_embeddings:
        return failed("a prompt that the checkpoint can't have had")
    return Answer(ids, logprobs, text=text)
