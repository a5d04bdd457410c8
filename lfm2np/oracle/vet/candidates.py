"""What may have given the answers: a checkpoint, and the way in which its tokens are sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lfm2np.checkpoint.files import is_gguf, read_tensors
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.sampling.params import SamplingParams, as_json, from_json
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records_json import parse_line

FLOATS = {"F32", "F16", "BF16"}


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A checkpoint under exact arithmetic. format: of an engine that runs it, whose rounding an honest one has."""

    name: str
    model: LoadedModel
    format: str
    sampling: SamplingParams

    def rivals(self, hypotheses: Sequence[Hypothesis]) -> list[int]:
        """Numbers of those of other candidates: how it samples, a provider is free to choose."""
        return [number for number, other in enumerate(hypotheses) if other.model is not self.model]


def hypotheses_of(
    candidates: Mapping[str, LoadedModel], requested: SamplingParams, others: Sequence[str]
) -> list[Hypothesis]:
    """Each candidate, the claim first, with the sampling that was requested and each of the others.

    RequestError for a sampling that can't be, or another vocabulary than the claim's.
    """
    first = next(iter(candidates.values()))
    for name, model in candidates.items():
        for token_id in range(max(model.config.vocab_size, first.config.vocab_size)):
            token, expected = (each.tokenizer.token(token_id) for each in (model, first))
            if token != expected:
                raise RequestError(f"candidate {name}: token {token_id} is {token!r}, expected {expected!r}")
    ways = {"": requested, **{f", sampled {text}": parse_sampling(text) for text in others}}
    return [
        Hypothesis(name + words, model, format_of(model), sampling)
        for name, model in candidates.items()
        for words, sampling in ways.items()
    ]


def format_of(model: LoadedModel) -> str:
    if not is_gguf(model.path):
        return "bfloat16"
    tensors = read_tensors(model.path, model.config).values()
    return "float16" if {tensor.dtype for tensor in tensors if len(tensor.shape) == 2} <= FLOATS else "q8"


def parse_sampling(text: str) -> SamplingParams:
    """'temperature=0.7 top_k=40' -> what tokens are drawn from. RequestError for another name or value."""
    words = [word.partition("=") for word in text.replace(",", " ").split()]
    params = from_json({name: parse_line(value, f"sampling {name}") for name, _, value in words})
    if params.temperature == 0.0:
        raise RequestError("temperature 0: expected more than 0; greedy answers are what lfm2np check judges")
    return params


def drawn_by(params: SamplingParams) -> SamplingParams:
    """Only what changes the distribution of a token."""
    fields = as_json(params)
    return from_json({name: fields[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in fields})
