"""Rollouts judged: committed files of transformers with planted errors, and made ones whose truth is known."""

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lfm2np
from lfm2np.arithmetic.ieee import round_to_bfloat16
from lfm2np.commands.cli.shared.work import WORKS
from lfm2np.engine.sampling import choice
from lfm2np.engine.sampling.params import PROFILES, SamplingParams
from lfm2np.engine.work.place import Place
from lfm2np.engine.work.results_file import ResultsFile, merged, spot_check
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.judging.views import processed, viewed
from lfm2np.oracle.report.as_html import as_html
from lfm2np.oracle.report.as_text import as_text
from lfm2np.oracle.report.report import OPEN, WRONG
from lfm2np.oracle.rollouts import variants
from lfm2np.oracle.rollouts.exact import AS_IT_IS, Fit, item_of, scores_of, views_from
from lfm2np.oracle.rollouts.hypotheses import packed_before, route_hypotheses, seen_hypotheses
from lfm2np.oracle.rollouts.judge import Judge, Options, judge_rollouts
from lfm2np.oracle.rollouts.reading import Left, read_rollouts
from lfm2np.oracle.rollouts.report import figures_of, report_of, verdict_of
from lfm2np.oracle.rollouts.rollout import Rollout
from lfm2np.oracle.rollouts.where import in_words

pytestmark = pytest.mark.slow

CAUSES = {
    "planted_pack.jsonl": "state leaks in a pack (convolution)",
    "planted_chunk.jsonl": "state lost at a chunk border (convolution, every 64 tokens)",
    "planted_head.jsonl": "head precision (logits in bfloat16, and the head's inputs)",
}
FEW = Options(cause_tokens=200)


def read(name, model):
    path = lfm2np.trained_fixture().parent / "rollouts" / name
    return read_rollouts(path.read_text(encoding="utf-8"), str(path), model.config)[0]


@pytest.fixture(scope="module")
def exact_rollouts(model):
    """Three rollouts whose sampler and trainer both report the exact values."""
    rng = np.random.default_rng(7)
    rollouts = [
        Rollout(str(index), tuple(rng.integers(8, 512, 20).tolist()), tuple(rng.integers(8, 512, 12).tolist()))
        for index in range(3)
    ]
    return exact(model, rollouts, "raw")


def exact(model, rollouts, reading):
    """With the exact values of a reading as both sides' reports."""
    scores, failed = scores_of(model, rollouts, readings=[reading])
    assert not failed
    values = [tuple(each.views[reading].logprobs.tolist()) for each in scores]
    return [replace(r, sampler_logprobs=v, trainer_logprobs=v) for r, v in zip(rollouts, values, strict=True)]


SLOW = [pytest.param(name, 8, 600, marks=pytest.mark.night) for name in CAUSES if name != "planted_head.jsonl"]


@pytest.mark.parametrize(("name", "count", "cause_tokens"), [("planted_head.jsonl", 2, 150), *SLOW])
@pytest.mark.rounding
def test_a_planted_error_is_named(name, count, cause_tokens, model):
    judged = judge_rollouts(model, read(name, model)[:count], Options(cause_tokens=cause_tokens))
    figures = figures_of(judged)
    assert figures["sides"]["sampler"]["verdict"] == "EXACT"
    assert figures["sides"]["trainer"]["verdict"] == "BUG"
    assert figures["sides"]["trainer"]["cause"] == CAUSES[name]
    json.dumps(figures, allow_nan=False)


@pytest.mark.rounding
def test_sides_that_mean_different_things_are_both_right(model):
    judged = judge_rollouts(model, read("planted_log_s.jsonl", model)[:2], FEW)
    figures = figures_of(judged)
    assert [side["verdict"] for side in figures["sides"].values()] == ["EXACT", "EXACT"]
    assert figures["meaning"] == "not renormalised over the kept tokens"
    assert verdict_of(judged) == "MISMATCH"


