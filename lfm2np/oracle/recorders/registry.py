"""Recorders by a target's name, and one request's dump in memory.

    transformers:[padded:][DIR]     the extra `peers`
    vllm:[DIR]                      vLLM on a CPU, in an environment that has it (likewise for the following)
    mlx:[DIR]                       mlx-lm on a CPU
    llama.cpp:FILE.gguf             llama-cpp-python
    llama.cpp:slot:FILE.gguf        the same, one slot of its server: requests one after another, of which the last is
                                    recorded with the state that it found
    openvino:DIR                    what `optimum-cli export openvino` wrote of the checkpoint
    lfm2np:[NUMERICS]               this package's engine
    package.module:factory          an engine of yours, whose object has `record`

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
from lfm2np.checkpoint.gguf.container import open_container
from lfm2np.engine.loading import load
from lfm2np.errors import Lfm2npError, RequestError
from lfm2np.oracle.engines.protocol import load_factory
from lfm2np.oracle.engines.records import fault
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.locate.dump import shortened
from lfm2np.oracle.recorders.engine_versions import require_directory
from lfm2np.oracle.recorders.lfm2np_recorder import RecordedEngine
from lfm2np.oracle.recorders.llama_cpp_recorder import format_of as llama_cpp_format
from lfm2np.oracle.recorders.llama_cpp_recorder import record as record_llama_cpp
from lfm2np.oracle.recorders.llama_cpp_slot import record_restored
from lfm2np.oracle.recorders.mlx_recorder import record as record_mlx
from lfm2np.oracle.recorders.openvino_recorder import record as record_openvino
from lfm2np.oracle.recorders.recorder import Recorder, content_of
from lfm2np.oracle.recorders.transformers_recorder import record as record_transformers
from lfm2np.oracle.recorders.vllm_recorder import record as record_vllm

Prompts = Sequence[Sequence[int]]
Run = Callable[[Prompts, int, int, int | None], bytes]  # as Record


class Record(Protocol):
    """The content of a dump: of one of the prompts, with so many new tokens each; an engine that may preempt it is
    recorded up to the step that computes position `until`.
    """

    def __call__(self, prompts: Prompts, request: int, new: int, until: int | None = None, /) -> bytes: ...


Kind = Callable[[str, Path, str], Run]  # of a target's rest, the model, the format
FORMS = (
    "transformers:[padded:][DIR], vllm:[DIR], mlx:[DIR], llama.cpp:[slot:]FILE.gguf, openvino:DIR, lfm2np:[NUMERICS] "
    "or package.module:factory"
)
PADDED, SLOT = "padded:", "slot:"


def record_of(target: str, model: Path, format: str) -> Record:
    """The recorder of a target, computing in `format`. RequestError for an unknown form."""
    kind, _, rest = target.partition(":")
    if kind in KINDS:
        record = KINDS[kind](rest, model, format)
    elif re.fullmatch(r"[\w.]+:[\w.]+", target) and not shows_answers_only(target):
        record = python_engine(target, model, format)
    else:
        raise RequestError(f"{target!r} can't be recorded: expected {FORMS}")

    def recorded(prompts: Prompts, request: int, new: int, until: int | None = None) -> bytes:
        with guarded(target):
            return record(prompts, request, new, until)

    return recorded


def shows_answers_only(target: str) -> bool:
    """A server, a process or a file of answers: its activations can't be recorded."""
    return target.partition(":")[0] in ("http", "https", "exec") or (target.endswith(".jsonl") and ":" not in target)


def format_of(target: str) -> str:
    """The default format: for llama.cpp that of its file, else float32."""
    kind, _, rest = target.partition(":")
    path = Path(rest.removeprefix(SLOT))
    if kind != "llama.cpp" or not is_gguf(path) or not path.exists():
        return "float32"
    file_type = open_container(path).keys.get("general.file_type")
    return llama_cpp_format(0 if file_type is None else file_type.value)


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


