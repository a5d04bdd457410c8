"""`lfm2np simulate`: the scheduler on real traffic, with a clock; one run, a sweep, or the capacity at a target."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lfm2np.commands.cli.shared.parser import Commands, add, add_command, option, to_write
from lfm2np.commands.cli.shared.terminal import add_report, print_result, progress_bar, show_report
from lfm2np.commands.simulate import sweep
from lfm2np.commands.simulate.cost import KNOWN, preset, read_cost_model
from lfm2np.commands.simulate.fit import fit, read_steps
from lfm2np.commands.simulate.result import Scenario, config_of, simulate, simulation_report
from lfm2np.commands.simulate.traffic import Traffic
from lfm2np.engine.work.place import Workers
from lfm2np.errors import RequestError
from lfm2np.system import write_whole
from lfm2np.values import require_count
from scheduler import POLICIES

EXAMPLE = """lfm2np simulate trace.jsonl --cost H100:LFM2-1.2B --policy waiting-served --report report.html
  lfm2np simulate poisson:prompt=512,output=128 --rate 4
  lfm2np simulate trace.csv --capacity ttft_p99=1                     # requests a second that each policy takes
  lfm2np simulate trace.csv --sweep rate=2:32 --sweep policy=fcfs,static --target ttft_p99=2 --report sweep.html
  lfm2np simulate --fit steps.csv -o cost.json                        # measured steps of any engine"""
DEFAULT_COST = "H100:LFM2-1.2B"
MOST_WORKERS = 1024
COMPARED = [policy for policy in POLICIES if policy != "priority"]  # which is fcfs without priorities in the trace
OF_SCHEDULER: dict[str, tuple[str, Any, str]] = {  # options: the letter of their value, its default, their help
    "num_blocks": ("N", 65536, "cache blocks"),
    "block_size": ("P", 16, "tokens in a cache block"),
    "max_num_seqs": ("N", 256, "most requests that run at once"),
    "max_num_batched_tokens": ("N", 8192, "most tokens of one step"),
    "waiting_served_ratio": ("R", 0.3, "for --policy waiting-served"),
    "max_waiting_tokens": ("N", 20, "for --policy waiting-served"),
}


UNUSED = {  # options that a mode does not read
    "fit": ("sweep", "capacity", "target", "curve", "report"),
    "capacity": ("target", "curve", "output"),
    "sweep": ("output",),
    "traffic": ("target", "curve", "output"),
}


def run(arguments: argparse.Namespace) -> None:
    if (arguments.fit is None) == (arguments.traffic is None):
        raise RequestError("expected a trace or --fit, one of them")
    mode = next(mode for mode in UNUSED if getattr(arguments, mode) is not None)
    for name in UNUSED[mode]:
        if getattr(arguments, name) is not None:
            raise RequestError(
                f"{option(name)}: does not go with {'a single run' if mode == 'traffic' else option(mode)}"
            )
    {"fit": run_fit, "capacity": run_capacity, "sweep": run_sweep, "traffic": run_single}[mode](arguments)


def scenario_of(arguments: argparse.Namespace) -> Scenario:
    seed = require_count("--seed", arguments.seed, 0, 2**63)
    requests = None if arguments.requests is None else require_count("--requests", arguments.requests, 1, None)
    require_count("--workers", arguments.workers, 0, MOST_WORKERS)
    refuse_unread(arguments)
    given = {name: getattr(arguments, name) for name in OF_SCHEDULER if getattr(arguments, name) is not None}
    settings = {name: default for name, (_, default, _) in OF_SCHEDULER.items()} | given
    config = config_of({**settings, "policy": arguments.policy, "prefix_caching": not arguments.no_prefix_caching})
    cost = read_cost_model(arguments.cost) if Path(arguments.cost).is_file() else preset(arguments.cost)
    if arguments.memory is not None and not 0 < arguments.memory < 1e6:
        raise RequestError(f"--memory {arguments.memory}: expected gigabytes, above 0 and below 1e6")
    traffic = Traffic(arguments.traffic, None, seed, requests)
    if traffic.is_drawn and requests is not None:
        raise RequestError(f"--requests {requests}: not with drawn traffic, expected poisson:requests={requests}")
    base = Scenario(traffic, config, cost, arguments.memory)
    return base if arguments.rate is None else base.with_setting("rate", arguments.rate)


def refuse_unread(arguments: argparse.Namespace) -> None:
    """RequestError for a setting that none of the policies reads."""
    varied = COMPARED if arguments.capacity is not None and not arguments.sweep else [arguments.policy]
    policies = sweep.read_settings(arguments.sweep or []).get("policy", varied)
    for name, policy in sweep.UNREAD.items():
        if getattr(arguments, name) is not None and policy not in policies:
            raise RequestError(f"{option(name)} goes with --policy {policy}")


def run_single(arguments: argparse.Namespace) -> None:
    scenario = scenario_of(arguments)
    total = len(scenario.traffic.arrivals())
    with progress_bar("simulating", " requests") as bar:
        figures = simulate(scenario, lambda number: bar(number, total))
    show_report(arguments, simulation_report(figures))


