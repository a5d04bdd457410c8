"""Offline use, as vLLM's users know it: `LLM(path).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import numerics_named
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.drafters import Drafter
from lfm2np.engine.engine import Engine, OnLogits, require_params
from lfm2np.engine.loading import load
from lfm2np.engine.outputs import RequestOutput
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.values import Progress, show

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]
Messages = Sequence[Mapping[str, Any]]


class EngineOptions(TypedDict, total=False):
    """Those of Engine, which says what they are and what they are if left out."""

    num_blocks: int | None
    num_window_blocks: int | None
    room_for: Sequence[int] | None
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    waiting_served_ratio: float
    max_waiting_tokens: int
    prefix_caching: bool
    watermark: float
    drafter: Drafter | None
    num_speculative_tokens: int
    seed: int
    trace: TextIO | None
    on_logits: OnLogits | None
    progress: Progress | None
    clock: Callable[[], float]


class LLM:
    """A model and how to batch it.

    model     a loaded one, a directory or GGUF file, or None: the trained fixture
    numerics  as of lfm2np.load (None: "exact"); a loaded model has its own already
    options   of Engine
    """

    def __init__(
        self,
        model: LoadedModel | str | Path | None = None,
        numerics: str | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        for name in options:
            if name not in EngineOptions.__annotations__:
                near = difflib.get_close_matches(name, EngineOptions.__annotations__, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                known = ", ".join(EngineOptions.__annotations__)
                raise RequestError(f"{name}: no option of LLM{hint}, expected some of model, numerics, {known}")
        if isinstance(model, LoadedModel):
            has = model.numerics.name
            if numerics is not None and numerics_named(numerics).name != has:
                raise RequestError(
                    f"numerics {numerics!r}: expected {has!r}, which the model is loaded under, or a path"
                )
            self.model = model
        else:
            self.model = load(model, "exact" if numerics is None else numerics)
        self.engine = Engine(self.model, **options)
        self._requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in their order. A text, or a list or array of integers, is one prompt.

        Requests that the caller added to `engine` go on meanwhile; `engine.step()` returns their outputs afterwards.
        RequestError for a prompt or parameters that can't be met, before anything runs.
        """
        return self._outputs(prompts_of(prompts), sampling_params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **prompt: Any,
    ) -> list[RequestOutput]:
        """The assistant's next turn of one conversation, a list of {"role": ..., "content": ...}, or of each in a list.

        By the checkpoint's chat template; `prompt` is what else it takes, tools and options, as of
        `tokenizer.encode_chat`. Outputs as of `generate`. TokenizerError if it has no tokenizer.
        """
        ids = [self.model.tokenizer.encode_chat(each, **prompt) for each in conversations_of(messages)]
        return self._outputs(ids, sampling_params)

    def _outputs(
        self, prompts: Sequence[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        each = params_of(sampling_params, len(prompts))
        ids: dict[str, None] = {}  # in the order of the prompts
        outputs: dict[str, RequestOutput] = {}
        others: list[RequestOutput] = []
        try:
            for prompt, params in zip(prompts, each, strict=True):
                request_id = self._next_id()
                ids[request_id] = None
                self.engine.add_request(request_id, prompt, params)
            while len(outputs) < len(ids):
                for output in self.engine.step():
                    if output.request_id not in ids:
                        others.append(output)
                    elif output.finished:
                        outputs[output.request_id] = output
        except BaseException:
            for request_id in ids:
                self.engine.discard(request_id)
            raise
        finally:
            self.engine.give_back(others)
        return [outputs[request_id] for request_id in ids]

    def _next_id(self) -> str:
        """One that no request has, also none of the caller's."""
        while True:
            request_id = str(self._requests)
            self._requests += 1
            if not self.engine.knows(request_id):
                return request_id


def prompts_of(prompts: Any) -> list[Any]:
    """One or many, as a list. RequestError for what is neither."""
    if isinstance(prompts, str) or (isinstance(prompts, np.ndarray) and prompts.ndim == 1):
        return [prompts]
    if isinstance(prompts, np.ndarray) and prompts.ndim == 2:
        return list(prompts)
    if isinstance(prompts, bytes | bytearray | np.ndarray) or not isinstance(prompts, Sequence):
        raise RequestError(f"prompts {show(prompts)}: expected a text, token ids, or a list of such")
    is_one = len(prompts) > 0 and not isinstance(prompts[0], str | Sequence | Mapping | np.ndarray)
    return [prompts] if is_one else list(prompts)


def conversations_of(messages: Any) -> list[Any]:
    """One or many, as a list; what a message must be, the chat template's reader says."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages {show(messages)}: expected a list of messages, or a list of such lists")
    return list(messages) if isinstance(messages[0], Sequence) and not isinstance(messages[0], str) else [messages]


def params_of(sampling_params: Any, count: int) -> list[SamplingParams]:
    """One for each prompt. RequestError for another number, or what are none."""
    if sampling_params is None or not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
        return [require_params("sampling_params", sampling_params)] * count
    if len(sampling_params) != count:
        raise RequestError(f"{len(sampling_params)} sampling_params for {count} prompts: expected one each")
    return [require_params(f"sampling_params[{index}]", each) for index, each in enumerate(sampling_params)]
