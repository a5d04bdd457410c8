"""`lfm2np compare BASE QUANTISED ...`: what quantising costs, both sides exact."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from lfm2np.commands.cli.shared import work
from lfm2np.commands.cli.shared.parser import Commands, add, add_command
from lfm2np.commands.cli.shared.prompts import add_weights_option
from lfm2np.commands.cli.shared.requests import SCORED_HELP, prompt_and_completion, read_named_lines
from lfm2np.commands.cli.shared.terminal import add_report, progress_bar, read_file, show_report
from lfm2np.engine.loading import Model, load
from lfm2np.engine.work.place import Place, Source
from lfm2np.errors import NumericsError, RequestError
from lfm2np.oracle.compare.compare import compare, report_of
from lfm2np.oracle.compare.pair import Files, files_of, longest, require_same_network, require_same_tokens
from lfm2np.oracle.compare.positions import Others
from lfm2np.oracle.compare.sequences import MOST_WINDOW, Scored, of_request, of_text
from lfm2np.oracle.report.report import plural

EXAMPLE = """lfm2np compare LFM2-350M LFM2-350M-Q4_0.gguf --requests requests.jsonl --text book.txt
  lfm2np compare LFM2-350M LFM2-350M-Q8_0.gguf LFM2-350M-Q4_0.gguf --requests requests.jsonl
  lfm2np compare LFM2-350M LFM2-350M-Q4_0.gguf --workers 2 --save compared.jsonl --report report.html"""


def run_compare(arguments: argparse.Namespace) -> None:
    """Prints the figures. NumericsError, after the others are shown, if a sequence can't be computed."""
    if arguments.window is not None and arguments.text is None:
        raise RequestError("--window goes with --text")
    base, quantised = files_of(arguments.base), [files_of(path) for path in arguments.quantised]
    for checkpoint in quantised:
        require_same_network(base, checkpoint)
    with progress_bar("loading") as show:
        model = load(arguments.base, "exact", show, arguments.weights)
    for checkpoint in quantised:
        require_same_tokens(model, checkpoint)
    scored = what_is_scored(model, quantised, arguments)
    with work.place_of(arguments, model) as place, progress_bar("comparing", " tokens") as show:
        compared = compare(model, quantised, sides(quantised, arguments.weights, place), scored, place, show)
    show_report(arguments, report_of(compared))
    if compared.failed:
        count = plural(len(compared.failed), "sequence")
        raise NumericsError(f"{count} can't be computed, first {compared.failed[0]}")


def sides(quantised: list[Files], weights: str, place: Place) -> Others:
    """The quantised models by their SHA-256: loaded here, or where workers load them from, if there are workers."""
    models: dict[str, Any] = {}
    for checkpoint in quantised:
        path, sha256 = checkpoint.path.absolute(), checkpoint.sha256
        if place.executor is not None:
            models[sha256] = Source(str(path), "exact", sha256, weights)
            continue
        with progress_bar(f"loading {path.name}") as show:
            models[sha256] = load(path, "exact", show, weights)
    return models


def what_is_scored(model: Model, quantised: list[Files], arguments: argparse.Namespace) -> list[Scored]:
    """RequestError names what can't be scored, before anything is computed."""
    if arguments.requests is None and arguments.text is None:
        raise RequestError("nothing to score: expected --requests or --text")
    most = longest(model.config, quantised)
    scored: list[Scored] = []
    if arguments.requests is not None:

        def sequence_of(raw: Mapping[str, Any], name: str) -> Scored:
            prompt, completion = prompt_and_completion(model, raw)
            return of_request(raw.get("request_id", name), prompt, completion, most)

        scored += read_named_lines(
            read_file(arguments.requests), arguments.requests, sequence_of, lambda sequence: sequence.name
        )
    if arguments.text is not None:
        text = read_file(arguments.text)
        window = arguments.window
        scored += of_text(model.tokenizer, model.config.vocab_size, text, arguments.text, window, most)
    return scored


def add_compare(commands: Commands) -> None:
    text = "measure what quantising costs: KL divergence, token mismatches and perplexity, both sides exact"
    parser = add_command(commands, "compare", run_compare, text, EXAMPLE, model=False)
    add(parser, "BASE", "checkpoint directory, or a GGUF file: the reference")
    add(parser, "QUANTISED", "quantised checkpoints of the same network", nargs="+")
    add(parser, "--requests FILE", SCORED_HELP)
    add(parser, "--text FILE", "text to measure perplexity on, - for standard input")
    add(parser, "--window N", f"tokens in a window of the text (the context, at most {MOST_WINDOW})")
    add_weights_option(parser)
    work.add_options(parser)
    add_report(parser)
