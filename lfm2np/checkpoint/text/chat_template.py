"""A checkpoint's chat template, rendered by jinja2's immutable sandbox as transformers renders it. Needs jinja2.

A template is a stranger's program. The sandbox keeps it from Python's internals, and there is no loader, so it can't
name a file. It ends after MAX_STEPS lines of its compiled code or MAX_OUTPUT characters, and multiplies nothing beyond
them. What a filter or a format pads is not bounded: a template can still take memory, as it can in transformers.
Source: transformers 5.24, utils/chat_template_utils.py. The date is a variable, and random choices are refused: a
prompt has to be reproducible.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox

from lfm2np.errors import TokenizerError

MAX_OUTPUT = 2**24
MAX_STEPS = 10**6  # some seconds; LFM2's template takes about 20 a message
MAX_PRODUCT, MAX_NUMBER_BITS = 2**20, 2**12  # of a repeated text or list, in characters or parts; of an integer
OLDEST_JINJA = (3, 1, 6)  # before it, the sandbox has known escapes; transformers refuses it too
ADDRESS = re.compile(r"at 0x[0-9a-f]+", re.IGNORECASE)  # in the text that Python gives functions and most objects


class Generation(ext.Extension):
    """transformers' {% generation %} ... {% endgeneration %}, of which only the text counts here."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares a set

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Sandbox(sandbox.ImmutableSandboxedEnvironment):
    """The immutable sandbox, in which no single product takes the machine's memory or an hour."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            most = MAX_NUMBER_BITS
        else:
            count, whole = (left, right) if isinstance(left, int) else (right, left)
            size, most = len(whole) * count if hasattr(whole, "__len__") and isinstance(count, int) else 0, MAX_PRODUCT
        if size > most:
            raise jinja2.TemplateRuntimeError(f"{operator}: a result of {size:.3g} bits or parts, expected {most}")
        return super().call_binop(context, operator, left, right)


def render_template(source: str, variables: Mapping[str, object], name: str) -> str:
    """The template's output; TokenizerError naming the file otherwise."""
    version = importlib.metadata.version("jinja2")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < OLDEST_JINJA:
        raise TokenizerError(f"jinja2 {version}: its sandbox has known escapes, expected at least 3.1.6")
    try:
        return render(source, variables)
    except Exception as problem:  # any operation in a template can fail
        line = f"line {problem.lineno}: " if isinstance(problem, jinja2.TemplateSyntaxError) else ""
        text = " ".join(str(problem).split())[:300] or type(problem).__name__
        raise TokenizerError(f"{name}: the chat template failed: {line}{text}") from None


@lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters.update(tojson=to_json, random=not_reproducible)
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, lipsum=not_reproducible)
    return environment.from_string(source)


def render(source: str, variables: Mapping[str, object]) -> str:
    template, pieces, size = compiled(source), list[str](), 0
    with bounded_steps():
        for piece in template.generate(**variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_OUTPUT:
                raise jinja2.TemplateRuntimeError(f"more than {MAX_OUTPUT} characters of output")
    text = "".join(pieces)
    for address in set(ADDRESS.findall(text)):
        if address not in source + str(variables):
            raise jinja2.TemplateRuntimeError("output of an object's address, another one in every run: expected data")
    return text


@contextmanager
def bounded_steps() -> Iterator[None]:
    """TemplateRuntimeError once the templates rendered by this thread have taken MAX_STEPS lines of compiled code."""
    steps, before = 0, sys.gettrace()

    def of_a_line(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            raise jinja2.TemplateRuntimeError(f"no end after {MAX_STEPS} steps")
        return of_a_line

    sys.settrace(lambda frame, event, argument: of_a_line if frame.f_code.co_filename == "<template>" else None)
    try:
        yield
    finally:
        sys.settrace(before)


def raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def not_reproducible(*_: object, **__: object) -> None:
    raise jinja2.TemplateError("lipsum and random are refused: a prompt has to be reproducible")


@jinja2.pass_context
def strftime_now(context: Any, form: str) -> str:
    """Of the variable `date`, not of the clock."""
    if "date" not in context:
        raise jinja2.TemplateError("a prompt has to be reproducible: expected the variable date, as 2026-11-29")
    return datetime.date.fromisoformat(context["date"]).strftime(form)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """transformers' filter: jinja2's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
