"""Records of other projects: files that their own code wrote, read as they are, and every form by its keys.

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
from numpy.typing import NDArray

from lfm2np.engine.loading import Model
from lfm2np.errors import RequestError
from lfm2np.oracle.rollouts import kinds
from lfm2np.oracle.rollouts.converters import CONVERTERS
from lfm2np.oracle.rollouts.measures import measures
from lfm2np.oracle.rollouts.rollout import Rollout, read_rollouts

FIXTURES = Path(__file__).parents[3] / "fixtures" / "rollouts"
TEMPERATURE, TOP_P = 0.7, 0.9
RAW, AT_TEMPERATURE, PROCESSED = (1.0, 1.0), (TEMPERATURE, 1.0), (TEMPERATURE, TOP_P)


def fixture(model: Model, name: str, **options: Any) -> list[Rollout]:
    """All of a file: nothing is left out."""
    text = (FIXTURES / name).read_text(encoding="utf-8")
    rollouts, left = read_rollouts(text, name, model.config, **options)
    assert left == []
    return rollouts


def errors_of(model: Model, rollouts: Sequence[Rollout], side: str, *ways: tuple[float, float]) -> list[Any]:
    """Reported less exact log-probabilities of all sampled tokens, for each way (temperature, top-p) of sampling."""
    results: list[list[Any]] = [[] for _ in ways]
    for rollout in rollouts:
        logits = np.asarray(model.logits([*rollout.prompt_token_ids, *rollout.token_ids]), np.float64)
        rows = logits[len(rollout.prompt_token_ids) - 1 : -1]
        for collected, way in zip(results, ways, strict=True):
            exact = chosen_logprobs(rows, rollout.token_ids, *way)
            collected.append((np.array(getattr(rollout, side)) - exact)[np.array(rollout.is_sampled)])
    return [np.concatenate(collected) for collected in results]


def chosen_logprobs(
    logits: NDArray[np.float64], token_ids: Sequence[int], temperature: float, top_p: float
) -> NDArray[np.float64]:
    """[T] of the tokens [T] by logits [T, V], at a temperature, as a share of what top-p keeps."""
    rows = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    logprobs = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    ordered = np.exp(np.sort(logprobs, axis=-1)[:, ::-1])
    before = np.cumsum(ordered, axis=-1) - ordered
    kept = np.where(before < top_p, ordered, 0.0).sum(axis=-1)
    chosen: NDArray[np.float64] = logprobs[np.arange(len(rows)), token_ids] - np.log(kept)
    return chosen


def sides(rollouts: Sequence[Rollout]) -> tuple[list[float], list[float], list[int]]:
    """Of the sampled tokens: what `measures` takes."""

    def flat(side: str) -> list[float]:
        return [
            value
            for rollout in rollouts
            for value, is_sampled in zip(getattr(rollout, side), rollout.is_sampled, strict=True)
            if is_sampled
        ]

    return flat("sampler_logprobs"), flat("trainer_logprobs"), [sum(rollout.is_sampled) for rollout in rollouts]


# --- TRL


def test_trl_s_batches_are_read_as_trl_wrote_them(model: Model) -> None:
    """Left padding is counted; both sides are there; the trainer of the first step is the checkpoint, in float32."""
    rollouts = fixture(model, "trl_batches.jsonl")
    assert len(rollouts) == 16 and {rollout.step for rollout in rollouts} == {0, 1}
    assert rollouts[0].id == "line 1, row 0"
    widths = [rollout.left_padding + len(rollout.prompt_token_ids) for rollout in rollouts[:8]]
    assert len(set(widths)) == 1 and min(rollout.left_padding for rollout in rollouts[:8]) == 0
    first, later = rollouts[:8:3], rollouts[8::3]
    assert {rollout.step for rollout in first} == {0}
    (trainer,) = errors_of(model, first, "trainer_logprobs", AT_TEMPERATURE)
    (sampler,) = errors_of(model, first, "sampler_logprobs", AT_TEMPERATURE)
    assert np.abs(trainer).max() < 1e-4 and np.abs(sampler).max() < 0.2
    (trainer,) = errors_of(model, later, "trainer_logprobs", AT_TEMPERATURE)
    (sampler,) = errors_of(model, later, "sampler_logprobs", AT_TEMPERATURE)
    assert np.abs(trainer).max() > 0.2 > np.abs(sampler).max()  # trained, which the sampler was not


def test_trl_s_own_metrics_of_its_batches_are_ours(model: Model) -> None:
    rollouts = fixture(model, "trl_batches.jsonl")
    logged = json.loads((FIXTURES / "trl_metrics.json").read_text(encoding="utf-8"))
    assert logged[1]["sampling/importance_sampling_ratio/min"] == 0.0  # an answer's ratio above 3, masked
    for step, metrics in enumerate(logged):
        results = measures(*sides([rollout for rollout in rollouts if rollout.step == step]))
        assert len(metrics) == 5
        for name, value in metrics.items():
            assert results[name] == pytest.approx(value, rel=1e-6), name  # float32


@pytest.mark.parametrize("name", ["trl_rollouts.jsonl", "trl_completions.jsonl"])
def test_what_a_rollout_function_returned_and_what_trl_logged_are_the_same_answers(name: str, model: Model) -> None:
    """Equal answers of a group stand there as often as they were sampled."""
    batches, rollouts = fixture(model, "trl_batches.jsonl"), fixture(model, name)
    for batch, rollout in zip(batches, rollouts, strict=True):
        assert (rollout.prompt_token_ids, rollout.token_ids) == (batch.prompt_token_ids, batch.token_ids)
        assert rollout.sampler_logprobs == pytest.approx(batch.sampler_logprobs, abs=1e-9)
        assert rollout.trainer_logprobs is None and rollout.left_padding == 0


# --- verl


def test_verl_s_agent_loops_and_its_batch_are_the_same_answers(model: Model) -> None:
    """Tokens of a tool are fed, not judged; both sides' errors are those of bfloat16 and float32."""
    loops, batch = fixture(model, "verl_agent_loop.jsonl"), fixture(model, "verl_batch.json")
    for loop, row in zip(loops, batch, strict=True):
        assert (loop.prompt_token_ids, loop.token_ids) == (row.prompt_token_ids, row.token_ids)
        assert (loop.sampler_logprobs, loop.is_sampled) == (row.sampler_logprobs, row.is_sampled)
        assert row.left_padding + len(row.prompt_token_ids) == 20
    assert [all(row.is_sampled) for row in batch] == [True, False] * 3
    (sampler,) = errors_of(model, batch[:3], "sampler_logprobs", AT_TEMPERATURE)
    (trainer,) = errors_of(model, batch[:3], "trainer_logprobs", AT_TEMPERATURE)
    assert np.abs(sampler).max() < 0.3 and np.abs(trainer).max() < 1e-4


