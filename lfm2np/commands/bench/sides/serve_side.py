"""The engine behind HTTP as a side, and the same engine called directly: each client asks again when it is answered."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from lfm2np.commands.bench.sides.filled_engines import greedy
from lfm2np.engine.engine import Engine
from lfm2np.engine.loading import load


class ServeSide:
    def __init__(self, numerics: str) -> None:
        self._numerics = numerics
        self._serving = contextlib.ExitStack()

    def load(self, directory: Path, threads: int) -> dict[str, str]:
        self._model = load(directory, self._numerics)
        return {}

    def direct(self, prompts: list[list[list[int]]], new_tokens: int) -> dict[str, float]:
        """Seconds until all is answered, of clients that each have these prompts, one after another."""
        engine = Engine(self._model, max_num_seqs=len(prompts), prefix_caching=False)
        waiting = {f"{client}-0": of_client for client, of_client in enumerate(prompts)}
        began = time.perf_counter()
        for name, of_client in waiting.items():
            engine.add_request(name, of_client[0], greedy(new_tokens))
        for output in engine.stream():
            if output.finished:
                client, number = map(int, output.request_id.split("-"))
                if number + 1 < len(prompts[client]):
                    engine.add_request(f"{client}-{number + 1}", prompts[client][number + 1], greedy(new_tokens))
        return {"seconds": time.perf_counter() - began}

    def open(self, policy: str, slots: int) -> dict[str, int]:
        """Serves from now on, on this port."""
        from lfm2np.commands.serve.app import make_app
        from lfm2np.commands.serve.server import serving_beside
        from lfm2np.commands.serve.service import Settings

        engine = Engine(self._model, max_num_seqs=slots, prefix_caching=False, policy=policy)
        settings = Settings("model")
        return {"port": self._serving.enter_context(serving_beside(make_app(engine, settings), settings.limits))}

    def shut(self) -> dict[str, int]:
        self._serving.close()
        return {}
