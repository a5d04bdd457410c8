"""The command line: `lfm2np generate | score | digest | info`, also `python -m lfm2np`."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

import lfm2np
from lfm2np import digest, scoring, summary
from lfm2np.checkpoint import open_checkpoint
from lfm2np.config import load_config
from lfm2np.errors import Lfm2npError, RequestError
from lfm2np.generation import Completion, GeneratedToken, collect
from lfm2np.loading import Model, load, trained_fixture
from lfm2np.numerics import NAMES
from lfm2np.tokenizer import TextStream

EXIT_CODES = """exit codes:
  0    done
  2    the arguments or the request cannot be met (unknown option, id outside the vocabulary, prompt too long)
  3    config, weights or tokenizer are missing, corrupt or not LFM2
  4    a value is not finite, or a product could not be computed exactly
  130  interrupted"""


Command = Callable[[argparse.Namespace], None]


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """A function `(done, total)` that draws a bar on a terminal once two seconds have passed; silent when piped."""
    with tqdm(desc=description, delay=2, leave=False, disable=None, file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def load_model(arguments: argparse.Namespace) -> Model:
    with progress_bar("loading") as show:
        return load(arguments.model, arguments.numerics, show)


def parse_ids(text: str) -> list[int]:
    """ "1,2,3" -> [1, 2, 3]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        shown = text if len(text) <= 40 else text[:40] + "..."
        raise RequestError(f"--prompt-ids {shown!r}: expected whole numbers with commas between them") from None


