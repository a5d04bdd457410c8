"""The engine behind a TARGET, of any model: how it is played, what it takes, what sizes it has."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lfm2np.errors import InconclusiveError, RequestError
from lfm2np.oracle.engines.dialects.dialect import Location
from lfm2np.oracle.engines.exec_target import ExecTarget
from lfm2np.oracle.engines.protocol import load_factory
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.target import Target
from lfm2np.oracle.engines.transformers_target import TransformersTarget
from lfm2np.suite.fuzz.play_engine import RoundsPlayer, StepsPlayer
from lfm2np.suite.fuzz.play_http import HttpPlayer
from lfm2np.suite.fuzz.played import Player, Takes
from lfm2np.suite.itself.questions import DEFAULT_VOCAB, Sizes

VOCAB_AT = (Location("/v1/models", ("data", 0, "meta", "n_vocab")),)  # llama.cpp's
BLOCK, CHUNK, SLOTS, LONGEST = 16, 512, 8, 2048
HTTP = ("http:", "https:")


@dataclass(frozen=True)
class Options:
    """What a user says of an engine; None: as it reports, else the constants above.

    model   checkpoint for a factory or a process; servers need none
    name    of the model, for a server with more than one
    timeout seconds for a response
    dtype   in which transformers computes
    vary    fields of a request that must not change its answer
    """

    model: Path
    name: str | None = None
    timeout: float = 60.0
    dtype: str = "float32"
    vocab: int | None = None
    block: int | None = None
    chunk: int | None = None
    slots: int | None = None
    longest: int | None = None
    vary: Mapping[str, Any] | None = None


class Engine(NamedTuple):
    """players: by name, "" the engine itself; see asked.Asking."""

    players: dict[str, Player]
    takes: Takes
    sizes: Sizes


@contextlib.contextmanager
def engine_of(target: str, options: Options) -> Iterator[Engine]:
    """TargetError if it can't be run; InconclusiveError if it takes or reports no token ids."""
    with contextlib.ExitStack() as stack:
        player = stack.enter_context(contextlib.closing(player_of(target, options)))
        takes = player.probe()
        if not (takes.abilities.takes_token_ids and takes.abilities.tells_token_ids):
            raise InconclusiveError(f"{target}: it takes or reports no token ids: nothing can be compared")
        sizes = sizes_of(options, player, takes)
        players = {"": player}
        if options.vary is not None:
            if not isinstance(player, HttpPlayer):
                raise RequestError(f"fields to vary: only of requests to a server, not to {target}")
            players["varied"] = HttpPlayer(target, None, options.name, options.timeout, options.vary)
        if isinstance(player, StepsPlayer):
            players["sizes"] = stepped(target, options, {"max_num_batched_tokens": max(1, sizes.chunk // 3)})
        for other in list(players.values())[1:]:
            stack.enter_context(contextlib.closing(other)).probe()
        yield Engine(players, takes, sizes)


def player_of(target: str, options: Options) -> Player:
    """RequestError for a target of no known form."""
    if target.startswith(HTTP):
        return HttpPlayer(target, None, options.name, options.timeout)
    kind, _, rest = target.partition(":")
    if kind not in ("exec", "transformers") and re.fullmatch(r"[\w.]+:[^\W\d][\w.]*", target):
        player = stepped(target, options, {})
        return player if player.steps() else RoundsPlayer(PythonTarget(target, options.model))
    return RoundsPlayer(rounds_target(target, kind, rest, options))


def rounds_target(target: str, kind: str, rest: str, options: Options) -> Target:
    if kind == "exec":
        return ExecTarget(rest, options.model, options.vocab or DEFAULT_VOCAB, options.timeout)
    if kind == "transformers":
        padded = rest.startswith("padded:")
        return TransformersTarget(rest.removeprefix("padded:") or options.model, options.dtype, padded)
    raise RequestError(
        f"target {target!r}: expected http://HOST:PORT, package.module:factory, transformers:DIR or exec:COMMAND"
    )


def stepped(target: str, options: Options, other: Mapping[str, int]) -> StepsPlayer:
    factory = load_factory(target)
    sizes = {
        "block_size": options.block or BLOCK,
        "max_num_batched_tokens": options.chunk or CHUNK,
        "max_num_seqs": options.slots or SLOTS,
        **other,
    }
    return StepsPlayer(target, options.model, lambda: factory(str(options.model), dict(sizes)))


def sizes_of(options: Options, player: Player, takes: Takes) -> Sizes:
    vocab = options.vocab
    if vocab is None and isinstance(player, HttpPlayer):
        vocab = player.number_at(VOCAB_AT)
    longest = takes.longest or LONGEST
    return Sizes(
        block=options.block or BLOCK,
        chunk=options.chunk or CHUNK,
        slots=options.slots or takes.slots or SLOTS,
        longest=min(longest, options.longest or longest),
        vocab=vocab or DEFAULT_VOCAB,
    )


def smaller(first: Sizes, second: Sizes) -> Sizes:
    """What both engines take."""
    return replace(first, longest=min(first.longest, second.longest), vocab=min(first.vocab, second.vocab))
