"""Our own engine behind the protocol: exact and rounding."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lfm2np.engine import teacher_forcing
from lfm2np.engine.drafters import Drafter, NgramDrafter, ScriptedDrafter
from lfm2np.engine.engine import Engine
from lfm2np.engine.loading import Model, load
from lfm2np.engine.outputs import CompletionOutput, RequestOutput
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.oracle.engines.stepping import StepRun
from lfm2np.suite.audit import AuditedEngine

load_once = lru_cache(maxsize=256)(load)


def own(model: str, sizes: dict[str, Any]) -> Own:
    """lfm2np's engine, in exact arithmetic."""
    return Own(load_once(Path(model)), sizes)


class Own:
    """Offers everything, the bits of the logits included."""

    is_lfm2np = True

    def __init__(self, model: Model, sizes: dict[str, Any]) -> None:
        self._rows: dict[str, list[bytes]] = {}
        self._trace = io.StringIO()
        options = {"num_blocks": 200, **sizes}
        drafter = make_drafter(options.pop("drafter", None))
        engine = AuditedEngine if options.pop("check", False) else Engine
        self.engine = engine(model, drafter=drafter, trace=self._trace, on_logits=self._keep, **options)

    def _keep(self, name: str, position: int, row: Any, token: int) -> None:
        self._rows.setdefault(name, []).append(row.tobytes())

    # level a, b
    def generate(self, requests: Sequence[Request]) -> list[list[Answer]]:
        """All at once, whatever their timing says."""
        at_once = [replace(request, after=None, after_tokens=None, abort_after=None) for request in requests]
        run = StepRun(self, at_once, len(requests), lambda request, samples: tuple(samples))
        return [list(answers) for answers in run.answers()]

    def score(self, token_ids: Sequence[int]) -> list[float]:
        model = self.engine.model
        scores = teacher_forcing.score(model.weights, model.config, model.numerics, model.prompt_ids(token_ids))
        return [score.logprob for score in scores]

    # level c
    def add(self, request: Request) -> None:
        self.engine.add_request(
            request.request_id, request.prompt_token_ids, request.params, request.priority, request.cache_salt
        )

    def step(self) -> dict[str, list[Answer]]:
        return {output.request_id: self._completions(output) for output in self.engine.step()}

    def abort(self, request_id: str) -> list[Answer]:
        return self._completions(self.engine.abort(request_id))

    @property
    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished

    # level d
    def fork(self, request_id: str, new_id: str, seed: int) -> None:
        self.engine.fork(request_id, new_id, seed)
        self._rows[new_id] = list(self._rows.get(request_id, []))

    def preempt(self, request_id: str) -> None:
        self.engine.preempt(request_id)

    def state(self) -> dict[str, int]:
        scheduler = self.engine.scheduler
        return {
            "free_blocks": scheduler.pool.num_free,
            "num_blocks": scheduler.pool.num_blocks,
            "free_slots": len(scheduler.memory.free_slots),
            "num_slots": scheduler.config.max_num_seqs,
        }

    def metrics(self) -> dict[str, int]:
        metrics = self.engine.metrics
        same = ("scheduled_tokens", "sampled_tokens", "recomputed_tokens", "draft_tokens", "accepted_tokens")
        return {"cached_tokens": metrics.prefix_hit_tokens, **{name: getattr(metrics, name) for name in same}}

    def trace(self) -> list[str]:
        return self._trace.getvalue().splitlines()

    def verify(self) -> None:
        """Of an engine that was made with `check`."""
        assert isinstance(self.engine, AuditedEngine)
        self.engine.verify()

    def encode(self, prompt: str | list[dict[str, str]]) -> list[int]:
        model = self.engine.model
        return list(model.prompt_ids(prompt) if isinstance(prompt, str) else model.tokenizer.encode_chat(prompt))

    def _completions(self, output: RequestOutput) -> list[Answer]:
        prompt = None if output.prompt_logprobs is None else tuple(p.logprob for p in output.prompt_logprobs[1:] if p)
        metrics = output.metrics
        cached = None if metrics is None or metrics.preemptions else metrics.cached_tokens  # else partly its own
        return [
            replace(self._completion(output.request_id, sample, prompt), cached_tokens=cached)
            for sample in output.outputs
        ]

    def _completion(self, request_id: str, sample: CompletionOutput, prompt: tuple[float, ...] | None) -> Answer:
        rows = self._rows.get(request_id if sample.index == 0 else f"{request_id}#{sample.index}", [])
        return Answer(
            token_ids=tuple(sample.token_ids),
            finish_reason=sample.finish_reason,
            logprobs=None if sample.logprobs is None else tuple(each.logprob for each in sample.logprobs),
            prompt_logprobs=prompt if sample.index == 0 else None,
            logits=tuple(rows),
            text=sample.text,
            stop_reason=sample.stop_reason,
        )


def make_drafter(wish: Any) -> Drafter | None:
    """None, "ngram", or a script: request id -> the output to propose."""
    if wish is None or wish == "none":
        return None
    if wish == "ngram":
        return NgramDrafter()
    if isinstance(wish, dict):
        return ScriptedDrafter(wish)
    raise RequestError(f"drafter {wish!r}: expected None, 'ngram' or a script by request id")


def own_float32(model: str, sizes: dict[str, Any]) -> Rounded:
    """lfm2np's engine in float32, which rounds as other engines do: for `--number-format float32`."""
    return Rounded(Own(load_once(Path(model), "float32"), sizes))


def own_bfloat16(model: str, sizes: dict[str, Any]) -> Rounded:
    """The same in bfloat16."""
    return Rounded(Own(load_once(Path(model), "bfloat16"), sizes))


class Rounded:
    """All that Own offers but what is demanded to the bit."""

    def __init__(self, engine: Own) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name in ("is_lfm2np", "verify"):
            raise AttributeError(name)
        return getattr(self._engine, name)
