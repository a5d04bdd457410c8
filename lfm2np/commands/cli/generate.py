"""`lfm2np generate`: one prompt as many, continuously batched, each alone by the reference, or both and compared."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.commands.cli.options import add_engine_options, engine_options, make_drafter, seed_of
from lfm2np.commands.cli.shared.generate_output import (
    Display,
    OneSample,
    Screen,
    Watch,
    as_json,
    print_calls,
    print_outputs,
    print_summary,
)
from lfm2np.commands.cli.shared.parser import Commands, add, add_command, add_modes, refuse_unused
from lfm2np.commands.cli.shared.prompts import add_arithmetic_options, add_prompt_options, load_model
from lfm2np.commands.cli.shared.requests import Job, read_jobs
from lfm2np.engine.drafters import Drafter
from lfm2np.engine.engine import Engine
from lfm2np.engine.loading import Model
from lfm2np.engine.outputs import RequestOutput, RunMetrics, static_padding
from lfm2np.engine.sequence import sample_name
from lfm2np.engine.sequential import answer_alone, difference_at, tokens_of_passes
from lfm2np.errors import ProofError, RequestError, error_told
from lfm2np.system import write_whole
from lfm2np.teaching.drawings.runs.recorded import DetailedTrace

ALONE = "not with --sequential, which runs no engine"
OF_ENGINE = (
    *("max_num_batched_tokens", "block_size", "num_blocks", "policy", "waiting_served_ratio", "max_waiting_tokens"),
    *("no_prefix_caching", "trace", "trace_detail"),
)


@dataclass(eq=False)
class Record:
    """What a run produced: by sample name the chosen tokens and the rows [V] that they came from."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, list[NDArray[Any]]] = field(default_factory=dict)

    def add(self, name: str, position: int, row: NDArray[Any], token: int) -> None:
        self.tokens.setdefault(name, []).append(token)
        self.rows.setdefault(name, []).append(np.array(row))


@dataclass(frozen=True)
class Asked:
    """The requests, and what they are computed with."""

    model: Model
    jobs: Sequence[Job]
    seed: int
    drafter: Drafter | None
    arguments: argparse.Namespace


@dataclass(frozen=True)
class Ran:
    """What one way of computing the requests came to. A request that was refused has no output."""

    outputs: dict[str, RequestOutput]
    refused: dict[str, str]  # why, by request id
    record: Record
    seconds: float
    metrics: RunMetrics | None = None  # the engine's


def run(arguments: argparse.Namespace) -> None:
    """Generates, shows, and raises for a difference, a sample that failed or a request that was refused."""
    is_alone = arguments.sequential and not arguments.prove
    refuse_unused(arguments, *[ALONE] * is_alone)
    if arguments.trace_detail and arguments.trace is None:
        raise RequestError("--trace-detail goes with --trace FILE")
    model = load_model(arguments)
    jobs = read_jobs(model, arguments)
    asked = Asked(model, jobs, seed_of(arguments), make_drafter(model, arguments), arguments)
    is_one = arguments.requests is None and len(jobs) == 1
    display = make_display(model, jobs, is_one) if not arguments.json else None
    if is_alone:
        ran = truth = run_sequential(asked, display)
    else:
        ran, truth = run_batched(asked, display), None
    jobs = [job for job in jobs if job.request_id not in ran.refused]
    if not jobs:
        raise RequestError(next(iter(ran.refused.values())))
    asked, difference = replace(asked, jobs=jobs), None
    if arguments.prove:
        truth = run_sequential(asked, None, "sequential")
        difference = compare(ran.record, truth.record) or compare_outputs(jobs, ran.outputs, truth.outputs)
    summary = summarise(asked, ran, truth, difference)
    if arguments.json:
        print(json.dumps(as_json(model, jobs, ran.outputs, summary)))
    else:
        if is_one:
            print_calls(jobs[0], ran.outputs[jobs[0].request_id].outputs[0], model.tokenizer_or_none)
        else:
            print_outputs(jobs, ran.outputs, model.tokenizer_or_none)
        if ran.metrics and (not is_one or arguments.prove or asked.drafter):
            print_summary(summary, model.numerics.name)
    if difference:
        raise ProofError(difference)
    raise_failures(jobs, ran, is_one)


def make_display(model: Model, jobs: Sequence[Job], is_one: bool) -> Display | None:
    """One prompt's text is shown as it comes; several requests only on a terminal, before their table."""
    if is_one:
        return OneSample(model.tokenizer_or_none)
    return Screen(jobs) if sys.stdout.isatty() else None


