"""Servers that do wrong in mid-trace: one finding of its kind each, no exception, and no thread that stays."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from served_here import Here, model, player_of, serving

from lfm2np.oracle.engines.http_client import metrics_of
from lfm2np.oracle.engines.records import BROKEN, DEAD, FAILED, HANG, IMPOSSIBLE, REFUSED, Trace, greedy
from lfm2np.oracle.engines.target import LEAK, Played
from lfm2np.suite.fuzz import watched
from lfm2np.suite.fuzz.draw_traces import alphabet_of
from lfm2np.suite.fuzz.judge import ByTruth, Finding
from lfm2np.suite.fuzz.watched import more_than

pytestmark = [pytest.mark.rounding, pytest.mark.slow]
A = alphabet_of(model().tokenizer, 300)
ONE = Trace((greedy("", A[:4], 2),))
STREAMED = Trace((greedy("", A[:4], 6, streamed=True),))
THREE = Trace((greedy("", A[:4], 2), greedy("", A[:6], 2, after=0), greedy("", A[:4], 6, after=0, streamed=True)))


@pytest.fixture
def here() -> Iterator[Here]:
    with serving() as served:
        yield served


def threads() -> set[threading.Thread]:
    """Those of the player: not those of the server, which is in the same process."""
    return {thread for thread in threading.enumerate() if "process_request" not in thread.name}


def played(here: Here, trace: Trace, spoil: Callable[[Here], None], timeout: float = 20.0) -> Played:
    """On a server that was right, and quick enough, when it was probed."""
    with player_of(here) as probed:
        probed.probe()
    with player_of(here, timeout) as player:
        player._spoken, player.is_streaming = probed._spoken, probed.is_streaming
        assert player.held() is not None  # made before the trouble
        before = threads()
        spoil(here)
        outcome = player.play(trace)
        until = time.monotonic() + 10
        while threads() - before and time.monotonic() < until:
            time.sleep(0.01)
        assert not threads() - before
        return outcome


def finding(here: Here, trace: Trace, trouble: Any, timeout: float = 20.0) -> Finding | None:
    def spoil(server: Here) -> None:
        server.trouble = lambda handler: handler.command == "POST" and bool(trouble(handler) or True)

    return judged(trace, played(here, trace, spoil, timeout))


def judged(trace: Trace, outcome: Played) -> Finding | None:
    return ByTruth(model(), "float32").finding(trace, outcome)


def die(handler: Any) -> None:
    handler.server.shutdown()
    handler.server.server_close()
    reset(handler)


def reset(handler: Any) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    handler.connection.close()


def wait(handler: Any) -> None:
    handler.server.freed.wait()


def head(handler: Any, kind: str, **more: str) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", kind)
    for name, value in more.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()


def drip_events(handler: Any) -> None:
    head(handler, "text/event-stream")
    while not handler.server.freed.wait(0.02):
        handler.wfile.write(b": still here\n\n")


def event(handler: Any, fields: Any) -> None:
    handler.wfile.write(b"data: " + json.dumps(fields).encode() + b"\n\n")


PIECE = {"choices": [{"index": 0, "text": "", "token_ids": [A[0]], "finish_reason": None}]}


def break_a_stream(handler: Any) -> None:
    head(handler, "text/event-stream", Transfer_Encoding="chunked")
    handler.wfile.write(b"ffff\r\n")
    event(handler, PIECE)
    reset(handler)


def end_a_stream(handler: Any) -> None:
    head(handler, "text/event-stream")
    event(handler, PIECE)


def fail_in_a_stream(handler: Any) -> None:
    head(handler, "text/event-stream")
    event(handler, PIECE)
    event(handler, {"error": {"message": "out of\x1b[2J memory", "code": 500}})
    wait(handler)


@pytest.mark.parametrize(
    ("trouble", "trace", "kind", "told"),
    [
        (die, THREE, DEAD, "no connection any more"),
        (break_a_stream, STREAMED, BROKEN, "the connection broke"),
        (end_a_stream, STREAMED, IMPOSSIBLE, "finish_reason None after 1 of 6 tokens"),
        (fail_in_a_stream, STREAMED, FAILED, "the stream ended in an error: "),
        (lambda handler: handler.send(400, b'{"message": "no"}', "application/json"), ONE, REFUSED, "HTTP 400: no"),
        (
            lambda handler: handler.send(200, b"{}", "application/json"),
            STREAMED,
            IMPOSSIBLE,
            "expected text/event-stream",
        ),
    ],
)
def test_a_server_that_misbehaves_is_one_finding_of_its_kind(
    here: Here, trouble: Any, trace: Trace, kind: str, told: str
) -> None:
    """Each way in which HTTP goes wrong is in tests/oracle/engines/test_http.py."""
    reported = finding(here, trace, trouble)
    assert reported is not None and (reported.kind, told in reported.what) == (kind, True), reported
    assert reported.what.isprintable()


@pytest.mark.parametrize(("trouble", "trace"), [(drip_events, STREAMED), (wait, THREE)])
def test_a_server_that_never_answers_hangs_within_the_given_time(here: Here, trouble: Any, trace: Trace) -> None:
    reported = finding(here, trace, trouble, timeout=0.2)
    assert reported is not None and (reported.kind, reported.request) == (HANG, 0), reported
    assert "no complete answer within 0.2 s" in reported.what


def test_more_samples_than_were_asked_for_are_a_finding(here: Here) -> None:
    """Each other impossible form is in tests/oracle/engines/test_http.py."""
    twice = lambda fields: fields["choices"].append(fields["choices"][0])  # noqa: E731
    reported = judged(ONE, played(here, ONE, lambda server: setattr(server, "spoil", twice)))
    assert reported is not None and (reported.kind, reported.what) == (IMPOSSIBLE, "request 0: 2 samples, expected 1")


# What the server tells of itself


def saying(replies: dict[str, Callable[[], Any]]) -> Callable[[Any], bool]:
    """A trouble that answers these paths, with text or as JSON."""

    def trouble(handler: Any) -> bool:
        if handler.path in replies:
            value = replies[handler.path]()
            content = value if isinstance(value, str) else json.dumps(value)
            handler.send(200, content.encode(), "text/plain" if content is value else "application/json")
        return handler.path in replies

    return trouble


@pytest.mark.parametrize(
    ("name", "values", "held"),
    [
        ("vllm:kv_cache_usage_perc", [0.0, 0.0, 0.25], 0.25),
        ("sglang:num_queue_reqs", [0.0, 0.0, 0.25], 0.25),
        ("vllm:num_requests_running", [3.0], None),  # as before
        ("vllm:num_requests_running", [0.0, 0.0, 2.0, 1.0, 0.0], None),  # freed a little later
    ],
)
def test_what_never_comes_free_is_a_leak(
    here: Here, monkeypatch: pytest.MonkeyPatch, name: str, values: list[float], held: float | None
) -> None:
    monkeypatch.setattr(watched, "PATIENCE", 0.1 if held else watched.PATIENCE)
    told = itertools.chain(values, itertools.repeat(values[-1]))
    replies = {"/metrics": lambda: f"{name} {next(told)}\n"}
    reported = judged(ONE, played(here, ONE, lambda server: setattr(server, "trouble", saying(replies))))
    expected = f"all requests have ended, but {name} {held}, expected 0 as before"
    assert (reported and (reported.kind, reported.request, reported.what)) == ((LEAK, None, expected) if held else None)


def test_metrics_are_summed_over_their_labels_and_garbage_is_ignored() -> None:
    text = '# HELP a b\na{x="1 }"} 2 1700\na{x="2"} 3.5\nb 1e308\nb 1e308\nc NaN\nd 0\n'
    assert metrics_of(text) == {"a": 5.5, "d": 0.0}
    for garbage in ("", "name", "vllm:num_requests_running", "\x00{", "a b c", "a{} 1e999", "a}{ 1"):
        assert metrics_of(garbage) == {}
    assert more_than({"a": 1.0}, {"a": 1.0, "d": 0.0}) is None
    assert more_than({}, {"a": 0.5}) == "a 0.5, expected 0 as before"


def test_busy_slots_are_seen(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "PATIENCE", 0.1)
    looks = itertools.chain([False, False], itertools.repeat(True))
    here.trouble = saying({"/slots": lambda: [{"is_processing": next(looks)}, {}]})
    with player_of(here) as player:
        player.probe()
        problem = player.play(ONE).trouble
    assert problem is not None and problem.what == "all requests have ended, but busy slots 1, expected 0 as before"


@pytest.mark.parametrize(
    ("models", "props", "limits"),
    [
        ({"data": []}, {}, (None, None)),
        ({"data": [1]}, {"total_slots": -1}, (None, None)),
        ({"data": [{"max_model_len": 90}]}, {"total_slots": 3}, (90, 3)),
        ({}, {"default_generation_settings": {"n_ctx": 70}, "total_slots": True}, (70, None)),
    ],
)
def test_limits_are_taken_where_they_are_numbers(here: Here, models: Any, props: Any, limits: Any) -> None:
    here.trouble = saying({"/v1/models": lambda: models, "/props": lambda: props})
    with player_of(here) as player:
        abilities = player.probe()
    assert (abilities.longest, abilities.slots) == limits


def test_one_refused_connection_does_not_make_a_server_dead(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue may be full for a moment."""
    create, times = socket.create_connection, iter([True, False])

    def refuse_once(*arguments: Any, **named: Any) -> socket.socket:
        if threading.current_thread() is not threading.main_thread() and next(times, False):
            raise ConnectionRefusedError(111, "refused")
        return create(*arguments, **named)

    done = played(here, ONE, lambda server: monkeypatch.setattr(socket, "create_connection", refuse_once))
    reported = judged(ONE, done)
    assert reported is not None and reported.kind == BROKEN and done.trouble is None
