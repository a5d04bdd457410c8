"""The command line: `lfm2np generate | replay | score | merge | check | locate | vectors | digest | info | ...`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import lfm2np
from lfm2np.checkpoint import summary
from lfm2np.checkpoint.config import load_config
from lfm2np.checkpoint.loaded import WEIGHTS, checkpoint_directory
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.cli import bench as cli_bench
from lfm2np.cli import check as cli_check
from lfm2np.cli import draw
from lfm2np.cli import faults as cli_conformance
from lfm2np.cli import generate as cli_generate
from lfm2np.cli import locate as cli_locate
from lfm2np.cli import score as cli_score
from lfm2np.cli import vectors as cli_vectors
from lfm2np.cli.shared import work
from lfm2np.cli.shared.terminal import parse_ids, progress_bar, read_file
from lfm2np.errors import Lfm2npError, ProofError, RequestError
from lfm2np.loading import Model, load
from lfm2np.network import digest
from lfm2np.numerics import NAMES
from lfm2np.oracle.targets.target import TargetError
from scheduler import TraceError, replay

EXIT_CODES = """exit codes:
  0    done
  1    a proof or a replay found a difference, the output can't be written, or memory ran out
  2    the arguments or the request cannot be met (unknown option, id outside the vocabulary, prompt too long)
  3    config, weights or tokenizer are missing, corrupt or not LFM2
  4    a value is not finite, or a product could not be computed exactly
  130  interrupted"""


Command = Callable[[argparse.Namespace], None]


def load_model(arguments: argparse.Namespace) -> Model:
    with progress_bar("loading") as show:
        return load(arguments.model, arguments.numerics, show, arguments.weights)


def prompt_ids(model: Model, arguments: argparse.Namespace) -> list[int]:
    """The prompt that the options give, as checked ids."""
    if arguments.system is not None and arguments.chat is None:
        raise RequestError("--system goes with --chat")
    if arguments.prompt_ids is not None:
        return model.prompt_ids(parse_ids(arguments.prompt_ids, "--prompt-ids"))
    if arguments.prompt_ids_file is not None:
        return model.prompt_ids(parse_ids(read_file(arguments.prompt_ids_file), arguments.prompt_ids_file))
    if arguments.prompt_file is not None:
        return model.prompt_ids(read_file(arguments.prompt_file))
    if arguments.prompt is not None:
        return model.prompt_ids(arguments.prompt)
    messages = [{"role": "user", "content": arguments.chat}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return model.prompt_ids(model.tokenizer.encode_chat(messages))


def completion_ids(model: Model, arguments: argparse.Namespace) -> list[int]:
    """The tokens of --completion or --completion-ids, none without either."""
    if arguments.completion_ids is not None:
        return model.prompt_ids(parse_ids(arguments.completion_ids, "--completion-ids"))
    return model.tokenizer.encode_more(arguments.completion) if arguments.completion is not None else []


def run_generate(arguments: argparse.Namespace) -> None:
    cli_generate.run(load_model(arguments), arguments)


def print_json(model: Model, fields: Mapping[str, object]) -> None:
    print(json.dumps({"model": str(model.path), "numerics": model.numerics.name, **fields}))


def run_score(arguments: argparse.Namespace) -> None:
    has_completion = arguments.completion is not None or arguments.completion_ids is not None
    if arguments.requests is None and (arguments.workers or arguments.results is not None):
        raise RequestError("--workers and --results go with --requests")
    if arguments.requests is not None and (has_completion or arguments.system is not None):
        raise RequestError("--requests has prompts and completions in its lines")
    model = load_model(arguments)
    if arguments.requests is not None:
        cli_score.run_many(model, arguments)
        return
    prompt, completion = prompt_ids(model, arguments), completion_ids(model, arguments)
    cli_score.run_one(model, prompt, completion, has_completion, arguments.json)


def run_digest(arguments: argparse.Namespace) -> None:
    model = load_model(arguments)
    with progress_bar("digest") as show:
        value = digest.digest(model.weights, model.config, model.numerics, show)
    if arguments.json:
        print_json(model, {"sha256": value, "prompt_lengths": digest.lengths(model.config)})
    else:
        print(value)


def run_info(arguments: argparse.Namespace) -> None:
    directory = checkpoint_directory(arguments.model)
    config = load_config(directory)
    with progress_bar("proving bounds") as show:
        bounds = summary.proved_bounds(open_checkpoint(directory, config), config, show)
    if arguments.json:
        print(json.dumps({"model": str(directory), **summary.as_json(config, bounds)}))
    else:
        print(f"{'model':<30}{directory}\n{summary.as_text(config, bounds)}")


def run_replay(arguments: argparse.Namespace) -> None:
    try:
        result = replay(read_file(arguments.trace).splitlines())
    except TraceError as error:
        raise ProofError(f"{arguments.trace}: {error}") from None
    if arguments.json:
        print(json.dumps(dataclasses.asdict(result)))
        return
    print(
        f"replayed {result.steps} steps, {result.requests} requests, {result.scheduled_tokens} scheduled and "
        f"{result.tokens} sampled tokens, {result.preemptions} preemptions: every plan, token and ending as recorded"
    )


class OneLineParser(argparse.ArgumentParser):
    usage_exit_code = RequestError.exit_code  # another for commands whose 2 means something else

    def error(self, message: str) -> NoReturn:
        raise SystemExit(fail(f"{message} (see {self.prog} --help)", self.usage_exit_code))


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="lfm2np",
        description="The right answer for LFM2 models: a NumPy-only reference in exact arithmetic.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lfm2np {lfm2np.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Command, text: str, example: str, model: bool = True, exit_codes: str = EXIT_CODES
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example:\n  {example}\n\n{exit_codes}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if exit_codes is not EXIT_CODES:
            sub.usage_exit_code = TargetError.exit_code
        sub.set_defaults(run=run)
        if model:
            sub.add_argument("--model", metavar="DIR", help="checkpoint directory (default: the trained fixture)")
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        return sub

    generate = command(
        "generate",
        run_generate,
        "continue prompts, batched continuously",
        'lfm2np generate --chat "sort: 7 2 9 4" --chat "add: 34 + 58" --prove',
    )
    add_prompt_options(generate, many=True)
    generate.add_argument("--max-tokens", metavar="N", type=int, default=64, help="most tokens to generate (64)")
    generate.add_argument("--logprobs", metavar="K", type=int, help="a line a token, with the K most likely ones")
    cli_generate.add_options(generate)
    replay = command(
        "replay",
        run_replay,
        "re-execute a trace's schedule without the model, and confirm plans, tokens and endings",
        "lfm2np replay trace.jsonl",
        model=False,
    )
    replay.add_argument("trace", metavar="TRACE", help="a file written by generate --trace")
    drawing = command(
        "draw",
        draw.run,
        "show a recorded run step by step: one HTML page, or a step in the terminal",
        draw.EXAMPLE,
        model=False,
    )
    draw.add_options(drawing)
    faults = command(
        "faults",
        cli_conformance.run_faults,
        "put real engines' bugs into this one, and see the property suite catch them",
        "lfm2np faults request-seed-ignored slot-index-wraps-modulo-2 --show",
        model=False,
    )
    cli_conformance.add_fault_options(faults)
    conformance = command(
        "conformance",
        cli_conformance.run_conformance,
        "print the properties of the suite, which pytest runs on any engine",
        "lfm2np conformance list\n  pytest --pyargs lfm2np.conformance --engine package.module:factory",
        model=False,
    )
    conformance.add_argument("what", choices=["list"], help="list: id, sentence, law, needs and real bugs of each")
    check = command(
        "check",
        cli_check.run,
        "hold another engine against the oracle, under the noise that its number format is entitled to",
        cli_check.EXAMPLE,
        exit_codes=cli_check.EXIT_CODES,
    )
    cli_check.add_options(check)
    locate = command(
        "locate",
        cli_locate.run,
        "name the first tensor of an engine's activations that its own inputs do not explain",
        "lfm2np locate dump.safetensors --model LFM2-350M --format bfloat16",
        exit_codes=cli_check.EXIT_CODES,
    )
    cli_locate.add_options(locate)
    vectors = command(
        "vectors",
        cli_vectors.run,
        "make golden vectors, or hold the reference or an engine's answers against them",
        "lfm2np vectors verify\n  lfm2np vectors make --model LFM2-350M -o vectors",
        exit_codes=cli_check.EXIT_CODES,
    )
    cli_vectors.add_options(vectors)
    bench = command(
        "bench",
        cli_bench.run,
        "measure speed and memory, beside the bare matrix products and transformers",
        cli_bench.EXAMPLE,
        model=False,
    )
    cli_bench.add_options(bench)
    score = command(
        "score",
        run_score,
        "log-probability, rank and margin of given tokens",
        cli_score.EXAMPLE,
    )
    add_prompt_options(score).add_argument("--requests", metavar="FILE", help=cli_score.REQUESTS_HELP)
    group = score.add_mutually_exclusive_group()
    group.add_argument("--completion", metavar="TEXT", help="what followed the prompt; only its tokens are shown")
    group.add_argument("--completion-ids", metavar="IDS", help="the same as token ids")
    work.add_options(score)
    merge = command(
        "merge",
        work.run_merge,
        "put files of results together, of score, check or vectors, and compute some of them again",
        work.MERGE_EXAMPLE,
    )
    work.add_merge_options(merge)
    digest_command = command(
        "digest",
        run_digest,
        "SHA-256 of the logits' bits for a fixed set of prompts",
        "lfm2np digest --model LFM2-350M",
    )
    command("info", run_info, "shape, memory and proved bounds of a checkpoint", "lfm2np info --json")
    for sub in (generate, score, digest_command):
        sub.add_argument("--numerics", choices=NAMES, default="exact", help="arithmetic (exact)")
        streamed = "in memory, or as stored and widened for each product, piece by piece: slow and small (resident)"
        sub.add_argument("--weights", choices=WEIGHTS, default="resident", help=streamed)
    return parser


def add_prompt_options(parser: argparse.ArgumentParser, many: bool = False) -> argparse._MutuallyExclusiveGroup:
    """`many` lets --prompt and --chat be repeated, and adds --requests. Returns the group that one is taken of."""
    action, again = ("append", "; may be repeated") if many else ("store", "")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--prompt", metavar="TEXT", action=action, help="plain text; the BOS is added" + again)
    group.add_argument("--prompt-file", metavar="FILE", help="the same from a file, - for standard input")
    chat_help = "a user's message, rendered by the checkpoint's chat template" + again
    group.add_argument("--chat", metavar="TEXT", action=action, help=chat_help)
    if many:
        group.add_argument("--requests", metavar="FILE", help="one JSON object a line: prompt or prompt_token_ids, ...")
    group.add_argument("--prompt-ids", metavar="IDS", help="token ids with commas between them, taken as they are")
    group.add_argument("--prompt-ids-file", metavar="FILE", help="the same from a file, - for standard input")
    parser.add_argument("--system", metavar="TEXT", help="system message before --chat")
    return group


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Errors become one line on stderr."""
    if sys.stderr is None:  # closed by the caller: errors must not go where the answer goes
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if sys.stdout is None:
        return fail("standard output is closed", 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows only ASCII gets "?", not a crash
    arguments = build_parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            arguments.run(arguments)
        sys.stdout.flush()
    except Lfm2npError as error:
        return fail(f"{type(error).__name__}: {error}", error.exit_code)
    except MemoryError as error:
        return fail(f"out of memory {error}", 1)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except BrokenPipeError:
        discard_output()  # the reader has gone: say nothing more
    except OSError as error:
        discard_output()
        return fail(f"the output can't be written: {error}", 1)
    return 0


def discard_output() -> None:
    """Nothing more can be written, nor flushed when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    print(f"lfm2np: warning: {' '.join(str(message).split())}", file=sys.stderr)


def fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"lfm2np: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code
