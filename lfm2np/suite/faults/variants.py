"""Changes that change no token and no bit of a logit: whoever reports one of these compares too much."""

from __future__ import annotations

from lfm2np.suite.faults.catalogue import read_blocks
from lfm2np.suite.faults.edits import Variant

VARIANTS: tuple[Variant, ...] = (
    # --- sizes
    Variant(
        "blocks-of-one-token", "Every position is a block of its own.", sizes={"block_size": 1, "num_blocks": 2048}
    ),
    Variant("blocks-of-seven-tokens", "Blocks end at odd places.", sizes={"block_size": 7, "num_blocks": 512}),
    Variant("one-token-a-step", "No step computes more than one token.", sizes={"max_num_batched_tokens": 1}),
    Variant("whole-prompts", "No prompt is cut into chunks.", sizes={"max_num_batched_tokens": 100_000}),
    Variant("one-request-at-a-time", "Every batch has one request.", sizes={"max_num_seqs": 1}),
    Variant("no-prefix-cache", "Every prompt is computed anew.", sizes={"prefix_caching": False}),
    Variant("room-to-swap", "Preempted requests are saved, not computed again.", sizes={"num_host_blocks": 64}),
    Variant("high-watermark", "Half of the pool is kept for those that run.", sizes={"watermark": 0.5}),
    Variant("prompt-lookup", "Tokens are guessed from the prompt and checked.", sizes={"drafter": "ngram"}),
    *(Variant(lines[0], " ".join(lines[1:]), edits) for lines, edits in read_blocks("variants")),
    # --- the machine
    Variant("one-thread", "OpenBLAS computes on one thread.", environment={"OPENBLAS_NUM_THREADS": "1"}),
    Variant("kernels-of-2004", "OpenBLAS uses SSE3.", environment={"OPENBLAS_CORETYPE": "Prescott"}),
    Variant(
        "kernels-of-2013",
        "OpenBLAS uses AVX2 and FMA, which the CPU must have.",
        environment={"OPENBLAS_CORETYPE": "Haswell"},
    ),
    Variant(
        "no-vector-code",
        "NumPy does without its own AVX2 and AVX-512 code: names of all its x86 wheels, each of which "
        "ignores those that it does not know.",
        environment={
            "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 X86_V3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL "
            "AVX512_ICL AVX512_SPR X86_V4"
        },
    ),
)
