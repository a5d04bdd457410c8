"""`SamplingParams`: how one request is sampled and where it stops, under vLLM's names; checked once, at construction.

Ranges and defaults are those of vLLM (vllm/sampling_params.py, SamplingParams._verify_args), with these differences:
- any finite temperature from 0 on is taken as it is; vLLM refuses more than 2, raises 1e-5..1e-2 to 1e-2 and calls
  everything below greedy, since its float32 arithmetic needs that. Here only 0 is greedy;
- a logit bias may be any finite number; vLLM's server cuts it to [-100, 100];
- -1 stands for "off" in top_k only: not for "no seed" and not for "all log-probabilities";
- banned_token_ids (transformers' suppress_tokens) takes ids; vLLM's bad_words takes texts;
- `profile` names the engine whose order of processors is followed (lfm2np/engine/sampling/choice.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, cast

from lfm2np.checkpoint.text.tokenizer import require_text
from lfm2np.errors import RequestError
from lfm2np.values import plain, require_count, show

PROFILES = ("vllm", "transformers")
MAX_SAMPLES = 16384  # vLLM's default of VLLM_MAX_N_SEQUENCES
MAX_SEED = 2**64 - 1
MAX_TOKEN_ID = 2**31 - 1  # the model's own limit: require_vocabulary

REALS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("a finite number, at least 0", lambda x: x >= 0.0),
    "top_p": ("a number above 0, at most 1", lambda x: 0.0 < x <= 1.0),
    "min_p": ("a number, 0 to 1", lambda x: 0.0 <= x <= 1.0),
    "repetition_penalty": ("a finite number above 0", lambda x: x > 0.0),
    "presence_penalty": ("a number, -2 to 2", lambda x: -2.0 <= x <= 2.0),
    "frequency_penalty": ("a number, -2 to 2", lambda x: -2.0 <= x <= 2.0),
}
COUNTS: dict[str, tuple[int, int | None, bool]] = {
    # Smallest and largest value, and whether None is one.
    "n": (1, MAX_SAMPLES, False),
    "top_k": (-1, None, False),
    "min_tokens": (0, None, False),
    "max_tokens": (1, None, True),
    "seed": (0, MAX_SEED, True),
    "logprobs": (0, None, True),
    "prompt_logprobs": (0, None, True),
}
SWITCHES = ("include_stop_str_in_output", "ignore_eos")
ID_LISTS = ("allowed_token_ids", "banned_token_ids", "stop_token_ids")


@dataclass(frozen=True)
class SamplingParams:
    """One request's choices; a value that cannot be raises RequestError with the field, the value and what it may be.

    After construction numbers are plain int and float, ids sorted tuples without repetition, `stop` a tuple in the
    given order, `logit_bias` a sorted tuple of (id, bias) or None, top_k 0 where it is off. Equal requests are equal
    and hash alike. With temperature 0 (greedy) top_k, top_p and min_p have no effect, the penalties and masks do.
    """

    n: int = 1
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 and -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    min_tokens: int = 0  # before that many, neither stop tokens nor stop strings
    max_tokens: int | None = 16  # None: up to the model's longest context
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    profile: str = "vllm"

    def __post_init__(self) -> None:
        for name, checked in _checked(self).items():
            object.__setattr__(self, name, checked)
        _refuse_contradictions(self)


def bias_pairs(params: SamplingParams) -> tuple[tuple[int, float], ...]:
    """logit_bias as (id, bias), sorted by id; empty if there is none."""
    return cast(tuple[tuple[int, float], ...], params.logit_bias or ())


def as_json(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their default, as JSON has them: lists for tuples, ids of logit_bias as strings."""
    default = SamplingParams()
    changed = {field.name: getattr(params, field.name) for field in fields(params)}
    changed = {name: value for name, value in changed.items() if value != getattr(default, name)}
    if "logit_bias" in changed:
        changed["logit_bias"] = {str(token_id): bias for token_id, bias in bias_pairs(params)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}


def from_json(raw: Mapping[str, Any]) -> SamplingParams:
    """The inverse of `as_json`; an absent field takes its default. RequestError for a key that is no field."""
    if not isinstance(raw, Mapping):
        raise RequestError(f"sampling parameters {show(raw)}: expected an object")
    known = [field.name for field in fields(SamplingParams)]
    for key in raw:
        if key not in known:
            name = plain(key) if isinstance(key, str) else show(key)
            raise RequestError(f"{name}: unknown sampling parameter, expected one of {', '.join(known)}")
    values = dict(raw)
    if isinstance(values.get("logit_bias"), Mapping):
        values["logit_bias"] = [(_id_of_key(key), bias) for key, bias in values["logit_bias"].items()]
    return SamplingParams(**values)


