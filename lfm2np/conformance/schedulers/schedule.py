"""A run's steps as plain data, for `lfm2np draw`: who computed what, and what every place held after the writes."""

from __future__ import annotations

from typing import Any

from lfm2np.conformance.schedulers.memory import Memory
from scheduler.protocol import Step


def recorded(step: Step, number: int, memory: Memory, calls: list[str]) -> dict[str, Any]:
    """One step.

    calls    those since the step before, and the one that it is of
    cells    by block the (request, position, step of writing) of each place, or None
    """
    entries = [
        {
            "request_id": each.request_id,
            "start": each.start,
            "token_ids": list(each.token_ids),
            "writes": list(each.writes),
            "reads": list(each.reads),
        }
        for each in step.entries
    ]
    cells = {
        block: [None if cell is None else [cell.request_id, cell.position, cell.step] for cell in held]
        for (name, block), held in sorted(memory.blocks.items())
        if name == "block"
    }
    copies = [[each.source and list(each.source), list(each.destination)] for each in step.copies]
    return {
        "step": number,
        "calls": calls,
        "entries": entries,
        "copies": copies,
        "preempted": sorted(step.preempted),
        "cells": cells,
    }
