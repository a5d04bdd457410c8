"""Routes of a mixture of experts: told by the engine and judged by themselves, or sought where it tells none."""

import base64
import io
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import lfm2np
from lfm2np import reference
from lfm2np.bench.random_checkpoint import random_checkpoint
from lfm2np.checkpoint.config import load_config
from lfm2np.checkpoint.stored import widen
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.errors import RequestError
from lfm2np.loading import Model
from lfm2np.oracle.check import fitting
from lfm2np.oracle.emulate import emulated
from lfm2np.oracle.judge import Known, Pair, Scored, change, judge, near_ties, truths_of
from lfm2np.oracle.noise import Noise, loosened, spread_of
from lfm2np.oracle.routes import OWN, as_key, difference, fitted, from_key, margins, routed, swapped
from lfm2np.oracle.targets.http_dialects import read_sglang, read_vllm
from lfm2np.oracle.targets.records import Answer, Ask, answer_as_json, answer_from_json
from lfm2np.oracle.targets.told_routes import from_int32, from_npy
from lfm2np.oracle.total import total
from lfm2np.oracle.verdict import LIMIT, WRONG, Position, Verdict, route_probability, so_many_or_more

TORTURE = Path(__file__).parents[2] / "fixtures" / "torture"
pytestmark = pytest.mark.rounding  # the noise is of this machine's float32; what is compared bit for bit is exact
PROMPT = (3, 17, 5, 29, 11, 8, 40, 2, 19, 33, 6, 21)
NEW = 6


@pytest.fixture(scope="module")
def published() -> Model:
    """8 experts, 2 a token, in three of five layers."""
    return lfm2np.load(TORTURE / "moe_published")


@pytest.fixture(scope="module")
def near() -> Model:
    """12 experts, 3 a token, whose gates are all but equal in pairs."""
    return lfm2np.load(TORTURE / "moe_near_ties")


def said(model: Model, given: np.ndarray | None = None, tells: bool = True, numerics: object = None) -> Pair:
    """What an engine says that computes exactly, or in another arithmetic, and sends its tokens where it is given."""
    ids = list(PROMPT)
    for _ in range(NEW):
        own = None if given is None else given[: len(ids)]
        arithmetic, kept = routed(numerics or model.numerics, own)  # type: ignore[arg-type]
        states = reference.hidden_states(weights_under(model, numerics), model.config, arithmetic, ids)
        logits = reference.output_logits(weights_under(model, numerics), arithmetic, states)
        ids.append(int(np.argmax(logits[-1])))
    logprobs = arithmetic.log_softmax(logits)
    rows = range(len(PROMPT) - 1, len(ids) - 1)
    answer = Answer(
        "a",
        token_ids=tuple(ids[len(PROMPT) :]),
        logprobs=tuple(float(logprobs[row, ids[row + 1]]) for row in rows),
        prompt_logprobs=tuple(float(logprobs[row, ids[row + 1]]) for row in range(len(PROMPT) - 1)),
        routes=tuple(tuple(map(tuple, of)) for of in kept.chosen().tolist()) if tells else None,
    )
    factors = {"length": len(PROMPT)}
    return Ask("a", "short-prompts", PROMPT, NEW, prompt_logprobs=True, factors=factors), answer


def weights_under(model: Model, numerics: object) -> object:
    return model.weights if numerics is None else _weights(model.path, id(numerics), numerics)


_kept: dict[tuple[Path, int], object] = {}


def _weights(path: Path, key: int, numerics: object) -> object:
    if (path, key) not in _kept:
        config = load_config(path)
        _kept[path, key] = prepare_weights(open_checkpoint(path, config), config, numerics)  # type: ignore[arg-type]
    return _kept[path, key]


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
    ask, answer = pair
    checked = fitting(ask, answer, model.config)
    assert checked.error is None
    known = Known()
    positions = judge(model, name, [(ask, checked)], known=known)
    return positions, total(model, name, [(ask, checked)], positions, known=known).verdict


