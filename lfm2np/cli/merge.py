"""`lfm2np merge`: files of results put together, and some of them computed again."""

from __future__ import annotations

import argparse
import json

from lfm2np.cli.shared.parser import Commands, add, add_command
from lfm2np.cli.shared.terminal import progress_bar
from lfm2np.cli.shared.work import WORKS
from lfm2np.errors import RequestError
from lfm2np.loading import load
from lfm2np.whole_file import write_whole
from lfm2np.work.results_file import line_of, merged, spot_check

MERGE_EXAMPLE = """lfm2np score --requests part-1.jsonl --results results-1.jsonl    # on one machine
  lfm2np score --requests part-2.jsonl --results results-2.jsonl    # on another
  lfm2np merge results-1.jsonl results-2.jsonl -o results.jsonl --spot-check 5
  lfm2np score --requests all.jsonl --results results.jsonl         # nothing is computed any more"""


def run_merge(arguments: argparse.Namespace) -> None:
    """ProofError (1) for results that differ: between files, from their own SHA-256, or from what is computed here."""
    with progress_bar("loading") as show:
        model = load(arguments.model, "exact", show)
    entries = merged(arguments.files, model)
    if not entries:
        raise RequestError(f"{', '.join(arguments.files)}: no results, expected at least one")
    checked = spot_check(model, list(entries.values()), WORKS, arguments.spot_check, arguments.seed)
    write_whole(arguments.output, "".join(line_of(entry, model.sha256) for entry in entries.values()))
    if arguments.json:
        print(json.dumps({"output": arguments.output, "items": len(entries), "checked": list(map(str, checked))}))
        return
    for entry in checked:
        print(f"computed again, bit for bit: {entry}")
    print(f"{len(entries)} items from {len(arguments.files)} files; {len(checked)} computed again")


def add_merge(commands: Commands) -> None:
    text = "merge --results files of score, check or vectors, and recompute some of their items"
    parser = add_command(commands, "merge", run_merge, text, MERGE_EXAMPLE)
    parser.add_argument("files", metavar="FILE", nargs="+", help="--results files of one checkpoint")
    add(parser, "-o --output FILE", "file to write or replace", required=True)
    add(parser, "--spot-check K", "recompute K items, and fail if a bit differs (0)", default=0)
    add(parser, "--seed N", "seed that chooses those items (0)", default=0)
