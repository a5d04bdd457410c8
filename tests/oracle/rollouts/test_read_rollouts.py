"""Files of rollouts in the schema's form and as TRL and verl write them: what is read, what left out and named."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from of_schema import validator

from lfm2np.engine.loading import Model
from lfm2np.engine.sampling.params import SamplingParams, from_json
from lfm2np.errors import RequestError
from lfm2np.oracle.rollouts.measures import measures
from lfm2np.oracle.rollouts.reading import read_rollouts
from lfm2np.oracle.rollouts.rollout import FIELDS, SAMPLING, Rollout

SCHEMA = validator("rollouts").schema
GOOD: dict[str, Any] = {
    "prompt_token_ids": [1, 332, 39],
    "token_ids": [288, 38, 7],
    "sampler_logprobs": [-0.75, -0.0625, -0.001],
    "trainer_logprobs": [-0.76, -0.061, 0.0],
}
EVERY: dict[str, Any] = {
    **GOOD,
    "id": 7,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": -1,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logprobs_mode": "processed_logprobs",
    "trainer_logprobs_mode": "raw",
    "is_sampled": [1, 0, True],
    "step": 3,
    "group": 4,
    "pack": "p",
    "left_padding": 2,
    "metadata": {"reward": 1.0},
}
VOCABULARY, CONTEXT = 512, 1024


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_a_line_is_read_with_its_defaults(model: Model) -> None:
    rollouts, left = read_rollouts(lines(GOOD), "f.jsonl", model.config)
    assert left == []
    assert rollouts == [
        Rollout(
            id="line 1",
            prompt_token_ids=(1, 332, 39),
            token_ids=(288, 38, 7),
            sampler_logprobs=(-0.75, -0.0625, -0.001),
            trainer_logprobs=(-0.76, -0.061, 0.0),
            sampling=SamplingParams(),
            logprobs_mode="auto",
            is_sampled=(True, True, True),
        )
    ]


def test_every_field_is_read(model: Model) -> None:
    (rollout,), left = read_rollouts(lines(EVERY), "f.jsonl", model.config)
    assert left == [] and not complaints(EVERY)
    assert (rollout.id, rollout.group, rollout.pack, rollout.step) == ("7", "4", "p", 3)
    assert rollout.sampling == from_json({name: EVERY[name] for name in SAMPLING})
    assert (rollout.logprobs_mode, rollout.trainer_logprobs_mode) == ("processed", "raw")
    assert rollout.is_sampled == (True, False, True)
    assert rollout.sampler_logprobs == (-0.75, 0.0, -0.001)
    assert (rollout.left_padding, rollout.pad_token_id) == (2, model.config.pad_token_id)


def test_minus_infinity_is_a_value_however_it_is_written(model: Model) -> None:
    bare = '{"prompt_token_ids": [1], "token_ids": [5, 6], "sampler_logprobs": [-1, -Infinity]}\n'
    text = bare + lines({**GOOD, "trainer_logprobs": [-1, "-Infinity", -1e999]}).replace("-Infinity, ", "-1e999, ")
    rollouts, left = read_rollouts(text, "f.jsonl", model.config)
    assert left == []
    assert rollouts[0].sampler_logprobs == (-1.0, -math.inf)
    assert rollouts[1].trainer_logprobs == (-1.0, -math.inf, -math.inf)


# name: change of GOOD, and how the message begins that names the first such line
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"sampler_logprobs": [-1, math.nan, -1]}, "sampler_logprobs[1] nan: expected a number"),
    "NaN in a string": ({"sampler_logprobs": [-1, "NaN", -1]}, "sampler_logprobs[1] 'NaN': expected a number"),
    "infinity": ({"trainer_logprobs": [math.inf, 0, 0]}, "trainer_logprobs[0] inf: expected a number"),
    "huge": ({"trainer_logprobs": [10**400, 0, 0]}, "trainer_logprobs[0] 1000"),
    "positive": ({"sampler_logprobs": [-1, 0.5, -2]}, "sampler_logprobs[1] 0.5: expected at most 0"),
    "probabilities": (
        {"sampler_logprobs": [0.9, 0.5, 1]},
        "sampler_logprobs[0] 0.9: expected at most 0; all are between 0 and 1, so they may be probabilities",
    ),
    "without sign": (
        {"sampler_logprobs": [9, 0.5, 1]},
        "sampler_logprobs[0] 9.0: expected at most 0; none is below 0, so they may lack their sign",
    ),
    "null among them": ({"sampler_logprobs": [-1, None, -1]}, "sampler_logprobs[1] null: expected a number"),
    "text": ({"sampler_logprobs": [-1, "x", -1]}, "sampler_logprobs[1] 'x': expected a number"),
    "true": ({"sampler_logprobs": [-1, True, -1]}, "sampler_logprobs[1] true: expected a number"),
    "no list": ({"sampler_logprobs": -1}, "sampler_logprobs -1: expected a list of numbers"),
    "short": ({"sampler_logprobs": [-1]}, "sampler_logprobs: 1 entries, expected 3"),
    "long": ({"trainer_logprobs": [-1] * 4}, "trainer_logprobs: 4 entries, expected 3"),
    "neither": (
        {"sampler_logprobs": None, "trainer_logprobs": None},
        "sampler_logprobs and trainer_logprobs: both missing",
    ),
    "outside": ({"token_ids": [1, 2, VOCABULARY]}, "token_ids[2] 512: expected a whole number, 0 to 511"),
    "negative": ({"prompt_token_ids": [-1]}, "prompt_token_ids[0] -1: expected a whole number, 0 to"),
    "no id": ({"token_ids": [1, 2.0, 3]}, "token_ids[1] 2.0: expected a whole number"),
    "a truth value": ({"token_ids": [1, True, 3]}, "token_ids[1] True: expected a whole number"),
    "no answer": ({"token_ids": []}, "token_ids []: expected at least one token id"),
    "no prompt": ({"prompt_token_ids": []}, "prompt_token_ids []: expected at least one"),
    "null prompt": ({"prompt_token_ids": None}, "prompt_token_ids: missing, expected a list of token ids"),
    "too long": ({"prompt_token_ids": [1] * CONTEXT}, "token_ids: 1024 + 3 with the prompt's, expected at most max_"),
    "temperature": ({"temperature": -1}, "temperature -1: expected a finite number, at least 0"),
    "top_p": ({"top_p": 0}, "top_p 0: expected a number above 0, at most 1"),
    "mode": ({"logprobs_mode": "raw_logits"}, "logprobs_mode 'raw_logits': expected one of raw,"),
    "step": ({"step": 1.5}, "step 1.5: expected a whole number, 0 to 9223372036854"),
    "a step of 400 digits": ({"step": int("1" * 400)}, "step 1111"),
    "huge padding": ({"left_padding": 10**30}, "left_padding 1000"),
    "a float of padding": ({"left_padding": 1e30}, "left_padding 1e+30: expected a whole number, 0 to 1024"),
    "beyond float32": (
        {"sampler_logprobs": [-1e308] * 3},
        "sampler_logprobs[0] -1e+308: expected a number of at least -3.4e+38",
    ),
    "one beyond float32": ({"trainer_logprobs": [-1.0, -1e39, -math.inf]}, "trainer_logprobs[1] -1e+39"),
    "id": ({"id": [1]}, "id [1]: expected text or a whole number"),
    "mask": ({"is_sampled": [1, 2, 1]}, "is_sampled[1] 2: expected true or false"),
    "short mask": ({"is_sampled": [1]}, "is_sampled: 1 entries, expected 3"),
    "all masked": ({"is_sampled": [0, 0, 0]}, "is_sampled: false for all 3 tokens"),
    "routes": ({"routes": [[[0, 1]]]}, "routes: the model has no experts"),
    "trainer's routes": ({"trainer_routes": 3}, "trainer_routes: int, expected a list"),
    "unknown": ({"trainer_logprob": [1]}, "field trainer_logprob: unknown (did you mean trainer_logprobs?)"),
    "padding": ({"left_padding": -1}, "left_padding -1: expected a whole number, 0 to 1024"),
}


NOT_NUMBERS = ("NaN", "NaN in a string", "infinity", "huge", "beyond float32", "one beyond float32")
IMPOSSIBLE = (*NOT_NUMBERS, "positive", "probabilities", "without sign")  # for any side


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_line_is_left_out_and_named(name: str, model: Model) -> None:
    """Beside a good line, and one of an id of its own."""
    change, words = WRONG[name]
    records = {**GOOD, "id": "good"}, {**GOOD, **change}, {**GOOD, **change, "id": change.get("id", "another")}
    rollouts, (left,) = read_rollouts(lines(*records), "f.jsonl", model.config)
    assert [rollout.id for rollout in rollouts] == ["good"]
    assert left.count == 2 and words.startswith(left.kind)
    assert left.is_impossible == (name in IMPOSSIBLE)
    assert left.first.startswith(f"f.jsonl, line 2: {words}"), left.first
    assert "\n" not in left.first


def test_what_is_no_record_is_left_out_and_named(model: Model) -> None:
    text = lines({**GOOD, "id": "good"}, 5, [GOOD, 3], {"rows": 1}) + '{"token_ids": [1\n'
    rollouts, left = read_rollouts(text, "f.jsonl", model.config)
    assert [rollout.id for rollout in rollouts] == ["good", "line 3, entry 0"]
    assert [(kind.kind, kind.count) for kind in left] == [("record", 3), ("field", 1)]
    assert left[0].first == "f.jsonl, line 2: record: a JSON number, expected an object"
    (alone,) = read_rollouts(lines(GOOD) + "{", "f.jsonl", model.config)[1]
    assert alone.first.startswith("f.jsonl, line 2: record: not JSON: ")


def test_of_one_id_the_first_counts_and_equal_samples_without_ids_all_do(model: Model) -> None:
    a = {**GOOD, "id": "a"}
    rollouts, left = read_rollouts(lines(a, a, {**a, "step": 2}, GOOD, GOOD), "f.jsonl", model.config)
    assert [(rollout.id, rollout.step) for rollout in rollouts] == [("a", None), ("line 4", None), ("line 5", None)]
    assert {(kind.kind, kind.count) for kind in left} == {("id", 2)}
    assert left[0].first == "f.jsonl, line 2: id a: as in line 1, expected another"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "f.jsonl: no rollouts, expected one JSON object a line"),
        (" \n\n", "f.jsonl: no rollouts"),
        ("[]", "f.jsonl: no rollouts"),
        ("hello\n", "f.jsonl: 1 sequences, none of which can be used: record (1), first f.jsonl, line 1: record"),
        (
            '{"a": 1}\n{"a": 1}\n',
            "f.jsonl: 2 sequences, none of which can be used: field (2), first f.jsonl, line 1",
        ),
    ],
)
def test_a_file_of_which_nothing_can_be_used_is_refused(text: str, words: str, model: Model) -> None:
    with pytest.raises(RequestError) as problem:
        read_rollouts(text, "f.jsonl", model.config)
    assert str(problem.value).startswith(words) and "\n" not in str(problem.value)


def test_defaults_are_for_lines_that_lack_them(model: Model) -> None:
    records = GOOD, {**GOOD, "temperature": 0.5}, {**GOOD, "temperature": None}
    with pytest.raises(RequestError, match="field temprature: unknown"):
        read_rollouts(lines(GOOD), "f.jsonl", model.config, defaults={"temprature": 1})
    rollouts, _ = read_rollouts(lines(*records), "f.jsonl", model.config, defaults={"temperature": 0.7})
    assert [rollout.sampling.temperature for rollout in rollouts] == [0.7, 0.5, 0.7]


def test_a_list_and_an_open_file_are_read_too(model: Model, tmp_path: Path) -> None:
    records = [{**GOOD, "id": name} for name in "abc"]
    path = tmp_path / "f.jsonl"
    path.write_text(lines(*records), encoding="utf-8")
    with path.open(encoding="utf-8") as file:
        expected = read_rollouts(file, "f", model.config)
    assert len(expected[0]) == 3
    assert read_rollouts(json.dumps(records), "f", model.config) == expected


def test_a_line_ends_with_a_line_feed_only(model: Model) -> None:
    """JSON's strings may hold what str.splitlines takes for the end of a line: verl writes texts so."""
    record = json.dumps({**GOOD, "metadata": "a\u2028b\x85c"}, ensure_ascii=False)
    rollouts, left = read_rollouts(f"{record}\r\n{record}\r\n", "f", model.config)
    assert (len(rollouts), left) == (2, [])


