"""`lfm2np vectors make | verify`: golden vectors for engines' own tests; vectors_plain.py judges their answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from lfm2np.commands.cli.shared import work
from lfm2np.commands.cli.shared.parser import TOKENIZER_HELP, Commands, Help, add, add_command, add_model, to_write
from lfm2np.commands.cli.shared.prompts import load_model
from lfm2np.commands.cli.shared.terminal import print_result, progress_bars, show_report
from lfm2np.oracle.report.report import Report
from lfm2np.oracle.vectors.golden import BOUNDED, counted, make, report_of, summary, verify
from lfm2np.oracle.vectors.set_files import PACKAGED, document_text, packaged_set, read_set
from lfm2np.system import write_whole

EXAMPLE = """lfm2np vectors make --model LFM2-350M -o vectors-350M.json
  lfm2np vectors verify && lfm2np vectors verify lfm3
  lfm2np vectors verify vectors-350M.json --model LFM2-350M"""


def run(arguments: argparse.Namespace) -> None:
    """Prints what was made or found. ProofError (1) for a difference."""
    if arguments.what == "make":
        run_make(arguments)
    else:
        show_report(arguments, report_on_set(arguments))


def run_make(arguments: argparse.Namespace) -> None:
    model = load_model(arguments)
    with work.place_of(arguments, model) as place, progress_bars("scoring", *BOUNDED) as shown:
        document = make(model, arguments.seed, progress=shown, executor=place, is_small=arguments.small)
    text = document_text(document)
    write_whole(arguments.output, text)
    fields = {"file": arguments.output, "bytes": len(text.encode()), **counted(document)}
    print_result(arguments, fields, f"{summary(document)}, {fields['bytes']} bytes")


def report_on_set(arguments: argparse.Namespace) -> Report:
    """Of a file, or a packaged set, whose fixture is the default model."""
    name = arguments.file or PACKAGED[0]
    path = Path(name)
    if name in PACKAGED and not path.is_file():
        path = packaged_set(name)
        if vars(arguments).get("model") is None:
            arguments.model = str(path.parents[2] / name)
    document = read_set(path)
    model = load_model(arguments)
    with work.place_of(arguments, model) as place, progress_bars("verifying") as shown:
        return report_of(document, verify(model, document, shown, place))


def add_vectors(commands: Commands) -> None:
    text = "make golden vectors, or check the reference against them"
    parser = add_command(commands, "vectors", run, text, EXAMPLE, is_verdict=True)
    kinds = parser.add_subparsers(dest="what", required=True, metavar="make|verify", prog="lfm2np vectors")
    for name, text in (
        ("make", "compute a set of vectors in exact arithmetic"),
        ("verify", "compute a set again and compare bit for bit"),
    ):
        sub = kinds.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", formatter_class=Help)
        sub.usage_exit_code = parser.usage_exit_code
        add_model(sub, default=argparse.SUPPRESS)
        add(sub, "--tokenizer DIR", TOKENIZER_HELP)
        add(sub, "--json", "print one JSON object", default=argparse.SUPPRESS)
        work.add_options(sub)
        if name == "make":
            add(sub, "-o --output FILE", "the file to write", type=to_write, required=True)
            add(sub, "--seed N", "seed of the prompts (0)", default=0)
            add(sub, "--small", "only the vectors that the scripts need and a few more, with fewer tensors")
        else:
            add(
                sub,
                "FILE",
                f"the set, or the name of a packaged one: {', '.join(PACKAGED)} ({PACKAGED[0]})",
                nargs="?",
            )
