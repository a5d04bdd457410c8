"""What is batched and what is not: every operation of one block of each kind, in one of three classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lfm2np.drawings.page.markup import Markup, counted, details, element, joined, table, visible
from lfm2np.drawings.page.numbers import operation_body, shape_text
from lfm2np.drawings.page.view import View, at_step, fullest
from lfm2np.drawings.runs.detail import PRODUCT, REQUEST, ROW
from lfm2np.drawings.runs.run import Run, Step

CLASSES = {
    PRODUCT: "weights meet all tokens of all requests at once: one large product",
    ROW: "each token by itself: it does not matter whose it is",
    REQUEST: "each request looks at its own past only: its blocks, its state, its random numbers",
}
ORDER = (PRODUCT, ROW, REQUEST)
MOST_WITH_NUMBERS = 64  # steps whose numbers are in the page; a longer run shows those of every so many


def ledger(run: Run) -> View:
    last = len(run.steps) - 1
    if not any(step.operations for step in run.steps):
        body = element("p", "This run was recorded without --trace-detail, so its operations are not known.")
        return View("ledger", "What is batched and what is not", "", body)
    every = -(-len(run.steps) // MOST_WITH_NUMBERS)
    quiz = element(
        "p",
        element("label", element("input", type="checkbox", class_="quiz"), " Quiz: hide the classes, and guess"),
        element("output", class_="score"),
        class_="needs-script",
    )
    return View(
        id="ledger",
        title="What is batched and what is not",
        lesson="Of a block's operations only attention and the convolution (and the sampling at the end) ask whose "
        "token it is. All others run over the step's tokens as one flat array.",
        body=joined(
            [
                element("dl", [[element("dt", name), element("dd", text)] for name, text in CLASSES.items()]),
                quiz,
                element("p", f"The numbers of every {every}. step are here, the sizes of all.") if every > 1 else None,
                [at_step(step.number, last, of_step(run, step, step.number % every == 0)) for step in run.steps],
            ]
        ),
        player="main",
        num_steps=len(run.steps),
        start=fullest(run),
    )


def of_step(run: Run, step: Step, with_numbers: bool) -> Markup:
    if not step.operations:
        return element("p", f"Step {step.number} computed nothing.")
    labels = [
        f"{visible(entry.request_id)} {entry.start + index} {visible(run.word(token))}"
        for entry in step.entries
        for index, token in enumerate(entry.token_ids)
    ]
    return joined(
        [
            element(
                "p",
                element("strong", f"Step {step.number}. "),
                f"{counted(step.num_tokens, 'token')} of {counted(len(step.entries), 'request')} in one flat array.",
            ),
            shares(step),
            [
                element(
                    "div",
                    element("h3", title),
                    element("ul", [item(one, labels, with_numbers) for one in grouped(chosen)], class_="ledger"),
                )
                for title, chosen in blocks(step.operations)
                if chosen
            ],
        ]
    )


def blocks(operations: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The first block of each kind, and what stands before and after the blocks."""
    layers = {one["layer"]: "convolution" for one in operations if one["operation"] == "convolve"}
    layers |= {one["layer"]: "attention" for one in operations if one["operation"] == "attend"}
    first = {
        kind: min((n for n, k in layers.items() if k == kind), default=None) for kind in ("convolution", "attention")
    }
    made = [("Before the blocks", [one for one in operations if one["operation"] == "embed"])]
    for kind, layer in first.items():
        if layer is not None:
            made.append((f"Block {layer}: {kind}", [one for one in operations if one["layer"] == layer]))
    after = [one for one in operations if one["layer"] is None and one["operation"] != "embed"]
    return [*made, ("After the blocks", after)]


def grouped(operations: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Calls of one line of code, one a request, together."""
    found: list[list[Mapping[str, Any]]] = []
    for one in operations:
        if found and one["class"] == REQUEST:
            same = next((g for g in found if g[0]["source"] == one["source"] and g[0]["class"] == REQUEST), None)
            if same is not None:
                same.append(one)
                continue
        found.append([one])
    return found


def item(group: Sequence[Mapping[str, Any]], labels: Sequence[str], with_numbers: bool) -> Markup:
    first = group[0]
    sizes = "; ".join(sizes_text(one) for one in group[:6]) + (" ..." if len(group) > 6 else "")
    calls = f"{len(group)} calls" if len(group) > 1 else "one call"
    guesses = [
        element("button", name, type="button", class_="guess", data_right="yes" if name == first["class"] else None)
        for name in ORDER
    ]
    return element(
        "li",
        element("span", first["class"], class_=f"class c{ORDER.index(first['class'])}"),
        element("span", guesses, element("output"), class_="guesses", hidden=True),
        opened(f"{first['name']} ({first['operation']}), {calls}: {sizes}", group, labels)
        if with_numbers
        else element("span", f"{first['name']} ({first['operation']}), {calls}: {sizes}"),
    )


def opened(title: str, group: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> Markup:
    """The numbers of a line of code's first calls, on demand."""
    more = element("p", f"and {len(group) - 3} more") if len(group) > 3 else None
    return details(title, [operation_body(one, labels) for one in group[:3]], more)


def sizes_text(one: Mapping[str, Any]) -> str:
    inputs = ", ".join(f"[{shape_text(tensor['shape'])}]" for tensor in one["inputs"].values())
    context = f" over {one['context']} positions" if "context" in one else ""
    return (
        f"{inputs} → [{shape_text(one['output']['shape'])}]{context}"
        if inputs
        else f"[{shape_text(one['output']['shape'])}]"
    )


def shares(step: Step) -> Markup:
    """How many calls each class takes in this step."""
    rows = []
    for name in ORDER:
        mine = [one for one in step.operations if one["class"] == name]
        rows.append([name, len(mine), f"{sum(one['output']['shape'][0] for one in mine):,}"])
    return table("All blocks of this step", ["class", "calls", "rows in all"], rows)
