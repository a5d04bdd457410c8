"""lfm2np.testing: right answers pass, wrong ones say where and by how much, and what can not be is one error."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import lfm2np
from lfm2np.engine.loading import Model
from lfm2np.errors import Lfm2npError
from lfm2np.testing import assert_right

pytestmark = pytest.mark.rounding
PROMPT = (1, 17, 42, 99, 200, 7)


@cache
def answer(form: str) -> tuple[list[int], list[float]]:
    params = lfm2np.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    (output,) = lfm2np.LLM(numerics=form).generate([list(PROMPT)], params)
    return list(output.outputs[0].token_ids), [each.logprob for each in output.outputs[0].logprobs or ()]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_a_right_answer_passes_also_in_numbers_of_numpy_and_without_log_probabilities(model: Model, form: str) -> None:
    ids, logprobs = answer(form)
    assert_right(PROMPT, ids, logprobs, form, model)
    assert_right(np.array(PROMPT), np.array(ids), np.array(logprobs, np.float32), form, model)
    assert_right(PROMPT, ids[:3], format=form)


@pytest.mark.slow
def test_a_coarser_format_than_stated_is_no_rounding(model: Model) -> None:
    with pytest.raises(AssertionError, match=r"^(DRIFT|BUG), not rounding: "):
        assert_right(PROMPT, *answer("bfloat16"), "float32", model)


@pytest.mark.slow
def test_a_wrong_token_is_named_with_the_exact_best_and_its_distance(model: Model) -> None:
    ids, logprobs = answer("bfloat16")
    wrong = [*ids[:4], (ids[4] + 1) % 512]
    with pytest.raises(AssertionError) as failure:
        assert_right(PROMPT, wrong, model=model)
    verdict, where, advice = str(failure.value).splitlines()
    assert verdict.startswith("BUG, not rounding: 1 token is further behind")
    assert where.startswith(f"token_ids[4] (position 10) is {wrong[4]}; the exact best is {ids[4]}, ")
    assert where.endswith("times the rounding error of bfloat16, which explains 10")
    assert f"lfm2np check ENGINE --model {model.path} --format 'bfloat16'" in advice
    with pytest.raises(AssertionError, match=r"token_ids\[2\] .*; its log-probability is off by -0.5 nats: "):
        assert_right(PROMPT, ids, [*logprobs[:2], logprobs[2] - 0.5, *logprobs[3:]], model=model)


IMPOSSIBLE = "BUG, not rounding: "  # the answer is wrong; else the test is
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": ()}, "0 prompt_ids and 2 token_ids: expected at least one each"),
    ({"prompt_ids": "abc"}, "prompt_ids 'abc': expected a list of numbers"),
    ({"prompt_ids": {1, 2}}, "prompt_ids {1, 2}: expected a list of numbers"),
    ({"token_ids": [True]}, r"token_ids \[True\]: true and false are no token ids"),
    ({"format": None}, "format None: expected text"),
    ({"token_ids": []}, "6 prompt_ids and 0 token_ids: expected at least one each"),
    ({"token_ids": 3}, "token_ids 3: 'int' object is not iterable"),
    ({"prompt_ids": [1, 600]}, r"ids\[1\]: 600, expected 0 to vocab_size-1=511"),
    ({"token_ids": [1] * 1020}, "1026 tokens to score: expected 2 to max_position_embeddings=1024"),
    ({"logprobs": []}, "logprobs: 0 entries for 2 token_ids"),
    ({"logprobs": [-1.0]}, "logprobs: 1 entries for 2 token_ids"),
    ({"format": "fp7"}, "format 'fp7': expected one of float32"),
    ({"model": "/nowhere"}, "/nowhere: not a directory"),
    ({"token_ids": [1, 600]}, rf"{IMPOSSIBLE}token_ids\[1\] 600: expected 0 to 511"),
    ({"token_ids": [1, -1]}, rf"{IMPOSSIBLE}token_ids\[1\] -1: expected a token id, at least 0"),
    ({"logprobs": [-1.0, float("nan")]}, rf"{IMPOSSIBLE}logprobs\[1\] nan: expected a finite number"),
    ({"logprobs": [-1.0, float("-inf")]}, rf"{IMPOSSIBLE}logprobs\[1\] -inf: expected a finite number"),
    ({"logprobs": [-1.0, 0.02]}, rf"{IMPOSSIBLE}logprobs\[1\] 0.02: expected at most 0"),
    (
        {"logprobs": [0.5, 0.9]},
        rf"{IMPOSSIBLE}logprobs\[1\] 0.9: expected at most 0; all are between 0 and 1, so they may be ",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_can_not_be_is_one_error_and_what_no_right_engine_answers_is_wrong(changes: Any, words: str) -> None:
    """Pinned: RequestError, which says that the test was wrong, with an index into prompt and answer."""
    with pytest.raises(AssertionError if words.startswith(IMPOSSIBLE) else Lfm2npError, match=rf"^{words}"):
        assert_right(**{"prompt_ids": PROMPT, "token_ids": [1, 2], **changes})


def test_a_model_of_rounding_arithmetic_is_no_truth() -> None:
    with pytest.raises(Lfm2npError, match="expected one that is loaded under 'exact'"):
        assert_right(PROMPT, [1], model=lfm2np.load(numerics="float32"))
