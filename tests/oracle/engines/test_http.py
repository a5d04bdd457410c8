"""http://HOST:PORT: many requests together, cancelled ones, and servers that do everything wrong."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from answering import answers_to
from http_player import TEXTS, Handler, Player, computed, playing, request_of, target_of

from lfm2np.oracle.engines import http_client
from lfm2np.oracle.engines.http_client import pause_before, seconds_of
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


# Servers that misbehave as HTTP


def drip_header(handler: Handler) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 60000:
        handler.wfile.write(bytes([byte]))
        if handler.server.freed.wait(0.02):
            return


def drip_body(handler: Handler) -> None:
    handler.say(b"", Content_Length="60000")
    while not handler.server.freed.wait(0.02):
        handler.wfile.write(b" ")


def drip_without_a_length(handler: Handler) -> None:
    raw(handler, b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    while not handler.server.freed.wait(0.02):
        handler.wfile.write(b" ")


def whole_but_without_an_end(handler: Handler) -> None:
    raw(handler, b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    raw(handler, json.dumps(handler.server.play(handler.path, handler.server.seen[-1][2])).encode())
    handler.server.freed.wait()


def raw(handler: Handler, content: bytes) -> None:
    handler.wfile.write(content)


def flood(handler: Handler) -> None:
    raw(handler, b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    while not handler.server.freed.is_set():
        handler.wfile.write(b" " * 65536)


def break_off(handler: Handler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, no farewell
    handler.connection.close()


@pytest.mark.parametrize(
    "trouble",
    [
        lambda handler: handler.server.freed.wait(),
        drip_header,
        drip_body,
        drip_without_a_length,
        whole_but_without_an_end,
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
        (lambda h: raw(h, b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n"), "got more than 100 headers", BROKEN),
        (lambda h: raw(h, b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70000 + b"\r\n\r\n"), "LineTooLong", BROKEN),
        (lambda h: h.say(b'{"choices": ['), "not JSON", NO_ANSWER),
        (lambda h: h.say(b"[1]"), "a JSON array, expected an object", NO_ANSWER),
        (lambda h: h.say(b""), "not JSON", NO_ANSWER),
        (lambda h: h.say(b'{"a": "\xff"}'), "not UTF-8", NO_ANSWER),
        (lambda h: h.say(b'{"a": NaN}'), "NaN is not JSON", NO_ANSWER),
        (lambda h: h.say(b'{"a": 1e999}'), "overflows", NO_ANSWER),
        (lambda h: h.say(b'{"a": 1, "a": 2}'), "'a' stands twice", NO_ANSWER),
        (lambda h: h.say(b'{"a": ' + b"[" * 200_000), "nested too deeply", NO_ANSWER),
        (
            lambda h: h.say(b"<html>", Content_Type="text/html"),
            "Content-Type text/html: expected application/json",
            NO_ANSWER,
        ),
        (lambda h: h.say({}, Content_Encoding="gzip"), "Content-Encoding 'gzip': expected none", NO_ANSWER),
        (lambda h: h.say(b"", Content_Length=str(2**40)), f"an answer of {2**40} bytes, expected at most", BROKEN),
        (
            lambda h: h.say({"error": {"message": "out of\nblocks\x1b[31m"}}, 500),
            "HTTP 500: out of blocks [31m",
            FAILED,
        ),
        (lambda h: h.say({"detail": [{"msg": "bad"}]}, 422), 'HTTP 422: [{"msg": "bad"}]', REFUSED),
        (lambda h: h.say(b"", 404), "HTTP 404: without a message", REFUSED),
        (lambda h: h.say({}, 401), "HTTP 401: {}; a key is read from the variable LFM2NP_API_KEY", REFUSED),
        (lambda h: h.say({}, 302, Location="/v1/completions"), "expected 307 or 308, which keep the method", BROKEN),
        (lambda h: h.say({}, 307), "only redirects within", BROKEN),
        (lambda h: h.say({}, 307, Location="http://[::bad/"), "not a URL", BROKEN),
        (lambda h: h.say({}, 307, Location="/v1/completions"), "more than 3 redirects", BROKEN),
    ],
)
def test_an_invalid_answer_is_an_error_that_says_so(
    vllm: Player, trouble: Callable[[Handler], Any], error: str, kind: str
) -> None:
    answer = spoiled(vllm, trouble)
    assert answer.error is not None and error in answer.error and answer == failed(answer.error, kind)
    assert len(vllm.seen) == (4 if "redirects" in error and "than" in error else 1)  # nothing of this is tried again


def test_a_body_without_end_is_not_read_to_it(vllm: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_BODY", 2**20)
    assert spoiled(vllm, flood).error == "an answer of more than 1048576 bytes"


@pytest.mark.parametrize(
    "scheme_and_host", ["http://127.0.0.1:{other}", "https://127.0.0.1:{own}", "//127.0.0.1:{other}"]
)
def test_a_redirect_elsewhere_is_not_followed(vllm: Player, scheme_and_host: str) -> None:
    with playing("vllm") as elsewhere:
        ports = {"other": elsewhere.server_address[1], "own": vllm.server_address[1]}
        answer = spoiled(vllm, lambda h: h.say({}, 307, Location=f"{scheme_and_host.format(**ports)}/v1/completions"))
        assert answer.error is not None and "only redirects within" in answer.error
        assert elsewhere.seen == []


def test_a_busy_server_is_asked_again(vllm: Player) -> None:
    for trouble in (
        lambda h: h.say({}, 429, Retry_After="0"),
        lambda h: h.say({}, 503),
        break_off,
        lambda h: h.say(b"{", Content_Length="100"),
    ):
        target = target_of(vllm)
        target.probe()
        todo = [trouble]
        vllm.trouble = lambda handler, todo=todo: bool(todo) and (todo.pop()(handler) or True)
        (answer,) = answers_to(target, [request_of("a")])
        assert answer.error is None and len(answer.token_ids or ()) == 4
        assert len(target.client.notes) == 1 and target.client.notes[0].startswith("tried again: ")
        vllm.trouble = None


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (lambda h: h.say({}, 429, Retry_After="0"), "HTTP 429: {} (2 attempts)"),
        (lambda h: h.say(b"{", Content_Length="100"), "the connection broke: IncompleteRead (2 attempts)"),
        (break_off, "the connection broke: ConnectionResetError (2 attempts)"),
    ],
)
def test_a_server_that_stays_busy_is_given_up(vllm: Player, trouble: Callable[[Handler], Any], error: str) -> None:
    assert spoiled(vllm, trouble) == failed(error, REFUSED if "HTTP 429" in error else BROKEN)
    assert len(vllm.seen) == 2


def test_pauses_grow_vary_and_are_bounded_whatever_the_server_requests() -> None:
    assert all(0.125 * 2**n <= pause_before(n + 1, None, 0.25) <= 0.375 * 2**n for n in range(4))
    assert len({pause_before(3, None, 0.25) for _ in range(20)}) > 1
    assert pause_before(1, 3.0, 0.25) == 3.0
    assert pause_before(1, 1e9, 0.25) == pause_before(60, None, 0.25) == http_client.LONGEST_PAUSE
    assert seconds_of("7") == 7.0
    assert (
        seconds_of(None) is seconds_of("-1") is seconds_of("Wed, 21 Oct 2026 07:28:00 GMT") is seconds_of("nan") is None
    )


# The key


def test_the_key_goes_to_the_server_but_not_over_a_redirect(vllm: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LFM2NP_API_KEY", "sesame")
    target = target_of(vllm)
    target.probe()
    assert {headers.get("Authorization") for _, headers, _ in vllm.seen} == {"Bearer sesame"}
    vllm.seen.clear()
    todo = ["/v1/completions"]
    vllm.trouble = lambda h: bool(todo) and (h.say({}, 307, Location=todo.pop()) or True)
    (answer,) = answers_to(target, [request_of("a")])
    assert answer.error is None
    assert [headers.get("Authorization") for _, headers, _ in vllm.seen] == ["Bearer sesame", None]


def test_no_message_shows_the_key(vllm: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LFM2NP_API_KEY", "sesame")
    answer = spoiled(vllm, lambda h: h.say({"error": f"wrong: {h.headers['Authorization']}"}, 400))
    assert answer.error == "HTTP 400: wrong: Bearer ***"
    monkeypatch.setenv("LFM2NP_API_KEY", "open\nsesame")
    with pytest.raises(TargetError, match="LFM2NP_API_KEY: expected printable") as caught:
        target_of(vllm)
    assert "sesame" not in str(caught.value)
    monkeypatch.setenv("LFM2NP_API_KEY", "")
    with pytest.raises(TargetError, match="LFM2NP_API_KEY: set to an empty text"):
        target_of(vllm)


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://a", "a:80", "", "http://", "http://a:b", "http://a:99999999", "http://a/?q=1", "http://a/#x"),
        *("http://[::1", "http://a b", "http://a\r\nX: y", "http://ä", "file:///etc/passwd"),
        *("http://me:secret@a", "http://secret@a"),
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


def test_nobody_there_is_a_target_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(TargetError, match=r"no connection: .*\(2 attempts\)"):
            HttpTarget(url, None, retries=1, backoff=0.01).probe()


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


def test_tls_with_who_does_not_speak_it_ends() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TargetError, match="no complete answer within"):
            HttpTarget(url, None, retries=0, timeout=SHORT).probe()
    with playing("vllm") as player, pytest.raises(TargetError, match="SSLError"):
        HttpTarget(player.url.replace("http", "https"), None, retries=0, timeout=5.0).probe()
