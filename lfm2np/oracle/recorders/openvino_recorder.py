"""OpenVINO's activations: outputs added to the graph that optimum-intel exports, run by OpenVINO's runtime.

The graph keeps its state (keys, values, columns of the convolutions) between runs. Requests run one after another, the
state reset before each; a prompt in one run or in chunks, then a token per run. An output node is not fused with later
ones; without these outputs OpenVINO fuses more.

Not recorded: attention's scores and weights, which are within one operation. Requests in one batch would need padding
on the left, and the graph has no positions as an input: padding would shift them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.config import load_config
from lfm2np.model.config import ModelConfig
from lfm2np.oracle.recorders.demands import require_format, require_model_type, require_request, require_version
from lfm2np.oracle.recorders.openvino_graph import Graph, Node, tensors_of
from lfm2np.oracle.recorders.recorder import Recorder
from lfm2np.oracle.targets.target import TargetError

Array = NDArray[Any]
VERSIONS = {"openvino": ("2026.4.1",)}
EXPORTED = {"optimum_intel_version": ("2.2.0",), "transformers_version": ("5.4.0",)}  # what wrote the graph
HINTS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
FILE = "openvino_model.xml"


def record(
    model: Path,
    prompts: Sequence[Sequence[int]],
    request: int,
    max_tokens: int,
    format: str,
    exported: Path,
    chunk: int | None = None,
    only: Sequence[str] = (),
) -> Recorder:
    """Request number `request` of prompts that run one after another, greedily, `max_tokens` tokens each.

    exported  folder that `optimum-cli export openvino` wrote of the checkpoint
    chunk     most tokens of a prompt in a run; None: all
    only      endings of names: only these tensors and lm_head become outputs, the others may be fused; empty: all
    """
    config = load_config(model)
    require_model_type(config, "openvino")
    require_request(prompts, request, max_tokens, config)
    require_format(format, list(HINTS))
    engine = Engine(exported, config, format, tuple(only))
    for number, prompt in enumerate(prompts[: request + 1]):
        recorder = Recorder(format=format)
        engine.reset()
        tokens = list(prompt)
        for start in range(0, len(prompt), chunk or len(prompt)):
            best = engine.run(tokens[start : start + (chunk or len(prompt))], recorder)
        for _ in range(max_tokens - 1):
            best = engine.run([best], recorder)
        if number == request:
            return recorder
    raise AssertionError("unreachable: require_request")


class Engine:
    """A compiled graph with its state, and which of its outputs is which tensor."""

    def __init__(self, exported: Path, config: ModelConfig, format: str, only: tuple[str, ...] = ()) -> None:
        for package, known in VERSIONS.items():
            require_version(package, known)
        import openvino

        try:
            model = openvino.Core().read_model(exported / FILE)
        except RuntimeError as problem:
            reason = str(problem).strip().splitlines()[-1]
            raise TargetError(f"{exported / FILE}: {reason}") from None
        require_exported(model, exported)
        nodes = {node.get_friendly_name(): node for node in model.get_ordered_ops()}
        endings = (*only, "lm_head") if only else ""
        names = {
            tensor: name for tensor, name in tensors_of(graph_of(nodes), config).items() if tensor.endswith(endings)
        }
        model.add_outputs([nodes[name].output(0) for name in names.values()])
        shown = [output.get_node().input_value(0).get_node().get_friendly_name() for output in model.outputs]
        self._numbers = {tensor: shown.index(name) for tensor, name in names.items()}
        hints = {
            "INFERENCE_PRECISION_HINT": HINTS[format],
            "KV_CACHE_PRECISION": HINTS[format],
            "EXECUTION_MODE_HINT": "ACCURACY",
            "INFERENCE_NUM_THREADS": 1,
        }
        compiled = openvino.Core().compile_model(model, "CPU", hints)
        chosen = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        if chosen != HINTS[format]:  # a hint that this machine can't follow is ignored silently
            raise TargetError(f"OpenVINO: computes in {chosen} on this machine, expected {HINTS[format]} for {format}")
        self._request: Any = compiled.create_infer_request()
        self._columns, self._done = config.conv_L_cache - 1, 0

    def reset(self) -> None:
        self._request.reset_state()
        self._done = 0

    def run(self, tokens: Sequence[int], recorder: Recorder) -> int:
        """Records the next tokens. Returns the best token after them."""
        self._done += len(tokens)
        self._request.infer(
            {
                "input_ids": np.array([tokens], np.int64),
                "attention_mask": np.ones((1, self._done), np.int64),
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        recorder.step(tokens)
        outputs = {tensor: self._output(number) for tensor, number in self._numbers.items()}
        for tensor, values in outputs.items():
            recorder.keep(tensor, as_rows(tensor, values, len(tokens), self._columns))
        return int(np.argmax(outputs["lm_head"][-1]))

    def _output(self, number: int) -> Array:
        """Of the only sequence."""
        return np.array(self._request.get_output_tensor(number).data[0], np.float32)


def require_exported(model: Any, exported: Path) -> None:
    """TargetError for a graph of other versions, which name and order nodes differently."""
    for key, known in EXPORTED.items():
        path = ["optimum", key]
        found = model.get_rt_info(path).astype(str) if model.has_rt_info(path) else "none"
        if found not in known:
            raise TargetError(
                f"{exported / FILE}: {key} {found}, expected {' or '.join(known)}: other versions are not supported"
            )


def graph_of(nodes: dict[str, Any]) -> Graph:
    return {
        name: Node(node.get_type_name(), tuple(value.get_node().get_friendly_name() for value in node.input_values()))
        for name, node in nodes.items()
    }


def as_rows(tensor: str, values: Array, tokens: int, columns: int) -> Array:
    """[rows, width] of one sequence's output; the graph has channels, and heads, first.

    The convolution's input is the state, then u: the state's last `columns` are those that the convolution reads.
    """
    part = tensor.rpartition(".")[2]
    if part == "state":
        return values[:, values.shape[1] - tokens - columns : values.shape[1] - tokens].T[None]
    if ".conv." in tensor and part in ("u", "conv", "gated"):
        return np.ascontiguousarray(values.T)
    if part.endswith(("_rotated", "_read")):
        return values.transpose(1, 0, 2).reshape(values.shape[1], -1)
    return values.reshape(tokens, -1)
