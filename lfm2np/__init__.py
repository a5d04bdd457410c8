"""lfm2np: the right answer for Liquid AI's LFM2 language models, in exact arithmetic, with NumPy only.

import lfm2np
model = lfm2np.load()                       # the trained fixture; or load("path/to/LFM2-350M")
model.logits([1, 17, 42])                   # [3, V] float32, the same bits on every machine
model.generate("sort: 3 1 2 ->").text       # greedy
llm = lfm2np.LLM()                          # batched, as vLLM's users know it; also llm.chat(messages)
llm.generate(["sort: 3 1 2 ->", "add: 34 + 58 ->"], lfm2np.SamplingParams(temperature=0.0))[0].outputs[0].text
model.score([1, 17, 42])                    # log-probability, rank, margin of each token
lfm2np.score_many(model, prompts, executor) # the same of many, on any concurrent.futures.Executor
lfm2np.check("my_engine:factory", model)    # is an engine right
lfm2np.rollouts("rollouts.jsonl")           # who errs, sampler or trainer
lfm2np.vet(candidates, url)                 # which checkpoint answers there
"""

import importlib
from typing import Any

import lfm2np.before_numpy  # noqa: F401  (first, as it says)
from lfm2np.checkpoint.loaded import draft_fixture, lfm3_fixture, moe_fixture, trained_fixture
from lfm2np.engine.draft_model import ModelDrafter
from lfm2np.engine.drafters import Draft, DraftContext, Drafter, NgramDrafter, ScriptedDrafter
from lfm2np.engine.engine import Engine
from lfm2np.engine.generation import Completion, GeneratedToken
from lfm2np.engine.llm import LLM
from lfm2np.engine.loading import Model, load
from lfm2np.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from lfm2np.engine.sampling.logprobs import TokenLogprobs
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.teacher_forcing import TokenScore, score_many
from lfm2np.errors import (
    CheckpointError,
    ConfigError,
    Lfm2npError,
    NumericsError,
    RequestError,
    TokenizerError,
)
from lfm2np.malloc import keep_freed_memory

_LAZY = {  # functions that need what stands on this package: imported when they are used
    "check": "lfm2np.oracle.api",
    "rollouts": "lfm2np.oracle.rollouts.api",
    "vet": "lfm2np.oracle.vet.api",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


__version__ = "0.2.0"  # the one place; pyproject.toml reads it here

__all__ = [
    "LLM",
    "CheckpointError",
    "Completion",
    "CompletionOutput",
    "ConfigError",
    "Draft",
    "DraftContext",
    "Drafter",
    "Engine",
    "GeneratedToken",
    "Lfm2npError",
    "Model",
    "ModelDrafter",
    "NgramDrafter",
    "NumericsError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScriptedDrafter",
    "TokenLogprobs",
    "TokenScore",
    "TokenizerError",
    "check",
    "draft_fixture",
    "keep_freed_memory",
    "lfm3_fixture",
    "load",
    "moe_fixture",
    "rollouts",
    "score_many",
    "trained_fixture",
    "vet",
]
