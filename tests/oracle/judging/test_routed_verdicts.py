"""Verdicts on mixtures of experts: routes told and judged by themselves, or sought where none are told."""

import base64
import io
import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import inject
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoint import random_checkpoint
from safetensors.numpy import save_file

import lfm2np
from lfm2np.checkpoint.stored import widen
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.engine.loading import Model
from lfm2np.errors import RequestError
from lfm2np.oracle.causes.other_formats import MOST_FLIPS
from lfm2np.oracle.check import fitting
from lfm2np.oracle.engines.dialects import SGLANG, VLLM
from lfm2np.oracle.engines.records import Answer, Pair, greedy
from lfm2np.oracle.engines.records_json import answer_as_json, answer_from_json
from lfm2np.oracle.judging.emulate import emulated
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.near_ties import change, explanation, near_ties
from lfm2np.oracle.judging.noise import DRAWS, Noise, loosened, noise_of, spread_of
from lfm2np.oracle.judging.position import is_wrong
from lfm2np.oracle.judging.position import judged as positions_by
from lfm2np.oracle.judging.routes import OWN, as_key, difference, fitted, from_key, margins, routed, swapped
from lfm2np.oracle.judging.scored import Known, Scored, truths_of
from lfm2np.oracle.judging.verdict import LIMIT, WRONG, Position, Verdict, route_probability
from lfm2np.oracle.total import total
from lfm2np.truth import reference

# The noise is of this machine's float32; what is compared bit for bit is exact.
pytestmark = [pytest.mark.rounding, pytest.mark.slow]

# --- an engine that computes exactly, or in another arithmetic, and sends its tokens where it is told

TORTURE = Path(__file__).parents[3] / "fixtures" / "torture"
PROMPT = (3, 17, 5, 29, 11, 8, 40, 2, 19, 33, 6, 21)
NEW = 6


def said(model: Model, given: np.ndarray | None = None, tells: bool = True, numerics: Any = None) -> Pair:
    """What an engine says that computes exactly, or in another arithmetic, and sends its tokens where it is given."""
    request, answer = (
        said_by_the_right(model) if given is None and numerics is None else computed(model, given, numerics)
    )
    return request, answer if tells else replace(answer, routes=None)


@cache
def said_by_the_right(model: Model) -> Pair:
    return computed(model, None, None)


def computed(model: Model, given: np.ndarray | None, numerics: Any, prompt: tuple[int, ...] = PROMPT) -> Pair:
    ids = list(prompt)
    for _ in range(NEW):
        routes = None if given is None else given[: len(ids)]
        arithmetic, kept = routed(numerics or model.numerics, routes)
        states = reference.hidden_states(weights_under(model, numerics), model.config, arithmetic, ids)
        logits = reference.output_logits(weights_under(model, numerics), arithmetic, states)
        ids.append(int(np.argmax(logits[-1])))
    logprobs = arithmetic.log_softmax(logits)
    rows = range(len(prompt) - 1, len(ids) - 1)
    answer = Answer(
        token_ids=tuple(ids[len(prompt) :]),
        logprobs=tuple(float(logprobs[row, ids[row + 1]]) for row in rows),
        prompt_logprobs=tuple(float(logprobs[row, ids[row + 1]]) for row in range(len(prompt) - 1)),
        routes=tuple(tuple(map(tuple, of)) for of in kept.chosen().tolist()),
    )
    factors = {"length": len(prompt)}
    return greedy("a", prompt, NEW, case="short-prompts", prompt_logprobs=0, tags=factors), answer


@cache
def weights_under(model: Model, numerics: Any) -> Any:
    if numerics is None:
        return model.weights
    return prepare_weights(open_checkpoint(model.path, model.config), model.config, numerics)


def own_routes(model: Model) -> np.ndarray:
    """[T, L, K] of the exact network on its own answer."""
    _, answer = said(model)
    return np.array(answer.routes)


def with_swap(model: Model, row: int, layer: int, scores: np.ndarray) -> np.ndarray:
    """Its routes with one changed; behind it the network's own choice."""
    routes = own_routes(model)
    routes[row, layer] = swapped(scores, routes[row, layer])
    routes[row, layer + 1 :] = OWN
    routes[row + 1 :] = OWN
    return routes


