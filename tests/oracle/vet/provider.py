"""A provider on a port of this machine: what it answers is a function of the request and of how many came before."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Play = Callable[[dict[str, Any], int], tuple[int, Any]]


def chat(text: str, ids: list[int] | None = None, finish_reason: str = "stop") -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    token_ids = {} if ids is None else {"token_ids": ids}
    usage = {"prompt_tokens": 20, "completion_tokens": len(ids or text.split())}
    return {"choices": [choice | token_ids], "usage": usage}


@contextlib.contextmanager
def serving(play: Play, **headers: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the requests that came: body, headers and path."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"body": body, "headers": dict(self.headers), "path": self.path})
            status, content = play(body, len(requests) - 1)
            data = json.dumps(content).encode()
            fields = {"Content-Type": "application/json", "Content-Length": str(len(data))}
            self.send_response(status)
            for name, value in (fields | headers).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