def raise_failures(jobs: Sequence[Job], ran: Ran, is_one: bool) -> None:
    """Raises for failed samples, else for refused requests: the first error, whose text names all."""
    failed = {
        sample_name(job.request_id, sample.index): error_told(sample.error)
        for job in jobs
        for sample in ran.outputs[job.request_id].outputs
        if sample.error
    }
    if failed:
        first = next(iter(failed.values()))
        failures = "; ".join(f"request {name}: {error}" for name, error in failed.items())
        raise first if is_one else type(first)(f"{len(failed)} of the samples failed: {failures}")
    if ran.refused:
        raise RequestError(f"{len(ran.refused)} of the requests refused: {'; '.join(ran.refused.values())}")


def run_batched(asked: Asked, display: Display | None) -> Ran:
    """All requests through the engine, each added at its arrival step. One that is refused does not stop the others."""
    model, jobs, arguments, record = asked.model, asked.jobs, asked.arguments, Record()
    outputs: dict[str, RequestOutput] = {}
    refused: dict[str, str] = {}
    budget = max(1, arguments.max_num_batched_tokens or 2048)
    steps = -(-sum(len(job.ids) for job in jobs) // budget)
    trace = None if arguments.trace is None else io.StringIO()
    with Watch(display, steps, most_tokens(model, jobs)) as watch:
        detailed = DetailedTrace(model) if trace is not None and arguments.trace_detail else None
        engine = Engine(
            model if detailed is None else detailed.model,
            room_for=[positions(model, job) for job in jobs if fits(model, job) for _ in range(job.params.n)],
            seed=asked.seed,
            trace=trace,
            on_logits=record.add if arguments.prove else None,
            progress=watch.layer,
            drafter=asked.drafter,
            **engine_options(arguments),
        )
        waiting = sorted(jobs, key=lambda job: job.arrival_step)
        step = 0
        while waiting or engine.has_unfinished:
            while waiting and waiting[0].arrival_step <= step:
                job = waiting.pop(0)
                try:
                    engine.add_request(job.request_id, job.ids, job.params, job.priority, job.cache_salt)
                except RequestError as error:
                    refused[job.request_id] = f"{job.where}{error}"
            for output in engine.step() if detailed is None else detailed.step(engine):
                outputs[output.request_id] = output
            watch.tokens(engine.metrics.sampled_tokens, outputs)
            step += 1
    if engine.trace and trace is not None:
        engine.trace.end()
        write_whole(arguments.trace, trace.getvalue())
    return Ran(outputs, refused, record, engine.metrics.seconds, engine.metrics)


def run_sequential(asked: Asked, display: Display | None, name: str = "generating") -> Ran:
    model, record = asked.model, Record()
    outputs: dict[str, RequestOutput] = {}
    refused: dict[str, str] = {}
    began, count = time.perf_counter(), 0
    with Watch(display, 1, most_tokens(model, asked.jobs), name) as watch:
        for job in asked.jobs:
            try:
                request = job.request_id, job.ids, job.params
                for output in answer_alone(model, *request, asked.seed, asked.drafter, record.add, watch.layer):
                    outputs[job.request_id] = output
                    count += 1
                    watch.tokens(count, outputs)
            except RequestError as error:
                refused[job.request_id] = f"{job.where}{error}"
    return Ran(outputs, refused, record, time.perf_counter() - began)


def fits(model: Model, job: Job) -> bool:
    """Whether the longest context has room after the prompt; the engine refuses it otherwise."""
    return len(job.ids) < model.config.max_position_embeddings


def positions(model: Model, job: Job) -> int:
    """That a sample of the request may come to, its last token included."""
    longest = model.config.max_position_embeddings
    return longest if job.params.max_tokens is None else min(longest, len(job.ids) + job.params.max_tokens)


def most_tokens(model: Model, jobs: Sequence[Job]) -> int:
    return sum(job.params.n * (positions(model, job) - len(job.ids)) for job in jobs if fits(model, job))


def compare(batched: Record, truth: Record) -> str | None:
    """The first difference in the order of the requests, or None."""
    for name, tokens in truth.tokens.items():
        mine = batched.tokens.get(name, [])
        for position, (token, expected) in enumerate(zip(mine, tokens, strict=False)):
            rows = batched.rows[name][position], truth.rows[name][position]
            if difference := difference_at(position, token, rows[0], expected, rows[1]):
                return f"request {name}: {difference}"
        if len(mine) != len(tokens):
            return f"request {name}: {len(mine)} tokens, alone it has {len(tokens)}"
    return None


def compare_outputs(
    jobs: Sequence[Job], outputs: Mapping[str, RequestOutput], truth: Mapping[str, RequestOutput]
) -> str | None:
    """The first difference in text, logprobs or ending, or None. Error texts may differ."""
    for job in jobs:
        mine, expected = outputs[job.request_id], truth[job.request_id]
        if mine.prompt_logprobs != expected.prompt_logprobs:
            return f"request {job.request_id}: prompt_logprobs: others than alone"
        for sample, other in zip(mine.outputs, expected.outputs, strict=True):
            for name in ("logprobs", "text", "finish_reason", "stop_reason"):
                if getattr(sample, name) != getattr(other, name):
                    values = f"{name}: {getattr(sample, name)!r}, alone it is {getattr(other, name)!r}"
                    return f"request {sample_name(job.request_id, sample.index)}: {values}"
    return None


def sequential_numerics(model: Model, jobs: Sequence[Job]) -> str:
    """The arithmetic of reference.py: of `exact` integers, unless a request is too large for them."""
    sizes = [(len(job.ids), positions(model, job) - len(job.ids)) for job in jobs]
    return ", ".join(sorted({model.truth_of(tokens_of_passes(*size)).numerics.name for size in sizes}))


def summarise(asked: Asked, ran: Ran, truth: Ran | None, difference: str | None) -> dict[str, Any]:
    """Figures of the run; those of the engine are None where it did not run."""
    jobs, arguments = asked.jobs, asked.arguments
    lengths = [(len(job.ids), len(sample.token_ids)) for job in jobs for sample in ran.outputs[job.request_id].outputs]
    generated, metrics = sum(output for _, output in lengths), ran.metrics
    seconds = None if metrics is None else metrics.seconds
    return {
        "requests": len(jobs),
        "refused": ran.refused,
        "generated_tokens": generated,
        "steps": metrics and metrics.steps,
        "steps_one_by_one": generated,
        "tokens_per_step": metrics and round(metrics.tokens_per_step, 2),
        "preemptions": metrics and metrics.preemptions,
        "prefix_hit_tokens": metrics and metrics.prefix_hit_tokens,
        "recomputed_tokens": metrics and metrics.recomputed_tokens,
        "padding_avoided": metrics and metrics.padding_avoided,
        "static_batch_padding": static_padding(lengths, arguments.max_num_seqs or 64),
        "seconds": None if seconds is None else round(seconds, 3),
        "speculative": metrics and speculative_figures(arguments.speculative, metrics),
        "sequential_numerics": None if truth is None else sequential_numerics(asked.model, jobs),
        "sequential_seconds": None if truth is None else round(truth.seconds, 3),
        "speed_up": round(truth.seconds / seconds, 2) if truth and seconds else None,
        "proved": difference is None if arguments.prove else None,
    }


def speculative_figures(drafter: str | None, metrics: RunMetrics) -> dict[str, Any] | None:
    if drafter not in ("ngram", "draft"):
        return None
    return {
        "drafter": drafter,
        "proposed": metrics.draft_tokens,
        "accepted": metrics.accepted_tokens,
        "proposed_at": metrics.drafted_at,
        "accepted_at": metrics.accepted_at,
        "mean_accepted_length": round(metrics.mean_accepted_length, 3),
        "steps_saved": metrics.steps_saved,
        "failures": metrics.draft_failures,
        "seconds": round(metrics.draft_seconds, 3),
    }


def add_generate(commands: Commands) -> None:
    text = "continue prompts, batched continuously"
    example = 'lfm2np generate --chat "sort: 7 2 9 4" --chat "add: 34 + 58" --prove'
    parser = add_command(commands, "generate", run, text, example, tokenizer=True)
    add_prompt_options(parser, many=True)
    add(parser, "--max-tokens N", "most tokens to generate (64)", default=64)
    add(parser, "--logprobs K", "print each token on a line, with the K most likely ones")
    group = add_engine_options(parser)
    add(group, "--temperature T", "0 is greedy (0)")
    add(group, "--trace-detail", "add what each step computed to --trace, for `lfm2np draw`")
    add(group, "--sequential", "run each request alone through reference.py instead")
    add(group, "--prove", "run both ways and compare logits bit for bit (exit code 1)")
    add_arithmetic_options(parser)
    add_modes(parser, {ALONE: OF_ENGINE})
