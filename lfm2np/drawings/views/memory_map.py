"""The map of a step's memory: every block with its tokens, owners and checkpoint, and the state slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lfm2np.drawings.page.markup import (
    Markup,
    counted,
    element,
    figure,
    joined,
    number,
    rectangle,
    scrolled,
    visible,
    words,
)
from lfm2np.drawings.page.view import NUM_COLOURS, cell, legend, short_names, step_text
from lfm2np.drawings.runs.derive import colours
from lfm2np.drawings.runs.paged import Contents
from lfm2np.drawings.runs.pool import Pool
from lfm2np.drawings.runs.run import Run, Step

HEAD, BODY, GAP, TOP = 18.0, 24.0, 10.0, 4.0
MOST_BLOCKS = 64  # that are drawn
WIDE = 860.0  # of the map, more where a single block is wider
SLOT = 70.0


def map_legend(owners: Iterable[tuple[str, Markup]]) -> Markup:
    return legend(
        ("a block, its number and its owner", cell(1, 1, 16, 16, 0, "a")),
        ("shared by several requests", cell(1, 1, 16, 16, 0, "+")),
        ("free", cell(1, 1, 16, 16, None, "")),
        ("written in this step", rectangle(2, 2, 14, 14, class_="cell none written")),
        ("can be found by its prefix: it has a checkpoint of the state after its last token", checkpoint(9, 9)),
        *owners,
    )


def checkpoint(x: float, y: float) -> Markup:
    return rectangle(x - 4, y - 4, 8, 8, class_="checkpoint", transform=f"rotate(45 {x:g} {y:g})")


def map_of(run: Run, step: Step, pool: Pool, held: Contents) -> Markup:
    """Owners and slots while the step computes, with the tokens that it leaves."""
    blocks, size = int(run.config["num_blocks"]), int(run.config["block_size"])
    shown = min(blocks, MOST_BLOCKS)
    place = max(9.0, min(38.0, 190.0 / size))
    width = size * place
    across = max(1, int(WIDE // (width + GAP)))
    shapes = []
    for block in range(shown):
        x, y = (block % across) * (width + GAP), TOP + (block // across) * (HEAD + BODY + GAP)
        shapes.append(of_block(run, block, (x + 1, y, place), pool, held))
    bottom = TOP + -(-shown // across) * (HEAD + BODY + GAP)
    shapes.append(slots(run, pool.slots, bottom + 8))
    title = f"Memory in step {step.number}"
    text = (
        "Each block of the pool with the tokens that it holds, its owners and its checkpoint; below, the state slots."
    )
    drawn = figure(title, text, across * (width + GAP) + 8, bottom + HEAD + BODY + 34, shapes)
    more = f" Blocks from {shown} on are not drawn." if blocks > shown else ""
    found = f", {pool.cached} of them with a prefix that can be found" if pool.cached is not None else ""
    free = f"{counted(blocks - len(pool.owners), 'block')} free{found}."
    return joined(
        step_text(step, f"While it computes, {len(pool.owners)} of {counted(blocks, 'block')} owned; {free}{more}"),
        scrolled(drawn, title),
    )


def of_block(run: Run, block: int, at: tuple[float, float, float], pool: Pool, held: Contents) -> Markup:
    (x, y, place), owners = at, pool.owners.get(block, ())
    size = int(run.config["block_size"])
    numbers, names, tokens = colours(run), short_names(run.requests), held.tokens.get(block, {})
    fill = f"o{numbers[owners[0]] % NUM_COLOURS}" if owners else "none"
    whose = "+".join(names[name] for name in owners) if owners else "free"
    text = " ".join(run.word(tokens[index]) for index in sorted(tokens))
    shapes: list[object] = [
        element("title", f"block {block}, {', '.join(map(visible, owners)) or 'free'}: {visible(text)}"),
        words(x, y + HEAD / 2, block, class_="tick"),
        words(x + size * place, y + HEAD / 2, whose, "end", class_="label"),
        rectangle(x, y + HEAD, size * place, BODY, class_="cell none"),
    ]
    written = sorted(index for index in tokens if (block, index) in held.written)
    if owners and tokens:  # they fill a block from its beginning; what a step writes of it is at their end
        shapes.append(rectangle(x, y + HEAD, len(tokens) * place, BODY, class_=f"cell {fill}"))
        shapes.append(element("path", d=between(x, y + HEAD, place, len(tokens)), class_="cell"))
    if written:
        size_ = len(written) * place
        shapes.append(rectangle(x + written[0] * place, y + HEAD, size_, BODY, class_="cell written"))
    for index in sorted(tokens) if place >= 20 else ():
        token = visible(run.word(tokens[index]))[: max(1, int(place / 7))]
        middle = x + (index + 0.5) * place
        shapes.append(words(middle, y + HEAD + BODY / 2, token, class_="in" if owners else "was"))
    if block in pool.published:
        shapes.append(checkpoint(x + size * place, y + HEAD + BODY / 2))
    return element("g", shapes)


def between(x: float, y: float, place: float, count: int) -> str:
    """The lines between so many tokens."""
    return "".join(f"M{number(x + index * place)} {number(y)}v{BODY:g}" for index in range(1, count))


def slots(run: Run, held: Mapping[int, str], y: float) -> Markup:
    """One box a state slot, of the same size whatever its request's length."""
    numbers, names = colours(run), short_names(run.requests)
    count = 1 + max((entry.slot for step in run.steps for entry in step.entries), default=0)
    shapes: list[object] = [
        words(0, y + HEAD / 2, "state slots: the last columns of every convolution", class_="label")
    ]
    for slot in range(count):
        name, x = held.get(slot), slot * (SLOT + GAP) + 1
        title = f"slot {slot}: {visible(name) if name else 'free'}"
        colour, text = (numbers[name], names[name]) if name else (None, "free")
        shapes.append(cell(x, y + HEAD, SLOT, BODY, colour, f"{slot}: {text}", "", title))
    return joined(*shapes)
