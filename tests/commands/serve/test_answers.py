"""What clients get is what the reference computes, however it is asked for, whole or in pieces, alone or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from served_app import Served, alone, expected, joined, model, serving, wrong

import lfm2np
from lfm2np.commands.serve.answers import token_name

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(model()) as one:
        yield one


token_ids = st.integers(0, 511)

MORE: list[dict[str, Any]] = [  # every field that changes an answer
    *({}, {"stop": ["7", "\n"]}, {"repetition_penalty": 1.3}, {"top_k": 5}, {"top_p": 0.7, "min_p": 0.1}),
    *({"presence_penalty": 1.0, "frequency_penalty": -0.5}, {"logit_bias": {"7": 3.0}}, {"banned_token_ids": [7]}),
    *({"stop_token_ids": [288, 7]}, {"stop": " ", "include_stop_str_in_output": True}, {"ignore_eos": True}),
    *({"profile": "transformers"}, {"cache_salt": "a", "priority": 2}),
]


@pytest.mark.parametrize("more", MORE, ids=str)
def test_each_field_does_what_it_does_alone_whole_and_streamed(served: Served, more: dict[str, Any]):
    for prompt, temperature, is_streamed in (("sort: 7 2 9 ->", 0.0, False), ("copy: 4 \u2603 ->", 1.5, True)):
        fields = {"prompt": prompt, "max_tokens": 6, "temperature": temperature, "seed": 5, **more}
        assert wrong(served.port, fields, expected(fields, logprobs=2), is_streamed) == ""


@pytest.mark.night
@given(lot=st.lists(st.lists(token_ids, min_size=1, max_size=12), min_size=1, max_size=3), n=st.integers(1, 3))
@settings(deadline=None, max_examples=20)
def test_several_prompts_and_samples_are_numbered_prompt_after_prompt(served: Served, lot: list[list[int]], n: int):
    fields = {"prompt": lot, "n": n, "seed": 7, "max_tokens": 5, "return_token_ids": True, "logprobs": 1}
    status, reply = served.ask("/v1/completions", fields)
    assert status == 200, reply
    samples = [choice["token_ids"] for choice in reply["choices"]]
    outputs = [alone(ids, n=n, seed=7, max_tokens=5) for ids in lot]
    assert samples == [list(sample.token_ids) for output in outputs for sample in output.outputs]
    assert [choice["index"] for choice in reply["choices"]] == list(range(n * len(lot)))
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [ids for ids in lot for _ in range(n)]
    new = sum(map(len, samples))
    assert reply["usage"]["completion_tokens"] == new
    assert reply["usage"]["prompt_tokens"] == sum(map(len, lot))
    assert reply["usage"]["total_tokens"] == new + sum(map(len, lot))
    status, events = served.ask(
        "/v1/completions", {**fields, "stream": True, "stream_options": {"include_usage": True}}
    )
    pieces = joined(events)
    for choice in reply["choices"]:
        for name in ("text", "token_ids", "logprobs", "finish_reason", "stop_reason"):
            assert pieces[choice["index"]][name] == choice[name], name
    assert events[-1]["choices"] == []
    assert {**events[-1]["usage"], "prompt_tokens_details": None} == {**reply["usage"], "prompt_tokens_details": None}
    assert all(event["usage"] is None for event in events[:-1])


@given(ids=st.lists(token_ids, min_size=1, max_size=30), is_streamed=st.booleans(), goes_on=st.booleans())
@example(ids=[172], is_streamed=False, goes_on=True)  # a byte that is no whole character by itself
@settings(deadline=None, max_examples=30)
def test_an_echoed_prompt_has_the_log_probabilities_that_scoring_it_gives(
    served: Served, ids: list[int], is_streamed: bool, goes_on: bool
):
    fields = {"prompt": ids, "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 3 * goes_on}
    status, reply = served.ask("/v1/completions", {**fields, "stream": is_streamed})
    assert status == 200, reply
    choice = joined(reply)[0] if is_streamed else reply["choices"][0]
    logprobs = choice["logprobs"]
    (sample,) = alone(ids, temperature=0, max_tokens=3).outputs
    new = list(sample.token_ids) if goes_on else []
    assert logprobs["tokens"] == [token_name(model(), token_id) for token_id in [*ids, *new]]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    scores = model().score([*ids, *new]) if len(ids) + len(new) > 1 else []
    assert logprobs["token_logprobs"][1:] == [score.logprob for score in scores]
    best = [max(top, key=lambda token: top[token]) for top in logprobs["top_logprobs"][1:]]
    assert [likeliest == name for likeliest, name in zip(best, logprobs["tokens"][1:], strict=True)] == [
        score.rank == 1 for score in scores
    ]
    text = model().tokenizer.decode(ids) + (sample.text or "" if goes_on else "")
    assert choice["text"] == text
    starts = [len(told_text(ids[:count])) for count in range(len(ids))]
    starts += [len(model().tokenizer.decode(ids)) + len(told_text(new[:count])) for count in range(len(new))]
    assert logprobs["text_offset"] == starts
    if not goes_on:
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    if not is_streamed:
        assert reply["usage"]["completion_tokens"] == len(new)


def told_text(ids: list[int]) -> str:
    """What these tokens complete: an unfinished character at their end is not there yet."""
    stream = model().tokenizer.stream()
    return "".join(stream.push(token_id) for token_id in ids)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_is_answered_as_the_engine_answers_its_tokens(served: Served, is_streamed: bool):
    messages = [{"role": "user", "content": [{"type": "text", "text": "sort: "}, {"type": "text", "text": "7 2 9 4"}]}]
    fields = {"messages": messages, "temperature": 0, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    status, reply = served.ask("/v1/chat/completions", {**fields, "stream": is_streamed})
    assert status == 200, reply
    ids = model().tokenizer.encode_chat([{"role": "user", "content": "sort: 7 2 9 4"}])
    (sample,) = alone(ids, temperature=0, max_tokens=40, logprobs=2).outputs
    if is_streamed:
        pieces = [event["choices"][0] for event in reply]
        assert [piece["delta"].get("role") for piece in pieces] == ["assistant", *[None] * (len(pieces) - 1)]
        assert all(event["object"] == "chat.completion.chunk" for event in reply)
        text = "".join(piece["delta"]["content"] for piece in pieces)
        logprobs = [reported for piece in pieces for reported in piece["logprobs"]["content"]]
        new = [token_id for piece in pieces for token_id in piece["token_ids"]]
        assert [piece["finish_reason"] for piece in pieces] == [*[None] * (len(pieces) - 1), "stop"]
        assert reply[0]["prompt_token_ids"] == ids and "prompt_token_ids" not in reply[1]
    else:
        (choice,) = reply["choices"]
        assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "stop"
        text, logprobs, new = choice["message"]["content"], choice["logprobs"]["content"], choice["token_ids"]
        assert reply["prompt_token_ids"] == ids
    assert (text, new) == (sample.text, list(sample.token_ids))
    assert text == "2 4 7 9"
    for reported, reference in zip(logprobs, sample.logprobs or (), strict=True):
        assert reported["logprob"] == reference.logprob
        assert [top["logprob"] for top in reported["top_logprobs"]] == [logprob for _, logprob in reference.top]
        spelled = model().tokenizer.token_bytes(reference.token_id)
        assert reported["bytes"] == (list(spelled) or None)


def test_without_a_seed_two_answers_differ(served: Served):
    def told() -> list[int]:
        fields = {"prompt": "add: 1", "temperature": 2.0, "max_tokens": 20, "ignore_eos": True}
        _, reply = served.ask("/v1/completions", fields | {"return_token_ids": True})
        return list(reply["choices"][0]["token_ids"])

    assert told() != told()


def test_prompt_log_probabilities_are_told_as_vllm_does(served: Served):
    fields = {"prompt": [1, 5, 9], "max_tokens": 1, "prompt_logprobs": 0, "echo": True, "logprobs": 3}
    _, reply = served.ask("/v1/completions", fields)
    assert all(len(logprob) == 1 for logprob in reply["choices"][0]["prompt_logprobs"][1:]), "none but the prompt's own"
    first, *rest = reply["choices"][0]["prompt_logprobs"]
    assert first is None
    scores = model().score([1, 5, 9])
    assert [likely[str(token)]["logprob"] for likely, token in zip(rest, [5, 9], strict=True)] == [
        score.logprob for score in scores
    ]


def test_a_prefix_that_is_known_is_counted_and_a_salt_keeps_it_apart(served: Served):
    ids = list(range(20, 44))

    def cached(**more: Any) -> int:
        reply = served.ask("/v1/completions", {"prompt": ids, "max_tokens": 1, **more})[1]
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() == 20, "or a preemption, of which nothing is told"
    assert cached(cache_salt="another") == 0


def test_tokenize_and_detokenize_are_each_others_reverse(served: Served):
    _, tokenized = served.ask("/tokenize", {"prompt": "sort: 7 2", "return_token_strs": True})
    assert tokenized["tokens"] == model().tokenizer.encode("sort: 7 2") and tokenized["count"] == len(
        tokenized["tokens"]
    )
    assert tokenized["token_strs"][0] == "<|startoftext|>"
    _, back = served.ask("/detokenize", {"tokens": tokenized["tokens"]})
    assert back == {"prompt": "sort: 7 2"}
    _, without = served.ask("/tokenize", {"prompt": "sort: 7 2", "add_special_tokens": False})
    assert without["tokens"] == tokenized["tokens"][1:]
    messages = [{"role": "user", "content": "sort: 7"}]
    assert served.ask("/tokenize", {"messages": messages})[1]["tokens"] == model().tokenizer.encode_chat(messages)


def test_the_model_says_what_it_is(served: Served):
    status, listed = served.get("/v1/models")
    assert status == 200
    (entry,) = listed["data"]
    assert entry["id"] == "trained" and entry["checkpoint_sha256"] == model().sha256
    assert served.get("/v1/models/trained") == (200, entry)
    _, reply = served.ask("/v1/completions", {"prompt": "a", "max_tokens": 1, "model": "trained"})
    assert reply["system_fingerprint"] == f"lfm2np-{lfm2np.__version__}-exact-{model().sha256}"


def test_metrics_count_what_was_done(served: Served):
    before = numbers(served.get("/metrics")[1])
    served.ask("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True})
    served.wait_until_empty()
    after = numbers(served.get("/metrics")[1])
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["lfm2np:generation_tokens_total"] == 4
    assert grown["lfm2np:engine_steps_total"] == 4
    assert grown['lfm2np:request_total{status="200"}'] == 1
    assert after["lfm2np:num_requests_running"] == after["lfm2np:kv_cache_usage_perc"] == 0


def numbers(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_tokens_as_ids_where_that_is_asked_for(served: Served):
    _, reply = served.ask(
        "/v1/completions",
        {"prompt": [1], "max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True},
    )
    (choice,) = reply["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


def test_no_two_tokens_share_a_name():
    names = [token_name(model(), token_id) for token_id in range(model().config.vocab_size)]
    assert len(set(names)) == len(names)