@pytest.mark.rounding
def test_tokens_that_were_not_sampled_are_fed_and_not_judged(exact_rollouts, model):
    values = list(exact_rollouts[0].sampler_logprobs)
    values[2] = 0.0
    sampled = tuple(index != 2 for index in range(12))
    judged = judge_rollouts(
        model, [replace(exact_rollouts[0], sampler_logprobs=tuple(values), is_sampled=sampled)], FEW
    )
    assert judged.sides["sampler"].verdict is Verdict.EXACT
    assert np.count_nonzero(judged.sides["sampler"].fit.reported) == 11


@pytest.mark.rounding
def test_a_token_that_the_filters_exclude_is_the_samplers_bug(exact_rollouts, model):
    """Drawn at random from the vocabulary, but said to be the likeliest."""
    greedy = [replace(each, sampling=SamplingParams(top_k=1), logprobs_mode="raw") for each in exact_rollouts]
    side = judge_rollouts(model, greedy, FEW).sides["sampler"]
    assert side.verdict is Verdict.BUG
    assert len(side.choices) > 20
    assert "sampling parameters exclude" in side.reasons[0]


def logprobs_of(model, rollout, variant, reading="raw"):
    """[R] under a variant."""
    (result,) = variants.variant_items(model, [{**item_of(rollout, [reading]), "variant": variant}])
    return views_from(rollout, [reading], result)[reading].logprobs


def exact_of(model, rollout):
    return scores_of(model, [rollout])[0][0].views["raw"].logprobs


def test_a_variant_that_changes_nothing_has_the_same_bits(exact_rollouts, model):
    rollout = exact_rollouts[0]
    nothing: list[dict] = [{}, {"borders": []}, {"before": [], "conv": True, "attend": True}]
    for variant in nothing:
        assert np.array_equal(logprobs_of(model, rollout, variant), exact_of(model, rollout))


def test_what_is_seen_before_a_sequence_is_as_if_it_were_its_beginning(exact_rollouts, model):
    """With convolution and attention both, the sequence is the longer one's end."""
    before, rollout = exact_rollouts[0], exact_rollouts[1]
    variant = {"before": [list(before.ids)], "conv": True, "attend": True}
    whole = replace(rollout, prompt_token_ids=(*before.ids, *rollout.prompt_token_ids))
    assert np.array_equal(logprobs_of(model, rollout, variant), exact_of(model, whole))


MISTAKES = {
    "log-probabilities shifted by one position (of the token before)": lambda values: (values[-1], *values[:-1]),
    "log-probabilities shifted by one position (of the token after)": lambda values: (*values[1:], values[0]),
    "a constant offset (-0.25 nats)": lambda values: tuple(value - 0.25 for value in values),
    "another base of the logarithm (2)": lambda values: tuple(value / np.log(2.0) for value in values),
    "reported values are rounded (to bfloat16)": lambda values: tuple(
        round_to_bfloat16(np.array(values, np.float32)).tolist()
    ),
    "reported values are rounded (to 2 decimals)": lambda values: tuple(round(value, 2) for value in values),
}


@pytest.mark.rounding
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_what_was_written_down_is_named(name, exact_rollouts, model):
    wrong = [replace(each, trainer_logprobs=MISTAKES[name](each.trainer_logprobs)) for each in exact_rollouts]
    judged = judge_rollouts(model, wrong, Options({"sampler": "float32", "trainer": "float32"}, cause_tokens=70))
    assert judged.sides["sampler"].verdict is Verdict.EXACT
    assert (judged.sides["trainer"].verdict, judged.sides["trainer"].cause) == (Verdict.BUG, name)
    first, *others = figures_of(judged)["sides"]["trainer"]["hypotheses"]
    assert name.startswith(first["name"]) and "as computed" in {each["name"] for each in others}


