"""--against itself | TARGET: an engine of any model, without a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import time

from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.commands.cli.shared.parser import add, require_at_least, require_times
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.protocol import TOLD
from lfm2np.oracle.judging.formats import FORMATS
from lfm2np.suite.itself.asked import Asking
from lfm2np.suite.itself.questions import DEFAULT_VOCAB
from lfm2np.suite.itself.target_engine import Options, asking_of, smaller

ITSELF = "itself"
LEAST_VOCAB = 16
WITH, WITHOUT = "not with --against, which needs no truth", "only with --against"
LOCAL = "only with a server as TARGET"
NEED_TRUTH = ("rope", "tokenizer", "workers", "save")
NEED_AGAINST = ("vocab_size", "bitwise")
NEED_SERVER = ("name",)


def modes(arguments: argparse.Namespace) -> list[str]:
    """Those above that the arguments call for, for `refuse_unused`."""
    targets = (arguments.target, arguments.against or "")
    is_local = not any(target.startswith(("http:", "https:")) for target in targets)
    return [WITHOUT if arguments.against is None else WITH, *([LOCAL] if is_local else [])]


def asking(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> Asking:
    """Of the engine, which knows the one that it is compared with, if any."""
    options = options_of(arguments)
    asking = stack.enter_context(asking_of(arguments.target, options))
    asking.seed, asking.is_bitwise = arguments.seed, arguments.bitwise
    if arguments.minutes is not None:
        asking.until = time.monotonic() + 60 * arguments.minutes
    if arguments.against != ITSELF:
        asking.other = stack.enter_context(asking_of(arguments.against, options))
        asking.sizes = asking.other.sizes = smaller(asking.sizes, asking.other.sizes)
        asking.other.seed = arguments.seed
    return asking


def options_of(arguments: argparse.Namespace) -> Options:
    return Options(
        checkpoint_path(arguments.model),
        {name: getattr(arguments, name) for name in TOLD},
        arguments.vocab_size,
        arguments.name,
        arguments.timeout,
        format_name(arguments),
    )


def format_name(arguments: argparse.Namespace) -> str:
    if arguments.format not in FORMATS:
        expected = f"expected one of {', '.join(FORMATS)} with --against, which needs no checkpoint"
        raise RequestError(f"--format {arguments.format}: {expected}")
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
    """In a group for what needs --against."""
    group = parser.add_argument_group("without a checkpoint (docs/engine/17-itself.md)")
    against = (
        "compare the engine's answers with its own to the same request alone (itself), or with those of another engine "
        "(a TARGET)"
    )
    add(group, "--against ENGINE", against)
    add(group, "--vocab-size N", f"ids below N are sent (as the server reports, else {DEFAULT_VOCAB})")
    add(group, "--bitwise", "expect equal bits, as an engine that is batch-invariant promises")
    return group
