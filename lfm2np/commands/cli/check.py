"""`lfm2np check TARGET`: is this engine right, and if not, what does its error depend on?"""

from __future__ import annotations

import argparse
import contextlib
import shlex
from dataclasses import replace
from functools import partial

from lfm2np.checkpoint.config_json import READINGS
from lfm2np.checkpoint.files import read_tensors
from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.commands.cli.shared import against, check_against, format_options, work
from lfm2np.commands.cli.shared.parser import (
    Commands,
    add,
    add_command,
    add_modes,
    refuse_unused,
    require_at_least,
    require_times,
)
from lfm2np.commands.cli.shared.prompts import load_model
from lfm2np.commands.cli.shared.terminal import add_report, progress_bar, progress_bars, show_report
from lfm2np.engine.loading import Model
from lfm2np.engine.work.place import Place
from lfm2np.engine.work.results_file import LineFile
from lfm2np.errors import RequestError
from lfm2np.oracle import chats
from lfm2np.oracle.check import SCORING, Checked, as_far_as_needed, judged, needs_repeats, repeated, until_wrong
from lfm2np.oracle.check_report import exit_code, report_of
from lfm2np.oracle.engines.file_target import FileTarget, Transcript
from lfm2np.oracle.engines.http_target import HttpTarget
from lfm2np.oracle.engines.named import target_named
from lfm2np.oracle.engines.target import AT_ONCE, MOST_AT_ONCE, Target, TargetError
from lfm2np.oracle.judging.formats import FORMATS, KV
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.locate.spread import PRECISIONS
from lfm2np.oracle.recorders.locating import cause_of, cause_to_dump
from lfm2np.oracle.recorders.registry import FORMS, AnswersOnlyError, Record, record_of, shows_answers_only
from lfm2np.oracle.report.report import WRONG, plural
from lfm2np.oracle.sending import always, send_all
from lfm2np.oracle.workloads import CASES, LONG
from lfm2np.suite.itself.relations import NAMES
from lfm2np.suite.itself.target_engine import BLOCK, CHUNK, SLOTS
from lfm2np.values import ProgressOf, require_count

EXAMPLE = """lfm2np check http://127.0.0.1:8000 --model LFM2-350M --format bfloat16
  lfm2np check "exec:./my-engine --threads 4" --model DIR --save answers.jsonl
  lfm2np check answers.jsonl --model DIR
  lfm2np check http://127.0.0.1:8000 --against itself --format bfloat16 --vocab-size 32000"""
OF_FILE = "not with a file of answers as TARGET"
OF_CHATS = f"not with --cases {chats.CASE}"
UNUSED = {  # options that a mode does not use
    against.WITH: (*against.NEED_TRUTH, "locate", "first", "constants"),
    against.WITHOUT: (*against.NEED_AGAINST, "minutes", "block_size", "max_num_batched_tokens"),
    OF_FILE: ("max_num_seqs", "cases", "max_model_len", "seed", "timeout"),
    against.LOCAL: against.NEED_SERVER,
    OF_CHATS: ("max_num_seqs", "constants", "first", "locate", "max_model_len", "save", "seed"),
}
ACTIVATIONS = {8: "bfloat16", 11: "float16"}  # by their significant bits


def run(arguments: argparse.Namespace) -> None:
    """Prints the verdict. ProofError (1) if the engine is wrong, InconclusiveError (2) if that can't be said.

    TargetError (3) for an engine that can't be run.
    """
    is_against, is_chat = arguments.against is not None, arguments.cases == chats.CASE
    others = [] if is_against else [OF_FILE] * is_a_file(arguments.target) + [OF_CHATS] * is_chat
    refuse_unused(arguments, *against.modes(arguments), *others)
    if is_against:
        check_against.run(arguments)
        return
    cases = None if is_chat else check_against.names_of(arguments)
    recorder = recorder_of(arguments)
    require_at_least(arguments, max_num_seqs=1)
    require_times(arguments, "timeout")
    require_count("--seed", arguments.seed, 0, 2**63)
    if is_chat and arguments.model is None:
        raise RequestError(f"--cases {chats.CASE}: expected --model, what the server has, with its chat template")
    model = load_model(arguments)
    if is_chat:
        with contextlib.closing(target_of(arguments, model)) as target, progress_bar("chats") as shown:
            assert isinstance(target, HttpTarget)  # as `target_of` makes it for chats
            taken = format_options.format_of(arguments, target.probe().engine)
            report = chats.report_of(chats.Chats(model, target, taken.name, shown), taken.name)
        show_report(arguments, report)
        return
    result, known = checked(arguments, model, cases)
    if recorder is not None and exit_code(result.total.verdict) == WRONG:
        result = located(result, arguments, recorder, model, known)
    report = report_of(result, arguments.target)
    show_report(arguments, replace(report, figures={**report.figures, "scoring": work.throughput(known.place)}))


