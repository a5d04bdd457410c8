"""The records of the oracle and the suite: a request, its timing in a trace, and the answer. Plain, frozen data.

Log-probabilities are natural logarithms from the raw logits, before temperature, penalties and filters. What an engine
does not report keeps its default: it is never guessed, and never counts as right. JSON: see records_json.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError

Ids = tuple[int, ...]
Routes = Sequence[Sequence[Sequence[int]]]  # [positions][layers][experts] ids, in any order; -1: not reported

# What can go wrong with a request besides its tokens, the worst first.
DEAD, HANG, FAILED, BROKEN, REFUSED, IMPOSSIBLE = "dead", "hang", "5xx", "broken", "refused", "impossible"
NO_ANSWER = "no answer"  # none came, or nothing that can be read as one
NO_ABORT = "the engine can't abort a request"
UNTOLD = "untold"  # a stop reason that an engine does not report: None is one
MOST_OF_A_MESSAGE = 1000  # characters of an engine's own words
MOST_IDS = 32  # that are shown of a prompt
MANY_NUMBERS = re.compile(r"(?<![-\d.])((?:[-\d.]+,\s*){8})(?:[-\d.]+,\s*){8,}[-\d.]+")
MOST_REQUESTS, MOST_PAUSE = 1000, 60_000
MOMENT = 10  # milliseconds
PROCESSORS = (  # parameters that change which tokens may come, besides the temperature
    *("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("min_tokens", "allowed_token_ids", "banned_token_ids"),
)
NEUTRAL = SamplingParams()


@dataclass(frozen=True)
class Request:
    """What to generate, and when it is sent relative to the other requests of its trace.

    params        sampling parameters with vLLM's names; max_tokens is always a number
    priority, cache_salt  as in vLLM: the lower is the earlier; prefixes are shared within one salt only
    prompt_text   a text that the tokenizer turns into exactly these ids, if there is one
    message       the only message of a chat whose layout these ids are: for servers that lay out chats themselves
    after         an earlier request of the trace, by its index; None: it is sent at once
    after_tokens  send this one when so many tokens of that one have come; None: when it has ended
    pause         milliseconds to wait then
    abort_after   cancel it when so many tokens have come (0: before the first); None: stay to the end
    cold          no cached prefix may be used, where the engine supports that
    streamed      the answer comes in server-sent events; requests that are aborted or waited for are streamed anyway
    sample        which of its n answers a pair of this request and one answer is about
    tags          what the sender notes about it, such as the case that it belongs to; no engine reads them
    """

    request_id: str
    prompt_token_ids: Ids
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    prompt_text: str | None = None
    message: str | None = None
    after: int | None = None
    after_tokens: int | None = None
    pause: int = 0
    abort_after: int | None = None
    cold: bool = False
    streamed: bool = False
    sample: int = 0
    tags: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def case(self) -> str:
        """The case of a check that it belongs to: see oracle/workloads.py."""
        return str(self.tags.get("case", ""))

    @property
    def max_tokens(self) -> int:
        return self.params.max_tokens or 1

    @property
    def stop(self) -> str | None:
        """Its first stop string: no trace has more than one."""
        return self.params.stop[0] if self.params.stop else None

    @property
    def is_sampled(self) -> bool:
        """Whether its tokens are drawn."""
        return self.params.temperature > 0.0

    @property
    def processors(self) -> tuple[str, ...]:
        """Those of PROCESSORS that it has."""
        return tuple(name for name in PROCESSORS if getattr(self.params, name) != getattr(NEUTRAL, name))

    @property
    def is_greedy(self) -> bool:
        """Whether each of its tokens must be the likeliest of the raw logits."""
        return not self.is_sampled and not self.processors

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt are requested."""
        return self.params.prompt_logprobs is not None

    @property
    def num_tokens(self) -> int:
        """Of prompt and answers, at most."""
        return len(self.prompt_token_ids) + self.max_tokens * self.params.n


@dataclass(frozen=True)
class Answer:
    """One sample of a request. What the engine does not report is None.

    Times count from the beginning of the trace, in units of `Played.clock`; None: it did not happen.
    """

    token_ids: Ids | None = None  # new tokens only, a stop token included
    logprobs: tuple[float, ...] | None = None  # of token_ids
    top_logprobs: tuple[Mapping[int, float], ...] | None = None  # by token id, at each new position
    prompt_logprobs: tuple[float, ...] | None = None  # of each prompt token but the first
    text: str | None = None  # without a stop token, and as far as a stop string says
    finish_reason: str | None = None  # stop, length, abort, error; None while it runs
    stop_reason: int | str | None = UNTOLD  # the stop token or stop string; None at EOS, and where nothing stopped it
    routes: Routes | None = None  # of the prompt's and the new tokens in turn; those of the last are not used
    logits: tuple[bytes, ...] | None = None  # the bits of each row that a token was chosen from
    cached_tokens: int | None = None  # of its prompt, taken from the cache
    round_cached_tokens: int | None = None  # of all prompts of its trace, by the server's counter; at one answer of it
    error: str | None = None  # why it can't be judged
    kind: str = ""  # of the error, as above
    sent: float | None = None
    first: float | None = None  # when its first token came, if it was streamed
    ended: float | None = None
    is_aborted: bool = False  # cancelled, as its request says

    @property
    def is_refuted(self) -> bool:
        """No right engine answers so: too many tokens, ids outside the vocabulary."""
        return self.kind == IMPOSSIBLE

    @property
    def ids(self) -> Ids:
        """token_ids; none where they are not reported."""
        return self.token_ids or ()

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


