"""`lfm2np simulate`: the scheduler on real traffic, with a clock; one configuration, or a sweep over many."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from lfm2np.commands.cli.shared import work
from lfm2np.commands.cli.shared.parser import Commands, add, add_command, option
from lfm2np.commands.cli.shared.terminal import print_result, progress_bar, read_file, show_report
from lfm2np.commands.simulate import sweep, trace_files
from lfm2np.commands.simulate.cost import CostModel, read_cost_model
from lfm2np.commands.simulate.drawn_acceptance import Acceptance, acceptance_of, read_acceptance
from lfm2np.commands.simulate.fit import fit
from lfm2np.commands.simulate.generators import GENERATORS
from lfm2np.commands.simulate.presets import BYTES, MODELS, preset
from lfm2np.commands.simulate.scenario import (
    MOST_DRAFTS,
    SETTINGS,
    Memory,
    Scenario,
    Traffic,
    config_of,
    positive,
    simulate,
)
from lfm2np.commands.simulate.steps import read_steps
from lfm2np.engine.work.results_file import LineFile
from lfm2np.engine.work.shards import map_shards
from lfm2np.errors import ProofError, RequestError
from lfm2np.system import replaced, write_whole
from lfm2np.values import require_count, show
from scheduler import POLICIES, TraceWriter
from scheduler.checksum import damage, sealed

EXAMPLE = """lfm2np simulate azure-conversation-like:requests=2000 --cost H100:LFM2-1.2B
  lfm2np simulate trace.jsonl --policy waiting-served --html report.html
  lfm2np simulate --fit steps.csv --out cost.json                   # measured steps of any engine
  lfm2np simulate trace.csv --cost cost.json --sweep policy=fcfs,waiting-served \\
      --sweep max_num_batched_tokens=512:8192 --target ttft_p99=2"""
DEFAULT_COST = "H100:LFM2-1.2B"
SIZES = {"num_blocks": 65536, "max_num_seqs": 256, "max_num_batched_tokens": 8192}  # where nothing is said
OF_SCHEDULER = {  # options: the letter of their value, and their help
    "num_blocks": ("N", f"cache blocks ({SIZES['num_blocks']})"),
    "block_size": ("P", "tokens in a cache block (16)"),
    "max_num_seqs": ("N", f"most requests that run at once ({SIZES['max_num_seqs']})"),
    "max_num_batched_tokens": ("N", f"most tokens of one step ({SIZES['max_num_batched_tokens']})"),
    "waiting_served_ratio": ("R", "for --policy waiting-served (0.3)"),
    "max_waiting_tokens": ("N", "for --policy waiting-served (20)"),
    "watermark": ("R", "share of the blocks that an admission leaves free (0.01)"),
    "num_host_blocks": ("N", "blocks in host memory to swap preempted requests to (0)"),
    "sliding_window": ("N", "positions that windowed layers see (no such layers)"),
    "num_window_blocks": ("N", "blocks of windowed layers"),
}
MAX_LINE = 2**26


def run(arguments: argparse.Namespace) -> None:
    if (arguments.fit is None) == (arguments.traffic is None):
        both = "" if arguments.traffic is None else ", not both"
        raise RequestError(f"expected a trace (or a generator), or --fit{both}")
    if arguments.fit is not None:
        run_fit(arguments)
    elif arguments.sweep:
        run_sweep(arguments, scenario_of(arguments))
    else:
        run_single(arguments, scenario_of(arguments))


# --- what is simulated


def scenario_of(arguments: argparse.Namespace) -> Scenario:
    traffic = Traffic(
        arguments.traffic,
        arguments.format,
        arguments.rate,
        require_count("--seed", arguments.seed, 0, 2**63),
        arguments.sort,
        positive("--speed", arguments.speed),
        None if arguments.requests is None else require_count("--requests", arguments.requests, 1, None),
        *read_part(arguments.within),
    )
    given = {
        name: getattr(arguments, name) for name in ("policy", *OF_SCHEDULER) if getattr(arguments, name) is not None
    }
    config = config_of({**SIZES, **given, "prefix_caching": not arguments.no_prefix_caching})
    acceptance = None if arguments.acceptance is None else acceptance_from(arguments.acceptance)
    drafts = require_count("--drafts", arguments.drafts, 0, MOST_DRAFTS)
    if acceptance is None and (drafts or any(text.startswith("drafts=") for text in arguments.sweep or ())):
        raise RequestError("drafts need --acceptance: how many of them are accepted")
    waiting = require_count("--most-waiting", arguments.most_waiting, 1, None)
    return Scenario(traffic, config, cost_of(arguments.cost), drafts, acceptance, waiting, memory_of(arguments))


def cost_of(text: str) -> CostModel:
    return read_cost_model(text) if text.endswith(".json") or Path(text).is_file() else preset(text)


def acceptance_from(text: str) -> Acceptance:
    """Shares, or a file that `lfm2np generate --speculative ... --json` wrote."""
    if not Path(text).is_file():
        return read_acceptance(text)
    try:
        figures = json.loads(read_file(text))["summary"]["speculative"]
        return acceptance_of(figures["proposed_at"], figures["accepted_at"])
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"{text}: expected the output of lfm2np generate --speculative ... --json") from None


def read_part(text: str | None) -> tuple[float, float | None]:
    """ "600:1200", in seconds."""
    if text is None:
        return 0.0, None
    try:
        start, stop = (float(part) if part else None for part in text.split(":"))
    except ValueError:
        start, stop = -1.0, None
    start = start or 0.0
    if not 0 <= start < (float("inf") if stop is None else stop):
        raise RequestError(f"--within {show(text)}: expected seconds, FROM:TO")
    return start, stop


def memory_of(arguments: argparse.Namespace) -> Memory | None:
    """What a block takes is known of the models of presets.MODELS, in bfloat16."""
    if arguments.memory is None:
        return None
    if arguments.num_blocks is not None:
        raise RequestError("--memory and --num-blocks: expected one of them")
    name = arguments.cost.partition(":")[2] if arguments.shape is None else arguments.shape
    if name not in MODELS:
        raise RequestError(f"--memory: of which model? --shape {show(name)}: expected one of {', '.join(MODELS)}")
    size = round(positive("--memory", arguments.memory) * 1e9)
    return Memory(size, BYTES * MODELS[name].key_value_numbers, BYTES * MODELS[name].state_numbers)


# --- one configuration


def run_single(arguments: argparse.Namespace, scenario: Scenario) -> None:
    for name in ("target", "save", "seeds", "svg"):
        if getattr(arguments, name) is not None:
            raise RequestError(f"--{name} goes with --sweep")
    if arguments.save_trace is not None:
        with text_file(arguments.save_trace) as file:
            trace_files.write(scenario.traffic.arrivals(), file)
    with progress_bar("simulating", " requests") as bar, writing(arguments.trace, scenario) as trace:
        result = simulate(scenario, lambda number: bar(number, scenario.traffic.requests or number), trace)
    from lfm2np.commands.simulate.page.simulation import simulation_report  # slow to import

    show_report(arguments, simulation_report(result))


@contextlib.contextmanager
def text_file(path: str) -> Iterator[TextIO]:
    """As whole_file.replaced, of text. RequestError if it can't be written."""
    try:
        with replaced(Path(path)) as file:
            text = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
            yield text
            text.flush()
            text.detach()
    except OSError as problem:
        raise RequestError(f"{path}: can't be written: {problem.strerror or problem}") from None