def transformers(rest: str, model: Path, format: str) -> Run:
    padded = rest.startswith(PADDED)
    directory = require_directory(Path(rest.removeprefix(PADDED) or model), "transformers")
    return lambda prompts, request, new, until: record_transformers(
        directory, prompts, request, new, format, padded
    ).content()


def of_directory(engine: str, record: Callable[..., Recorder]) -> Kind:
    """A recorder of a checkpoint directory, by default of the model's."""

    def recorded_from(rest: str, model: Path, format: str) -> Run:
        directory = require_directory(Path(rest or model), engine)
        return lambda prompts, request, new, until: record(directory, prompts, request, new, format).content()

    return recorded_from


def llama_cpp(rest: str, model: Path, format: str) -> Run:
    file = existing(rest.removeprefix(SLOT), "llama.cpp:[slot:]FILE.gguf")

    def in_one_slot(prompts: Prompts, request: int, new: int, until: int | None) -> bytes:
        return record_restored(model, prompts[: request + 1], new, format, file)[0].content()

    def together(prompts: Prompts, request: int, new: int, until: int | None) -> bytes:
        return record_llama_cpp(model, prompts, request, new, format, file).content()

    return in_one_slot if rest.startswith(SLOT) else together


def openvino(rest: str, model: Path, format: str) -> Run:
    folder = existing(rest, "openvino:DIR")
    require_directory(model, "openvino")
    return lambda prompts, request, new, until: record_openvino(model, prompts, request, new, format, folder).content()


def existing(path: str, form: str) -> Path:
    if not path or not Path(path).exists():
        raise RequestError(f"{path or 'no path'}: not there, expected {form}")
    return Path(path)


def this_package(rest: str, model: Path, format: str) -> Run:
    """In the arithmetic that `rest` names, whatever the format."""
    numerics = rest or "exact"
    if numerics not in NAMES:
        raise RequestError(f"lfm2np:{numerics}: expected one of {', '.join(NAMES)}")
    loaded = load(model, numerics)
    computes_in = numerics if numerics in ("float32", "bfloat16") else "float32"

    def record(prompts: Prompts, request: int, new: int, until: int | None) -> bytes:
        run = RecordedEngine(loaded, prefix_caching=False, max_num_seqs=max(1, len(prompts)))
        for index, prompt in enumerate(prompts):
            run.add(str(index), list(prompt), new)
        run.run()
        return content_of(run.dump(str(request)), computes_in)

    return record


def python_engine(target: str, model: Path, format: str) -> Run:
    """TargetError if its object has no `record`."""
    with guarded(target):
        engine = load_factory(target)(str(model), {})
    if not callable(getattr(engine, "record", None)):
        raise TargetError(
            f"{target}: {type(engine).__name__} has no method record(prompts, request, max_tokens, recorder)"
        )

    def record(prompts: Prompts, request: int, new: int, until: int | None) -> bytes:
        recorder = Recorder(format=format, until=until)
        engine.record([list(prompt) for prompt in prompts], request, new, recorder)
        require_tokens(target, recorder.token_ids, prompts[request], new, until)
        return recorder.content()

    return record


def require_tokens(target: str, recorded: Sequence[int], prompt: Sequence[int], new: int, until: int | None) -> None:
    """TargetError for the tokens of another request, or of steps that were computed again and do not say so."""
    if len(recorded) > len(prompt) + new:
        raise TargetError(
            f"{target}: recorded {len(recorded)} tokens of a request of {len(prompt)} and {new} new ones: "
            "where tokens are computed again, as after a preemption, recorder.step(token_ids, start) says from where"
        )
    expected = list(prompt if until is None else prompt[: until + 1])
    begin = list(recorded[: len(expected)])
    if begin != expected:
        raise TargetError(f"{target}: recorded tokens {shortened(begin)}, expected the prompt's: {shortened(prompt)}")


KINDS: dict[str, Kind] = {
    "transformers": transformers,
    "vllm": of_directory("vllm", record_vllm),
    "mlx": of_directory("mlx", record_mlx),
    "llama.cpp": llama_cpp,
    "openvino": openvino,
    "lfm2np": this_package,
}