def test_verl_s_own_metrics_of_its_batch_are_ours(model: Model) -> None:
    results = measures(*sides(fixture(model, "verl_batch.json")))
    logged = json.loads((FIXTURES / "verl_metrics.json").read_text(encoding="utf-8"))
    assert logged.pop("training/rollout_probs_diff_valid") == 1
    assert len(logged) == 17
    for name, value in logged.items():
        assert results[name] == pytest.approx(value, rel=2e-6, abs=2e-7), name  # float32


def test_verl_s_dump_has_texts_only_and_says_so(model: Model) -> None:
    text = (FIXTURES / "verl_dump.jsonl").read_text(encoding="utf-8")
    with pytest.raises(RequestError, match="texts as verl's rollout_data_dir has them, expected token ids"):
        read_rollouts(text, "1.jsonl", model.config)


# --- vLLM


def test_vllm_s_responses_are_raw_log_probabilities(model: Model) -> None:
    """Of both kinds of completions; the request beside it says how they were sampled."""
    rollouts = fixture(model, "vllm_raw.jsonl")
    assert len(rollouts) == 24 and sum(len(rollout.token_ids) for rollout in rollouts) >= 300
    assert {(rollout.sampling.temperature, rollout.sampling.top_p) for rollout in rollouts} == {(TEMPERATURE, TOP_P)}
    assert {rollout.id.partition("-")[0] for rollout in rollouts} == {"cmpl", "chatcmpl"}
    raw, processed = errors_of(model, rollouts[::4] + rollouts[3:4], "sampler_logprobs", RAW, PROCESSED)
    assert np.abs(raw).max() < 0.2 and abs(raw.mean()) < 0.01
    assert np.abs(processed).mean() > 10 * np.abs(raw).mean()


