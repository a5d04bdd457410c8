"""http://HOST:PORT: many requests together, cancelled ones, what servers in each dialect reveal; and servers that do
everything wrong."""

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from answering import answers_to
from engines import checked_target
from http_player import (
    PLAYS,
    TELLING,
    TEXTS,
    Handler,
    Play,
    Player,
    computed,
    model,
    play_vllm,
    playing,
    reply_of,
    request_of,
    target_of,
)
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.errors import RequestError
from lfm2np.oracle.check import judged
from lfm2np.oracle.check_report import report_of
from lfm2np.oracle.engines import http_client
from lfm2np.oracle.engines.dialects import LLAMA_CPP, SGLANG, TEXT, VLLM
from lfm2np.oracle.engines.dialects.dialect import Extras
from lfm2np.oracle.engines.http_target import HttpTarget, kind_of, miscounted, read_answer, read_fields
from lfm2np.oracle.engines.records import (
    BROKEN,
    DEAD,
    FAILED,
    HANG,
    NO_ANSWER,
    REFUSED,
    Answer,
    Request,
    changed,
    failed,
    greedy,
)
from lfm2np.oracle.engines.target import AT_ONCE, MOST_AT_ONCE, Target, TargetError
from lfm2np.oracle.engines.validate import validate
from lfm2np.oracle.judging.verdict import Verdict

pytestmark = pytest.mark.rounding  # all: what one of them computes is kept for the others

SHORT = 0.3  # seconds, where a server is to take too long


@pytest.fixture
def vllm() -> Iterator[Player]:
    with playing("vllm") as player:
        yield player


def spoiled(player: Player, trouble: Callable[[Handler], Any], is_streamed: bool = False, **options: Any) -> Answer:
    """The answer of a server that was right when it was probed."""
    target = target_of(player, **options)
    target.probe()
    player.seen.clear()
    player.trouble = lambda handler: trouble(handler) or True
    (answer,) = answers_to(target, [request_of("a", streamed=is_streamed)])
    return answer


# Together, and cancelled


@pytest.mark.slow
def test_all_requests_are_in_flight_together(vllm: Player) -> None:
    target = target_of(vllm, at_once=3)
    target.probe()
    meeting = threading.Barrier(3, timeout=10)
    vllm.trouble = lambda handler: meeting.wait() < 0
    answers = answers_to(target, [request_of(text, text) for text in TEXTS])
    assert [answer.error for answer in answers] == [None] * 3


@pytest.mark.parametrize(("name", "tells_ids"), [("vllm", True), ("llama.cpp", False), ("sglang", True)])
def test_an_aborted_request_is_left_midway_and_its_neighbour_is_not(name: str, tells_ids: bool) -> None:
    with playing(name) as player:
        target = target_of(player)
        target.probe()
        player.left.clear()
        aborted, other = answers_to(target, [request_of("a", max_tokens=8, abort_after=4), request_of("b")])
        assert player.left.wait(10)
    assert (aborted.error, aborted.finish_reason, other.error) == (None, "abort", None)
    expected = computed(request_of("a").prompt_token_ids, 8, name != "llama.cpp").outputs[0].token_ids[:4]
    assert aborted.token_ids == (expected if tells_ids else None)
    assert other.token_ids is not None and len(other.token_ids) == 4


@pytest.mark.slow
def test_without_a_stream_the_connection_is_closed_after_a_while(vllm: Player) -> None:
    def no_stream(handler: Handler) -> bool:
        body = handler.server.seen[-1][2]
        if body.get("stream"):
            handler.say({}, 400)
        elif body.get("max_tokens") == 8:
            handler.server.freed.wait()
        else:
            return False
        return True

    vllm.trouble = no_stream
    target = target_of(vllm)
    hanging, whole = answers_to(target, [request_of("a", max_tokens=8, abort_after=4), request_of("b", abort_after=2)])
    assert hanging == Answer(finish_reason="abort", is_aborted=True)
    assert whole.error is None and (whole.is_aborted or len(whole.token_ids or ()) == 4)


def test_close_ends_what_is_under_way(vllm: Player) -> None:
    target = target_of(vllm, timeout=60.0)
    target.probe()

    def hang(handler: Handler) -> bool:
        handler.server.reached.set()
        return handler.server.freed.wait()

    vllm.trouble = hang
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.extend(answers_to(target, [request_of("a")])), daemon=True)
    thread.start()
    assert vllm.reached.wait(10)
    target.close()
    target.close()
    thread.join(10)
    assert len(answers) == 1 and answers[0].error is not None


