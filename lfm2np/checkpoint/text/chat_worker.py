"""Renders chat templates: `python chat_worker.py`, run by chat_sandbox.py. Lines of JSON on stdin and stdout. Needs
jinja2.

A template is a stranger's program. jinja2's immutable sandbox keeps it from Python's internals; there is no loader, so
it can't name another file; and each rendering has a process of its own, which may not use more than the memory and the
processor time below (on systems that have such limits), and holds nothing of others but the pipe for its answer. It is
forked off this one, which has jinja2 loaded and never looks at a template. Where a process can't be forked, this one
renders itself, for a single request.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
import time
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox

PROCESSOR_SECONDS = 2
MEMORY = 2**30
MAX_OUTPUT = 2**24
ADDRESS = re.compile(r"at 0x[0-9a-f]+", re.IGNORECASE)  # in the text that Python gives functions and most objects


class Generation(ext.Extension):
    """transformers' {% generation %} ... {% endgeneration %}, of which only the text counts here."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares a set

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def limit_resources() -> None:
    """Bounds memory and processor time from here on, where the system can."""
    try:
        import resource
    except ImportError:  # Windows: chat_sandbox.py's own time limit remains
        return
    for kind, value in (("RLIMIT_AS", MEMORY), ("RLIMIT_CPU", PROCESSOR_SECONDS)):
        if hasattr(resource, kind):
            _, most = resource.getrlimit(getattr(resource, kind))
            limit = value if most == resource.RLIM_INFINITY else min(value, most)
            with contextlib.suppress(ValueError, OSError):  # macOS refuses any limit on memory
                resource.setrlimit(getattr(resource, kind), (limit, limit))


def raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def not_reproducible(*_: object, **__: object) -> None:
    raise jinja2.TemplateError("strftime_now, lipsum and random are refused: a prompt has to be reproducible")


def only_data(value: Any) -> Any:
    """What `{{ }}` may write: the text of a function or an object holds an address, another one in every run."""
    if value is None or isinstance(value, str | int | float | list | tuple | dict | jinja2.Undefined):
        return value
    raise jinja2.TemplateError(f"output of a {type(value).__name__}, expected text, a number or a list of such")


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """transformers' filter: jinja2's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(source: str, variables: dict[str, Any]) -> str:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols], finalize=only_data
    )
    environment.filters.update(tojson=to_json, random=not_reproducible)
    environment.globals.update(raise_exception=raise_exception, strftime_now=not_reproducible, lipsum=not_reproducible)
    text: str = environment.from_string(source).render(**variables)
    if len(text) > MAX_OUTPUT:
        raise jinja2.TemplateError(f"{len(text)} characters of output, expected at most {MAX_OUTPUT}")
    require_no_address(text, source + str(variables))
    return text


def require_no_address(text: str, given: str) -> None:
    """`only_data` sees no function within a list, nor one that `~`, a filter or a format made text of."""
    for address in set(ADDRESS.findall(text)):
        if address not in given:
            raise jinja2.TemplateError("output of an object's address, another one in every run: expected data only")


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """{"text": ...} or {"error": ...}: any operation in a template can fail, so any exception is its answer."""
    try:
        return {"text": render(request["template"], request["variables"])}
    except Exception as problem:
        line = f"line {problem.lineno}: " if isinstance(problem, jinja2.TemplateSyntaxError) else ""
        return {"error": line + (" ".join(str(problem).split())[:300] or type(problem).__name__)}


def answered_by_child(request: dict[str, Any]) -> dict[str, Any]:
    """The same, of a process for this request alone, which has so many `seconds`."""
    ours, its = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):  # it ends here, whatever happens
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2, ours):  # this process's, not its
                os.dup2(nothing, descriptor)
            limit_resources()
            with os.fdopen(its, "wb") as out:
                out.write(json.dumps(answered(request)).encode())
            os._exit(0)
        os._exit(1)
    os.close(its)
    answer = read_until(ours, time.monotonic() + request["seconds"])
    os.close(ours)
    if answer is None:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if answer is None:
        return {"error": f"no end after {request['seconds']} seconds"}
    if code:
        return {"error": f"it was stopped for the time or memory it used (exit code {code})"}
    try:
        return {**json.loads(answer)}
    except (ValueError, TypeError):
        return {"error": "its process said what is no answer"}


def read_until(descriptor: int, deadline: float) -> bytes | None:
    """What comes until its end; None if that does not come in time."""
    parts: list[bytes] = []
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(descriptor, 2**16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


def main() -> None:
    """A line {"id", "seconds", "template", "variables"} is answered by a line of what `answered` says, with its id."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = answered_by_child(request) if hasattr(os, "fork") else answered(request)
        said = json.dumps({"id": request["id"], "answer": answer}).encode()
        sys.stdout.buffer.write(b"\n" + said + b"\n")  # a line of its own, whatever was printed before
        sys.stdout.buffer.flush()
        del line, request, answer, said  # what was said is not kept for the next


if __name__ == "__main__":
    main()
