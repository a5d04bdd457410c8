"""Offline use, as vLLM's users know it: `LLM(path).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lfm2np.engine.engine import Engine
from lfm2np.engine.outputs import RequestOutput
from lfm2np.errors import RequestError
from lfm2np.loading import Model, load
from lfm2np.sampling.params import SamplingParams

Prompt = str | Sequence[int]


class LLM:
    """A model and how to batch it; `options` are those of Engine."""

    def __init__(self, model: Model | str | Path | None = None, numerics: str = "exact", **options: Any) -> None:
        self.model = model if isinstance(model, Model) else load(model, numerics)
        self.engine = Engine(self.model, **options)
        self._requests = 0

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """One output a prompt, in their order. A list of integers is one prompt.

        RequestError for a prompt or parameters that can't be met, before anything runs.
        """
        is_many = not isinstance(prompts, str) and (not prompts or isinstance(prompts[0], str | Sequence | np.ndarray))
        many: list[Any] = list(prompts) if is_many else [prompts]
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(each)} sampling parameters for {len(many)} prompts: expected one each")
        ids: list[str] = []
        try:
            for prompt, param in zip(many, each, strict=True):
                request_id = str(self._requests)
                self.engine.add_request(request_id, prompt, param)
                self._requests += 1
                ids.append(request_id)
            outputs = {output.request_id: output for output in self.engine.stream() if output.finished}
        except BaseException:
            for request_id in ids:
                self.engine.discard(request_id)
            raise
        return [outputs[request_id] for request_id in ids]
