"""Golden vectors: prompts, and what a right engine answers, for engines' own tests; as Project Wycheproof has them for
cryptography. `make` computes a set, `verify` computes it again and compares, bit for bit.

The arithmetic is exact, so tokens, logits, log-probabilities and activations are the same on every machine. Bounds of
noise are not, as the emulations behind them use the machine's float32 products: they are rounded to two digits, not
compared, and what follows from them (`may_tie_in`) follows from the rounded ones.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lfm2np
from lfm2np import reference
from lfm2np.checkpoint import INDEX, SINGLE
from lfm2np.engine import Engine
from lfm2np.errors import CheckpointError, NumericsError, ProofError, RequestError
from lfm2np.loading import Model
from lfm2np.oracle.emulate import FORMATS
from lfm2np.oracle.judge import FLOAT32_UNITS
from lfm2np.oracle.noise import Noise, Truth, noise_of, truth_of
from lfm2np.oracle.record import record
from lfm2np.oracle.vectors_chosen import Chosen, choose, mentioned
from lfm2np.oracle.vectors_files import TENSORS, VectorSet, tensors_bytes
from lfm2np.oracle.vectors_notes import NOTES
from lfm2np.oracle.vectors_plain import allowances
from lfm2np.oracle.verdict import LIMIT
from lfm2np.sampling_params import SamplingParams
from lfm2np.strict_json import is_present, read_object

Array = NDArray[Any]
Ids = tuple[int, ...]
Key = tuple[Ids, Ids]  # prompt, new tokens
Progress = Callable[[str, int, int], None]  # what is being done, done, total
BOUNDED = ("float32", "bfloat16", "float16")  # formats that bounds are made for
TOP = 8  # likeliest tokens kept of each position
LOGITS = "logits"


@dataclass(frozen=True)
class Difference:
    """One thing that a set says and the model does not."""

    vector: str | None  # None: of the set as a whole
    position: int | None
    what: str
    found: str  # in the set
    expected: str  # computed

    def __str__(self) -> str:
        place = [] if self.vector is None else [self.vector]
        place += [] if self.position is None else [f"position {self.position}"]
        return f"{' '.join(place) or 'set'}: {self.what}: {self.found}, expected {self.expected}"


def silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""


# --- make


def make(model: Model, seed: int = 0, only: Collection[str] | None = None, progress: Progress = silent) -> VectorSet:
    """The set of a model; `only` some vectors, by their ids, and those that their schedules name.

    RequestError for another arithmetic than `exact`, an unknown id or a vocabulary of one token; ProofError if the
    engine's tokens are not the reference's.
    """
    require_exact(model)
    if seed < 0:
        raise RequestError(f"seed {seed}: expected at least 0")
    chosen = picked(choose(model.config, model.tokenizer if model.has_tokenizer else None, seed), only)
    keys = [(one.prompt_token_ids, tokens) for one, tokens in zip(chosen, greedy(model, chosen, progress), strict=True)]
    positions = positions_of(model, list(dict.fromkeys(keys)), progress)
    tensors: dict[str, Array] = {}
    vectors = []
    for one, key in zip(chosen, keys, strict=True):
        kept = kept_tensors(model, key, kept_names(model, one.keep))
        tensors |= {f"{one.id}/{name}": values for name, values in kept.items()}
        vectors.append(vector_json(one, key[1], positions[key], list(kept)))
    sha256 = hashlib.sha256(tensors_bytes(tensors)).hexdigest()
    used = {flag for one in chosen for flag in one.flags}
    document = {
        "format_version": 1,
        "generator": {"name": "lfm2np", "version": lfm2np.__version__},
        "seed": seed,
        **rules_for(vectors[0]["positions"][0]["noise"]),
        "model": {"name": model.path.resolve().name, **model_facts(model)},
        "tensors": {"file": TENSORS, "sha256": sha256},
        "notes": {name: note for name, note in NOTES.items() if name in used},
        "vectors": vectors,
    }
    return VectorSet(document, tensors, sha256)


def require_exact(model: Model) -> None:
    if model.numerics.name != "exact":
        raise RequestError(f"numerics {model.numerics.name}: expected exact, whose bits are the same everywhere")
    if model.config.vocab_size < 2:
        raise RequestError(f"vocab_size={model.config.vocab_size}: expected at least 2, for a runner-up")


def picked(chosen: Sequence[Chosen], only: Collection[str] | None) -> list[Chosen]:
    """In their order, with all that the schedules of those picked name."""
    by_id = {one.id: one for one in chosen}
    wanted = set(by_id if only is None else only)
    for name in sorted(wanted - by_id.keys()):
        raise RequestError(f"vector {name!r}: expected some of {', '.join(by_id)}")
    while more := {name for one in chosen if one.id in wanted for name in mentioned(one)} - wanted:
        wanted |= more
    return [one for one in chosen if one.id in wanted]


def greedy(model: Model, chosen: Sequence[Chosen], progress: Progress) -> list[Ids]:
    """New tokens of each, batched; `positions_of` holds them against the reference."""
    engine, found = Engine(model), {}
    for one in chosen:
        params = SamplingParams(temperature=0.0, max_tokens=one.new, ignore_eos=True)
        engine.add_request(one.id, one.prompt_token_ids, params)
    for output in engine.stream():
        if output.finished:
            found[output.request_id] = tuple(output.outputs[0].token_ids)
            progress("generating", len(found), len(chosen))
    return [found[one.id] for one in chosen]


def positions_of(model: Model, keys: Sequence[Key], progress: Progress) -> dict[Key, list[dict[str, Any]]]:
    """What the set says of each new token of these sequences."""
    exact, truths = [], []
    for done, (prompt, tokens) in enumerate(keys, 1):
        truths.append(truth_of(model, (*prompt, *tokens), {}))
        exact.append([exact_position(*rows) for rows in zip(*exact_rows(model, (prompt, tokens)), strict=True)])
        for index, (token, known) in enumerate(zip(tokens, exact[-1], strict=True)):
            if known["top"][0][0] != token:
                raise ProofError(f"new token {index}: the engine's is {token}, the reference's {known['top'][0][0]}")
        progress("scoring", done, len(keys))
    noises: dict[str, list[Noise]] = {}
    for name in BOUNDED:
        try:
            noises[name] = noise_of(model, truths, name, progress=functools.partial(progress, name))
        except NumericsError:
            continue  # the format can't hold this model's numbers: there are no bounds for it
    found = {}
    for place, (prompt, tokens) in enumerate(keys):
        known = {name: each[place] for name, each in noises.items()}
        first = len(prompt) - 1
        found[prompt, tokens] = [
            bounded(one, truths[place], known, first + index) for index, one in enumerate(exact[place])
        ]
    return found


def bounded(exact: Mapping[str, Any], truth: Truth, noises: Mapping[str, Noise], row: int) -> dict[str, Any]:
    """A position with its bounds and with what follows from them."""
    best, *others = (truth.at(row, token_id) for token_id, _, _ in exact["top"])
    noise = {
        name: {
            "logprob": two_digits(one.scale(truth, row, best)),
            "gaps": [two_digits(one.gap_scale(row, best, other)) for other in others],
        }
        for name, one in noises.items()
    }
    return {**exact, "noise": noise, **ties({**exact, "noise": noise}, rules_for(noises))}


def rules_for(formats: Iterable[str]) -> dict[str, Any]:
    """What judging an answer takes, beside the positions: see vectors_plain.py."""
    bits = {name: {"bits": FORMATS[name].bits} for name in formats}
    return {"limit": LIMIT, "float32_units": FLOAT32_UNITS, "formats": bits}


def two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def ties(position: Mapping[str, Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """`result` and `may_tie_in`: the formats under which another token of `top` is no further behind than they may."""
    behind = [position["top"][0][2] - logit for _, _, logit in position["top"]]
    names = []
    for name in rules["formats"]:
        allowed = allowances(position, name, rules)
        if any(gap <= most for gap, most in zip(behind[1:], allowed[1:], strict=True)):
            names.append(name)
    return {"result": "may_tie" if names else "must_match", "may_tie_in": names}


def vector_json(one: Chosen, tokens: Ids, positions: list[dict[str, Any]], tensors: list[str]) -> dict[str, Any]:
    return {
        "id": one.id,
        "flags": list(one.flags),
        "comment": one.comment,
        "prompt_token_ids": list(one.prompt_token_ids),
        "prompt_text": one.prompt_text,
        "schedule": [dict(hint) for hint in one.schedule],
        "token_ids": list(tokens),
        "tensors": tensors,
        "positions": positions,
    }


# --- what is exact


def exact_rows(model: Model, key: Key) -> tuple[Array, Array]:
    """Logits [N, V] float32 and log-probabilities [N, V] float64 of the N new tokens' positions, in one pass."""
    prompt, tokens = key
    states = reference.hidden_states(model.weights, model.config, model.numerics, (*prompt, *tokens[:-1]))
    logits = reference.output_logits(model.weights, model.numerics, states[len(prompt) - 1 :])
    return logits, model.numerics.log_softmax(logits)