def test_vllm_s_request_outputs_are_processed_log_probabilities(model: Model) -> None:
    rollouts = fixture(model, "vllm_processed.jsonl")
    assert len(rollouts) == 24 and {rollout.logprobs_mode for rollout in rollouts} == {"processed"}
    raw, processed = errors_of(model, rollouts[::6], "sampler_logprobs", RAW, PROCESSED)
    assert np.abs(raw).mean() > 5 * np.abs(processed).mean()


def test_vllm_s_own_rotation_is_seen(model: Model) -> None:
    rollouts = fixture(model, "vllm_unmended.jsonl")
    assert len(rollouts) == 24 and {rollout.logprobs_mode for rollout in rollouts} == {"raw"}
    (raw,) = errors_of(model, rollouts[::6], "sampler_logprobs", RAW)
    assert np.abs(raw).max() > 2.0


# --- slime, NeMo RL and prime-rl


@pytest.mark.parametrize("name", ["slime_samples.jsonl", "slime_train.json", "nemo_rl.jsonl", "prime_rl.jsonl"])
def test_the_same_answers_by_other_writers(name: str, model: Model) -> None:
    batches, rollouts = fixture(model, "trl_batches.jsonl")[:4], fixture(model, name)
    for batch, rollout in zip(batches, rollouts, strict=True):
        assert (rollout.prompt_token_ids, rollout.token_ids) == (batch.prompt_token_ids, batch.token_ids)
        assert rollout.sampler_logprobs == batch.sampler_logprobs
        expected = None if name == "slime_samples.jsonl" else batch.trainer_logprobs
        assert rollout.trainer_logprobs == expected
    steps = {"slime_train.json": 3, "prime_rl.jsonl": 0}
    assert {rollout.step for rollout in rollouts} == {steps.get(name)}
    if name == "slime_samples.jsonl":
        assert [(rollout.id, rollout.group) for rollout in rollouts] == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]


# --- forms that no file shows

