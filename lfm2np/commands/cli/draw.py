"""`lfm2np draw`: a recorded run as one HTML page or a step of it, or its schedule once more."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from pathlib import Path

import scheduler
from lfm2np.commands.cli.shared.parser import TOKENIZER_HELP, Commands, add, add_command, add_model, to_write
from lfm2np.commands.cli.shared.terminal import print_result, progress_bar, read_file
from lfm2np.engine.loading import Model, load
from lfm2np.errors import Lfm2npError, ProofError, RequestError, TraceError
from lfm2np.system import write_whole
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.all_views import draw
from lfm2np.teaching.drawings.runs.recorded_run import Run, read_run
from lfm2np.teaching.drawings.terminal_drawing import as_text
from scheduler import replay
from scheduler.trace import read_lines

EXAMPLE = """lfm2np draw --demo -o page.html
  lfm2np draw --demo --model LFM2-8B-A1B -o page.html
  lfm2np generate --prompt "ann has" --prompt "12+30=" --trace run.jsonl --trace-detail
  lfm2np draw run.jsonl -o page.html
  lfm2np draw run.jsonl --terminal --step 3
  lfm2np draw run.jsonl --replay"""

PARTIAL = "accept a trace without its end, of a run that is under way or was interrupted"


def run_draw(arguments: argparse.Namespace) -> None:
    """TraceError for a file that is no trace, RequestError for a step that it lacks or a page that can't be written."""
    if arguments.model is not None and not arguments.demo:
        raise RequestError("--model goes with --demo; a trace has the model that it was recorded of")
    if arguments.tokenizer is not None and arguments.model is None:
        raise RequestError("--tokenizer goes with --model")
    if arguments.step is not None and not arguments.terminal:
        raise RequestError("--step goes with --terminal; the page has them all")
    text = None if arguments.demo else read_file(arguments.trace)
    if arguments.replay:
        replay_schedule(arguments, text)
        return
    with progress_bar("loading") as show:
        trained = load(None, "exact", show)
        model = trained
        if arguments.model is not None:
            model = load(arguments.model, "exact", show, tokenizer=arguments.tokenizer, rope=arguments.rope)
    chosen = read(arguments, model, text)
    if arguments.terminal:
        last = len(chosen.steps) - 1
        number = last if arguments.step is None else arguments.step
        if not 0 <= number <= last:
            raise RequestError(f"--step {number}: expected 0 to {last}")
        print(as_text(chosen, number, sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
        return
    source, of = source_of(arguments, model)
    file = arguments.output
    command = shlex.join(["lfm2np", "draw", *of, "-o", Path(file).name])
    with progress_bar("drawing") as show:
        page = draw(chosen, trained, source, command, show)
    write_whole(Path(file), page)
    size, steps = len(page.encode()), len(chosen.steps)
    print_result(
        arguments, {"page": file, "bytes": size, "steps": steps}, f"{file}: {steps} steps, {size / 1e6:.1f} MB"
    )


def source_of(arguments: argparse.Namespace, model: Model) -> tuple[str, list[str]]:
    """What the page shows, and the command's arguments that say so. Directories are left out."""
    if not arguments.demo:
        name = Path(arguments.trace).name
        return name, [name]
    if arguments.model is None:
        return "the demo's run on the trained fixture", ["--demo"]
    return f"the demo's run on {model.path.name}", ["--demo", "--model", model.path.name]


def read(arguments: argparse.Namespace, model: Model, text: str | None) -> Run:
    if text is None:
        return read_run(demo.main_lines(model))
    try:
        return read_run(lines_of(text, arguments.partial), not arguments.partial)
    except RequestError as error:
        raise TraceError(f"{arguments.trace}: {error}") from None


def lines_of(trace: str, is_partial: bool) -> list[str]:
    """Without the torn last line that a run under way or killed leaves."""
    return (trace[: trace.rfind("\n") + 1] if is_partial else trace).splitlines()


def replay_schedule(arguments: argparse.Namespace, text: str | None) -> None:
    """Schedules again what the trace has, without the model. TraceError (3) for a file that is no trace, ProofError (1)
    if a plan, a token or an ending differs.
    """
    if text is None:
        raise RequestError("--replay goes with a trace")
    lines, is_whole = lines_of(text, arguments.partial), not arguments.partial
    refusal: type[Lfm2npError] = TraceError
    try:
        list(read_lines(lines, is_whole))
        refusal = ProofError
        result = replay(lines, is_whole=is_whole)
    except scheduler.TraceError as error:
        raise refusal(f"{arguments.trace}: {error}") from None
    unfinished = f", {result.unfinished} requests unfinished" if result.unfinished else ""
    line = (
        f"replayed {result.steps} steps, {result.requests} requests, {result.scheduled_tokens} scheduled and "
        f"{result.tokens} sampled tokens, {result.preemptions} preemptions{unfinished}: "
        "every plan, token and ending as recorded"
    )
    print_result(arguments, dataclasses.asdict(result), line)


def add_draw(commands: Commands) -> None:
    text = "show a recorded run step by step: one HTML page, or a step in the terminal"
    parser = add_command(commands, "draw", run_draw, text, EXAMPLE, model=False)
    source = parser.add_mutually_exclusive_group(required=True)
    add(source, "TRACE", "file written by generate --trace", nargs="?")
    add(source, "--demo", "a run that shows every feature")
    add_model(parser, "for --demo: checkpoint directory, or a GGUF file (the trained fixture)")
    add(parser, "--tokenizer DIR", f"for --model: {TOKENIZER_HELP}")
    add(parser, "--partial", PARTIAL)
    target = parser.add_mutually_exclusive_group(required=True)
    add(target, "-o --output FILE", "HTML file to write", type=to_write)
    add(target, "--terminal", "print plan, blocks and timeline of a step as text")
    again = "draw nothing: schedule again without the model, and confirm each plan, token and ending"
    add(target, "--replay", again)
    add(parser, "--step N", "step to print with --terminal (the last)")