@pytest.mark.rounding
@pytest.mark.parametrize("stated", [0.7, 1.0, None])
def test_a_temperature_is_fitted_as_a_number(stated, exact_rollouts, model):
    """On both sides: other than the stated one, or one that the file does not say."""
    said = {"sampling": SamplingParams(temperature=stated or 1.0), "has_temperature": stated is not None}
    rollouts = exact(model, [replace(each, **said) for each in exact_rollouts], "tempered at 0.653")
    judged = judge_rollouts(model, rollouts, Options({"sampler": "float32", "trainer": "float32"}, cause_tokens=70))
    report = report_of(judged, model.sha256)
    assert report.verdict == ("EXACT" if stated is None else "BUG")
    words = "at temperature 0.653, which the file does not say"
    words = words if stated is None else "a temperature of 0.653 other than the stated one"
    assert [finding.words.partition(": ")[2] for finding in report.findings] == [words, words]


@pytest.mark.rounding
def test_a_few_tokens_fit_no_temperature(exact_rollouts, model):
    """Any two numbers are those of some temperature."""
    short = replace(exact_rollouts[0], token_ids=exact_rollouts[0].token_ids[:2], is_sampled=(True, True))
    hot = exact(model, [replace(short, sampler_logprobs=None, trainer_logprobs=None)], "tempered at 0.653")
    assert judge_rollouts(model, hot, FEW).sides["sampler"].verdict is Verdict.BUG


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("is_impossible", "verdict", "code", "words"),
    [(True, "BUG", WRONG, "impossible values in 2 sequences, first f, line 3"), (False, "INCONCLUSIVE", OPEN, "3 seq")],
)
def test_a_file_is_not_right_where_sequences_are_left_out(is_impossible, verdict, code, words, exact_rollouts, model):
    left = [Left("trainer_logprobs", 2, "f, line 3", is_impossible)]
    judged = replace(judge_rollouts(model, exact_rollouts[:1], FEW), failed=[(exact_rollouts[1], "too large")])
    report = report_of(judged, model.sha256, left)
    assert (report.verdict, report.exit_code) == (verdict, code)
    assert report.findings[0].words.startswith(words)


def places(*wrong):
    """Off at these tokens of the answers, which are all the same: [sequence][token]."""
    return {(sequence, token) for sequence, tokens in enumerate(wrong) for token in tokens}


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (places((), (3, 5)), "wrong in 1 of 3 sequences: 1"),
        (places((0,), (0,), (0,)), ""),
        (places((7,), (7, 11), (3, 11)), "wrong only where the token is 9"),
        (
            places((1, 5, 9), (1, 5, 9), (5, 9)),
            "wrong only at every 4th token of an answer, from its token 1 on, counted from 0",
        ),
    ],
)
def test_what_wrong_positions_have_in_common_is_said(wrong, words, exact_rollouts, model):
    """Every fourth token is a 9, at which three are right."""
    ids = [9 if index % 4 == 3 else index for index in range(12)]
    right = exact(model, [replace(each, token_ids=tuple(ids)) for each in exact_rollouts], "raw")
    off = [
        replace(
            each,
            trainer_logprobs=tuple(
                value - ((sequence, token) in wrong) * (1.0 + 0.1 * token + sequence)
                for token, value in enumerate(each.trainer_logprobs)
            ),
        )
        for sequence, each in enumerate(right)
    ]
    judged = judge_rollouts(model, off, Options(dict.fromkeys(("sampler", "trainer"), "float32"), cause_tokens=64))
    side = judged.sides["trainer"]
    assert in_words(judged.scores, side.fit, side.reported) == words
    worst = figures_of(judged)["sides"]["trainer"]["worst_positions"]
    assert {(int(each["id"]), each["position"]) for each in worst} == wrong


@pytest.mark.rounding
def test_log_probabilities_of_no_side(exact_rollouts, model):
    silent = [replace(each, sampler_logprobs=None, trainer_logprobs=None) for each in exact_rollouts]
    report = report_of(judge_rollouts(model, silent, FEW), model.sha256)
    assert (report.verdict, report.exit_code) == ("INCONCLUSIVE", OPEN)
    assert report.figures["meaning"] == ""
    assert as_html(report) and as_text(report)