# Servers that misbehave


def raw(handler: Handler, content: bytes) -> None:
    handler.wfile.write(content)


def drip(handler: Handler, head: bytes = b"", dripped: bytes = b" ") -> None:
    raw(handler, head)
    while not handler.server.freed.wait(0.02):
        raw(handler, dripped)


def break_off(handler: Handler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, no farewell
    handler.connection.close()


JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"


EVENT_HEAD, FLOOD = JSON_HEAD.replace(b"application/json", b"text/event-stream"), b" " * 2**16
Trouble = Callable[[Handler], Any]
SLOW: list[Trouble] = [
    lambda h: h.server.freed.wait(),
    lambda h: drip(h, b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"),
    lambda h: drip(h, JSON_HEAD),
    lambda h: drip(h, JSON_HEAD + b"{}"),
]
ENDLESS: list[Trouble] = [
    lambda h: drip(h, JSON_HEAD, FLOOD),
    lambda h: drip(h, JSON_HEAD.replace(b"200 OK", b"500 No"), FLOOD),
    lambda h: h.say(FLOOD),
]
ENDLESS_STREAMS: list[Trouble] = [
    lambda h: drip(h, EVENT_HEAD, FLOOD),
    lambda h: drip(h, EVENT_HEAD, FLOOD + b"\n"),
]
TOO_MUCH = "a response of more than 20000 bytes: expected fewer, and an end"
TROUBLES: list[tuple[Trouble, str, str]] = [
    *((trouble, f"no complete answer within {SHORT:g} s", HANG) for trouble in SLOW),
    *((trouble, TOO_MUCH, NO_ANSWER) for trouble in (*ENDLESS, *ENDLESS_STREAMS)),
    (lambda h: raw(h, b"\0\xff what is this\r\n\r\n"), "no HTTP as it should be: BadStatusLine", BROKEN),
    (lambda h: h.say(b'{"choices": ['), "not JSON", NO_ANSWER),
    (lambda h: h.say(b"[1]"), "a JSON array, expected an object", NO_ANSWER),
    (lambda h: h.say(b'{"a": "\xff"}'), "not UTF-8", NO_ANSWER),
    (lambda h: h.say(b'{"a": 1, "a": 2}'), "'a' stands twice", NO_ANSWER),
    (lambda h: h.say(b"<html>", Content_Type="text/html"), "text/html: expected application/json", NO_ANSWER),
    (lambda h: h.say({"error": {"message": "out of\nblocks\x1b[31m"}}, 500), "HTTP 500: out of blocks", FAILED),
    (lambda h: h.say({"detail": [{"msg": "bad"}]}, 422), 'HTTP 422: [{"msg": "bad"}]', REFUSED),
    (lambda h: h.say(b"", 404), "HTTP 404: without a message", REFUSED),
    (lambda h: h.say({}, 401), "HTTP 401: {}; a key is read from the variable LFM2NP_API_KEY", REFUSED),
    (lambda h: h.say({}, 307, Location="http://else.where/"), "HTTP 307: to http://else.where/, expected", REFUSED),
]


@pytest.mark.parametrize(("trouble", "error", "kind"), TROUBLES)
def test_a_server_that_is_slow_endless_or_wrong_is_cut_off_with_an_error_that_says_so(
    vllm: Player, monkeypatch: pytest.MonkeyPatch, trouble: Trouble, error: str, kind: str
) -> None:
    """Pinned: what had come of a slow one was parsed, which took longer than the timeout, where much had."""

    def limited(handler: Handler) -> None:
        monkeypatch.setattr(http_client, "MOST_BYTES", 20_000)
        if kind == HANG:
            monkeypatch.setattr(http_client, "parse_reply", lambda *_: pytest.fail("parsed"))
        trouble(handler)

    is_streamed = trouble in ENDLESS_STREAMS
    answer = spoiled(vllm, limited, is_streamed, **({"timeout": SHORT} if kind == HANG else {}))
    assert answer.error is not None and error in answer.error and answer == failed(answer.error, kind)
    assert len(vllm.seen) == 1  # nothing of this is tried again


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (lambda h: h.say({}, 429, Retry_After="0"), "HTTP 429: {}"),
        (lambda h: h.say({}, 503), "HTTP 503: {}"),
        (lambda h: h.say(b"{", Content_Length="100"), "the connection broke: IncompleteRead"),
        (break_off, "the connection broke: ConnectionResetError"),
    ],
)
def test_a_busy_server_is_asked_again_and_given_up_if_it_stays_busy(
    vllm: Player, trouble: Callable[[Handler], Any], error: str
) -> None:
    target, todo = target_of(vllm), [trouble]
    target.probe()
    vllm.trouble = lambda handler: bool(todo) and (todo.pop()(handler) or True)
    (answer,) = answers_to(target, [request_of("a")])
    assert answer.error is None and len(answer.ids) == 4
    vllm.trouble = None
    kind = {"HTTP 429: {}": REFUSED, "HTTP 503: {}": FAILED}.get(error, BROKEN)
    assert spoiled(vllm, trouble) == failed(f"{error} (2 attempts)", kind)
    assert len(vllm.seen) == 2


