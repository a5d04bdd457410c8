"""Golden vectors: prompts with a right engine's answers, for engines' tests, like Project Wycheproof's for
cryptography. `make` computes a set, `verify` computes it again and compares, bit for bit.

The arithmetic is exact, so tokens, logits and log-probabilities are the same on every machine. Bounds of noise are not,
as emulated engines use the machine's float32 products: they are rounded to two digits and not compared; `may_tie_in`
follows from the rounded bounds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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
from lfm2np.oracle.report.report import RIGHT, WRONG, Finding, Report
from lfm2np.oracle.sending import silent
from lfm2np.oracle.vectors.chosen import Chosen, choose, picked
from lfm2np.oracle.vectors.scripts import scripts_of
from lfm2np.oracle.vectors.set_files import sound
from lfm2np.oracle.vectors_plain import FORMAT_VERSION, allowances
from lfm2np.truth import reference
from lfm2np.values import ProgressOf

Array = NDArray[Any]
Json = dict[str, Any]
Ids = tuple[int, ...]
Key = tuple[Ids, Ids]  # prompt, new tokens
BOUNDED = ("float32", "bfloat16", "float16")  # formats that bounds are made for
MOST_SHOWN = 20  # differences
TOP = 8  # likeliest tokens kept of each position
# By flag: the class of bug that vectors with it are there for.
NOTES: Json = json.loads(Path(__file__).with_name("notes.json").read_text(encoding="utf-8"))


# --- make


def make(
    model: LoadedModel,
    seed: int = 0,
    only: Collection[str] | None = None,
    progress: ProgressOf = silent,
    executor: AnyPlace = None,
    is_small: bool = False,
) -> Json:
    """The set of a model; with `only` some vectors, by their ids, and those that their schedules name.

    executor  as for check.check: all but the engine's run is computed there
    is_small  as for chosen.choose
    errors    RequestError for an arithmetic other than `exact`, an unknown id or a vocabulary of one token;
              ProofError if the engine's tokens are not the reference's
    """
    require_exact(model)
    if seed < 0:
        raise RequestError(f"seed {seed}: expected at least 0")
    chosen, place = picked(choose(model.config, model.tokenizer_or_none, seed, is_small), only), place_of(executor)
    keys = [(vector.prompt_token_ids, tokens) for vector, tokens in greedy(model, chosen, progress)]
    results = compute(VECTOR, model, list(map(vector_item, keys)), place, functools.partial(progress, "scoring"))
    for vector, (_, tokens), result in zip(chosen, keys, results, strict=True):
        best = tuple(position["top"][0][0] for position in result["positions"])
        if best != tokens:
            raise ProofError(f"{vector.id}: the engine's new tokens are {tokens}, the reference's {best}")
    noises = noises_of(model, keys, place, progress)
    rules = rules_for(next(iter(noises.values()))[1])
    vectors = []
    for vector, (prompt, tokens), result in zip(chosen, keys, results, strict=True):
        bounds = bounds_of(*noises[Spoken((*prompt, *tokens))], result["positions"], len(prompt) - 1)
        positions = [bounded(*both, rules) for both in zip(result["positions"], bounds, strict=True)]
        vectors.append(vector_json(vector, tokens, positions))
    scripts = scripts_of(vectors)
    used = {flag for entry in (*vectors, *scripts) for flag in entry["flags"]}
    return {
        "format_version": FORMAT_VERSION,
        "generator": {"name": "lfm2np", "version": lfm2np.__version__},
        "seed": seed,
        **rules,
        "model": {"name": model.path.absolute().name, **model_facts(model)},
        "notes": {name: note for name, note in NOTES.items() if name in used},
        "vectors": vectors,
        "scripts": scripts,
    }


def require_exact(model: LoadedModel) -> None:
    if model.numerics.name != "exact":
        raise RequestError(f"numerics {model.numerics.name}: expected exact, whose bits are the same everywhere")
    if model.config.vocab_size < 2:
        raise RequestError(f"vocab_size={model.config.vocab_size}: expected at least 2, for a runner-up")


def greedy(model: LoadedModel, chosen: Sequence[Chosen], progress: ProgressOf) -> list[tuple[Chosen, Ids]]:
    """Each with its new tokens, batched; `make` compares them with the reference."""
    engine, new_tokens = Engine(model), dict[str, Ids]()
    for vector in chosen:
        params = SamplingParams(temperature=0.0, max_tokens=vector.new, ignore_eos=True)
        engine.add_request(vector.id, vector.prompt_token_ids, params)
    for output in engine.stream():
        if output.finished:
            new_tokens[output.request_id] = tuple(output.outputs[0].token_ids)
            progress("generating", len(new_tokens), len(chosen))
    return [(vector, new_tokens[vector.id]) for vector in chosen]


def noises_of(
    model: LoadedModel, keys: Iterable[Key], place: Place, progress: ProgressOf
) -> dict[Spoken, tuple[Truth, dict[str, Noise]]]:
    """Truth, and noise by format, of each sequence; without the formats that can't hold this model's numbers.

    In a mixture of experts the noise of engines that choose them themselves: answers to vectors report no routes.
    """
    wanted: dict[Spoken, Wanted] = {Spoken((*prompt, *tokens)): {} for prompt, tokens in keys}
    truths = spoken_truths(model, wanted, place, functools.partial(progress, "scoring"))
    noises: list[dict[str, Noise]] = [{} for _ in truths]
    sparse = model.config.mixture is not None
    for name in BOUNDED:
        emulating = functools.partial(progress, name)
        with contextlib.suppress(NumericsError):
            found = noise_of(model, truths, name, place=place, progress=emulating, own_routes=sparse)
            for by_format, noise in zip(noises, loosened(found) if sparse else found, strict=True):
                by_format[name] = noise
    return dict(zip(wanted, zip(truths, noises, strict=True), strict=True))


def bounds_of(truth: Truth, noises: Mapping[str, Noise], positions: Sequence[Json], first: int) -> Iterator[Json]:
    """`noise` of each of these positions, by format: of the best token's log-probability, and how far the logits of the
    others in `top` may fall behind or catch up. `first`: the row of the first."""
    for row, position in enumerate(positions, first):
        best, *others = (truth.at(row, token_id) for token_id, _, _ in position["top"])
        index = row - truth.first
        here, bounds = slice(index, index + 1), {}
        for name, noise in noises.items():
            gaps = noise.gap_scales(np.array([best]), here)[0]
            logprob = two_digits(float(noise.scales(truth, here)[0, best]))
            bounds[name] = {"logprob": logprob, "gaps": [two_digits(float(gaps[other])) for other in others]}
        yield bounds


def two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def rules_for(formats: Iterable[str]) -> Json:
    """What is needed to judge an answer, beside the positions: see vectors_plain.py."""
    bits = {name: {"bits": FORMATS[name].bits} for name in formats}
    return {"limit": LIMIT, "float32_units": FLOAT32_UNITS, "formats": bits}


def bounded(exact: Json, noise: Json, rules: Mapping[str, Any]) -> Json:
    """A position with its bounds, and what follows from them: the formats in which another token may be chosen."""
    position = {**exact, "noise": noise}
    behind = [exact["top"][0][2] - logit for _, _, logit in exact["top"]]
    names = [
        name
        for name in rules["formats"]
        if any(gap <= most for gap, most in zip(behind[1:], allowances(position, name, rules)[1:], strict=True))
    ]
    return {**position, "result": "may_tie" if names else "must_match", "may_tie_in": names}


def vector_json(vector: Chosen, tokens: Ids, positions: list[Json]) -> Json:
    fields = asdict(vector)
    del fields["new"]
    lists = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    return {**fields, **lists, "token_ids": list(tokens), "positions": positions}


# --- what is exact


def exact_rows(model: LoadedModel, key: Key) -> tuple[Array, Array]:
    """Logits [N, V] float32 and log-probabilities [N, V] float64 of the N new tokens' positions, in one pass."""
    prompt, tokens = key
    sequence = (*prompt, *tokens[:-1])
    truth = model.truth_of(len(sequence))
    states = reference.hidden_states(truth.weights, truth.config, truth.numerics, sequence)
    logits = reference.output_logits(truth.weights, truth.numerics, states[len(prompt) - 1 :])
    return logits, truth.numerics.log_softmax(logits)