def test_routes_are_read_as_a_check_reads_them(published: Model) -> None:
    experts = [[[0, 1]] * len(published.config.sparse_layers)] * 5
    (rollout,), left = read_rollouts(
        lines({**GOOD, "prompt_token_ids": [1, 2, 3], "token_ids": [4, 5, 6], "routes": experts}), "f", published.config
    )
    assert left == [] and rollout.routes is not None and rollout.trainer_routes is None
    assert [len(rollout.routes), len(rollout.routes[0])] == [5, len(published.config.sparse_layers)]


# --- the schema


def complaints(record: Any) -> list[str]:
    return [error.message[:200] for error in validator("rollouts").iter_errors(record)]


def test_the_schema_names_the_fields_of_a_line() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert set(SCHEMA["properties"]) == set(FIELDS)
    assert [complaints(example) for example in SCHEMA["examples"]] == [[]]


# --- any damage


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=2),
    max_leaves=4,
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FIELDS), JUNK, st.none() | st.integers(0, 200))
def test_damage_is_read_or_counted_and_harms_no_other_line(model: Model, name: str, junk: Any, cut: int | None) -> None:
    damaged = json.dumps({**EVERY, "id": "damaged", name: junk})[:cut]
    text = f"{lines({**GOOD, 'id': 'before'})}{damaged}\n{lines({**GOOD, 'id': 'behind'})}"
    readable, left = read_rollouts(text, "f", model.config)
    others = [other.id for other in readable if other.id in ("before", "behind")]
    assert others == ["before", "behind"] or junk in ("before", "behind")
    assert len(readable) + sum(kind.count for kind in left) == (3 if damaged.strip() else 2)
    for kind in left:
        assert kind.first.startswith("f, line 2: ") and kind.first.isprintable()


