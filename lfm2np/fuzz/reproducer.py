"""The script that reproduces a failure on a server: standard library only, one trace, the right answers, exit code 1.

It is REPRODUCER with its gaps filled in. For an engine in Python there is none: `lfm2np fuzz --replay` plays its trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lfm2np.oracle.targets.dialects.dialect import Dialect

REPRODUCER = '''"""@@TITLE@@

    python reproduce.py http://HOST:PORT [TIMES]

Sends a trace of requests to the server, and compares its answers with exact arithmetic. Needs the standard library
only. Exit code 1: wrong again, 0: all right, 2: no server. A key is read from LFM2NP_API_KEY.
@@SERVER@@
Each of TIMES (1) sends the same tokens: from the second on the server may have the prompts cached.
"""

import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request

TIMEOUT = @@TIMEOUT@@  # seconds for one answer, or it hangs
# Each request: its body, when it is sent (`after` another has ended, or `after_tokens` of it have come), and when it is
# aborted. "right" is what exact arithmetic says: tokens, their log-probabilities, how far off each may be, and whether
# another token would be wrong there or just as good.
PATH = @@PATH@@
BEFORE = @@BEFORE@@  # so many of the first requests only set the stage: they are not judged
REQUESTS = json.loads(r"""
@@REQUESTS@@
""")

changed = threading.Condition()
opened = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # the server itself, not a proxy


def run(url):
    came, ended = [0] * len(REQUESTS), [False] * len(REQUESTS)
    seen = [None] * len(REQUESTS)

    def play(index):
        wanted = REQUESTS[index]
        with changed:
            after = wanted.get("after")
            while after is not None and not ended[after] and came[after] < wanted.get("after_tokens", float("inf")):
                changed.wait(1.0)
        time.sleep(wanted.get("pause", 0) / 1000)
        seen[index] = in_time(lambda: send(url, wanted, lambda: count(index)))
        with changed:
            ended[index] = True
            changed.notify_all()

    def count(index):
        with changed:
            came[index] += 1
            changed.notify_all()
            return came[index]

    threads = [threading.Thread(target=play, args=(index,), daemon=True) for index in range(len(REQUESTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def in_time(call):
    """Its result, or what went wrong. A timeout of the connection is for each piece: a server may drip for ever."""
    result = [f"no answer within {TIMEOUT:g} s"]

    def run():
        try:
            result[0] = call()
        except Exception as problem:
            result[0] = f"{type(problem).__name__}: {problem}"

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return result[0]


def is_there(url):
    try:
        opened(url.rstrip("/") + "/health", timeout=TIMEOUT).close()
    except urllib.error.HTTPError:
        return True
    except OSError as problem:
        return isinstance(problem, TimeoutError)
    return True


def send(url, wanted, count):
    """Tokens and log-probabilities of the answer; None for an aborted request."""
    left = wanted.get("abort_after")
    body = dict(wanted["body"])
    if wanted.get("streamed"):
        body["stream"] = True
    request = urllib.request.Request(url.rstrip("/") + PATH, json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if os.environ.get("LFM2NP_API_KEY"):
        request.add_header("Authorization", "Bearer " + os.environ["LFM2NP_API_KEY"])
    try:
        with opened(request, timeout=0.02 if left == 0 else TIMEOUT) as reply:
            if not wanted.get("streamed"):
                return answer([json.load(reply)])
            events = []
            for line in reply:
                if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
                    events.append(json.loads(line[5:]))
                    if left is not None and count() >= left:
                        return None
                    if left is None:
                        count()
            return answer(events)
    except OSError:
        if left == 0:
            return None
        raise


@@ANSWER@@


def judge(index, wanted, seen):
    """What is wrong with an answer, or None."""
    right = wanted.get("right")
    if isinstance(seen, str):
        return f"request {index}: expected an answer, seen: {seen}"
    if seen is None or right is None:
        return None
    tokens, logprobs = seen
    for at, (token, logprob, bound, decided) in enumerate(right):
        if at >= len(tokens):
            return f"request {index}: {len(tokens)} tokens, expected {len(right)}"
        if tokens[at] != token:
            if not decided:
                return None  # as good as the right one; what follows is of another text
            return f"request {index}, output token {at}: expected {token}, seen {tokens[at]}"
        if logprobs is not None and abs(logprobs[at] - logprob) > bound:
            what = f"expected {logprob:.6f} within {bound:.2g}, seen {logprobs[at]:.6f}"
            return f"request {index}, output token {at} ({token}): log-probability {what}"
    if len(tokens) > len(right) and not wanted.get("may_go_on"):
        return f"request {index}: {len(tokens)} tokens, expected {len(right)}"
    return None


def main():
    if len(sys.argv) not in (2, 3):
        sys.stderr.write("python reproduce.py http://HOST:PORT [TIMES]\\n")
        return 2
    url, times = sys.argv[1].rstrip("/").removesuffix("/v1"), int(sys.argv[2]) if len(sys.argv) == 3 else 1
    wrong = done = 0
    while done < times and is_there(url):
        answers = list(zip(REQUESTS, run(url)))[BEFORE:]
        faults = [judge(index, *pair) for index, pair in enumerate(answers)]
        faults = [fault for fault in faults if fault]
        print("\\n".join(faults) or "all as it should be")
        wrong += bool(faults)
        done += 1
    if not done:
        sys.stderr.write(f"{url}: no server\\n")
        return 2
    print(f"wrong in {wrong} of {done}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
'''


def reproducer(
    title: str,
    dialect: Dialect,
    timeout: float,
    requests: Sequence[Mapping[str, Any]],
    server: str = "",
    before: int = 0,
) -> str:
    """The script.

    requests  body, moments and right, as REPRODUCER says
    server    a sentence that says on what server it failed
    before    so many of the first requests are not judged
    """
    rows = ",\n ".join(json.dumps(request, allow_nan=False) for request in requests)
    filled = {
        "TITLE": title.replace("\\", "/").replace('"""', "'''"),
        "SERVER": server,
        "BEFORE": str(before),
        "TIMEOUT": repr(timeout),
        "PATH": json.dumps(dialect.path),
        "REQUESTS": f"[{rows}]",
        "ANSWER": dialect.reproducer,
    }
    return re.sub("@@([A-Z]+)@@", lambda mark: filled[mark[1]], REPRODUCER)  # all at once: a title may hold a mark