def exact_position(logits: Array, logprobs: Array) -> Json:
    """From one row [V] of each: what is the same on every machine."""
    best = np.argsort(-logits, kind="stable")[:TOP].tolist()
    return {
        "logprob": float(logprobs[best[0]]),
        "top": [[token_id, float(logprobs[token_id]), float(logits[token_id])] for token_id in best],
        "margin": float(logits[best[0]]) - float(logits[best[1]]),
        "largest_logit": float(np.max(np.abs(logits))),
    }


def vector_item(key: Key) -> Json:
    """One vector as work: prompt and new tokens."""
    prompt, tokens = key
    return {"prompt": list(prompt), "token_ids": list(tokens)}


def vector_items(model: LoadedModel, items: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Of each item the exact part of its positions; by reference.py, one after another."""
    results = []
    for item in items:
        rows = exact_rows(model, (tuple(item["prompt"]), tuple(item["token_ids"])))
        results.append({"positions": [exact_position(*row) for row in zip(*rows, strict=True)]})
    return results


def num_vector_tokens(item: Mapping[str, Any]) -> int:
    """Tokens that are fed: all but the last."""
    return len(item["prompt"]) + len(item["token_ids"]) - 1


VECTOR = Work("vector", vector_items, num_vector_tokens)


def model_facts(model: LoadedModel) -> Json:
    """What ties a set to its checkpoint."""
    return {
        "config_sha256": file_sha256(config_file(model.path)),
        "weights": {name: file_sha256(directory_of(model.path) / name) for name in weight_files(model.path)},
        "digest": digest(model.weights, model.config, model.numerics),
        "vocab_size": model.config.vocab_size,
        "layer_types": list(model.config.layer_types),
    }


# --- verify


@dataclass(frozen=True)
class Difference:
    """One disagreement between a set and the model."""

    where: str  # the vector and position, or the set as a whole
    what: str
    found: str  # in the set
    expected: str  # computed

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.found}, expected {self.expected}"


def verify(
    model: LoadedModel, document: Json, progress: ProgressOf = silent, executor: AnyPlace = None
) -> list[Difference]:
    """All disagreements between a set and the model, bit for bit; bounds of noise are taken as they are.

    For another model, or other rules, only that is reported. After a wrong token the rest of its vector is skipped.
    `executor` as for check.check. VectorsError for a document that is of no set's form.
    """
    require_exact(model)
    with sound("the set"):
        facts = {"model": model_facts(model), **rules_for(document["formats"])}
        stated = {name: document[name] for name in facts}
        stated["model"] = {name: document["model"][name] for name in facts["model"]}
        if differences := list(differing(stated, facts)):
            return differences
        vectors = document["vectors"]
        items = [vector_item((each["prompt_token_ids"], each["token_ids"])) for each in vectors]
        results = compute(VECTOR, model, items, executor, functools.partial(progress, "verifying"))
        for vector, result in zip(vectors, results, strict=True):
            differences += of_vector(model, document, vector, result)
        return [*differences, *differing(document["scripts"], scripts_of(vectors), "scripts")]


def of_vector(model: LoadedModel, document: Json, vector: Json, computed: Json) -> Iterator[Difference]:
    """Where the vector is not what was computed."""
    name = vector["id"]
    if vector["prompt_text"] is not None and model.has_tokenizer:
        ids = model.tokenizer.encode(vector["prompt_text"])
        yield from differing(vector["prompt_token_ids"], ids, "prompt_token_ids, by prompt_text", name)
    for index, exact in enumerate(computed["positions"]):
        token, best, stored = vector["token_ids"][index], exact["top"][0][0], vector["positions"][index]
        if best != token:
            yield Difference(f"{name} position {index}", "token", str(token), str(best))
            return
        yield from differing(stored, bounded(exact, stored["noise"], document), "", f"{name} position {index}")


def differing(actual: Any, expected: Any, path: str = "", where: str = "set") -> Iterator[Difference]:
    """All differences of JSON, with their paths; numbers are compared by their bits as float64."""
    if isinstance(actual, dict) and isinstance(expected, dict) and actual.keys() == expected.keys():
        inner = ((actual[name], item, f"{path}.{name}".removeprefix(".")) for name, item in expected.items())
    elif isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        inner = ((actual[index], item, f"{path}[{index}]") for index, item in enumerate(expected))
    elif isinstance(actual, int | float) and isinstance(expected, int | float):
        if struct.pack("<d", actual) != struct.pack("<d", expected):
            yield Difference(where, path, repr(actual), repr(expected))
        return
    else:
        if actual != expected:
            yield Difference(where, path, json.dumps(actual)[:80], json.dumps(expected)[:80])
        return
    for each in inner:
        yield from differing(*each, where)


# --- what was verified, as a report


def counted(document: Json) -> dict[str, int]:
    vectors = document["vectors"]
    results = [position["result"] for vector in vectors for position in vector["positions"]]
    return {
        "vectors": len(vectors),
        "positions": len(results),
        "may_tie": results.count("may_tie"),
        "scripts": len(document["scripts"]),
    }


def summary(document: Json) -> str:
    words = "{vectors} vectors, {positions} positions ({may_tie} of them may tie), {scripts} scripts"
    return words.format(**counted(document))


def report_of(document: Json, differences: Sequence[Difference]) -> Report:
    """`figures`: the counts of the set, and `differences`, each with where, what, found and expected."""
    findings = [
        Finding("difference", f"{each.what}: {each.found}, expected {each.expected}", each.where)
        for each in differences[:MOST_SHOWN]
    ]
    if len(differences) > MOST_SHOWN:
        findings.append(Finding("difference", f"{len(differences) - MOST_SHOWN} more differences"))
    return Report(
        command="vectors verify",
        verdict="DIFFERENT" if differences else "EXACT",
        exit_code=WRONG if differences else RIGHT,
        means="The set and the model disagree." if differences else "Every number is bit for bit as computed here.",
        findings=findings,
        facts={"set": summary(document)},
        figures={**counted(document), "differences": [asdict(each) for each in differences]},
    )
