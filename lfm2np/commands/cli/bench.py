"""`lfm2np bench`: how fast, beside the bare matrix products and transformers, on this machine."""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from lfm2np.checkpoint.files import is_gguf, read_config
from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.commands.bench import check_time, five, growth, large, measure, profile, serve_time, simulate_time, table
from lfm2np.commands.bench.machine import Elsewhere, describe_machine
from lfm2np.commands.bench.random_checkpoint import LARGE, LFM3, MIXTURE, SHORT_MIXTURE, SMALL, random_checkpoint
from lfm2np.commands.bench.sides.cells import CELLS, QUICK, cells_named
from lfm2np.commands.cli.shared.parser import Commands, add, add_command, option
from lfm2np.commands.cli.shared.terminal import progress_bar
from lfm2np.commands.serve.extra import require_extra
from lfm2np.errors import RequestError
from lfm2np.values import Progress, require_count

EXAMPLE = """lfm2np bench
  lfm2np bench --quick --without-peers
  lfm2np bench steps --cells prefill-512,decode-16x1024 --rounds 9 --json
  lfm2np bench profile --cells prefill-512 --numerics exact
  lfm2np bench five --new-tokens 256 --numerics float32
  lfm2np bench growth --numerics exact
  lfm2np bench check --model fixtures/trained --rounds 3 --format bfloat16
  lfm2np bench serve --model fixtures/trained --rounds 3
  lfm2np bench simulate
  lfm2np bench large --numerics exact
  lfm2np bench large --model-shape 8b-a1b --numerics float32
  lfm2np bench steps --model-shape 8b-a1b-4-layers --cells decode-1x128,decode-16x128"""
SHAPES = {"350m": SMALL, "2.6b": LARGE, "lfm3-1.7b": LFM3, "8b-a1b": MIXTURE, "8b-a1b-4-layers": SHORT_MIXTURE}
QUICK_ROUNDS = 3
NEW_TOKENS = 256
APART = "not all sides fit into memory together: each was loaded anew in each round"
NO_PEERS = 'transformers is not installed and was not measured: pip install "lfm2np[peers]"'
NO_GGUF = "transformers was not measured: it would make float32 of a GGUF file's weights"
OWN_OPTIONS = {
    "cells": ("steps", "profile"),
    "numerics": ("profile", "five", "growth", "large", "serve"),
    "quick": ("steps",),
    "without_peers": ("steps",),
    "format": ("check",),
    "new_tokens": ("five",),
    "whole": ("five",),
}


@dataclass(frozen=True)
class Measured:
    """What was measured: as JSON, as text, and the versions of libraries that only some sides have."""

    directory: Path
    fields: dict[str, Any]
    text: str
    versions: dict[str, str] = field(default_factory=dict)


def run(arguments: argparse.Namespace) -> None:
    require_own_options(arguments)
    measure_it, default = MEASUREMENTS[arguments.what]
    default = QUICK_ROUNDS if arguments.quick else default
    rounds = require_count("--rounds", default if arguments.rounds is None else arguments.rounds, 1, 10_000)
    threads = (os.cpu_count() or 1) if arguments.threads is None else arguments.threads
    require_count("--threads", threads, 1, 1024)
    elsewhere = Elsewhere()
    measured = measure_it(arguments, rounds, threads)
    print_measured(measured, threads, elsewhere.share(), arguments.json)


def require_own_options(arguments: argparse.Namespace) -> None:
    """RequestError for an option of another measurement than the one asked for."""
    for name, what in OWN_OPTIONS.items():
        if arguments.what not in what and getattr(arguments, name) not in (None, False):
            raise RequestError(f"{option(name)} goes with bench {', '.join(what)}")


