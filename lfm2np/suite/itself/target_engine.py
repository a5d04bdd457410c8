"""The engine behind a TARGET, of any model: how it is played, what it takes, what sizes it has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lfm2np.checkpoint.strict_json import read_object
from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.errors import ConfigError, InconclusiveError
from lfm2np.oracle.engines.dialects.dialect import Location
from lfm2np.oracle.engines.exec_target import ExecTarget
from lfm2np.oracle.engines.named import target_named
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.target import Abilities, Target
from lfm2np.suite.fuzz.watched import WatchedServer
from lfm2np.suite.itself.asked import Asking
from lfm2np.suite.itself.questions import DEFAULT_VOCAB, Sizes

VOCAB_AT = (Location("/v1/models", ("data", 0, "meta", "n_vocab")),)  # llama.cpp's
BLOCK, CHUNK, SLOTS, LONGEST = 16, 512, 8, 2048
HINTS = {"block_size": BLOCK, "max_num_batched_tokens": CHUNK, "max_num_seqs": SLOTS}
HTTP = ("http:", "https:")


@dataclass(frozen=True)
class Options:
    """What a user says of an engine.

    model   checkpoint for a factory or a process; servers need none
    sizes   by the names of protocol.TOLD; without one, or with None: as the engine reports, else the constants above
    vocab   token ids below it are sent; None: as the engine reports, else DEFAULT_VOCAB
    name    of the model, for a server with more than one
    timeout seconds for a response
    format_name  that explains its rounding, and in which transformers computes
    """

    model: Path
    sizes: Mapping[str, int | None]
    vocab: int | None = None
    name: str | None = None
    timeout: float = 60.0
    format_name: str = "float32"

    def size(self, name: str, otherwise: int) -> int:
        return self.sizes.get(name) or otherwise


@contextlib.contextmanager
def asking_of(text: str, options: Options) -> Iterator[Asking]:
    """TargetError if it can't be run; InconclusiveError if it takes or reports no token ids."""
    with contextlib.ExitStack() as stack:
        player = stack.enter_context(contextlib.closing(player_of(text, options)))
        abilities = player.probe()
        if not (abilities.takes_token_ids and abilities.tells_token_ids):
            raise InconclusiveError(f"{text}: it takes or reports no token ids: nothing can be compared")
        sizes = sizes_of(options, player, abilities)
        players: dict[str, Target] = {"": player}
        if isinstance(player, PythonTarget) and abilities.can_abort:  # it steps
            other = {**options.sizes, "max_num_batched_tokens": max(1, sizes.chunk // 3)}
            players["sizes"] = stack.enter_context(contextlib.closing(player_of(text, replace(options, sizes=other))))
            players["sizes"].probe()
        yield Asking(players, abilities, sizes, options.format_name)


def player_of(
    text: str,
    options: Options,
    tokenizer: Tokenizer | None = None,
    at_once: int | None = None,
    hints: Mapping[str, int] = HINTS,
) -> Target:
    """RequestError for a target of no known form.

    at_once  as target_named has it, of one that is no server
    hints    what a factory is given of sizes that `options` does not say
    """
    if text.startswith(HTTP):
        return WatchedServer(text, tokenizer, options.name, options.timeout)
    sizes = {name: options.size(name, size) for name, size in hints.items()}
    vocab = options.vocab or DEFAULT_VOCAB
    return target_named(
        text,
        options.model,
        vocab,
        tokenizer,
        options.format_name,
        at_once=at_once,
        timeout=options.timeout,
        sizes=sizes,
    )


def sizes_of(options: Options, player: Target, abilities: Abilities) -> Sizes:
    reported = player.number_at(VOCAB_AT) if options.vocab is None and isinstance(player, WatchedServer) else None
    longest = abilities.longest or LONGEST
    if isinstance(player, PythonTarget | ExecTarget):  # made from the checkpoint
        longest = min(longest, positions_of(options.model) or longest)
    return Sizes(
        block=options.size("block_size", abilities.block or BLOCK),
        chunk=options.size("max_num_batched_tokens", abilities.chunk or CHUNK),
        slots=options.size("max_num_seqs", abilities.slots or SLOTS),
        longest=min(longest, options.size("max_model_len", longest)),
        vocab=options.vocab or reported or DEFAULT_VOCAB,
    )


def positions_of(model: Path) -> int | None:
    """max_position_embeddings of a checkpoint of any model; None where its config.json has none that is a size."""
    try:
        config = read_object(model / "config.json", ConfigError)
    except ConfigError:
        return None
    positions = config.get("max_position_embeddings")
    return positions if type(positions) is int and positions > 0 else None


def smaller(first: Sizes, second: Sizes) -> Sizes:
    """What both engines take."""
    return replace(first, longest=min(first.longest, second.longest), vocab=min(first.vocab, second.vocab))
