"""Routes of a mixture of experts: forced, compared, told in several forms."""

import base64
import io
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routed_engine import NEW, PROMPT, as_tuples, own_routes, said

import lfm2np
from lfm2np.engine.loading import Model
from lfm2np.errors import RequestError
from lfm2np.oracle.check import fitting
from lfm2np.oracle.engines.dialects import SGLANG, VLLM
from lfm2np.oracle.engines.records import Answer, greedy
from lfm2np.oracle.engines.records_json import answer_as_json, answer_from_json
from lfm2np.oracle.judging.routes import OWN, as_key, difference, fitted, from_key, margins, routed, swapped
from lfm2np.truth import reference

pytestmark = pytest.mark.rounding  # the noise is of this machine's float32; what is compared bit for bit is exact


def test_routes_given_are_taken_and_others_are_its_own(published: Model) -> None:
    ids = list(PROMPT)
    plain, kept = routed(published.numerics)
    expected = reference.hidden_states(published.weights, published.config, plain, ids)
    assert kept.chosen().shape == (len(ids), 3, 2) and kept.preferred().shape == (len(ids), 3, 8)
    for routes in (kept.chosen(), kept.chosen()[:, :, ::-1], np.full_like(kept.chosen(), OWN)):
        numerics, again = routed(published.numerics, routes)
        states = reference.hidden_states(published.weights, published.config, numerics, ids)
        if routes[0, 0, 0] in (OWN, kept.chosen()[0, 0, 0]):
            assert states.tobytes() == expected.tobytes()
        assert again.preferred().tobytes() == kept.preferred().tobytes() or routes[0, 0, 0] != OWN
    other = kept.chosen().copy()
    other[5, 1] = swapped(kept.preferred()[5, 1], other[5, 1])
    numerics, again = routed(published.numerics, other)
    states = reference.hidden_states(published.weights, published.config, numerics, ids)
    assert again.chosen().tolist() == other.tolist()
    assert states[:5].tobytes() == expected[:5].tobytes(), "what is before the change can't know of it"
    assert states[5].tobytes() != expected[5].tobytes()


scores = st.lists(st.integers(0, 6), min_size=3, max_size=6)


@settings(max_examples=100, deadline=None)
@given(scores, st.data())
def test_a_difference_is_seen_exactly_where_another_choice_was_better(values: list[int], data: st.DataObject) -> None:
    """By all subsets: a choice is right if it is the K with the largest (score, lowest id)."""
    count = data.draw(st.integers(1, len(values)))
    experts = data.draw(st.permutations(range(len(values))))[:count]
    preferred = np.array([values], np.float32)
    squares = np.full_like(preferred, 0.25)
    right = max(
        itertools.combinations(range(len(values)), count), key=lambda s: sorted((values[i], -i) for i in s)[::-1]
    )
    mismatch = difference(preferred, np.array([experts]), squares, [7])
    if set(experts) == set(right):
        assert mismatch is None
    else:
        assert mismatch is not None and mismatch.layer == 7
        assert mismatch.expert in experts and mismatch.instead_of not in experts
        behind = max(values[i] for i in range(len(values)) if i not in experts) - min(values[i] for i in experts)
        assert mismatch.ratio == pytest.approx(behind / np.sqrt(0.5))


def test_where_every_expert_is_chosen_no_other_choice_is_near() -> None:
    assert (margins(np.ones((1, 1, 4), np.float32), np.ones((1, 1, 4), np.float32), 4) == np.inf).all()