UNSEEN = {  # by a schema: sizes of numbers, 2.0 for 2, and lists beside each other
    *("NaN", "NaN in a string", "null among them", "no id", "beyond float32", "one beyond float32"),
    *("short", "long", "neither", "outside", "too long", "short mask", "all masked", "routes"),
    *("huge padding", "a float of padding"),
}


@pytest.mark.parametrize("name", sorted(set(WRONG) - UNSEEN))
def test_the_schema_refuses_what_the_reader_refuses(name: str) -> None:
    assert complaints({**GOOD, **WRONG[name][0]}) != []


# --- records of TRL and verl, as their own code wrote them: see fixtures/rollouts


FIXTURES = Path(__file__).parents[3] / "fixtures" / "rollouts"
TEMPERATURE = 0.7


def fixture(model: Model, name: str) -> list[Rollout]:
    """All of a file: nothing is left out."""
    rollouts, left = read_rollouts((FIXTURES / name).read_text(encoding="utf-8"), name, model.config)
    assert left == []
    return rollouts


def errors_of(model: Model, rollouts: Sequence[Rollout], side: str) -> Any:
    """Reported less exact log-probabilities of all sampled tokens, at the temperature.

    The samplers ran in bfloat16: these are small if, and only if, each token has its own log-probability.
    """
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