def ties(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Of the exact network's own answer the margins [T, L] under float32, and the scores [T, L, N]."""
    ask, answer = said(model)
    known = Known()
    judge(model, "float32", [(ask, replace(answer, routes=None))], known=known)
    ((spoken, truth),) = known.truths.items()
    squares = known.noises["float32", spoken].squares
    assert truth.preferred is not None and squares is not None and model.config.mixture is not None
    return margins(truth.preferred, squares, model.config.mixture.num_experts_per_tok), truth.preferred


def test_routes_given_are_taken_and_others_are_its_own(published: Model) -> None:
    ids = list(PROMPT)
    plain, kept = routed(published.numerics)
    expected = reference.hidden_states(published.weights, published.config, plain, ids)
    assert kept.chosen().shape == (len(ids), 3, 2) and kept.preferred().shape == (len(ids), 3, 8)
    for told in (kept.chosen(), kept.chosen()[:, :, ::-1], np.full_like(kept.chosen(), OWN)):
        numerics, again = routed(published.numerics, told)
        found = reference.hidden_states(published.weights, published.config, numerics, ids)
        if told[0, 0, 0] in (OWN, kept.chosen()[0, 0, 0]):
            assert found.tobytes() == expected.tobytes()
        assert again.preferred().tobytes() == kept.preferred().tobytes() or told[0, 0, 0] != OWN
    other = kept.chosen().copy()
    other[5, 1] = swapped(kept.preferred()[5, 1], other[5, 1])
    numerics, again = routed(published.numerics, other)
    found = reference.hidden_states(published.weights, published.config, numerics, ids)
    assert again.chosen().tolist() == other.tolist()
    assert found[:5].tobytes() == expected[:5].tobytes(), "what is before the change can't know of it"
    assert found[5].tobytes() != expected[5].tobytes()


scores = st.lists(st.integers(0, 6), min_size=3, max_size=6)


@settings(max_examples=200, deadline=None)
@given(scores, st.data())
def test_a_difference_is_seen_exactly_where_another_choice_was_better(values: list[int], data: st.DataObject) -> None:
    """By all subsets: a choice is right if it is the K with the largest (score, lowest id)."""
    count = data.draw(st.integers(1, len(values)))
    told = data.draw(st.permutations(range(len(values))))[:count]
    preferred = np.array([values], np.float32)
    squares = np.full_like(preferred, 0.25)
    right = max(
        itertools.combinations(range(len(values)), count), key=lambda s: sorted((values[i], -i) for i in s)[::-1]
    )
    found = difference(preferred, np.array([told]), squares, [7])
    if set(told) == set(right):
        assert found is None
    else:
        assert found is not None and found.layer == 7
        assert found.expert in told and found.instead_of not in told
        behind = max(values[i] for i in range(len(values)) if i not in told) - min(values[i] for i in told)
        assert found.ratio == pytest.approx(behind / np.sqrt(0.5))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=4, max_size=4), st.integers(1, 4))
def test_a_margin_is_the_gap_between_the_last_chosen_and_the_first_left(values: list[int], count: int) -> None:
    preferred, squares = np.array([[values]], np.float32), np.full((1, 1, 4), 2.0, np.float32)
    ((found,),) = margins(preferred, squares, count)
    order = sorted(values, reverse=True)
    assert found == (np.inf if count == 4 else pytest.approx((order[count - 1] - order[count]) / 2.0))


def test_told_routes_come_in_several_forms(published: Model) -> None:
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


def as_tuples(routes: np.ndarray) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(map(tuple, of)) for of in routes.tolist())


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
    ask, answer = said(published)
    refused = fitting(ask, replace(answer, routes=as_tuples(change(own_routes(published)))), published.config)
    assert refused.error is not None and refused.routes is None


def test_a_dense_model_has_no_routes() -> None:
    with pytest.raises(RequestError, match="no experts"):
        fitted((((0, 1),),), 1, lfm2np.load().config)


def test_routes_are_read_from_json() -> None:
    answer = Answer("a", (1, 2), routes=(((0, 3),), ((OWN, OWN),)))
    assert answer_from_json(answer_as_json(answer)) == answer
    for bad in ("x", [3], [[3]], [[[0.5]]], [[["a"]]], [[[-2]]]):
        with pytest.raises(RequestError, match="routes"):
            answer_from_json({"id": "a", "token_ids": [1, 2], "routes": bad})


def npy(array: np.ndarray) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, array)
        return base64.b64encode(buffer.getvalue()).decode()


def test_what_servers_tell_is_decoded() -> None:
    array = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    assert from_npy(npy(array), "x") == array.tolist()
    flat = base64.b64encode(array.astype("<i4").tobytes()).decode()
    assert from_int32(flat, 4, "x") == array.reshape(4, 1, 6).tolist()
    for bad in (5, "?", "AAAA", npy(array[0]), npy(array * 0.5), base64.b64encode(b"\x93NUMPY").decode()):
        with pytest.raises(RequestError, match=r"^x: "):
            from_npy(bad, "x")
    for bad, positions in ((None, 4), ("AAA", 4), (flat, 5), (flat, 0)):
        with pytest.raises(RequestError, match=r"^x: "):
            from_int32(bad, positions, "x")


