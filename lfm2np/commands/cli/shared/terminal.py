"""What all commands share: progress bars, files and ids as arguments, text that is safe to show."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lfm2np.checkpoint.strict_json import decode_text, read_bytes
from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.commands.cli.shared.parser import add, discard_output, to_write
from lfm2np.errors import InconclusiveError, ProofError, RequestError
from lfm2np.oracle.report.as_html import as_html
from lfm2np.oracle.report.as_json import as_json
from lfm2np.oracle.report.as_junit import as_junit
from lfm2np.oracle.report.as_text import as_text
from lfm2np.oracle.report.report import OPEN, WRONG, Report
from lfm2np.system import write_whole
from lfm2np.values import Progress, ProgressOf

MAX_PROMPT_BYTES = 64 * 2**20
REPORTS = {".html": as_html, ".xml": as_junit}  # how --report renders, by the ending of a file


@contextlib.contextmanager
def progress_bar(description: str, unit: str = "it") -> Iterator[Progress]:
    """A function `(done, total)` that draws a bar on a terminal once two seconds have passed; silent when piped.

    It shows how many units are done a second.
    """
    scale, columns = unit != "it", shutil.get_terminal_size().columns  # a terminal may not say how wide it is
    with tqdm(
        desc=description,
        unit=unit,
        unit_scale=scale,
        ncols=columns,
        delay=2,
        leave=False,
        disable=None,
        file=sys.stderr,
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@contextlib.contextmanager
def progress_bars(*of_tokens: str) -> Iterator[ProgressOf]:
    """A function `(what, done, total)`: one such bar a kind of work; those named count tokens."""
    with contextlib.ExitStack() as stack:
        bars: dict[str, Progress] = {}

        def show(what: str, done: int, count: int) -> None:
            if what not in bars:
                unit = " tokens" if what in of_tokens else "it"
                bars[what] = stack.enter_context(progress_bar(what, unit))
            bars[what](done, count)

        yield show


def parse_ids(text: str, source: str) -> list[int]:
    """ "1,2,3", also with blanks or line ends -> [1, 2, 3]. Digits only: to Python's int "1_0" would be 10."""
    parts = re.split(r"\s*,\s*|\s+", text.strip())
    shown = text if len(text) <= 40 else text[:40] + "..."
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise RequestError(f"{source} {shown!r}: expected whole numbers with commas between them")
    if max(map(len, parts)) > 18:
        raise RequestError(f"{source} {shown!r}: a number is too large, expected at most 18 digits")
    return [int(part) for part in parts]


def read_file(name: str) -> str:
    """The text of a file, or of standard input for "-"."""
    source = "standard input" if name == "-" else name
    if name == "-":
        if sys.stdin is None:
            raise RequestError("standard input is closed")
        try:
            content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        except OSError as problem:
            raise RequestError(f"standard input can't be read: {problem}") from None
    else:
        content = read_bytes(Path(name), MAX_PROMPT_BYTES, RequestError)
    if len(content) > MAX_PROMPT_BYTES:
        raise RequestError(f"{source}: more than {MAX_PROMPT_BYTES} bytes")
    return decode_text(content, source, RequestError)


def print_result(arguments: argparse.Namespace, fields: Any, text: str) -> None:
    """One JSON object with --json, else the text."""
    print(json.dumps(fields) if arguments.json else terminal_text(text), flush=True)


def show_report(arguments: argparse.Namespace, report: Report, is_interrupted: bool = False) -> None:
    """Printed, as one JSON object with --json; and written where --report says, if the command has it.

    ProofError (1) if it says that something is wrong, InconclusiveError (2) if that is open; in place of both
    KeyboardInterrupt (130) behind what an interrupted command found.
    """
    command = command_line()
    try:  # first: a file may fail to be written
        print_result(arguments, as_json(report, command), as_text(report, command))
    except BrokenPipeError:
        discard_output()  # the reader has gone, as `head` does; the exit code still tells the verdict
    for path in vars(arguments).get("report") or ():
        write_whole(path, REPORTS[path.suffix](report, command))
    if is_interrupted:
        raise KeyboardInterrupt
    verdict = ": ".join([report.verdict, *(finding.sentence for finding in report.findings[:1])])
    if report.exit_code == WRONG:
        raise ProofError(verdict)
    if report.exit_code == OPEN:
        raise InconclusiveError(verdict)


class Reports(argparse.Action):
    """The files of --report."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        path, given = Path(value), namespace.report or ()
        if path.suffix not in REPORTS or path in given:
            raise argparse.ArgumentError(self, f"{path}: expected files in {' or '.join(REPORTS)}, each once")
        namespace.report = (*given, path)


def add_report(parser: argparse._ActionsContainer, more: str = "") -> None:
    text = f"write a report: FILE.html, or FILE.xml for JUnit; may be repeated{more}"
    add(parser, "--report FILE", text, type=to_write, action=Reports)


def command_line(without: Collection[str] = ()) -> str:
    """The command that runs, as a shell would read it, without these options and their values."""
    words, kept = iter(sys.argv[1:]), ["lfm2np"]
    for word in words:
        if word in without:
            next(words, None)
        elif word.partition("=")[0] not in without:
            kept.append(word)
    return shlex.join(kept)


def entry(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token as a quoted piece of text, a special one by its name, or its id where there is no tokenizer."""
    if tokenizer is None:
        return str(token_id)
    text = tokenizer.token_bytes(token_id).decode("utf-8", "backslashreplace")
    return repr(text) if text else tokenizer.token(token_id) or f"<dead row {token_id}>"


def terminal_text(text: str) -> str:
    """Text as a terminal may show it: control characters, which could move the cursor, become U+FFFD."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() or (c.isspace() and ord(c) > 0x9F) else "\ufffd" for c in text)
