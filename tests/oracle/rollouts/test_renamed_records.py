"""Records of TRL and verl: files that their own code wrote, read as they are, and every name of the table.

fixtures/rollouts has the files and the scripts that made them. Their samplers ran in bfloat16, so that the exact scores
of their answers lie close by if, and only if, each token has its own log-probability.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.engine.loading import Model
from lfm2np.errors import RequestError
from lfm2np.oracle.rollouts.measures import measures
from lfm2np.oracle.rollouts.reading import read_rollouts
from lfm2np.oracle.rollouts.rollout import Rollout

FIXTURES = Path(__file__).parents[3] / "fixtures" / "rollouts"
TEMPERATURE = 0.7


def fixture(model: Model, name: str) -> list[Rollout]:
    """All of a file: nothing is left out."""
    rollouts, left = read_rollouts((FIXTURES / name).read_text(encoding="utf-8"), name, model.config)
    assert left == []
    return rollouts


def errors_of(model: Model, rollouts: Sequence[Rollout], side: str) -> Any:
    """Reported less exact log-probabilities of all sampled tokens, at the temperature."""
    errors = []
    for rollout in rollouts:
        ids = np.array(rollout.token_ids)
        logits = np.asarray(model.logits([*rollout.prompt_token_ids, *rollout.token_ids]), np.float64) / TEMPERATURE
        rows = logits[len(rollout.prompt_token_ids) - 1 : -1]
        rows = rows - rows.max(axis=-1, keepdims=True)
        exact = rows[np.arange(len(ids)), ids] - np.log(np.exp(rows).sum(axis=-1))
        errors.append((np.array(getattr(rollout, side)) - exact)[np.array(rollout.is_sampled)])
    return np.abs(np.concatenate(errors))


def test_trl_s_batches_are_read_as_trl_wrote_them(model: Model) -> None:
    """Left padding is counted; both sides are there; the trainer of the first step is the checkpoint, in float32."""
    rollouts = fixture(model, "trl_batches.jsonl")
    assert len(rollouts) == 16 and {rollout.step for rollout in rollouts} == {0, 1}
    assert rollouts[0].id == "line 1, row 0"
    widths = [rollout.left_padding + len(rollout.prompt_token_ids) for rollout in rollouts[:8]]
    assert len(set(widths)) == 1 and min(rollout.left_padding for rollout in rollouts[:8]) == 0
    first, later = rollouts[:8:3], rollouts[8::3]
    assert errors_of(model, first, "trainer_logprobs").max() < 1e-4
    assert errors_of(model, later, "trainer_logprobs").max() > 0.2  # trained, which the sampler was not
    assert errors_of(model, [*first, *later], "sampler_logprobs").max() < 0.2


def logged(name: str) -> Any:
    return json.loads((FIXTURES / name).read_text(encoding="utf-8"))


def measured(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Of the sampled tokens."""
    masks = [np.array(rollout.is_sampled) for rollout in rollouts]
    sides = "sampler_logprobs", "trainer_logprobs"
    parts = [
        [np.array(getattr(each, side))[mask] for each, mask in zip(rollouts, masks, strict=True)] for side in sides
    ]
    return measures(*map(np.concatenate, parts))


def test_trl_s_own_metrics_of_its_batches_are_ours(model: Model) -> None:
    rollouts = fixture(model, "trl_batches.jsonl")
    for step, metrics in enumerate(logged("trl_metrics.json")):
        ours = measured([rollout for rollout in rollouts if rollout.step == step])
        for what in ("mean", "max"):
            value = metrics[f"sampling/sampling_logp_difference/{what}"]
            assert ours[f"{what} |difference|"] == pytest.approx(value, rel=1e-6)  # float32


