"""How the engine is run: options of all commands that run it."""

from __future__ import annotations

import argparse
from typing import Any

from lfm2np.checkpoint.loaded import draft_fixture
from lfm2np.cli.shared.terminal import progress_bar
from lfm2np.engine.draft_model import DRAFT_SAMPLING, ModelDrafter
from lfm2np.errors import RequestError
from lfm2np.loading import Model, load
from lfm2np.speculation.drafters import Drafter, NgramDrafter
from lfm2np.values import require_count
from scheduler import POLICIES

SIZES = (
    *("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks", "num_host_blocks"),
    *("policy", "waiting_served_ratio", "max_waiting_tokens", "num_speculative_tokens"),
)
SPECULATIVE = ("ngram", "draft", "none")


def add_engine_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("the engine")
    group.add_argument("--max-num-seqs", metavar="N", type=int, help="most requests that run at once (64)")
    group.add_argument("--max-num-batched-tokens", metavar="N", type=int, help="most tokens of one step (2048)")
    group.add_argument("--block-size", metavar="P", type=int, help="tokens in a cache block (16)")
    group.add_argument(
        "--num-blocks", metavar="N", type=int, help="cache blocks (as many as the requests need, within 1 GiB)"
    )
    group.add_argument("--policy", choices=sorted(POLICIES), help="scheduling policy (fcfs)")
    group.add_argument("--waiting-served-ratio", metavar="R", type=float, help="for --policy waiting-served (0.3)")
    group.add_argument("--max-waiting-tokens", metavar="N", type=int, help="for --policy waiting-served (20)")
    group.add_argument(
        "--num-host-blocks", metavar="N", type=int, help="blocks in host memory to swap preempted requests to (0)"
    )
    group.add_argument("--no-prefix-caching", action="store_true", help="do not reuse cache blocks of equal prefixes")
    group.add_argument("--seed", metavar="N", type=int, help="seed of requests that set none (0)")
    group.add_argument("--speculative", choices=SPECULATIVE, help="what proposes draft tokens (none)")
    group.add_argument(
        "--num-speculative-tokens", metavar="K", type=int, help="most draft tokens of a request in a step (4)"
    )
    draft_help = "for --speculative draft (without --model: the draft fixture)"
    group.add_argument("--draft-model", metavar="DIR", help=draft_help)
    group.add_argument("--draft-sampling", choices=DRAFT_SAMPLING, help="how the draft model proposes (greedy)")
    group.add_argument("--trace", metavar="FILE", help="write the run as JSON lines, for `lfm2np replay`")
    return group


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sizes and policy, as Engine takes them; what was not given is Engine's own choice."""
    given = {name: getattr(arguments, name) for name in SIZES if getattr(arguments, name) is not None}
    return given | {"prefix_caching": not arguments.no_prefix_caching}


def seed_of(arguments: argparse.Namespace) -> int:
    return require_count("seed", 0 if arguments.seed is None else arguments.seed, 0, 2**64 - 1)


def make_drafter(model: Model, arguments: argparse.Namespace) -> Drafter | None:
    """What --speculative asks for. RequestError for options that belong to another choice."""
    kind = arguments.speculative or "none"
    for name in ("draft_model", "draft_sampling"):
        if getattr(arguments, name) is not None and kind != "draft":
            raise RequestError(f"--{name.replace('_', '-')} goes with --speculative draft")
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
