"""The catalogue of faults: text files beside this module, in which every fault is a patch.

    section A

    slot-freed-twice
    A slot that is given back is free twice, so that two requests get it.
    seen in: mistral.rs 2306; mistral.rs 2357
    @@ scheduler.memory:Memory.release
    - self.free_slots.append(request.slot)
    + self.free_slots += [request.slot, request.slot]

A blank line ends a fault; `seen in`, which may be missing, names public issues. Behind @@ stands the function, below it
what goes (-), what comes (+) and what stays, from the third character of a line on. The text that goes and stays has to
be in the function exactly once; it may begin and end within a line. "@@ NAME" stands for the edits of "shared NAME",
which many faults need. Lines that begin with # are comments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from types import MappingProxyType

from lfm2np.errors import RequestError
from lfm2np.suite.faults.edits import Edit, Fault

FILES = ("guards", "state", "cache", "pool", "scheduling", "sampling", "texts", "model", "mixture", "lfm3")
Block = tuple[list[str], tuple[Edit, ...]]


def read_faults(files: Sequence[str] = FILES) -> tuple[Fault, ...]:
    """Those of the files, in the order of their lines; the first file has the shared edits."""
    faults: list[Fault] = []
    shared: dict[str, tuple[Edit, ...]] = {}
    section = ""
    for lines, edits in (block for name in files for block in read_blocks(name, shared)):
        match lines[0].split():
            case ["section", section]:
                continue
            case ["shared", name]:
                shared[name] = edits
            case _:
                sentence, _, reports = " ".join(lines[1:]).partition(" seen in: ")
                faults.append(Fault(lines[0], section, sentence, tuple(reports.split("; ") if reports else ()), edits))
    return tuple(faults)


def read_blocks(name: str, shared: Mapping[str, tuple[Edit, ...]] = MappingProxyType({})) -> Iterator[Block]:
    """Of one file: the lines above the patches of each block, and its edits."""
    text = (resources.files("lfm2np.suite.faults") / f"{name}.txt").read_text(encoding="utf-8")
    for block in text.split("\n\n"):
        head, *patches = block.strip("\n").split("\n@@ ")
        lines = [line for line in head.splitlines() if not line.startswith("#")]
        if lines:
            yield lines, tuple(edit for patch in patches for edit in edits_of(patch, shared))


def edits_of(patch: str, shared: Mapping[str, tuple[Edit, ...]]) -> tuple[Edit, ...]:
    """RequestError for a line that is none of a patch, or the name of no shared edits."""
    where, *lines = patch.splitlines()
    if not lines and where not in shared:
        raise RequestError(f"fault: @@ {where}: nothing below it, expected a patch or the name of shared edits")
    if not lines:
        return shared[where]
    for line in lines:
        if line[:2] not in ("- ", "+ ", "  "):
            raise RequestError(f"fault: @@ {where}: {line!r}, expected '- ', '+ ' or two blanks before a line")
    old, new = ("\n".join(line[2:] for line in lines if line[0] != other) for other in "+-")
    return (Edit(where, old, new),)
