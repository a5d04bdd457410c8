"""--against itself | URL: an engine of any model, without a checkpoint, for `check` and `fuzz`."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.cli.shared.formats import AUTO
from lfm2np.cli.shared.parser import add
from lfm2np.engine_protocol import load_factory
from lfm2np.errors import InconclusiveError, RequestError
from lfm2np.fuzz.play_engine import RoundsPlayer, StepsPlayer
from lfm2np.fuzz.play_http import HttpPlayer
from lfm2np.fuzz.played import Player, Takes
from lfm2np.invariance.questions import DEFAULT_VOCAB, Sizes
from lfm2np.oracle.judging.formats import with_kv
from lfm2np.oracle.targets.dialects.dialect import Location
from lfm2np.oracle.targets.exec_target import ExecTarget
from lfm2np.oracle.targets.python_target import PythonTarget
from lfm2np.oracle.targets.records import parse_line
from lfm2np.oracle.targets.target import Target
from lfm2np.oracle.targets.transformers_target import TransformersTarget

ITSELF = "itself"
VOCAB_AT = (Location("/v1/models", ("data", 0, "meta", "n_vocab")),)  # llama.cpp's
BLOCK, CHUNK, SLOTS, LONGEST = 16, 512, 8, 2048
LEAST_VOCAB = 16
NEED_TRUTH = {  # options for a comparison with exact arithmetic, and their values when not given
    **dict.fromkeys(("cases", "at_once", "save", "resume", "locate", "results", "dask", "tokenizer")),
    "first": False,
    "constants": False,
    "workers": 0,
}


class Engine(NamedTuple):
    """players: by name, "" the engine itself; see invariance.asked.Asking."""

    players: dict[str, Player]
    takes: Takes
    sizes: Sizes


@contextlib.contextmanager
def engine_of(arguments: argparse.Namespace, target: str) -> Iterator[Engine]:
    """TargetError if it can't be run; InconclusiveError if it takes or reports no token ids."""
    with contextlib.ExitStack() as stack:
        player = stack.enter_context(contextlib.closing(player_of(arguments, target)))
        takes = player.probe()
        if not (takes.abilities.takes_token_ids and takes.abilities.tells_token_ids):
            raise InconclusiveError(f"{target}: it takes or reports no token ids: nothing can be compared")
        sizes = sizes_of(arguments, player, takes)
        players = {"": player}
        if getattr(arguments, "vary", None) is not None:
            players["varied"] = stack.enter_context(contextlib.closing(varied(arguments, target)))
        if isinstance(player, StepsPlayer):
            other = stepped(arguments, target, {"max_num_batched_tokens": max(1, sizes.chunk // 3), "max_num_seqs": 2})
            players["sizes"] = stack.enter_context(contextlib.closing(other))
        for name in players:
            if name:
                players[name].probe()
        yield Engine(players, takes, sizes)


def player_of(arguments: argparse.Namespace, target: str) -> Player:
    """RequestError for a target of no known form."""
    if target.startswith(("http:", "https:")):
        return HttpPlayer(target, None, arguments.name, arguments.timeout)
    kind, _, rest = target.partition(":")
    if kind not in ("exec", "transformers") and re.fullmatch(r"[\w.]+:[\w.]+", target):
        player = stepped(arguments, target, {})
        return player if player.steps() else RoundsPlayer(PythonTarget(target, checkpoint_path(arguments.model)))
    return RoundsPlayer(rounds_target(arguments, target, kind, rest))


def rounds_target(arguments: argparse.Namespace, target: str, kind: str, rest: str) -> Target:
    if kind == "exec":
        return ExecTarget(
            rest, checkpoint_path(arguments.model), arguments.vocab_size or DEFAULT_VOCAB, arguments.timeout
        )
    if kind == "transformers":
        padded = rest.startswith("padded:")
        directory = rest.removeprefix("padded:")
        return TransformersTarget(checkpoint_path(directory or arguments.model), arguments.format, padded)
    raise RequestError(
        f"target {target!r}: expected http://HOST:PORT, package.module:factory, transformers:DIR or exec:COMMAND"
    )


def stepped(arguments: argparse.Namespace, target: str, other: dict[str, Any]) -> StepsPlayer:
    path, factory = checkpoint_path(arguments.model), load_factory(target)
    sizes = {"block_size": arguments.block_size or BLOCK, "max_num_batched_tokens": arguments.chunk or CHUNK}
    sizes |= {"max_num_seqs": arguments.max_num_seqs or SLOTS, **other}
    return StepsPlayer(target, path, lambda: factory(str(path), dict(sizes)))


def varied(arguments: argparse.Namespace, target: str) -> HttpPlayer:
    fields = parse_line(arguments.vary, "--vary")
    if not target.startswith(("http:", "https:")) or not isinstance(fields, dict) or not fields:
        raise RequestError(f"--vary {arguments.vary!r}: expected fields of a request to a server, a JSON object")
    return HttpPlayer(target, None, arguments.name, arguments.timeout, fields)


def sizes_of(arguments: argparse.Namespace, player: Player, takes: Takes) -> Sizes:
    vocab: int | None = arguments.vocab_size
    if vocab is None and isinstance(player, HttpPlayer):
        vocab = player.number_at(VOCAB_AT)
    return Sizes(
        block=arguments.block_size or BLOCK,
        chunk=arguments.chunk or CHUNK,
        slots=arguments.max_num_seqs or takes.slots or SLOTS,
        longest=min(arguments.max_model_len or math.inf, takes.longest or LONGEST),  # type: ignore[arg-type]
        vocab=vocab or DEFAULT_VOCAB,
    )


def smaller(first: Sizes, second: Sizes) -> Sizes:
    """What both engines take."""
    longest, vocab = min(first.longest, second.longest), min(first.vocab, second.vocab)
    return replace(first, longest=longest, vocab=vocab)


def format_name(arguments: argparse.Namespace) -> str:
    if arguments.format == AUTO:
        raise RequestError(f"--format {AUTO}: it is read from a checkpoint, and --against needs none: expected a name")
    return with_kv(arguments.format, arguments.kv_format)


def require(arguments: argparse.Namespace) -> None:
    """RequestError that names an option that is wrong, or has no use without a truth."""
    for name, value in NEED_TRUTH.items():
        if getattr(arguments, name, value) != value:
            raise RequestError(f"--{name.replace('_', '-')}: not with --against, which needs no truth")
    least = {"vocab_size": LEAST_VOCAB, "block_size": 1, "chunk": 2, "max_num_seqs": 1, "max_model_len": 32}
    for name, smallest in least.items():
        value = getattr(arguments, name)
        if value is not None and value < smallest:
            raise RequestError(f"--{name.replace('_', '-')} {value}: expected at least {smallest}")
    for name in ("minutes", "timeout"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < 1e7:
            raise RequestError(f"--{name} {value}: expected more than 0")
    if arguments.seed < 0:
        raise RequestError(f"--seed {arguments.seed}: expected at least 0")
    if arguments.against is not None and arguments.against != ITSELF and ":" not in arguments.against:
        raise RequestError(f"--against {arguments.against!r}: expected `{ITSELF}`, or another engine as TARGET")


def until(arguments: argparse.Namespace) -> float:
    return math.inf if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes


def add_options(parser: argparse._ActionsContainer) -> None:
    """Those that `check` and `fuzz` share."""
    against = (
        "without a checkpoint: compare the engine's answers with its own to the same request alone (itself), or with "
        "another engine's (a TARGET)"
    )
    add(parser, "--against ENGINE", against)
    add(parser, "--vocab-size N", f"with --against: ids below N are sent (as the server reports, else {DEFAULT_VOCAB})")
    add(parser, "--bitwise", "with --against: expect equal bits, as an engine that is batch-invariant promises")
