"""--against itself | TARGET: an engine of any model, without a checkpoint, for `check` and `fuzz`."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace

from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.commands.cli.shared.format_options import AUTO
from lfm2np.commands.cli.shared.parser import add, require_at_least, require_times
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.protocol import TOLD
from lfm2np.oracle.engines.records_json import parse_line
from lfm2np.suite.itself.asked import Asking
from lfm2np.suite.itself.by_itself import ByItself
from lfm2np.suite.itself.questions import DEFAULT_VOCAB
from lfm2np.suite.itself.target_engine import Options, asking_of, smaller

ITSELF = "itself"
LEAST_VOCAB = 16
WITH, WITHOUT = "not with --against, which needs no truth", "only with --against"
LOCAL = "only with a server as TARGET"
NEED_TRUTH = ("rope", "tokenizer", "kv_format", "workers", "dask", "save")  # of `check` and `fuzz`
NEED_AGAINST = ("vocab_size", "bitwise")
NEED_SERVER = ("name",)


def modes(arguments: argparse.Namespace) -> list[str]:
    """Those above that the arguments call for, for `refuse_unused`."""
    targets = (arguments.target, arguments.against or "")
    is_local = not any(target.startswith(("http:", "https:")) for target in targets)
    return [WITHOUT if arguments.against is None else WITH, *([LOCAL] if is_local else [])]


def askings(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> list[Asking]:
    """Of the engine, or of the two that are compared, named by their targets then."""
    targets = [arguments.target] if arguments.against == ITSELF else [arguments.target, arguments.against]
    askings = [stack.enter_context(asking_of(target, options_of(arguments))) for target in targets]
    sizes = smaller(askings[0].sizes, askings[-1].sizes)
    for target, asking in zip(targets, askings, strict=True):
        asking.sizes, asking.seed, asking.is_bitwise = sizes, arguments.seed, arguments.bitwise
        if arguments.minutes is not None:
            asking.until = time.monotonic() + 60 * arguments.minutes
        if len(targets) > 1:
            asking.abilities = replace(asking.abilities, engine=f"{target} ({asking.abilities.engine})")
    return askings


def judge_of(askings: Sequence[Asking]) -> ByItself:
    """The first engine's judge, after `begin` of all: itself, or another."""
    first, last = askings[0], askings[-1]
    return ByItself(
        last.players[""],
        max((asking.spread for asking in askings), key=lambda spread: spread.nats),
        first.sizes.vocab,
        is_same=first is last,
        with_scores=first.abilities.tells_prompt_logprobs,
        is_bitwise=first.is_bitwise,
    )


def options_of(arguments: argparse.Namespace) -> Options:
    return Options(
        checkpoint_path(arguments.model),
        {name: getattr(arguments, name) for name in TOLD},
        arguments.vocab_size,
        arguments.name,
        arguments.timeout,
        format_name(arguments),
        vary_of(getattr(arguments, "vary", None)),
    )


def vary_of(text: str | None) -> dict[str, object] | None:
    fields = None if text is None else parse_line(text, "--vary")
    if fields is not None and (not isinstance(fields, dict) or not fields):
        raise RequestError(f"--vary {text!r}: expected fields of a request, as a JSON object")
    return fields


def format_name(arguments: argparse.Namespace) -> str:
    if arguments.format == AUTO:
        raise RequestError(f"--format {AUTO}: it is read from a checkpoint, and --against needs none: expected a name")
    return str(arguments.format)


def require(arguments: argparse.Namespace) -> None:
    """RequestError that names an option that is wrong."""
    require_at_least(arguments, vocab_size=LEAST_VOCAB, block_size=1, max_num_seqs=1, max_model_len=32, seed=0)
    require_at_least(arguments, max_num_batched_tokens=2)
    require_times(arguments, "minutes", "timeout")
    if arguments.against != ITSELF and ":" not in arguments.against:
        raise RequestError(f"--against {arguments.against!r}: expected `{ITSELF}`, or another engine as TARGET")
    format_name(arguments)


def add_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Those that `check` and `fuzz` share, in a group for what needs --against."""
    group = parser.add_argument_group("without a checkpoint (docs/engine/17-itself.md)")
    against = (
        "compare the engine's answers with its own to the same request alone (itself), or with those of another engine "
        "(a TARGET); exit code 1 is then a broken relation, or a finding"
    )
    add(group, "--against ENGINE", against)
    add(group, "--vocab-size N", f"ids below N are sent (as the server reports, else {DEFAULT_VOCAB})")
    add(group, "--bitwise", "expect equal bits, as an engine that is batch-invariant promises")
    return group
