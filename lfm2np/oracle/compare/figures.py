"""Figures of a comparison, and the digest of their bits.

Sums over positions are math.fsum's, correctly rounded and so independent of order; roots are IEEE's, exponentials
elementary's; a percentile is the value at its rank. So every figure has the same bits on every machine.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lfm2np.oracle.compare.sequences import GREEDY, Scored
from lfm2np.truth import elementary

Result = Mapping[str, Any]  # of one sequence: see positions.py
Figures = dict[str, Any]
MOST_FLIPS = 100  # that are listed


def figures_of(
    scored: Sequence[Scored],
    results: Sequence[Result],
    number: int,
    parts: Sequence[str],
    tried: Sequence[str],
    sparse_layers: Sequence[int],
) -> Figures:
    """Of the quantised checkpoint of that number; of all `parts` those in `tried` have other numbers.

    Sequences with an error are left out, and counted under `failed`. Figures without data are None.
    """
    kept = [
        (sequence, result["base"], result["quantised"][number])
        for sequence, result in zip(scored, results, strict=True)
        if "error" not in result["quantised"][number]
    ]
    compared = [entry for entry in kept if entry[0].source != GREEDY]
    kls = [value for _, _, other in compared for value in other["kl"].tolist()]
    listed = [flip for entry in compared for flip in flips(*entry)]
    listed.sort(key=lambda flip: (-flip["margin"], flip["name"], flip["row"]))
    clear = sum(not flip["near_tie"] for flip in listed)
    return {
        "failed": len(scored) - len(kept),
        "positions": len(kls),
        "kl": {
            "mean": mean(kls) if kls else None,
            "median": ranked(kls, 50),
            "p99": ranked(kls, 99),
            "largest": max(kls, default=None),
        },
        "flips": {"count": len(listed), "clear": clear, "agreement": share(len(kls) - len(listed), len(kls))},
        "logprobs": changes(compared),
        "perplexities": perplexities(compared),
        "layers": by_layer(compared),
        "routes": routes(compared, sparse_layers),
        "parts": by_part(compared, parts, tried),
        "greedy": greedy([entry for entry in kept if entry[0].source == GREEDY]),
        "listed_flips": listed[:MOST_FLIPS],
    }


Kept = tuple[Scored, Result, Result]  # of one sequence the base's columns and the other's


def flips(sequence: Scored, base: Result, other: Result) -> Iterator[Figures]:
    """Where the greedy token differs. A near tie: the base's margin is at most a bfloat16 step of its logits."""
    for row in np.flatnonzero(base["best"] != other["best"]).tolist():
        margin, step = float(base["margins"][row]), float(base["steps"][row])
        yield {
            "source": sequence.source,
            "name": sequence.name,
            "row": sequence.start + row,
            "base_token_id": int(base["best"][row]),
            "token_id": int(other["best"][row]),
            "margin": margin,
            "kl": float(other["kl"][row]),
            "near_tie": margin <= step,
        }


def changes(compared: Sequence[Kept]) -> Figures | None:
    """Of the log-probability of the given token, nats: quantised minus base."""
    changes = [value for _, base, other in compared for value in (other["logprobs"] - base["logprobs"]).tolist()]
    if not changes:
        return None
    return {
        "tokens": len(changes),
        "mean": mean(changes),
        "rms": math.sqrt(mean([value * value for value in changes])),
        "lowest": min(changes),
        "highest": max(changes),
    }


def perplexities(compared: Sequence[Kept]) -> list[Figures]:
    """By source; the ratio is the exponential of the mean loss of log-probability."""
    entries = []
    for source in dict.fromkeys(sequence.source for sequence, _, _ in compared):
        pairs = [
            pair
            for sequence, base, other in compared
            if sequence.source == source
            for pair in zip(base["logprobs"].tolist(), other["logprobs"].tolist(), strict=True)
        ]
        if pairs:
            means = [mean([-value for value in values]) for values in zip(*pairs, strict=True)]
            loss = mean([base - other for base, other in pairs])
            figures = {"base": exp(means[0]), "quantised": exp(means[1]), "ratio": exp(loss)}
            entries.append({"source": source, "tokens": len(pairs), **figures})
    return entries