def judged(model: Model, pair: Pair, name: str = "float32") -> tuple[list[Position], Verdict]:
    request, answer = pair
    checked = fitting(request, answer, model.config)
    assert checked.error is None
    known = Known()
    positions = judge(model, name, [(request, checked)], known=known)
    return positions, total(model, name, [(request, checked)], positions, known=known).verdict


def ties(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Of the exact network's own answer the margins [T, L] under float32, and the scores [T, L, N]."""
    request, answer = said(model)
    known = Known()
    judge(model, "float32", [(request, replace(answer, routes=None))], known=known)
    ((spoken, truth),) = known.truths.items()
    squares = known.noises["float32", spoken].squares
    assert truth.preferred is not None and squares is not None and model.config.mixture is not None
    return margins(truth.preferred, squares, model.config.mixture.num_experts_per_tok), truth.preferred


def as_tuples(routes: np.ndarray) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(map(tuple, of)) for of in routes.tolist())


# --- verdicts


@pytest.fixture(scope="module")
def near() -> Model:
    """12 experts, 3 a token, whose gates are all but equal in pairs."""
    return lfm2np.load(TORTURE / "moe_near_ties")


def test_the_exact_engine_is_exact_whether_it_reports_its_routes_or_not(published: Model) -> None:
    for name, tells in itertools.product(("float32", "bfloat16"), (True, False)):
        positions, verdict = judged(published, said(published, tells=tells), name)
        assert verdict is Verdict.EXACT
        assert {position.verdict for position in positions} == {Verdict.EXACT}
        assert len(positions) == len(PROMPT) - 1 + NEW


def test_a_prompt_without_reported_logprobs_is_judged_by_its_routes(published: Model) -> None:
    request, answer = said(published)
    positions, _ = judged(published, (request, replace(answer, prompt_logprobs=None)))
    assert [position.verdict for position in positions] == [Verdict.EXACT] * (len(PROMPT) - 1 + NEW)
    far, scores = ties(published)
    row, layer = np.unravel_index(np.argmax(far[:8]), far[:8].shape)
    pair = said(published, with_swap(published, int(row), int(layer), scores[row, layer]))
    positions, verdict = judged(published, (pair[0], replace(pair[1], prompt_logprobs=None)))
    assert verdict is Verdict.BUG
    assert [position.row for position in positions if position.verdict is Verdict.BUG] == [row]


def test_a_near_tie_is_a_route_and_nothing_else_reported_or_not(near: Model) -> None:
    """The engine sends one token elsewhere at a near tie, and computes exactly with that."""
    gaps, scores = ties(near)
    row, layer = map(int, np.unravel_index(np.argmin(gaps), gaps.shape))
    assert gaps[row, layer] < LIMIT
    given = with_swap(near, row, layer, scores[row, layer])
    positions, verdict = judged(near, said(near, given))
    assert verdict is Verdict.ROUTE
    changed = [position for position in positions if position.verdict is Verdict.ROUTE]
    assert [position.row for position in changed] == [row]
    assert changed[0].route is not None and changed[0].route.layer == near.config.sparse_layers[layer]


def test_an_error_that_one_near_tie_explains_is_a_route_in_float32(published: Model, tmp_path: Path) -> None:
    """The gate is bent so that a token stands a hair from a tie whose other side changes what it says."""
    model = with_a_tie(published, tmp_path)
    gaps, scores = ties(model)
    row, layer = map(int, np.unravel_index(np.argmin(gaps), gaps.shape))
    assert gaps[row, layer] < LIMIT
    given = with_swap(model, row, layer, scores[row, layer])
    pair = said(model, given, tells=False)
    assert pair[1] != said(model, tells=False)[1], "the control: the other side of the tie says something else"
    positions, verdict = judged(model, pair)
    assert verdict is Verdict.ROUTE
    routes = [position.route for position in positions if position.verdict is Verdict.ROUTE]
    assert len(routes) == 1 and routes[0] is not None
    taken = set(given[row, layer]) - set(own_routes(model)[row, layer])
    assert (routes[0].layer, {routes[0].expert}) == (model.config.sparse_layers[layer], taken)
    assert all(position.verdict is Verdict.EXACT for position in positions if position.row < row)
    assert not is_wrong(judge(model, "float32", [pair], draws=DRAWS)), "by the better estimate, too"
    assert is_wrong(judge(model, "float32", [pair], draws=DRAWS, explains=False))


