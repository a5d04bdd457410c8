"""OpenVINO's activations: outputs added to the graph that optimum-intel exports, run by OpenVINO's runtime.

The graph keeps its state (keys, values, columns of the convolutions) between runs. Requests run one after another, the
state reset before each; a prompt in one run or in chunks, then a token per run. An output node is not fused with later
ones; without these outputs OpenVINO fuses more.

Not recorded: attention's scores and weights, which are within one operation. Requests in one batch would need padding
on the left, and the graph has no positions as an input: padding would shift them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.config_json import load_config
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.recorders.engine_versions import require_format, require_model_type, require_request, require_version
from lfm2np.oracle.recorders.recorder import Recorder
from lfm2np.truth.config import ModelConfig

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
    for prompt in prompts[: request + 1]:
        recorder = Recorder(format=format)
        engine.reset()
        size = chunk or len(prompt)
        for start in range(0, len(prompt), size):
            best = engine.run(list(prompt[start : start + size]), recorder)
        for _ in range(max_tokens - 1):
            best = engine.run([best], recorder)
    return recorder


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
        version = model.get_rt_info(path).astype(str) if model.has_rt_info(path) else "none"
        if version not in known:
            raise TargetError(
                f"{exported / FILE}: {key} {version}, expected {' or '.join(known)}: other versions are not supported"
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


# --- which node of the exported graph is which of our tensors
#
# Nodes within a module carry its name: its output is its last node, its input comes from outside. Nodes between
# modules (gates, rotation, the caches) are identified by their inputs: their names are numbers that differ by layer.


CONSTANT = ("Constant", "Convert", "Parameter")  # weights, widened
MEASURES = ("ShapeOf",)  # what depends on a tensor's shape does not depend on its numbers
TOP = "__module.model."


@dataclass(frozen=True)
class Node:
    """Its operation, and the names of the nodes that it reads."""

    op: str
    reads: tuple[str, ...]


Graph = Mapping[str, Node]  # by name, each node behind those that it reads


def tensors_of(graph: Graph, config: ModelConfig) -> dict[str, str]:
    """Our name of each tensor that can be recorded, in the model's order -> the node that computes it."""
    nodes = {"model.embed_tokens": output_of(graph, "model.embed_tokens")}
    for index, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{index}"
        nodes[f"{prefix}.operator_norm"] = output_of(graph, f"{prefix}.operator_norm")
        nodes |= convolution(graph, prefix) if kind == "conv" else attention(graph, prefix)
        nodes[f"{prefix}.residual"] = input_of(graph, f"{prefix}.ffn_norm")
        for part in ("ffn_norm", "feed_forward.w1", "feed_forward.w3", "feed_forward.w2"):
            nodes[f"{prefix}.{part}"] = output_of(graph, f"{prefix}.{part}")
        nodes[f"{prefix}.feed_forward.gated"] = input_of(graph, f"{prefix}.feed_forward.w2")
        down = nodes[f"{prefix}.feed_forward.w2"]
        nodes[prefix] = only_node(graph, f"{prefix}/", "Add", partial(reads, down))
    nodes["model.embedding_norm"] = output_of(graph, "model.embedding_norm")
    nodes["lm_head"] = output_of(graph, "lm_head")
    return nodes


def convolution(graph: Graph, prefix: str) -> dict[str, str]:
    """`state` is the convolution's whole input: the state, then u."""
    conv = f"{prefix}.conv"
    gated = input_of(graph, f"{conv}.out_proj")
    gated = graph[gated].reads[0] if graph[gated].op == "Transpose" else gated
    u = only_node(
        graph, f"{conv}/", "Multiply", lambda node: all(graph[read].op == "VariadicSplit" for read in node.reads)
    )
    mixed = [read for read in graph[gated].reads if graph[read].op != "VariadicSplit"]
    if len(mixed) != 1:
        names = ", ".join(graph[gated].reads)
        raise TargetError(f"OpenVINO: {gated} reads {names}, expected gate_out and a convolution")
    return {
        f"{conv}.in_proj": output_of(graph, f"{conv}.in_proj"),
        f"{conv}.u": u,
        f"{conv}.state": only_node(graph, f"{conv}/", "Concat", partial(reads, u)),
        f"{conv}.conv": mixed[0],
        f"{conv}.gated": gated,
        f"{conv}.out_proj": output_of(graph, f"{conv}.out_proj"),
    }


def attention(graph: Graph, prefix: str) -> dict[str, str]:
    module = f"{prefix}.self_attn"
    parts = ("q_proj", "k_proj", "v_proj", "q_layernorm", "k_layernorm")
    nodes = {f"{module}.{part}": output_of(graph, f"{module}.{part}") for part in parts}
    for part in "qk":
        nodes[f"{module}.{part}_rotated"] = first_after(graph, nodes[f"{module}.{part}_layernorm"], f"{module}/", "Add")
    keys = nodes[f"{module}.k_rotated"]
    return nodes | {
        f"{module}.keys_read": only_node(graph, f"{module}/", "Concat", partial(reads, keys)),
        f"{module}.values_read": first_after(graph, nodes[f"{module}.v_proj"], f"{module}/", "Concat"),
        f"{module}.attended": input_of(graph, f"{module}.out_proj"),
        f"{module}.out_proj": output_of(graph, f"{module}.out_proj"),
    }


def reads(name: str, node: Node) -> bool:
    return name in node.reads


def within(graph: Graph, start: str) -> Iterator[str]:
    """Nodes whose names begin so, in order."""
    return (name for name in graph if name.startswith(TOP + start))


def output_of(graph: Graph, module: str) -> str:
    """A module's last node; constants may be shared with other modules."""
    names = [name for name in within(graph, f"{module}/") if graph[name].op not in CONSTANT]
    if not names:
        raise TargetError(f"OpenVINO: no node of {module}, expected what optimum-intel exports of it")
    return names[-1]


def input_of(graph: Graph, module: str) -> str:
    """The first node outside of a module that it reads and that is no weight."""
    for name in within(graph, f"{module}/"):
        for read in graph[name].reads:
            if not read.startswith(f"{TOP}{module}/") and graph[read].op not in CONSTANT:
                return read
    raise TargetError(f"OpenVINO: no input of {module}, expected what optimum-intel exports of it")


def only_node(graph: Graph, start: str, op: str, fits: Callable[[Node], bool]) -> str:
    """The only node of an operation in a module for which `fits` holds."""
    names = [name for name in within(graph, start) if graph[name].op == op and fits(graph[name])]
    if len(names) != 1:
        raise TargetError(f"OpenVINO: {len(names)} fitting nodes {op} in {start.rstrip('/')}, expected one")
    return names[0]


def first_after(graph: Graph, start: str, module: str, op: str) -> str:
    """The first node of an operation in a module that depends on the numbers of the node `start`."""
    behind = {start}
    for name, node in graph.items():
        if node.op not in MEASURES and not behind.isdisjoint(node.reads):
            behind.add(name)
            if node.op == op and name.startswith(TOP + module):
                return name
    raise TargetError(f"OpenVINO: no {op} in {module.rstrip('/')} behind {start}, expected one")
