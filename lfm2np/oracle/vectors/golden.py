"""Golden vectors: prompts with a right engine's answers, for engines' tests, like Project Wycheproof's for
cryptography. `make` computes a set, `verify` computes it again and compares, bit for bit.

The arithmetic is exact, so tokens, logits, log-probabilities and activations are the same on every machine. Bounds of
noise are not, as emulated engines use the machine's float32 products: they are rounded to two digits and not compared;
`may_tie_in` follows from the rounded bounds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lfm2np
from lfm2np.checkpoint.files import config_file, directory_of, file_sha256, weight_files
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.digest import digest
from lfm2np.engine.engine import Engine
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import AnyPlace, Place, Work, compute, place_of
from lfm2np.errors import NumericsError, ProofError, RequestError
from lfm2np.oracle.judging.allowed import FLOAT32_UNITS
from lfm2np.oracle.judging.formats import FORMATS
from lfm2np.oracle.judging.noise import Noise, loosened, noise_of
from lfm2np.oracle.judging.truth import Spoken, Truth, Wanted, spoken_truths
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.recorders.lfm2np_recorder import record
from lfm2np.oracle.sending import silent
from lfm2np.oracle.vectors.chosen import LOGITS, Chosen, choose, picked
from lfm2np.oracle.vectors.notes import NOTES
from lfm2np.oracle.vectors.scripts import scripts_of
from lfm2np.oracle.vectors.set_files import TENSORS, VectorSet, sound, tensors_bytes
from lfm2np.oracle.vectors_plain import FORMAT_VERSION, allowances
from lfm2np.truth import reference
from lfm2np.values import Progress, ProgressOf

Array = NDArray[Any]
Ids = tuple[int, ...]
Key = tuple[Ids, Ids]  # prompt, new tokens
BOUNDED = ("float32", "bfloat16", "float16")  # formats that bounds are made for
TOP = 8  # likeliest tokens kept of each position


@dataclass(frozen=True)
class Difference:
    """One disagreement between a set and the model."""

    vector: str | None  # None: of the set as a whole
    position: int | None
    what: str
    found: str  # in the set
    expected: str  # computed

    @property
    def where(self) -> str:
        place = [] if self.vector is None else [self.vector]
        place += [] if self.position is None else [f"position {self.position}"]
        return " ".join(place) or "set"

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.found}, expected {self.expected}"


# --- make


def make(
    model: LoadedModel,
    seed: int = 0,
    only: Collection[str] | None = None,
    progress: ProgressOf = silent,
    executor: AnyPlace = None,
    is_small: bool = False,
) -> VectorSet:
    """The set of a model; with `only` some vectors, by their ids, and those that their schedules name.

    executor  as for check.check: all but the engine's run is computed there
    is_small  as for chosen.choose
    errors    RequestError for an arithmetic other than `exact`, an unknown id or a vocabulary of one token;
              ProofError if the engine's tokens are not the reference's
    """
    require_exact(model)
    if seed < 0:
        raise RequestError(f"seed {seed}: expected at least 0")
    chosen = picked(choose(model.config, model.tokenizer_or_none, seed, is_small), only)
    keys = [
        (vector.prompt_token_ids, tokens)
        for vector, tokens in zip(chosen, greedy(model, chosen, progress), strict=True)
    ]
    place = place_of(executor)
    items = [vector_item(key, kept_names(model, vector.keep)) for vector, key in zip(chosen, keys, strict=True)]
    results = compute(VECTOR, model, items, place, functools.partial(progress, "scoring"))
    exact = {key: result["positions"] for key, result in zip(keys, results, strict=True)}
    positions = positions_of(model, exact, place, progress)
    tensors: dict[str, Array] = {}
    vectors = []
    for vector, key, computed in zip(chosen, keys, results, strict=True):
        tensors |= {f"{vector.id}/{name}": values for name, values in computed["tensors"].items()}
        vectors.append(vector_json(vector, key[1], positions[key], list(computed["tensors"])))
    sha256 = hashlib.sha256(tensors_bytes(tensors)).hexdigest()
    scripts = scripts_of(vectors)
    used = {flag for entry in (*vectors, *scripts) for flag in entry["flags"]}
    document = {
        "format_version": FORMAT_VERSION,
        "generator": {"name": "lfm2np", "version": lfm2np.__version__},
        "seed": seed,
        **rules_for(vectors[0]["positions"][0]["noise"]),
        "model": {"name": model.path.absolute().name, **model_facts(model)},
        "tensors": {"file": TENSORS, "sha256": sha256},
        "notes": {name: note for name, note in NOTES.items() if name in used},
        "vectors": vectors,
        "scripts": scripts,
    }
    return VectorSet(document, tensors, sha256)


def require_exact(model: LoadedModel) -> None:
    if model.numerics.name != "exact":
        raise RequestError(f"numerics {model.numerics.name}: expected exact, whose bits are the same everywhere")
    if model.config.vocab_size < 2:
        raise RequestError(f"vocab_size={model.config.vocab_size}: expected at least 2, for a runner-up")


def greedy(model: LoadedModel, chosen: Sequence[Chosen], progress: ProgressOf) -> list[Ids]:
    """New tokens of each, batched; `positions_of` compares them with the reference."""
    engine, new_tokens = Engine(model), {}
    for vector in chosen:
        params = SamplingParams(temperature=0.0, max_tokens=vector.new, ignore_eos=True)
        engine.add_request(vector.id, vector.prompt_token_ids, params)
    for output in engine.stream():
        if output.finished:
            new_tokens[output.request_id] = tuple(output.outputs[0].token_ids)
            progress("generating", len(new_tokens), len(chosen))
    return [new_tokens[vector.id] for vector in chosen]


def positions_of(
    model: LoadedModel, exact: Mapping[Key, list[dict[str, Any]]], place: Place, progress: ProgressOf
) -> dict[Key, list[dict[str, Any]]]:
    """The set's positions of these sequences: the exact part, and bounds of noise."""
    for (_, tokens), known in exact.items():
        for index, (token, position) in enumerate(zip(tokens, known, strict=True)):
            if position["top"][0][0] != token:
                raise ProofError(f"new token {index}: the engine's is {token}, the reference's {position['top'][0][0]}")
    scoring = functools.partial(progress, "scoring")
    wanted: dict[Spoken, Wanted] = {Spoken((*prompt, *tokens)): {} for prompt, tokens in exact}
    by_ids = {truth.token_ids: truth for truth in spoken_truths(model, wanted, place, scoring)}
    truths = [by_ids[*prompt, *tokens] for prompt, tokens in exact]
    noises: dict[str, list[Noise]] = {}
    for name in BOUNDED:
        try:
            noises[name] = vector_noise(model, truths, name, place, functools.partial(progress, name))
        except NumericsError:
            continue  # the format can't hold this model's numbers: there are no bounds for it
    positions = {}
    for index, (key, known) in enumerate(exact.items()):
        noise, truth = {name: each[index] for name, each in noises.items()}, truths[index]
        positions[key] = [bounded(position, truth, noise, row) for row, position in enumerate(known, len(key[0]) - 1)]
    return positions


