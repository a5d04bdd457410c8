"""What an engine must offer to be tested: a few methods, in levels. The rest is reported skipped.

    factory(model: str, sizes: dict[str, object]) -> engine

makes an engine for a checkpoint directory. Requests and answers are those of records.py. `sizes` are hints, by the
names of SIZES; an engine ignores those that it does not have. An engine is any object with some of these methods:

level a   generate(requests) -> for each request a list of its n answers, in the order of the requests
level b   score(token_ids) -> the log-probability of each token but the first, given those before it
level c   add(request); step() -> {request id: its n answers so far} of those that changed; abort(request_id) ->
          that request's answers so far, a list as step() has it, with finish_reason "abort" or None;
          has_unfinished (a property)
level d   each of these by itself:
          fork(request_id, new_id): a new request that goes on from where the first stands, with its parameters
          preempt(request_id): takes its memory away; it goes on later
          state() -> {"free_blocks", "num_blocks", "free_slots", "num_slots", "step_tokens"}, those that it knows
          metrics() -> counters: cached_tokens is read
          verify(): raises if memory holds anything but what the requests demand
          encode(prompt) -> the token ids of a prompt: a text, or the messages of a chat
An attribute of such a name that can't be called, such as an array `state`, is no method.

What an engine can't do, although it has the method, it names in `lacks`, a set of FEATURES or SIZES: examples are then
drawn without it, and properties about nothing else are skipped. An engine for published checkpoints only lacks
"odd-shapes" and "overflow". If it raises on an example, the failure names the undeclared features that this uses.

Lengths of prompts and outputs are drawn small, and around multiples of the engine's blocks and chunks. An engine whose
sizes differ from the hints reports them in `sizes`, a mapping by names of TOLD; max_model_len is the most tokens of a
request.

A request that can't be met must raise RequestError or ValueError when it is added, and harm no other ("refusals").
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lfm2np.errors import RequestError
from lfm2np.values import show

SIZES = (
    "block_size",  # tokens of a cache block
    "num_blocks",  # blocks of the cache
    "max_num_seqs",  # requests that run at once
    "max_num_batched_tokens",  # tokens of a step
    "prefix_caching",
    "policy",
    "watermark",  # share of the blocks that an admission leaves free
    "seed",  # of requests without one
    "check",  # hold memory against the truth after each step
    "drafter",  # None, "ngram", or {request id: output to propose}
    "num_speculative_tokens",
)
FEATURES = {  # what an engine may lack; a word that takes more away stands behind those that take less
    # of a request
    "samples": "n > 1",
    "processors": "penalties, biases, masks, filters, min_tokens",
    "stops": "stop_token_ids, and ending at EOS",
    "stop-strings": "stop strings",
    "logprobs": "log-probabilities of a request's own tokens or of its prompt",
    "priorities": "priorities other than 0",
    "salts": "cache_salt",
    "sampling": "temperatures other than 0",
    "reference-noise": "tokens drawn with the reference's noise: without it only their probabilities are checked",
    # of a model
    "odd-shapes": "models of shapes that no published checkpoint has: without attention or without convolution, with "
    "conv_bias, other taps, an untied head, odd numbers of heads, head_dim other than 64, widths that are no multiple "
    "of 64, other constants, other numbers of experts",
    "mixture-of-experts": "models of model_type lfm2_moe",
    "lfm3": "models of model_type lfm3",
    "long-contexts": "prompts of more than 14 tokens, and more than 6 new ones",
    "overflow": 'a request whose numbers overflow ends with finish_reason "error"',
    # of both
    "refusals": "a request that can't be met raises RequestError or ValueError when it is added",
}
TOLD = ("block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len")  # what an engine's `sizes` may say
LEVELS = {  # what a property may need, and the methods that this takes
    "generate": ("generate",),
    "score": ("score",),
    "steps": ("add", "step", "abort", "has_unfinished"),
    "fork": ("fork",),
    "preempt": ("preempt",),
    "state": ("state",),
    "metrics": ("metrics",),
    "verify": ("verify",),
    "encode": ("encode",),
}
PROPERTIES = ("has_unfinished",)  # of these; the others are called
Factory = Callable[[str, dict[str, Any]], Any]


def offers(engine: Any, name: str) -> bool:
    """Whether the engine has this method, or property, of the protocol."""
    return hasattr(engine, name) and (name in PROPERTIES or callable(getattr(engine, name)))


def missing(engine: Any, needs: Sequence[str]) -> str | None:
    """Why an engine can't be asked this, or None."""
    for need in needs:
        if need in lacking(engine):
            return f"the engine lacks {need}"
        for method in LEVELS.get(need, ()):
            if not offers(engine, method):
                kind = type(getattr(engine, method, None)).__name__
                why = f": its attribute {method}, of type {kind}, can't be called" if hasattr(engine, method) else ""
                return f"the engine has no {method}(){why}"
    return None


def lacking(engine: Any) -> frozenset[str]:
    """What it says that it lacks. RequestError for a name that is neither a feature nor a size."""
    return names_in("lacks", getattr(engine, "lacks", ()), {*FEATURES, *SIZES}, "names of FEATURES or SIZES")


def names_in(attribute: str, given: Any, known: Collection[str], expected: str) -> frozenset[str]:
    """What an adapter declares. RequestError for an unknown name, and for what need not end, such as a generator."""
    if isinstance(given, str) or not isinstance(given, Collection):
        raise RequestError(f"{attribute} {show(given)}: expected a set of names")
    for name in given:
        if not isinstance(name, str) or name not in known:
            raise RequestError(f"{attribute} {show(name)}: expected {expected}")
    return frozenset(given)


def told(engine: Any) -> dict[str, int]:
    """The sizes that it says are its own. RequestError for a name that is not of TOLD."""
    sizes, expected = getattr(engine, "sizes", {}), f"names among {', '.join(TOLD)}"
    if not isinstance(sizes, Mapping):
        raise RequestError(f"sizes {show(sizes)}: expected a mapping by {expected}")
    names_in("sizes", tuple(sizes), TOLD, expected)
    return dict(sizes)


def load_factory(name: str, what: str = "engine") -> Factory:
    """The factory "package.module:name"; the current folder is searched too. RequestError if there is none.

    what    the factory makes, for errors
    """
    module, _, path = name.partition(":")
    if not module or not path:
        raise RequestError(f"{what} {name!r}: expected package.module:factory")
    search_current_folder()
    try:
        target: Any = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as problem:
        raise RequestError(f"{what} {name!r}: can't be imported: {problem}") from None
    if not callable(target):
        raise RequestError(f"{what} {name!r}: {type(target).__name__}, expected a factory")
    factory: Factory = target
    return factory


def search_current_folder() -> None:
    """First, as `python -m` does: a console command would find what is installed only, wherever it is called.

    It stays on the path, as an engine may import its neighbours late. Not where Python itself must not (-P).
    """
    with contextlib.suppress(FileNotFoundError):  # the folder has been removed
        here = str(Path.cwd())
        if not sys.flags.safe_path and not {"", here} & set(sys.path):
            sys.path.insert(0, here)


def sizes_of(hints: Mapping[str, Any]) -> dict[str, Any]:
    """The hints, checked to be known ones."""
    names_in("size", tuple(hints), SIZES, f"one of {', '.join(SIZES)}")
    return dict(hints)