@contextlib.contextmanager
def writing(path: str | None, scenario: Scenario) -> Iterator[TraceWriter | None]:
    """A trace for `lfm2np replay` and `lfm2np draw`."""
    if path is None:
        yield None
        return
    with text_file(path) as file:
        writer = TraceWriter(file, scenario.sized())
        yield writer
        writer.end()


# --- many


def run_sweep(arguments: argparse.Namespace, base: Scenario) -> None:
    if arguments.trace is not None or arguments.save_trace is not None:
        raise RequestError("--trace and --save-trace go without --sweep")
    target = None if arguments.target is None else sweep.read_target(arguments.target)
    settings = sweep.read_settings(arguments.sweep)
    seeds = require_count("--seeds", 1 if arguments.seeds is None else arguments.seeds, 1, 1000)
    if seeds > 1 and not base.traffic.is_drawn and base.traffic.rate is None:
        raise RequestError("--seeds: the requests of a trace with times are what they are; expected a generator")
    bases = [seeded(base, base.traffic.seed + number) for number in range(seeds)]
    runs = [sweep.scenarios(each, settings) for each in bases]
    shards = [scenario for each in zip(*runs, strict=True) for _, scenario in each]
    results = iter(simulate_all(arguments, shards))
    simulated = [(chosen, list(itertools.islice(results, seeds))) for chosen, _ in runs[0]]
    result = sweep.summary(str(base.traffic), settings, simulated, target)
    from lfm2np.commands.simulate.page.sweep_page import curve, sweep_report  # slow to import

    for words in arguments.svg or ():
        metric, _, path = words.partition("=")
        write_whole(path, curve(result, metric))
    show_report(arguments, sweep_report(result))


