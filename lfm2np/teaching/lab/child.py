"""The process that computes (`python -m lfm2np.teaching.lab.child`), started by worker.py: a query in, a page out.

Faults change the functions of this process, so runs are one at a time, and a run that never ends is ended with it. It
may not use more than the memory below (on systems that have such a limit), and ends when its starter has.

A request is a line, of JSON: the query. An answer is a line "STATUS BYTES" and so many bytes of the page.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from typing import BinaryIO

MEMORY = 2**32  # of addresses; a run of the largest settings takes a tenth of it


def main() -> None:
    """Until the input ends. What a run prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=read_queries, args=(sys.stdin.buffer, asked), daemon=True).start()
    limit_memory()
    from lfm2np.system import keep_freed_memory
    from lfm2np.teaching.lab.lab_page import reply
    from lfm2np.teaching.lab.models import load_models

    keep_freed_memory()
    models = load_models()
    while True:
        status, text = reply(asked.get(), models)
        content = text.encode("utf-8", "replace")
        answers.write(b"%d %d\n" % (status, len(content)) + content)
        answers.flush()


def read_queries(lines: BinaryIO, asked: queue.SimpleQueue[str]) -> None:
    """Ends the process where the input does, whatever it computes: nobody waits for it any more."""
    for line in lines:
        asked.put(json.loads(line))
    os._exit(0)


def limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses any limit on memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