PROMPT, ANSWER, LOGPROBS = [1, 5], [6, 7, 8], [-1.0, -2.0, -3.0]
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: form, record, what the rollout has beside PROMPT, ANSWER and LOGPROBS
    "TRL, one sequence": ("trl", {"prompt_ids": PROMPT, "completion_ids": ANSWER, "logprobs": LOGPROBS}, {}),
    "TRL, alternatives": (
        "trl",
        {"prompt_ids": [PROMPT], "completion_ids": [ANSWER], "logprobs": [[[-1.0], [-2.0], [-3.0]]]},
        {},
    ),
    "TRL, an environment": (
        "trl",
        {"prompt_ids": PROMPT, "completion_ids": ANSWER, "logprobs": [-1.0, None, -3.0], "env_mask": [1, 0, 1]},
        {"is_sampled": (True, False, True), "sampler_logprobs": (-1.0, 0.0, -3.0)},
    ),
    "verl, a group and a step": (
        "verl",
        {
            "prompts": [[0, *PROMPT]],
            "responses": [[*ANSWER, 0]],
            "attention_mask": [[0, 1, 1, 1, 1, 1, 0]],
            "rollout_log_probs": [[*LOGPROBS, 0.0]],
            "uid": ["u"],
            "min_global_steps": [4],
            "max_global_steps": [4],
        },
        {"group": "u", "step": 4, "left_padding": 1, "pad_token_id": 0},
    ),
    "verl, weights replaced midway": (
        "verl",
        {
            "prompt_ids": PROMPT,
            "response_ids": ANSWER,
            "response_logprobs": LOGPROBS,
            "extra_fields": {"min_global_steps": 4, "max_global_steps": 5},
        },
        {"step": None},
    ),
    "vLLM, -9999 and several samples": (
        "vllm",
        {
            "id": "cmpl-1",
            "choices": [
                {
                    "index": 1,
                    "prompt_token_ids": PROMPT,
                    "token_ids": ANSWER,
                    "logprobs": {"token_logprobs": [-1.0, -9999.0, -3.0]},
                },
                {"index": 0, "token_ids": [6]},
            ],
        },
        {"id": "cmpl-1/1", "group": "cmpl-1", "sampler_logprobs": (-1.0, -math.inf, -3.0)},
    ),
    "vLLM, numbers of a RequestOutput": (
        "vllm",
        {
            "request_id": "9",
            "prompt_token_ids": PROMPT,
            "outputs": [{"token_ids": ANSWER, "logprobs": [{"6": -1.0, "5": -0.5}, {"7": -2.0}, {"8": -3.0}]}],
        },
        {"id": "9"},
    ),
    "vLLM, FlatLogprobs": (
        "vllm",
        {
            "request_id": "9",
            "prompt_token_ids": PROMPT,
            "outputs": [
                {
                    "token_ids": ANSWER,
                    "logprobs": {
                        "start_indices": [0, 2, 3],
                        "end_indices": [2, 3, 4],
                        "token_ids": [5, 6, 7, 8],
                        "logprobs": [-0.5, -1.0, -2.0, -3.0],
                        "ranks": [1, 2, 1, 1],
                    },
                }
            ],
        },
        {"id": "9"},
    ),
    "slime, columns": (
        "slime",
        {"tokens": [[*PROMPT, *ANSWER]], "response_lengths": [3], "rollout_log_probs": [LOGPROBS]},
        {},
    ),
    "prime-rl, a sample": (
        "prime-rl",
        {
            "token_ids": [*PROMPT, *ANSWER],
            "mask": [False, False, True, True, True],
            "logprobs": [0.0, 0.0, *LOGPROBS],
            "temperatures": [1.0, 1.0, 0.7, 0.7, 0.7],
        },
        {"temperature": 0.7},
    ),
    "prime-rl, before": (
        "prime-rl",
        {
            "prompt_ids": PROMPT,
            "completion_ids": ANSWER,
            "completion_mask": [True, False, True],
            "completion_logprobs": LOGPROBS,
            "completion_temperatures": [0.7, 0.0, 0.7],
        },
        {"temperature": 0.7, "is_sampled": (True, False, True), "sampler_logprobs": (-1.0, 0.0, -3.0)},
    ),
    "the schema's fields in another form": (
        "trl",
        {
            "prompt_ids": PROMPT,
            "completion_ids": ANSWER,
            "logprobs": LOGPROBS,
            "id": "a",
            "temperature": 0.7,
            "step": 2,
            "group": "g",
            "logprobs_mode": "processed",
        },
        {"id": "a", "temperature": 0.7, "step": 2, "group": "g", "logprobs_mode": "processed"},
    ),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("named", [False, True])
def test_a_form_is_recognised_by_its_keys_or_by_its_name(name: str, named: bool, model: Model) -> None:
    form, record, beside = FORMS[name]
    (rollout, *_), _ = read_rollouts(json.dumps(record), "f", model.config, form if named else "auto")
    fields = {"prompt_token_ids": tuple(PROMPT), "token_ids": tuple(ANSWER), "sampler_logprobs": tuple(LOGPROBS)}
    for field, value in {**fields, **beside}.items():
        results = rollout.sampling.temperature if field == "temperature" else getattr(rollout, field)
        assert results == value, field