def seeded(base: Scenario, seed: int) -> Scenario:
    return dataclasses.replace(base, traffic=dataclasses.replace(base.traffic, seed=seed))


def simulate_all(arguments: argparse.Namespace, scenarios: Sequence[Scenario]) -> list[dict[str, Any]]:
    """Those that the file of --save has are not simulated again. Each worker reads the trace by itself."""
    scenarios[0].traffic.require()
    file = None if arguments.save is None else LineFile(arguments.save, MAX_LINE)
    known = {} if file is None else known_results(file)
    content = scenarios[0].traffic.content()
    keys = [scenario.key(content) for scenario in scenarios]
    missing = [index for index, key in enumerate(keys) if key not in known]

    def keep(number: int, result: dict[str, Any]) -> None:
        key = keys[missing[number]]
        known[key] = result
        if file is not None:
            file.append((json.dumps(sealed({"key": key, "result": result})) + "\n").encode())
        bar(sum(each in known for each in keys), len(keys))

    with contextlib.ExitStack() as stack:
        if file is not None:
            stack.callback(file.close)
            file.claim()
        place = stack.enter_context(work.place_of(arguments, None))
        bar = stack.enter_context(progress_bar("simulating", " runs"))
        names = [f"run {index + 1}" for index in missing]
        chosen = [scenarios[index] for index in missing]
        map_shards(simulate, chosen, place.executor, keep, names, place.at_once)
    return [known[key] for key in keys]


def known_results(file: LineFile) -> dict[str, dict[str, Any]]:
    """ProofError for a line that is not what was written."""
    results = {}
    for where, line in file.read():
        try:
            raw = json.loads(line)
            key, result = raw["key"], raw["result"]
        except (ValueError, KeyError, TypeError):
            raise RequestError(f"{where}: expected a line that --save wrote for a sweep") from None
        if problem := damage(raw):
            raise ProofError(f"{where}: {problem}")
        results[key] = result
    return results


# --- the cost model


def run_fit(arguments: argparse.Namespace) -> None:
    """Of measured steps in a file."""
    source = Path(arguments.fit)
    model = fit(read_steps(source), source.stem, f"measured steps in {source.name}")
    if arguments.out is not None:
        model.write(arguments.out)
    errors = model.errors
    lines = [f"{model.name}: {model.origin}"]
    lines += [form_line(feature, seconds) for form in model.forms for feature, seconds in form.items()]
    if errors is not None:
        lines.append(
            f"of {errors.steps:,} steps, each predicted from others: off by {100 * errors.median:.1f} % (median), "
            f"{100 * errors.p90:.1f} % (nine of ten), {100 * errors.total:+.1f} % of all their time"
        )
    forms = list(map(dict, model.forms))
    of_fit = None if errors is None else dataclasses.asdict(errors)
    fields = {"name": model.name, "origin": model.origin, "forms": forms, "errors": of_fit}
    print_result(arguments, fields, "\n".join(lines))