def with_a_tie(model: Model, folder: Path) -> Model:
    """The model with a bias under which the last token chosen at one position and layer is tied with the first left."""
    _, scores = ties(model)
    row, layer = 6, 1
    mixture = model.config.mixture
    assert mixture is not None
    order = np.argsort(-scores[row, layer], kind="stable")
    last, first = order[mixture.num_experts_per_tok - 1], order[mixture.num_experts_per_tok]
    number = model.config.sparse_layers[layer]
    name = f"model.layers.{number}.feed_forward.expert_bias"
    bias = widen(open_checkpoint(model.path, model.config)[name].values, "F32")
    bias[first] += np.float32(scores[row, layer, last] - scores[row, layer, first]) - np.float32(6e-8)
    (folder / "config.json").write_bytes((model.path / "config.json").read_bytes())
    tensors = {name: widen(each.values, each.dtype) for name, each in open_checkpoint(model.path, model.config).items()}
    save_file({**tensors, name: bias}, folder / "model.safetensors")
    return lfm2np.load(folder)


def test_a_near_tie_explains_in_bfloat16_what_no_emulated_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right vLLM's, whose roundings none of them has."""
    model = lfm2np.load(TORTURE.parent / "moe")
    pair = said_after(model, (471, 97, 332), [(2, 1)])
    positions, verdict = judged(model, pair, "bfloat16")
    assert verdict not in WRONG and any(position.is_rerouted for position in positions)
    assert all(position.route_chance > 0.01 for position in positions if position.route is not None)
    monkeypatch.setattr("lfm2np.oracle.judging.near_ties.MOST_REROUTED", 0)
    assert judged(model, pair, "bfloat16")[1] in WRONG, "the control"


def test_copies_of_an_explained_answer_are_right_only_if_they_say_the_same() -> None:
    model = lfm2np.load(TORTURE.parent / "moe")
    request, answer = said_after(model, (471, 97, 332), [(2, 1)])
    first, *others = answer.logprobs or ()
    wrong = replace(answer, logprobs=(first - 5.0, *others))  # at the row that the near tie explains
    pairs = [
        (replace(request, request_id=name), each) for name, each in zip("abc", (answer, answer, wrong), strict=True)
    ]
    positions = judge(model, "bfloat16", pairs)
    assert {position.request.request_id for position in positions if position.is_wrong} == {"c"}


def test_behind_a_near_tie_stands_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first alone leaves the row wrong, though less so; a right vLLM's, too."""
    model, known = lfm2np.load(TORTURE.parent / "moe"), Known()
    pair = said_after(model, (1, 65), [(1, 1), (1, 2)])
    (truth,) = truths_of(model, [pair], known).values()
    scored = Scored(truth, *noise_of(model, [truth], "bfloat16"))
    tried = model, "bfloat16", pair, scored, positions_by(*pair, scored, 8, model.config.sparse_layers), known
    found = explanation(*tried)
    assert found is not None and [change.layer for change in found.changes.values()] == [4]
    eased = explanation(*tried, least=3.0)
    assert eased is not None and eased.scored.loose is not None
    assert eased.scored.loose.spread.min() == 3.0, "also where the changed routes' own noise is less"
    monkeypatch.setattr("lfm2np.oracle.judging.near_ties.MOST_CHANGES", 1)
    assert explanation(*tried) is None


def said_after(model: Model, prompt: tuple[int, ...], swaps: list[tuple[int, int]]) -> Pair:
    """What the exact network says whose routes are changed at these rows and layers, one after another."""
    given = np.full((len(prompt) + NEW, len(model.config.sparse_layers), 2), OWN)
    for row, layer in swaps:
        arithmetic, kept = routed(model.numerics, given[: len(prompt)])
        reference.hidden_states(model.weights, model.config, arithmetic, prompt)
        given[: row + 1] = kept.chosen()[: row + 1]
        given[row, layer] = swapped(kept.preferred()[row, layer], given[row, layer])
        given[row, layer + 1 :] = OWN
    request, answer = computed(model, given, None, prompt)
    return request, replace(answer, routes=None)


