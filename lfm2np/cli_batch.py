"""`lfm2np generate` with several requests: continuously batched, one after another, or both and compared."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from lfm2np.cli_requests import Job, read_jobs
from lfm2np.counts import require_count
from lfm2np.draft_model import DRAFT_SAMPLING, ModelDrafter
from lfm2np.drafters import Drafter, NgramDrafter
from lfm2np.drawings.recorded import DetailedTrace
from lfm2np.engine import Engine
from lfm2np.errors import ProofError, RequestError
from lfm2np.loaded import draft_fixture
from lfm2np.loading import Model, load
from lfm2np.outputs import RequestOutput, RunMetrics, static_padding
from lfm2np.sampling import request_seed
from lfm2np.sequential import alone, difference_at
from lfm2np.terminal import progress_bar, terminal_text
from scheduler import POLICIES

ENGINE_OPTIONS = (
    *("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks", "num_host_blocks"),
    *("policy", "waiting_served_ratio", "max_waiting_tokens", "num_speculative_tokens"),
)
SPECULATIVE = ("ngram", "draft", "none")


@dataclass(eq=False)
class Record:
    """What a run produced: by sample name the chosen tokens and the rows [V] that they came from."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, list[NDArray[Any]]] = field(default_factory=dict)

    def add(self, name: str, position: int, row: NDArray[Any], token: int) -> None:
        self.tokens.setdefault(name, []).append(token)
        self.rows.setdefault(name, []).append(np.array(row))


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("continuous batching (several prompts, or any of these)")
    group.add_argument("--max-num-seqs", metavar="N", type=int, help="most requests that run at once (64)")
    group.add_argument("--max-num-batched-tokens", metavar="N", type=int, help="most tokens of one step (2048)")
    group.add_argument("--block-size", metavar="P", type=int, help="tokens of one cache block (16)")
    group.add_argument("--num-blocks", metavar="N", type=int, help="blocks of the cache (what fits into 1 GiB)")
    group.add_argument("--policy", choices=sorted(POLICIES), help="scheduling policy (fcfs)")
    group.add_argument("--waiting-served-ratio", metavar="R", type=float, help="of the policy waiting-served (0.3)")
    group.add_argument("--max-waiting-tokens", metavar="N", type=int, help="of the policy waiting-served (20)")
    group.add_argument("--num-host-blocks", metavar="N", type=int, help="swap preempted requests to so many (0)")
    group.add_argument("--no-prefix-caching", action="store_true", help="do not reuse blocks of equal prefixes")
    group.add_argument("--seed", metavar="N", type=int, help="of requests that have none of their own (0)")
    group.add_argument("--temperature", metavar="T", type=float, help="0 is greedy (default)")
    group.add_argument("--speculative", choices=SPECULATIVE, help="who proposes tokens ahead (none)")
    group.add_argument("--num-speculative-tokens", metavar="K", type=int, help="most of them a request and step (4)")
    draft_help = "of --speculative draft (without --model: the draft fixture)"
    group.add_argument("--draft-model", metavar="DIR", help=draft_help)
    group.add_argument("--draft-sampling", choices=DRAFT_SAMPLING, help="how the draft model proposes (greedy)")
    group.add_argument("--trace", metavar="FILE", help="write the run as JSON lines, for `lfm2np replay`")
    group.add_argument("--trace-detail", action="store_true", help="with what each step computed, for `lfm2np draw`")
    group.add_argument("--sequential", action="store_true", help="each request alone through reference.py instead")
    group.add_argument("--prove", action="store_true", help="run both and compare logits bit for bit (exit code 1)")


def is_wanted(arguments: argparse.Namespace) -> bool:
    """Whether there is more to do than to continue one prompt greedily."""
    others = ("seed", "temperature", "trace", "requests", "speculative", "draft_model", "draft_sampling")
    given = [getattr(arguments, name) for name in (*ENGINE_OPTIONS, *others)]
    flags = (arguments.no_prefix_caching, arguments.sequential, arguments.prove)
    several = len(arguments.prompt or ()) > 1 or len(arguments.chat or ()) > 1
    return several or any(flags) or any(value is not None for value in given)


