"""A sampled answer with the log-probabilities of sampler and trainer, and a file of them: JSON lines, one a sequence.

oracle/schemas/rollouts.schema.json has every field. Records of TRL and verl are recognised by their keys (renamed.py).
In a long file a few bad lines are no reason to refuse the rest: they are left out, counted by kind, and the first of
each kind is named.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lfm2np.checkpoint.strict_json import KINDS as JSON_KINDS
from lfm2np.checkpoint.strict_json import parse_value
from lfm2np.engine.sampling.params import SamplingParams, from_json
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import Routes, shortened
from lfm2np.oracle.engines.records_json import read_routes
from lfm2np.oracle.engines.validate import ROUNDING, why_positive
from lfm2np.oracle.judging.routes import fitted
from lfm2np.oracle.rollouts.renamed import ANSWERS, Unfit, listed, require_length, sequences_of
from lfm2np.truth.config import ModelConfig
from lfm2np.values import plain, require_count, show_json

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
MODES = {"raw": "raw", "processed": "processed", "auto": "auto"}
MODES |= {"raw_logprobs": "raw", "processed_logprobs": "processed"}  # vLLM's names
EACH = ", one for each of token_ids"
MOST_STEP = 2**63 - 1
LEAST_LOGPROB = -3.4028234663852886e38  # of float32, in which masks are written; what is finite and less is no logprob
SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # in strings, as pydantic can write them


@dataclass(frozen=True)
class Rollout:
    """One sampled answer, with the fields of rollouts.schema.json, which says what each is; None: not reported.

    id          different in each rollout of a file; where it stands in the file ("line 3") if it has none
    sampling    how the answer was sampled: the fields of SAMPLING; all others have their defaults
    is_sampled  () at construction stands for all
    routes, trainer_routes  [positions][layers][experts] for prompt and answer but the answer's last token, as
                judging/routes.py has them

    Log-probabilities are natural logarithms (nats); -inf: the token lies outside what top-k, top-p or min-p keep. Those
    of tokens that were not sampled are 0, whatever was reported.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...] | None = None
    trainer_logprobs: tuple[float, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs_mode: str = "auto"
    trainer_logprobs_mode: str = "auto"
    is_sampled: tuple[bool, ...] = ()
    routes: Routes | None = None
    trainer_routes: Routes | None = None
    step: int | None = None
    group: str | None = None
    pack: str | None = None
    left_padding: int = 0
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if not self.is_sampled:
            object.__setattr__(self, "is_sampled", (True,) * len(self.token_ids))


# Of a line in the schema's form. `metadata` may hold anything and is not read.
FIELDS = (*(f.name for f in fields(Rollout) if f.name != "sampling"), *SAMPLING, "metadata")


@dataclass(frozen=True)
class Left:
    """Lines, or sequences of a batch, that are left out for the same kind of reason.

    kind   what is wrong, in two or three words
    count  how many
    first  the first of them, as one line: file, line number, field, value, what was expected
    """

    kind: str
    count: int
    first: str


def read_rollouts(
    text: str | Iterable[str],
    source: str,
    config: ModelConfig,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[list[Rollout], list[Left]]:
    """The usable sequences in the file's order, and what is left out, the most frequent kind first.

    text      JSON lines, or an iterable of them, such as an open file; a line may be a list of records
    source    its name, for messages
    defaults  fields such as temperature or logprobs_mode, for sequences that lack them

    Of sequences with one id the first counts. Without ids, equal ones are as many samples. RequestError where no
    sequence can be used, and for a default that can't be.
    """
    defaults = defaults or {}
    _require_known(defaults)
    rollouts: dict[str, Rollout] = {}
    places: dict[str, str] = {}
    left: dict[str, Left] = {}
    count = 0
    for where, raw in _records(text):
        count += 1
        try:
            if isinstance(raw, RequestError):
                raise raw
            reported = {key: value for key, value in raw.items() if value is not None}
            rollout = rollout_from_json({"id": where, **defaults, **reported}, config)
            if rollout.id in places:
                raise Unfit("duplicate id", f"id {plain(rollout.id)}: as in {places[rollout.id]}, expected another")
        except RequestError as problem:
            kind = getattr(problem, "kind", "wrong value")
            known = left.get(kind) or Left(kind, 0, shortened(f"{source}, {where}: {problem}"))
            left[kind] = Left(kind, known.count + 1, known.first)
        else:
            rollouts[rollout.id], places[rollout.id] = rollout, where
    if not count:
        raise RequestError(f"{source}: no rollouts, expected one JSON object a line")
    by_count = sorted(left.values(), key=lambda kind: -kind.count)
    if not rollouts:
        reasons = "; ".join(f"{kind.kind} ({kind.count}), first {kind.first}" for kind in by_count)
        raise RequestError(f"{source}: {count} sequences, none of which can be used: {reasons}")
    return list(rollouts.values()), by_count


def rollout_from_json(raw: Mapping[str, Any], config: ModelConfig) -> Rollout:
    """A line in the schema's form, checked against the model. RequestError names field, value and what was expected."""
    _require_known(raw)
    prompt, answer = (_ids(raw, name, config.vocab_size) for name in ("prompt_token_ids", "token_ids"))
    count, most = len(prompt) + len(answer), config.max_position_embeddings
    if count > most:
        raise Unfit(
            "longer than the model's context",
            f"prompt_token_ids and token_ids: {len(prompt)} + {len(answer)} tokens, expected at most "
            f"max_position_embeddings={most}",
        )
    is_sampled = _are_sampled(raw, len(answer))
    logprobs = {name: _logprobs(raw, name, is_sampled) for name in ("sampler_logprobs", "trainer_logprobs")}
    if all(values is None for values in logprobs.values()):
        expected = "sampler_logprobs and trainer_logprobs: both missing, expected those of a side at least"
        raise Unfit("no log-probabilities", expected)
    padding = require_count("left_padding", raw.get("left_padding", 0), 0, most)
    pad_token_id = raw.get("pad_token_id", config.pad_token_id if padding else None)
    if padding and pad_token_id is None:
        raise Unfit("missing field", f"pad_token_id: missing, expected the token of left_padding={padding}")
    return Rollout(
        id=_name(raw, "id") or "",
        prompt_token_ids=prompt,
        token_ids=answer,
        sampler_logprobs=logprobs["sampler_logprobs"],
        trainer_logprobs=logprobs["trainer_logprobs"],
        sampling=from_json({name: raw[name] for name in SAMPLING if raw.get(name) is not None}),
        logprobs_mode=_mode(raw, "logprobs_mode"),
        trainer_logprobs_mode=_mode(raw, "trainer_logprobs_mode"),
        is_sampled=is_sampled,
        routes=_routes(raw, "routes", count - 1, config),
        trainer_routes=_routes(raw, "trainer_routes", count - 1, config),
        step=None if raw.get("step") is None else require_count("step", raw["step"], 0, MOST_STEP),
        group=_name(raw, "group"),
        pack=_name(raw, "pack"),
        left_padding=padding,
        pad_token_id=None if pad_token_id is None else _id("pad_token_id", pad_token_id, config.vocab_size),
    )


def _records(text: str | Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any] | RequestError]]:
    """Where each sequence stands in the file, and what it is in the schema's form, or why it can't be read."""
    for where, value in _values(text):
        try:
            if isinstance(value, RequestError):
                raise value
            if not isinstance(value, dict):
                raise Unfit("unknown form", f"a JSON {JSON_KINDS[type(value)]}, expected an object")
            rows = sequences_of(value)
        except RequestError as problem:
            yield where, problem
            continue
        is_renamed = any(name in value for name in ANSWERS)
        for number, row in enumerate(rows):
            fields = {name: row[name] for name in row if name in FIELDS} if is_renamed else row
            yield where if len(rows) == 1 else f"{where}, row {number}", fields