def vector_noise(
    model: LoadedModel, truths: Sequence[Truth], format_name: str, place: Place, progress: Progress
) -> list[Noise]:
    """Of engines that choose their experts themselves, if there are any: answers to vectors report no routes."""
    sparse = model.config.mixture is not None
    noises = noise_of(model, truths, format_name, place=place, progress=progress, own_routes=sparse)
    return loosened(noises) if sparse else noises


def bounded(exact: Mapping[str, Any], truth: Truth, noises: Mapping[str, Noise], row: int) -> dict[str, Any]:
    """A position with its bounds and what follows from them."""
    best, *others = (truth.at(row, token_id) for token_id, _, _ in exact["top"])
    index = row - truth.first
    here, noise = slice(index, index + 1), {}
    for name, format_noise in noises.items():
        gaps = format_noise.gap_scales(np.array([best]), here)[0]
        logprob = two_digits(float(format_noise.scales(truth, here)[0, best]))
        noise[name] = {"logprob": logprob, "gaps": [two_digits(float(gaps[other])) for other in others]}
    return {**exact, "noise": noise, **ties({**exact, "noise": noise}, rules_for(noises))}


def rules_for(formats: Iterable[str]) -> dict[str, Any]:
    """What is needed to judge an answer, beside the positions: see vectors_plain.py."""
    bits = {name: {"bits": FORMATS[name].bits} for name in formats}
    return {"limit": LIMIT, "float32_units": FLOAT32_UNITS, "formats": bits}


