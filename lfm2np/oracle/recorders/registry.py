"""Recorders by a target's name, and one request's dump in memory.

    transformers:[padded:][DIR]     the extra `peers`
    lfm2np:[NUMERICS]               this package's engine
    package.module:factory          an engine of yours, whose object has `record`; those for vLLM, mlx-lm, llama.cpp and
                                    OpenVINO are in fixtures/engines/recorders/

A factory is called as by `lfm2np check`, with a checkpoint directory and size hints; its object's
`record(prompts, request, max_tokens, recorder)` runs all prompts (lists of token ids) together, greedily, and records
one of them.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from lfm2np.arithmetic import NAMES
from lfm2np.checkpoint.files import is_gguf
from lfm2np.checkpoint.text.tokenizer import require_ids
from lfm2np.engine.loading import load
from lfm2np.errors import Lfm2npError, RequestError
from lfm2np.oracle.engines.protocol import load_factory, offers
from lfm2np.oracle.engines.records import fault
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.locate.dump import content_of, shortened
from lfm2np.oracle.recorders.lfm2np_recorder import RecordedEngine
from lfm2np.oracle.recorders.recorder import Recorder
from lfm2np.oracle.recorders.transformers_recorder import record as record_transformers
from lfm2np.truth.config import ModelConfig

Prompts = Sequence[Sequence[int]]
FORMS = "transformers:[padded:][DIR], lfm2np:[NUMERICS] or package.module:factory"
PADDED = "padded:"


class AnswersOnlyError(TargetError):
    """The engine can be run, but shows no activations."""


class Record(Protocol):
    """The content of a dump: of one of the prompts, with so many new tokens each; an engine that may preempt it is
    recorded up to the step that computes position `until`.
    """

    def __call__(self, prompts: Prompts, request: int, new: int, until: int | None = None, /) -> bytes: ...


def record_of(target: str, model: Path, format: str) -> Record:
    """The recorder of a target, computing in `format`. RequestError for an unknown form, AnswersOnlyError for an engine
    in Python without `record`."""
    kind, _, rest = target.partition(":")
    if kind in KINDS:
        record = KINDS[kind](rest, model, format)
    elif re.fullmatch(r"[\w.]+:[\w.]+", target) and not shows_answers_only(target):
        record = python_engine(target, model, format)
    else:
        raise RequestError(f"{target!r} can't be recorded: expected {FORMS}")
    return guarded(target)(record)


def shows_answers_only(target: str) -> bool:
    """A server, a process or a file of answers: its activations can't be recorded."""
    return target.partition(":")[0] in ("http", "https", "exec") or (target.endswith(".jsonl") and ":" not in target)


@contextlib.contextmanager
def guarded(target: str) -> Iterator[None]:
    """An engine's exception becomes a TargetError of one line; what it prints goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except Lfm2npError:
        raise
    except Exception as problem:
        raise TargetError(f"{target}: {fault(problem)}") from problem


def transformers(rest: str, model: Path, format: str) -> Record:
    """Of a directory: transformers reads some GGUF files, too, but widens all weights, which is `lfm2np:float32`."""
    directory, padded = Path(rest.removeprefix(PADDED) or model), rest.startswith(PADDED)
    if is_gguf(directory):
        raise RequestError(f"{directory}: recorded of a checkpoint directory, not of a GGUF file (transformers:DIR)")
    return lambda prompts, request, new, until=None: record_transformers(
        directory, prompts, request, new, format, padded
    ).content()


def this_package(rest: str, model: Path, format: str) -> Record:
    """In the arithmetic that `rest` names, whatever the format."""
    numerics = rest or "exact"
    if numerics not in NAMES:
        raise RequestError(f"lfm2np:{numerics}: expected one of {', '.join(NAMES)}")
    loaded = load(model, numerics)
    computes_in = numerics if numerics in ("float32", "bfloat16") else "float32"

    def record(prompts: Prompts, request: int, new: int, until: int | None = None) -> bytes:
        run = RecordedEngine(loaded, prefix_caching=False, max_num_seqs=max(1, len(prompts)))
        for index, prompt in enumerate(prompts):
            run.add(str(index), list(prompt), new)
        run.run()
        return content_of(run.dump(str(request)), computes_in)

    return record


KINDS: dict[str, Callable[[str, Path, str], Record]] = {"transformers": transformers, "lfm2np": this_package}


def python_engine(target: str, model: Path, format: str) -> Record:
    """AnswersOnlyError if its object has no `record`; TargetError if it records another request's tokens."""
    with guarded(target):
        engine = load_factory(target)(str(model), {})
    if not offers(engine, "record"):
        kind = type(engine).__name__
        raise AnswersOnlyError(f"{target}: {kind} has no method record(prompts, request, max_tokens, recorder)")

    def record(prompts: Prompts, request: int, new: int, until: int | None = None) -> bytes:
        prompt = list(prompts[request])
        recorder = Recorder(format=format, until=until, prompt=prompt)
        engine.record([list(prompt) for prompt in prompts], request, new, recorder)
        recorded, expected = recorder.token_ids, prompt if until is None else prompt[: until + 1]
        if len(recorded) > len(prompt) + new:
            raise TargetError(
                f"{target}: recorded {len(recorded)} tokens of a request of {len(prompt)} and {new} new ones: "
                "where tokens are computed again, as after a preemption, recorder.step(token_ids, start) says where"
            )
        if (begin := recorded[: len(expected)]) != expected:
            words = f"recorded tokens {shortened(begin)}, expected the prompt's: {shortened(prompt)}"
            raise TargetError(f"{target}: {words}")
        return recorder.content()

    return record


def require_request(prompts: Prompts, request: int, max_tokens: int, config: ModelConfig) -> None:
    """RequestError for what no engine can run, before one returns nonsense or ends the process."""
    if not 0 <= request < len(prompts):
        raise RequestError(f"request {request}: expected one of {len(prompts)}, from 0 on")
    if max_tokens < 1:
        raise RequestError(f"max_tokens {max_tokens}: expected at least 1")
    for number, prompt in enumerate(prompts):
        count, most = len(require_ids(prompt, config.vocab_size)) + max_tokens, config.max_position_embeddings
        if count > most:
            raise RequestError(f"prompt {number}: {count} tokens with new ones, max_position_embeddings={most}")
