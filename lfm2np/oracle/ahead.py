"""Scores answers while later requests run; for engines in separate processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

from lfm2np.errors import Lfm2npError
from lfm2np.loading import Model
from lfm2np.oracle.check import While, fitting, num_tokens
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.scored import Known, Pair

AT_ONCE = 256  # tokens: more than one answer at once while there are as many


@contextlib.contextmanager
def scored_ahead(model: Model, format_name: str, known: Known) -> Iterator[While]:
    """A thread computes what `known` lacks of the answers so far. Nothing else may use `known` meanwhile.

    At the end and after an error the running computation is waited for and no other starts; an interrupt does not wait.
    Errors in the thread are ignored here: they occur again, and are raised, when the answers are judged.
    """
    waiting: SimpleQueue[Sequence[Pair]] = SimpleQueue()
    ended, taken = threading.Event(), 0

    def on(pairs: Sequence[Pair]) -> bool:
        nonlocal taken
        waiting.put([(ask, fitting(ask, answer, model.config)) for ask, answer in pairs[taken:]])
        taken = len(pairs)
        return True

    def compute() -> None:
        while not ended.is_set():
            pairs = list(waiting.get())
            while num_tokens(pairs) < AT_ONCE and not waiting.empty():
                pairs += waiting.get()
            try:
                if not ended.is_set():
                    judge(model, format_name, pairs, known=known)
            except Lfm2npError:
                return

    thread = threading.Thread(target=compute, name="lfm2np-ahead", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        waiting.put([])

    try:
        yield on
    except KeyboardInterrupt:
        end()
        raise
    except BaseException:
        end()
        thread.join()
        raise
    end()
    thread.join()
