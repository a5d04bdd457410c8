"""`lfm2np score`: one sequence token by token, or the sequences of a file."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.cli.shared import work
from lfm2np.cli.shared.parser import Commands, add_command
from lfm2np.cli.shared.prompts import (
    add_arithmetic_options,
    add_prompt_options,
    completion_ids,
    load_model,
    print_json,
    prompt_ids,
    text_argument,
)
from lfm2np.cli.shared.requests import SCORED_HELP, prompt_and_completion, read_named_lines
from lfm2np.cli.shared.terminal import entry, progress_bar, read_file, terminal_text
from lfm2np.errors import NumericsError, RequestError
from lfm2np.loading import Model
from lfm2np.scoring import teacher_forcing
from lfm2np.scoring.teacher_forcing import TokenScore, score_many

EXAMPLE = """lfm2np score --chat 'add: 34 + 58' --completion 92
  lfm2np score --requests requests.jsonl --workers 2 --results results.jsonl --json"""


@dataclass(frozen=True)
class Scored:
    """One line of the file: all ids go through the network, those from `first` on are shown."""

    request_id: str
    ids: list[int]
    first: int


def run_one(model: Model, prompt: list[int], completion: list[int], only: bool, as_json: bool) -> None:
    """Prompt and completion, by reference.py; `only` the completion's tokens are shown."""
    began = time.perf_counter()
    with progress_bar("scoring") as show:
        scores = teacher_forcing.score(model.weights, model.config, model.numerics, prompt + completion, show)
    seconds = time.perf_counter() - began
    rate = {"tokens": len(scores), "seconds": round(seconds, 3), "tokens_per_second": round(len(scores) / seconds, 1)}
    scores = [s for s in scores if s.position >= len(prompt)] if only else scores
    if as_json:
        print_json(model, {"token_ids": prompt + completion, **scores_as_json(scores), "summary": rate})
        return
    tokenizer = model.tokenizer_or_none
    print(f"{'position':>8}{'id':>8}  {'token':<20}{'log-prob':>12}{'rank':>7}{'margin':>10}  greedy")
    for s in scores:
        greedy = "" if s.rank == 1 else entry(tokenizer, s.greedy_token_id)
        token = f"{s.position:>8}{s.token_id:>8}  {entry(tokenizer, s.token_id):<20}"
        print(terminal_text(f"{token}{s.logprob:>12.6f}{s.rank:>7}{s.margin:>10.4f}  {greedy}".rstrip()))
    print(f"total log-probability {total_of(scores):.6f} over {len(scores)} tokens")


def run_many(model: Model, arguments: argparse.Namespace) -> None:
    """All sequences of a file, in ragged passes. NumericsError, after the others are shown, for any that overflow."""
    sequences = read_sequences(model, read_file(arguments.requests), arguments.requests)
    with work.place_of(arguments, model) as place, progress_bar("scoring", " tokens") as show:
        found = score_many(model, [sequence.ids for sequence in sequences], place, show)
    summary = {"requests": len(sequences), **work.throughput(place)}
    outputs = [output_of(sequence, scores) for sequence, scores in zip(sequences, found, strict=True)]
    if arguments.json:
        print_json(model, {"outputs": outputs, "summary": summary})
    else:
        print(f"{'request':<24}{'tokens':>8}{'total log-prob':>18}")
        for output in outputs:
            shown = output.get("error") or f"{len(output['scores']):>8}{output['total_logprob']:>18.6f}"
            print(terminal_text(f"{output['request_id']:<24}{shown}"))
        rate = summary["tokens_per_second"]
        speed = "all known before" if rate is None else f"{summary['tokens']} computed, {rate} a second"
        print(f"{len(outputs)} requests, {sum(len(sequence.ids) - 1 for sequence in sequences)} tokens: {speed}")
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


def run_score(arguments: argparse.Namespace) -> None:
    has_completion = arguments.completion is not None or arguments.completion_ids is not None
    if arguments.requests is None and (arguments.workers or arguments.results is not None):
        raise RequestError("--workers and --results go with --requests")
    if arguments.requests is not None and (has_completion or arguments.system is not None):
        raise RequestError("--requests has prompts and completions in its lines")
    model = load_model(arguments)
    if arguments.requests is not None:
        run_many(model, arguments)
        return
    prompt, completion = prompt_ids(model, arguments), completion_ids(model, arguments)
    run_one(model, prompt, completion, has_completion, arguments.json)


def add_score(commands: Commands) -> None:
    parser = add_command(
        commands, "score", run_score, "log-probability, rank and margin of given tokens", EXAMPLE, tokenizer=True
    )
    add_prompt_options(parser).add_argument("--requests", metavar="FILE", help=SCORED_HELP)
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--completion", metavar="TEXT", type=text_argument, help="text after the prompt; only its tokens are shown"
    )
    group.add_argument("--completion-ids", metavar="IDS", help="the same as token ids")
    work.add_options(parser)
    add_arithmetic_options(parser)
