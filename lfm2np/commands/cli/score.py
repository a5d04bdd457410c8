"""`lfm2np score`: one sequence token by token, or those of a file; with --merge, files of results put together."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.commands.cli.shared import work
from lfm2np.commands.cli.shared.parser import Commands, add, add_command, add_modes, refuse_unused, to_extend
from lfm2np.commands.cli.shared.prompts import (
    add_arithmetic_options,
    add_prompt_options,
    completion_ids,
    load_model,
    named,
    prompt_ids,
    text_argument,
)
from lfm2np.commands.cli.shared.requests import SCORED_HELP, prompt_and_completion, read_named_lines
from lfm2np.commands.cli.shared.terminal import entry, print_result, progress_bar, read_file
from lfm2np.commands.cli.shared.work import WORKS
from lfm2np.engine import teacher_forcing
from lfm2np.engine.loading import Model
from lfm2np.engine.teacher_forcing import TokenScore, score_many
from lfm2np.engine.work.results_file import merged, spot_check
from lfm2np.errors import NumericsError, RequestError
from lfm2np.system import write_whole

EXAMPLE = """lfm2np score --chat 'add: 34 + 58' --completion 92
  lfm2np score --requests requests.jsonl --workers 2 --save results.jsonl --json
  lfm2np score --requests requests.jsonl --workers tcp://scheduler:8786 --save results.jsonl
  lfm2np score --merge results-1.jsonl results-2.jsonl -o results.jsonl --spot-check 5"""

WITH_MERGE = "goes with --merge"
MERGING = "is not used by --merge"


@dataclass(frozen=True)
class Scored:
    """One line of the file: all ids go through the network, those from `first` on are shown."""

    request_id: str
    ids: list[int]
    first: int


def score_sequence(
    model: Model, prompt: list[int], completion: list[int], only: bool, arguments: argparse.Namespace
) -> None:
    """Prompt and completion, by reference.py; `only` the completion's tokens are shown."""
    began = time.perf_counter()
    with progress_bar("scoring") as show:
        scores = teacher_forcing.score(model.weights, model.config, model.numerics, prompt + completion, show)
    seconds = time.perf_counter() - began
    rate = {"tokens": len(scores), "seconds": round(seconds, 3), "tokens_per_second": round(len(scores) / seconds, 1)}
    scores = [s for s in scores if s.position >= len(prompt)] if only else scores
    tokenizer = model.tokenizer_or_none
    lines = [f"{'position':>8}{'id':>8}  {'token':<20}{'log-prob':>12}{'rank':>7}{'margin':>10}  greedy"]
    for s in scores:
        greedy = "" if s.rank == 1 else entry(tokenizer, s.greedy_token_id)
        token = f"{s.position:>8}{s.token_id:>8}  {entry(tokenizer, s.token_id):<20}"
        lines.append(f"{token}{s.logprob:>12.6f}{s.rank:>7}{s.margin:>10.4f}  {greedy}".rstrip())
    lines.append(f"total log-probability {total_of(scores):.6f} over {len(scores)} tokens")
    fields = {"token_ids": prompt + completion, **scores_as_json(scores), "summary": rate}
    print_result(arguments, {**named(model), **fields}, "\n".join(lines))


def score_file(model: Model, arguments: argparse.Namespace) -> None:
    """All sequences of a file, in ragged passes. NumericsError, after the others are shown, for any that overflow."""
    sequences = read_sequences(model, read_file(arguments.requests), arguments.requests)
    with work.place_of(arguments, model) as place, progress_bar("scoring", " tokens") as show:
        scored = score_many(model, [sequence.ids for sequence in sequences], place, show)
    summary = {"requests": len(sequences), **work.throughput(place)}
    outputs = [output_of(sequence, scores) for sequence, scores in zip(sequences, scored, strict=True)]
    lines = [f"{'request':<24}{'tokens':>8}{'total log-prob':>18}"]
    for output in outputs:
        shown = output.get("error") or f"{len(output['scores']):>8}{output['total_logprob']:>18.6f}"
        lines.append(f"{output['request_id']:<24}{shown}")
    rate = summary["tokens_per_second"]
    speed = "all known before" if rate is None else f"{summary['tokens']} computed, {rate} a second"
    lines.append(f"{len(outputs)} requests, {sum(len(sequence.ids) - 1 for sequence in sequences)} tokens: {speed}")
    print_result(arguments, {**named(model), "outputs": outputs, "summary": summary}, "\n".join(lines))
    failed = [f"{output['request_id']}: {output['error']}" for output in outputs if "error" in output]
    if failed:
        raise NumericsError(f"{len(failed)} of {len(outputs)} requests can't be computed, first {failed[0]}")


