"""`lfm2np rollouts FILE`: who errs, sampler or trainer, in what they report of sampled answers, and why."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

from lfm2np.commands.cli.shared import work
from lfm2np.commands.cli.shared.parser import Commands, add, add_command
from lfm2np.commands.cli.shared.prompts import load_model
from lfm2np.commands.cli.shared.terminal import add_report, progress_bars, show_report
from lfm2np.engine.loading import Model, load
from lfm2np.engine.sampling.params import from_json
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records_json import words_of_sampling
from lfm2np.oracle.judging.formats import FORMATS, format_named
from lfm2np.oracle.rollouts.api import judge_file
from lfm2np.oracle.rollouts.exact import SIDES
from lfm2np.oracle.rollouts.judge import AUTO, EXPLAINING, JUDGING, SCORING, Options
from lfm2np.oracle.rollouts.rollout import SAMPLING
from lfm2np.values import require_count

EXAMPLE = """lfm2np rollouts rollouts.jsonl --model LFM2-350M
  lfm2np rollouts rollouts.jsonl --model LFM2-350M --sampler-format bfloat16 --trainer-format float32 --report r.html
  lfm2np rollouts verl.jsonl --sampling temperature=0.7 --model LFM2-350M --sample 200 --workers 2"""


def run_rollouts(arguments: argparse.Namespace) -> None:
    """ProofError (1) if a side is wrong, InconclusiveError (2) if neither reported anything."""
    options = options_of(arguments)
    sample = None if arguments.sample is None else require_count("--sample", arguments.sample, 1, None)
    defaults = words_of_sampling(arguments.sampling or "")
    from_json(defaults)  # RequestError names what can't be
    if unknown := sorted(defaults.keys() - set(SAMPLING)):
        raise RequestError(f"--sampling {unknown[0]}: expected some of {', '.join(SAMPLING)}")
    model = load_model(arguments)
    previous = None if arguments.previous is None else previous_of(arguments.previous, model)
    path = Path(arguments.file)
    try:
        with work.place_of(arguments, model) as place, progress_bars(SCORING, JUDGING, EXPLAINING) as show:
            shown = lambda what: partial(show, what)  # noqa: E731
            report = judge_file(arguments.file, model, options, defaults, sample, place, shown, previous)
    except OSError as problem:
        raise RequestError(f"{path}: {problem.strerror}, expected a file of rollouts") from None
    except UnicodeDecodeError as problem:
        raise RequestError(f"{path}: byte {problem.start} of a block is not UTF-8, expected JSON lines") from None
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
    chunks = arguments.chunks or ""
    if chunks and not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", chunks):
        raise RequestError(f"--chunks {chunks!r}: expected whole numbers above 0 with commas between them")
    return Options(
        formats,
        chunks=[int(size) for size in chunks.split(",") if size],
        seed=require_count("--seed", arguments.seed, 0, None),
    )


def previous_of(path: str, model: Model) -> Model:
    """The checkpoint of the step before: RequestError if it is another network."""
    previous = load(path, "exact")
    if previous.config != model.config:
        raise RequestError(f"--previous {path}: config.json differs from that of {model.path}, expected the same")
    return previous


def add_rollouts(commands: Commands) -> None:
    text = "compare sampled answers' log-probabilities, of sampler and trainer, with the exact ones, and say who errs"
    parser = add_command(commands, "rollouts", run_rollouts, text, EXAMPLE, is_verdict=True)
    add(parser, "FILE", "JSON lines, one sequence a line; records of TRL and verl are recognised")
    for side in SIDES:
        format_help = f"number format of the {side}: {', '.join(FORMATS)}, also with a cache format, as in "
        add(parser, f"--{side}-format FORMAT", format_help + "'bfloat16 kv:float8' (auto: finest fit)", default=AUTO)
    add(parser, "--sampling TEXT", 'how sequences were sampled that do not say it, such as "temperature=0.7 top_p=0.9"')
    add(parser, "--previous DIR", "checkpoint of the step before, to look for stale weights, layer by layer")
    add(parser, "--chunks N,N", "sizes of chunks to try, beside powers of two, where state may be lost")
    add(parser, "--sample N", "judge N sequences, drawn with the seed")
    add(parser, "--seed N", "seed of what is drawn (0)", default=0)
    work.add_options(parser)
    add_report(parser)
