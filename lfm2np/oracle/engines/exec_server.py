"""A Python engine behind the protocol of exec_target.py, in a process of its own; a model for other languages.

    lfm2np check "exec:python -m lfm2np.oracle.engines.exec_server package.module:factory"

It reads lines until `run`, computes those requests together, then answers each, and reads on: `--timeout` has to cover
a run. A process of yours may answer a request as soon as it has ended.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from lfm2np.oracle.engines.exec_target import PROTOCOL
from lfm2np.oracle.engines.protocol import Factory
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Request, Trace
from lfm2np.oracle.engines.records_json import answer_as_json, request_from_json

LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")
FIELDS = ("token_ids", *LOGPROBS, "text", "finish_reason", "cached_tokens", "error")


def serve(factory: str | Factory) -> None:
    """Until `bye`, or the end of the input. What the engine prints goes to standard error."""
    output = sys.stdout

    def write(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=output, flush=True)

    with contextlib.redirect_stdout(sys.stderr):
        hello = read()
        if hello.get("protocol") != PROTOCOL:
            sys.exit(f"{hello}: expected protocol {PROTOCOL}")
        target = PythonTarget(factory, hello["model"])
        can = target.probe()
        tells = {"logprobs": can.tells_logprobs, "top_logprobs": 0, "prompt_logprobs": can.tells_prompt_logprobs}
        takes = {"at_once": can.at_once, "abort": can.can_abort, "stops": can.takes_stops}
        write({"kind": "hello", "protocol": PROTOCOL, "engine": can.engine, **tells, **takes})
        requests: list[Request] = []
        while (line := read())["kind"] != "bye":
            if line.pop("kind") == "request":
                requests.append(request_from_json(line))
            else:
                played = target.play(Trace(tuple(requests)))
                for request, (answer, *_) in zip(requests, played.answers, strict=True):
                    known = {name: value for name, value in answer_as_json(answer).items() if name in FIELDS}
                    write({"kind": "answer", "request_id": request.request_id, **known})
                requests = []


def read() -> dict[str, Any]:
    """The next line; the end of the input is a bye."""
    line: dict[str, Any] = json.loads(sys.stdin.readline() or '{"kind": "bye"}')
    return line


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("expected one argument, package.module:factory")
    serve(sys.argv[1])