def two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def ties(position: Mapping[str, Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """`result` and `may_tie_in`: the formats under which another token of `top` may be chosen."""
    behind = [position["top"][0][2] - logit for _, _, logit in position["top"]]
    names = []
    for name in rules["formats"]:
        allowed = allowances(position, name, rules)
        if any(gap <= most for gap, most in zip(behind[1:], allowed[1:], strict=True)):
            names.append(name)
    return {"result": "may_tie" if names else "must_match", "may_tie_in": names}


def vector_json(vector: Chosen, tokens: Ids, positions: list[dict[str, Any]], tensors: list[str]) -> dict[str, Any]:
    return {
        "id": vector.id,
        "flags": list(vector.flags),
        "comment": vector.comment,
        "prompt_token_ids": list(vector.prompt_token_ids),
        "prompt_text": vector.prompt_text,
        "schedule": [dict(hint) for hint in vector.schedule],
        "token_ids": list(tokens),
        "tensors": tensors,
        "positions": positions,
    }


# --- what is exact


def exact_rows(model: LoadedModel, key: Key) -> tuple[Array, Array]:
    """Logits [N, V] float32 and log-probabilities [N, V] float64 of the N new tokens' positions, in one pass."""
    prompt, tokens = key
    sequence = (*prompt, *tokens[:-1])
    truth = model.truth_of(len(sequence))
    states = reference.hidden_states(truth.weights, truth.config, truth.numerics, sequence)
    logits = reference.output_logits(truth.weights, truth.numerics, states[len(prompt) - 1 :])
    return logits, truth.numerics.log_softmax(logits)


def exact_position(logits: Array, logprobs: Array) -> dict[str, Any]:
    """From one row [V] of each: what is the same on every machine."""
    best = np.argsort(-logits, kind="stable")[:TOP].tolist()
    return {
        "logprob": float(logprobs[best[0]]),
        "top": [[token_id, float(logprobs[token_id]), float(logits[token_id])] for token_id in best],
        "margin": float(logits[best[0]]) - float(logits[best[1]]),
        "largest_logit": float(np.max(np.abs(logits))),
    }


def kept_names(model: LoadedModel, keep: str) -> list[str] | None:
    """The tensors that a Chosen.keep stands for; None: all."""
    if keep == "all":
        return None
    blocks = [f"model.layers.{index}" for index in range(model.config.num_hidden_layers)]
    whole = [LOGITS, "model.embed_tokens", *blocks, "model.embedding_norm", "lm_head"]
    return {"": [], LOGITS: [LOGITS], "blocks": whole}[keep]


def vector_item(key: Key, names: Sequence[str] | None) -> dict[str, Any]:
    """One vector as work: prompt, new tokens, and the tensors of these names; None: all."""
    prompt, tokens = key
    return {"prompt": list(prompt), "token_ids": list(tokens), "tensors": None if names is None else list(names)}


def vector_items(model: LoadedModel, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each item the exact part of its positions, and its tensors; by reference.py, one after another."""
    results = []
    for item in items:
        prompt, names = item["prompt"], item["tensors"]
        logits, logprobs = exact_rows(model, (tuple(prompt), tuple(item["token_ids"])))
        positions = [exact_position(*rows) for rows in zip(logits, logprobs, strict=True)]
        tensors = {LOGITS: logits}
        if names is None or set(names) - {LOGITS}:
            tensors |= {name: values for name, values in record(model, prompt).items() if name != "token_ids"}
        kept = tensors if names is None else {name: tensors[name] for name in names if name in tensors}
        results.append({"positions": positions, "tensors": kept})
    return results


def num_vector_tokens(item: Mapping[str, Any]) -> int:
    """Tokens that are fed: all but the last."""
    return len(item["prompt"]) + len(item["token_ids"]) - 1


VECTOR = Work("vector", vector_items, num_vector_tokens)


def model_facts(model: LoadedModel) -> dict[str, Any]:
    """What ties a set to its checkpoint."""
    return {
        "config_sha256": file_sha256(config_file(model.path)),
        "weights": {name: file_sha256(directory_of(model.path) / name) for name in weight_files(model.path)},
        "digest": digest(model.weights, model.config, model.numerics),
        "vocab_size": model.config.vocab_size,
        "layer_types": list(model.config.layer_types),
    }


# --- verify


def verify(
    model: LoadedModel, known: VectorSet, progress: ProgressOf = silent, executor: AnyPlace = None
) -> list[Difference]:
    """All disagreements between the set and the model, bit for bit; bounds of noise are taken as they are.

    For another model only that is reported. After a wrong token the rest of its vector is skipped. `executor` as for
    check.check. VectorsError for a document that is of no set's form.
    """
    require_exact(model)
    with sound("the set"):
        facts, stated = model_facts(model), known.document["model"]
        of_model = list(differing({name: stated[name] for name in facts}, facts, "model"))
        if of_model:
            return [Difference(None, None, *values) for values in of_model]
        return list(differences_of(model, known, functools.partial(progress, "verifying"), executor))


def differences_of(
    model: LoadedModel, known: VectorSet, progress: Progress, executor: AnyPlace
) -> Iterator[Difference]:
    document = known.document
    rules = rules_for(document["formats"])
    for values in differing({name: document[name] for name in rules}, rules):
        yield Difference(None, None, *values)
    fitting = [vector for vector in document["vectors"] if fits(model, vector)]
    items = [vector_item((vector["prompt_token_ids"], vector["token_ids"]), vector["tensors"]) for vector in fitting]
    results = compute(VECTOR, model, items, executor, progress)
    computed = {vector["id"]: result for vector, result in zip(fitting, results, strict=True)}
    for vector in document["vectors"]:
        yield from verify_vector(model, known, vector, computed.get(vector["id"]))
    for values in differing(document["scripts"], scripts_of(document["vectors"]), "scripts"):
        yield Difference(None, None, *values)
    if known.tensors_sha256 != document["tensors"]["sha256"]:
        what = ("tensors.sha256", document["tensors"]["sha256"], f"{known.tensors_sha256}, that of {TENSORS}")
        yield Difference(None, None, *what)


def fits(model: LoadedModel, vector: Mapping[str, Any]) -> bool:
    """Whether the context holds the vector's tokens."""
    return len(vector["prompt_token_ids"]) + len(vector["token_ids"]) <= model.config.max_position_embeddings


def verify_vector(
    model: LoadedModel, known: VectorSet, vector: Mapping[str, Any], computed: Mapping[str, Any] | None
) -> Iterator[Difference]:
    """`computed` is the model's result; None: the vector does not fit."""
    name = vector["id"]
    if vector["prompt_text"] is not None and model.has_tokenizer:
        ids = model.tokenizer.encode(vector["prompt_text"])
        for path, actual, expected in differing(vector["prompt_token_ids"], ids):
            yield Difference(name, None, f"prompt_token_ids{path}", actual, f"{expected}, as prompt_text has it")
    if computed is None:
        length = len(vector["prompt_token_ids"]) + len(vector["token_ids"])
        most = f"at most {model.config.max_position_embeddings} (max_position_embeddings)"
        yield Difference(name, None, "tokens", str(length), most)
        return
    for index, exact in enumerate(computed["positions"]):
        stored = vector["positions"][index]
        if exact["top"][0][0] != vector["token_ids"][index]:
            yield Difference(name, index, "token", str(vector["token_ids"][index]), str(exact["top"][0][0]))
            return
        follows = ties({**exact, "noise": stored["noise"]}, known.document)
        wanted = {**exact, **follows}
        for path, actual, expected in differing({field: stored[field] for field in wanted}, wanted):
            yield Difference(name, index, path, actual, expected)
    for tensor in vector["tensors"]:
        yield from differing_tensor(name, tensor, known.tensors[f"{name}/{tensor}"], computed["tensors"].get(tensor))


def differing_tensor(vector: str, name: str, array: Array, expected: Array | None) -> Iterator[Difference]:
    """The first number whose bits differ. Row t of logits is position t; of others, token t of the prompt."""
    if expected is None or array.shape != expected.shape:
        wanted = "none of that name" if expected is None else f"shape {expected.shape}"
        yield Difference(vector, None, f"tensor {name}", f"shape {array.shape}", wanted)
        return
    wrong = np.argwhere(bits_of(array) != bits_of(expected))
    if len(wrong):
        row, column = (int(place) for place in wrong[0])
        what = f"logit of token {column}" if name == LOGITS else f"{name} of prompt token {row}, channel {column}"
        values = tuple(f"{value!s} ({float(value).hex()})" for value in (array[row, column], expected[row, column]))
        yield Difference(vector, row if name == LOGITS else None, f"{what}, first of {len(wrong)}", *values)


def bits_of(values: Array) -> NDArray[np.uint32]:
    """Of float32 numbers in either byte order: a set's are little-endian, computed ones are the machine's."""
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def differing(actual: Any, expected: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """JSON path and both values of all differences; numbers are compared by their bits as float64."""
    if isinstance(actual, dict) and isinstance(expected, dict) and actual.keys() == expected.keys():
        for name, item in expected.items():
            yield from differing(actual[name], item, f"{path}.{name}".removeprefix("."))
    elif isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        for index, item in enumerate(expected):
            yield from differing(actual[index], item, f"{path}[{index}]")
    elif isinstance(actual, int | float) and isinstance(expected, int | float):
        if struct.pack("<d", actual) != struct.pack("<d", expected):
            yield path, repr(actual), repr(expected)
    elif actual != expected:
        yield path, json.dumps(actual)[:80], json.dumps(expected)[:80]
