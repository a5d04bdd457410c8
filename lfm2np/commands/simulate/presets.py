"""Cost models from published figures, not measured: what a GPU could do at best, times what we assume it gets of that.

A roofline: a step takes as long as its arithmetic at the peak rate, or as reading what it needs at the full bandwidth
of the memory, whichever is longer; and something that every step costs. `preset("H100:LFM2-1.2B")`. Such a model shows
which policy suits which load. What a server will do, only its own measured steps say.
"""

from __future__ import annotations

from dataclasses import dataclass

from lfm2np.commands.simulate.cost import CONSTANT, CostModel
from lfm2np.errors import RequestError

BYTES = 2  # of a number: bfloat16


@dataclass(frozen=True)
class Gpu:
    """Of its vendor's data sheet."""

    flops: float  # a second: dense bfloat16 on tensor cores
    bandwidth: float  # bytes a second, of its memory


GPUS = {
    # NVIDIA H100 Tensor Core GPU data sheet, H100 SXM: 1,979 teraFLOPS with sparsity, 3.35 TB/s.
    "H100": Gpu(989.5e12, 3.35e12),
    # NVIDIA H200 Tensor Core GPU data sheet, H200 SXM: 1,979 teraFLOPS with sparsity, 4.8 TB/s.
    "H200": Gpu(989.5e12, 4.8e12),
    # NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM: 312 teraFLOPS, 2,039 GB/s.
    "A100": Gpu(312e12, 2.039e12),
    # NVIDIA L4 Tensor Core GPU data sheet: 242 teraFLOPS with sparsity, 300 GB/s.
    "L4": Gpu(121e12, 0.3e12),
}


@dataclass(frozen=True)
class Sizes:
    """Of a dense LFM2, as its config.json says; `feed_forward` as adjusted."""

    hidden: int
    feed_forward: int
    heads: int
    key_value_heads: int
    attention_layers: int
    conv_layers: int
    vocab: int = 65536
    conv_taps: int = 3

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layers_parameters(self) -> int:
        """All but the embedding, which is the head, too."""
        d = self.hidden
        attention = 2 * d * (self.heads + self.key_value_heads) * self.head_dim + 2 * self.head_dim
        conv = 4 * d * d + d * self.conv_taps
        each = 3 * d * self.feed_forward + 2 * d
        layers = self.attention_layers + self.conv_layers
        return self.attention_layers * attention + self.conv_layers * conv + layers * each + d

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def key_value_numbers(self) -> int:
        """Of one position."""
        return 2 * self.attention_layers * self.key_value_heads * self.head_dim

    @property
    def state_numbers(self) -> int:
        """Of one request's convolutions."""
        return self.conv_layers * (self.conv_taps - 1) * self.hidden


MODELS = {
    "LFM2-350M": Sizes(1024, 4608, 16, 8, 6, 10),
    "LFM2-700M": Sizes(1536, 6912, 24, 8, 6, 10),
    "LFM2-1.2B": Sizes(2048, 8192, 32, 8, 6, 10),
    "LFM2-2.6B": Sizes(2048, 10752, 32, 8, 8, 22),
}


@dataclass(frozen=True)
class Assumptions:
    """Not of any data sheet, and not measured."""

    compute_efficiency: float = 0.5  # of the peak rate
    memory_efficiency: float = 0.7  # of the bandwidth
    overhead: float = 0.001  # seconds that every step costs: launches, scheduling, sampling
    block_size: int = 16  # positions of a block that is moved, within the GPU's memory


ASSUMED = Assumptions()


def roofline(name: str, gpu: Gpu, sizes: Sizes, assumed: Assumptions = ASSUMED) -> CostModel:
    """The larger of two sums. Activations, norms and gates are not counted: they are left to the efficiencies."""
    flop = 1.0 / (gpu.flops * assumed.compute_efficiency)  # seconds
    number = BYTES / (gpu.bandwidth * assumed.memory_efficiency)
    multiply_add = 2 * flop
    compute = {
        "tokens": sizes.layers_parameters * multiply_add,
        "sampled": sizes.head_parameters * multiply_add,
        "attended": 2 * sizes.attention_layers * sizes.heads * sizes.head_dim * multiply_add,  # scores, and values
    }
    memory = {
        CONSTANT: sizes.layers_parameters * number,
        "sampled[:1]": sizes.head_parameters * number,
        "read": sizes.key_value_numbers * number,
        "tokens": sizes.key_value_numbers * number,  # written
        "requests": 2 * sizes.state_numbers * number,  # read and written
        "checkpoints": sizes.state_numbers * number,
        "moved_blocks": 2 * assumed.block_size * sizes.key_value_numbers * number,
    }
    assumptions = (
        f"assumed {assumed.compute_efficiency:.0%} of {gpu.flops / 1e12:g} TFLOP/s, {assumed.memory_efficiency:.0%} of "
        f"{gpu.bandwidth / 1e12:g} TB/s, {assumed.overhead * 1e3:g} ms a step"
    )
    return CostModel(name, f"published figures, not measured: {assumptions}", (compute, memory), assumed.overhead)


def preset(name: str, assumed: Assumptions = ASSUMED) -> CostModel:
    """Of "GPU:MODEL". RequestError for one that is not in the tables."""
    gpu, _, model = name.partition(":")
    if gpu not in GPUS or model not in MODELS:
        expected = f"expected GPU:MODEL, of {', '.join(GPUS)} and {', '.join(MODELS)}"
        raise RequestError(f"cost model {name!r}: {expected}")
    return roofline(name, GPUS[gpu], MODELS[model], assumed)
