"""What belongs to a dialect: requests, where a response holds what, and what else must be known of such a server.

A dialect is a table entry. How a response is read is the same for all: value by value, as its fields say.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lfm2np.engine.sampling.params import bias_pairs
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import Request, shortened

TOP_LOGPROBS = 5
GREEDY = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
OTHER = (AttributeError, EOFError, IndexError, KeyError, OSError, TypeError, ValueError)  # a value of another form
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


class ContradictionError(RequestError):
    """A response that has what its dialect says, but other ids in one place than in another; `values` are those that
    were read, of such ids the first."""

    def __init__(self, message: str, values: dict[str, Any]) -> None:
        super().__init__(message)
        self.values = values


class Reading(NamedTuple):
    """A response that is being read: what it answers, and the fields so far."""

    request: Request
    fields: dict[str, Any]

    @property
    def num_new(self) -> int:
        """New tokens that the response reported."""
        return len(self.fields.get("token_ids") or ())


def as_it_is(value: Any, reading: Reading) -> Any:
    """An answer's own form, which is checked where answers are."""
    return value


class Field(NamedTuple):
    """Where a response holds a field of Answer, as docs/_ext/dialects.py prints it.

    says  the field's name; "prompt": the ids that were sent, to be compared; "prompt_tokens", "new_tokens": how many
          the server itself counted
    read  its value in an answer's form; None: there is none. Any exception of OTHER is an error that names the place
    """

    says: str
    path: str
    form: str
    read: Callable[[Any, Reading], Any] = as_it_is


class Location(NamedTuple):
    """A value that a server reports: a path of its URL, and where the JSON object there holds it."""

    url: str
    path: Path


class Metrics(NamedTuple):
    """Names in /metrics, without labels.

    active  requests that run or wait
    memory  share of the cache that requests use; cached blocks that no request uses must not count
    cached  of prompt tokens that came from the cache
    """

    active: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dialect:
    """One kind of server.

    extras      what to request, the most first
    request     the body of a request: greedy, and without what a server does by default: some take penalties and
                filters from the checkpoint's generation_config.json
    fields      of a response, those first that others are compared with
    join        server-sent events, at least one, to the response that the server would have given in one piece
    reproducer  source of `answer(replies)`, which gives the tokens of a response and their log-probabilities or None

    event_ids      the new tokens of one event; None where events don't hold them
    takes_samples  n > 1, as so many choices
    takes_stops, takes_seeds  without a setting of the server
    processors     those of records.PROCESSORS that it takes, and means as vLLM does
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
    fields: tuple[Field, ...]
    join: Callable[[Sequence[Reply]], dict[str, Any]]
    reproducer: str

    takes_token_ids: bool = True
    extras: tuple[Extras, ...] = ALL_EXTRAS
    event_ids: Callable[[Reply], Any] = lambda event: None
    takes_samples: bool = False
    takes_stops: bool = False
    takes_seeds: bool = False
    processors: tuple[str, ...] = ()
    ignores_eos: bool = False
    raw_logprobs: bool = False
    streams_all: bool = True
    gguf_format: str | None = None
    gguf_only: bool = False

    version: Location | None = None
    slots: Location | None = None
    longest: Location | None = None
    cached: Path | None = None
    metrics: Metrics = field(default_factory=Metrics)

    def read(self, reply: Reply, request: Request) -> dict[str, Any]:
        """What the fields say, not yet checked as an answer. RequestError that names the place of what has another
        form; ContradictionError that of what contradicts the request, or what stands elsewhere."""
        values: dict[str, Any] = {"prompt": list(request.prompt_token_ids)}
        places, contradictions = {"prompt": "the prompt that was sent"}, list[str]()
        for name, path, form, read in self.fields:
            raw = value_at(reply, tuple(int(part) if part.isdigit() else part for part in re.findall(r"\w+", path)))
            try:
                value = None if raw is None else read(raw, Reading(request, values))
            except OTHER:
                raise RequestError(f"{path} {shortened(repr(raw), 60)}: expected {form.replace('`', '')}") from None
            if value is not None and values.setdefault(name, value) != value:
                contradictions.append(f"{path}: other tokens than {places[name]}")
            places.setdefault(name, path)
        del values["prompt"]
        if not values.keys() - {"prompt_tokens", "new_tokens"}:
            raise RequestError(f"a response without {', '.join(dict.fromkeys(field.path for field in self.fields))}")
        if contradictions:
            raise ContradictionError(contradictions[0], values)
        return values

    def joined(self, events: Sequence[Reply]) -> dict[str, Any]:
        """RequestError for no events, or events that can't be joined."""
        if not events:
            raise RequestError("a stream without an event")
        try:
            return self.join(events)
        except OTHER as problem:
            raise RequestError(f"events that can't be joined: {shortened(str(problem), 100)}") from None

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
    """Of a request that is not plainly greedy, in the names that OpenAI, vLLM, SGLang and llama.cpp share."""
    params = request.params
    fields: dict[str, Any] = {name: getattr(params, name) for name in request.processors}
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in bias_pairs(params)}
    if request.is_sampled:
        fields["temperature"] = params.temperature
        fields |= {} if params.seed is None else {"seed": params.seed}
        fields |= {} if params.n == 1 else {"n": params.n}
    return fields if request.stop is None else {**fields, "stop": [request.stop]}


# --- what responses share

GROWING = (
    *("text", "content", "token_ids", "tokens", "token_logprobs", "top_logprobs", "completion_probabilities"),
    *("reasoning_content", "reasoning", "arguments"),
)


def grown(events: Sequence[Reply]) -> dict[str, Any]:
    """Events that hold what is new: texts and lists grow, anything else is replaced by the newest."""
    whole: dict[str, Any] = {}
    for event in events:
        extend(whole, event)
    return whole


def extend(whole: dict[str, Any], piece: Reply) -> None:
    for name, value in piece.items():
        before = whole.get(name)
        if isinstance(value, dict):
            whole[name] = before if isinstance(before, dict) else {}
            extend(whole[name], value)
        elif name in GROWING and type(before) in (str, list) and value is not None:
            whole[name] = before + value
        elif value is not None or before is None:
            whole[name] = value


def split_choices(reply: Reply) -> list[dict[str, Any]]:
    """One reply for each choice; usage, which counts all of them, is left out where there are more."""
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) < 2:
        return [dict(reply)]
    rest = {name: value for name, value in reply.items() if name not in ("choices", "usage")}
    return [{**rest, "choices": [choice]} for choice in choices]


def by_token_id(pairs: Sequence[tuple[Any, Any]]) -> dict[int, Any]:
    """The most probable tokens. ValueError for an id that is no whole number, or stands there twice."""
    logprobs = dict(pairs)
    if len(logprobs) != len(pairs) or not all(type(token_id) is int for token_id in logprobs):
        raise ValueError(pairs)
    return logprobs


def from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
