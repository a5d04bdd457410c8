"""Our own engine behind a small server that speaks vLLM's dialect, with a fault if one is named: for tests of fuzz.

    python tests/fuzz/server.py [--numerics NAME] [--fault NAME] [--port N] [--max-num-seqs N] ...

Prints its port on a line when it listens. One thread steps the engine; each request has a thread that waits for tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import select
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import lfm2np
from lfm2np.faults import inject
from lfm2np.numerics import NAMES

TOP = 5


class Served:
    """The engine and what its threads share, behind one condition."""

    def __init__(self, model: lfm2np.Model, sizes: dict[str, Any]) -> None:
        self.engine = lfm2np.Engine(model, **sizes)
        self.model = model
        self.changed = threading.Condition()
        self.outputs: dict[str, Any] = {}
        self.running: set[str] = set()
        self.count = itertools.count()
        self.broken: str | None = None
        threading.Thread(target=self.step_on, daemon=True).start()

    def step_on(self) -> None:
        while True:
            with self.changed:
                while not (self.engine.has_unfinished and self.broken is None):
                    self.changed.wait()
                try:
                    for output in self.engine.step():
                        self.outputs[output.request_id] = output
                except Exception as problem:
                    self.broken = f"{type(problem).__name__}: {problem}"
                self.changed.notify_all()

    def add(self, ids: list[int], params: lfm2np.SamplingParams, salt: str) -> str:
        with self.changed:
            name = f"r{next(self.count)}"
            self.engine.add_request(name, ids, params, cache_salt=salt)
            self.running.add(name)
            self.changed.notify_all()
            return name

    def leave(self, name: str) -> None:
        with self.changed:
            output = self.outputs.pop(name, None)
            if self.broken is None and (output is None or not output.finished):
                with contextlib.suppress(lfm2np.Lfm2npError):
                    self.engine.abort(name)
            self.running.discard(name)

    def later(self, name: str, seen: int) -> Any:
        """The request's output when it has more tokens than `seen`, or has ended; None after a moment without."""
        with self.changed:
            output = self.outputs.get(name)
            if self.broken is None and not is_new(output, seen):
                self.changed.wait(0.02)
                output = self.outputs.get(name)
            if self.broken is not None:
                raise RuntimeError(self.broken)
            return output if is_new(output, seen) else None


def is_new(output: Any, seen: int) -> bool:
    return output is not None and (output.finished or max(len(one.token_ids) for one in output.outputs) > seen)


def choice_of(one: Any, start: int) -> dict[str, Any]:
    """One sample's tokens from `start` on, as vLLM tells them."""
    logprobs = (one.logprobs or ())[start:]
    return {
        "index": one.index,
        "text": "",
        "token_ids": list(one.token_ids[start:]),
        "finish_reason": one.finish_reason,
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in one.token_ids[start:]],
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [{f"token_id:{token}": value for token, value in each.top} for each in logprobs],
        },
    }


def params_of(fields: dict[str, Any]) -> lfm2np.SamplingParams:
    return lfm2np.SamplingParams(
        temperature=fields.get("temperature", 1.0),
        seed=fields.get("seed"),
        n=fields.get("n", 1),
        max_tokens=fields["max_tokens"],
        ignore_eos=fields.get("ignore_eos", False),
        stop=tuple(fields.get("stop", ())),
        logprobs=TOP,
    )


def handler_of(served: Served) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            """Nothing is logged."""

        def do_GET(self) -> None:
            if self.path == "/metrics":
                pool = served.engine.scheduler.pool
                running = len(served.running)
                used = 1 - pool.num_free / pool.num_blocks
                text = f"vllm:num_requests_running {running}\nvllm:kv_cache_usage_perc {used}\n"
                text += f"vllm:num_preemptions_total {served.engine.metrics.preemptions}\n"
                self.send(200, text.encode(), "text/plain")
            elif self.path == "/version":
                self.send_json(200, {"version": lfm2np.__version__})
            else:
                self.send_json(200, {})

        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                if self.path != "/v1/completions" or not isinstance(fields.get("prompt"), list):
                    raise lfm2np.RequestError("not served")
                name = served.add(fields["prompt"], params_of(fields), fields.get("cache_salt", ""))
            except lfm2np.Lfm2npError as problem:
                self.send_json(400, {"error": {"message": str(problem)}})
                return
            try:
                self.stream(name) if fields.get("stream") else self.whole(name, len(fields["prompt"]))
            except OSError:
                pass  # the client has gone
            except RuntimeError as problem:
                self.send_json(500, {"error": {"message": str(problem)}})
            finally:
                served.leave(name)

        def whole(self, name: str, prompt: int) -> None:
            while (output := served.later(name, 10**9)) is None:
                if select.select([self.connection], [], [], 0)[0]:
                    return  # closed by the client
            new = sum(len(one.token_ids) for one in output.outputs)
            usage = {"prompt_tokens": prompt, "completion_tokens": new}
            self.send_json(200, {"choices": [choice_of(one, 0) for one in output.outputs], "usage": usage})

        def stream(self, name: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            told: dict[int, int] = {}
            while True:
                output = served.later(name, max(told.values(), default=0))
                if output is None:
                    if select.select([self.connection], [], [], 0)[0]:
                        return
                    continue
                for one in output.outputs:
                    event = {"choices": [choice_of(one, told.get(one.index, 0))]}
                    told[one.index] = len(one.token_ids)
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                if output.finished:
                    self.wfile.write(b"data: [DONE]\n\n")
                    return

        def send_json(self, status: int, fields: dict[str, Any]) -> None:
            self.send(status, json.dumps(fields).encode(), "application/json")

        def send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--numerics", default="float32", choices=NAMES)
    parser.add_argument("--fault")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=120)
    parser.add_argument("--max-num-batched-tokens", type=int, default=64)
    arguments = parser.parse_args()
    sizes = {
        name: getattr(arguments, name)
        for name in ("max_num_seqs", "block_size", "num_blocks", "max_num_batched_tokens")
    }
    with inject(arguments.fault) if arguments.fault else contextlib.nullcontext():
        served = Served(lfm2np.load(arguments.model, arguments.numerics), sizes)
        server = Server(("127.0.0.1", arguments.port), handler_of(served))
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
