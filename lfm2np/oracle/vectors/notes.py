"""The classes of bug that vectors and scripts expose, with the public issues in which engines had them."""

from __future__ import annotations

from typing import Any


def note(bug_class: str, description: str, *references: str) -> dict[str, Any]:
    return {"bug_class": bug_class, "description": description, "references": list(references)}


NOTES: dict[str, dict[str, Any]] = {
    "start-of-sequence": note(
        "convolution state",
        "Before the first token the convolution sees zeros. Prompts of fewer tokens than the window read what is not "
        "there: a state that was never cleared, or columns before the array.",
        *("SGLang 24717", "vLLM 32118"),
    ),
    "one-token": note(
        "model",
        "One row hides strides, masks and ragged indices that are wrong for two. Compare the prompts of 1, 2 and 3 "
        "tokens: an engine that is right for the first only takes a strided input for a contiguous one.",
        *("mistral.rs 2306", "llama.cpp 14670"),
    ),
    "beginning-token": note(
        "text",
        "The prompt is taken as it is: an engine that puts a second beginning-of-sequence token before it is another "
        "context off.",
        *("vLLM 16081", "vLLM 55288", "SGLang 888"),
    ),
    "block-border": note(
        "paged cache",
        "One token less than a block, a full block, one more: a page too many or too few, the half-filled page "
        "published, the wrong block size passed to the kernel.",
        *("pegainfer 291", "SGLang 38319", "vLLM 27547"),
    ),
    "decode-state": note(
        "convolution state",
        "The state goes on from the prompt into the new tokens: dropped, or its offset never advanced, it shows at the "
        "second new token and stays.",
        *("vmlx-swift 211", "nntrainer 3998"),
    ),
    "chunk-state": note(
        "convolution state",
        "A chunk of a prompt reads the state that the chunk before it left; a chunk shorter than the window keeps part "
        "of the older one.",
        *("transformers 45513", "transformers 46084", "transformers 46741", "vLLM 56196"),
    ),
    "prefix-state": note(
        "prefix cache",
        "A hit on cached keys and values without the convolution state that belongs to that place, or with one of "
        "another step.",
        *("vLLM 43090", "vLLM 47861", "vLLM 53912", "LMCache 4247", "vLLM 53505", "SGLang 34760"),
    ),
    "whole-prompt-cached": note(
        "prefix cache",
        "All blocks of the prompt are cached, and still the last token has to be computed, once.",
        *("vLLM 3239", "vLLM 11186"),
    ),
    "prefix-branch": note(
        "prefix cache",
        "Prompts part within a block: nothing behind the last whole common block may be taken over, and a block's hash "
        "has to cover all before it.",
        *("vLLM 12621", "ferrox 37", "vllm-mlx 380"),
    ),
    "shared-block": note(
        "paged cache",
        "Requests that share blocks write behind them: a shared page written without a copy shows in the others.",
        *("vLLM 417", "xLLM 1984", "mini-sglang 142"),
    ),
    "stale-slot": note(
        "convolution state",
        "A new request in a slot that another has left reads that one's state unless it is cleared.",
        *("SGLang 24717", "vLLM 32118", "vLLM 43090", "vLLM 56524", "vllm-ascend 10558"),
    ),
    "slot-index": note(
        "convolution state",
        "The state's row is chosen by another number than the request's own: it works alone, and not beside others.",
        *("SGLang 23975", "mistral.rs 2306", "mlx-lm 1169", "mlx-lm 1736"),
    ),
    "ragged-batch": note(
        "convolution state",
        "Prompts stand one behind the other in one array, and the convolution runs across the border: the first rows "
        "of each but the first are wrong.",
        *("transformers 46588", "transformers 46633"),
    ),
    "padding": note(
        "convolution state",
        "Prompts of unlike length are padded: a mask hides the padding from attention, not from the convolution.",
        *("transformers 41790", "transformers 46773", "transformers 47086", "transformers 48256", "mlx-vlm 1946"),
    ),
    "attention-distance": note(
        "model",
        "The answer stands far back in the prompt, where only attention reaches: mask, rotary base, positions, pages.",
        *("mlx-lm 908", "vLLM 27547"),
    ),
    "convolution-order": note(
        "model",
        "The answer depends on which token follows which, what the convolution binds: taps in the wrong order, gates "
        "exchanged, a state that is one off.",
        *("vmlx-swift 211", "nntrainer 3998"),
    ),
    "repeated-token": note(
        "model",
        "The tokens are all alike, so positions and the start of the sequence alone tell rows apart.",
        *("mlx-lm 908", "vLLM 12621"),
    ),
    "long-prompt": note(
        "scheduling",
        "More tokens than one step may take, and than many a table was tested with.",
        *("vLLM 56196", "llama.cpp 23652"),
    ),
    "sliding-window": note(
        "model",
        "Layers of sliding attention see the window's last tokens, the others all: a window that is one off, of every "
        "layer or of none, or blocks given back while a row still sees them.",
    ),
    "preemption": note(
        "scheduling",
        "A preempted request is computed anew, with the tokens that it had: none of them is lost or repeated, and "
        "nothing of the state that it left, or of the one that came between, is read.",
        *("vLLM 5349", "vLLM 16832", "nano-vllm 217"),
    ),
    "rollback": note(
        "speculation",
        "Rejected drafts leave keys and values, which are overwritten, and a convolution state, which is not: it has "
        "to go back to where it was after the last accepted token.",
        *("vLLM 44296", "vLLM 52942", "transformers 46937"),
    ),
    "wrong-row": note(
        "sampling",
        "The logits of the prompt's last token are asked for: those of another row of the step are as plausible.",
        "transformers 40692",
    ),
}
