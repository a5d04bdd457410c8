"""Sixty-four clients at once: 300 cut streams, 1,000 hostile bodies, responses that nobody reads, half a request.

Every response that is waited for is the reference's, every refusal has its status, and in the end nothing is held: no
request, no block, no memory.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from served_app import HEAD, ask, expected, get, wrong
from test_ending import started
from test_leaving import LONG, put, reset

SERVER = (
    *("--max-requests", "1000", "--max-num-seqs", "32"),
    *("--num-blocks", "60", "--block-size", "8", "--max-num-batched-tokens", "256", "--speculative", "ngram"),
)
CLIENTS, WAITED, CUT, UNREAD, HOSTILE = 64, 250, 300, 16, 1000
LARGE = 2**21 - 100  # bytes: just below the server's limit
MOST_GROWTH = 1.3  # between the first half and the second


def filled(start: bytes, piece: bytes, end: bytes) -> bytes:
    return start + piece * ((LARGE - len(start) - len(end)) // len(piece)) + end


def with_fields(start: bytes, field: bytes, end: bytes) -> bytes:
    return start + b",".join(field % number for number in range(LARGE // 14)) + end


SMALL = [  # more of them: test_refusals.py
    *((content, 400) for content in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}')),
    *(
        (b'{"prompt": ' + rest, 400)
        for rest in (b"[1, 512]}", b'"a", "max_tokns": 3}', b'"a", "n": 99999999999999999999}')
    ),
    (b'{"prompt": "a", "model": "another"}', 404),
]
LARGE_BODIES: list[tuple[bytes, int]] = [
    *((content, 400) for content in (b"[" * 5000, b'{"a":' * 5000, b"9" * 9999)),
    *((filled(b'{"prompt":[', piece, piece[:-1] + b"]}"), 400) for piece in (b"1,", b"[],", b"[1],")),
    (filled(b'{"prompt":"a","metadata":[', b"{},", b"{}]"), 400),  # not closed
    (with_fields(b"{", b'"a%d":0', b"}"), 400),
    (with_fields(b'{"prompt":"a","logit_bias":{', b'"%d":""', b"}}"), 400),
    (with_fields(b'{"messages":[{', b'"a%d":0', b"}]}"), 400),
    (filled(b'{"prompt":"', b"a ", b'"}'), 400),
    (b" " * 2**22, 413),
]


def drawn(randomly: random.Random) -> dict[str, Any]:
    """The fields of a request."""
    ids = [1, *(randomly.randrange(320) for _ in range(randomly.choice([3, 20, 40])))]
    return {
        "prompt": randomly.choice([ids, "sort: 7 2 9 ->"]),
        "max_tokens": randomly.randrange(1, 24),
        "temperature": randomly.choice([0.0, 0.8, 1.5]),
        "seed": randomly.randrange(2**32),
    }


# What a client does returns what went wrong, if something did.


def cut(port: int, seconds: float, is_abrupt: bool) -> str:
    connection = put(port, {**LONG, "stream": True})
    time.sleep(seconds)
    reset(connection) if is_abrupt else connection.close()
    return ""


def leave_unread(port: int) -> str:
    with put(port, {**LONG, "stream": True, "logprobs": 20}, 2048):
        time.sleep(13)  # the server lets go after 10
    return ""


def send(port: int, content: bytes, expected_status: int) -> str:
    is_chat = content.startswith(b'{"messages')
    status, reply = ask(port, content, "/v1/chat/completions" if is_chat else "/v1/completions")
    return "" if status == expected_status else f"{content[:60]!r}: {status} {str(reply)[:300]}"


def jobs_of(port: int, randomly: random.Random) -> list[Callable[[], str]]:
    """In an order of its own."""
    requests = [drawn(randomly) for _ in range(WAITED // 8)]
    asked = itertools.islice(itertools.cycle([(each, expected(each, logprobs=2)) for each in requests]), WAITED)
    jobs: list[Callable[[], str]] = [partial(wrong, port, *each, randomly.random() < 0.5) for each in asked]
    jobs += [partial(cut, port, randomly.uniform(0.0, 0.5), number % 2 == 0) for number in range(CUT)]
    jobs += [partial(leave_unread, port)] * UNREAD
    jobs += [
        partial(send, port, *body) for body in itertools.islice(itertools.cycle([*SMALL * 5, *LARGE_BODIES]), HOSTILE)
    ]
    randomly.shuffle(jobs)
    return jobs


@contextlib.contextmanager
def half_open(port: int) -> Iterator[None]:
    """Connections that send nothing, a part of a request, or garbage."""
    with contextlib.ExitStack() as stack:
        for sent in (b"", HEAD[:20], HEAD + b"50\r\n\r\n{", b"\x16\x03\x01\x02garbage\r\n\r\n") * 25:
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)).sendall(sent)
        yield


def megabytes(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def wait_until_rest(port: int) -> None:
    until, names = time.monotonic() + 60, ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while not all(f"lfm2np:{name} 0.0\n" in get(port, "/metrics")[1] for name in names):
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.night
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system has no /proc")
def test_a_crowd_gets_what_it_should_and_leaves_nothing_behind() -> None:
    with started(*SERVER) as (process, port):
        jobs, sizes, problems = jobs_of(port, random.Random(1)), [], []
        with half_open(port), ThreadPoolExecutor(CLIENTS) as pool:
            for half in (jobs[::2], jobs[1::2]):
                problems += [problem for problem in pool.map(lambda job: job(), half) if problem]
                wait_until_rest(port)
                sizes.append(megabytes(process.pid))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert problems == []
    assert sizes[1] < MOST_GROWTH * sizes[0], sizes