def exact_position(logits: Array, logprobs: Array) -> dict[str, Any]:
    """Of one row [V] of each: what is the same on every machine."""
    best = np.argsort(-logits, kind="stable")[:TOP].tolist()
    return {
        "logprob": float(logprobs[best[0]]),
        "top": [[one, float(logprobs[one]), float(logits[one])] for one in best],
        "margin": float(logits[best[0]]) - float(logits[best[1]]),
        "largest_logit": float(np.max(np.abs(logits))),
    }


def kept_names(model: Model, keep: str) -> list[str] | None:
    """The tensors that a Chosen.keep stands for; None: all that there are."""
    if keep == "all":
        return None
    blocks = [f"model.layers.{index}" for index in range(model.config.num_hidden_layers)]
    whole = [LOGITS, "model.embed_tokens", *blocks, "model.embedding_norm", "lm_head"]
    return {"": [], LOGITS: [LOGITS], "blocks": whole}[keep]


def kept_tensors(model: Model, key: Key, names: Sequence[str] | None) -> dict[str, Array]:
    """Those of the names that there are; None: all."""
    found: dict[str, Array] = {}
    if names is None or LOGITS in names:
        found[LOGITS] = exact_rows(model, key)[0]
    if names is None or set(names) - {LOGITS}:
        found |= {name: values for name, values in record(model, key[0]).items() if name != "token_ids"}
    return found if names is None else {name: found[name] for name in names if name in found}


