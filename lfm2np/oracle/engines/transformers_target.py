"""transformers:DIR: the model and cache of Hugging Face's transformers. Needs the extra `peers`.

Each request runs alone, unpadded; `padded` runs left-padded batches, as a server without ragged batching would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.files import is_gguf
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import Request, Trace, failed, fault
from lfm2np.oracle.engines.records_json import checked_answer
from lfm2np.oracle.engines.target import Abilities, Answers, Played, TargetError, play_in_rounds

DTYPES = ("float32", "bfloat16", "float16")
PADDED_AT_ONCE = 16
TOP = 5
ROWS_AT_ONCE = 256  # of logits in float64: bounds the memory


class TransformersTarget:
    """Greedy generation by transformers. Weights and computation are in `dtype`, log-probabilities in float64."""

    def __init__(self, model: str | Path, dtype: str = "float32", padded: bool = False) -> None:
        if dtype not in DTYPES:
            raise RequestError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
        if is_gguf(Path(model)):
            raise RequestError(f"{model}: transformers runs a checkpoint directory, not a GGUF file (transformers:DIR)")
        self._path, self._dtype, self._padded = str(model), dtype, padded
        self._model: Any = None

    def probe(self) -> Abilities:
        """Loads the model. TargetError without the libraries, or if they can't load it."""
        if self._model is None:
            self._model = load_model(self._path, self._dtype)
        import torch
        import transformers

        how = "left-padded batches" if self._padded else "alone"
        return Abilities(
            engine=f"transformers {transformers.__version__}, torch {torch.__version__}, {self._dtype}, {how}",
            tells_logprobs=True,
            num_top_logprobs=min(TOP, self._model.config.vocab_size),
            tells_prompt_logprobs=True,
            at_once=PADDED_AT_ONCE if self._padded else 1,
        )

    def play(self, trace: Trace) -> Played:
        return play_in_rounds(trace, self.probe(), self._together)

    def close(self) -> None:
        self._model = None

    def _together(self, requests: Sequence[Request]) -> list[Answers]:
        try:
            answers = generate(self._model, requests)
            for request, fields in zip(requests, answers, strict=True):
                if request.is_scored:
                    fields["prompt_logprobs"] = prompt_logprobs(self._model, request.prompt_token_ids)
        except Exception as problem:
            return [(failed(fault(problem)),)] * len(requests)
        return [(checked_answer(request, fields),) for request, fields in zip(requests, answers, strict=True)]


def load_model(path: str, dtype: str) -> Any:
    try:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging
    except ImportError as problem:
        raise TargetError(f'transformers:{path}: {problem}: pip install "lfm2np[peers]"') from None
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True).eval()
    except Exception as problem:
        raise TargetError(f"transformers:{path}: {fault(problem)}") from None
    model.generation_config = GenerationConfig()  # without the checkpoint's penalties and ends
    return model


def generate(model: Any, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """The fields of each answer, of one batch. ids [S, C], padded on the left to the longest prompt."""
    import torch

    longest = max(len(request.prompt_token_ids) for request in requests)
    padding = [longest - len(request.prompt_token_ids) for request in requests]
    ids = torch.tensor(
        [[0] * pad + list(request.prompt_token_ids) for pad, request in zip(padding, requests, strict=True)]
    )
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    with torch.no_grad(), chosen_experts(model) as chosen:
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(request.max_tokens for request in requests),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    answers = []
    for row, request in enumerate(requests):
        tokens = out.sequences[row, longest : longest + request.max_tokens].tolist()
        logits = torch.stack([step[row] for step in out.logits[: len(tokens)]])  # [t, V]
        logprobs = torch.log_softmax(logits.double(), -1)
        top = logprobs.topk(min(TOP, logprobs.shape[1]), -1)
        answers.append(
            {
                "token_ids": tokens,
                "logprobs": token_logprobs(logprobs, tokens),
                "top_logprobs": [
                    dict(zip(names, values, strict=True))
                    for names, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
                ],
                "finish_reason": "length",
                "routes": routes_of(chosen, row, len(requests), padding[row]),
            }
        )
    return answers


@contextlib.contextmanager
def chosen_experts(model: Any) -> Iterator[list[list[Any]]]:
    """For each sparse layer the experts that its router chose, [S * t, K] in each pass; empty for a dense model."""
    routers = [module for name, module in model.named_modules() if name.endswith(".feed_forward.gate")]
    chosen: list[list[Any]] = [[] for _ in routers]

    def keep(index: int) -> Callable[..., None]:
        return lambda module, inputs, output: chosen[index].append(output[2])

    hooks = [router.register_forward_hook(keep(index)) for index, router in enumerate(routers)]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def routes_of(chosen: Sequence[Sequence[Any]], row: int, rows: int, padding: int) -> list[list[list[int]]] | None:
    """[positions][layers][experts] of one request of the batch."""
    if not chosen:
        return None
    layers = [
        [experts for ids in passes for experts in ids.reshape(rows, -1, ids.shape[-1])[row].tolist()][padding:]
        for passes in chosen
    ]
    return [list(of_layers) for of_layers in zip(*layers, strict=True)]


def prompt_logprobs(model: Any, prompt: Sequence[int]) -> list[float]:
    """Of each prompt token but the first, from one forward pass."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([list(prompt)])).logits[0]  # [T, V]
    logprobs: list[float] = []
    for start in range(0, len(prompt) - 1, ROWS_AT_ONCE):
        tokens = list(prompt[start + 1 : start + 1 + ROWS_AT_ONCE])
        rows = logits[start : start + len(tokens)].double()
        logprobs += token_logprobs(torch.log_softmax(rows, -1), tokens)
    return logprobs


def token_logprobs(logprobs: Any, tokens: Sequence[int]) -> list[float]:
    """Of each token, from its row [V]."""
    return [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)]