LACKING: dict[str, tuple[dict[str, Any], str, str]] = {
    "rows": (
        {"prompt_ids": [PROMPT, PROMPT], "completion_ids": [ANSWER, ANSWER], "logprobs": [LOGPROBS]},
        kinds.LENGTHS,
        "logprobs: 1 rows, expected 2, as many as completion_ids",
    ),
    "alternatives": (
        {"prompt_ids": PROMPT, "completion_ids": ANSWER, "logprobs": [[-1.0, -2.0], [-1.0], [-1.0]]},
        kinds.LENGTHS,
        "logprobs[0]: 2 alternatives, expected the sampled token's alone",
    ),
    "padding of a batch": (
        {"prompts": [PROMPT], "responses": [ANSWER]},
        kinds.MISSING,
        "attention_mask: missing, expected it in a batch",
    ),
    "a mask of another length": (
        {"prompts": [PROMPT], "responses": [ANSWER], "attention_mask": [[1, 1]]},
        kinds.LENGTHS,
        "attention_mask: 2 entries, expected 5",
    ),
    "vLLM's ids": (
        {"choices": [{"index": 0, "text": "a"}]},
        kinds.MISSING,
        "choices[0].token_ids: missing, expected them as return_token_ids gives them",
    ),
    "vLLM's lengths": (
        {"choices": [{"token_ids": ANSWER, "prompt_token_ids": PROMPT, "logprobs": {"token_logprobs": [-1.0]}}]},
        kinds.LENGTHS,
        "choices[0].logprobs: 1 entries, expected 3",
    ),
    "vLLM's indices": (
        {
            "prompt_token_ids": PROMPT,
            "outputs": [
                {
                    "token_ids": ANSWER,
                    "logprobs": {"start_indices": [0], "end_indices": [2], "token_ids": [6], "logprobs": [-1.0]},
                }
            ],
        },
        kinds.WRONG_VALUE,
        "outputs[0].logprobs {'end_indices': [2], 'logprobs': [-1.0], 'start_indices': [0], 'token_ids': [6]}: "
        "expected indices below 1",
    ),
    "vLLM's prompt": (
        {"choices": [{"token_ids": ANSWER, "logprobs": {"token_logprobs": LOGPROBS}}]},
        kinds.MISSING,
        "prompt_token_ids: missing, expected a list of token ids",
    ),
    "slime's length": (
        {"tokens": ANSWER, "response_length": 4},
        kinds.WRONG_VALUE,
        "response_length 4: expected 0 to 3, a part of tokens",
    ),
    "two temperatures": (
        {"token_ids": ANSWER, "mask": [0, 1, 1], "logprobs": LOGPROBS, "temperatures": [1.0, 0.5, 0.7]},
        kinds.WRONG_VALUE,
        "temperatures [0.5, 0.7]: expected the same for all tokens",
    ),
    "nothing masked in": (
        {"token_ids": ANSWER, "mask": [0, 0, 0], "logprobs": LOGPROBS},
        kinds.EMPTY,
        "token_ids []: expected at least one token id",
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_a_record_lacks_is_named_under_the_project_s_names(name: str, model: Model) -> None:
    record, kind, words = LACKING[name]
    good = {"prompt_token_ids": PROMPT, "token_ids": ANSWER, "sampler_logprobs": LOGPROBS}
    text = "\n".join(map(json.dumps, (good, record)))
    rollouts, (left,) = read_rollouts(text, "f", model.config)
    assert len(rollouts) == 1
    assert left.kind == kind and left.first.startswith(f"f, line 2: {words}"), left


KEYS = sorted(
    {key for _, record, _ in FORMS.values() for key in record} | {"outputs", "samples", "request", "response"}
)
JUNK = (
    st.none() | st.booleans() | st.integers(-2, 600) | st.floats() | st.sampled_from([PROMPT, [PROMPT], [{}], {}, "x"])
)


@given(
    st.sampled_from(sorted(CONVERTERS)), st.dictionaries(st.sampled_from(KEYS), JUNK), st.sampled_from(sorted(FORMS))
)
def test_any_record_gives_sequences_or_one_error(model: Model, form: str, junk: dict[str, Any], name: str) -> None:
    for record in (junk, {**FORMS[name][1], **junk}):
        for chosen in (form, "auto"):
            try:
                rollouts, left = read_rollouts(json.dumps(record), "f", model.config, chosen)
            except RequestError as problem:
                assert "\n" not in str(problem)
            else:
                assert rollouts and all(kind.first.startswith("f, line 1") for kind in left)
