"""A provider on a port of this machine: what it answers is a function of the request and of how many came before."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Play = Callable[[dict[str, Any], int], tuple[int, Any]]


def chat(text: str, ids: list[int] | None = None, logprobs: list[float] | None = None, **more: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    if ids is not None:
        choice["token_ids"] = ids
    if logprobs is not None:
        entries = [
            {"token": f"token_id:{token}", "logprob": value} for token, value in zip(ids or [], logprobs, strict=True)
        ]
        choice["logprobs"] = {"content": entries}
    return {"choices": [choice | more], "usage": {"prompt_tokens": 20, "completion_tokens": len(ids or text.split())}}


@contextlib.contextmanager
def serving(play: Play, headers: dict[str, str] | None = None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the requests that came: body and headers. A body of bytes is sent as it is, and cut off."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(404, {"error": "none"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"body": body, "headers": dict(self.headers), "path": self.path})
            self.reply(*play(body, len(requests) - 1))

        def reply(self, status: int, content: Any) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data) + 100 * isinstance(content, bytes)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
