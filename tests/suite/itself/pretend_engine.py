"""An engine that only pretends: logits by a hash of the tokens before, noise by the circumstances, one bug at will."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from lfm2np.oracle.engines.records import Answer, Request, Trace
from lfm2np.oracle.engines.target import Abilities, Answers, Played, rounds_of

VOCAB = 16
LETTERS = "abcdefghijklmnop"  # the text of each token
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Circumstances:
    """Of one request while it is answered.

    beside   how many others run
    cached   tokens of its prompt that an earlier request had, and it may use
    after    tokens of the request that had its slot before
    shared   tokens of its prompt that the prompt before it had, too, which then went on otherwise
    number   requests answered before
    """

    sent: Request
    place: int
    beside: int
    aborted_beside: int
    cached: int
    after: int
    shared: int
    number: int
    waits_for_tokens: bool


Bug = Callable[[Circumstances, int], bool]  # of the output token `position`; as a prompt's token: position -1


@dataclass
class Pretend:
    """A player. noise: standard deviation of a logit between circumstances, nats; the bug moves logits by `size`."""

    noise: float = 0.0
    bug: Bug | None = None
    size: float = 1.0
    takes_seeds: bool = True
    prefixes: set[Ids] = field(default_factory=set)  # of all prompts so far
    last: Ids = ()  # the prompt before
    slots: dict[int, int] = field(default_factory=dict)
    number: int = 0
    salt: int = 0  # another engine of the same model: other noise
    tells_logprobs: bool = True
    second_at: int | None = None  # the output token where it takes the second best
    late_stop: int = 0  # characters of a stop string that stay in the text
    shares_noise: bool = False  # all samples of a request have the same random numbers

    def probe(self) -> Abilities:
        takes = dict.fromkeys(("takes_stops", "takes_sampling", "takes_seeds", "takes_samples"), True)
        can = {"tells_logprobs": True, "can_abort": True, "is_streaming": True}
        return Abilities("pretend", tells_prompt_logprobs=self.tells_logprobs, slots=4, **takes, **can)

    def close(self) -> None:
        """Nothing is held."""

    def play(self, trace: Trace) -> Played:
        answers: dict[int, Answers] = {}
        for indices in rounds_of(trace):
            aborted = sum(trace.requests[index].abort_after is not None for index in indices)
            for place, index in enumerate(indices):
                sent = trace.requests[index]
                cached = 0 if sent.cold else self.cached(sent.prompt_token_ids)
                circumstances = Circumstances(
                    sent, place, len(indices) - 1, aborted, cached, self.slots.get(place % 4, 0),
                    branch(sent.prompt_token_ids, self.last), self.number,
                    sent.after_tokens is not None,
                )  # fmt: skip
                answers[index] = self.answers(circumstances)
                self.number += 1
            for place, index in enumerate(indices):
                self.slots[place % 4] = len(trace.requests[index].prompt_token_ids)
                self.keep(trace.requests[index].prompt_token_ids)
        return Played(tuple(answers[index] for index in range(len(trace.requests))))

    def cached(self, prompt: Ids) -> int:
        """Tokens that it shares with the prompt so far that has most of them."""
        missing = (index for index in range(len(prompt)) if prompt[: index + 1] not in self.prefixes)
        return next(missing, len(prompt))

    def keep(self, prompt: Ids) -> None:
        self.last = prompt
        if prompt not in self.prefixes:
            self.prefixes.update(prompt[:end] for end in range(1, len(prompt) + 1))

    def answers(self, now: Circumstances) -> Answers:
        sent = now.sent
        if sent.abort_after is not None:
            return (Answer(is_aborted=True),)
        return tuple(self.answer(now, sample) for sample in range(sent.params.n))

    def answer(self, now: Circumstances, sample: int) -> Answer:
        sent, ids, logprobs, tops = now.sent, list[int](), list[float](), list[dict[int, float]]()
        text, reason = "", "length"
        noise = 0 if self.shares_noise else sample
        choice = random.Random(f"{sent.params.seed if self.takes_seeds else self.number} {noise}")
        for position in range(sent.max_tokens):
            values = self.values((*sent.prompt_token_ids, *ids), now, position)
            best, second = sorted(values, key=lambda each: -values[each])[:2]
            token = second if position == self.second_at else best
            if sent.params.temperature:
                token = choice.choices(list(values), [math.exp(value) for value in values.values()])[0]
            ids.append(token)
            logprobs.append(values[token])
            tops.append(dict(sorted(values.items(), key=lambda pair: -pair[1])[:5]) | {token: values[token]})
            text += LETTERS[token]
            if sent.stop is not None and sent.stop in text:
                text, reason = text[: text.index(sent.stop) + self.late_stop], "stop"
                break
        prompt = None
        if sent.is_scored and self.tells_logprobs:
            prompt = tuple(
                self.values(sent.prompt_token_ids[:end], now, -1)[sent.prompt_token_ids[end]]
                for end in range(1, len(sent.prompt_token_ids))
            )
        reported = (tuple(logprobs), tuple(tops)) if self.tells_logprobs else (None, None)
        return Answer(tuple(ids), *reported, prompt, text, reason)

    def values(self, ids: Sequence[int], now: Circumstances, position: int) -> dict[int, float]:
        """Log-probabilities of all tokens behind some."""
        shape = (now.beside > 0, now.place, now.cached, len(now.sent.prompt_token_ids), position < 0, self.salt)
        logits = [2.0 * value for value in normals(tuple(ids))]
        if self.noise:
            logits = [
                logit + self.noise * value for logit, value in zip(logits, normals((tuple(ids), shape)), strict=True)
            ]
        if self.bug is not None and self.bug(now, position):
            logits = [logit + self.size * value for logit, value in zip(logits, normals((ids, "wrong")), strict=True)]
        top = max(logits)
        total = top + math.log(math.fsum(math.exp(logit - top) for logit in logits))
        return {token: logit - total for token, logit in enumerate(logits)}


@functools.cache
def normals(seed: Hashable) -> tuple[float, ...]:
    """For each token a normal number: most tests of a process ask for the same ones."""
    choice = random.Random(repr(seed))
    return tuple(choice.gauss(0.0, 1.0) for _ in range(VOCAB))


def branch(prompt: Ids, before: Ids) -> int:
    """Tokens that both have, if each then goes on otherwise."""
    shared = common(prompt, before)
    return shared if shared < min(len(prompt), len(before)) else 0


def common(first: Ids, second: Ids) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