@pytest.mark.rounding
def test_a_temperature_that_the_file_does_not_say(model):
    """TRL's own file, whose sampler drew at 0.7: every format is tried under that reading, also those that it is far
    from fitting.
    """
    side = judge_rollouts(model, read("trl_rollouts.jsonl", model), Options()).sides["sampler"]
    assert (side.verdict, side.fit.reading) == (Verdict.EXACT, "tempered at 0.7")
    assert "which the file does not say" in side.reasons[1]


def test_what_came_before_in_a_pack_and_the_trainers_routes_are_tried(exact_rollouts):
    """An attention leak sees all of the pack, a convolution the last tokens."""
    packed = [replace(exact_rollouts[0], id=str(number), pack="a") for number in range(6)]
    seen = [each.variants["5"] for each in seen_hypotheses("leak", packed_before(packed))]
    ways = [(3, True, False), (5, False, True), (5, True, True)]
    assert [(len(each["before"]), each["conv"], each["attend"]) for each in seen] == ways
    routes = (((0, 1),),) * 3
    tried, *_ = route_hypotheses([replace(exact_rollouts[0], trainer_routes=routes)])
    assert route_hypotheses(exact_rollouts) == [] and tried.variants == {"0": {"routes": routes}}


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("is_off", "words"),
    [
        (lambda step, place: True, ""),
        (lambda step, place: step >= 2, "errs like bfloat16, but only from step 2 on: stale weights ("),
        (lambda step, place: place >= 8, "errs like bfloat16, but only behind the first 8 tokens of answers ("),
    ],
)
def test_errors_of_a_coarse_formats_size_are_no_format_where_some_have_none(is_off, words, model):
    """By 0.3 %, which bfloat16 explains."""
    rng = np.random.default_rng(7)
    asked = [
        Rollout(str(n), tuple(rng.integers(8, 512, 20).tolist()), tuple(rng.integers(8, 512, 16).tolist()), step=n)
        for n in range(5)
    ]
    rollouts = [
        replace(
            each,
            trainer_logprobs=tuple(
                value * (1.0 + 0.003 * is_off(each.step, place) * rng.choice((-1.0, 1.0)))
                for place, value in enumerate(each.trainer_logprobs)
            ),
        )
        for each in exact(model, asked, "raw")
    ]
    side = judge_rollouts(model, rollouts, FEW).sides["trainer"]
    assert side.verdict is (Verdict.BUG if words else Verdict.EXACT), side.reasons
    assert side.reasons[0].startswith(words)


@pytest.mark.rounding
def test_stale_weights_are_named_with_workers_too(exact_rollouts, model, tmp_path):
    """By another checkpoint of the network. No variant is recorded, as its item does not name that checkpoint."""
    older = changed_layer(model, tmp_path)
    stale = exact(older, exact_rollouts[:1], "raw")
    rollouts = [replace(rollout, sampler_logprobs=None) for rollout in stale]
    with ResultsFile(tmp_path / "results.jsonl", model) as record, ThreadPoolExecutor(1) as executor:
        judged = judge_rollouts(model, rollouts, FEW, Place(executor, record), previous=older)
    assert judged.sides["trainer"].reasons[0].startswith("stale weights (")
    assert '"variants"' not in (tmp_path / "results.jsonl").read_text(encoding="utf-8")
    entries = merged([str(tmp_path / "results.jsonl")], model)
    assert len(spot_check(model, list(entries.values()), WORKS, 1, 0)) == 1


def changed_layer(model, folder):
    """The checkpoint with the two halves of one matrix of the first layer changed for each other."""
    shutil.copytree(model.path, folder / "older")
    path = folder / "older" / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start, stop = (
        8 + size + offset
        for offset in json.loads(data[8 : 8 + size])["model.layers.0.feed_forward.w1.weight"]["data_offsets"]
    )
    middle = (start + stop) // 2
    data[start:stop] = data[middle:stop] + data[start:middle]
    path.write_bytes(data)
    return lfm2np.load(folder / "older")