def _values(text: str | Iterable[str]) -> Iterator[tuple[str, object]]:
    """(where, JSON value or RequestError) of each line, and of each entry of a line that is a list.

    Lines end with a line feed alone: JSON's strings may hold the other characters at which str.splitlines ends one.
    """
    for number, line in enumerate(text.split("\n") if isinstance(text, str) else text, 1):
        if not line.strip():
            continue
        where = f"line {number}"
        value = _parsed(line, where)
        if isinstance(value, list):
            for index, entry in enumerate(value):
                yield f"{where}, entry {index}", entry
        else:
            yield where, value


def _parsed(text: str, where: str) -> object:
    """The JSON value, or what is wrong with the text."""
    try:
        return parse_value(text.encode(), where, RequestError)
    except UnicodeEncodeError as problem:
        return Unfit("not JSON", f"not UTF-8: a lone surrogate at character {problem.start}")
    except RequestError as problem:
        return Unfit("not JSON", str(problem).removeprefix(f"{where}: "))


def _require_known(raw: Mapping[str, Any]) -> None:
    for name in raw:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            expected = f"expected some of {', '.join(FIELDS)}"
            raise Unfit("unknown field", f"field {plain(name)}: unknown{hint}, {expected}")


def _ids(raw: Mapping[str, Any], name: str, vocab_size: int) -> tuple[int, ...]:
    values = listed(raw, name, "a list of token ids")
    if not values:
        raise Unfit("empty prompt or answer", f"{name} []: expected at least one token id")
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) >= vocab_size:
        for index, value in enumerate(values):
            _id(f"{name}[{index}]", value, vocab_size)
    return tuple(values)