@pytest.mark.parametrize("name", ["trl_rollouts.jsonl", "trl_completions.jsonl"])
def test_what_a_rollout_function_returned_and_what_trl_logged_are_the_same_answers(name: str, model: Model) -> None:
    """Equal answers of a group stand there as often as they were sampled."""
    batches, rollouts = fixture(model, "trl_batches.jsonl"), fixture(model, name)
    for batch, rollout in zip(batches, rollouts, strict=True):
        assert (rollout.prompt_token_ids, rollout.token_ids) == (batch.prompt_token_ids, batch.token_ids)
        assert rollout.sampler_logprobs == pytest.approx(batch.sampler_logprobs, abs=1e-9)
        assert rollout.trainer_logprobs is None and rollout.left_padding == 0


def test_verl_s_agent_loops_and_its_batch_are_the_same_answers(model: Model) -> None:
    """Tokens of a tool are fed, not judged; both sides' errors are those of bfloat16 and float32."""
    loops, batch = fixture(model, "verl_agent_loop.jsonl"), fixture(model, "verl_batch.json")
    for loop, row in zip(loops, batch, strict=True):
        assert (loop.prompt_token_ids, loop.token_ids) == (row.prompt_token_ids, row.token_ids)
        assert (loop.sampler_logprobs, loop.is_sampled) == (row.sampler_logprobs, row.is_sampled)
        assert row.left_padding + len(row.prompt_token_ids) == 20
    assert [all(row.is_sampled) for row in batch] == [True, False] * 3
    assert errors_of(model, batch[:3], "sampler_logprobs").max() < 0.3
    assert errors_of(model, batch[:3], "trainer_logprobs").max() < 1e-4


def test_verl_s_own_metrics_of_its_batch_are_ours(model: Model) -> None:
    """Its chi2_token is the mean square of the ratios, less 1."""
    ours, verl = measured(fixture(model, "verl_batch.json")), logged("verl_metrics.json")
    assert ours["KL divergence (k3)"] == pytest.approx(verl["rollout_corr/k3_kl"], rel=2e-6, abs=2e-7)  # float32
    squares = verl["rollout_corr/chi2_token"] + 1.0
    assert ours["effective sample size"] == pytest.approx(ours["mean ratio"] ** 2 / squares, abs=2e-6)


def test_verl_s_dump_has_texts_only_and_says_so(model: Model) -> None:
    text = (FIXTURES / "verl_dump.jsonl").read_text(encoding="utf-8")
    with pytest.raises(RequestError, match="texts as verl's rollout_data_dir has them, expected token ids"):
        read_rollouts(text, "1.jsonl", model.config)


# --- forms that no file shows