def model_facts(model: Model) -> dict[str, Any]:
    """What ties a set to its checkpoint."""
    return {
        "config_sha256": file_sha256(model.path / "config.json"),
        "weights": {name: file_sha256(model.path / name) for name in weight_files(model.path)},
        "digest": model.digest(),
        "vocab_size": model.config.vocab_size,
        "layer_types": list(model.config.layer_types),
    }


def weight_files(directory: Path) -> list[str]:
    """As checkpoint.py chooses them: the single file, else the index and its shards."""
    if is_present(directory / SINGLE, CheckpointError):
        return [SINGLE]
    shards = read_object(directory / INDEX, CheckpointError)["weight_map"]
    assert isinstance(shards, dict), "the checkpoint was opened with it"
    return [INDEX, *sorted(set(shards.values()))]


def file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be read: {problem}") from None


# --- verify


def verify(model: Model, known: VectorSet, progress: Progress = silent) -> list[Difference]:
    """All that the set says and the model does not, bit for bit; bounds of noise are taken as they are.

    If the model is another one, that alone. After a wrong token the rest of its vector is not looked at.
    """
    require_exact(model)
    document = known.document
    facts = model_facts(model)
    of_model = [
        Difference(None, None, f"model.{path}", found, expected)
        for path, found, expected in differing({name: document["model"][name] for name in facts}, facts)
    ]
    if of_model:
        return of_model
    rules = rules_for(document["formats"])
    found = [Difference(None, None, *one) for one in differing({name: document[name] for name in rules}, rules)]
    for done, vector in enumerate(document["vectors"], 1):
        found += verify_vector(model, known, vector)
        progress("verifying", done, len(document["vectors"]))
    if known.tensors_sha256 != document["tensors"]["sha256"]:
        what = ("tensors.sha256", document["tensors"]["sha256"], f"{known.tensors_sha256}, that of {TENSORS}")
        found.append(Difference(None, None, *what))
    return found


