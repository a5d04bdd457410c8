"""The tokens of an answer, and answers that say nothing."""

from types import SimpleNamespace

import pytest

import lfm2np
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.vet.asking import reply_of
from lfm2np.oracle.vet.hypotheses import Candidate, hypotheses_of
from lfm2np.oracle.vet.provider_answers import Reply
from lfm2np.oracle.vet.questions import Question
from lfm2np.oracle.vet.token_ids import LeftOut, tokens_of
from lfm2np.oracle.vet.vetting import Bounds, Session

MODEL = lfm2np.load()
TOKENIZER = MODEL.tokenizer
QUESTION = Question("k", prompt="Once")
EOS = (7,)
TEXT = "copy: ni vifo"
IDS = tuple(TOKENIZER.encode_more(TEXT))


def read(**fields):
    return tokens_of(Reply(QUESTION, **fields), TOKENIZER, EOS)


def test_ids_of_the_server_are_taken_as_they_are_and_the_end_is_a_token():
    assert read(token_ids=IDS, finish_reason="stop").token_ids == (*IDS, 7)
    assert read(token_ids=(*IDS, 7), finish_reason="stop").token_ids == (*IDS, 7)
    tokens = read(token_ids=IDS, finish_reason="length", logprobs=(-1.0,) * len(IDS))
    assert tokens.token_ids == IDS and tokens.logprobs == (-1.0,) * len(IDS) and tokens.are_certain


def test_log_probabilities_of_another_number_are_not_reported():
    assert set(read(token_ids=IDS, logprobs=(-1.0,)).logprobs) == {None}


def test_tokens_by_their_texts():
    texts = tuple(TOKENIZER.token_bytes(token).decode() for token in IDS)
    tokens = read(tokens=(*texts, "<|im_end|>"), finish_reason="stop", text=TEXT)
    assert tokens.token_ids == (*IDS, 7) and tokens.are_certain
    assert read(tokens=tuple(f"token_id:{token}" for token in IDS), finish_reason="length").token_ids == IDS


def test_a_text_is_tokenised_again_and_its_last_token_left_out_where_it_broke_off():
    tokens = read(text=TEXT, finish_reason="length")
    assert tokens.token_ids == IDS[:-1] and not tokens.are_certain
    assert read(text=TEXT, finish_reason="stop", completion_tokens=len(IDS) + 1).token_ids == (*IDS, 7)
    assert read(text="", finish_reason="stop").token_ids == (7,)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"error": "HTTP 429"}, "HTTP 429"),
        ({}, "empty answers"),
        ({"text": "", "finish_reason": "length"}, "empty answers"),
        ({"text": "a\ufffd"}, "broken character"),
        ({"text": TEXT, "completion_tokens": 3}, "another number of tokens"),
        ({"token_ids": (600,)}, "outside the vocabulary"),
        ({"text": TEXT[:1], "finish_reason": "length"}, "empty answers"),
    ],
)
def test_what_says_nothing_is_left_out_by_name(fields, why):
    with pytest.raises(LeftOut, match=why):
        read(**fields)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"choices": "x"},
        {"choices": [None]},
        {"choices": [{"message": 3}]},
        {"choices": [{"message": {"content": 4}, "token_ids": ["a"], "logprobs": {"content": [3]}}], "usage": []},
        {"choices": [{"text": None, "logprobs": {"tokens": 3, "token_logprobs": "x"}}]},
    ],
)
def test_odd_answers_report_nothing_and_raise_nothing(raw):
    with pytest.raises(LeftOut):
        tokens_of(reply_of(QUESTION, raw), TOKENIZER, EOS)


def test_llama_cpp_names_ids_among_its_log_probabilities():
    entries = [{"id": token, "token": "", "bytes": [], "logprob": -0.5} for token in (91, 7)]
    raw = {"choices": [{"message": {"content": "n"}, "finish_reason": "stop", "logprobs": {"content": entries}}]}
    assert tokens_of(reply_of(QUESTION, raw), TOKENIZER, EOS).token_ids == (91, 7)


def test_a_value_that_is_no_log_probability_is_not_reported():
    values = [float("nan"), float("inf"), 3.0, "x", None, -1.5]
    raw = {"choices": [{"text": None, "logprobs": {"tokens": ["token_id:9"] * 6, "token_logprobs": values}}]}
    assert tokens_of(reply_of(QUESTION, raw), TOKENIZER, EOS).logprobs == (None, None, None, None, None, -1.5)


def test_tokens_of_a_text_are_uncertain_without_log_probabilities_too():
    hypotheses = hypotheses_of([Candidate("a", MODEL)], None, [], [SamplingParams()])
    session = Session(hypotheses, SimpleNamespace(spreads=(0.1,)), 0.01, Bounds(), use_logprobs=False)
    assert not session.tokens_of(Reply(QUESTION, text=TEXT, finish_reason="length")).are_certain
    tokens = session.tokens_of(Reply(QUESTION, token_ids=IDS, logprobs=(-1.0,) * len(IDS)))
    assert tokens.are_certain and set(tokens.logprobs) == {None}