def test_a_server_may_say_when_to_come_again_but_not_for_hours(vllm: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "LONGEST_PAUSE", 0.4)
    began = time.monotonic()
    assert spoiled(vllm, lambda h: h.say({}, 503, Retry_After="7200")).kind == FAILED
    assert 0.4 <= time.monotonic() - began < 20


# The key, and addresses


def test_no_message_shows_the_key(vllm: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LFM2NP_API_KEY", "sesame")
    answer = spoiled(vllm, lambda h: h.say({"error": f"wrong: {h.headers['Authorization']}"}, 400))
    assert answer.error == "HTTP 400: wrong: Bearer ***"
    for bad in ("open\nsesame", ""):
        monkeypatch.setenv("LFM2NP_API_KEY", bad)
        with pytest.raises(TargetError, match="LFM2NP_API_KEY: expected printable") as caught:
            target_of(vllm)
        assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://a", "a:80", "", "http://", "http://a:b", "http://a:99999999", "http://a/?q=1", "http://a/#x"),
        *("http://[::1", "http://a b", "http://a\r\nX: y", "http://ä", "http://me:secret@a", "http://secret@a"),
    ],
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(TargetError) as caught:
        HttpTarget(url, None)
    assert "secret" not in str(caught.value)


def test_a_url_may_have_a_path_and_end_as_openai_clients_have_it(vllm: Player) -> None:
    for end in ("/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions"):
        assert HttpTarget(vllm.url + end, None).probe().tells_token_ids
    with pytest.raises(TargetError, match="no known dialect"):
        HttpTarget(vllm.url + "/behind", None).probe()
    assert vllm.seen[-1][0] == "/behind/v1/models"


