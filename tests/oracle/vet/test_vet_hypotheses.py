"""Candidates, layouts and samplings as they are written, and what comes of them."""

import pytest
from quantise import write_types

import lfm2np
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.oracle.vet.hypotheses import (
    Candidate,
    Rendering,
    hypotheses_of,
    parse_candidate,
    parse_sampling,
    sent,
    shown,
)
from lfm2np.oracle.vet.questions import Question, asked, open_questions, question_from_json

MODEL = lfm2np.load()
QUESTION = asked("talk", "Hello.", "Be brief.", True)


def test_a_candidate_is_a_name_a_path_and_perhaps_a_cache():
    assert parse_candidate("a=some/dir") == ("a", "some/dir", None)
    assert parse_candidate("a=x=y.gguf,kv=q4_0") == ("a", "x=y.gguf", "q4_0")


@pytest.mark.parametrize("text", ["a", "=dir", "a=", "a=dir,kv=q3_0"])
def test_another_form_is_refused(text):
    with pytest.raises(RequestError, match="candidate"):
        parse_candidate(text)


@pytest.mark.parametrize("text", ["temperature", "temperature=x", "top_q=1", "top_p=0.5 top_p=0.6", "temperature=0"])
def test_a_sampling_that_cannot_be_is_refused(text):
    with pytest.raises(RequestError):
        parse_sampling(text)


def test_a_sampling_is_shown_and_sent_without_what_does_nothing():
    sampling = parse_sampling("temperature=0.7, top_k=40")
    assert shown(sampling) == "temperature=0.7 top_k=40"
    assert sent(sampling) == {"temperature": 0.7, "top_p": 1.0, "top_k": 40}
    assert sent(SamplingParams()) == {"temperature": 1.0, "top_p": 1.0}


def test_the_claim_comes_first_and_every_combination_has_a_name():
    candidates = [Candidate("a", MODEL), Candidate("b", MODEL, "q8_0")]
    renderings = [Rendering("without the system message", system=False)]
    hypotheses = hypotheses_of(candidates, "b", renderings, [SamplingParams(), parse_sampling("temperature=0.5")])
    assert [each.name for each in hypotheses.each][:4] == [
        "b",
        "b, sampled temperature=0.5",
        "b, without the system message",
        "b, without the system message, sampled temperature=0.5",
    ]
    assert len(hypotheses.each) == 8
    assert hypotheses.is_claimed(1) and not hypotheses.is_claimed(2) and not hypotheses.is_claimed(4)
    assert hypotheses.rivals(0) == [2, 3, 4, 5, 6, 7] and hypotheses.pairs == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_names_that_cannot_be_are_refused():
    twice = [Candidate("a", MODEL), Candidate("a", MODEL)]
    for candidates, claim in ((twice, None), ([], None), (twice[:1], "c")):
        with pytest.raises(RequestError):
            hypotheses_of(candidates, claim, [], [SamplingParams()])


def test_renderings_lay_the_question_out():
    tokenizer = MODEL.tokenizer
    plain = Rendering().ids(tokenizer, QUESTION)
    forgotten = Rendering("x", system=False).ids(tokenizer, QUESTION)
    assert forgotten == Rendering().ids(tokenizer, asked("talk", "Hello.", None, True))
    assert Rendering("x", system="Be brief.").ids(tokenizer, asked("talk", "Hello.", None, True)) == plain
    other = Rendering("x", "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}")
    assert tokenizer.decode(other.ids(tokenizer, QUESTION)) == "Be brief.Hello."
    assert tokenizer.chat.template != other.template  # the candidate's tokenizer stays as it was


def test_open_questions_are_all_different_and_the_same_for_a_seed():
    drawn = [question for question, _ in zip(open_questions(3, None, True), range(400), strict=False)]
    texts = [question.messages[0]["content"] for question in drawn]
    assert len(set(texts)) == 400
    assert texts == [q.messages[0]["content"] for q, _ in zip(open_questions(3, None, True), range(400), strict=False)]


@pytest.mark.parametrize(
    "raw", [[], {}, {"prompt": 1}, {"messages": []}, {"messages": [{"role": "user"}]}, {"prompt": "a", "messages": []}]
)
def test_a_question_of_another_form_is_refused(raw):
    with pytest.raises(RequestError, match="line 3"):
        question_from_json(raw, "line 3")


def test_a_question_survives_a_file():
    for question in (QUESTION, Question("k", prompt="Once")):
        assert question_from_json(question.as_json(), "line 1") == question


def test_a_cache_is_emulated_only_where_it_is_coarser_than_all_else(tmp_path):
    (half,) = write_types(lfm2np.trained_fixture(), ["F16"], tmp_path)
    coarse = {kv: Candidate("a", MODEL, kv).has_coarse_cache for kv in ("q4_0", "float8", "q8_0", "bfloat16")}
    assert coarse == {"q4_0": True, "float8": True, "q8_0": False, "bfloat16": False}
    assert Candidate("a", lfm2np.load(half), "q8_0").has_coarse_cache and not Candidate("a", MODEL).has_coarse_cache
    assert Candidate("a", lfm2np.load(half), "q8_0").format_name == "float16 kv:q8_0"
