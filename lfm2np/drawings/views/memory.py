"""Memory: the pool of key/value blocks over time, their owners, and the state that does not grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lfm2np.drawings.page.markup import Markup, counted, details, element, joined, number, scrolled, table, visible
from lfm2np.drawings.page.svg import figure, rectangle, words
from lfm2np.drawings.page.view import (
    NUM_COLOURS,
    View,
    by_step,
    cell,
    columns,
    legend,
    short_names,
    step_numbers,
    step_text,
    view_of_run,
)
from lfm2np.drawings.runs.derive import Pool, colours, loads, num_kept, pools
from lfm2np.drawings.runs.paged import Contents, contents
from lfm2np.drawings.runs.run import Entry, Run, Step

SIDE, LEFT, TOP = 22.0, 70.0, 16.0
MOST_MAPS = 64  # steps with a map; a longer run has one for every so many
MOVES = {
    "zero_state": "state slot {1} is set to zeros: a request that begins",
    "restore_state": "the checkpoint of block {0} is copied to state slot {1}: a prefix hit brings attention AND state",
    "copy_block": "block {0} is copied to block {1}: copy-on-write, since another request shares it",
    "copy_state": "state slot {0} is copied to slot {1}: a fork goes on by itself",
    "save_block": "block {0} is saved to host block {1}: swapped out",
    "load_block": "host block {0} is loaded to block {1}: swapped in",
    "save_state": "state slot {0} is saved with host block {1}",
    "load_state": "the state with host block {0} is loaded to slot {1}",
}


def memory(run: Run) -> View:
    known, held_after = pools(run), list(contents(run))
    owned = [one.owners for one in known]
    every = -(-len(run.steps) // MOST_MAPS)

    def of_step(step: Step) -> list[Markup]:
        index = step.number
        drawn = [map_of(run, step, known[index], held_after[index])] if index % every == 0 else []
        return [*drawn, now(run, step)]

    return view_of_run(
        run,
        "main",
        "memory",
        "Memory",
        "Keys and values grow by blocks that any request may get, share or give back; the convolution's state "
        "is a few columns for each request, however long it is.",
        map_legend(run),
        element("p", f"The map of every {every}. step is drawn.") if every > 1 else None,
        by_step(run, of_step),
        element("h3", "All steps"),
        scrolled(chart(run, owned), "Block pool"),
        growth(run),
        details("The numbers of the figure", pool_table(run, owned)),
    )


def chart(run: Run, owned: Sequence[Mapping[int, tuple[str, ...]]]) -> Markup:
    numbers, names = colours(run), short_names(run.requests)
    blocks = int(run.config["num_blocks"])
    used = 1 + max((block for blocks_of_step in owned for block in blocks_of_step), default=0)
    shown = blocks if blocks <= MOST_BLOCKS else min(blocks, used, 2 * MOST_BLOCKS)
    width, height = LEFT + SIDE * len(run.steps) + 10, TOP + SIDE * shown + 24
    shapes: list[object] = [columns(len(run.steps), SIDE, LEFT, TOP - 4, TOP + SIDE * shown + 4)]
    for block in range(shown):
        shapes.append(words(LEFT - 8, TOP + (block + 0.5) * SIDE, f"block {block}", "end", class_="tick"))
    for block, first, stop, requests in held(owned):
        if block >= shown:
            continue
        letter = names[requests[0]] if len(requests) == 1 else f"{names[requests[0]]}+"
        steps = f"step {first}" if stop == first + 1 else f"steps {first} to {stop - 1}"
        title = f"{steps}, block {block}: {', '.join(map(visible, requests))}"
        x, y = LEFT + first * SIDE + 1, TOP + block * SIDE + 1
        shapes.append(cell(x, y, SIDE * (stop - first) - 2, SIDE - 2, numbers[requests[0]], letter, "", title))
    shapes += step_numbers(len(run.steps), SIDE, LEFT, height - 8)
    description = "A row for each block of the pool and a column for each step; a filled bar is owned by a request."
    return figure("Blocks and their owners", description, width, height, shapes)


def held(owned: Sequence[Mapping[int, tuple[str, ...]]]) -> list[tuple[int, int, int, tuple[str, ...]]]:
    """Block, first step, step after the last, owners: for as long as a block's owners are the same."""
    found = []
    for block in sorted({block for one in owned for block in one}):
        first = 0
        for step in range(1, len(owned) + 1):
            before = owned[first].get(block, ())
            if step == len(owned) or owned[step].get(block, ()) != before:
                if before:
                    found.append((block, first, step, before))
                first = step
    return found