def run_sweep(arguments: argparse.Namespace) -> None:
    base = scenario_of(arguments)
    target = None if arguments.target is None else sweep.read_target(arguments.target)
    runs = sweep.scenarios(base, sweep.read_settings(arguments.sweep))
    results = on_workers(arguments, simulate, [(scenario,) for _, scenario in runs])
    result = sweep.summary(base, [settings for settings, _ in runs], results, target)
    if arguments.curve is not None:
        if len(sweep.best_runs(result)) < 2:
            raise RequestError("--curve: a picture by requests a second needs several, such as --sweep rate=2:32")
        write_whole(arguments.curve, sweep.curve(arguments.curve, result, target))
    show_report(arguments, sweep.sweep_report(result, target))


def run_capacity(arguments: argparse.Namespace) -> None:
    base, target = scenario_of(arguments), sweep.read_target(arguments.capacity)
    settings = sweep.read_settings(arguments.sweep or [f"policy={','.join(COMPARED)}"])
    if "rate" in settings:
        raise RequestError("--sweep rate: --capacity finds the rate")
    runs = sweep.scenarios(base, settings)
    found = on_workers(arguments, sweep.capacity, [(scenario, target) for _, scenario in runs])
    show_report(arguments, sweep.capacity_report(base, target, [chosen for chosen, _ in runs], found))


def on_workers(
    arguments: argparse.Namespace, function: Callable[..., Any], items: Sequence[tuple[Any, ...]]
) -> list[dict[str, Any]]:
    """In their order. Each worker reads the trace by itself, once."""
    workers, results = arguments.workers, list[dict[str, Any]]()
    _ = items[0][0].traffic.trace  # a wrong trace is named before anything starts
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(progress_bar("simulating", " runs"))
        apply = stack.enter_context(Workers(workers)).map if workers else map
        for result in apply(function, *zip(*items, strict=True)):
            results.append(result)
            bar(len(results), len(items))
    return results


def run_fit(arguments: argparse.Namespace) -> None:
    source = Path(arguments.fit)
    model = fit(read_steps(source), source.stem, f"measured steps in {source.name}")
    if arguments.output is not None:
        model.write(arguments.output)
    (form,), errors = model.forms, model.errors
    lines = [f"{model.name}: {model.origin}"]
    lines += [f"{1e6 * s:>14.4g} us  {'for each step' if f == '1' else f'for each of {f}'}" for f, s in form.items()]
    if errors is not None:
        median, p90, total = (100 * errors[name] for name in ("median", "p90", "total"))
        off = f"off by {median:.1f} % (median), {p90:.1f} % (nine of ten), {total:+.1f} % of all their time"
        lines.append(f"of {errors['steps']:,} steps, each predicted from others: {off}")
    print_result(arguments, model.as_json(), "\n".join(lines))


def add_simulate(commands: Commands) -> None:
    text = "run the scheduler on a trace with a clock: latencies, throughput, and how many requests a second it takes"
    parser = add_command(commands, "simulate", run, text, EXAMPLE, model=False)
    traffic_help = "an Azure or Mooncake trace, plain JSON lines, or poisson:prompt=512,output=128,requests=1000"
    parser.add_argument("traffic", nargs="?", metavar="TRACE", help=traffic_help)
    cost_help = f"how long a step takes: a file that --fit wrote, or {KNOWN} ({DEFAULT_COST})"
    add(parser, "--cost COST", cost_help, default=DEFAULT_COST)
    group = parser.add_argument_group("the trace")
    add(group, "--rate R", "requests a second: the trace's times are stretched to it")
    add(group, "--seed N", "of poisson (0)", default=0)
    add(group, "--requests N", "the first N of a trace only")
    group = parser.add_argument_group("the scheduler")
    add(group, "--policy", "scheduling policy (fcfs)", choices=sorted(POLICIES), default="fcfs")
    for name, (letter, default, words) in OF_SCHEDULER.items():
        add(group, f"{option(name)} {letter}", f"{words} ({default})")
    add(group, "--memory R", "gigabytes for cache blocks of the model of --cost, instead of --num-blocks")
    add(group, "--no-prefix-caching", "do not reuse cache blocks of equal prefixes")
    group = parser.add_argument_group("many runs")
    sweep_help = "values to combine: NAME=V1,V2 or NAME=FIRST:LAST; again for each of rate, policy, num_blocks, ..."
    add(group, "--sweep SETTING", sweep_help, action="append")
    add(group, "--target METRIC", "what must hold, in seconds, such as ttft_p99=2")
    capacity_help = "find the most requests a second at this target, for each policy or each --sweep combination"
    add(group, "--capacity METRIC", capacity_help)
    curve_help = "draw the target's metric, or ttft_p99, by requests a second: .svg, .png or .pdf"
    add(group, "--curve FILE", curve_help, type=to_write)
    add(group, "--workers N", "simulate in N processes (0: in this one)", default=0)
    group = parser.add_argument_group("measured steps")
    add(group, "--fit FILE", "fit a cost model: a trace of lfm2np generate, or CSV")
    add(group, "-o --output FILE", "where the cost model goes", type=to_write)
    add_report(parser)
