"""An engine of a few lines, in Python, as a process and over HTTP: it gives other tokens to requests beside others.

Tokens are by arithmetic on the two before. Of log-probabilities it reports only those of the tokens that it chose.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from lfm2np.oracle.engines.records import Answer, Request

CERTAIN, LIKELY, OPEN = 0.0, -0.001, -1.5  # a token chosen with -1.5 may lead another by nothing


def tokens(prompt: Sequence[int], count: int, is_wrong: bool) -> list[int]:
    ids = [0, *prompt]
    for _ in range(count):
        ids.append(8 + (7 * ids[-1] + 11 * ids[-2] + is_wrong) % 200)
    return ids[-count:]


class Engine:
    lacks: ClassVar = {"samples", "stops", "sampling"}

    def __init__(self, logprob: float | None, is_right: bool = False) -> None:
        self.logprob, self.is_right = logprob, is_right

    def generate(self, requests: Sequence[Request]) -> list[list[Answer]]:
        is_wrong = len(requests) > 1 and not self.is_right
        return [[self.completion(each.prompt_token_ids, each.params.max_tokens or 1, is_wrong)] for each in requests]

    def completion(self, prompt: Sequence[int], count: int, is_wrong: bool) -> Answer:
        logprobs = None if self.logprob is None else (self.logprob,) * count
        return Answer(tuple(tokens(prompt, count, is_wrong)), finish_reason="length", logprobs=logprobs)


def right(model: str, sizes: dict[str, Any]) -> Engine:
    return Engine(LIKELY, is_right=True)


def likely(model: str, sizes: dict[str, Any]) -> Engine:
    return Engine(LIKELY)


def certain(model: str, sizes: dict[str, Any]) -> Engine:
    return Engine(CERTAIN)


def undecided(model: str, sizes: dict[str, Any]) -> Engine:
    return Engine(OPEN)


def silent(model: str, sizes: dict[str, Any]) -> Engine:
    return Engine(None)


class Server(ThreadingHTTPServer):
    """Completions of token ids, which it reports; one after another, and wrong if another request waits."""

    daemon_threads = True

    def __init__(self, engine: Engine) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.engine, self.waiting, self.turn = engine, 0, threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self.reply(200, {"object": "list", "data": [{"id": "beside-others"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, beyond = body.get("prompt"), any(body.get(name) for name in ("stream", "prompt_logprobs"))
        if self.path != "/v1/completions" or not isinstance(prompt, list) or beyond or body.get("n", 1) > 1:
            return self.reply(400, {"error": {"message": "not supported"}})
        with self.server.turn:
            self.server.waiting += 1
        time.sleep(0.02)
        answer = self.server.engine.completion(prompt, body["max_tokens"], self.server.waiting > 1)
        with self.server.turn:
            self.server.waiting -= 1
        names = [f"token_id:{token}" for token in answer.token_ids]
        logprobs = {"tokens": names, "token_logprobs": answer.logprobs, "top_logprobs": None}
        choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": answer.token_ids}
        return self.reply(200, {"choices": [choice | {"logprobs": logprobs}]})

    def reply(self, code: int, fields: dict[str, Any]) -> None:
        content = json.dumps(fields).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def command(name: str) -> str:
    """Of this file as a process that holds the engine of the factory `name`."""
    return f"exec:{sys.executable} {Path(__file__)} {name}"


def speak(engine: Engine) -> None:
    """The protocol of exec_target.py on standard input and output."""
    requests: list[dict[str, Any]] = []
    for line in sys.stdin:
        fields = json.loads(line)
        if fields["kind"] == "hello":
            able = {"logprobs": True, "top_logprobs": 0, "prompt_logprobs": False, "at_once": 4, "abort": False}
            write({"kind": "hello", "protocol": 2, "engine": "beside others", **able})
        elif fields["kind"] == "request":
            requests.append(fields)
        elif fields["kind"] == "run":
            for request in requests:
                is_wrong = len(requests) > 1 and not engine.is_right
                answer = engine.completion(request["prompt_token_ids"], request["max_tokens"], is_wrong)
                fields = {"token_ids": answer.token_ids, "logprobs": answer.logprobs}
                write({"kind": "answer", "request_id": request["request_id"], **fields})
            requests = []


def write(fields: dict[str, Any]) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    speak({"right": right, "likely": likely}[sys.argv[1]](os.curdir, {}))