def now(run: Run, step: Step) -> Markup:
    """What moves in this step, and the block tables of those that take part."""
    moves = [MOVES[kind].format(source, destination) for kind, source, destination in step.moves]
    hits = [
        f"{visible(entry.request_id)} enters with {entry.start} tokens found in the prefix cache"
        for entry in step.entries
        if entry.request_id in step.admitted and entry.start and not loads(step, entry)
    ]
    rows = []
    for entry in step.entries:
        blocks = ", ".join(map(str, entry.block_table)) or "none"
        rows.append([visible(entry.request_id), blocks, written(step, entry), entry.slot])
    head = ["request", "block table", "positions written", "state slot"]
    return joined(
        element("ul", [element("li", one) for one in (*hits, *moves)]) if hits or moves else None,
        table(f"Block tables in step {step.number}", head, rows),
    )


def written(step: Step, entry: Entry) -> str:
    """The positions that stay: not those of rejected drafts."""
    kept = 0 if step.abandoned else num_kept(step, entry)
    return f"{entry.start} to {entry.start + kept - 1}" if kept else "none"


def growth(run: Run) -> Markup:
    """Keys and values against the state, in numbers; from the shapes of recorded operations."""
    sizes = sizes_of(run)
    if sizes is None:
        return element(
            "p", "How many numbers a block and a state are is known where the run was recorded with --trace-detail."
        )
    token, state = sizes
    rows = [[length, token * length, state] for length in (1, 4, 16, 64, 256, 1024)]
    return joined(
        element("h3", "What grows and what does not"),
        element(
            "p",
            f"A token has {token:,} numbers of keys and values; a request has {state:,} numbers of convolution "
            f"state, as much as {state / token:.1f} tokens, and never more."
            if token
            else f"Without attention there are no keys and values; a request has {state:,} numbers of state.",
        ),
        table("Numbers held for one request", ["tokens so far", "keys and values", "convolution state"], rows),
    )


def sizes_of(run: Run) -> tuple[int, int] | None:
    """Numbers of keys and values a token, and of convolution state a request."""
    for step in run.steps:
        if step.operations and step.entries:
            token = state = 0
            count = len(step.entries)
            for operation in step.operations:
                if operation["operation"] == "cache_entries":
                    shape = operation["inputs"]["keys"]["shape"]
                    token += 2 * shape[1] * shape[2]
                elif operation["operation"] == "convolve":
                    shape = operation["inputs"]["history"]["shape"]
                    state += shape[0] * shape[1]
            return token, state // count
    return None


def pool_table(run: Run, owned: Sequence[Mapping[int, tuple[str, ...]]]) -> Markup:
    rows = []
    for step, owners in zip(run.steps, owned, strict=True):
        shared = sum(len(names) > 1 for names in owners.values())
        free = "\u2013" if step.abandoned else step.free_blocks
        rows.append([step.number, len(owners), shared, free, len(step.moves)])
    return table("Blocks by step", ["step", "owned", "shared", "free after it", "moves"], rows)


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
        ("can be found by its prefix: it has a checkpoint of the state after its last token", checkpoint(9, 9)),
        *((visible(name), cell(1, 1, 16, 16, numbers[name], short)) for name, short in owners),
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
        x, y = (block % across) * (width + GAP), MAP_TOP + (block // across) * (HEAD + BODY + GAP)
        shapes.append(of_block(run, block, (x + 1, y, place), pool, held))
    bottom = MAP_TOP + -(-shown // across) * (HEAD + BODY + GAP)
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