def test_a_route_far_from_a_tie_is_a_bug_reported_or_not(published: Model) -> None:
    gaps, scores = ties(published)
    row, layer = map(int, np.unravel_index(np.argmax(gaps), gaps.shape))
    given = with_swap(published, row, layer, scores[row, layer])
    pair = said(published, given)
    for answer in (pair[1], replace(pair[1], routes=None)):
        known = Known()
        checked = (pair[0], fitting(pair[0], answer, published.config))
        positions = judge(published, "float32", [checked], known=known)
        judgement = total(published, "float32", [checked], positions, known=known)
        assert judgement.verdict in WRONG, "of one request alone float16 may err so, if it tells no routes"
        if answer.routes is not None:
            assert judgement.verdict is Verdict.BUG
            assert f"in layer {published.config.sparse_layers[layer]} one to expert" in judgement.reasons[1]


@pytest.mark.parametrize("tells", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_emulated_engines_are_not_called_wrong(published: Model, near: Model, name: str, tells: bool) -> None:
    for model, draw in itertools.product((published, near), (20, 21)):
        positions, verdict = judged(model, said(model, tells=tells, numerics=emulated(name, 1, draw)), name)
        assert verdict not in (Verdict.BUG, Verdict.DRIFT), [
            position for position in positions if position.verdict is Verdict.BUG
        ]


def test_a_mixture_without_a_sparse_layer_is_judged_as_a_dense_model(tmp_path: Path) -> None:
    """num_dense_layers may be that of all layers: right answers are right, and wrong ones found."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "num_dense_layers": 2}
    layers = {"layer_types": ["conv", "full_attention"], "max_position_embeddings": 64, "eos_token_id": None}
    random_checkpoint(tmp_path / "dense", {"model_type": "lfm2_moe", **sizes, **heads, **layers})
    model = lfm2np.load(tmp_path / "dense")
    assert model.config.mixture is not None and model.config.sparse_layers == ()
    prompt = tuple(token % 40 for token in PROMPT)
    tokens = tuple(model.generate(prompt, NEW).token_ids)
    scores = tuple(one.logprob for one in model.score([*prompt, *tokens])[len(prompt) - 1 :])
    request = greedy("a", prompt, NEW, case="short-prompts", tags={"length": len(prompt)})
    for name in ("float32", "bfloat16"):
        right = judge(model, name, [(request, Answer(tokens, scores))])
        assert {position.verdict for position in right} == {Verdict.EXACT}
        wrong = judge(model, name, [(request, Answer(tokens, tuple(score - 1.0 for score in scores)))])
        assert {position.verdict for position in wrong} == {Verdict.DRIFT}


def test_the_loose_noise_is_that_of_all_rows_whether_prompts_are_reported_or_not(published: Model) -> None:
    """Else prompts whose tokens went elsewhere would count as errors of 0, and right engines be wrong."""
    request, answer = said(published, tells=False)
    spreads = []
    for reply in (answer, replace(answer, prompt_logprobs=None)):
        known = Known()
        judge(published, "float16", [(request, reply)], known=known)
        (noise,) = known.loose.values()
        spreads.append(noise.spread)
        (truth,) = known.truths.values()
        assert truth.known_rows.tolist() == list(range(len(truth.best)))
    assert np.array_equal(*spreads)


def test_too_many_tokens_elsewhere_are_a_bug_though_each_may_be(published: Model) -> None:
    positions, _ = judged(published, said(published))
    rare = [replace(position, is_rerouted=True, route_chance=0.01) for position in positions]
    count, chance = route_probability(rare)
    assert count == len(positions) and chance < 1e-9
    pair = said(published)
    assert total(published, "float32", [pair], rare).verdict is Verdict.BUG
    assert route_probability(positions) == (0, 1.0)


def test_only_near_ties_are_tried_the_nearest_first_and_behind_the_last_change() -> None:
    gaps = np.full((9, 3), LIMIT + 0.1)
    gaps[1, 2], gaps[4, 0], gaps[4, 1], gaps[7, 0] = 3.0, LIMIT, 0.5, 0.1
    assert near_ties(gaps, 6) == [(4, 1), (1, 2), (4, 0)]
    assert near_ties(gaps, 7, first=4) == [(7, 0), (4, 1), (4, 0)]


def test_a_loose_spread_is_at_least_that_of_all_rerouted_tokens() -> None:
    """Two engines, three tokens: one of them went elsewhere in one engine, and erred by 3 there, to either side."""
    errors = np.zeros((2, 3, 4), np.float32)
    errors[1, 0] = [3.0, -3.0, 3.0, -3.0]
    rerouted = np.zeros((2, 3), bool)
    rerouted[1, 0] = True
    quiet = Noise((0, 7), np.zeros((2, 1, 4), np.float32), np.array([5.0]), rerouted=np.zeros((2, 1), bool))
    first, second = loosened([Noise((0, 7), errors, spread_of(errors), rerouted=rerouted), quiet])
    assert first.spread.tolist() == [3.0, 3.0, 3.0] and second.spread.tolist() == [5.0]
    assert loosened([quiet])[0].spread.tolist() == [5.0]


def test_a_change_keeps_the_routes_before_it_and_leaves_those_behind_it_free(published: Model) -> None:
    """Those before it may be changed ones themselves."""
    routes = own_routes(published)
    routes[2, 1] = routes[2, 1, ::-1]
    request, answer = said(published)
    pair = request, fitting(request, replace(answer, routes=as_tuples(routes)), published.config)
    (truth,) = truths_of(published, [pair], Known()).values()
    route, changed = change(truth, 5, 1, 3, 0.0)
    assert truth.routes is not None
    assert changed[:5].tolist() == truth.routes[:5].tolist() == routes[:5].tolist()
    assert changed[5, 0].tolist() == truth.routes[5, 0].tolist()
    assert set(changed[5, 1]) - set(truth.routes[5, 1]) == {route.expert}
    assert set(truth.routes[5, 1]) - set(changed[5, 1]) == {route.instead_of}
    assert (changed[5, 2:] == OWN).all() and (changed[6:] == OWN).all()


def test_a_format_that_would_flip_most_tokens_explains_nothing(near: Model) -> None:
    """Under int4 hardly a token of this model would be the oracle's: that it errs like int4 may be said of anything."""
    with inject("experts-in-the-order-of-their-names"):
        pair = said(lfm2np.load(near.path))
    positions, verdict = judged(near, pair)
    assert verdict is Verdict.BUG
    request, answer = pair
    worst = max(positions, key=lambda position: abs(position.error_ratio or 0.0))
    assert worst.error is not None and abs(worst.error) > 1.0
    under = judge(near, "int4", [(request, fitting(request, answer, near.config))])
    chances = [position.flip_chance for position in under if position.flip_chance is not None]
    assert np.mean(chances) > MOST_FLIPS


# --- routes forced, compared, told in several forms


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
    assert states[:5].tobytes() == expected[:5].tobytes(), "what is before the edit can't know of it"
    assert states[5].tobytes() != expected[5].tobytes()


integers = st.lists(st.integers(0, 6), min_size=3, max_size=6)


@settings(max_examples=100, deadline=None)
@given(integers, st.data())
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
    ("edit", "words"),
    [
        (lambda routes: routes[:4], "routes: 4 positions, expected 17"),
        (lambda routes: routes[:, :2], r"routes\[0\]: 2 layers, expected the 3 sparse ones, or all"),
        (lambda routes: routes[:, :, :1], r"routes\[0\], layer 2: \[\d\], expected 2 different experts from 0 to 7"),
        (lambda routes: routes * 0 + 3, r"layer 2: \[3, 3\], expected 2 different"),
        (lambda routes: routes + 8, r"expected 2 different experts from 0 to 7"),
        (lambda routes: np.where(routes == routes[:, :, :1], OWN, routes), r"layer 2: \[-1, \d\]"),
    ],
)
def test_routes_that_can_not_be_are_refused_by_place(published: Model, edit, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        fitted(as_tuples(edit(own_routes(published))), len(PROMPT) + NEW - 1, published.config)
    request, answer = said(published)
    refused = fitting(request, replace(answer, routes=as_tuples(edit(own_routes(published)))), published.config)
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
