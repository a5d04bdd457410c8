"""Runs what the pages show: python docs/_ext/run_pages.py [--write] [PAGE ...] (without PAGE: README.md and docs/).

The blocks of one page run in their order, in one new empty folder, with this Python's `lfm2np`, `python` and `pytest`.

    ```console      `$ command` lines (a \\ at the end goes on), each followed by what it prints, both streams together.
                    A line `...` stands for any lines, `...` within a line for any characters. Exit code 0, unless said.
    ```python       with `>>>`: a doctest (... stands for anything); without: code that must run and print nothing.
                    All of a page share their names.
    :caption: NAME  on a ```{code-block} LANGUAGE: the file NAME, written into the folder; a Python file is not run.
    other languages of SHOWN are shown only; bash, sh and what is not known are errors.

A comment on the line above a block says what is not the rule (with commas: several):

    <!-- not run: REASON -->      CI doesn't run it, and why
    <!-- run: exit 3 -->          the block's last command ends with exit code 3
    <!-- run: any decimals -->    numbers with a point or an exponent may be others, and columns wider: times, noise
    <!-- run: in checkout -->     runs where pyproject.toml lies; it must not write there

A picture `![...](pictures/NAME)` is made by a command of the page, which writes NAME into the folder.

`--write` puts what the commands really print and draw in place of what doesn't match; look at the diff then.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
DOCS = CHECKOUT / "docs"
SHOWN = {"text", "json", "yaml", "toml", "ini", "diff", "html", "rust", "c", "cpp", "math"}
SCRIPTS = {"lfm2np": "lfm2np.commands.cli import main", "pytest": "pytest import main"}  # as pip makes them
FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")
VARYING = re.compile(r"(\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+| {2,})")
PICTURE = re.compile(r"\]\(pictures/([^)/]+)\)")
COMMENT = re.compile(r"^ *<!-- (not run|run): (.+?) -->$")


class Wrong(Exception):
    """A block that is not what it says; the message names page and line."""


@dataclass
class Block:
    page: Path
    line: int  # of the fence, from 1
    language: str
    file: str  # the caption, or ""
    lines: list[str]  # without the fences, options and indentation
    first: int  # index of lines[0] in the page's lines
    indent: str
    not_run: str  # the reason, or ""
    status: int
    in_checkout: bool
    any_decimals: bool

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(CHECKOUT) if self.page.is_relative_to(CHECKOUT) else self.page}:{self.line}"


def blocks_of(page: Path, text: str) -> list[Block]:
    """The fenced blocks of a page, each with what the comment above it says."""
    lines, blocks, i = text.split("\n"), [], 0
    while i < len(lines):
        opened = FENCE.match(lines[i])
        if not opened:
            i += 1
            continue
        indent, fence, info = opened.groups()
        close = next((j for j in range(i + 1, len(lines)) if lines[j].strip() == fence), None)
        if close is None:
            raise Wrong(f"{page.name}:{i + 1}: the block is never closed")
        directive = re.fullmatch(r"\{([\w-]+)\} *(.*)", info.strip())
        options, first = {}, i + 1
        while directive and first < close and (option := re.match(r" *:([\w-]+): *(.*)$", lines[first])):
            options[option[1]] = option[2].strip()
            first += 1
        language = info.strip() if not directive else directive[2] if directive[1] == "code-block" else "{directive}"
        comment = COMMENT.match(lines[i - 1]) if i else None
        block = Block(page, i + 1, language, options.get("caption", ""), [], first, indent, "", 0, False, False)
        block.lines = [line.removeprefix(indent) for line in lines[first:close]]
        if comment and comment[1] == "not run":
            block.not_run = comment[2]
        for word in comment[2].split(", ") if comment and comment[1] == "run" else ():
            if word == "in checkout":
                block.in_checkout = True
            elif word == "any decimals":
                block.any_decimals = True
            elif exited := re.fullmatch(r"exit (\d+)", word):
                block.status = int(exited[1])
            else:
                raise Wrong(f"{block.place}: run: {word!r}; known are 'exit N', 'any decimals', 'in checkout'")
        blocks.append(block)
        i = close + 1
    return blocks


def commands_of(block: Block) -> list[tuple[str, int, int]]:
    """(command, index of its first output line in block.lines, index after its last)."""
    commands: list[tuple[str, int, int]] = []
    i = 0
    while i < len(block.lines):
        if not block.lines[i].startswith("$ "):
            raise Wrong(f"{block.place}: a console block starts with `$ command`, not {block.lines[i]!r}")
        start = i
        while block.lines[i].endswith("\\"):
            i += 1
        command = "\n".join(block.lines[start : i + 1])[2:]
        i = output = i + 1
        while i < len(block.lines) and not block.lines[i].startswith("$ "):
            i += 1
        commands.append((command, output, i))
    return commands


def matches(expected: list[str], printed: list[str], any_decimals: bool = False) -> bool:
    """Whether the lines are as expected; `...` alone is any lines, within a line any characters."""

    def pattern(text: str) -> str:
        if not any_decimals:
            return re.escape(text)
        parts = VARYING.split(text)  # every second one varies
        varying = [" +" if part.isspace() else r"[\d.]+(?:e[+-]?\d+)?" for part in parts[1::2]]
        return "".join(re.escape(piece) + other for piece, other in zip(parts[::2], [*varying, ""], strict=True))

    parts = [
        r"(?:.*\n)*" if line == "..." else ".*".join(map(pattern, line.rstrip().split("..."))) + r"\n"
        for line in expected
    ]
    return re.fullmatch("".join(parts), "".join(f"{line.rstrip()}\n" for line in printed)) is not None


class Shell:
    """Commands of one page: the folder they run in, and what they left running."""

    def __init__(self, folder: Path, programs: Path) -> None:
        python = shlex.quote(sys.executable)
        started = {name: f"{python} {programs}/run_{name}.py" for name in SCRIPTS}
        for name, what in SCRIPTS.items():
            (programs / f"run_{name}.py").write_text(f"from {what}\n\nraise SystemExit(main())\n")
        for name, command in {**started, "python": python, "python3": python}.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (programs / name).chmod(0o755)
        self.folder, self.left = folder, list[int]()
        # As at a terminal: where CI is set, pytest cuts no line.
        self.environment = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")} | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",  # so that both streams come in the order in which they were written
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "100",
            "NO_COLOR": "1",
        }

    def run(self, command: str, in_checkout: bool) -> tuple[int, list[str]]:
        with tempfile.TemporaryFile("w+") as output:  # not a pipe: what goes on behind `&` would hold it open
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=CHECKOUT if in_checkout else self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if command.rstrip().endswith("&"):
                self.left.append(process.pid)
            status = process.wait()
            output.seek(0)
            return status, output.read().splitlines()

    def end(self) -> None:
        for group in self.left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)


def run_console(block: Block, shell: Shell) -> list[tuple[int, int, list[str]]]:
    """Runs the block. Returns where its output is another: (from, to, what was printed), indices into block.lines."""
    differ = []
    commands = commands_of(block)
    for number, (command, start, stop) in enumerate(commands):
        status, printed = shell.run(command, block.in_checkout)
        wanted = block.status if number == len(commands) - 1 else 0
        if status != wanted:
            output = "\n".join(printed)
            raise Wrong(f"{block.place}: exit code {status}, expected {wanted}: {command}\n{output}")
        if not matches(block.lines[start:stop], printed, block.any_decimals):
            differ.append((start, stop, printed))
    return differ


def run_python(block: Block, names: dict[str, Any]) -> None:
    source = "\n".join(block.lines) + "\n"
    printed = io.StringIO()
    if ">>>" not in source:
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(source, block.place, "exec"), names)
        except Exception as error:
            raise Wrong(f"{block.place}: {type(error).__name__}: {error}") from error
        if printed.getvalue():
            raise Wrong(f"{block.place}: prints what the page does not show: {printed.getvalue()[:200]!r}; use >>>")
        return
    test = doctest.DocTestParser().get_doctest(source, names, block.place, str(block.page), block.line)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(test, out=printed.write, clear_globs=False)
    names.update(test.globs)  # the test ran on a copy
    if runner.failures:
        raise Wrong(f"{block.place}:\n{printed.getvalue()}")


def written(text: str, block: Block, differ: list[tuple[int, int, list[str]]]) -> str:
    """The page with what was really printed; line numbers below the block move."""
    lines = text.split("\n")
    for start, stop, printed in reversed(differ):
        lines[block.first + start : block.first + stop] = [f"{block.indent}{line}".rstrip() for line in printed]
    return "\n".join(lines)


def run_page(page: Path, write: bool = False) -> list[str]:
    """Runs the page's blocks. Returns what was not run, with reasons; raises Wrong where something is not as shown."""
    os.environ["COLUMNS"] = "100"
    not_run: list[str] = []
    with tempfile.TemporaryDirectory() as top:
        folder, programs = Path(top, "page"), Path(top, "programs")
        folder.mkdir()
        programs.mkdir()
        shell, names, done = Shell(folder, programs), {"__name__": "__main__"}, 0
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        try:
            while done < len(blocks := blocks_of(page, page.read_text(encoding="utf-8"))):
                block, done = blocks[done], done + 1
                if block.not_run:
                    not_run.append(f"{block.place}: not run: {block.not_run}")
                elif block.file:
                    (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
                    (folder / block.file).write_text("\n".join(block.lines) + "\n", encoding="utf-8")
                elif block.language == "python":
                    run_python(block, names)
                elif block.language == "console":
                    differ = run_console(block, shell)
                    if differ and write:
                        page.write_text(written(page.read_text(encoding="utf-8"), block, differ), encoding="utf-8")
                    elif differ:
                        start, stop, printed = differ[0]
                        difference = "expected:\n{}\nprinted:\n{}".format(
                            textwrap.indent("\n".join(block.lines[start:stop]), "  "),
                            textwrap.indent("\n".join(printed), "  "),
                        )
                        raise Wrong(f"{block.place}: another output than the page shows\n{difference}")
                elif block.language not in SHOWN | {"{directive}"}:
                    raise Wrong(
                        f"{block.place}: language {block.language!r}; console and python are run, {sorted(SHOWN)} shown"
                    )
            compare_pictures(page, folder, write)
        finally:
            shell.end()
            os.chdir(CHECKOUT)
            sys.path.remove(str(folder))
    return not_run


def compare_pictures(page: Path, folder: Path, write: bool) -> None:
    for name in PICTURE.findall(page.read_text(encoding="utf-8")):
        drawn, shown = folder / name, page.parent / "pictures" / name
        if not drawn.is_file():
            raise Wrong(f"{page}: pictures/{name}: no command of the page writes it")
        if not shown.is_file() or words_of(drawn) != words_of(shown):
            if not write:
                raise Wrong(f"{page}: pictures/{name}: a command of the page draws another")
            shown.parent.mkdir(exist_ok=True)
            shown.write_bytes(drawn.read_bytes())


def words_of(picture: Path) -> list[str]:
    """Where they stand is up to the release of matplotlib."""
    return re.findall(r">([^<>]+)<", picture.read_text(encoding="utf-8"))


def pages() -> list[Path]:
    docs = (page for page in DOCS.rglob("*.md") if not page.relative_to(DOCS).parts[0].startswith("_"))
    return [CHECKOUT / "README.md", *sorted(docs)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=lambda name: Path(name).resolve(), metavar="PAGE")
    parser.add_argument("--write", action="store_true", help="put what is really printed into the pages")
    arguments = parser.parse_args()
    if len(arguments.pages) == 1:  # more than one: a process each, as Python keeps what a page imported
        try:
            print(*run_page(arguments.pages[0], arguments.write), sep="\n", end="")
        except Wrong as wrong:
            print(wrong, file=sys.stderr)
            return 1
        return 0
    failed = 0
    for page in arguments.pages or pages():
        print(page.relative_to(CHECKOUT), flush=True)
        options = ["--write"] if arguments.write else []
        failed += subprocess.run([sys.executable, __file__, *options, str(page)]).returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