Pair = tuple[Request, Answer]


@dataclass(frozen=True)
class Trace:
    """Requests, each of which waits for earlier ones only. RequestError otherwise."""

    requests: tuple[Request, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.requests) <= MOST_REQUESTS:
            raise RequestError(f"requests: {len(self.requests)}, expected 1 to {MOST_REQUESTS}")
        for index, request in enumerate(self.requests):
            require_request(request, f"requests[{index}]", index)

    @property
    def num_tokens(self) -> int:
        """Of all prompts and answers, at most."""
        return sum(request.num_tokens for request in self.requests)

    def is_streamed(self, index: int) -> bool:
        request = self.requests[index]
        is_awaited = any(other.after == index and other.after_tokens is not None for other in self.requests)
        return request.streamed or request.abort_after is not None or is_awaited


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)


def greedy(request_id: str, prompt_token_ids: Sequence[int], max_tokens: int, **fields: Any) -> Request:
    """A request for exactly `max_tokens` of the likeliest tokens (an end-of-sequence token is no end), with their
    log-probabilities. `fields`: of Request or of SamplingParams; `case` is a tag."""
    if "case" in fields:
        fields["tags"] = {"case": fields.pop("case"), **fields.get("tags", {})}
    plain = Request(request_id, tuple(prompt_token_ids), GREEDY)
    return changed(plain, max_tokens=max_tokens, **fields)


def changed(request: Request, **fields: Any) -> Request:
    """With other fields of Request or of its SamplingParams; tags are added."""
    params = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__dataclass_fields__}
    if "tags" in fields:
        fields["tags"] = {**request.tags, **fields["tags"]}
    return replace(request, params=replace(request.params, **params) if params else request.params, **fields)


def samples_of(request: Request) -> list[Request]:
    """The request once for each of its answers."""
    if request.params.n == 1:
        return [request]
    return [
        replace(request, request_id=f"{request.request_id}#{index}", sample=index) for index in range(request.params.n)
    ]


def whole_request(sample: Request) -> Request:
    """The request that `samples_of` made this of."""
    if sample.params.n == 1:
        return sample
    return replace(sample, request_id=sample.request_id.rpartition("#")[0], sample=0)


def failed(why: str, kind: str = FAILED) -> Answer:
    """An answer that can't be judged, and why, as one short line."""
    return Answer(error=shortened(why) or "an error without a message", kind=kind)


def refuted(answer: Answer, why: str) -> Answer:
    """In its place: that no right engine gives it. What it took from the cache stays, which may be the reason."""
    hit, of_round = answer.cached_tokens, answer.round_cached_tokens
    return replace(failed(why, IMPOSSIBLE), cached_tokens=hit, round_cached_tokens=of_round)


def is_due(request: Request, num_tokens: Sequence[int], has_ended: Sequence[bool]) -> bool:
    """Whether a request is to be sent, by how many tokens of each request have come, and whether it has ended."""
    if request.after is None or has_ended[request.after]:
        return True
    return request.after_tokens is not None and num_tokens[request.after] >= request.after_tokens


def require_request(request: Request, where: str, num_before: int | None) -> None:
    """RequestError for a prompt or a timing that can't be. `num_before`: requests that it may wait for; None: any."""
    ids = request.prompt_token_ids
    if not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise RequestError(f"{where}.prompt_token_ids: expected token ids, at least one")
    checks: tuple[tuple[str, Any, int, int | None], ...] = (
        ("max_tokens", request.params.max_tokens, 1, None),
        ("pause", request.pause, 0, MOST_PAUSE),
        ("sample", request.sample, 0, request.params.n - 1),
        ("after", request.after, 0, None if num_before is None else num_before - 1),
        ("after_tokens", request.after_tokens, 1, None),
        ("abort_after", request.abort_after, 0, None),
    )
    for name, value, least, most in checks:
        is_whole = type(value) is int and value >= least and (most is None or value <= most)
        if not is_whole and (value is not None or name in ("max_tokens", "pause", "sample")):
            if most is not None and most < least:
                raise RequestError(f"{where}.{name} {value!r}: expected none, as no request is before it")
            limit = f"at least {least}" if most is None else f"{least} to {most}"
            raise RequestError(f"{where}.{name} {value!r}: expected a whole number, {limit}")
    if request.after is None and request.after_tokens is not None:
        raise RequestError(f"{where}.after_tokens {request.after_tokens}: expected `after`, whose tokens they are")
    if type(request.priority) is not int:
        raise RequestError(f"{where}.priority {request.priority!r}: expected a whole number")
    if not all(type(value) is bool for value in (request.cold, request.streamed)):
        raise RequestError(f"{where}: expected true or false for cold and streamed")
    if type(request.cache_salt) is not str:
        raise RequestError(f"{where}.cache_salt {request.cache_salt!r}: expected text")


def shortened(text: str, most: int = MOST_OF_A_MESSAGE) -> str:
    """A text from outside as one line that is safe for a terminal; of many ids or numbers in it, the first few."""
    text = MANY_NUMBERS.sub(lambda match: f"{match[1]}... {match[0].count(',') + 1} numbers", text)
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * most]).split())
    return line if len(line) <= most else line[: most - 3] + "..."


def shown_ids(ids: Sequence[int]) -> str:
    """The first MOST_IDS, and how many there are."""
    return ",".join(map(str, ids[:MOST_IDS])) + (f", ... {len(ids)} tokens" if len(ids) > MOST_IDS else "")


def fault(problem: BaseException) -> str:
    """An exception as one short line."""
    return shortened(f"{type(problem).__name__}: {problem}")
