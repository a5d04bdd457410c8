"""vLLM's activations: runs requests on its CPU engine in this process and records one of them; see vllm_taps.py."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.config_json import load_config
from lfm2np.errors import Lfm2npError
from lfm2np.oracle.engines.records import fault
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.locate.spread import FLOATS
from lfm2np.oracle.recorders.engine_versions import require_format, require_model_type, require_request, require_version
from lfm2np.oracle.recorders.recorder import Recorder
from lfm2np.oracle.recorders.vllm_taps import Step, Tap, attached

VERSIONS = ("0.32.0",)  # that this was run with
IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine where hooks reach it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it leaves this process on the cores it had
    "VLLM_LOGGING_LEVEL": "ERROR",
}
CACHE_BYTES = 2**28


def record(
    model: Path, prompts: Sequence[Sequence[int]], request: int, max_tokens: int, format: str, **options: Any
) -> Recorder:
    """All prompts together, greedily, `max_tokens` new tokens each; records the steps of number `request`.

    options   arguments of vllm.LLM: max_num_batched_tokens (a prefill's chunks), block_size, enable_prefix_caching with
              max_num_seqs=1 (one prompt after another, so that the second finds the first one's prefix)
    errors    RequestError for what cannot be run; TargetError if vLLM is missing, of another version, or fails
    """
    config = load_config(model)
    require_model_type(config, "vllm")
    require_request(prompts, request, max_tokens, config)
    require_format(format, FLOATS)
    llm = load(model, format, **{"max_model_len": max(map(len, prompts)) + max_tokens, **options})
    try:
        return record_with(llm, prompts, request, max_tokens, format)
    except Lfm2npError:
        raise
    except Exception as problem:  # a kernel that does not have what the model needs tells only when it runs
        raise TargetError(f"vllm:{model}: {fault(problem)}") from problem
    finally:
        llm.llm_engine.engine_core.shutdown()


def require_vllm() -> None:
    for name, value in IN_PROCESS.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as problem:
        raise TargetError(f"vllm: {problem}: expected vLLM {' or '.join(VERSIONS)} for CPUs") from None
    require_version("vllm", VERSIONS, vllm.__version__)
    if not current_platform.is_cpu():
        raise TargetError(f"vllm: platform {current_platform.device_name}, expected cpu, that this was run on")


def load(model: Path, format: str, **options: Any) -> Any:
    """A vllm.LLM of the checkpoint, computing in `format`; not compiled, as fused operations have no hooks."""
    require_vllm()
    import vllm

    usual = {"enable_prefix_caching": False, "kv_cache_memory_bytes": CACHE_BYTES, "hf_overrides": missing_keys(model)}
    fixed = {"dtype": format, "enforce_eager": True, "skip_tokenizer_init": True}
    try:
        return vllm.LLM(str(model), **{**usual, **options, **fixed})
    except Exception as problem:
        raise TargetError(f"vllm:{model}: {fault(problem)}") from problem


def missing_keys(model: Path) -> dict[str, int]:
    """Keys that vLLM reads from a config, and transformers does not write."""
    hidden = load_config(model).hidden_size
    given = json.loads((model / "config.json").read_text("utf-8"))
    return {name: hidden for name in ("block_dim", "conv_dim") if name not in given}


def record_with(llm: Any, prompts: Sequence[Sequence[int]], request: int, max_tokens: int, format: str) -> Recorder:
    """As `record`, with an engine that is loaded and idle."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    names = [
        engine.add_request(str(number), {"prompt_token_ids": [int(token) for token in prompt]}, greedy)
        for number, prompt in enumerate(prompts)
    ]
    runner = engine.model_executor.driver_worker.worker.model_runner
    tap = Tap(runner, names[request])
    token_ids: list[int] = []
    with attached(tap):
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished and output.request_id == str(request):
                    token_ids = list(output.outputs[0].token_ids)
    return filled(format, [*prompts[request], *token_ids], tap.steps)


def filled(format: str, sequence: Sequence[int], steps: Sequence[Step]) -> Recorder:
    """The steps, one after another; what came before the first was in a cache."""
    recorder = Recorder(format=format, prefix=sequence[: steps[0].start])
    for step in steps:
        recorder.step(sequence[step.start : step.end], step.start)
        for name, rows in step.tensors.items():
            recorder.keep(name, rows)
    return recorder
