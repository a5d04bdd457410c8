"""The laboratory's child process, with runs that misbehave: their link says how."""

from __future__ import annotations

import os
import time

import numpy as np

from lfm2np.teaching.lab import child, lab_page
from lfm2np.teaching.lab.models import Models

true_answer = lab_page.answer


def answer(query: str, models: Models, host: lab_page.Host) -> tuple[int, str]:
    if query == "hang":
        while True:
            pass
    if query.startswith("sleep"):
        time.sleep(2.0)
    if query.startswith("nap"):
        time.sleep(0.25)
    if query == "crash":
        os.abort()
    if query == "memory":
        np.ones(2**40, np.uint8)
    if query == "defect":
        raise KeyError("x")
    if query == "print":
        print("not a part of the answer")
    if query == "who":
        return 200, str(os.getpid())
    return true_answer(query, models, host)


if __name__ == "__main__":
    lab_page.answer = answer
    child.main()