def require_vocabulary(params: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """The second check, against a model: ids within the vocabulary, no more log-probabilities than it has tokens.

    Also that some token can be chosen at all: `min_tokens` forbids the end-of-sequence tokens at first, and the ids
    that are allowed may be no others. Raises RequestError.
    """
    biased = [token_id for token_id, _ in bias_pairs(params)]
    lists = {name: getattr(params, name) or () for name in ID_LISTS} | {"logit_bias": biased}
    for name, ids in lists.items():
        for token_id in ids:
            if token_id >= vocab_size:
                raise RequestError(f"{name} {token_id}: expected a token id, 0 to vocab_size-1={vocab_size - 1}")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            raise RequestError(f"{name} {show(count)}: expected a whole number, 0 to vocab_size={vocab_size}")
    _require_a_choice(params, range(vocab_size), {*params.stop_token_ids, *eos_token_ids})


def _checked(params: SamplingParams) -> dict[str, object]:
    checked: dict[str, object] = {}
    for name, (expected, fits) in REALS.items():
        checked[name] = _require_real(name, getattr(params, name), expected, fits)
    for name, (least, most, optional) in COUNTS.items():
        value = getattr(params, name)
        checked[name] = None if value is None and optional else require_count(name, value, least, most)
    if checked["top_k"] == -1:
        checked["top_k"] = 0
    for name in SWITCHES:
        if not isinstance(getattr(params, name), bool):
            raise RequestError(f"{name} {show(getattr(params, name))}: expected true or false")
    for name in ID_LISTS:
        value = getattr(params, name)
        checked[name] = None if value is None and name == "allowed_token_ids" else _require_ids(name, value)
    checked["logit_bias"] = None if params.logit_bias is None else _require_biases(params.logit_bias) or None
    checked["stop"] = _require_stops(params.stop)
    if not isinstance(params.profile, str) or params.profile not in PROFILES:
        raise RequestError(f"profile {show(params.profile)}: expected one of {', '.join(PROFILES)}")
    return checked


def _refuse_contradictions(params: SamplingParams) -> None:
    if params.temperature == 0.0 and params.n > 1:
        raise RequestError(f"n {params.n}: expected 1 with temperature 0, which gives the same answer every time")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(f"min_tokens {params.min_tokens}: expected at most max_tokens={params.max_tokens}")
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise RequestError("allowed_token_ids (): expected at least one token id, or None for all")
        _require_a_choice(params, params.allowed_token_ids, params.stop_token_ids)


def _require_a_choice(params: SamplingParams, candidates: Collection[int], stopping: Collection[int]) -> None:
    """RequestError where no candidate may be the first token; `stopping` are the ids that min_tokens forbids."""
    allowed = candidates if params.allowed_token_ids is None else params.allowed_token_ids
    left = set(allowed) - set(params.banned_token_ids)
    source = "the vocabulary" if params.allowed_token_ids is None else "allowed_token_ids"
    if not left:
        raise RequestError(f"banned_token_ids: all of {source}, expected at least one token to be left")
    if params.min_tokens > 0 and not left - set(stopping):
        raise RequestError(
            f"min_tokens {params.min_tokens}: expected 0, since {source} without banned_token_ids leaves only tokens "
            "that stop"
        )


def _require_real(name: str, value: object, expected: str, fits: Callable[[float], bool]) -> float:
    """The number as a float, -0 as 0; RequestError for a truth value, text, NaN, infinity or one that does not fit."""
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not math.isfinite(number) or not fits(number):
        raise RequestError(f"{name} {show(value)}: expected {expected}")
    return number + 0.0


def _require_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Collection):
        raise RequestError(f"{name} {show(value)}: expected a list of token ids")
    return tuple(sorted({_require_id(f"{name}[{index}]", token_id) for index, token_id in enumerate(value)}))


def _require_id(name: str, value: object) -> int:
    return require_count(name, value, 0, MAX_TOKEN_ID)


def _require_biases(value: object) -> tuple[tuple[int, float], ...]:
    """(id, bias) sorted by id, from a mapping or from pairs with different ids."""
    pairs = value.items() if isinstance(value, Mapping) else value
    if isinstance(pairs, str | bytes | bytearray) or not isinstance(pairs, Collection):
        raise RequestError(f"logit_bias {show(value)}: expected a mapping from token ids to numbers")
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RequestError(f"logit_bias {show(pair)}: expected a token id and a number")
        token_id = _require_id("logit_bias token id", pair[0])
        if token_id in biases:
            raise RequestError(f"logit_bias token id {token_id}: given twice, expected once")
        biases[token_id] = _require_real(f"logit_bias[{token_id}]", pair[1], "a finite number", lambda x: True)
    return tuple(sorted(biases.items()))


def _require_stops(value: object) -> tuple[str, ...]:
    """Stop strings in the given order, each once."""
    stops = (value,) if isinstance(value, str) else value
    if isinstance(stops, bytes | bytearray | Mapping | set | frozenset) or not isinstance(stops, Collection):
        raise RequestError(f"stop {show(value)}: expected a string or a list of strings")
    for index, stop in enumerate(stops):
        require_text(stop, f"stop[{index}]")
        if not stop:
            raise RequestError(f"stop[{index}] '': expected at least one character")
    return tuple(dict.fromkeys(str(stop) for stop in stops))


def _id_of_key(key: object) -> object:
    """A JSON key as the integer that it spells in plain decimal; anything else as it is, to be refused by name."""
    is_decimal = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
    return int(key) if isinstance(key, str) and is_decimal and str(int(key)) == key else key
