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

pytestmark = pytest.mark.rounding
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
        server.trouble = lambda handler, _: handler.command == "POST" and bool(trouble(handler) or True)

    return ByTruth(model(), "float32").finding(trace, played(here, trace, spoil, timeout))


def spoiled(here: Here, trace: Trace, change: Callable[[dict[str, Any]], Any]) -> Finding | None:
    """Of answers that are changed before they are sent."""
    return ByTruth(model(), "float32").finding(
        trace, played(here, trace, lambda server: setattr(server, "spoil", change))
    )


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


def say(status: int, body: bytes) -> Callable[[Any], None]:
    return lambda handler: handler.send(status, body, "application/json")


@pytest.mark.parametrize(
    ("trouble", "trace", "kind", "told"),
    [
        (die, ONE, DEAD, "no connection any more"),
        (die, THREE, DEAD, "no connection any more"),
        (reset, ONE, BROKEN, "the connection broke"),
        (break_a_stream, STREAMED, BROKEN, "the connection broke"),
        (end_a_stream, STREAMED, IMPOSSIBLE, "finish_reason None after 1 of 6 tokens"),
        (fail_in_a_stream, STREAMED, FAILED, "the stream ended in an error: "),
        (say(500, b'{"error": "out of memory"}'), ONE, FAILED, "HTTP 500: out of memory"),
        (say(400, b'{"message": "no"}'), ONE, REFUSED, "HTTP 400: no"),
        (say(200, b"{}"), STREAMED, IMPOSSIBLE, "expected text/event-stream"),
    ],
)
def test_a_server_that_misbehaves_is_one_finding_of_its_kind(
    here: Here, trouble: Any, trace: Trace, kind: str, told: str
) -> None:
    """Each way in which HTTP goes wrong is in tests/oracle/engines/test_http.py."""
    reported = finding(here, trace, trouble)
    assert reported is not None and (reported.kind, told in reported.what) == (kind, True), reported
    assert reported.what.isprintable()


@pytest.mark.parametrize(("trouble", "trace"), [(wait, ONE), (wait, STREAMED), (drip_events, STREAMED), (wait, THREE)])
def test_a_server_that_never_answers_hangs_within_the_given_time(here: Here, trouble: Any, trace: Trace) -> None:
    reported = finding(here, trace, trouble, timeout=0.2)
    assert reported is not None and (reported.kind, reported.request) == (HANG, 0), reported
    assert "no complete answer within 0.2 s" in reported.what


def choice_of(fields: dict[str, Any]) -> dict[str, Any]:
    return fields["choices"][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda fields: fields["choices"].append(fields["choices"][0]), "2 samples, expected 1"),
        (lambda fields: choice_of(fields)["logprobs"].update(token_logprobs=[0.5, 0.0]), "expected at most 0"),
        (lambda fields: fields["usage"].update(completion_tokens=3), "the server counted 3 new tokens"),
    ],
)
def test_an_answer_of_impossible_form_is_a_finding(here: Here, change: Any, told: str) -> None:
    """Each such form is in tests/oracle/engines/test_http.py."""
    reported = spoiled(here, ONE, change)
    assert reported is not None and (reported.kind, told in reported.what) == (IMPOSSIBLE, True), reported


# What the server tells of itself


def metrics_said(text: Callable[[], str]) -> Callable[[Here], None]:
    def trouble(handler: Any, _: Any) -> bool:
        if handler.path == "/metrics":
            handler.send(200, text().encode(), "text/plain")
        return bool(handler.path == "/metrics")

    return lambda server: setattr(server, "trouble", trouble)


@pytest.mark.parametrize("name", ["vllm:kv_cache_usage_perc", "sglang:num_queue_reqs"])
def test_what_never_comes_free_is_a_leak(here: Here, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(watched, "PATIENCE", 0.1)
    values = iter([0.0, 0.0] + [0.25] * 10_000)
    done = played(here, ONE, metrics_said(lambda: f"{name} {next(values)}\n"))
    reported = ByTruth(model(), "float32").finding(ONE, done)
    assert reported is not None and (reported.kind, reported.request) == (LEAK, None)
    assert reported.what == f"all requests have ended, but {name} 0.25, expected 0 as before"


@pytest.mark.parametrize("values", [[3.0], [0.0, 0.0, 2.0, 1.0, 0.0]])
def test_what_was_held_before_or_is_freed_a_little_later_is_no_leak(
    here: Here, monkeypatch: pytest.MonkeyPatch, values: list[float]
) -> None:
    monkeypatch.setattr(watched, "PATIENCE", 0.1 if values == [3.0] else watched.PATIENCE)
    told = itertools.chain(values, itertools.repeat(values[-1]))
    done = played(here, ONE, metrics_said(lambda: f"vllm:num_requests_running {next(told)}\n"))
    assert ByTruth(model(), "float32").finding(ONE, done) is None


def test_metrics_are_summed_over_their_labels_and_garbage_is_ignored() -> None:
    text = '# HELP a b\na{x="1 }"} 2 1700\na{x="2"} 3.5\nb 1e308\nb 1e308\nc NaN\nd 0\n'
    assert metrics_of(text) == {"a": 5.5, "d": 0.0}
    for garbage in ("", "name", "vllm:num_requests_running", "\x00{", "a b c", "a{} 1e999", "a}{ 1"):
        assert metrics_of(garbage) == {}
    assert more_than({"a": 1.0}, {"a": 1.0, "d": 0.0}) is None
    assert more_than({}, {"a": 0.5}) == "a 0.5, expected 0 as before"


def test_busy_slots_are_seen(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "PATIENCE", 0.1)
    looks = iter([False] + [False] + [True] * 10_000)

    def trouble(handler: Any, _: Any) -> bool:
        if handler.path == "/slots":
            handler.send(200, json.dumps([{"is_processing": next(looks)}, {}]).encode(), "application/json")
        return bool(handler.path == "/slots")

    here.trouble = trouble
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
    def trouble(handler: Any, _: Any) -> bool:
        said = {"/v1/models": models, "/props": props}.get(handler.path)
        if said is not None:
            handler.send(200, json.dumps(said).encode(), "application/json")
        return said is not None

    here.trouble = trouble
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
    reported = ByTruth(model(), "float32").finding(ONE, done)
    assert reported is not None and reported.kind == BROKEN and done.trouble is None
