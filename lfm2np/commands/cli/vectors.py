"""`lfm2np vectors make | verify`: golden vectors for engines' own tests."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from lfm2np.commands.cli.shared import work
from lfm2np.commands.cli.shared.parser import TOKENIZER_HELP, Commands, add, add_command, add_model
from lfm2np.commands.cli.shared.prompts import load_model
from lfm2np.commands.cli.shared.terminal import print_result, progress_bars
from lfm2np.errors import InconclusiveError, ProofError, RequestError, WorkerError
from lfm2np.oracle import vectors_plain
from lfm2np.oracle.vectors.golden import BOUNDED, Difference, make, verify
from lfm2np.oracle.vectors.set_files import (
    DOCUMENT,
    VectorsError,
    VectorSet,
    packaged_set,
    read_set,
    require_replaceable,
    write_set,
)

EXIT_CODES = """exit codes:
  0    the set is written, or matches
  1    verify: the set differs from the model, or an engine's responses are wrong
  2    make: the arguments can't be met, or the folder can't be written; verify: responses are missing or not judged
  3    verify: it could not run; model or vectors are missing or corrupt
  130  interrupted"""
EXAMPLE = """lfm2np vectors make --model LFM2-350M -o vectors-350M
  lfm2np vectors verify
  lfm2np vectors verify vectors-350M --model LFM2-350M
  lfm2np vectors verify vectors-350M --answers answers.jsonl --format bfloat16"""
MOST_SHOWN = 20


def run(arguments: argparse.Namespace) -> None:
    """Prints what was made or found. ProofError (1) for a difference, InconclusiveError (2) for answers that don't
    suffice; what keeps `verify` from running is a VectorsError (3)."""
    if arguments.what == "make":
        run_make(arguments)
        return
    try:
        if arguments.answers is not None:
            run_answers(arguments)
        elif arguments.format is not None:
            raise RequestError("--format: expected --answers with it")
        else:
            run_verify(arguments)
    except (RequestError, WorkerError) as error:
        raise VectorsError(str(error)) from None


def run_make(arguments: argparse.Namespace) -> None:
    require_replaceable(arguments.output)
    model = load_model(arguments)
    with work.place_of(arguments, model) as place, progress_bars("scoring", *BOUNDED) as shown:
        vectors = make(model, arguments.seed, progress=shown, executor=place)
    size = write_set(vectors, arguments.output)
    fields = {"folder": arguments.output, "bytes": size, **counted(vectors)}
    print_result(arguments, fields, f"{summary(vectors)}, {size} bytes")


def run_verify(arguments: argparse.Namespace) -> None:
    known = read_set(folder_of(arguments))
    model = load_model(arguments)
    with work.place_of(arguments, model) as place, progress_bars("verifying") as shown:
        differences = verify(model, known, shown, place)
    fields = {**counted(known), "differences": [asdict(difference) for difference in differences]}
    print_result(arguments, fields, shown_differences(differences) or f"{summary(known)}: bit for bit as computed here")
    if differences:
        raise ProofError(f"{len(differences)} differences, first: {differences[0]}")


def run_answers(arguments: argparse.Namespace) -> None:
    """By vectors_plain.py alone, after the set has been read strictly."""
    document = read_set(folder_of(arguments)).document
    try:
        answers = vectors_plain.read_answers(arguments.answers)
        judged = vectors_plain.judge(document, answers, arguments.format or "float32")
    except vectors_plain.PlainError as problem:
        raise VectorsError(str(problem)) from None
    lines = vectors_plain.report(judged, answers)
    fields = {"positions": [position._asdict() for position in judged], "summary": lines[-1]}
    print_result(arguments, fields, "\n".join(lines))
    code = vectors_plain.result(judged)
    if code == 1:
        wrong = next(position for position in judged if position.verdict in (vectors_plain.BUG, vectors_plain.DRIFT))
        raise ProofError(f"{wrong.verdict}: {wrong.id} position {wrong.position}: {wrong.detail}")
    if code == 2:
        raise InconclusiveError(lines[0])


def folder_of(arguments: argparse.Namespace) -> Path:
    """FOLDER may also be given as the vectors.json in it."""
    if arguments.folder is None:
        return packaged_set()
    path = Path(arguments.folder)
    return path.parent if path.name == DOCUMENT else path


def counted(known: VectorSet) -> dict[str, int]:
    vectors = known.document["vectors"]
    positions = [position for vector in vectors for position in vector["positions"]]
    may_tie = sum(position["result"] == "may_tie" for position in positions)
    counts = {"vectors": len(vectors), "positions": len(positions), "may_tie": may_tie}
    return {**counts, "tensors": len(known.tensors)}


def summary(known: VectorSet) -> str:
    counts = counted(known)
    ties = f"{counts['may_tie']} of them may tie"
    return f"{counts['vectors']} vectors, {counts['positions']} positions ({ties}), {counts['tensors']} tensors"


def shown_differences(differences: list[Difference]) -> str:
    more = [f"and {len(differences) - MOST_SHOWN} more"] if len(differences) > MOST_SHOWN else []
    return "\n".join([*map(str, differences[:MOST_SHOWN]), *more])


def add_vectors(commands: Commands) -> None:
    text = "make golden vectors, or check the reference or an engine's responses against them"
    parser = add_command(commands, "vectors", run, text, EXAMPLE, exit_codes=EXIT_CODES)
    kinds = parser.add_subparsers(dest="what", required=True, metavar="make|verify")
    for name, text in (
        ("make", "compute a set of vectors in exact arithmetic"),
        ("verify", "compute a set again and compare bit for bit, or check an engine's recorded responses"),
    ):
        sub = kinds.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add_model(sub, default=argparse.SUPPRESS)
        add(sub, "--tokenizer DIR", TOKENIZER_HELP)
        add(sub, "--json", "print one JSON object", default=argparse.SUPPRESS)
        work.add_options(sub)
        if name == "make":
            add(sub, "-o --output FOLDER", "folder to write or replace, as a whole", required=True)
            add(sub, "--seed N", "seed of the prompts (0)", default=0)
        else:
            add(sub, "FOLDER", "the set (default: the packaged one)", nargs="?")
            answers_help = 'an engine\'s responses, {"id", "token_ids", "logprobs"} on each line; no model is needed'
            add(sub, "--answers FILE", answers_help)
            add(sub, "--format", "with --answers: number format of the engine (float32)", choices=BOUNDED)