def output_of(sequence: Scored, scores: list[TokenScore] | NumericsError) -> dict[str, Any]:
    fields = {"request_id": sequence.request_id, "token_ids": sequence.ids}
    if isinstance(scores, NumericsError):
        return {**fields, "error": str(scores)}
    return {**fields, **scores_as_json([s for s in scores if s.position >= sequence.first])}


def scores_as_json(scores: Sequence[TokenScore]) -> dict[str, Any]:
    return {"scores": [dataclasses.asdict(s) for s in scores], "total_logprob": total_of(scores)}


def total_of(scores: Sequence[TokenScore]) -> float:
    return math.fsum(s.logprob for s in scores)


def read_sequences(model: Model, text: str, source: str) -> list[Scored]:
    """One sequence a line. RequestError names a bad line, before anything is computed."""

    def sequence_of(raw: Mapping[str, Any], request_id: str) -> Scored:
        prompt, completion = prompt_and_completion(model, raw)
        ids = teacher_forcing.scorable(prompt + completion, model.config)
        return Scored(raw.get("request_id", request_id), ids, len(prompt) if completion else 1)

    return read_named_lines(text, source, sequence_of, lambda sequence: sequence.request_id)


def merge(arguments: argparse.Namespace) -> None:
    """ProofError (1) for results that differ: between files, from their own SHA-256, or from what is computed here."""
    if arguments.output is None:
        raise RequestError("--merge: expected with -o FILE")
    model = load_model(arguments)
    entries = merged(arguments.merge, model)
    if not entries:
        raise RequestError(f"{', '.join(arguments.merge)}: no results, expected at least one")
    with work.place_of(arguments, model) as place:
        checked = spot_check(model, list(entries.values()), WORKS, arguments.spot_check, arguments.seed, place)
    write_whole(arguments.output, "".join(json.dumps(entry.line) + "\n" for entry in entries.values()))
    fields = {"output": arguments.output, "items": len(entries), "checked": list(map(str, checked))}
    lines = [f"computed again, bit for bit: {item}" for item in checked]
    lines.append(f"{len(entries)} items from {len(arguments.merge)} files; {len(checked)} computed again")
    print_result(arguments, fields, "\n".join(lines))


def run_score(arguments: argparse.Namespace) -> None:
    if arguments.merge:
        refuse_unused(arguments, MERGING)
        merge(arguments)
        return
    refuse_unused(arguments, WITH_MERGE)
    has_completion = arguments.completion is not None or arguments.completion_ids is not None
    if arguments.requests is None and (arguments.workers or arguments.save is not None):
        raise RequestError("--workers and --save go with --requests")
    if arguments.requests is not None and (has_completion or arguments.system is not None):
        raise RequestError("--requests has prompts and completions in its lines")
    model = load_model(arguments)
    if arguments.requests is not None:
        score_file(model, arguments)
        return
    prompt, completion = prompt_ids(model, arguments), completion_ids(model, arguments)
    score_sequence(model, prompt, completion, has_completion, arguments)


def add_score(commands: Commands) -> None:
    text = "log-probability, rank and margin of given tokens"
    parser = add_command(commands, "score", run_score, text, EXAMPLE, tokenizer=True)
    source = add_prompt_options(parser)
    add(source, "--requests FILE", SCORED_HELP)
    add(source, "--merge FILE", "put together --save files of score, check or vectors of one checkpoint", nargs="+")
    group = parser.add_mutually_exclusive_group()
    add(group, "--completion TEXT", "text after the prompt; only its tokens are shown", type=text_argument)
    add(group, "--completion-ids IDS", "the same as token ids")
    add(parser, "-o --output FILE", "with --merge: file to write or replace", type=to_extend)
    add(parser, "--spot-check K", "with --merge: recompute K items, and fail if a bit differs (0)", default=0)
    add(parser, "--seed N", "with --merge: seed that chooses those items (0)", default=0)
    work.add_options(parser)
    add_arithmetic_options(parser)
    add_modes(
        parser,
        {WITH_MERGE: ("output", "spot_check", "seed"), MERGING: ("save", "system", "completion", "completion_ids")},
    )
