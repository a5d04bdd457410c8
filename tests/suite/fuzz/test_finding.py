"""What is wrong with an answer is found, and what a right engine of the declared format may say is not."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from served_here import model

import lfm2np
from lfm2np.oracle.agreement import text_fault
from lfm2np.oracle.engines.records import BROKEN, DEAD, IMPOSSIBLE, NO_ANSWER, Answer, Trace, failed, greedy
from lfm2np.oracle.engines.target import LEAK, Played, Trouble
from lfm2np.suite.fuzz.draw_traces import Around, alphabet_of, draws
from lfm2np.suite.fuzz.judge import STOP, TEXT, WRONG, ByTruth

pytestmark = pytest.mark.rounding
A = alphabet_of(model().tokenizer, 300)
EOS = 4
PROMPT = A[:9]
Right = list[tuple[int, float, dict[int, float]]]  # token, log-probability, of the most probable


@functools.cache
def right(prompt: tuple[int, ...], count: int = 6) -> Right:
    """The exact greedy answer."""
    params = lfm2np.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=5)
    ((sample,),) = (each.outputs for each in lfm2np.LLM(model()).generate([list(prompt)], params))
    return [(each.token_id, each.logprob, dict(each.top)) for each in sample.logprobs or ()]


def answer(tokens: Sequence[int], logprobs: Sequence[float] | None = None, **fields: Any) -> Answer:
    fields = {"finish_reason": "length", **fields}
    return Answer(tuple(tokens), None if logprobs is None else tuple(logprobs), **fields)


def found(said: Answer, format_name: str = "float32", left: bool = False, texts: bool = True, **fields: Any) -> Any:
    sent = greedy("", PROMPT, **{"max_tokens": 6, **fields})
    played = Played(((replace(said, is_aborted=left),),))
    return ByTruth(model(), format_name, texts=texts).finding(Trace((sent,)), played)


@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("format_name", ["float32", "bfloat16"])
def test_a_flipped_token_is_found_where_it_stands(place: int, format_name: str) -> None:
    tokens = [token for token, _, _ in right(PROMPT)][: place + 1]
    tokens[place] = next(token for token in A if token not in right(PROMPT)[place][2])
    finding = found(answer(tokens, finish_reason="stop"), format_name, max_tokens=place + 1)
    assert finding is not None and (finding.kind, finding.request) == (WRONG, 0)
    assert finding.position.row == len(PROMPT) - 1 + place and finding.seen.token_ids == tuple(tokens)
    words = f"request 0, output token {place}: {tokens[place]}, but the oracle's is {finding.position.best}"
    assert finding.what.startswith(words)


@pytest.mark.parametrize(("format_name", "off"), [("float32", 0.01), ("bfloat16", -3.0)])
def test_a_log_probability_that_is_off_is_found(format_name: str, off: float) -> None:
    tokens, logprobs, _ = map(list, zip(*right(PROMPT), strict=True))
    assert logprobs[2] + off < 0
    logprobs[2] += off
    finding = found(answer(tokens, logprobs), format_name)
    assert finding is not None and finding.kind == WRONG
    assert f"output token 2: token {tokens[2]} with a log-probability that is off by" in finding.what


def test_the_first_wrong_token_of_the_first_wrong_request_is_reported() -> None:
    tokens, logprobs, _ = map(list, zip(*right(PROMPT), strict=True))
    wrong = answer(tokens, [*logprobs[:3], -50.0, -50.0, logprobs[5]])
    trace = Trace((greedy("", PROMPT, 6),) * 3)
    answers = ((answer(tokens, logprobs),), (wrong,), (answer(tokens, [-50.0] * 6),))
    finding = ByTruth(model(), "float32").finding(trace, Played(answers))
    assert finding is not None and finding.what.startswith("request 1, output token 3:") and finding.seen == wrong


def ties() -> tuple[tuple[int, ...], int, int]:
    """A prompt, and where in its answer bfloat16 may take the second instead."""
    for start in range(30):
        prompt = A[start : start + 9]
        for index, token in enumerate(ByTruth(model(), "bfloat16").right(greedy("", prompt, 6), None)):
            top = sorted(right(prompt)[index][2].items(), key=lambda pair: -pair[1])
            behind = top[0][1] - top[1][1]
            if not token.decided and behind > 0.02:
                return prompt, index, top[1][0]
    pytest.fail("no tie in thirty answers")


@pytest.mark.slow
def test_a_tie_of_the_declared_format_is_not_found() -> None:
    prompt, index, second = ties()
    tokens = [*(token for token, _, _ in right(prompt)[:index]), second]
    trace, played = Trace((greedy("", prompt, index + 1),)), Played(((answer(tokens),),))
    assert ByTruth(model(), "bfloat16").finding(trace, played) is None
    finding = ByTruth(model(), "float32").finding(trace, played)
    assert finding is not None and finding.kind == WRONG


def test_of_a_sampled_token_only_the_log_probability_is_judged() -> None:
    token, logprob = list(right(PROMPT)[0][2].items())[4]
    said = {"max_tokens": 1, "temperature": 1.0}
    assert found(answer([token], [logprob]), max_tokens=1) is not None  # greedy, it is a flip
    assert found(answer([token], [logprob]), **said) is None
    assert found(answer([token]), **said) is None
    finding = found(answer([token], [logprob - 0.5]), **said)
    assert finding is not None and finding.kind == WRONG and "log-probability that is off by -0.5" in finding.what


@pytest.mark.slow
def test_tokens_that_are_not_drawn_though_they_should_be_are_found() -> None:
    """A server that ignores temperature: each token and each log-probability is right."""
    trace = draws(Around(16, 64, 4, 300, A, sampling=True), 100)
    likeliest = [tuple(token for token, _, _ in right(request.prompt_token_ids, 2)) for request in trace.requests]
    played = Played(tuple((Answer(ids),) for ids in likeliest))
    finding = ByTruth(model(), "float32").finding(trace, played)
    assert finding is not None and finding.kind == WRONG
    assert finding.what.endswith("tokens at temperature 1 are drawn as if greedily")
    params = [
        lfm2np.SamplingParams(temperature=1.0, seed=request.params.seed, max_tokens=2) for request in trace.requests
    ]
    drawn = lfm2np.LLM(model()).generate([list(request.prompt_token_ids) for request in trace.requests], params)
    played = Played(tuple((Answer(output.outputs[0].token_ids),) for output in drawn))
    assert ByTruth(model(), "float32").finding(trace, played) is None


TEXTS = [model().tokenizer.decode(A[:count]) for count in range(4)]  # of the first tokens of A
LATER = {"stop": model().tokenizer.decode([A[2]])}
SHORT = {"max_tokens": 3}
THREE = answer(A[:3])


@pytest.mark.parametrize(
    ("said", "fields", "kind", "words"),
    [
        (answer([EOS], finish_reason="stop"), {}, "", ""),
        (answer(A[:3], finish_reason="stop"), {}, IMPOSSIBLE, "3 tokens with finish_reason 'stop', expected 6"),
        (answer(A[:3], finish_reason="stop"), {"left": True}, "", ""),
        (answer([], finish_reason="stop"), {}, IMPOSSIBLE, ""),
        (answer([300] * 6), {}, IMPOSSIBLE, "token_ids[0] 300: expected 0 to 299"),
        (answer([A[0]] * 7), {}, IMPOSSIBLE, "7 tokens, 6 were asked for"),
        (answer([A[0]] * 2), {}, IMPOSSIBLE, "finish_reason 'length' after 2 of 6 tokens"),
        (failed("it said no", IMPOSSIBLE), {}, IMPOSSIBLE, "it said no"),
        (failed("it said nothing", NO_ANSWER), {}, IMPOSSIBLE, "it said nothing"),
        (answer(A[:4], finish_reason="stop"), LATER, STOP, "stands in the text of its first 3 tokens, yet it goes on"),
        (
            answer([A[2], A[2]], finish_reason="stop"),
            LATER,
            STOP,
            "stands in the text of its first 1 tokens, yet it goes on",
        ),
        (answer(A[:2], finish_reason="stop"), LATER, STOP, "ends after 2 of 6 tokens, and stop"),
        (answer([A[0], A[2]], finish_reason="stop"), LATER, "", ""),
        (answer([*A[:2], EOS], finish_reason="stop"), LATER, "", ""),
        (answer([A[0]] * 6), {"stop": TEXTS[3]}, "", ""),  # it never came
        (replace(THREE, text=TEXTS[3]), SHORT, "", ""),
        (THREE, SHORT, "", ""),
        (replace(THREE, finish_reason=None), SHORT, "", ""),
        (replace(THREE, text=TEXTS[3], finish_reason="eos_token"), SHORT, "", ""),  # a word that nobody defined
        (answer(A[:2], text=TEXTS[1], finish_reason="stop"), {**SHORT, "stop": TEXTS[2][len(TEXTS[1]) :]}, "", ""),
        (replace(THREE, text=TEXTS[2]), {**SHORT, "stop": TEXTS[3][len(TEXTS[2]) :]}, "", ""),  # both are true
        (replace(THREE, text="anything"), {**SHORT, "left": True}, "", ""),
        (replace(THREE, text="anything"), {**SHORT, "texts": False}, "", ""),
        (replace(THREE, text=""), SHORT, TEXT, "text '', expected "),
        (replace(THREE, text=f" {TEXTS[3]}"), SHORT, TEXT, "that of its tokens"),
        (replace(THREE, text=TEXTS[2]), SHORT, TEXT, "that of its tokens"),
        (replace(THREE, text=TEXTS[3], finish_reason="stop"), SHORT, TEXT, "'stop' after 3 tokens, expected 'length'"),
        (answer(A[:2], text=TEXTS[2], finish_reason="stop"), {**SHORT, "stop": TEXTS[2][-1]}, TEXT, "tokens before"),
    ],
)
def test_the_form_the_end_and_the_text_of_an_answer(
    said: Answer, fields: dict[str, Any], kind: str, words: str
) -> None:
    finding = found(said, temperature=1.0, **fields)
    assert finding is None if not kind else (finding.kind, words in finding.what) == (kind, True), finding
    if kind == STOP:
        assert repr(fields["stop"]) in finding.what
        assert found(said, temperature=1.0, left=True, **fields) is None


def test_a_leading_blank_that_is_lost_is_named_as_such() -> None:
    ids = tuple(model().tokenizer.encode_more(" 5 5"))
    fault = text_fault(model().tokenizer, (EOS,), greedy("a", (1,), len(ids)), Answer(ids, text="5 5"))
    assert fault == "its text lacks the blank that its tokens begin with"


@pytest.mark.parametrize(("prompt", "is_right"), [((74, 245), True), ((245, 74), False)])
def test_behind_a_prompt_that_ends_within_a_character_a_text_may_begin_with_the_rest_of_it(
    prompt: tuple[int, ...], is_right: bool
) -> None:
    """vLLM 0.32's do; it was called wrong for that."""
    tokenizer = model().tokenizer
    assert tokenizer.decode(prompt).endswith("\ufffd") is is_right
    ids = tuple(tokenizer.encode_more(" 5 5"))
    answer = Answer(token_ids=ids, text=f"{tokenizer.decode(prompt)} 5 5")
    fault = text_fault(tokenizer, (EOS,), greedy("a", prompt, len(ids)), answer)
    assert (fault is None) is is_right
    assert text_fault(tokenizer, (EOS,), greedy("a", prompt, len(ids)), replace(answer, text=" 5")) is not None
    half = Answer(token_ids=(*ids, 245), text=f"{tokenizer.decode(prompt)} 5 5")  # ends within one, too
    assert (text_fault(tokenizer, (EOS,), greedy("a", prompt, len(ids) + 1), half) is None) is is_right


