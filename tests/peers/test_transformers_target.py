"""transformers:DIR against lfm2np's own greedy decoding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from answering import answers_to

import lfm2np
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import NO_ABORT, Answer, Request, failed, greedy
from lfm2np.oracle.engines.target import Target, TargetError
from lfm2np.oracle.engines.transformers_target import PADDED_AT_ONCE, TransformersTarget

pytestmark = pytest.mark.peers

TEXTS = ("sort: 3 1 2 ->", "add: 34 + 58 ->", "a", "copy: x y z ->", "reverse: a b c d ->", "the")
TOLERANCE = 1e-3  # nats; float32 against exact arithmetic, the largest seen is 1e-5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small gains nothing from more, and on busy cores they wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> lfm2np.Model:
    return lfm2np.load()


@pytest.fixture(scope="module")
def requests(model: lfm2np.Model) -> list[Request]:
    """A dozen: texts, and ids in no sense, of 1 to 60 tokens; half of them want their prompt scored."""
    prompts = [tuple(model.prompt_ids(text)) for text in TEXTS]
    prompts += [tuple((7 * n * n + 11 * n) % 512 for n in range(length)) for length in (1, 2, 3, 17, 33, 60)]
    return [greedy(str(n), ids, 3 + n % 4, prompt_logprobs=0 if n % 2 == 0 else None) for n, ids in enumerate(prompts)]


def require_right(model: lfm2np.Model, request: Request, answer: Answer) -> None:
    """Its tokens are the exact greedy ones, and its log-probabilities near the exact ones."""
    assert answer.error is None and answer.token_ids is not None and len(answer.token_ids) == request.max_tokens
    scores = model.score((*request.prompt_token_ids, *answer.token_ids))
    of_prompt = len(request.prompt_token_ids) - 1
    assert [score.rank for score in scores[of_prompt:]] == [1] * request.max_tokens
    assert answer.logprobs == pytest.approx([score.logprob for score in scores[of_prompt:]], abs=TOLERANCE)
    expected = [score.logprob for score in scores[:of_prompt]] if request.is_scored else None
    assert (answer.prompt_logprobs is None) == (expected is None)
    if expected is not None:
        assert answer.prompt_logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert answer.top_logprobs is not None
    for token, logprob, top in zip(answer.token_ids, answer.logprobs or (), answer.top_logprobs, strict=True):
        assert top[token] == logprob and len(top) == 5
        assert all(a >= b for a, b in pairwise(top.values()))


@pytest.mark.parametrize("padded", [False, True])
def test_in_float32_it_decodes_as_the_reference_does(
    model: lfm2np.Model, requests: list[Request], padded: bool
) -> None:
    target: Target = TransformersTarget(model.path, padded=padded)
    abilities = target.probe()
    assert abilities.at_once == (PADDED_AT_ONCE if padded else 1)
    assert "float32" in abilities.engine and not abilities.can_abort
    for request, answer in zip(requests, answers_to(target, requests), strict=True):
        require_right(model, request, answer)
    target.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_are_coarser(model: lfm2np.Model, requests: list[Request], dtype: str) -> None:
    answers = answers_to(TransformersTarget(model.path, dtype), requests[:3])
    errors = []
    for request, answer in zip(requests, answers, strict=False):
        assert answer.error is None and answer.token_ids is not None and answer.logprobs is not None
        scores = model.score((*request.prompt_token_ids, *answer.token_ids))[len(request.prompt_token_ids) - 1 :]
        errors += [abs(score.logprob - logprob) for score, logprob in zip(scores, answer.logprobs, strict=True)]
    assert 1e-4 < max(errors) < 1.0


def test_what_a_checkpoint_says_of_generation_has_no_effect(
    model: lfm2np.Model, requests: list[Request], tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model.path / name, tmp_path / name)
    settings = {"do_sample": True, "temperature": 0.3, "repetition_penalty": 5.0, "eos_token_id": list(range(512))}
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, "min_p": 0.15, "max_length": 3}))
    for request, answer in zip(requests, answers_to(TransformersTarget(tmp_path), requests[:4]), strict=False):
        require_right(model, request, answer)


def test_what_it_cannot_do_is_an_error_of_that_request(model: lfm2np.Model, requests: list[Request]) -> None:
    impossible = [greedy("bad", (1, 99999), 2), greedy("cut", (1,), 2, abort_after=1)]
    bad, cut, good = answers_to(TransformersTarget(model.path), [*impossible, requests[0]])
    assert bad.error is not None and bad.error.startswith("IndexError")
    assert cut == replace(failed(NO_ABORT), is_aborted=True)
    require_right(model, requests[0], good)


def test_a_model_that_is_none_is_a_target_error(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="transformers:"):
        TransformersTarget(tmp_path).probe()
    with pytest.raises(RequestError, match="dtype 'int8': expected one of float32"):
        TransformersTarget(tmp_path, "int8")