def verify_vector(model: Model, known: VectorSet, vector: Mapping[str, Any]) -> Iterator[Difference]:
    name, key = vector["id"], (tuple(vector["prompt_token_ids"]), tuple(vector["token_ids"]))
    if vector["prompt_text"] is not None and model.has_tokenizer:
        ids = model.tokenizer.encode(vector["prompt_text"])
        for path, found, expected in differing(vector["prompt_token_ids"], ids):
            yield Difference(name, None, f"prompt_token_ids{path}", found, f"{expected}, as prompt_text has it")
    length = len(key[0]) + len(key[1])
    if length > model.config.max_position_embeddings:
        most = f"at most {model.config.max_position_embeddings} (max_position_embeddings)"
        yield Difference(name, None, "tokens", str(length), most)
        return
    for index, rows in enumerate(zip(*exact_rows(model, key), strict=True)):
        exact = exact_position(*rows)
        stored = vector["positions"][index]
        if exact["top"][0][0] != vector["token_ids"][index]:
            yield Difference(name, index, "token", str(vector["token_ids"][index]), str(exact["top"][0][0]))
            return
        follows = ties({**exact, "noise": stored["noise"]}, known.document)
        wanted = {**exact, **follows}
        for path, found, expected in differing({field: stored[field] for field in wanted}, wanted):
            yield Difference(name, index, path, found, expected)
    made = kept_tensors(model, key, vector["tensors"])
    for tensor in vector["tensors"]:
        yield from differing_tensor(name, tensor, known.tensors[f"{name}/{tensor}"], made.get(tensor))


def differing_tensor(vector: str, name: str, found: Array, expected: Array | None) -> Iterator[Difference]:
    """The first number whose bits differ. Row t of logits is position t; of others, token t of the prompt."""
    if expected is None or found.shape != expected.shape:
        wanted = "none of that name" if expected is None else f"shape {expected.shape}"
        yield Difference(vector, None, f"tensor {name}", f"shape {found.shape}", wanted)
        return
    wrong = np.argwhere(found.view("<u4") != np.ascontiguousarray(expected, "<f4").view("<u4"))
    if len(wrong):
        row, column = (int(one) for one in wrong[0])
        what = f"logit of token {column}" if name == LOGITS else f"{name} of prompt token {row}, channel {column}"
        values = tuple(f"{one!r} ({float(one).hex()})" for one in (found[row, column], expected[row, column]))
        yield Difference(vector, row if name == LOGITS else None, f"{what}, first of {len(wrong)}", *values)


def differing(found: Any, expected: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """JSON path, and both values, of all that differs; numbers by their bits as float64."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        for name, one in expected.items():
            yield from differing(found[name], one, f"{path}.{name}".removeprefix("."))
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, one in enumerate(expected):
            yield from differing(found[index], one, f"{path}[{index}]")
    elif isinstance(found, int | float) and isinstance(expected, int | float):
        if struct.pack("<d", found) != struct.pack("<d", expected):
            yield path, repr(found), repr(expected)
    elif found != expected:
        yield path, json.dumps(found)[:80], json.dumps(expected)[:80]