def test_the_dialects_hand_them_on() -> None:
    ask, array = Ask("a", "c", (1, 2), 2), np.arange(18, dtype=np.int16).reshape(3, 3, 2)
    vllm = {"choices": [{"token_ids": [5, 6], "text": "", "routed_experts": npy(array)}]}
    assert read_vllm(vllm, ask).fields["routes"] == array.tolist()
    flat = base64.b64encode(array.astype("<i4").tobytes()).decode()
    sglang = {"output_ids": [5, 6], "meta_info": {"routed_experts": flat}}
    assert read_sglang(sglang, ask).fields["routes"] == array.reshape(3, 1, 6).tolist()


def test_the_exact_engine_is_exact_whether_it_tells_its_routes_or_not(published: Model) -> None:
    for name, tells in itertools.product(("float32", "bfloat16"), (True, False)):
        positions, verdict = judged(published, said(published, tells=tells), name)
        assert verdict is Verdict.EXACT
        assert {one.verdict for one in positions} == {Verdict.EXACT}
        assert len(positions) == len(PROMPT) - 1 + NEW


def test_a_prompt_whose_logprobs_are_not_told_is_judged_by_its_routes(published: Model) -> None:
    ask, answer = said(published)
    positions, _ = judged(published, (ask, replace(answer, prompt_logprobs=None)))
    assert [one.verdict for one in positions] == [Verdict.EXACT] * (len(PROMPT) - 1 + NEW)
    far, scores = ties(published)
    row, layer = np.unravel_index(np.argmax(far[:8]), far[:8].shape)
    pair = said(published, with_swap(published, int(row), int(layer), scores[row, layer]))
    positions, verdict = judged(published, (pair[0], replace(pair[1], prompt_logprobs=None)))
    assert verdict is Verdict.BUG
    assert [one.row for one in positions if one.verdict is Verdict.BUG] == [row]


def test_a_near_tie_is_a_route_and_nothing_else_told_or_not(near: Model) -> None:
    """The engine sends one token elsewhere at a near tie, and computes exactly with that."""
    gaps, scores = ties(near)
    row, layer = map(int, np.unravel_index(np.argmin(gaps), gaps.shape))
    assert gaps[row, layer] < LIMIT
    given = with_swap(near, row, layer, scores[row, layer])
    positions, verdict = judged(near, said(near, given))
    assert verdict is Verdict.ROUTE
    changed = [one for one in positions if one.verdict is Verdict.ROUTE]
    assert [one.row for one in changed] == [row]
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
    routes = [one.route for one in positions if one.verdict is Verdict.ROUTE]
    assert len(routes) == 1 and routes[0] is not None
    taken = set(given[row, layer]) - set(own_routes(model)[row, layer])
    assert (routes[0].layer, {routes[0].expert}) == (model.config.sparse_layers[layer], taken)
    assert all(one.verdict is Verdict.EXACT for one in positions if one.row < row)


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
    save_file({**load_all(model), name: bias}, folder / "model.safetensors")
    return lfm2np.load(folder)


def load_all(model: Model) -> dict[str, np.ndarray]:
    """All tensors, as float32."""
    return {name: widen(one.values, one.dtype) for name, one in open_checkpoint(model.path, model.config).items()}


def test_a_route_far_from_a_tie_is_a_bug_told_or_not(published: Model) -> None:
    gaps, scores = ties(published)
    row, layer = map(int, np.unravel_index(np.argmax(gaps), gaps.shape))
    given = with_swap(published, row, layer, scores[row, layer])
    pair = said(published, given)
    for answer in (pair[1], replace(pair[1], routes=None)):
        known = Known()
        checked = (pair[0], fitting(pair[0], answer, published.config))
        positions = judge(published, "float32", [checked], known=known)
        found = total(published, "float32", [checked], positions, known=known)
        assert found.verdict in WRONG, "of one request alone float16 may err so, if it tells no routes"
        if answer.routes is not None:
            assert found.verdict is Verdict.BUG
            assert f"in layer {published.config.sparse_layers[layer]} one to expert" in found.reasons[0]


