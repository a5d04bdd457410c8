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
from served_app import HEAD
from test_answers import expected, joined
from test_ending import ask, get, started
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


SMALL_BODIES: list[tuple[Any, int]] = [
    *((content, 400) for content in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'"', b"[" * 5000, b'{"a":' * 5000)),
    *((content, 400) for content in (b'{"prompt": NaN}', b'{"prompt": 1e999}', b'{"prompt": "\\ud800"}', b"9" * 9999)),
    ({"prompt": "a", "max_tokns": 3}, 400),
    ({"prompt": [1, 512]}, 400),
    ({"prompt": [1] * 2000}, 400),
    ({"prompt": "a", "n": 2**70}, 400),
    ({"prompt": [[1]] * 1001}, 400),
    ({"prompt": "a", "model": "another"}, 404),
]
LARGE_BODIES: list[tuple[Any, int]] = [
    (filled(b'{"prompt":[', b"1,", b"1]}"), 400),
    (filled(b'{"prompt":[', b"[],", b"[]]}"), 400),
    (filled(b'{"prompt":[', b"[1],", b"[1]]}"), 400),
    (filled(b'{"prompt":"a","metadata":[', b"{},", b"{}]"), 400),
    (b"{" + b",".join(b'"a%d":0' % number for number in range(LARGE // 14)) + b"}", 400),
    (b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":""' % number for number in range(LARGE // 14)) + b"}}", 400),
    (b'{"messages":[{' + b",".join(b'"a%d":0' % number for number in range(LARGE // 14)) + b"}]}", 400),
    (filled(b'{"prompt":"', b"a ", b'"}'), 400),
    (b" " * 2**22, 413),
]


MORE: list[dict[str, Any]] = [  # every field that changes an answer
    *({}, {"stop": ["7", "\n"]}, {"repetition_penalty": 1.3}, {"top_k": 5}, {"top_p": 0.7, "min_p": 0.1}),
    *({"presence_penalty": 1.0, "frequency_penalty": -0.5}, {"logit_bias": {"7": 3.0}}, {"banned_token_ids": [7]}),
    *({"stop_token_ids": [288, 7]}, {"stop": " ", "include_stop_str_in_output": True}, {"ignore_eos": True}),
    *({"profile": "transformers"}, {"cache_salt": "a", "priority": 2}),
]


def drawn(randomly: random.Random) -> dict[str, Any]:
    """The fields of a request, as of test_answers.expected."""
    ids = [1, *(randomly.randrange(320) for _ in range(randomly.choice([3, 20, 40])))]
    return {
        "prompt": randomly.choice([ids, "sort: 7 2 9 ->", "copy: 4 \u2603 ->"]),
        "max_tokens": randomly.randrange(1, 24),
        "temperature": randomly.choice([0.0, 0.8, 1.5]),
        "seed": randomly.randrange(2**32),
    }


# What a client does returns what went wrong, if something did.


def wait_for(port: int, fields: dict[str, Any], truth: Any, is_streamed: bool) -> str:
    more = {"logprobs": 2, "return_token_ids": True, "stream": is_streamed}
    status, reply = ask(port, fields | more)
    if status != 200:
        return f"{fields}: {status} {reply}"
    choice = joined(reply)[0] if is_streamed else reply["choices"][0]
    ends = choice["finish_reason"], choice["stop_reason"]
    given = choice["token_ids"], choice["text"], choice["logprobs"]["token_logprobs"], *ends
    logprobs = [each.logprob for each in truth.logprobs]
    right = list(truth.token_ids), truth.text, logprobs, truth.finish_reason, truth.stop_reason
    return "" if given == right else f"{fields}: {given}, expected {right}"


def cut(port: int, seconds: float, is_abrupt: bool) -> str:
    connection = put(port, {**LONG, "stream": True})
    time.sleep(seconds)
    reset(connection) if is_abrupt else connection.close()
    return ""


def leave_unread(port: int) -> str:
    with put(port, {**LONG, "stream": True, "logprobs": 20}, 2048):
        time.sleep(13)  # the server lets go after 10
    return ""


def send(port: int, content: Any, expected_status: int) -> str:
    is_chat = isinstance(content, bytes) and content.startswith(b'{"messages')
    status, reply = ask(port, content, "/v1/chat/completions" if is_chat else "/v1/completions")
    return "" if status == expected_status else f"{str(content)[:60]}: {status} {str(reply)[:300]}"


def jobs_of(port: int, randomly: random.Random) -> list[Callable[[], str]]:
    """In an order of its own."""
    requests = [drawn(randomly) | MORE[number % len(MORE)] for number in range(WAITED // 8)]
    truths = [expected(fields, logprobs=2).outputs[0] for fields in requests]
    jobs: list[Callable[[], str]] = []
    for number in range(WAITED):
        index = number % len(requests)
        jobs.append(partial(wait_for, port, requests[index], truths[index], randomly.random() < 0.5))
    jobs += [partial(cut, port, randomly.uniform(0.0, 0.5), number % 2 == 0) for number in range(CUT)]
    jobs += [partial(leave_unread, port)] * UNREAD
    bodies = itertools.islice(itertools.cycle([*SMALL_BODIES * 4, *LARGE_BODIES]), HOSTILE)
    jobs += [partial(send, port, content, status) for content, status in bodies]
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


def held(port: int) -> list[str]:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    lines = get(port, "/metrics")[1].splitlines()
    return [line for line in lines if line.startswith(tuple(f"lfm2np:{n} " for n in names)) and line[-4:] != " 0.0"]


def wait_until_rest(port: int) -> None:
    until = time.monotonic() + 60
    while held(port):
        assert time.monotonic() < until, held(port)
        time.sleep(0.1)


@pytest.mark.slow
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
