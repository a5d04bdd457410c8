"""Memory: the pool of key/value blocks over time, their owners, and the state that does not grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lfm2np.drawings.page.markup import (
    Markup,
    details,
    element,
    figure,
    joined,
    scrolled,
    table,
    visible,
    words,
)
from lfm2np.drawings.page.view import View, by_step, cell, columns, short_names, step_numbers, view_of_run
from lfm2np.drawings.runs.derive import colours, loads, num_kept
from lfm2np.drawings.runs.paged import contents
from lfm2np.drawings.runs.pool import pools
from lfm2np.drawings.runs.run import Entry, Run, Step
from lfm2np.drawings.views.memory_map import MOST_BLOCKS, map_legend, map_of

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
        map_legend(owners_legend(run)),
        element("p", f"The map of every {every}. step is drawn.") if every > 1 else None,
        by_step(run, of_step),
        element("h3", "All steps"),
        scrolled(chart(run, owned), "Block pool"),
        growth(run),
        details("The numbers of the figure", pool_table(run, owned)),
    )


def owners_legend(run: Run) -> list[tuple[str, Markup]]:
    """Which letter or number stands for which request, where that is not its name."""
    numbers, names = colours(run), short_names(run.requests)
    return [(visible(name), cell(1, 1, 16, 16, numbers[name], short)) for name, short in names.items() if name != short]


def chart(run: Run, owned: Sequence[Mapping[int, tuple[str, ...]]]) -> Markup:
    """A row a block, a column a step."""
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
        shared, free = (
            sum(len(names) > 1 for names in owners.values()),
            "\u2013" if step.abandoned else step.free_blocks,
        )
        rows.append([step.number, len(owners), shared, free, len(step.moves)])
    return table("Blocks by step", ["step", "owned", "shared", "free after it", "moves"], rows)