@pytest.mark.parametrize("tells", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_engines_that_could_be_are_not_called_wrong(published: Model, near: Model, name: str, tells: bool) -> None:
    for model, draw in itertools.product((published, near), (20, 21, 22)):
        positions, verdict = judged(model, said(model, tells=tells, numerics=emulated(name, 1, draw)), name)
        assert verdict not in (Verdict.BUG, Verdict.DRIFT), [one for one in positions if one.verdict is Verdict.BUG]


def test_truths_of_the_same_tokens_by_other_routes_are_others(published: Model) -> None:
    ask, answer = said(published)
    other = replace(answer, routes=as_tuples(own_routes(published)[:, :, ::-1]), id="b")
    swapped_routes = own_routes(published)
    swapped_routes[2, 0] = swapped(np.arange(8.0), swapped_routes[2, 0])
    third = replace(answer, routes=as_tuples(swapped_routes))
    pairs = [(ask, fitting(ask, one, published.config)) for one in (answer, other, third, replace(answer, routes=None))]
    truths = truths_of(published, pairs, Known())
    assert len(truths) == 4
    untold, first, same, changed = truths.values()  # those without routes share truths, so they come first
    assert first.logprobs.tobytes() == untold.logprobs.tobytes()
    assert changed.logprobs[:2].tobytes() == first.logprobs[:2].tobytes()
    assert changed.logprobs[2:].tobytes() != first.logprobs[2:].tobytes()
    assert same.routes is not None and first.routes is not None


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
    ask = Ask("a", "short-prompts", prompt, NEW, factors={"length": len(prompt)})
    for name in ("float32", "bfloat16"):
        right = judge(model, name, [(ask, Answer("a", tokens, scores))])
        assert {one.verdict for one in right} == {Verdict.EXACT}
        wrong = judge(model, name, [(ask, Answer("a", tokens, tuple(score - 1.0 for score in scores)))])
        assert {one.verdict for one in wrong} == {Verdict.DRIFT}


def test_only_near_ties_are_tried_the_nearest_first_and_behind_the_last_change(published: Model) -> None:
    (truth,) = truths_of(published, [said(published, tells=False)], Known()).values()
    gaps = np.full((len(truth.best), 3), LIMIT + 0.1)
    gaps[1, 2], gaps[4, 0], gaps[4, 1], gaps[7, 0] = 3.0, LIMIT, 0.5, 0.1
    noise = Noise(np.zeros((1, len(gaps), 1), np.float32), np.zeros(len(gaps)))
    scored = Scored(truth, noise, margins=gaps)
    assert near_ties(scored, 6) == [(4, 1), (1, 2), (4, 0)]
    assert near_ties(scored, 7, first=4) == [(7, 0), (4, 1), (4, 0)]


def test_a_change_keeps_the_routes_before_it_and_leaves_those_behind_it_free(published: Model) -> None:
    """Those before it may be changed ones themselves."""
    routes = own_routes(published)
    routes[2, 1] = routes[2, 1, ::-1]
    ask, answer = said(published)
    pair = ask, fitting(ask, replace(answer, routes=as_tuples(routes)), published.config)
    (truth,) = truths_of(published, [pair], Known()).values()
    gaps = np.zeros((len(truth.best), 3))
    noise = Noise(np.zeros((1, len(gaps), 1), np.float32), np.zeros(len(gaps)))
    route, key = change(Scored(truth, noise, margins=gaps), 5, 1, 3)
    told = from_key(key, published.config)
    assert told is not None and truth.routes is not None
    assert told[:5].tolist() == truth.routes[:5].tolist() == routes[:5].tolist()
    assert told[5, 0].tolist() == truth.routes[5, 0].tolist()
    assert set(told[5, 1]) - set(truth.routes[5, 1]) == {route.expert}
    assert set(truth.routes[5, 1]) - set(told[5, 1]) == {route.instead_of}
    assert (told[5, 2:] == OWN).all() and (told[6:] == OWN).all()


def test_a_loose_spread_is_at_least_that_of_all_rerouted_tokens() -> None:
    """Two engines, three tokens: one of them went elsewhere in one engine, and erred by 3 there, to either side."""
    errors = np.zeros((2, 3, 4), np.float32)
    errors[1, 0] = [3.0, -3.0, 3.0, -3.0]
    rerouted = np.zeros((2, 3), bool)
    rerouted[1, 0] = True
    quiet = Noise(np.zeros((2, 1, 4), np.float32), np.array([5.0]), rerouted=np.zeros((2, 1), bool))
    first, second = loosened([Noise(errors, spread_of(errors), rerouted=rerouted), quiet])
    assert first.spread.tolist() == [3.0, 3.0, 3.0] and second.spread.tolist() == [5.0]
    assert loosened([quiet])[0].spread.tolist() == [5.0]


def test_too_many_tokens_elsewhere_are_a_bug_though_each_may_be(published: Model) -> None:
    positions, _ = judged(published, said(published))
    rare = [replace(one, is_rerouted=True, route_chance=0.01) for one in positions]
    count, chance = route_probability(rare)
    assert count == len(positions) and chance < 1e-9
    pair = said(published)
    assert total(published, "float32", [pair], rare).verdict is Verdict.BUG
    assert route_probability(positions) == (0, 1.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), max_size=7), st.integers(0, 8))
def test_so_many_or_more_is_the_sum_over_all_outcomes(chances: list[float], count: int) -> None:
    expected = 0.0
    for outcome in itertools.product((0, 1), repeat=len(chances)):
        if sum(outcome) >= count:
            expected += float(np.prod([c if o else 1 - c for c, o in zip(chances, outcome, strict=True)]))
    assert so_many_or_more(count, chances) == pytest.approx(expected)