def run(model: Model, arguments: argparse.Namespace) -> None:
    if arguments.trace_detail and arguments.trace is None:
        raise RequestError("--trace-detail goes with --trace FILE")
    drafter = make_drafter(model, arguments)
    jobs = read_jobs(model, arguments)
    engine_seed = require_count("seed", 0 if arguments.seed is None else arguments.seed, 0, 2**64 - 1)
    batched, alone_record = Record(), Record()
    outputs: dict[str, RequestOutput] = {}
    metrics: RunMetrics | None = None
    refused: dict[str, str] = {}
    if not arguments.sequential or arguments.prove:
        outputs, metrics, refused = run_batched(model, jobs, engine_seed, arguments, batched, drafter)
        jobs = [job for job in jobs if job.request_id not in refused]
        if not jobs:
            raise RequestError(next(iter(refused.values())))
    seconds = None
    if arguments.sequential or arguments.prove:
        seconds = run_sequential(model, jobs, engine_seed, alone_record, drafter)
    if metrics is None:
        print_sequential(model, jobs, alone_record, arguments.json)
        return
    difference = compare(batched, alone_record) if arguments.prove else None
    summary = summarise(jobs, outputs, metrics, seconds, arguments, difference)
    if arguments.json:
        report = {"outputs": [as_json(outputs[job.request_id]) for job in jobs], "summary": summary}
        print(json.dumps({"model": str(model.path), "numerics": model.numerics.name, **report}))
    else:
        print_outputs(jobs, outputs)
        print_summary(summary)
    if difference:
        raise ProofError(difference)
    if refused:
        raise RequestError(f"{len(refused)} of the requests refused: {'; '.join(refused.values())}")


def make_drafter(model: Model, arguments: argparse.Namespace) -> Drafter | None:
    """What --speculative asks for. RequestError for options that belong to another choice."""
    kind = arguments.speculative or "none"
    for name in ("draft_model", "draft_sampling"):
        if getattr(arguments, name) is not None and kind != "draft":
            raise RequestError(f"--{name.replace('_', '-')} goes with --speculative draft")
    if arguments.num_speculative_tokens is not None and kind == "none":
        raise RequestError("--num-speculative-tokens goes with --speculative ngram or draft")
    if kind == "none":
        return None
    if kind == "ngram":
        return NgramDrafter()
    if arguments.draft_model is None and arguments.model is not None:
        raise RequestError("--speculative draft: --model needs a --draft-model of the same vocabulary")
    with progress_bar("loading the draft model") as show:
        small = load(arguments.draft_model or draft_fixture(), arguments.numerics, show)
    return ModelDrafter(small, model, arguments.draft_sampling or "greedy")


def run_batched(
    model: Model,
    jobs: list[Job],
    seed: int,
    arguments: argparse.Namespace,
    record: Record,
    drafter: Drafter | None,
) -> tuple[dict[str, RequestOutput], RunMetrics, dict[str, str]]:
    """All requests through the engine; each is added at its arrival step, and on a terminal their text streams.

    Returns the outputs, the run's metrics, and why a request was refused, which does not stop the others.
    """
    refused: dict[str, str] = {}
    options = {name: getattr(arguments, name) for name in ENGINE_OPTIONS if getattr(arguments, name) is not None}
    keep = record.add if arguments.prove else None
    outputs: dict[str, RequestOutput] = {}
    with open_trace(arguments.trace) as trace, progress_bar("generating") as show:
        detailed = DetailedTrace(model, trace) if trace is not None and arguments.trace_detail else None
        engine = Engine(
            model if detailed is None else detailed.model,
            prefix_caching=not arguments.no_prefix_caching,
            seed=seed,
            trace=trace,
            on_logits=keep,
            drafter=drafter,
            **options,
        )
        screen = Screen(jobs) if sys.stdout.isatty() and not arguments.json else None
        left = sorted(jobs, key=lambda job: job.arrival_step)
        step = 0
        while left or engine.has_unfinished:
            while left and left[0].arrival_step <= step:
                job = left.pop(0)
                try:
                    engine.add_request(job.request_id, job.ids, job.params, job.priority, job.cache_salt)
                except RequestError as error:
                    refused[job.request_id] = str(error)
            for output in engine.step() if detailed is None else detailed.step(engine):
                outputs[output.request_id] = output
            if screen:
                screen.draw(outputs)
            step += 1
            show(sum(output.finished for output in outputs.values()), len(jobs))
        if screen:
            screen.clear()
    return outputs, engine.metrics, refused


