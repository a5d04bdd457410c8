"""What belongs to a dialect: requests, responses, and what else a check or a fuzz run must know of such a server.

Below it what several dialects share: fields of requests, and reading JSON from outside, where what may be missing is
None, and what has another form raises RequestError that names it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import Request

TOP_LOGPROBS = 5
GREEDY = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
FILTERS = ("top_p", "top_k", "min_p")
KINDS: dict[type, str] = {dict: "an object", list: "a list"}
Reply = Mapping[str, Any]
Path = tuple[str | int, ...]  # names and indices that lead into a JSON value


@dataclass(frozen=True)
class Extras:
    """What to request beyond tokens: servers refuse what they don't know, or don't allow."""

    model: str | None = None
    top_logprobs: int = TOP_LOGPROBS
    prompt_logprobs: bool = True
    standard_only: bool = False  # no fields beyond OpenAI's

    def __str__(self) -> str:
        """For a message about a server that refused."""
        if self.standard_only:
            return "OpenAI's fields only"
        if not self.top_logprobs:
            return "without log-probabilities"
        return "with log-probabilities of the prompt" if self.prompt_logprobs else "with log-probabilities"


ALL_EXTRAS = (Extras(), Extras(prompt_logprobs=False), Extras(top_logprobs=0, prompt_logprobs=False))


class Field(NamedTuple):
    """Where a response holds a field of Answer or Response, as docs/engine/2-targets.md shows it."""

    says: str  # the field's name; "prompt": the ids that were sent, to be compared
    path: str
    form: str


@dataclass(frozen=True)
class Response:
    """A response as read, not yet checked: fields of an Answer, and how many tokens the server itself counted."""

    fields: dict[str, Any]
    prompt_tokens: Any = None
    new_tokens: Any = None


class Location(NamedTuple):
    """A value that a server reports: a path of its URL, and where the JSON object there holds it."""

    url: str
    path: Path


class Metrics(NamedTuple):
    """Names in /metrics, without labels.

    active    requests that run or wait
    memory    share of the cache that requests use; cached blocks that no request uses must not count
    counters  steer a fuzz run towards traces that raise them
    """

    active: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()


NO_METRICS = Metrics()


@dataclass(frozen=True)
class Dialect:
    """One kind of server.

    extras      what to request, the most first
    request     the body of a request: greedy, and without what a server does by default: some take penalties and
                filters from the checkpoint's generation_config.json
    read        fields of a response; RequestError for one of another form
    fields      where `read` finds them
    join        server-sent events to the response that the server would have given in one piece
    reproducer  source of `answer(replies)`, which gives the tokens of a response and their log-probabilities or None

    event_ids      the new tokens of one event; None where events don't hold them
    split_samples  a response to n > 1 as one for each sample; None: n can't be requested
    takes_stops, takes_seeds  without a setting of the server
    ignores_eos    requests go on behind an end-of-sequence token
    raw_logprobs   log-probabilities of sampled tokens are of the raw logits
    streams_all    each token comes with an event, and each event's with log-probabilities
    gguf_format    what it multiplies the weights of a GGUF in; None: unknown
    gguf_only      it runs no other file

    version, slots, longest  which version serves, requests computed together, tokens of a request at most
    cached         where a response has how many tokens of its prompt came from the cache
    """

    name: str
    path: str
    request: Callable[[Request, Extras], dict[str, Any]]
    read: Callable[[Reply, Request], Response]
    fields: tuple[Field, ...]
    join: Callable[[Sequence[Reply]], dict[str, Any]]
    reproducer: str

    takes_token_ids: bool = True
    extras: tuple[Extras, ...] = ALL_EXTRAS
    event_ids: Callable[[Reply], Any] = lambda event: None
    split_samples: Callable[[Reply], list[dict[str, Any]]] | None = None
    takes_stops: bool = False
    takes_seeds: bool = False
    ignores_eos: bool = False
    raw_logprobs: bool = False
    streams_all: bool = True
    gguf_format: str | None = None
    gguf_only: bool = False

    version: Location | None = None
    slots: Location | None = None
    longest: Location | None = None
    cached: Path | None = None
    metrics: Metrics = NO_METRICS

    def joined(self, events: Sequence[Reply]) -> dict[str, Any]:
        """RequestError for no events, or events that can't be joined."""
        if not events:
            raise RequestError("a stream without an event")
        return self.join(events)

    def num_tokens(self, events: Sequence[Reply]) -> int:
        """So far; an event that doesn't hold its tokens counts for one."""
        pieces = map(self.event_ids, events)
        return sum(len(piece) if isinstance(piece, list) else 1 for piece in pieces)


def value_at(value: Any, path: Path) -> Any:
    """None where the path leads nowhere."""
    for name in path:
        if isinstance(name, str) and isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(name, int) and isinstance(value, list) and name < len(value):
            value = value[name]
        else:
            return None
    return value


# --- what requests share


def sampling_fields(request: Request) -> dict[str, Any]:
    """Of a request that is not plainly greedy, in the names that OpenAI, SGLang and llama.cpp share."""
    params, neutral = request.params, SamplingParams()
    fields: dict[str, Any] = {}
    if request.is_sampled:
        filters = {name: getattr(params, name) for name in FILTERS if getattr(params, name) != getattr(neutral, name)}
        fields = {"temperature": params.temperature, **filters}
        fields |= {} if params.seed is None else {"seed": params.seed}
        fields |= {} if params.n == 1 else {"n": params.n}
    return fields if request.stop is None else {**fields, "stop": [request.stop]}


def model_field(extras: Extras) -> dict[str, Any]:
    return {} if extras.model is None else {"model": extras.model}


# --- reading responses


def needed(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise RequestError(f"{name}: {type(value).__name__}, expected {KINDS[kind]}")
    return value


def optional(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    return None if fields.get(name) is None else needed(fields, name, kind)


def by_token_id(pairs: Sequence[tuple[Any, Any]], where: str) -> dict[Any, Any]:
    """RequestError for an id that is no whole number, or stands there twice."""
    for token_id, _ in pairs:
        if type(token_id) is not int:
            raise RequestError(f"{where}: id {token_id!r}, expected a whole number")
    logprobs = dict(pairs)
    if len(logprobs) != len(pairs):
        raise RequestError(f"{where}: a token stands twice among the most probable, expected once")
    return logprobs


def require_prompt(ids: Sequence[Any] | None, request: Request, where: str) -> None:
    """The server must have computed the prompt that was sent: not with a second BOS, not cut."""
    if ids is not None and list(ids) != list(request.prompt_token_ids):
        raise RequestError(f"{where}: other tokens than the prompt that was sent")


def concatenated(pieces: Sequence[Any], name: str) -> Any:
    """Texts as one text, or lists as one list."""
    kind = type(pieces[0])
    if kind not in (str, list) or any(type(piece) is not kind for piece in pieces):
        raise RequestError(f"{name}: expected texts, or lists, in all events")
    return "".join(pieces) if kind is str else [item for piece in pieces for item in piece]


def from_base64(text: Any, where: str) -> bytes:
    if not isinstance(text, str):
        raise RequestError(f"{where}: {type(text).__name__}, expected base64")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as problem:
        raise RequestError(f"{where}: not base64: {problem}") from None
