"""lfm2np: the right answer for Liquid AI's LFM2 language models, in exact arithmetic, with NumPy only.

import lfm2np
model = lfm2np.load()                       # the trained fixture; or load("path/to/LFM2-350M")
model.logits([1, 17, 42])                   # [3, V] float32, the same bits on every machine
model.generate("sort: 3 1 2 ->").text       # greedy
llm = lfm2np.LLM()                          # batched, as vLLM's users know it; also llm.chat(messages)
llm.generate(["sort: 3 1 2 ->", "add: 34 + 58 ->"], lfm2np.SamplingParams(temperature=0.0))[0].outputs[0].text
model.score([1, 17, 42])                    # log-probability, rank, margin of each token
lfm2np.score_many(model, prompts, executor) # the same of many, on any concurrent.futures.Executor
lfm2np.parse_reply(text).tool_calls         # what an LFM2 calls; also of token ids, and as they come
lfm2np.check("my_engine:factory", model)    # is an engine right
lfm2np.rollouts("rollouts.jsonl")           # who errs, sampler or trainer
lfm2np.vet(target, candidates)                # which checkpoint answers there
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what editors and type checkers see; at run time a name is imported when it is first used
    from lfm2np.checkpoint.loaded import chat_fixture as chat_fixture
    from lfm2np.checkpoint.loaded import draft_fixture as draft_fixture
    from lfm2np.checkpoint.loaded import lfm3_fixture as lfm3_fixture
    from lfm2np.checkpoint.loaded import moe_fixture as moe_fixture
    from lfm2np.checkpoint.loaded import trained_fixture as trained_fixture
    from lfm2np.checkpoint.text.replies import Message as Message
    from lfm2np.checkpoint.text.replies import ReplyStream as ReplyStream
    from lfm2np.checkpoint.text.replies import parse_reply as parse_reply
    from lfm2np.checkpoint.text.replies import render_reply as render_reply
    from lfm2np.checkpoint.text.tool_calls import ToolCall as ToolCall
    from lfm2np.engine.draft_model import ModelDrafter as ModelDrafter
    from lfm2np.engine.drafters import Draft as Draft
    from lfm2np.engine.drafters import DraftContext as DraftContext
    from lfm2np.engine.drafters import Drafter as Drafter
    from lfm2np.engine.drafters import NgramDrafter as NgramDrafter
    from lfm2np.engine.drafters import ScriptedDrafter as ScriptedDrafter
    from lfm2np.engine.engine import Engine as Engine
    from lfm2np.engine.generation import Completion as Completion
    from lfm2np.engine.generation import GeneratedToken as GeneratedToken
    from lfm2np.engine.llm import LLM as LLM
    from lfm2np.engine.loading import Model as Model
    from lfm2np.engine.loading import load as load
    from lfm2np.engine.outputs import CompletionOutput as CompletionOutput
    from lfm2np.engine.outputs import RequestMetrics as RequestMetrics
    from lfm2np.engine.outputs import RequestOutput as RequestOutput
    from lfm2np.engine.sampling.logprobs import TokenLogprobs as TokenLogprobs
    from lfm2np.engine.sampling.params import SamplingParams as SamplingParams
    from lfm2np.engine.teacher_forcing import TokenScore as TokenScore
    from lfm2np.engine.teacher_forcing import score_many as score_many
    from lfm2np.errors import CheckpointError as CheckpointError
    from lfm2np.errors import ConfigError as ConfigError
    from lfm2np.errors import Lfm2npError as Lfm2npError
    from lfm2np.errors import NumericsError as NumericsError
    from lfm2np.errors import RequestError as RequestError
    from lfm2np.errors import TokenizerError as TokenizerError
    from lfm2np.oracle.api import check as check
    from lfm2np.oracle.rollouts.api import rollouts as rollouts
    from lfm2np.oracle.vet.vetting import vet as vet
    from lfm2np.system import keep_freed_memory as keep_freed_memory

__version__ = "0.2.0"  # the one place; pyproject.toml reads it here

_WHERE = {
    "CheckpointError": "lfm2np.errors",
    "Completion": "lfm2np.engine.generation",
    "CompletionOutput": "lfm2np.engine.outputs",
    "ConfigError": "lfm2np.errors",
    "Draft": "lfm2np.engine.drafters",
    "DraftContext": "lfm2np.engine.drafters",
    "Drafter": "lfm2np.engine.drafters",
    "Engine": "lfm2np.engine.engine",
    "GeneratedToken": "lfm2np.engine.generation",
    "LLM": "lfm2np.engine.llm",
    "Lfm2npError": "lfm2np.errors",
    "Message": "lfm2np.checkpoint.text.replies",
    "Model": "lfm2np.engine.loading",
    "ModelDrafter": "lfm2np.engine.draft_model",
    "NgramDrafter": "lfm2np.engine.drafters",
    "NumericsError": "lfm2np.errors",
    "ReplyStream": "lfm2np.checkpoint.text.replies",
    "RequestError": "lfm2np.errors",
    "RequestMetrics": "lfm2np.engine.outputs",
    "RequestOutput": "lfm2np.engine.outputs",
    "SamplingParams": "lfm2np.engine.sampling.params",
    "ScriptedDrafter": "lfm2np.engine.drafters",
    "TokenLogprobs": "lfm2np.engine.sampling.logprobs",
    "TokenScore": "lfm2np.engine.teacher_forcing",
    "TokenizerError": "lfm2np.errors",
    "ToolCall": "lfm2np.checkpoint.text.tool_calls",
    "check": "lfm2np.oracle.api",
    "chat_fixture": "lfm2np.checkpoint.loaded",
    "draft_fixture": "lfm2np.checkpoint.loaded",
    "keep_freed_memory": "lfm2np.system",
    "lfm3_fixture": "lfm2np.checkpoint.loaded",
    "load": "lfm2np.engine.loading",
    "moe_fixture": "lfm2np.checkpoint.loaded",
    "parse_reply": "lfm2np.checkpoint.text.replies",
    "render_reply": "lfm2np.checkpoint.text.replies",
    "rollouts": "lfm2np.oracle.rollouts.api",
    "score_many": "lfm2np.engine.teacher_forcing",
    "trained_fixture": "lfm2np.checkpoint.loaded",
    "vet": "lfm2np.oracle.vet.vetting",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_WHERE, "__version__"])