class Screen:
    """One line a request on a terminal, redrawn as tokens come."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs[:20]
        self._drawn = False

    def draw(self, outputs: Mapping[str, RequestOutput]) -> None:
        self.clear()
        for job in self._jobs:
            output = outputs.get(job.request_id)
            text = "" if output is None else output.outputs[0].text or ",".join(map(str, output.outputs[0].token_ids))
            print(terminal_text(f"{one_line(job.shown)[:36]:<38}{one_line(text)[-40:]}"), flush=True)
        self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            sys.stdout.write(f"\x1b[{len(self._jobs)}A\x1b[J")
        self._drawn = False


@contextlib.contextmanager
def open_trace(name: str | None) -> Iterator[TextIO | None]:
    """A file that appears under its name only when it is whole."""
    if name is None:
        yield None
        return
    lines = io.StringIO()
    yield lines
    try:
        Path(name).write_text(lines.getvalue(), encoding="utf-8")
    except OSError as problem:
        raise RequestError(f"--trace {name}: can't be written: {problem}") from None


def run_sequential(model: Model, jobs: list[Job], seed: int, record: Record, drafter: Drafter | None) -> float:
    """Each sample alone through reference.py; the seconds it took."""
    began = time.perf_counter()
    with progress_bar("sequential") as show:
        for done, job in enumerate(jobs, start=1):
            for index in range(job.params.n):
                name = job.sample_name(index)
                own_seed = request_seed(job.params, seed, job.request_id)
                for step in alone(model, job.ids, job.params, own_seed, index, drafter):
                    record.add(name, 0, step.logits, step.token_id)
            show(done, len(jobs))
    return time.perf_counter() - began


def compare(batched: Record, truth: Record) -> str | None:
    """The first difference in the order of the requests, or None."""
    for name, tokens in truth.tokens.items():
        mine = batched.tokens.get(name, [])
        for position, (token, expected) in enumerate(zip(mine, tokens, strict=False)):
            found = difference_at(position, token, batched.rows[name][position], expected, truth.rows[name][position])
            if found:
                return f"request {name}: {found}"
        if len(mine) != len(tokens):
            return f"request {name}: {len(mine)} tokens, alone it has {len(tokens)}"
    return None


def summarise(
    jobs: list[Job],
    outputs: Mapping[str, RequestOutput],
    metrics: RunMetrics,
    seconds: float | None,
    arguments: argparse.Namespace,
    difference: str | None,
) -> dict[str, Any]:
    lengths = [(len(job.ids), len(sample.token_ids)) for job in jobs for sample in outputs[job.request_id].outputs]
    alone_steps = sum(output for _, output in lengths)
    summary: dict[str, Any] = {
        "requests": len(jobs),
        "generated_tokens": metrics.sampled_tokens,
        "steps": metrics.steps,
        "steps_one_by_one": alone_steps,
        "tokens_per_step": round(metrics.tokens_per_step, 2),
        "preemptions": metrics.preemptions,
        "prefix_hit_tokens": metrics.prefix_hit_tokens,
        "recomputed_tokens": metrics.recomputed_tokens,
        "padding_avoided": metrics.padding_avoided,
        "static_batch_padding": static_padding(lengths, arguments.max_num_seqs or 64),
        "seconds": round(metrics.seconds, 3),
    }
    if arguments.speculative in ("ngram", "draft"):
        summary["speculative"] = {
            "drafter": arguments.speculative,
            "proposed": metrics.draft_tokens,
            "accepted": metrics.accepted_tokens,
            "proposed_at": metrics.drafted_at,
            "accepted_at": metrics.accepted_at,
            "mean_accepted_length": round(metrics.mean_accepted_length, 3),
            "steps_saved": metrics.steps_saved,
            "failures": metrics.draft_failures,
            "seconds": round(metrics.draft_seconds, 3),
        }
    if seconds is not None:
        summary["sequential_seconds"] = round(seconds, 3)
        summary["speed_up"] = round(seconds / metrics.seconds, 2) if metrics.seconds else None
    if arguments.prove:
        summary["proved"] = difference is None
    return summary


def print_outputs(jobs: list[Job], outputs: Mapping[str, RequestOutput]) -> None:
    for job in jobs:
        for sample in outputs[job.request_id].outputs:
            text = ",".join(map(str, sample.token_ids)) if sample.text is None else sample.text
            ending = f"  [{sample.error}]" if sample.error else ""
            print(terminal_text(f"{one_line(job.shown)[:36]:<38}{one_line(text)}{ending}"))


def print_summary(summary: Mapping[str, Any]) -> None:
    rows = [
        ("requests, generated tokens", f"{summary['requests']}, {summary['generated_tokens']}"),
        ("steps (one request at a time)", f"{summary['steps']} ({summary['steps_one_by_one']})"),
        ("tokens per step", summary["tokens_per_step"]),
        ("padding saved over padded steps", summary["padding_avoided"]),
        ("padding saved over a static batch", summary["static_batch_padding"]),
    ]
    if summary["preemptions"]:
        rows.append(("preemptions, tokens computed twice", f"{summary['preemptions']}, {summary['recomputed_tokens']}"))
    if "speculative" in summary:
        rows += speculative_rows(summary["speculative"])
    if "speed_up" in summary:
        rows.append(("seconds (sequential, no cache)", f"{summary['seconds']} ({summary['sequential_seconds']})"))
        rows.append(("speed-up over sequential", summary["speed_up"]))
    print()
    for name, value in rows:
        print(f"{name:<38}{value}")
    if summary.get("proved"):
        print("proved: every token and every logit equals sequential generation, bit for bit")


def speculative_rows(drafts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The acceptance rate of each place, the first draft's first."""
    pairs = zip(drafts["accepted_at"], drafts["proposed_at"], strict=True)
    rows = [
        ("drafts proposed, accepted", f"{drafts['proposed']}, {drafts['accepted']}"),
        ("accepted by position", " ".join(f"{accepted / proposed:.0%}" for accepted, proposed in pairs) or "-"),
        ("mean accepted length", drafts["mean_accepted_length"]),
        ("request steps saved", drafts["steps_saved"]),
    ]
    if drafts["failures"]:
        rows.append(("requests whose drafter failed", drafts["failures"]))
    return rows


def print_sequential(model: Model, jobs: list[Job], record: Record, as_object: bool) -> None:
    names = [(job, job.sample_name(index)) for job in jobs for index in range(job.params.n)]
    if as_object:
        outputs = [{"request_id": name, "token_ids": record.tokens[name]} for _, name in names]
        print(json.dumps({"model": str(model.path), "numerics": model.numerics.name, "outputs": outputs}))
        return
    for job, name in names:
        ids = record.tokens[name]
        text = model.tokenizer.decode(ids) if model.has_tokenizer else ",".join(map(str, ids))
        print(terminal_text(f"{one_line(job.shown)[:36]:<38}{one_line(text)}"))


def as_json(output: RequestOutput) -> dict[str, Any]:
    return dataclasses.asdict(output)


def one_line(text: str) -> str:
    return " ".join(text.split())