def test_a_server_that_is_gone_explains_all_else_and_a_leak_nothing() -> None:
    tokens = [token for token, _, _ in right(PROMPT)]
    good, bad, broken = answer(tokens), answer([A[0]] * 7), failed("it broke", BROKEN)
    trace = Trace((greedy("", PROMPT, 6),) * 2)

    def kind(said: tuple[Answer, Answer], trouble: Trouble | None) -> Any:
        finding = ByTruth(model(), "float32").finding(trace, Played(tuple((each,) for each in said), trouble))
        return finding and (finding.kind, finding.what, finding.request)

    dead, leak = Trouble(DEAD, "gone"), Trouble(LEAK, "held")
    assert kind((broken, bad), dead) == (DEAD, "gone", None)
    assert kind((bad, broken), leak) == (BROKEN, "request 1: it broke", 1)
    assert kind((good, bad), leak) == (IMPOSSIBLE, "request 1: 7 tokens, 6 were asked for", 1)
    assert kind((good, good), leak) == (LEAK, "held", None)
    assert kind((good, good), None) is None


def test_right_of_what_was_drawn_is_what_was_seen_if_it_can_be_scored() -> None:
    sent = greedy("", PROMPT, 2, temperature=1.0)
    drawn_tokens = ByTruth(model(), "float32").right(sent, answer([A[5], A[6]]))
    assert [(token.token_id, token.decided) for token in drawn_tokens] == [(A[5], False), (A[6], False)]
    for seen in (None, answer([A[5], 300]), answer([A[5]] * 3), Answer(error="none")):
        assert ByTruth(model(), "float32").right(sent, seen) == []