def form_line(feature: str, seconds: float) -> str:
    return f"{1e6 * seconds:>14.4g} us  {'for each step' if feature == '1' else f'for each of {feature}'}"


def add_simulate(commands: Commands) -> None:
    text = "run the scheduler on a trace with a clock: latencies, throughput, utilisation; or sweep over settings"
    parser = add_command(commands, "simulate", run, text, EXAMPLE, model=False)
    named = f"a trace ({', '.join(trace_files.FORMATS)}) or a generator ({', '.join(GENERATORS)})"
    traffic_help = f"{named}, such as poisson:rate=4,prompt=512,output=128"
    parser.add_argument("traffic", nargs="?", metavar="TRACE", help=traffic_help)
    cost_help = f"how long a step takes: a file that --fit wrote, or published figures, GPU:MODEL ({DEFAULT_COST})"
    add(parser, "--cost COST", cost_help, default=DEFAULT_COST)
    group = parser.add_argument_group("the trace")
    add(group, "--format", "of the trace (by its first line)", choices=list(trace_files.FORMATS))
    add(group, "--rate R", "requests a second, for a trace without times")
    add(group, "--seed N", "of a generator, and of --rate (0)", default=0)
    add(group, "--sort", "read the whole trace and sort it by time")
    add(group, "--speed R", "how many times as fast the requests come (1)", default=1.0)
    add(group, "--requests N", "the first N only")
    add(group, "--within FROM:TO", "those that come within these seconds of the trace")
    add(group, "--save-trace FILE", "write the requests in lfm2np's own format")
    group = parser.add_argument_group("the scheduler")
    add(group, "--policy", "scheduling policy (fcfs)", choices=sorted(POLICIES))
    for name, (letter, words) in OF_SCHEDULER.items():
        add(group, f"{option(name)} {letter}", words)
    add(group, "--memory R", "gigabytes for cache blocks, with their states, instead of --num-blocks")
    add(group, "--shape", "for --memory: whose keys, values and states (the model of --cost)", choices=list(MODELS))
    add(group, "--no-prefix-caching", "do not reuse cache blocks of equal prefixes")
    add(group, "--drafts K", "draft tokens for each decoding request in each step (0)", default=0)
    acceptance_help = "share of drafts accepted, one for each place (0.8,0.7), or the JSON of lfm2np generate"
    add(group, "--acceptance SHARES", acceptance_help)
    group = parser.add_argument_group("a sweep")
    sweep_help = f"values to combine: NAME=V1,V2 or NAME=FIRST:LAST; again for each setting ({', '.join(SETTINGS)})"
    add(group, "--sweep SETTING", sweep_help, action="append")
    add(group, "--target METRIC", "what must hold, in seconds, such as ttft_p99=2")
    svg_help = (
        "draw a metric (ttft_p99, tpot_mean, hit_share, ...) against the first setting; again for another picture"
    )
    add(group, "--svg METRIC=FILE", svg_help, action="append")
    add(group, "--seeds N", "simulate N drawn traces for each configuration (1)")
    work.add_options(parser)
    group = parser.add_argument_group("measuring")
    add(group, "--fit FILE", "fit a cost model to measured steps: a trace, CSV or JSON lines")
    add(group, "--out FILE", "where the cost model goes")
    group = parser.add_argument_group("output")
    add(group, "--html FILE", "write an HTML report with pictures")
    add(group, "--trace FILE", "write every step, for `lfm2np draw` and `lfm2np replay`")
    waiting_help = "end when more requests wait: the queue grows without bound"
    add(group, "--most-waiting N", f"{waiting_help} (20000)", default=20_000)