def left_by(wrong, name="an error"):
    """A fit of 50 positions of which so many are wrong."""
    ratios = np.where(np.arange(50) < wrong, 99.0, 0.0)
    return Fit("float32", "raw", ratios, ratios, ratios, name)


@pytest.mark.parametrize(
    ("as_computed", "left", "is_right_in_a_coarser_format", "explains"),
    [(40, 0, True, True), (40, 4, True, True), (40, 5, True, False), (7, 0, True, False), (7, 0, False, True)],
)
def test_an_error_explains_if_it_puts_nearly_all_right(as_computed, left, is_right_in_a_coarser_format, explains):
    plain = left_by(as_computed, AS_IT_IS)
    assert Judge.explains(left_by(left), plain, is_right_in_a_coarser_format) is explains
    assert not Judge.explains(plain, plain, is_right_in_a_coarser_format)


def test_logits_a_position_late_have_seen_the_token(exact_rollouts, model):
    rollout = exact_rollouts[0]
    logits = np.asarray(model.logits(list(rollout.ids)), np.float64)[len(rollout.prompt_token_ids) :]
    logits -= logits.max(axis=1, keepdims=True)
    rows = logits[np.arange(len(logits)), list(rollout.token_ids)] - np.log(np.exp(logits).sum(axis=1))
    assert np.allclose(logprobs_of(model, rollout, {"late": 1}), rows, rtol=0, atol=1e-12)


def test_all_state_lost_is_a_shorter_prompt(exact_rollouts, model):
    rollout = exact_rollouts[2]
    lost = logprobs_of(model, rollout, {"borders": [13], "attend": False})
    short = replace(rollout, prompt_token_ids=rollout.prompt_token_ids[13:])
    assert np.allclose(lost, exact_of(model, short), rtol=0, atol=1e-5)


# --- views of a distribution against engine/sampling/choice.py, which decides what a token is drawn from


VIEWS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.3, 0.7, 1.0, 1.5)),
    top_k=st.sampled_from((0, 1, 3, 10)),
    top_p=st.sampled_from((1.0, 0.9, 0.5, 1e-6)),
    min_p=st.sampled_from((0.0, 0.05, 0.5, 1.0)),
    repetition_penalty=st.sampled_from((1.0, 1.3)),
    presence_penalty=st.sampled_from((0.0, 0.5)),
    frequency_penalty=st.sampled_from((0.0, -0.25)),
    profile=st.sampled_from(PROFILES),
)
LOGITS = st.lists(st.integers(-24, 24).map(lambda quarter: quarter / 4), min_size=2, max_size=40)


@given(LOGITS, VIEWS, st.data())
def test_a_view_is_what_choice_draws_from(logits, view, data):
    """Without ties at the border, where choice takes the lower ids and engines differ."""
    ids = data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=3, max_size=6))
    row, start = np.array([logits], np.float32), len(ids) - 1
    weights = choice.distribution(row[0], view, ids[:start], (), ())
    values = processed(row, view, ids, range(start, start + 1), start)
    result = viewed(values, np.array(ids[start:]), view, (1e-4, 0.3))
    logprob = float(result["logprobs"][0, ...].item())
    weight = int(weights[ids[start]])
    tied = np.count_nonzero(values[0] == values[0, ids[start]]) > 1
    if weight:
        assert abs(logprob - math.log(weight / int(weights.sum()))) <= 1e-13 + 2 / weight + 1e-15 * len(logits)
        low, high = result["low"][:, 0], result["high"][:, 0]
        assert (low <= logprob + 1e-12).all() and (high >= logprob - 1e-12).all()
        assert low[1] <= low[0] + 1e-12 and high[1] >= high[0] - 1e-12  # a larger tolerance allows more
        assert result["drops"][1, 0] >= result["drops"][0, 0]
    elif not tied:
        assert result["drops"].all()
        assert logprob == -math.inf or logprob < -30.0  # a weight of 0 is below 2**-46 of the largest