def checked(arguments: argparse.Namespace, model: Model, cases: list[str] | None) -> tuple[Checked, Known]:
    """The result, and what was computed for it."""
    saved = None if arguments.save is None else LineFile(arguments.save)
    with work.place_of(arguments, model, saved) as place, progress_bars(SCORING) as shown:
        known = Known(place=place)
        if is_a_file(arguments.target):
            return judged_file(model, arguments, known, shown), known
        transcript = None if saved is None else open_check(saved)
        count = len(transcript.pairs()) if transcript else 0
        earlier = f"{plural(count, 'answer')} of an earlier run in {arguments.save}, used where asked for" * bool(count)
        with contextlib.closing(target_of(arguments, model)) as target:
            taken = format_options.format_of(arguments, target.probe().engine)  # before anything is asked
            on = until_wrong(model, taken.name, known) if arguments.first else always
            longest = arguments.max_model_len
            collected = send_all(
                model, target, arguments.max_num_seqs, arguments.seed, cases, transcript, shown, on, longest
            )
        del target  # its process has ended, or its weights are let go, before the rest is scored
        result = judged(
            model,
            collected.abilities,
            taken.name,
            collected.pairs,
            collected.not_put,
            shown,
            known,
            arguments.constants,
        )
        if needs_repeats(result):
            with contextlib.suppress(TargetError), contextlib.closing(target_of(arguments, model)) as target:
                target.probe()
                result = repeated(model, target, result, known)
        if transcript:
            transcript.judged(str(result.total.verdict))
        return replace(result, why_format=taken.why, left=collected.left, earlier=earlier), known


def open_check(saved: LineFile) -> Transcript:
    """RequestError for one that has its verdict: the engine may be another by now, so old answers are not taken."""
    transcript = Transcript(saved)
    if transcript.verdict is not None:
        again = f"`lfm2np check {saved.path}` judges it again"
        raise RequestError(f"--save {saved.path}: a check that ended with {transcript.verdict}; {again}")
    return transcript


def is_a_file(target: str) -> bool:
    return target.endswith(".jsonl") and ":" not in target


def recorder_of(arguments: argparse.Namespace) -> Record | str | None:
    """The recorder of --locate, if given; RequestError or TargetError, before anything runs, if there can't be one.

    For an engine that is to be recorded itself, and shows only answers, why it can't be: see `located`.
    """
    if arguments.locate is None:
        return None
    if not arguments.locate and shows_answers_only(arguments.target):
        return f"{arguments.target} shows answers only; if the same engine runs in Python: --locate RECORDER"
    try:
        return record_named(arguments)
    except AnswersOnlyError as problem:
        if arguments.locate:
            raise
        return str(problem)


def record_named(arguments: argparse.Namespace) -> Record:
    return record_of(arguments.locate or arguments.target, checkpoint_path(arguments.model), recorded_format(arguments))


def recorded_format(arguments: argparse.Namespace) -> str:
    """The format, or that of its activations where recorders do not know it."""
    computed_in = format_options.format_of(arguments, "").name.partition(KV)[0]
    return computed_in if computed_in in PRECISIONS else ACTIVATIONS[FORMATS[computed_in].bits]