def test_reported_routes_come_in_several_forms(published: Model) -> None:
    config, routes = published.config, own_routes(published)
    rows = len(routes) - 1
    sparse = config.sparse_layers
    assert sparse == (2, 3, 4)
    every = np.zeros((len(routes), config.num_hidden_layers, 2), np.int64)
    every[:, list(sparse)] = routes
    expected = tuple(tuple(map(tuple, of)) for of in routes[:rows].tolist())
    for form in (routes, routes[:rows], every, every.reshape(len(every), 1, -1), routes.reshape(len(routes), 1, -1)):
        assert fitted(as_tuples(form), rows, config) == expected
    assert from_key(as_key(routes, rows), config).tolist() == routes[:rows].tolist()
    untold = routes.copy()
    untold[3, 1] = OWN
    assert fitted(as_tuples(untold), rows, config)[3][1] == (OWN, OWN)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda routes: routes[:4], "routes: 4 positions, expected 17"),
        (lambda routes: routes[:, :2], r"routes\[0\]: 2 layers, expected the 3 sparse ones, or all"),
        (lambda routes: routes[:, :, :1], r"routes\[0\], layer 2: \[\d\], expected 2 different experts from 0 to 7"),
        (lambda routes: routes * 0 + 3, r"layer 2: \[3, 3\], expected 2 different"),
        (lambda routes: routes + 8, r"expected 2 different experts from 0 to 7"),
        (lambda routes: np.where(routes == routes[:, :, :1], OWN, routes), r"layer 2: \[-1, \d\]"),
    ],
)
def test_routes_that_can_not_be_are_refused_by_place(published: Model, change, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        fitted(as_tuples(change(own_routes(published))), len(PROMPT) + NEW - 1, published.config)
    request, answer = said(published)
    refused = fitting(request, replace(answer, routes=as_tuples(change(own_routes(published)))), published.config)
    assert refused.error is not None and refused.routes is None


def test_routes_are_read_from_json_and_a_dense_model_has_none() -> None:
    with pytest.raises(RequestError, match="no experts"):
        fitted((((0, 1),),), 1, lfm2np.load().config)
    answer = Answer((1, 2), routes=(((0, 3),), ((OWN, OWN),)))
    assert answer_from_json(answer_as_json(answer)) == answer
    for bad in ("x", [3], [[3]], [[[0.5]]], [[["a"]]], [[[-2]]]):
        with pytest.raises(RequestError, match="routes"):
            answer_from_json({"id": "a", "token_ids": [1, 2], "routes": bad})


def npy(array: np.ndarray) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, array)
        return base64.b64encode(buffer.getvalue()).decode()


def test_routes_in_responses_are_decoded() -> None:
    request, array = greedy("a", (1, 2), 2, case="c"), np.arange(18, dtype=np.int16).reshape(3, 3, 2)
    flat = base64.b64encode(array.astype("<i4").tobytes()).decode()

    def of_vllm(text: object) -> object:
        reply = {"choices": [{"token_ids": [5, 6], "text": "", "routed_experts": text}]}
        return VLLM.read(reply, request)["routes"]

    def of_sglang(text: object) -> object:
        return SGLANG.read({"output_ids": [5, 6], "meta_info": {"routed_experts": text}}, request)["routes"]

    assert of_vllm(npy(array)) == array.tolist()
    assert of_sglang(flat) == array.reshape(3, 1, 6).tolist()
    for bad in (5, "?", "AAAA", npy(array[0]), npy(array * 0.5), base64.b64encode(b"\x93NUMPY").decode()):
        with pytest.raises(RequestError, match=r"^choices\[0\]\.routed_experts .*: expected an \.npy file"):
            of_vllm(bad)
    for bad in (5, "AAA", flat[:-8], "AAAA"):
        with pytest.raises(RequestError, match=r"^meta_info\.routed_experts .*: expected int32"):
            of_sglang(bad)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=4, max_size=4), st.integers(1, 4))
def test_a_margin_is_the_gap_between_the_last_chosen_and_the_first_left(values: list[int], count: int) -> None:
    preferred, squares = np.array([[values]], np.float32), np.full((1, 1, 4), 2.0, np.float32)
    ((margin,),) = margins(preferred, squares, count)
    order = sorted(values, reverse=True)
    assert margin == (np.inf if count == 4 else pytest.approx((order[count - 1] - order[count]) / 2.0))