def by_layer(compared: Sequence[Kept]) -> list[Figures]:
    """Relative RMS difference of the residual stream after the embedding, each layer and the last norm."""
    if not compared:
        return []
    count = compared[0][1]["squares"].shape[1]
    names = ["embedding", *(f"layer {index}" for index in range(count - 2)), "final norm"]
    entries = []
    for index, name in enumerate(names):
        size = math.fsum(value for _, base, _ in compared for value in base["squares"][:, index].tolist())
        off = math.fsum(value for _, _, other in compared for value in other["squares"][:, index].tolist())
        entries.append({"name": name, "error": math.sqrt(off / size) if size else math.sqrt(off)})
    return entries


def routes(compared: Sequence[Kept], sparse_layers: Sequence[int]) -> list[Figures] | None:
    """In how many rows a token's experts differ, by sparse layer; None without such layers."""
    if not compared or "elsewhere" not in compared[0][2]:
        return None
    moved = np.concatenate([other["elsewhere"] for _, _, other in compared])
    columns = zip(sparse_layers, moved.T, strict=True)
    return [{"layer": layer, "moved": int(column.sum()), "rows": len(moved)} for layer, column in columns]


def by_part(compared: Sequence[Kept], parts: Sequence[str], tried: Sequence[str]) -> list[Figures]:
    """The cost of each part if only it is quantised; a part with the same numbers costs nothing.

    None for a part that overflows in the base at any position where both networks do not.
    """
    entries: list[Figures] = []
    for name in parts:
        values, count = [0.0], 0
        if name in tried:
            place = tried.index(name)
            values = [value for _, _, other in compared for value in other["alone"][place].tolist()]
            count = sum(int(other["flips"][place]) for _, _, other in compared)
        entry = {"name": name, "changed": name in tried}
        costs: Figures = {"kl": None, "largest": None, "flips": None}
        if values and all(map(math.isfinite, values)):
            costs = {"kl": mean(values), "largest": max(values), "flips": count}
        entries.append({**entry, **costs})
    return entries


def greedy(kept: Sequence[Kept]) -> Figures | None:
    """Greedy answers of the base and the quantised network, up to the first difference."""
    if not kept:
        return None
    answers = []
    for sequence, base, other in kept:
        differing = np.flatnonzero(base["best"] != other["best"]).tolist()
        at = differing[0] if differing else None
        pair = (None, None) if at is None else (int(base["best"][at]), int(other["best"][at]))
        tokens = sequence.stop - sequence.start
        same = {"name": sequence.name, "tokens": tokens, "same": tokens if at is None else at}
        answers.append({**same, "base_token_id": pair[0], "token_id": pair[1]})
    return {
        "requests": len(answers),
        "diverged": sum(answer["token_id"] is not None for answer in answers),
        "tokens": sum(answer["tokens"] for answer in answers),
        "same": sum(answer["same"] for answer in answers),
        "answers": answers,
    }


# --- numbers


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return math.fsum(values) / len(values)


def ranked(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least `percent` of 100 do not exceed."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)] if values else None


def share(count: int, total: int) -> float | None:
    return count / total if total else None


def exp(x: float) -> float | None:
    """None beyond what elementary's exponential reaches."""
    return float(elementary.exp(np.array([x], np.float64))[0]) if x <= elementary.EXP_MAX else None


def digest(figures: Sequence[Figures]) -> str:
    """SHA-256, in hex, of each figure's path and bits: float64, little-endian; texts as they are."""
    sha = hashlib.sha256()
    for place, value in leaves(list(figures), ""):
        is_number = isinstance(value, int | float)
        content = struct.pack("<d", float(value)) if is_number else str(value).encode()
        sha.update(place.encode() + b"\0" + content + b"\n")
    return sha.hexdigest()


def leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Every number and text in objects and lists, with its path; names in alphabetical order."""
    if isinstance(value, dict):
        for name in sorted(value):
            yield from leaves(value[name], f"{place}.{name}")
    elif isinstance(value, list):
        yield f"{place}.length", len(value)
        for index, item in enumerate(value):
            yield from leaves(item, f"{place}[{index}]")
    else:
        yield place, value
