"""`lfm2np compare BASE QUANTISED ...`: what quantising costs, both sides exact."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.files import checkpoint_sha256
from lfm2np.checkpoint.loaded import WEIGHTS
from lfm2np.cli.shared import work
from lfm2np.cli.shared.parser import Commands, add_command
from lfm2np.cli.shared.requests import prompt_and_completion, read_named_lines
from lfm2np.cli.shared.terminal import progress_bar, progress_bars, read_file, terminal_text
from lfm2np.errors import NumericsError, RequestError
from lfm2np.loading import Model, load
from lfm2np.oracle.compare.compare import COMPARING, GENERATING, Compared, Quantised, compare, quantised_of
from lfm2np.oracle.compare.compare_page import as_html
from lfm2np.oracle.compare.pair import BY, files_of, longest, require_same_tokens
from lfm2np.oracle.compare.sequences import MOST_WINDOW, Scored, check_texts, of_request, of_text
from lfm2np.oracle.compare.shown import as_json, as_text
from lfm2np.oracle.reports.parts import plural
from lfm2np.values import require_count
from lfm2np.whole_file import write_whole
from lfm2np.work.place import Place, Source

EXAMPLE = """lfm2np compare LFM2-350M LFM2-350M-Q4_0.gguf --requests requests.jsonl --text book.txt
  lfm2np compare LFM2-350M LFM2-350M-Q8_0.gguf LFM2-350M-Q4_0.gguf --requests requests.jsonl --max-tokens 64
  lfm2np compare LFM2-350M LFM2-350M-Q4_0.gguf --by tensor --workers 2 --results compared.jsonl --html report.html"""
REQUESTS_HELP = "one JSON object a line: prompt or prompt_token_ids, completion or completion_token_ids, request_id"


def run_compare(arguments: argparse.Namespace) -> None:
    """Prints the figures. NumericsError, after the others are shown, if a sequence can't be computed."""
    max_tokens = require_count("--max-tokens", arguments.max_tokens, 0, None)
    if max_tokens and arguments.requests is None:
        raise RequestError("--max-tokens goes with --requests")
    if arguments.window is not None and arguments.text is None:
        raise RequestError("--window goes with --text")
    require_folder(arguments.html)
    base = files_of(arguments.base)
    with progress_bars() as shown:
        quantised = [
            quantised_of(base, path, lambda files: checkpoint_sha256(files.path), shown) for path in arguments.quantised
        ]
    with progress_bar("loading") as show:
        model = load(arguments.base, "exact", show, arguments.weights)
    for one in quantised:
        require_same_tokens(model, one.files)
    scored = what_is_scored(model, quantised, arguments)
    with work.place_of(arguments, model) as place, progress_bars(GENERATING, COMPARING) as shown:
        others = sides(model, quantised, arguments.weights, place)
        compared = compare(model, quantised, others, scored, arguments.by, max_tokens, place, shown)
    tell(compared, arguments)
    if compared.failed:
        count = plural(len(compared.failed), "sequence")
        raise NumericsError(f"{count} can't be computed, first {compared.failed[0]}")


def require_folder(page: str | None) -> None:
    """RequestError for a page whose folder is not there: before a long run, not after it."""
    if page is not None and not Path(page).parent.is_dir():
        raise RequestError(f"{Path(page).parent}: no such directory, expected one for --html {page}")


def tell(compared: Compared, arguments: argparse.Namespace) -> None:
    """Prints first: a page that can't be written costs no figure."""
    command = shlex.join(["lfm2np", *sys.argv[1:]])
    print(json.dumps(as_json(compared, command)) if arguments.json else terminal_text(as_text(compared)), flush=True)
    if arguments.html is not None:
        write_whole(Path(arguments.html), as_html(compared, command))


def sides(model: Model, quantised: list[Quantised], weights: str, place: Place) -> Mapping[str, Any]:
    """The quantised models by their SHA-256, loaded here; or where workers find them, if these compute."""
    found: dict[str, Any] = {}
    for one in quantised:
        path = one.files.path.absolute()
        if place.executor is not None:
            found[one.sha256] = Source(str(path), "exact", one.sha256, weights)
            continue
        with progress_bar(f"loading {path.name}") as show:
            found[one.sha256] = load(path, "exact", show, weights)
    return found


def what_is_scored(model: Model, quantised: list[Quantised], arguments: argparse.Namespace) -> list[Scored]:
    """RequestError names what can't be scored, before anything is computed."""
    most = longest(model.config, [one.files.config for one in quantised])
    scored: list[Scored] = []
    if arguments.requests is not None:

        def made(raw: Mapping[str, Any], name: str) -> Scored:
            prompt, completion = prompt_and_completion(model, raw)
            return of_request(raw.get("request_id", name), prompt, completion, most)

        scored += read_named_lines(read_file(arguments.requests), arguments.requests, made, lambda one: one.name)
    if arguments.text is not None:
        text = read_file(arguments.text)
        window = arguments.window
        scored += of_text(model.tokenizer, model.config.vocab_size, text, arguments.text, window, most)
    return scored or check_texts(model.tokenizer, most)


def add_compare(commands: Commands) -> None:
    parser = add_command(
        commands,
        "compare",
        run_compare,
        "what quantising costs: KL divergence, flips and perplexity of quantised checkpoints, both sides exact",
        EXAMPLE,
        model=False,
    )
    parser.add_argument("base", metavar="BASE", help="checkpoint directory, or a GGUF file: what is right")
    parser.add_argument(
        "quantised", metavar="QUANTISED", nargs="+", help="the same network in other numbers; a row each"
    )
    parser.add_argument("--requests", metavar="FILE", help=REQUESTS_HELP)
    parser.add_argument("--text", metavar="FILE", help="a text whose perplexity is told, - for standard input")
    window_help = f"tokens of a window of the text (the context, {MOST_WINDOW} at most)"
    parser.add_argument("--window", metavar="N", type=int, help=window_help)
    greedy_help = "also let both answer each request greedily, and tell where they part, within N tokens (0)"
    parser.add_argument("--max-tokens", metavar="N", type=int, default=0, help=greedy_help)
    by_help = "also quantise each layer alone, or each tensor, to tell what it costs (layer)"
    parser.add_argument("--by", choices=BY, default="layer", help=by_help)
    streamed = "in memory, or as stored and widened for each product, piece by piece: slow and small (resident)"
    parser.add_argument("--weights", choices=WEIGHTS, default="resident", help=streamed)
    work.add_options(parser)
    parser.add_argument("--html", metavar="FILE", help="write a report that any browser opens")