def prompt_ids(model: Model, arguments: argparse.Namespace) -> list[int]:
    """The prompt that --prompt, --chat or --prompt-ids gives, as checked ids."""
    if arguments.prompt_ids is not None:
        return model.prompt_ids(parse_ids(arguments.prompt_ids))
    if arguments.prompt is not None:
        return model.prompt_ids(arguments.prompt)
    messages = [{"role": "user", "content": arguments.chat}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return model.prompt_ids(model.tokenizer.encode_chat(messages))


def terminal_text(text: str) -> str:
    """Text as a terminal may show it: control characters, which could move the cursor, become U+FFFD."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() or (c.isspace() and ord(c) > 0x9F) else "\ufffd" for c in text)


def run_generate(arguments: argparse.Namespace) -> None:
    if arguments.system is not None and arguments.chat is None:
        raise RequestError("--system goes with --chat")
    model = load_model(arguments)
    ids = prompt_ids(model, arguments)
    tokens = model.stream(ids, arguments.max_tokens, arguments.logprobs)
    if arguments.json:
        print(json.dumps(completion_json(model, finish(model, ids, tokens, arguments.max_tokens)), ensure_ascii=False))
        return
    generated = []
    text = TextStream(model.tokenizer) if model.has_tokenizer else None
    for token in tokens:
        generated.append(token)
        if arguments.logprobs is not None:
            print(logprobs_line(model, token))
        else:
            piece = text.push(token.token_id) if text else f"{',' if len(generated) > 1 else ''}{token.token_id}"
            print(terminal_text(piece), end="", flush=True)
    print(terminal_text(text.finish()) if text and arguments.logprobs is None else "")


def finish(model: Model, ids: list[int], tokens: Iterator[GeneratedToken], max_tokens: int) -> Completion:
    """The whole completion, with a bar in place of the streamed text."""
    generated = []
    with progress_bar("generating") as show:
        for token in tokens:
            generated.append(token)
            show(len(generated), max_tokens)
    completion = collect(ids, generated)
    return completion.with_text(model.tokenizer.decode(completion.token_ids)) if model.has_tokenizer else completion


def completion_json(model: Model, completion: Completion) -> dict[str, object]:
    return {"model": str(model.path), "numerics": model.numerics.name, **dataclasses.asdict(completion)}


def logprobs_line(model: Model, token: GeneratedToken) -> str:
    """One generated token a line: id, entry, log-probability, then the most likely ones."""
    assert token.logprobs is not None
    top = "  ".join(f"{entry(model, i)} {logprob:.4f}" for i, logprob in token.logprobs.top)
    return f"{token.token_id:>7}  {entry(model, token.token_id):<20} {token.logprobs.logprob:>10.4f}  {top}".rstrip()


def entry(model: Model, token_id: int) -> str:
    """A token as a quoted piece of text, a special one by its name, or its id where there is no tokenizer."""
    if not model.has_tokenizer:
        return str(token_id)
    text = model.tokenizer.token_bytes(token_id).decode("utf-8", "backslashreplace")
    return repr(text) if text else model.tokenizer.token(token_id) or f"<dead row {token_id}>"


def run_score(arguments: argparse.Namespace) -> None:
    model = load_model(arguments)
    ids = prompt_ids(model, arguments)
    with progress_bar("scoring") as show:
        scores = scoring.score(model.weights, model.config, model.numerics, ids, show)
    total = math.fsum(s.logprob for s in scores)
    if arguments.json:
        rows = [dataclasses.asdict(s) for s in scores]
        head = {"model": str(model.path), "numerics": model.numerics.name, "token_ids": ids}
        print(json.dumps({**head, "scores": rows, "total_logprob": total}))
        return
    print(f"{'position':>8}{'id':>8}  {'token':<20}{'log-prob':>12}{'rank':>7}{'margin':>10}  greedy")
    for s in scores:
        greedy = "" if s.rank == 1 else entry(model, s.greedy_token_id)
        line = f"{s.position:>8}{s.token_id:>8}  {entry(model, s.token_id):<20}"
        print(f"{line}{s.logprob:>12.6f}{s.rank:>7}{s.margin:>10.4f}  {greedy}".rstrip())
    print(f"total log-probability {total:.6f} over {len(scores)} tokens")


def run_digest(arguments: argparse.Namespace) -> None:
    model = load_model(arguments)
    with progress_bar("digest") as show:
        value = digest.digest(model.weights, model.config, model.numerics, show)
    if arguments.json:
        head = {"model": str(model.path), "numerics": model.numerics.name}
        print(json.dumps({**head, "sha256": value, "prompt_lengths": digest.LENGTHS}))
    else:
        print(value)


def run_info(arguments: argparse.Namespace) -> None:
    directory = trained_fixture() if arguments.model is None else Path(arguments.model)
    config = load_config(directory)
    with progress_bar("proving bounds") as show:
        bounds = summary.proved_bounds(open_checkpoint(directory, config), config, show)
    if arguments.json:
        print(json.dumps({"model": str(directory), **summary.as_json(config, bounds)}))
    else:
        print(f"{'model':<30}{directory}\n{summary.as_text(config, bounds)}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lfm2np",
        description="The right answer for LFM2 models: a NumPy-only reference in exact arithmetic.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lfm2np {lfm2np.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Command, text: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example:\n  {example}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        sub.add_argument("--model", metavar="DIR", help="checkpoint directory (default: the trained fixture)")
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        return sub

    generate = command(
        "generate", run_generate, "continue a prompt greedily", 'lfm2np generate --chat "sort: 7 2 9 4" --max-tokens 32'
    )
    add_prompt_options(generate)
    generate.add_argument("--system", metavar="TEXT", help="system message before --chat")
    generate.add_argument("--max-tokens", metavar="N", type=int, default=64, help="most tokens to generate (64)")
    generate.add_argument("--logprobs", metavar="K", type=int, help="one token a line, with the K most likely ones")
    score = command(
        "score",
        run_score,
        "log-probability, rank and margin of given tokens",
        "lfm2np score --prompt 'add: 34 + 58 -> 92'",
    )
    add_prompt_options(score)
    score.set_defaults(system=None)
    digest_command = command(
        "digest",
        run_digest,
        "SHA-256 of the logits' bits for a fixed set of prompts",
        "lfm2np digest --model LFM2-350M",
    )
    command("info", run_info, "shape, memory and proved bounds of a checkpoint", "lfm2np info --json")
    for sub in (generate, score, digest_command):
        sub.add_argument("--numerics", choices=NAMES, default="exact", help="arithmetic (exact)")
    return parser


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--prompt", metavar="TEXT", help="plain text; the BOS is added")
    group.add_argument("--chat", metavar="TEXT", help="a user's message, rendered by the checkpoint's chat template")
    group.add_argument("--prompt-ids", metavar="IDS", help="token ids with commas between them, taken as they are")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Errors become one line on stderr."""
    arguments = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows only ASCII gets "?", not a crash
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except Lfm2npError as error:
        return fail(f"{type(error).__name__}: {error}", error.exit_code)
    except MemoryError as error:
        return fail(f"out of memory: {error}", 1)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: say nothing more
    return 0


def fail(message: str, code: int) -> int:
    print(f"lfm2np: {' '.join(message.split())}", file=sys.stderr)
    return code