def located(
    result: Checked, arguments: argparse.Namespace, record: Record | str, model: Model, known: Known
) -> Checked:
    """The result with the wrong operation, why it is unknown, or how to find it; the verdict stays."""
    path = checkpoint_path(arguments.model)
    target = arguments.locate or arguments.target
    known = replace(known, place=Place())  # the workers have ended
    if isinstance(record, str):
        words = ["lfm2np", "locate", "dump.safetensors", "--format", recorded_format(arguments)]
        words += [] if arguments.model is None else ["--model", arguments.model]
        words += [] if arguments.rope == READINGS[0] else ["--rope", arguments.rope]
        return replace(result, cause=cause_to_dump(result, target, record, shlex.join(words)))
    with progress_bar("locating", "recording") as show:
        tensors, renew = read_tensors(path, model.config), partial(record_named, arguments)
        cause = cause_of(result, target, renew, tensors, model, show, known)
    return replace(result, cause=cause)


def judged_file(model: Model, arguments: argparse.Namespace, known: Known, shown: ProgressOf) -> Checked:
    target = FileTarget(arguments.target, model.config.vocab_size)
    abilities, pairs = target.probe(), target.pairs()
    taken = format_options.format_of(arguments, abilities.engine)
    needed = as_far_as_needed(pairs, until_wrong(model, taken.name, known)) if arguments.first else pairs
    result = judged(model, abilities, taken.name, needed, progress=shown, known=known, constants=arguments.constants)
    return replace(result, why_format=taken.why, left=len(pairs) - len(needed))


def target_of(arguments: argparse.Namespace, model: Model) -> Target:
    """The adapter for a TARGET; RequestError for one of no known form."""
    text, computed_in = arguments.target, format_options.computed_in(arguments)
    vocab_size, tokenizer = model.config.vocab_size, model.tokenizer_or_none
    named = (arguments.name, arguments.max_num_seqs, arguments.timeout)
    is_chat = arguments.cases == chats.CASE
    return target_named(text, model.path, vocab_size, tokenizer, computed_in, *named, chat=is_chat)


def add_check(commands: Commands) -> None:
    text = "check an engine against the oracle, within the rounding error of its number format"
    parser = add_command(commands, "check", run, text, EXAMPLE, tokenizer=True, is_verdict=True)
    forms = "http(s)://HOST:PORT, package.module:factory, transformers:[padded:][DIR], exec:COMMAND, or FILE.jsonl"
    add(parser, "TARGET", forms)
    format_options.add_options(parser)
    alone = f"{chats.CASE} of a server (docs/engine/19-chats.md); with --against some of {', '.join(NAMES)} (all)"
    add(parser, "--cases NAMES", f"some of {', '.join(CASES)} (all but {LONG}), or {alone}")
    most = f"as it reports, at most {MOST_AT_ONCE}, else {AT_ONCE}; with --against {SLOTS}"
    add(parser, "--max-num-seqs N", f"requests that the engine runs at once: so many are sent together ({most})")
    add(parser, "--max-model-len N", f"most tokens of a request with its response, of {LONG} or --against")
    add(parser, "--seed N", "seed of the generated requests (0)", default=0)
    add(parser, "--name NAME", "model name, for a server with more than one")
    add(parser, "--timeout S", "seconds for a response (120)", default=120.0)
    locate_help = (
        "of a wrong engine, record the shortest wrong request and name the wrong operation, in the engine itself (of "
        f"a server or process, print how to) or in TARGET: {FORMS}"
    )
    add(parser, "--locate TARGET", locate_help, nargs="?", const="")
    add(parser, "--first", "stop at the first response that is certainly wrong")
    add(parser, "--constants", "look for wrong constants that rounding hides, however long it takes")
    work.add_options(parser)
    add_report(parser, "; with --against also FILE-findings: a folder for each broken relation, as of fuzz")
    group = against.add_options(parser)
    add(group, "--minutes N", "begin no relation after N minutes", type=float)
    add(group, "--block-size N", f"tokens in a cache block of the engine (as it reports, else {BLOCK})")
    add(group, "--max-num-batched-tokens N", f"most tokens in a step of the engine (as it reports, else {CHUNK})")
    add_modes(parser, UNUSED)
