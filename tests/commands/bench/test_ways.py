"""Five prompts in four ways, and what grows: the sums behind the tables."""

import json
from pathlib import Path

import pytest

import lfm2np
from lfm2np.commands.bench import five, growth
from lfm2np.commands.bench.sides.filled_engines import (
    PROMPT_LENGTHS,
    WAYS,
    answer_lengths,
    answer_prompts,
    answer_together,
    answer_without_cache,
    random_prompt,
    recomputed_lengths,
)

MODEL = Path(__file__).parents[3] / "fixtures" / "torture" / "minimal_config"


def test_every_way_gives_the_same_answers():
    """So the ways differ in their cost alone; `padded` computes longer prompts, which are others."""
    model = lfm2np.load(MODEL)
    prompts = [random_prompt(model, length, seed) for seed, length in enumerate(PROMPT_LENGTHS)]
    answers = answer_lengths(8)
    together = answer_together(model, prompts, answers)
    assert [len(ids) for ids in together] == answers == [4, 6, 8, 5, 7]
    pairs = list(zip(prompts, answers, strict=True))
    assert [answer_together(model, [prompt], [answer])[0] for prompt, answer in pairs] == together
    assert [answer_without_cache(model, prompt, answer) for prompt, answer in pairs] == together


@pytest.mark.rounding
def test_every_way_takes_time():
    model = lfm2np.load(MODEL, "float32")
    assert all(answer_prompts(model, way, 2) > 0 for way in WAYS)


def test_without_a_cache_each_token_costs_a_pass_over_all_before_it():
    lengths = recomputed_lengths(8)
    assert len(lengths) == sum(answer_lengths(8))
    assert lengths[:5] == [8, 9, 10, 11, 12]
    assert max(lengths) == 31 + 7 - 1


def test_the_integral_is_exact_where_the_cost_is_straight_between_samples():
    lengths = recomputed_lengths(64)
    sampled = five.sampled_lengths(lengths)
    assert (sampled[0], sampled[-1], len(sampled)) == (min(lengths), max(lengths), five.SAMPLED_LENGTHS)
    times = [0.25 + 0.5 * length for length in sampled]
    assert five.integral(lengths, sampled, times) == pytest.approx(sum(0.25 + 0.5 * length for length in lengths))
    bent = [abs(length - sampled[3]) for length in sampled]
    assert five.integral(lengths, sampled, bent) == pytest.approx(sum(abs(size - sampled[3]) for size in lengths))


def test_the_causes_multiply_to_the_gain():
    times = five.Five(
        "exact", 256, [8, 286], {way: [seconds] for way, seconds in zip(WAYS, (96, 12, 6, 4), strict=True)}
    )
    shown = json.loads(json.dumps(five.as_json(times)))
    assert shown["causes"] == {"cache": 8.0, "batch": 2.0, "no padding": 1.5}
    assert (shown["gain"], shown["target"], shown["tokens"]) == (24.0, 16.0, 960)
    assert "gain 24.0 = cache 8.00 x batch 2.00 x no padding 1.50; target 16" in five.as_text(times)
    assert "integrated from passes of 8, 286 tokens" in five.as_text(times)


def test_the_gain_of_rounds_is_taken_within_each():
    seconds = dict(zip(WAYS, ([8.0, 9.0, 40.0], [4.0, 3.0, 10.0], [2.0, 3.0, 5.0], [1.0, 3.0, 4.0]), strict=True))
    times = five.Five("exact", 16, [], seconds)
    assert five.as_json(times)["gain_of_rounds"] == [8.0, 3.0, 10.0]
    assert five.as_json(times)["gain"] == 8.0
    assert "3.0 to 10.0 in 3 rounds" in five.as_text(times)
    assert "integrated" not in five.as_text(times)


@pytest.mark.rounding
@pytest.mark.parametrize("whole", [False, True])
def test_five_is_measured_in_a_process(whole):
    counted = []
    times = five.measure_five(MODEL, "float32", 4, 2, 1, whole, lambda done, total: counted.append((done, total)))
    assert set(times.seconds) == set(WAYS)
    assert all(len(rounds) == 2 for rounds in times.seconds.values())
    assert bool(times.sampled) is not whole
    assert counted[-1][0] == counted[-1][1]


def test_a_straight_line_fits_and_a_bend_is_seen():
    straight = growth.fit_line(16, [1, 2, 4, 8], [[1.0 + 16 * context] * 3 for context in (1, 2, 4, 8)])
    assert straight.base_seconds == pytest.approx(1.0)
    assert straight.seconds_per_token == pytest.approx(1.0)
    assert straight.over_fit() == pytest.approx([1.0] * 4)
    bent = growth.fit_line(1, [1, 2, 3, 4, 5], [[10.0], [10.0], [20.0], [10.0], [10.0]])
    assert max(bent.over_fit()) == bent.over_fit()[2] == pytest.approx(20 / 12)


def test_the_memory_beyond_the_cache():
    assert growth.PrefillMemory(8192, 500, 400).beyond_cache == 100
    assert growth.PrefillMemory(8192, 300, 400).beyond_cache == 0  # pages that were held already


@pytest.mark.slow
def test_growth_is_measured_in_a_process():
    counted = []
    result = growth.measure_growth(
        MODEL, "exact", 2, 1, lambda done, total: counted.append((done, total)), (5, 9, 30), (17, 40)
    )
    shown = json.loads(json.dumps(growth.as_json(result)))
    assert [(cell["requests"], cell["contexts"]) for cell in shown["decode"]] == [(1, [5, 9, 30]), (16, [5, 9, 30])]
    assert all(len(times) == 2 * growth.STEPS for cell in shown["decode"] for times in cell["seconds"])
    assert [cell["length"] for cell in shown["prefill"]] == [17, 40]
    assert counted[-1] == (2 * 2 * 3 + 2, 2 * 2 * 3 + 2)
    assert "decode of 16:" in growth.as_text(result)
