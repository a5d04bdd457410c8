"""`lfm2np rollouts` as a command: what it refuses, its exit codes and its files."""

import json
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

import lfm2np
from lfm2np.commands.cli import main
from lfm2np.oracle.rollouts.exact import READINGS, scores_of
from lfm2np.oracle.rollouts.rollout import Rollout

pytestmark = pytest.mark.slow

SCHEMA = json.loads((Path(lfm2np.__file__).parent / "oracle/schemas/report.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def scored():
    """The exact values of three answers, under each reading."""
    rng = np.random.default_rng(3)
    model = lfm2np.load(lfm2np.trained_fixture())
    rollouts = [Rollout(str(n), tuple(rng.integers(8, 512, 9).tolist()), (20, 30, 40)) for n in range(3)]
    return scores_of(model, rollouts, readings=[*READINGS, "tempered at 0.65"])[0]


@pytest.fixture(scope="module")
def right(scored, tmp_path_factory):
    """A file whose sampler reports the exact values; the last line lacks one."""
    lines = [
        {
            "id": each.rollout.id,
            "prompt_token_ids": each.rollout.prompt_token_ids,
            "token_ids": each.rollout.token_ids,
            "sampler_logprobs": each.views["raw"].logprobs.tolist()[: 3 if each.rollout.id != "2" else 2],
        }
        for each in scored
    ]
    path = tmp_path_factory.mktemp("rollouts") / "right.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.rounding
def test_right_rollouts_exit_with_2_where_some_are_left_out(right, answer, tmp_path):
    page, junit, kept = (str(tmp_path / name) for name in ("page.html", "junit.xml", "kept.jsonl"))
    report = answer("rollouts", str(right), "--report", page, "--report", junit, "--save", kept, code=2)
    figures = report["figures"]
    Draft202012Validator(SCHEMA).validate(report)
    assert report["verdict"] == "INCONCLUSIVE" and figures["rollouts"] == 2
    assert [side["verdict"] for side in figures["sides"].values()] == ["EXACT", "INCONCLUSIVE"]
    assert figures["left_out"][0]["count"] == 1
    assert "right.jsonl, line 3" in figures["left_out"][0]["first"]
    assert any("right.jsonl, line 3" in words for words in report["not_tested"])
    assert figures["scoring"]["tokens"] > 0
    assert "Sampler and trainer" in Path(page).read_text(encoding="utf-8")
    assert 'name="lfm2np rollouts" tests="1" failures="0"' in Path(junit).read_text(encoding="utf-8")
    again = answer("rollouts", str(right), "--save", kept, code=2)["figures"]
    assert again["scoring"]["tokens"] < figures["scoring"]["tokens"]  # exact scores are known, rounding errors are not
    assert again["sides"] == figures["sides"]


@pytest.mark.rounding
@pytest.mark.parametrize(("trainer", "verdict"), [("tempered at 0.65", "EXACT"), ("raw", "MISMATCH")])
def test_a_temperature_that_is_not_stated_has_one_verdict_everywhere(trainer, verdict, scored, capsys, tmp_path):
    """Fitted and said; a mismatch is what sampler and trainer report differently, stated or not."""
    readings = {"sampler_logprobs": "tempered at 0.65", "trainer_logprobs": trainer}
    lines = [
        {"prompt_token_ids": each.rollout.prompt_token_ids, "token_ids": each.rollout.token_ids}
        | {side: each.views[reading].logprobs.tolist() for side, reading in readings.items()}
        for each in scored
    ]
    path = tmp_path / "unstated.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    code, shown = main(["rollouts", str(path)]), capsys.readouterr()
    first, why = shown.out.splitlines()[:2]
    assert first.split() == ["verdict", verdict]
    assert "at temperature 0.65" in why and "which the file does not say" in why
    assert code == (verdict != "EXACT")
    assert shown.err.startswith(f"lfm2np: ProofError: {verdict}: ") if code else not shown.err
    assert "BUG" not in shown.out + shown.err


@pytest.mark.rounding
def test_a_sample_says_that_it_is_one(right, capsys):
    assert main(["rollouts", str(right), "--sample", "1"]) == 2
    assert "1 rollout (a sample of 2)" in capsys.readouterr().out
