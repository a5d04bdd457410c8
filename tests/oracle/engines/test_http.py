"""http://HOST:PORT: many requests together, cancelled ones, and servers that do everything wrong."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from answering import answers_to
from http_player import TEXTS, Handler, Player, computed, playing, request_of, target_of

from lfm2np.oracle.engines import http_client
from lfm2np.oracle.engines.http_target import HttpTarget
from lfm2np.oracle.engines.records import BROKEN, DEAD, FAILED, HANG, NO_ANSWER, REFUSED, Answer, changed, failed
from lfm2np.oracle.engines.target import TargetError

pytestmark = pytest.mark.rounding  # all: what one of them computes is kept for the others

SHORT = 0.3  # seconds, where a server is to take too long


@pytest.fixture
def vllm() -> Iterator[Player]:
    with playing("vllm") as player:
        yield player


def spoiled(player: Player, trouble: Callable[[Handler], Any], **options: Any) -> Answer:
    """The answer of a server that was right when it was probed."""
    target = target_of(player, **options)
    target.probe()
    player.seen.clear()
    player.trouble = lambda handler: trouble(handler) or True
    (answer,) = answers_to(target, [request_of("a")])
    return answer


# Together, and cancelled


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


@pytest.mark.parametrize(
    "trouble",
    [
        lambda handler: handler.server.freed.wait(),
        lambda handler: drip(handler, b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"),
        lambda handler: drip(handler, JSON_HEAD),
        lambda handler: drip(handler, JSON_HEAD + b"{}"),
    ],
)
def test_a_server_that_takes_its_time_is_cut_off(vllm: Player, trouble: Callable[[Handler], Any]) -> None:
    answer = spoiled(vllm, trouble, timeout=SHORT)
    assert answer == failed(f"no complete answer within {SHORT:g} s", HANG)
    assert len(vllm.seen) == 1  # slowness is not tried again


@pytest.mark.parametrize(
    ("trouble", "error", "kind"),
    [
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
    ],
)
def test_an_invalid_answer_is_an_error_that_says_so(
    vllm: Player, trouble: Callable[[Handler], Any], error: str, kind: str
) -> None:
    answer = spoiled(vllm, trouble)
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
    assert HttpTarget(vllm.url + "/v1/", None).probe().tells_token_ids
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
    vllm.trouble = lambda handler: handler.say(b"<html>", Content_Type="text/html") or True
    with pytest.raises(TargetError, match=r"no known dialect: vllm .*text/html.*; text "):
        target_of(vllm).probe()
