"""A sampled answer with the log-probabilities of sampler and trainer; oracle/schemas/rollouts.schema.json has its line.

Messages begin with the name of the field that they are about: reading.py counts by it what can't be used.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lfm2np.engine.sampling.params import SamplingParams, from_json
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import Routes
from lfm2np.oracle.engines.records_json import ImpossibleValueError, read_routes
from lfm2np.oracle.engines.validate import ROUNDING, why_positive
from lfm2np.oracle.judging.routes import fitted
from lfm2np.truth.config import ModelConfig
from lfm2np.values import plain, require_count, show_json

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
MODES = {"raw": "raw", "processed": "processed", "auto": "auto"}
MODES |= {"raw_logprobs": "raw", "processed_logprobs": "processed"}  # vLLM's names
PYDANTIC = ("NaN", "Infinity", "-Infinity")  # how it writes them
MOST_STEP = 2**63 - 1
LEAST_LOGPROB = -3.4028234663852886e38  # of float32, in which masks are written; what is finite and less is no logprob


@dataclass(frozen=True)
class Rollout:
    """One sampled answer, with the fields of rollouts.schema.json, which says what each is; None: not reported.

    id          different in each rollout of a file; where it stands in the file ("line 3") if it has none
    sampling    how the answer was sampled: the fields of SAMPLING; all others have their defaults
    has_temperature  whether the file states one: else it is the one that fits
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
    has_temperature: bool = False
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

    @property
    def ids(self) -> tuple[int, ...]:
        """Of prompt and answer."""
        return (*self.prompt_token_ids, *self.token_ids)


# Of a line in the schema's form. `metadata` may hold anything and is not read.
OURS = ("sampling", "has_temperature")
FIELDS = (*(f.name for f in fields(Rollout) if f.name not in OURS), *SAMPLING, "metadata")


def rollout_from_json(raw: Mapping[str, Any], config: ModelConfig) -> Rollout:
    """A line in the schema's form, checked against the model. RequestError names field, value and what was expected;
    ImpossibleValueError, a kind of it, is of a number that no side can have computed.
    """
    require_known(raw)
    prompt, answer = (ids_in(raw, name, config.vocab_size) for name in ("prompt_token_ids", "token_ids"))
    count, most = len(prompt) + len(answer), config.max_position_embeddings
    if count > most:
        expected = f"expected at most max_position_embeddings={most}"
        raise RequestError(f"token_ids: {len(prompt)} + {len(answer)} with the prompt's, {expected}")
    is_sampled = are_sampled(raw, len(answer))
    sides = {name: logprobs_in(raw, name, is_sampled) for name in ("sampler_logprobs", "trainer_logprobs")}
    if all(values is None for values in sides.values()):
        raise RequestError("sampler_logprobs and trainer_logprobs: both missing, expected those of a side at least")
    padding = require_count("left_padding", raw.get("left_padding", 0), 0, most)
    pad_token_id = raw.get("pad_token_id", config.pad_token_id if padding else None)
    if padding and pad_token_id is None:
        raise RequestError(f"pad_token_id: missing, expected the token of left_padding={padding}")
    if pad_token_id is not None:
        require_count("pad_token_id", pad_token_id, 0, config.vocab_size - 1)
    return Rollout(
        name_in(raw, "id") or "",
        prompt,
        answer,
        **sides,
        sampling=from_json({name: raw[name] for name in SAMPLING if raw.get(name) is not None}),
        has_temperature=raw.get("temperature") is not None,
        logprobs_mode=mode_in(raw, "logprobs_mode"),
        trainer_logprobs_mode=mode_in(raw, "trainer_logprobs_mode"),
        is_sampled=is_sampled,
        routes=routes_in(raw, "routes", count - 1, config),
        trainer_routes=routes_in(raw, "trainer_routes", count - 1, config),
        step=None if raw.get("step") is None else require_count("step", raw["step"], 0, MOST_STEP),
        group=name_in(raw, "group"),
        pack=name_in(raw, "pack"),
        left_padding=padding,
        pad_token_id=pad_token_id,
    )


def require_known(raw: Mapping[str, Any]) -> None:
    for name in raw:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise RequestError(f"field {plain(name)}: unknown{hint}, expected some of {', '.join(FIELDS)}")


def listed(raw: Mapping[str, Any], name: str, expected: str, count: int | None = None) -> Sequence[Any]:
    """The list of that name, of `count` entries."""
    value = raw.get(name)
    if value is None:
        raise RequestError(f"{name}: missing, expected {expected}")
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} {show_json(value)}: expected {expected}")
    if count is not None and len(value) != count:
        raise RequestError(f"{name}: {len(value)} entries, expected {count}, as many as tokens")
    return value


def ids_in(raw: Mapping[str, Any], name: str, vocab_size: int) -> tuple[int, ...]:
    values = listed(raw, name, "a list of token ids")
    if not values:
        raise RequestError(f"{name} []: expected at least one token id")
    return tuple(require_count(f"{name}[{index}]", value, 0, vocab_size - 1) for index, value in enumerate(values))


def are_sampled(raw: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    if raw.get("is_sampled") is None:
        return (True,) * count
    values = listed(raw, "is_sampled", "a list of true and false", count)
    for index, value in enumerate(values):
        if value not in (0, 1):
            raise RequestError(f"is_sampled[{index}] {show_json(value)}: expected true or false, 1 or 0")
    if not any(values):
        raise RequestError(f"is_sampled: false for all {count} tokens, expected at least one that is true")
    return tuple(map(bool, values))


def logprobs_in(raw: Mapping[str, Any], name: str, is_sampled: tuple[bool, ...]) -> tuple[float, ...] | None:
    """0 where nothing was sampled, whatever stands there."""
    if raw.get(name) is None:
        return None
    values = [*listed(raw, name, "a list of numbers", len(is_sampled))]
    for index, value in enumerate(values):
        number = 0.0 if not is_sampled[index] else float(value) if value in PYDANTIC else value
        is_number = type(number) in (int, float)
        if not is_number or not (abs(number) <= -LEAST_LOGPROB or number == -math.inf):
            expected = f"expected a number of at least {LEAST_LOGPROB:.3g}, float32's least, or -Infinity"
            kind = ImpossibleValueError if is_number else RequestError
            raise kind(f"{name}[{index}] {show_json(value)}: {expected}")
        values[index] = float(number)
    for index, value in enumerate(values):
        if value > ROUNDING:
            why = why_positive([value for value, drawn in zip(values, is_sampled, strict=True) if drawn])
            raise ImpossibleValueError(f"{name}[{index}] {value}: expected at most 0{why}")
    return tuple(values)


def routes_in(raw: Mapping[str, Any], name: str, rows: int, config: ModelConfig) -> Routes | None:
    if raw.get(name) is None:
        return None
    try:
        return fitted(read_routes(raw, name), rows, config)
    except RequestError as problem:
        raise RequestError(f"{name}: {str(problem).removeprefix(f'{name}: ')}") from None


def mode_in(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name, "auto")
    if not isinstance(value, str) or value not in MODES:
        raise RequestError(f"{name} {show_json(value)}: expected one of {', '.join(MODES)}")
    return MODES[value]


def name_in(raw: Mapping[str, Any], name: str) -> str | None:
    """Text, or a whole number as text."""
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RequestError(f"{name} {show_json(value)}: expected text or a whole number")
    return str(value)
