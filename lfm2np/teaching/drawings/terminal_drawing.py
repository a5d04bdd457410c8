"""A step in the terminal: plan, experts, blocks and timeline in plain characters."""

from __future__ import annotations

from collections.abc import Sequence

from lfm2np.oracle.report.markup import counted, visible
from lfm2np.teaching.drawings.page.view import events_of
from lfm2np.teaching.drawings.runs.derive import LETTERS, Pool, moments, pools
from lfm2np.teaching.drawings.runs.expert_choices import routes
from lfm2np.teaching.drawings.runs.recorded_run import Run, Step, in_windows

MOST_STEPS = 60  # columns of the timeline
PER_LINE = 32  # blocks


def as_text(run: Run, number: int, colour: bool) -> str:
    """Step `number` of a run; its experts where the trace has their detail."""
    step = run.steps[number]
    windows = in_windows(run)
    of_windows = blocks(windows, pools(run, windows)[number], colour, " in windowed layers") if windows else ""
    owned = blocks(run, pools(run)[number], colour)
    parts = [plan(run, step), experts(step), owned, of_windows, timeline(run, number, colour)]
    return "\n\n".join(part for part in parts if part)


def plan(run: Run, step: Step) -> str:
    budget = run.config["max_num_batched_tokens"]
    lines = [
        f"step {step.number} of {len(run.steps) - 1}: {step.num_tokens} of {budget} tokens, "
        f"{counted(len(step.entries), 'request')}"
    ]
    for entry in step.entries:
        ids = " ".join(visible(run.word(token_id)) for token_id in entry.token_ids[:8])
        more = " ..." if len(entry.token_ids) > 8 else ""
        drafts = f", {entry.num_drafts} drafts" if entry.num_drafts else ""
        tokens = step.tokens.get(entry.request_id, ())
        said = f" -> {' '.join(visible(run.word(token)) for token in tokens)}" if tokens else ""
        places = f"{entry.start}" if entry.stop == entry.start + 1 else f"{entry.start}-{entry.stop - 1}"
        lines.append(
            f"  {visible(entry.request_id):<12} positions {places:<9} slot {entry.slot}{drafts}  {ids}{more}{said}"
        )
    return "\n".join([*lines, *(f"  {event}" for event in events_of(step))])


def experts(step: Step) -> str:
    """The rows of each expert's product, a line a sparse block; nothing for a dense model."""
    layers = routes(step)
    if not layers:
        return ""
    width = len(str(max(layers[0].num_experts - 1, *(max(layer.rows) for layer in layers))))
    names = " ".join(f"{expert:>{width}}" for expert in range(layers[0].num_experts))
    lines = ["rows of each expert, . none", f"  {'':<10} {names}"]
    for layer in layers:
        counts = " ".join(f"{count or '.':>{width}}" for count in layer.rows)
        text = f"{counted(layer.num_read, 'expert')} for {counted(layer.num_choices, 'choice')}"
        lines.append(f"  {f'block {layer.layer}':<10} {counts}  {text}")
    return "\n".join(lines)


def blocks(run: Run, pool: Pool, colour: bool, where: str = "") -> str:
    """Each block by its owner's letter; + is shared, . is free."""
    names = list(run.requests)
    owned = pool.owners
    signs = []
    for block in range(int(run.config["num_blocks"])):
        who = owned.get(block, ())
        sign = "." if not who else "+" if len(who) > 1 else sign_of(names, who[0])
        signs.append(painted(sign, names.index(who[0]), colour) if who else sign)
    shown = -(-(1 + max(owned, default=0)) // PER_LINE) * PER_LINE
    rows = [signs[start : start + PER_LINE] for start in range(0, min(len(signs), shown), PER_LINE)]
    if len(signs) > shown:
        rows[-1].append(f" and {counted(len(signs) - shown, 'free block')} more")
    lines = [f"  {index * PER_LINE:>5}  {''.join(row)}" for index, row in enumerate(rows)]
    return "\n".join([f"blocks of {run.config['block_size']} tokens{where}: {key(names)}; + shared, . free", *lines])


def timeline(run: Run, number: int, colour: bool) -> str:
    """P prefill, R recomputed, d decode, q queued, x preempted; the step is marked below."""
    first = max(0, min(number - MOST_STEPS // 2, len(run.steps) - MOST_STEPS))
    shown = range(first, min(len(run.steps), first + MOST_STEPS))
    lines = ["timeline: P prefill, R recomputed, d decode, q queued, x preempted"]
    for index, (name, states) in enumerate(moments(run).items()):
        row = "".join(painted(LETTERS[states[step].state] or " ", index, colour) for step in shown)
        lines.append(f"  {visible(name)[:12]:<12} {row}")
    lines.append(f"  {'':<12} {' ' * (number - first)}^ step {number}")
    return "\n".join(lines)


def sign_of(names: Sequence[str], name: str) -> str:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    return letters[names.index(name) % len(letters)]


def key(names: Sequence[str]) -> str:
    parts = [
        visible(name) if visible(name) == sign_of(names, name) else f"{sign_of(names, name)} {visible(name)}"
        for name in names[:12]
    ]
    return ", ".join(parts) + (", ..." if len(names) > 12 else "")


def painted(sign: str, index: int, colour: bool) -> str:
    return f"\x1b[{31 + index % 6}m{sign}\x1b[0m" if colour else sign