def _id(name: str, value: object, vocab_size: int) -> int:
    if type(value) is not int:
        raise Unfit("wrong value", f"{name} {show_json(value)}: expected a token id")
    if not 0 <= value < vocab_size:
        raise Unfit(
            "token id outside the vocabulary", f"{name} {show_json(value)}: expected 0 to vocab_size-1={vocab_size - 1}"
        )
    return value


def _are_sampled(raw: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    if raw.get("is_sampled") is None:
        return (True,) * count
    values = listed(raw, "is_sampled", "a list of true and false")
    require_length("is_sampled", values, count, EACH)
    for index, value in enumerate(values):
        if value not in (0, 1):
            raise Unfit("wrong value", f"is_sampled[{index}] {show_json(value)}: expected true or false, 1 or 0")
    if not any(values):
        raise Unfit("no sampled token", f"is_sampled: false for all {count} tokens, expected at least one that is true")
    return tuple(map(bool, values))


def _logprobs(raw: Mapping[str, Any], name: str, is_sampled: tuple[bool, ...]) -> tuple[float, ...] | None:
    if raw.get(name) is None:
        return None
    values = listed(raw, name, "a list of numbers")
    require_length(name, values, len(is_sampled), EACH)
    judged = [_logprob(f"{name}[{index}]", value) if is_sampled[index] else 0.0 for index, value in enumerate(values)]
    if max(judged) > ROUNDING:
        index = next(index for index, value in enumerate(judged) if value > ROUNDING)
        why = why_positive([value for value, drawn in zip(judged, is_sampled, strict=True) if drawn])
        raise Unfit("positive log-probability", f"{name}[{index}] {judged[index]}: expected at most 0{why}")
    return tuple(judged)


def _logprob(name: str, value: Any) -> float:
    """The number, which may be -inf."""
    if value is None:
        raise Unfit("missing log-probability", f"{name} null: expected a number")
    spelled: Any = SPELLED.get(value) if isinstance(value, str) else value
    if type(spelled) not in (int, float):
        raise Unfit("wrong value", f"{name} {show_json(value)}: expected a number")
    try:
        number = float(spelled)
    except OverflowError:  # a whole number beyond float64
        number = math.inf if spelled > 0 else -math.inf
    if math.isnan(number):
        raise Unfit("NaN log-probability", f"{name} NaN: expected a number")
    if number == math.inf:
        raise Unfit("infinite log-probability", f"{name} Infinity: expected a number, at most 0")
    if -math.inf < number < LEAST_LOGPROB:
        expected = f"expected a number of at least {LEAST_LOGPROB:.3g}, float32's least, or -Infinity"
        raise Unfit("wrong value", f"{name} {show_json(value)}: {expected}")
    return number


def _routes(raw: Mapping[str, Any], name: str, rows: int, config: ModelConfig) -> Routes | None:
    if raw.get(name) is None:
        return None
    try:
        return fitted(read_routes(raw, name), rows, config)
    except RequestError as problem:
        shown = str(problem)
        raise Unfit("unusable routes", shown if shown.startswith(name) else f"{name}: {shown}") from None


def _mode(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name, "auto")
    if not isinstance(value, str) or value not in MODES:
        raise Unfit("wrong value", f"{name} {show_json(value)}: expected one of {', '.join(MODES)}")
    return MODES[value]


def _name(raw: Mapping[str, Any], name: str) -> str | None:
    """Text, or a whole number as text."""
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise Unfit("wrong value", f"{name} {show_json(value)}: expected text or a whole number")
    return str(value)