# Nobody there


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_nobody_there_is_a_target_error(scheme: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"{scheme}://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(TargetError, match=r"no connection: .*\(2 attempts\)"):
            HttpTarget(url, None, retries=1, backoff=0.01).probe()
        unused.listen()  # and who says nothing speaks no TLS
        if scheme == "https":
            with pytest.raises(TargetError, match=r"no connection: .*timed out"):
                HttpTarget(url, None, retries=0, timeout=SHORT).probe()


def test_a_server_without_tls_is_named(vllm: Player) -> None:
    with pytest.raises(TargetError, match="SSLError"):
        HttpTarget(vllm.url.replace("http", "https"), None, retries=0, timeout=5.0).probe()


def test_what_was_answered_before_a_server_went_is_kept(vllm: Player) -> None:
    target = target_of(vllm, at_once=1)
    target.probe()
    vllm.trouble = lambda handler: handler.server.socket.close()
    requests = [request_of("a"), changed(request_of("b"), after=0)]
    first, second = answers_to(target, requests)
    assert first.error is None
    assert second.kind == DEAD and "no connection" in str(second.error)
    assert [answer.kind for answer in answers_to(target, requests)] == [DEAD, DEAD]


def test_a_server_of_another_kind_is_a_target_error_with_what_it_said(vllm: Player) -> None:
    vllm.play = lambda path, body: {"choices": [{"text": 5, "finish_reason": "length"}]}
    with pytest.raises(TargetError, match="text 5: expected text"):
        target_of(vllm).probe()
    vllm.trouble = lambda handler: handler.say(b"<html>", Content_Type="text/html") or True
    with pytest.raises(TargetError, match=r"no known dialect: vllm .*text/html.*; text "):
        target_of(vllm).probe()


@pytest.mark.parametrize("value", ["-1", -math.inf, None])
def test_a_log_probability_that_is_none_does_not_make_ids_a_text(vllm: Player, value: Any) -> None:
    """Such a server was judged by its texts alone, and the check undecided. None: one is missing."""

    def play(path: str, body: dict[str, Any]) -> dict[str, Any]:
        scores = [-1.0, *([] if value is None else [value])]
        entries = {"tokens": ["token_id:9", "token_id:9"], "token_logprobs": scores}
        return {"choices": [{"text": "x", "token_ids": [9, 9], "logprobs": entries, "finish_reason": "length"}]}

    vllm.play = play
    with pytest.raises(TargetError, match=r"token ids come back, but no answer: vllm .*logprobs"):
        target_of(vllm).probe()


def test_prompts_log_probabilities_that_are_none_are_not_asked_for_again(vllm: Player) -> None:
    right = vllm.play

    def play(path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = right(path, body)
        if "prompt_logprobs" in body:
            reply["choices"][0]["logprobs"]["token_logprobs"] = ["-1"] * body["max_tokens"]
        return reply

    vllm.play = play
    abilities = target_of(vllm).probe()
    assert abilities.tells_logprobs and not abilities.tells_prompt_logprobs


# What servers in each dialect reveal


@pytest.mark.parametrize(
    ("name", "takes", "tells", "logprobs", "top", "prompt", "slots", "engine"),
    [
        ("vllm", True, True, True, 5, True, None, "vllm dialect, version 0.33.0"),
        ("sglang", True, True, True, 5, True, 200, "sglang dialect, version 0.5.23"),
        ("llama.cpp", True, True, True, 5, False, 32, "llama.cpp dialect, version b1-0c1e570"),
        ("mlx", False, True, True, 0, False, None, "text dialect, version 0.32.2-0.32.4"),
        ("text", False, False, False, 0, False, None, "text dialect, version not told"),
    ],
)
def test_the_probe_finds_what_a_server_reveals_and_answers_are_what_our_own_engine_says(
    name: str, takes: bool, tells: bool, logprobs: bool, top: int, prompt: bool, slots: int | None, engine: str
) -> None:
    requests = [request_of(text, text, 9, prompt_logprobs=0) for text in TEXTS]
    with playing(name) as player:
        target: Target = target_of(player)
        abilities = target.probe()
        answers = answers_to(target, requests)
    assert abilities.engine == engine
    assert (abilities.takes_token_ids, abilities.tells_token_ids, abilities.tells_logprobs) == (takes, tells, logprobs)
    assert (abilities.num_top_logprobs, abilities.tells_prompt_logprobs, abilities.slots) == (top, prompt, slots)
    assert abilities.at_once == (AT_ONCE if slots is None else min(slots, MOST_AT_ONCE))
    for request, answer in zip(requests, answers, strict=True):
        output = computed(request.prompt_token_ids, 9, name in ("vllm", "sglang"))
        (completion,) = output.outputs
        assert (answer.error, answer.text) == (None, completion.text)
        assert answer.token_ids == (completion.token_ids if tells else None)
        assert answer.finish_reason == (completion.finish_reason if tells else "length")
        assert answer.logprobs == (tuple(each.logprob for each in completion.logprobs) if logprobs else None)
        assert answer.top_logprobs == (tuple(dict(each.top) for each in completion.logprobs) if top else None)
        assert answer.prompt_logprobs == (tuple(e.logprob for e in output.prompt_logprobs[1:]) if prompt else None)


def test_what_each_probe_was_refused_for_is_kept_for_the_report(vllm: Player) -> None:
    """Pinned: "no answer told the ids of its tokens", and nothing of why."""
    text_only = {"choices": [{"text": "x", "finish_reason": "length"}]}
    vllm.play = lambda path, body: text_only if path == "/v1/completions" else None
    abilities = target_of(vllm).probe()
    where = "choices[0].token_ids or choices[0].logprobs.tokens"
    with_prompts = "with log-probabilities of the prompt"
    assert abilities.refused == (
        f"vllm (/v1/completions, {with_prompts}): no token ids in the reply, expected {where}",
        f"sglang (/generate, {with_prompts}): HTTP 404: no such thing",
        "llama.cpp (/completion, with log-probabilities): HTTP 404: no such thing",
    )
    pair = request_of("a"), Answer(text="x", finish_reason="length")
    result = judged(model(), abilities, "float32", [pair])
    assert result.total.verdict is Verdict.INCONCLUSIVE
    assert result.total.reasons[-1] == f"probed as {'; '.join(abilities.refused)}"
    assert abilities.refused[1] in report_of(result).facts["probed as"]


def test_a_server_that_takes_text_only_gets_no_prompt_without_one() -> None:
    with playing("text") as player:
        (answer,) = answers_to(target_of(player), [greedy("b", (1, 2, 3), 4)])
    assert answer.error is not None and "prompt_text" in answer.error


def test_requests_are_greedy_without_penalties_unless_they_have_a_stop_string_or_a_seed() -> None:
    """And llama.cpp may stop."""
    drawn = request_of("s", stop="end", seed=7, temperature=1.0)
    for dialect in (VLLM, SGLANG, LLAMA_CPP):
        body, other = (dialect.request(each, Extras()) for each in (request_of("a", cold=True), drawn))
        sampling, others = body.get("sampling_params", body), other.get("sampling_params", other)
        assert (sampling["temperature"], sampling["top_p"], sampling["min_p"]) == (0.0, 1.0, 0.0)
        assert sampling.get("repetition_penalty", sampling.get("repeat_penalty")) == 1.0
        assert sampling["ignore_eos"] is (dialect is not LLAMA_CPP)
        assert body.get("cache_prompt", False) is False and ("cache_salt" in body) is (dialect is VLLM)
        assert others["stop"] == ["end"] and not {"stop", "seed"} & sampling.keys()
        assert not dialect.takes_seeds or (others["seed"], others["temperature"]) == (7, 1.0)
    assert [dialect.takes_stops for dialect in (VLLM, SGLANG, LLAMA_CPP, TEXT)] == [True, True, True, False]
    assert [dialect.takes_seeds for dialect in (VLLM, SGLANG, LLAMA_CPP, TEXT)] == [True, False, True, False]


def test_penalties_and_filters_have_the_names_that_each_server_gives_them() -> None:
    asked = request_of("a", top_k=3, min_p=0.5, repetition_penalty=1.5, presence_penalty=1.0, logit_bias={7: 2.0})
    shared = {"top_k": 3, "min_p": 0.5}
    assert {*asked.processors} <= {*VLLM.processors}
    body = VLLM.request(asked, Extras())
    expected = {**shared, "repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {"7": 2.0}}
    assert {name: body[name] for name in expected} == expected
    body = LLAMA_CPP.request(changed(asked, presence_penalty=0.0, logit_bias=None), Extras())
    assert not {"presence_penalty", "logit_bias"} & {*LLAMA_CPP.processors}
    expected = {**shared, "repeat_penalty": 1.5, "repeat_last_n": -1}
    assert {name: body[name] for name in expected} == expected and "repetition_penalty" not in body


def test_a_server_that_refuses_a_salt_gets_none(vllm: Player) -> None:
    vllm.play = lambda path, body: None if "cache_salt" in body else play_vllm(path, body)
    target = target_of(vllm)
    assert not target.probe().takes_cold
    (answer,) = answers_to(target, [request_of("a", cold=True)])
    assert answer.error is None and answer.token_ids is not None


def test_a_server_that_refuses_prompt_logprobs_is_asked_for_less_and_it_is_said(vllm: Player) -> None:
    vllm.play = lambda path, body: None if "prompt_logprobs" in body else play_vllm(path, body)
    target = target_of(vllm)
    (refused,) = target.probe().refused
    assert refused == "vllm (/v1/completions, with log-probabilities of the prompt): HTTP 404: no such thing"
    (answer,) = answers_to(target, [request_of("a", prompt_logprobs=0)])
    assert answer.error is None and answer.prompt_logprobs is None and answer.logprobs is not None


def test_ids_of_keys_serve_where_token_ids_are_missing(vllm: Player) -> None:
    vllm.spoil = lambda reply: reply["choices"][0].pop("token_ids")
    (answer,) = answers_to(target_of(vllm), [request_of("a")])
    assert answer.token_ids == computed(request_of("a").prompt_token_ids, 4, True).outputs[0].token_ids


def test_llama_cpp_without_an_entry_for_a_part_of_a_character_has_no_logprobs() -> None:
    with playing("llama.cpp") as player:
        target = target_of(player)
        target.probe()
        player.spoil = lambda reply: reply["completion_probabilities"].pop(1)
        (answer,) = answers_to(target, [request_of("a")])
    assert answer.token_ids is not None and answer.logprobs is None and answer.error is None


def test_usage_counts_the_tokens_of_all_samples() -> None:
    samples = [{"token_ids": [1, 2]}, {"token_ids": [3]}]
    assert miscounted({"usage": {"completion_tokens": 3}}, samples) is None and miscounted({}, samples) is None
    words = "usage.completion_tokens 2: expected 3, the tokens of all 2 samples"
    assert miscounted({"usage": {"completion_tokens": 2}}, samples) == words


def test_a_reply_of_samples_that_are_miscounted_is_impossible(vllm: Player) -> None:
    target, request = target_of(vllm), greedy("a", (1, 2), 2, temperature=1.0, n=2)
    choices = [{"index": index, "token_ids": [1, 2], "finish_reason": "length"} for index in (0, 1)]
    right, wrong = (
        target.read({"choices": choices, "usage": {"completion_tokens": count}}, request, False, False)
        for count in (4, 2)
    )
    assert [answer.error for answer in right] == [None, None]
    assert len(wrong) == 1 and wrong[0].is_refuted


def test_llama_cpps_answer_of_one_token_has_its_logprob() -> None:
    with playing("llama.cpp") as player:
        (answer,) = answers_to(target_of(player), [request_of("a", max_tokens=1)])
    assert answer.num_tokens == 1 and answer.logprobs is not None


def test_the_model_is_named_only_where_it_is_given_or_wanted(vllm: Player) -> None:
    target_of(vllm).probe()
    assert all("model" not in body for _, _, body in vllm.seen)
    target_of(vllm, model_name="other").probe()
    assert vllm.seen[-2][2]["model"] == "other"


def test_of_several_models_that_a_server_lists_none_is_chosen() -> None:
    listed = json.dumps({"data": [{"id": "only"}, {"id": "other"}]}).encode()
    with playing("text") as player:
        player.trouble = lambda handler: handler.path == "/v1/models" and (handler.say(listed) or True)
        with pytest.raises(TargetError, match="no known dialect"):
            target_of(player).probe()


# Answers that can't be true

Spoil = Callable[[dict[str, Any]], Any]
TWICE = [[[-1.0, 5, None], [-2.0, 5, None]]] * 4
OF_CHOICE: list[tuple[Spoil, str]] = [
    (lambda c: c.update(token_ids=[1, 2, 3, -1], logprobs=None), "token_ids[3] -1: expected a token id"),
    (lambda c: c.update(token_ids=[1, 2, 3, 512], logprobs=None), "token_ids[3] 512: expected 0 to 511"),
    (lambda c: c.update(token_ids=[1, 2, 3, 4.0], logprobs=None), "token_ids[3] 4.0: expected a whole number"),
    (lambda c: c.update(token_ids="1234", logprobs=None), "token_ids: str, expected a list"),
    (lambda c: c.update(token_ids=[1, 2, 3, 4, 5], logprobs=None), "but the server counted 4 new tokens"),
    (lambda c: c["token_ids"].reverse(), "logprobs.tokens: other tokens"),
    (lambda c: c["logprobs"]["token_logprobs"].pop(), "logprobs: 3 entries for 4 token_ids"),
    (lambda c: c["logprobs"].update(token_logprobs=[0, 0, 0, None]), "logprobs[3] None: expected a finite number"),
    (lambda c: c["logprobs"]["top_logprobs"].pop(), "top_logprobs: 3 entries for 4 token_ids"),
    (
        lambda c: c["logprobs"]["top_logprobs"][2].update({"token_id:600": 0}),
        "top_logprobs[2]: token id 600: expected",
    ),
    (
        lambda c: c["logprobs"]["top_logprobs"][2].update({"cat": 0}),
        'expected list of objects {"token_id:123": number}',
    ),
    (lambda c: c["logprobs"].update(tokens=[5] * 4), "logprobs.tokens [5, 5, 5, 5]: expected list of texts"),
    (lambda c: c["prompt_logprobs"].pop(), "prompt_logprobs: 7 entries, expected 8"),
    (lambda c: c["prompt_logprobs"].__setitem__(3, {"9": {}}), "choices[0].prompt_logprobs [None, {"),
    (lambda c: c["prompt_token_ids"].insert(0, 1), "prompt_token_ids: other tokens than the prompt"),
    (lambda c: next(iter(c["prompt_logprobs"][3].values())).update(logprob=1.0), "prompt_logprobs[2] 1.0: expected at"),
    (lambda c: c["logprobs"].update(token_logprobs=[0.5] * 4), "logprobs[0] 0.5: expected at most 0"),
    (lambda c: c.update(finish_reason=7), "finish_reason 7: expected text"),
]
OF_SGLANG: list[tuple[Spoil, str]] = [
    (lambda m: m["output_token_logprobs"].reverse(), "output_token_logprobs: other tokens than output_ids"),
    (lambda m: m.update(output_token_logprobs=[[1]] * 4), "[[1], [1], [1], [1]]: expected list of [number, id, text]"),
    (lambda m: m.update(input_token_logprobs=TWICE[0]), "input_token_logprobs: other tokens than the prompt"),
    (lambda m: m.update(output_top_logprobs=TWICE), "output_top_logprobs [[[-1.0, 5, None], [-2.0, 5, None]]"),
]
OF_LLAMA: list[tuple[Spoil, str]] = [
    (lambda r: r["tokens"].reverse(), "completion_probabilities: other tokens than tokens"),
    (lambda r: r.update(tokens_evaluated=9), "prompt tokens: the server counted 9, expected 8"),
    (lambda r: r.update(tokens_predicted=3), "token_ids: 4, but the server counted 3"),
    (lambda r: r.update(truncated=True), "truncated: true, so its slot is full"),
    (
        lambda r: r.update(tokens=r["tokens"][:3], completion_probabilities=[], tokens_predicted=3),
        "after 3 of 4 tokens",
    ),
]
SPOILED = [
    *(("vllm", lambda reply: reply["choices"][0], *row) for row in OF_CHOICE),
    *(("sglang", lambda reply: reply["meta_info"], *row) for row in OF_SGLANG),
    *(("llama.cpp", lambda reply: reply, *row) for row in OF_LLAMA),
]


@pytest.mark.parametrize(("name", "inner", "spoil", "error"), SPOILED)
def test_an_answer_that_cannot_be_true_names_its_field(
    name: str, inner: Callable[[Any], Any], spoil: Spoil, error: str
) -> None:
    request = request_of("a", prompt_logprobs=0)
    reply = reply_of(name, request)
    assert read_and_judged(name, reply, request).error is None
    spoil(inner(reply))
    assert error in why_not(name, reply, request)


REFUTED: list[tuple[str, Spoil, str]] = [  # by a server from its first response on
    ("vllm", lambda r: r["usage"].update(completion_tokens=9), "but the server counted 9 new tokens"),
    ("vllm", lambda r: r["usage"].update(prompt_tokens=9), "prompt tokens: the server counted 9, expected"),
    ("vllm", lambda r: r["choices"][0].update(prompt_token_ids=[1]), "prompt_token_ids: other tokens than the prompt"),
    ("vllm", lambda r: r["choices"][0]["token_ids"].reverse(), "logprobs.tokens: other tokens than choices[0].token_"),
    (
        "vllm",
        lambda r: r["choices"][0].update(token_ids=[512] * 2, logprobs=None),
        "token_ids[0] 512: expected 0 to 511",
    ),
    ("sglang", lambda r: r["meta_info"].update(completion_tokens=9), "but the server counted 9 new tokens"),
    ("llama.cpp", lambda r: r.update(tokens_evaluated=9), "prompt tokens: the server counted 9, expected"),
]


@pytest.mark.parametrize(("name", "spoil", "error"), REFUTED)
def test_a_response_that_no_right_engine_gives_is_of_its_dialect_and_a_bug(name: str, spoil: Spoil, error: str) -> None:
    """Pinned: no known dialect, exit code 3, of a server that counted a token too many."""
    with playing(name) as player:
        player.spoil = spoil
        target = target_of(player)
        abilities = target.probe()
        request = request_of("a", max_tokens=2)
        answer = validate(request, *answers_to(target, [request]), 512)
    assert abilities.engine.startswith(f"{name} dialect, ") and error in abilities.refused[0]
    assert abilities.tells_token_ids and abilities.tells_logprobs == ("512" not in error)
    assert answer.is_refuted and error in str(answer.error)
    assert judged(model(), abilities, "float32", [(request, answer)]).total.verdict is Verdict.BUG


def miscounting(path: str, body: dict[str, Any]) -> Any:
    """vLLM's responses with a wrong count; none where they hold no ids."""
    reply = PLAYS["vllm"][1](path, body)
    if reply and "usage" in reply:
        reply["usage"]["completion_tokens"] = 9
    return reply


def without_ids(path: str, body: dict[str, Any]) -> Any:
    reply = miscounting(path, body)
    for choice in reply.get("choices", ()) if reply else ():
        del choice["token_ids"], choice["logprobs"]
    return reply


@pytest.mark.parametrize(
    ("play", "other", "dialect"),
    [(miscounting, "sglang", "sglang"), (miscounting, "mlx", "vllm"), (without_ids, "llama.cpp", "llama.cpp")],
)
def test_a_dialect_that_is_right_goes_before_one_that_is_contradicted_but_for_texts(
    play: Play, other: str, dialect: str
) -> None:
    def both(path: str, body: dict[str, Any]) -> Any:
        return (
            PLAYS[other][1](path, body) if isinstance(body.get("prompt"), str) else play(path, body) or also(path, body)
        )

    also = PLAYS[other][1] if other != "mlx" else lambda path, body: None
    with playing(both) as player:
        assert target_of(player).probe().engine.startswith(f"{dialect} dialect, ")


@pytest.mark.parametrize(("name", "is_streamed"), [("mlx", False), ("sglang", True)])
def test_a_count_of_what_is_not_listed_refutes_nothing(name: str, is_streamed: bool) -> None:
    """Of texts a last token may not be listed; SGLang's events may be meant to be put together otherwise."""
    assert kind_of(PLAYS[name][0], is_streamed) == NO_ANSWER
    reply, request = reply_of(name, request_of("a")), request_of("a")
    inner = reply.get("meta_info") or reply["usage"]
    inner["completion_tokens"] = 5
    fields, why = read_fields(PLAYS[name][0], reply, request)
    answer = read_answer(request, fields, why, kind_of(PLAYS[name][0], is_streamed))
    assert answer == failed("token_ids: 4, but the server counted 5 new tokens", NO_ANSWER)


def read_and_judged(name: str, reply: dict[str, Any], request: Request) -> Answer:
    return validate(request, read_answer(request, PLAYS[name][0].read(reply, request)), 512)


def why_not(name: str, reply: dict[str, Any], request: Request) -> str:
    try:
        return read_and_judged(name, reply, request).error or "nothing"
    except RequestError as problem:
        return str(problem)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.slow
@given(st.sampled_from(TELLING), st.data())
def test_whatever_stands_anywhere_in_a_reply_ends_in_an_answer_or_a_named_error(name: str, data: st.DataObject) -> None:
    request = request_of("a", prompt_logprobs=0)
    reply = reply_of(name, request)
    holder, key = data.draw(st.sampled_from(list(places(reply))))
    holder[key] = data.draw(ANYTHING)
    why = why_not(name, json.loads(json.dumps(reply)), request)
    assert why and why.isprintable()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything that can be replaced in a JSON value: (container, key)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


# Hits of the prefix cache by the server's own counter

COUNTERS = {  # of a dialect: its page after so many requests, and what stands in the report
    "rises": (
        "vllm",
        'vllm:prefix_cache_hits_total{{engine="0"}} {0}.0',
        "by the server's counter of all requests",
    ),
    "of two sources": (
        "sglang",
        'sglang:cached_tokens_total{{s="device"}} {0}\nsglang:cached_tokens_total{{s="host"}} 3',
        "came from the cache",
    ),
    "stays": ("vllm", "vllm:prefix_cache_hits_total 7.0", "never hit in 13 requests that repeat a prefix of up to"),
    "other": ("vllm", "process_open_fds 7.0", "hits are not reported: 13 requests repeat a prefix"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "page", "words"), COUNTERS.values(), ids=COUNTERS)
def test_a_server_whose_answers_report_no_hits_may_count_them(name: str, page: str, words: str) -> None:
    with playing(name) as player:
        player.trouble = lambda handler: (
            handler.path == "/metrics"
            and (handler.say(page.format(sum(path != "/metrics" for path, _, _ in player.seen)).encode()) or True)
        )
        result = checked_target(model(), target_of(player), cases=("hits",), at_once=1)
        requested = [path for path, _, _ in player.seen].count("/metrics")
    line = report_of(result).facts["prefix cache"]
    is_hit = "{0}" in page
    assert words in line and line.endswith("13 requests repeat a prefix, all right") == is_hit
    assert any(line in words for words in report_of(result).not_tested) == (not is_hit)
    assert (requested == 1) == (name == "vllm" and "process" in page)  # what is not there is not asked for again
    assert result.total.verdict is Verdict.EXACT
    if is_hit:
        some = [answer.round_cached_tokens for _, answer in result.pairs]
        assert line.startswith(f"{sum(filter(None, some))} prompt tokens")
