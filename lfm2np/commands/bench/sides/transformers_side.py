"""transformers as a side: its own model, cache and default attention, on unpadded batches. Needs the extra `peers`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lfm2np.commands.bench.sides.cells import PREFILL, Cell
from lfm2np.oracle.engines.transformers_target import load_model

WARM_UP = 1


class TransformersSide:
    """One forward pass and the argmax of each request's last row, in a dtype of PyTorch."""

    def __init__(self, dtype: str) -> None:
        from transformers import Lfm2ForCausalLM  # noqa: F401  (the import is no part of the time to load)

        self._dtype = dtype

    def load(self, directory: Path, threads: int) -> dict[str, str]:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.model = load_model(str(directory), self._dtype)
        if self._dtype == "float64" and hasattr(self.model.config, "num_experts"):
            self.model.set_experts_implementation("eager")  # the default's grouped product takes no float64
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def time(self, cell: Cell, steps: int) -> list[dict[str, float]]:
        """Seconds of each of `steps` steps, after one that is not counted."""
        is_prefill = cell.kind == PREFILL
        cache = None if is_prefill else self.random_cache(cell)
        ids, times = self._random_ids(cell), []
        for _ in range(WARM_UP + steps):
            seconds, chosen = self.step(ids, cache)
            ids = self._random_ids(cell) if is_prefill else chosen
            times.append({"seconds": seconds})
        return times[WARM_UP:]

    def step(self, ids: Any, cache: Any) -> tuple[float, Any]:
        """Seconds, and the next token of each request [S, 1]. ids [S, t]; without a cache a new one is filled."""
        import torch

        began = time.perf_counter()
        with torch.no_grad():
            logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits  # [S, 1, V]
            chosen = logits.argmax(-1)
        return time.perf_counter() - began, chosen

    def _random_ids(self, cell: Cell) -> Any:
        import torch

        new = cell.context if cell.kind == PREFILL else 1
        return torch.randint(0, self.model.config.vocab_size, (cell.requests, new))

    def random_cache(self, cell: Cell) -> Any:
        """Its default cache with random keys, values and states of `context` tokens, put in by its own methods."""
        import torch
        from transformers import DynamicCache

        config, dtype = self.model.config, getattr(torch, self._dtype)
        cache = DynamicCache(config=config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (cell.requests, config.num_key_value_heads, cell.context, head_dim)
        taps = config.conv_L_cache
        for layer, kind in enumerate(config.layer_types):
            if kind == "conv":
                state = torch.randn(cell.requests, config.hidden_size, taps, dtype=dtype)
                cache.update_conv_state(state, layer, conv_kernel_size=taps)
            else:
                sample = torch.randn(shape[2:], dtype=dtype)
                cache.update(sample.expand(shape).contiguous(), sample.expand(shape).contiguous(), layer)
        return cache
