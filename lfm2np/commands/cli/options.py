"""How the engine is run: options of all commands that run it."""

from __future__ import annotations

import argparse
from typing import Any

from lfm2np.checkpoint.loaded import draft_fixture
from lfm2np.commands.cli.shared.parser import add, option, to_write
from lfm2np.commands.cli.shared.terminal import progress_bar
from lfm2np.engine.draft_model import DRAFT_SAMPLING, ModelDrafter
from lfm2np.engine.drafters import Drafter, NgramDrafter
from lfm2np.engine.loading import Model, load
from lfm2np.errors import RequestError
from lfm2np.values import require_count
from scheduler import POLICIES

SIZES = (
    *("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"),
    *("policy", "waiting_served_ratio", "max_waiting_tokens", "num_speculative_tokens"),
)
SPECULATIVE = ("ngram", "draft", "none")


def add_engine_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("the engine")
    add(group, "--max-num-seqs N", "most requests that run at once (64)")
    add(group, "--max-num-batched-tokens N", "most tokens of one step (2048)")
    add(group, "--block-size P", "tokens in a cache block (16)")
    add(group, "--num-blocks N", "cache blocks (as many as the requests need, within 1 GiB)")
    add(group, "--policy", "scheduling policy (fcfs)", choices=sorted(POLICIES))
    add(group, "--waiting-served-ratio R", "for --policy waiting-served (0.3)")
    add(group, "--max-waiting-tokens N", "for --policy waiting-served (20)")
    add(group, "--no-prefix-caching", "do not reuse cache blocks of equal prefixes")
    add(group, "--seed N", "seed of requests that set none (0)")
    add(group, "--speculative", "what proposes draft tokens (none)", choices=SPECULATIVE)
    add(group, "--num-speculative-tokens K", "most draft tokens of a request in a step (4)")
    add(group, "--draft-model DIR", "for --speculative draft (without --model: the draft fixture)")
    add(group, "--draft-sampling", "how the draft model proposes (greedy)", choices=DRAFT_SAMPLING)
    add(group, "--trace FILE", "write the run as JSON lines, for `lfm2np draw`", type=to_write)
    return group


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sizes and policy, as Engine takes them; what was not given is Engine's own choice. RequestError for options that
    belong to another policy."""
    for name in ("waiting_served_ratio", "max_waiting_tokens"):
        if getattr(arguments, name) is not None and arguments.policy != "waiting-served":
            raise RequestError(f"{option(name)} goes with --policy waiting-served")
    given = {name: getattr(arguments, name) for name in SIZES if getattr(arguments, name) is not None}
    return given | {"prefix_caching": not arguments.no_prefix_caching}


def seed_of(arguments: argparse.Namespace) -> int:
    return require_count("seed", 0 if arguments.seed is None else arguments.seed, 0, 2**64 - 1)


def make_drafter(model: Model, arguments: argparse.Namespace) -> Drafter | None:
    """What --speculative asks for. RequestError for options that belong to another choice."""
    kind = arguments.speculative or "none"
    for name in ("draft_model", "draft_sampling"):
        if getattr(arguments, name) is not None and kind != "draft":
            raise RequestError(f"{option(name)} goes with --speculative draft")
    if arguments.num_speculative_tokens is not None and kind == "none":
        raise RequestError("--num-speculative-tokens goes with --speculative ngram or draft")
    if kind == "none":
        return None
    if kind == "ngram":
        return NgramDrafter()
    if arguments.draft_model is None and arguments.model is not None:
        raise RequestError("--speculative draft: --model needs a --draft-model of the same vocabulary")
    with progress_bar("loading the draft model") as show:
        small = load(arguments.draft_model or draft_fixture(), arguments.numerics, show)
    return ModelDrafter(small, model, arguments.draft_sampling or "greedy")