def run_steps(arguments: argparse.Namespace, rounds: int, threads: int) -> Measured:
    cells = cells_named(arguments.cells) if arguments.cells is not None else QUICK if arguments.quick else CELLS
    directory = chosen_checkpoint(arguments)
    config = read_config(directory)
    measure.require_room(config, cells)
    why_not = NO_PEERS if not measure.has_peers() else NO_GGUF if is_gguf(directory) else None
    peers = why_not is None and not arguments.without_peers
    sides = [*measure.OURS, *measure.FLOORS, *(measure.PEERS if peers else ())]
    together = measure.fits_together(config, cells, sides)
    with progress_bar("turns") as show:
        measured = measure.measure(directory, cells, sides, rounds, threads, together, show)
    notes = [] if why_not is None or arguments.without_peers else [why_not]
    notes += [] if together else [APART]
    fields = {**table.as_json(measured), "notes": notes}
    return Measured(directory, fields, "\n".join([table.as_text(measured), *notes]), measured.versions)


def run_profile(arguments: argparse.Namespace, rounds: int, threads: int) -> Measured:
    cells = profile.CELLS if arguments.cells is None else cells_named(arguments.cells)
    directory = chosen_checkpoint(arguments)
    config = read_config(directory)
    measure.require_room(config, cells)

    def measure_profile(numerics: str, show: Progress) -> profile.Profile:
        sides = profile.sides(numerics)
        together = measure.fits_together(config, cells, sides)
        measured = measure.measure(directory, cells, sides, rounds, threads, together, show)
        return profile.Profile(numerics, threads, measured)

    return each_numerics(arguments, directory, measure_profile, profile)


def run_five(arguments: argparse.Namespace, rounds: int, threads: int) -> Measured:
    new_tokens = NEW_TOKENS if arguments.new_tokens is None else arguments.new_tokens
    longest = require_count("--new-tokens", new_tokens, 1, 2**20)
    directory = chosen_checkpoint(arguments)

    def measure_five(numerics: str, show: Progress) -> five.Five:
        return five.measure_five(directory, numerics, longest, rounds, threads, arguments.whole, show)

    return each_numerics(arguments, directory, measure_five, five)


def run_growth(arguments: argparse.Namespace, rounds: int, threads: int) -> Measured:
    directory = chosen_checkpoint(arguments)
    measure_growth = functools.partial(growth.measure_growth, directory, rounds=rounds, threads=threads)
    return each_numerics(arguments, directory, measure_growth, growth)


def run_large(arguments: argparse.Namespace, rounds: int, threads: int) -> Measured:
    directory = chosen_checkpoint(arguments, LARGE)
    measure_large = functools.partial(large.measure_large, directory, rounds=rounds, threads=threads)
    return each_numerics(arguments, directory, measure_large, large)


def run_check(arguments: argparse.Namespace, rounds: int, threads: int) -> Measured:
    directory = chosen_checkpoint(arguments)
    with progress_bar("check") as show:
        times = check_time.measure_check(directory, arguments.format or "float32", rounds, threads, show)
    return Measured(directory, {"check": check_time.as_json(times)}, check_time.as_text(times))


def run_serve(arguments: argparse.Namespace, rounds: int, threads: int) -> Measured:
    require_extra("bench serve")
    directory, numerics = chosen_checkpoint(arguments), arguments.numerics or "exact"
    with progress_bar("serve") as show:
        times = serve_time.measure_serve(directory, numerics, rounds, threads, show)
    return Measured(directory, {"serve": serve_time.as_json(times)}, serve_time.as_text(numerics, times))


def run_simulate(arguments: argparse.Namespace, rounds: int, threads: int) -> Measured:
    with progress_bar("simulate") as show:
        measured = simulate_time.measure_simulate(rounds, show)
    return Measured(Path("scheduler"), {"simulate": simulate_time.as_json(measured)}, simulate_time.as_text(measured))


def each_numerics(
    arguments: argparse.Namespace, directory: Path, measure_it: Callable[..., Any], module: ModuleType
) -> Measured:
    """`measure_it(numerics, show=...)` of each arithmetic of --numerics, by the module's as_json and as_text."""
    measured = []
    for numerics in measure.OURS if arguments.numerics is None else (arguments.numerics,):
        with progress_bar(f"{arguments.what}, {numerics}") as show:
            measured.append(measure_it(numerics, show=show))
    fields = {arguments.what: list(map(module.as_json, measured))}
    return Measured(directory, fields, "\n\n".join(map(module.as_text, measured)))


