"""Sampling parameters: what is taken, in which form it is kept, and what is refused by field, value and expectation."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.engine.sampling.params import (
    COUNTS,
    ID_LISTS,
    REALS,
    SamplingParams,
    as_json,
    bias_pairs,
    from_json,
    require_vocabulary,
)
from lfm2np.errors import RequestError

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
# Every field with values that are fine together.
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(1e-300, 1e300),
    "n": st.integers(1, 16384),
    "top_k": st.integers(-1, 10**6),
    "top_p": st.floats(0.0, 1.0, exclude_min=True),
    "min_p": st.floats(0.0, 1.0),
    "repetition_penalty": st.floats(0.0, exclude_min=True, allow_infinity=False),
    "presence_penalty": st.floats(-2.0, 2.0),
    "frequency_penalty": st.floats(-2.0, 2.0),
    "logit_bias": st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-1e308, 1e308), max_size=5),
    "min_tokens": st.integers(0, 5),
    "max_tokens": st.none() | st.integers(5, 10**9),
    "banned_token_ids": IDS,
    "stop_token_ids": IDS,
    "stop": st.text(st.characters(codec="utf-8"), min_size=1)
    | st.lists(st.text(st.characters(codec="utf-8"), min_size=1)),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "seed": st.none() | st.integers(0, 2**64 - 1),
    "logprobs": st.none() | st.integers(0, 10**6),
    "prompt_logprobs": st.none() | st.integers(0, 10**6),
    "profile": st.sampled_from(["vllm", "transformers"]),
}
choices = st.fixed_dictionaries({}, optional=GOOD)
NAN, INF = math.nan, math.inf
NO_NUMBERS = (None, True, False, "1", b"1", NAN, INF, -INF, 1j, [], {}, np.bool_(True), np.float64(NAN))
NO_COUNTS = (True, False, "1", 2.0, 2.5, NAN, INF, [], {}, np.bool_(True), np.float64(2.0), -2)


def refusal(**values: object) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_the_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.profile == "vllm"


@pytest.mark.slow
@given(choices, st.data())
def test_parameters_are_values_and_come_back_from_json(values: dict[str, Any], data: st.DataObject):
    """The order of ids does not matter; JSON holds the fields that differ from their default, and no others."""
    params, default = SamplingParams(**values), SamplingParams()
    for name in ("banned_token_ids", "stop_token_ids"):
        values[name] = data.draw(st.permutations(list(getattr(params, name)) * 2))
    assert params == SamplingParams(**values) and hash(params) == hash(SamplingParams(**values))
    assert dataclasses.replace(params) == params
    raw = as_json(params)
    assert from_json(json.loads(json.dumps(raw, allow_nan=False))) == params
    assert set(raw) == {name for name in FIELDS if getattr(params, name) != getattr(default, name)}
    for name in raw:
        assert dataclasses.replace(params, **{name: getattr(default, name)}) != params


def test_values_are_kept_in_one_plain_form():
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=-1,
        top_p=Fraction(1, 2),  # type: ignore[arg-type]
        n=np.int64(3),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 1, 3]),  # type: ignore[arg-type]
        allowed_token_ids={9, 8},  # type: ignore[arg-type]
        logit_bias={5: 1, 2: np.float64(-0.0)},
        stop=["b", "a", "b"],
    )
    assert as_json(params) == {
        "temperature": 0.5,
        "top_p": 0.5,
        "n": 3,
        "stop_token_ids": [1, 3],
        "allowed_token_ids": [8, 9],
        "logit_bias": {"2": 0.0, "5": 1.0},
        "stop": ["b", "a"],
    }
    assert params.top_k == 0 and type(params.n) is int and type(params.top_p) is float
    assert math.copysign(1.0, SamplingParams(temperature=-0.0).temperature) == 1.0
    assert bias_pairs(params) == ((2, 0.0), (5, 1.0)) and bias_pairs(SamplingParams()) == ()


def test_nothing_can_be_changed_afterwards():
    params = SamplingParams(stop_token_ids=[1], logit_bias={1: 1.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    assert isinstance(params.stop_token_ids, tuple) and isinstance(params.logit_bias, tuple)


@pytest.mark.parametrize("name", [*REALS, *COUNTS])
def test_a_number_is_neither_a_truth_value_nor_text_nor_nan_nor_infinite(name: str):
    for value in NO_NUMBERS if name in REALS else NO_COUNTS:
        said = refusal(**{name: value})
        assert said.startswith(f"{name} ") and (name in COUNTS or REALS[name][0] in said)


def test_only_fields_with_an_own_meaning_for_none_take_none():
    optional = {"max_tokens", "allowed_token_ids", "logit_bias", "seed", "logprobs", "prompt_logprobs"}
    SamplingParams(**dict.fromkeys(optional))  # type: ignore[arg-type]
    for name in set(FIELDS) - optional:
        assert refusal(**{name: None}).startswith(name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": NAN}, "temperature nan: expected a finite number, at least 0"),
        ({"temperature": -1e-300}, "temperature -1e-300: expected a finite number, at least 0"),
        ({"temperature": 10**400}, "temperature 1"),
        ({"top_p": 0.0}, "top_p 0.0: expected a number above 0, at most 1"),
        ({"top_p": 1.0000001}, "top_p 1.0000001: expected"),
        ({"min_p": -0.1}, "min_p -0.1: expected a number, 0 to 1"),
        ({"min_p": 1.5}, "min_p 1.5: expected"),
        ({"presence_penalty": 2.1}, "presence_penalty 2.1: expected a number, -2 to 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty -2.1: expected"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0: expected a finite number above 0"),
        ({"n": 0}, "n 0: expected a whole number, 1 to 16384"),
        ({"n": 16385}, "n 16385: expected"),
        ({"max_tokens": 0}, "max_tokens 0: expected a whole number, at least 1"),
        ({"seed": -1}, "seed -1: expected a whole number, 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed 18446744073709551616: expected"),
        ({"min_tokens": 17}, "min_tokens 17: expected at most max_tokens=16"),
        ({"n": 2, "temperature": 0}, "n 2: expected 1 with temperature 0"),
        ({"ignore_eos": 1}, "ignore_eos 1: expected true or false"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output 'yes': expected true or false"),
        ({"profile": "vLLM"}, "profile 'vLLM': expected one of vllm, transformers"),
        ({"profile": ["vllm"]}, "profile ['vllm']: expected"),
        ({"stop": ""}, "stop[0] '': expected at least one character"),
        ({"stop": ["a", ""]}, "stop[1] '': expected"),
        ({"stop": ["a", 5]}, "stop[1]: 5, expected a string"),
        ({"stop": b"a"}, "stop b'a': expected a string or a list of strings"),
        ({"stop": {"a"}}, "stop {'a'}: expected"),
        ({"stop": 5}, "stop 5: expected"),
        ({"stop": "\ud800"}, "stop[0]: lone surrogate"),
        ({"stop_token_ids": 5}, "stop_token_ids 5: expected a list of token ids"),
        ({"stop_token_ids": "5"}, "stop_token_ids '5': expected"),
        ({"stop_token_ids": [1, True]}, "stop_token_ids[1] True: expected a whole number"),
        ({"banned_token_ids": [1, -1]}, "banned_token_ids[1] -1: expected"),
        ({"banned_token_ids": {1: 2}}, "banned_token_ids {1: 2}: expected"),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids[0] 1.0: expected"),
        ({"allowed_token_ids": [2**31]}, "allowed_token_ids[0] 2147483648: expected"),
        ({"allowed_token_ids": []}, "allowed_token_ids (): expected at least one token id, or None for all"),
        ({"allowed_token_ids": [1, 2], "banned_token_ids": [2, 1, 0]}, "banned_token_ids: all of allowed_token_ids"),
        ({"allowed_token_ids": [1], "stop_token_ids": [1], "min_tokens": 1}, "min_tokens 1: expected 0"),
        ({"logit_bias": 5}, "logit_bias 5: expected a mapping from token ids to numbers"),
        ({"logit_bias": "12"}, "logit_bias '12': expected"),
        ({"logit_bias": [5]}, "logit_bias 5: expected a token id and a number"),
        ({"logit_bias": {True: 1.0}}, "logit_bias token id True: expected"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias token id '5': expected"),
        ({"logit_bias": {5: NAN}}, "logit_bias[5] nan: expected a finite number"),
        ({"logit_bias": {5: True}}, "logit_bias[5] True: expected"),
        ({"logit_bias": [(5, 1.0), (5, 2.0)]}, "logit_bias token id 5: given twice"),
    ],
    ids=lambda x: str(list(x.items()))[:40] if isinstance(x, dict) else "",
)
def test_a_refusal_names_field_value_and_expectation(values: dict[str, Any], message: str):
    assert refusal(**values).startswith(message)


def test_long_lists_and_what_merely_looks_odd_are_taken():
    SamplingParams(stop=[str(number) for number in range(5000)], stop_token_ids=range(100_000))
    SamplingParams(min_tokens=16)
    SamplingParams(temperature=0.0, top_k=5, top_p=0.1, min_p=0.5)
    SamplingParams(ignore_eos=True, stop_token_ids=[7], include_stop_str_in_output=True)
    SamplingParams(max_tokens=None, min_tokens=10**6)
    SamplingParams(allowed_token_ids=[1, 2], banned_token_ids=[1], stop_token_ids=[2])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"tempratur": 1.0}, "tempratur: unknown sampling parameter, expected one of n, temperature"),
        ({5: 1.0}, "5: unknown sampling parameter"),
        ({"temperature\n": 1.0}, "'temperature\\n': unknown"),
        ([], "sampling parameters []: expected an object"),
        ({"logit_bias": {"05": 1.0}}, "logit_bias token id '05': expected"),
        ({"logit_bias": {"+5": 1.0}}, "logit_bias token id '+5': expected"),
        ({"logit_bias": {"\u0665": 1.0}}, "logit_bias token id '\u0665': expected"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "logit_bias token id '999"),
        ({"logit_bias": {"5": 1.0, 5: 2.0}}, "logit_bias token id 5: given twice"),
        ({"temperature": None}, "temperature None: expected"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_json_with_unknown_keys_or_odd_ids_is_refused(raw: Mapping[str, Any], message: str):
    with pytest.raises(RequestError) as caught:
        from_json(raw)
    assert str(caught.value).startswith(message) and len(str(caught.value)) < 600


def test_an_empty_object_gives_the_defaults():
    assert from_json({}) == SamplingParams() and as_json(SamplingParams()) == {}
    assert SamplingParams(logit_bias={}) == SamplingParams()


@pytest.mark.parametrize("name", [*ID_LISTS, "logit_bias", "logprobs", "prompt_logprobs"])
def test_ids_and_counts_lie_within_the_vocabulary(name: str):
    value: Any = {10: 1.0} if name == "logit_bias" else [0, 10] if name in ID_LISTS else 11
    require_vocabulary(SamplingParams(**{name: value}), 11, ())
    with pytest.raises(RequestError, match=rf"^{name} 1[01]: expected a .*, 0 to vocab_size(-1=9|=10)$"):
        require_vocabulary(SamplingParams(**{name: value}), 10, ())


def test_some_token_must_be_left_for_the_first_choice():
    with pytest.raises(RequestError, match=r"^banned_token_ids: all of the vocabulary"):
        require_vocabulary(SamplingParams(banned_token_ids=range(10)), 10, ())
    only_eos = SamplingParams(allowed_token_ids=[4], min_tokens=1)
    require_vocabulary(only_eos, 10, ())
    with pytest.raises(RequestError, match=r"^min_tokens 1: expected 0, since allowed_token_ids"):
        require_vocabulary(only_eos, 10, [4])
    almost_all = SamplingParams(banned_token_ids=range(9), min_tokens=1)
    with pytest.raises(RequestError, match=r"^min_tokens 1: expected 0, since the vocabulary"):
        require_vocabulary(almost_all, 10, [9])


def test_a_shadowed_check_would_be_seen():
    """The control: every field is either free of ranges or listed in one of the tables that the tests above walk."""
    listed = {*REALS, *COUNTS, *ID_LISTS, "logit_bias", "stop", "profile", "ignore_eos", "include_stop_str_in_output"}
    assert listed == set(FIELDS)