PROMPT, ANSWER, LOGPROBS = [1, 5], [6, 7, 8], [-1.0, -2.0, -3.0]
TRL = {"prompt_ids": PROMPT, "completion_ids": ANSWER, "logprobs": LOGPROBS}
VERL = {"prompt_ids": PROMPT, "response_ids": ANSWER, "response_logprobs": LOGPROBS}
BATCH = {
    "prompts": [[0, *PROMPT]],
    "responses": [[*ANSWER, 0]],
    "attention_mask": [[0, 1, 1, 1, 1, 1, 0]],
    "rollout_log_probs": [[*LOGPROBS, 0.0]],
    "old_log_probs": [[*LOGPROBS, 0.0]],
}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: record, what the rollout has beside PROMPT, ANSWER and LOGPROBS
    "TRL, one sequence": (TRL, {}),
    "TRL, alternatives": (
        {"prompt_ids": [PROMPT], "completion_ids": [ANSWER], "logprobs": [[[-1.0], [-2.0], [-3.0]]]},
        {},
    ),
    "TRL, an environment": (
        {**TRL, "logprobs": [-1.0, None, -3.0], "env_mask": [1, 0, 1]},
        {"is_sampled": (True, False, True), "sampler_logprobs": (-1.0, 0.0, -3.0)},
    ),
    "TRL, a tool": ({**TRL, "tool_mask": [1, 1, 0]}, {"sampler_logprobs": (-1.0, -2.0, 0.0)}),
    "TRL, fields of the schema": (
        {**TRL, "id": "a", "step": 2, "group": "g", "logprobs_mode": "processed", "reward": 1.0},
        {"id": "a", "step": 2, "group": "g", "logprobs_mode": "processed"},
    ),
    "verl, a group and a step": (
        {**BATCH, "uid": ["u"], "min_global_steps": [4], "max_global_steps": [4]},
        {"group": "u", "step": 4, "left_padding": 1, "pad_token_id": 0, "trainer_logprobs": tuple(LOGPROBS)},
    ),
    "verl, weights replaced midway": (
        {**VERL, "extra_fields": {"min_global_steps": 4, "max_global_steps": 5}},
        {"step": None},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_recognised_by_its_keys(name: str, model: Model) -> None:
    record, beside = FORMS[name]
    (rollout,), left = read_rollouts(json.dumps(record), "f", model.config)
    expected = {"prompt_token_ids": tuple(PROMPT), "token_ids": tuple(ANSWER), "sampler_logprobs": tuple(LOGPROBS)}
    assert left == []
    for field, value in {**expected, **beside}.items():
        assert getattr(rollout, field) == value, field


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"rollout_log_probs": []}, "rollout_log_probs", "0 rows, expected 1, as many as responses"),
        ({"attention_mask": None}, "attention_mask", "missing"),
        ({"attention_mask": [[1, 1]]}, "attention_mask", "2 entries, expected 7"),
        ({"old_log_probs": [[-1.0]]}, "trainer_logprobs", "1 entries, expected 4"),
        ({"attention_mask": [[0] * 7]}, "prompt_token_ids", "prompt_token_ids []"),
        ({"prompts": [3]}, "prompt_token_ids", "3: expected a list of token ids"),
    ],
)
def test_columns_that_do_not_belong_together_are_left_out(
    change: dict[str, Any], kind: str, words: str, model: Model
) -> None:
    text = f"{json.dumps(TRL)}\n{json.dumps({**BATCH, **change})}"
    _, (left,) = read_rollouts(text, "f", model.config)
    assert left.kind == kind and words in left.first, left.first


# --- the measures of simple numbers


def test_the_simple_case() -> None:
    """One token of probability 1/2 by the sampler and 1/4 by the trainer, one of 1/2 by both."""
    half, quarter = math.log(0.5), math.log(0.25)
    assert measures(np.array([half, half]), np.array([quarter, half])) == {
        "mean |difference|": pytest.approx(math.log(2) / 2),
        "max |difference|": pytest.approx(math.log(2)),
        "KL divergence (k3)": pytest.approx((0.5 + math.log(2) - 1) / 2),
        "mean ratio": pytest.approx(0.75),
        "effective sample size": pytest.approx(0.75**2 / 0.625),
        "ratios outside [0.8, 1.2]": 0.5,
    }


@given(st.lists(st.tuples(*[st.floats(-50, 0)] * 2), min_size=1, max_size=20))
def test_measures_have_their_ranges_and_sides_that_agree_differ_by_nothing(pairs: list[tuple[float, float]]) -> None:
    sampler, trainer = (np.array(side) for side in zip(*pairs, strict=True))
    figures = measures(sampler, trainer)
    assert figures["KL divergence (k3)"] >= 0.0 and 0.0 <= figures["ratios outside [0.8, 1.2]"] <= 1.0
    assert 0.0 <= figures["effective sample size"] <= 1.0 + 1e-12
    assert [*measures(sampler, sampler).values()] == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def test_a_token_outside_the_trainer_s_kept_set_is_no_crash() -> None:
    figures = measures(np.array([-1.0, -2.0]), np.array([-1.0, -math.inf]))
    assert figures["KL divergence (k3)"] == math.inf
    assert (figures["mean ratio"], figures["ratios outside [0.8, 1.2]"]) == (0.5, 0.5)