MEASUREMENTS = {  # and how often each is made
    "steps": (run_steps, 5),
    "profile": (run_profile, 3),
    "five": (run_five, 1),
    "growth": (run_growth, 3),
    "large": (run_large, 2),
    "check": (run_check, 1),
    "serve": (run_serve, 3),
    "simulate": (run_simulate, 3),
}


def chosen_checkpoint(arguments: argparse.Namespace, name: str = SMALL) -> Path:
    """The directory of --model, or the random checkpoint of --model-shape, or of `name`."""
    if arguments.model is not None and arguments.model_shape is not None:
        raise RequestError("--model and --model-shape: expected one of them")
    if arguments.model is not None:
        return checkpoint_path(arguments.model)
    name = SHAPES.get(arguments.model_shape, name)
    with progress_bar(f"making random weights with the shapes of {name}") as show:
        return random_checkpoint(progress=show, name=name)


def print_measured(measured: Measured, threads: int, others: float | None, as_object: bool) -> None:
    """The numbers, after what they were measured on, and how undisturbed."""
    machine = {**describe_machine(), **measured.versions}
    if as_object:
        head = {"model": str(measured.directory), "machine": machine, "threads": threads, "share_of_others": others}
        print(json.dumps({**head, **measured.fields}))
        return
    print(f"{measured.directory.name} on {table.machine_line(machine, threads)}")
    if others is not None:
        print(f"other processes took {100 * others:.0f} % of the processors meanwhile")
    print(f"\n{measured.text}")


def add_bench(commands: Commands) -> None:
    text = "measure speed and memory, beside the bare matrix products and transformers"
    parser = add_command(commands, "bench", run, text, EXAMPLE, model=False)
    what_help = """steps (default): the time of a step beside its floor and transformers; profile: that of its parts;
    five: five prompts in four ways; growth: a step's time and a prompt's memory as the context grows; large:
    LFM2-2.6B's shapes, streamed; check: the time of a verdict, on a right engine and a wrong one; serve: what HTTP
    costs, and how long clients wait, by policy; simulate: simulations with leaps over steps, and without"""
    parser.add_argument("what", nargs="?", choices=list(MEASUREMENTS), default="steps", help=what_help)
    default = "random weights with the shapes of LFM2-350M, made once and kept"
    add(parser, "--model DIR", f"checkpoint directory, or a GGUF file (default: {default})")
    shape_help = "random weights with the shapes of another published model (8b-a1b takes 17 GB of disk)"
    add(parser, "--model-shape", shape_help, choices=list(SHAPES))
    rounds = ", ".join(f"{what} {rounds}" for what, (_, rounds) in MEASUREMENTS.items())
    add(parser, "--rounds N", f"how often each measurement is made ({rounds})")
    add(parser, "--threads N", "of each process (as many as there are cores)")
    only = "of all but steps and check: one arithmetic only (both; serve: exact)"
    add(parser, "--numerics", only, choices=measure.OURS)
    group = parser.add_argument_group("steps, profile")
    add(group, "--cells NAMES", "such as prefill-512,decode-16x1024 (ten; profile: six)")
    group = parser.add_argument_group("steps")
    add(group, "--quick", f"three small cells, {QUICK_ROUNDS} rounds")
    add(group, "--without-peers", "do not measure transformers")
    group = parser.add_argument_group("check")
    add(group, "--format", "of the right engine, and that answers are judged as (float32)", choices=check_time.FORMATS)
    group = parser.add_argument_group("five")
    add(group, "--new-tokens N", f"of the longest answer ({NEW_TOKENS})")
    add(group, "--whole", "time every pass without a cache, not eight lengths")
