"""What may stand behind an address: a checkpoint, how it is run, how prompts are laid out, how tokens are sampled.

A hypothesis is one of each, a plain named thing. The first candidate, prompts as they are sent, and the sampling that
is asked for, are the claim unless another candidate is named.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.files import is_gguf, read_tensors
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.strict_json import decode_text, read_bytes
from lfm2np.checkpoint.text.chat import MAX_TEMPLATE_BYTES
from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.oracle.judging.formats import KEPT, format_named, with_kv
from lfm2np.oracle.vet.questions import Question

FLOATS = ("F32", "F16", "BF16")
CACHE_BITS = {"float32": 24, "float16": 11, "bfloat16": 8, "q8_0": 7, "float8": 4, "q4_0": 3}  # significant
AS_SENT = "as sent"
SAMPLED_BY = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A checkpoint under exact arithmetic. kv: the format of the cache (formats.KEPT), where its rounding is part of
    what is claimed; None: no coarser than all else.
    """

    name: str
    model: LoadedModel
    kv: str | None = None

    @property
    def base_format(self) -> str:
        """What an engine computes in that runs it: its rounding is what a right provider may be off by."""
        path, config = self.model.path, self.model.config
        if not is_gguf(path):
            return "bfloat16"
        types = {tensor.dtype for tensor in read_tensors(path, config).values() if len(tensor.shape) == 2}
        return "float16" if types <= set(FLOATS) else "q8"

    @property
    def format_name(self) -> str:
        """With that of the cache."""
        return with_kv(self.base_format, self.kv)

    @property
    def has_coarse_cache(self) -> bool:
        """Whether its rounding is coarser than all else, so that engines round it alike."""
        return self.kv is not None and CACHE_BITS[self.kv] + 2 < format_named(self.format_name).bits


@dataclass(frozen=True)
class Rendering:
    """How a question becomes a prompt: the template is Jinja source, None the checkpoint's own.

    system  False: a system message that was sent is left out; a text: inserted where none was sent
    """

    name: str = AS_SENT
    template: str | None = None
    system: bool | str = True

    def ids(self, tokenizer: Tokenizer, question: Question) -> list[int]:
        """RequestError or TokenizerError where it can't be laid out so."""
        if question.messages is None:
            return tokenizer.encode(question.prompt or "")
        messages = [dict(message) for message in question.messages]
        if self.system is False:
            messages = [message for message in messages if message["role"] != "system"]
        elif isinstance(self.system, str) and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        if self.template is not None:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat = replace(tokenizer.chat, template=self.template, source=self.name)
        return tokenizer.encode_chat(messages)


@dataclass(frozen=True)
class Hypothesis:
    """Numbers of a candidate, a rendering and a sampling in their lists."""

    candidate: int
    rendering: int
    sampling: int
    name: str

    @property
    def pair(self) -> tuple[int, int]:
        return self.candidate, self.rendering


@dataclass(frozen=True, eq=False)
class Hypotheses:
    """All of them, the claim's first."""

    candidates: tuple[Candidate, ...]
    renderings: tuple[Rendering, ...]
    samplings: tuple[SamplingParams, ...]
    each: tuple[Hypothesis, ...]

    @property
    def claim(self) -> Candidate:
        return self.candidates[0]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """All numbers of a candidate and a rendering; the claim's come first."""
        return list(dict.fromkeys(each.pair for each in self.each))

    def rivals(self, number: int) -> list[int]:
        """Those that differ in more than the sampling, which a provider is free to choose."""
        return [other for other, each in enumerate(self.each) if each.pair != self.each[number].pair]

    def is_claimed(self, number: int) -> bool:
        return self.each[number].pair == self.pairs[0]

    def temperature(self, number: int) -> float:
        return self.samplings[self.each[number].sampling].temperature


def hypotheses_of(
    candidates: Sequence[Candidate],
    claim: str | None,
    renderings: Sequence[Rendering],
    samplings: Sequence[SamplingParams],
) -> Hypotheses:
    """Every candidate with prompts as sent, and as every rendering. RequestError for names that are there twice, a
    claim that names none, or candidates that share no vocabulary.
    """
    names = [candidate.name for candidate in candidates]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"candidate {twice!r}: named twice, expected different names")
    if not candidates:
        raise RequestError("no candidate: expected at least one NAME=DIR")
    if claim is not None and claim not in names:
        raise RequestError(f"claim {claim!r}: expected one of {', '.join(names)}")
    ordered = sorted(candidates, key=lambda candidate: candidate.name != (claim or names[0]))
    layouts = ["", *(f", {rendering.name}" for rendering in renderings)]
    views = ["", *(f", sampled {shown(sampling)}" for sampling in samplings[1:])]
    each = tuple(
        Hypothesis(number, layout, view, candidate.name + layout_words + view_words)
        for number, candidate in enumerate(ordered)
        for layout, layout_words in enumerate(layouts)
        for view, view_words in enumerate(views)
    )
    return Hypotheses(tuple(ordered), (Rendering(), *renderings), tuple(samplings), each)


def parse_candidate(text: str) -> tuple[str, str, str | None]:
    """NAME=PATH[,kv=FORMAT] -> name, path, format of the cache. RequestError for another form."""
    name, sign, rest = text.partition("=")
    path, _, options = rest.partition(",kv=")
    if not name or not sign or not path:
        raise RequestError(f"candidate {text!r}: expected NAME=DIR or NAME=FILE.gguf, with ,kv=q8_0 behind it at most")
    if options and options not in KEPT:
        raise RequestError(f"candidate {text!r}: kv={options}: expected one of {', '.join(KEPT)}")
    return name, path, options or None


def parse_sampling(text: str) -> SamplingParams:
    """'temperature=0.7 top_p=0.9' -> what tokens are drawn from. RequestError for another name or value."""
    fields: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, sign, value = word.partition("=")
        if name not in SAMPLED_BY or not sign or name in fields:
            raise RequestError(f"sampling {word!r}: expected NAME=NUMBER once each, of {', '.join(SAMPLED_BY)}")
        try:
            fields[name] = int(value) if name == "top_k" else float(value)
        except ValueError:
            raise RequestError(f"sampling {word!r}: expected a number") from None
    params = SamplingParams(**fields)
    if params.temperature == 0.0:
        raise RequestError("temperature 0: expected more than 0; greedy answers are what lfm2np check judges")
    return params


def shown(sampling: SamplingParams) -> str:
    """Without what does nothing: 'temperature=0.7 top_p=0.9'."""
    neutral = SamplingParams()
    names = [name for name in SAMPLED_BY if name == "temperature" or getattr(sampling, name) != getattr(neutral, name)]
    return " ".join(f"{name}={getattr(sampling, name):g}" for name in names)


def sent(sampling: SamplingParams) -> dict[str, float]:
    """The fields of a request: OpenAI's, and of the others those that do something, as a strict server refuses what it
    does not know.
    """
    neutral = SamplingParams()
    names = [name for name in SAMPLED_BY[2:] if getattr(sampling, name) != getattr(neutral, name)]
    return {name: getattr(sampling, name) for name in (*SAMPLED_BY[:2], *names)}


def read_template(path: str) -> Rendering:
    """A rendering by the template in a file."""
    content = read_bytes(Path(path), MAX_TEMPLATE_BYTES, RequestError)
    return Rendering(f"template {Path(path).name}", decode_text(content, path, RequestError))
