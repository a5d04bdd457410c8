"""Which node of the graph that optimum-intel exports is which of our tensors.

Nodes within a module carry its name: its output is its last node, its input comes from outside. Nodes between modules
(gates, rotation, the caches) are identified by their inputs, since their names are numbers that differ between layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from lfm2np.model.config import ModelConfig
from lfm2np.oracle.targets.target import TargetError

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
