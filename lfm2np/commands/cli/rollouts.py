"""`lfm2np rollouts FILE`: who errs, sampler or trainer, in what they report of sampled answers, and why."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lfm2np.commands.cli.shared import work
from lfm2np.commands.cli.shared.parser import Commands, add, add_command, option, require_folder
from lfm2np.commands.cli.shared.prompts import load_model
from lfm2np.commands.cli.shared.terminal import progress_bars, show_report
from lfm2np.engine.loading import Model, load
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.oracle.compare.pair import files_of, require_same_network
from lfm2np.oracle.judging.formats import FORMATS, format_named
from lfm2np.oracle.rollouts.api import judge_some
from lfm2np.oracle.rollouts.converters import CONVERTERS, NATIVE
from lfm2np.oracle.rollouts.reported_side import SIDES
from lfm2np.oracle.rollouts.rollout import read_rollouts
from lfm2np.oracle.rollouts.rollouts import AUTO, EXPLAINING, JUDGING, SCORING, Options
from lfm2np.oracle.rollouts.rollouts_report import report_of
from lfm2np.oracle.rollouts.scores import READINGS
from lfm2np.values import require_count

EXAMPLE = """lfm2np rollouts rollouts.jsonl --model LFM2-350M
  lfm2np rollouts rollouts.jsonl --model LFM2-350M --sampler-format bfloat16 --trainer-format float32 --html report.html
  lfm2np rollouts dump.jsonl --from verl --temperature 0.7 --model LFM2-350M --sample 200 --workers 2"""
EXIT_CODES = """exit codes:
  0    every reported log-probability is within the rounding error of its number format
  1    a side is wrong (DRIFT or BUG), or they report different things (MISMATCH)
  2    inconclusive: no side reported log-probabilities
  3    the arguments, the file or the checkpoint can't be used
  130  interrupted"""
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def run_rollouts(arguments: argparse.Namespace) -> None:
    """ProofError (1) if a side is wrong, InconclusiveError (2) if neither reported anything."""
    options = options_of(arguments)
    require_folder(arguments, "html")
    sample = None if arguments.sample is None else require_count("--sample", arguments.sample, 1, None)
    model = load_model(arguments)
    usable, left = read(arguments, model)
    previous = None if arguments.previous is None else previous_of(arguments.previous, model)
    with work.place_of(arguments, model) as place, progress_bars(SCORING, JUDGING, EXPLAINING) as show:
        judged, sampled_of = judge_some(
            model, usable, options, sample, place, lambda what: partial(show, what), previous
        )
    report = report_of(judged, model.sha256, left, sampled_of)
    show_report(arguments, replace(report, figures={**report.figures, "scoring": work.throughput(place)}))


def options_of(arguments: argparse.Namespace) -> Options:
    """RequestError names the option."""
    formats = {side: getattr(arguments, f"{side}_format") for side in SIDES}
    for side, name in formats.items():
        if name != AUTO:
            try:
                format_named(name)
            except RequestError as problem:
                raise RequestError(f"--{side}-format: {problem}") from None
    return Options(
        formats,
        {side: getattr(arguments, f"{side}_reports") for side in SIDES},
        require_count("--cause-tokens", arguments.cause_tokens, 1, None),
        whole_numbers("--chunks", arguments.chunks) if arguments.chunks else (),
        clip_of(arguments.clip),
        require_count("--seed", arguments.seed, 0, None),
    )


def whole_numbers(name: str, text: str) -> list[int]:
    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text):
        raise RequestError(f"{name} {text!r}: expected whole numbers above 0 with commas between them")
    return [int(part) for part in text.split(",")]


def clip_of(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low, high = 1.0, 0.0
    if not 0.0 <= low <= 1.0 <= high < float("inf"):
        raise RequestError(f"--clip {text!r}: expected LOW,HIGH with LOW up to 1 and HIGH from 1, such as 0.8,1.2")
    return low, high


def read(arguments: argparse.Namespace, model: Model) -> Any:
    """The usable rollouts and what is left out. RequestError for a file that can't be read, or without any."""
    defaults = {name: getattr(arguments, name) for name in DEFAULTS if getattr(arguments, name) is not None}
    SamplingParams(**defaults)  # RequestError names an option that can't be
    path = Path(arguments.file)
    try:
        with path.open(encoding="utf-8") as lines:
            return read_rollouts(lines, arguments.file, model.config, arguments.form, defaults)
    except OSError as problem:
        raise RequestError(f"{path}: {problem.strerror}, expected a file of rollouts") from None
    except UnicodeDecodeError as problem:
        raise RequestError(f"{path}: byte {problem.start} of a block is not UTF-8, expected JSON lines") from None


def previous_of(path: str, model: Model) -> Model:
    """The checkpoint of the step before: RequestError if it is another network."""
    require_same_network(files_of(model.path), files_of(path))
    return load(path, "exact")


def add_rollouts(commands: Commands) -> None:
    text = "compare sampled answers' log-probabilities, of sampler and trainer, with the exact ones, and say who errs"
    parser = add_command(commands, "rollouts", run_rollouts, text, EXAMPLE, exit_codes=EXIT_CODES, is_verdict=True)
    add(parser, "FILE", "JSON lines, one sequence a line; records of TRL, verl, vLLM and others are recognised")
    form_help = "whose records these are (auto: by their keys)"
    add(parser, "--from FORM", form_help, dest="form", choices=[AUTO, NATIVE, *CONVERTERS], default=AUTO)
    for side in SIDES:
        format_help = f"number format of the {side}: {', '.join(FORMATS)}, also with a cache format, as in "
        add(parser, f"--{side}-format FORMAT", format_help + "'bfloat16 kv:float8' (auto: the likeliest)", default=AUTO)
        reports_help = f"what the {side} reports (auto: as the file says, else the likeliest)"
        add(parser, f"--{side}-reports READING", reports_help, choices=[AUTO, *READINGS], default=AUTO)
    for name in DEFAULTS:
        kind = int if name == "top_k" else float
        add(parser, f"{option(name)} X", f"{name} of sequences that do not say it", type=kind)
    add(parser, "--previous DIR", "checkpoint of the step before, to look for stale weights, layer by layer")
    add(parser, "--chunks N,N", "sizes of chunks to try, beside powers of two, where state may be lost")
    add(parser, "--clip LOW,HIGH", "bounds of the ratio trainer / sampler (0.8,1.2)", default="0.8,1.2")
    add(parser, "--sample N", "judge N sequences, drawn with the seed, and say what that leaves open")
    add(parser, "--cause-tokens N", "try causes on about N tokens, prompts included (4000)", default=4000)
    add(parser, "--seed N", "seed of what is drawn (0)", default=0)
    work.add_options(parser)
    add(parser, "--html FILE", "write an HTML report with pictures")
