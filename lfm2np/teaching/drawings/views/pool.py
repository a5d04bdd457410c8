"""Pool and prefixes: every block with its tokens, owners and checkpoint, and the state slots, which do not grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lfm2np.oracle.report.markup import Markup, counted, element, joined, number, scrolled, table, visible
from lfm2np.teaching.drawings.page.svg import figure, rectangle, words
from lfm2np.teaching.drawings.page.view import (
    NUM_COLOURS,
    View,
    by_step,
    cell,
    legend,
    short_names,
    step_text,
    view_of_run,
)
from lfm2np.teaching.drawings.runs.derive import Pool, colours, num_kept, pools
from lfm2np.teaching.drawings.runs.paged import Contents, contents
from lfm2np.teaching.drawings.runs.recorded_run import Entry, Run, Step, in_windows
from scheduler import FREED

MOST_MAPS = 64  # steps with a map; a longer run has one for every so many
MOVES = {
    "zero_state": "state slot {1} is set to zeros: a request that begins",
    "restore_state": "the checkpoint of block {0} is copied to state slot {1}: a prefix hit brings attention AND state",
    "copy_block": "block {0} is copied to block {1}: copy-on-write, since another request shares it",
    "copy_state": "state slot {0} is copied to slot {1}: a fork goes on by itself",
    "copy_window_block": "block {0} of windowed layers is copied to block {1}: copy-on-write there",
}


@dataclass(frozen=True)
class Blocks:
    """The blocks of a pool: of layers with full attention, or of windowed ones, which have a pool of their own."""

    run: Run  # as these layers have it: see in_windows
    pools: Sequence[Pool]  # of each step, as what follows
    held: Sequence[Contents]
    is_windowed: bool = False


def pool(run: Run) -> View:
    of_all = [Blocks(run, pools(run), list(contents(run)))]
    windows = in_windows(run)
    if windows is not None:
        of_all.append(Blocks(windows, pools(run, windows), list(contents(windows)), is_windowed=True))
    every = -(-len(run.steps) // MOST_MAPS)

    def of_step(step: Step) -> Markup:
        """Side by side where there is room."""
        maps = [map_of(blocks, step.number) for blocks in of_all] if step.number % every == 0 else []
        return element("div", [element("div", part) for part in (*maps, now(run, step))], class_="pair")

    return view_of_run(
        run,
        "pool",
        "Pool and prefixes",
        "Keys and values grow by blocks that any request may get, share or give back; the convolution's state "
        "is a few columns for each request, however long it is.",
        [map_legend(run), by_step(run, of_step)],
        element("p", f"The map of every {every}. step is drawn.") if every > 1 else None,
    )


def now(run: Run, step: Step) -> Markup:
    """What moves in this step, and the block tables of those that take part."""
    moves = [MOVES[kind].format(source, destination) for kind, source, destination in step.moves]
    hits = [
        f"{visible(entry.request_id)} enters with {entry.start} tokens found in the prefix cache"
        for entry in step.entries
        if entry.request_id in step.admitted and entry.start
    ]
    rows = []
    for entry in step.entries:
        blocks = table_text(entry.block_table)
        of_windows = [table_text(entry.window_table)] if "sliding_window" in run.config else []
        rows.append([visible(entry.request_id), blocks, *of_windows, written(step, entry), entry.slot])
    windowed = ["of windowed layers"] if "sliding_window" in run.config else []
    head = ["request", "block table", *windowed, "positions written", "state slot"]
    return joined(
        element("ul", [element("li", text) for text in (*hits, *moves)]) if hits or moves else None,
        table(f"Block tables in step {step.number}", head, rows),
    )


def table_text(table: Sequence[int]) -> str:
    return ", ".join("\u00d7" if block == FREED else str(block) for block in table) or "none"


def written(step: Step, entry: Entry) -> str:
    """The positions that stay: not those of rejected drafts."""
    return f"{entry.start} to {entry.start + num_kept(step, entry) - 1}"


# --- the map of a step: every block with its tokens, owners and checkpoint, and the state slots


HEAD, BODY, GAP, MAP_TOP = 18.0, 24.0, 10.0, 4.0
MOST_BLOCKS = 64  # that are drawn
WIDE = 860.0  # of the map, more where a single block is wider
SLOT = 70.0


def map_legend(run: Run) -> Markup:
    numbers, names = colours(run), short_names(run.requests)
    owners = [(name, short) for name, short in names.items() if name != short]
    return legend(
        ("a block, its number and its owner", cell(1, 1, 16, 16, 0, "a")),
        ("shared by several requests", cell(1, 1, 16, 16, 0, "+")),
        ("free", cell(1, 1, 16, 16, None, "")),
        ("written in this step", rectangle(2, 2, 14, 14, class_="cell none written")),
        ("can be found by its prefix, with the state after its last token", checkpoint(9, 9)),
        *((visible(name), cell(1, 1, 16, 16, numbers[name], short)) for name, short in owners),
    )


def checkpoint(x: float, y: float) -> Markup:
    return rectangle(x - 4, y - 4, 8, 8, class_="checkpoint", transform=f"rotate(45 {x:g} {y:g})")


def map_of(drawn: Blocks, index: int) -> Markup:
    """Owners and slots while a step computes, with the tokens that it leaves; windowed layers have no slots."""
    run, pool, step = drawn.run, drawn.pools[index], drawn.run.steps[index]
    blocks, size = int(run.config["num_blocks"]), int(run.config["block_size"])
    shown = min(blocks, MOST_BLOCKS)
    place = max(9.0, min(38.0, 190.0 / size))
    width = size * place
    across = max(1, int(WIDE // (width + GAP)))
    shapes = []
    for block in range(shown):
        x, y = (block % across) * (width + GAP), MAP_TOP + (block // across) * (HEAD + BODY + GAP)
        shapes.append(of_block(drawn, index, block, (x + 1, y, place)))
    height = MAP_TOP + -(-shown // across) * (HEAD + BODY + GAP)
    where = "of windowed layers " if drawn.is_windowed else ""
    if not drawn.is_windowed:
        shapes.append(slots(run, pool.slots, height + 8))
        height += HEAD + BODY + 30
    title = f"Blocks {where}in step {step.number}"
    text = "Each block with the tokens that it holds, its owners and its checkpoint; below, the state slots."
    more = f" Blocks from {shown} on are not drawn." if blocks > shown else ""
    findable = f", {pool.cached} of them with a prefix that can be found" if pool.cached is not None else ""
    free = f"{counted(blocks - len(pool.owners), 'block')} free{findable}.{more}"
    owned = f"{len(pool.owners)} of {counted(blocks, 'block')} {where}owned"
    return joined(
        step_text(step, f"While it computes, {owned}; {free}"),
        scrolled(figure(title, text, across * (width + GAP) + 8, height + 4, shapes), title),
    )


def of_block(drawn: Blocks, step: int, block: int, at: tuple[float, float, float]) -> Markup:
    run, pool, held = drawn.run, drawn.pools[step], drawn.held[step]
    (x, y, place), owners = at, pool.owners.get(block, ())
    size = int(run.config["block_size"])
    numbers, names, tokens = colours(run), short_names(run.requests), held.tokens.get(block, {})
    fill = f"o{numbers[owners[0]] % NUM_COLOURS}" if owners else "none"
    whose = "+".join(names[name] for name in owners) or "free"
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
