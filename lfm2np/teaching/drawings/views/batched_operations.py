"""What is batched and what is not: every operation of one block of each kind, with its class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lfm2np.oracle.report.markup import Markup, counted, details, element, joined, table
from lfm2np.teaching.drawings.page.grid import operation_body, shape_text
from lfm2np.teaching.drawings.page.view import View, by_step, row_labels, step_text, view_of_run, view_without_steps
from lfm2np.teaching.drawings.runs.detail import EXPERT, PRODUCT, REQUEST, ROW
from lfm2np.teaching.drawings.runs.expert_choices import is_sparse, routes
from lfm2np.teaching.drawings.runs.recorded_run import Operation, Run, Step

LabelsOf = Callable[[Operation], Sequence[str]]

CLASSES = {
    PRODUCT: "weights meet all tokens of all requests at once: one large product",
    EXPERT: "its weights meet the step's tokens that chose it, whichever request they are of: a product for each",
    ROW: "each token by itself: it does not matter whose it is",
    REQUEST: "each request looks at its own past only: its blocks, its state, its random numbers",
}
FRAMES = {PRODUCT: "c0", ROW: "c1", REQUEST: "c2", EXPERT: "c3"}  # in page.css
LESSON = (
    "Of a block's operations only attention and the convolution (and the sampling at the end) ask whose token it is. "
    "All others run over the step's tokens as one flat array."
)
OF_EXPERTS = " An expert runs over those of them that chose it, of all requests at once."
MOST_WITH_NUMBERS = 64  # steps whose numbers are in the page; a longer run shows those of every so many


def ledger(run: Run) -> View:
    if not any(step.operations for step in run.steps):
        body = element("p", "This run was recorded without --trace-detail, so its operations are not known.")
        return view_without_steps("ledger", "What is batched and what is not", "", "", body)
    every = -(-len(run.steps) // MOST_WITH_NUMBERS)
    quiz = element(
        "p",
        element("label", element("input", type="checkbox", class_="quiz"), " Quiz: hide the classes, and guess"),
        element("output", class_="score"),
        class_="needs-script",
    )
    return view_of_run(
        run,
        "ledger",
        "What is batched and what is not",
        LESSON + OF_EXPERTS if is_sparse(run) else LESSON,
        [
            element("dl", [[element("dt", name), element("dd", CLASSES[name])] for name in classes(run)]),
            quiz,
            by_step(run, lambda step: of_step(run, step, step.number % every == 0)),
        ],
        element("p", f"The numbers of every {every}. step are here, the sizes of all.") if every > 1 else None,
    )


def classes(run: Run) -> list[str]:
    return [name for name in CLASSES if name != EXPERT or is_sparse(run)]


def of_step(run: Run, step: Step, with_numbers: bool) -> Markup:
    if not step.operations:
        return element("p", f"Step {step.number} computed nothing.")
    known = classes(run)
    labels = labels_of(run, step)
    return joined(
        step_text(
            step, f"{counted(step.num_tokens, 'token')} of {counted(len(step.entries), 'request')} in one flat array."
        ),
        shares(step, known),
        [
            element(
                "div",
                element("h3", title),
                element("ul", [item(group, labels, with_numbers, known) for group in grouped(chosen)], class_="ledger"),
            )
            for title, chosen in blocks(step.operations)
            if chosen
        ],
    )


def labels_of(run: Run, step: Step) -> LabelsOf:
    """How the rows of an operation are named: by their tokens, those of an expert by the tokens that chose it."""
    tokens, layers = row_labels(run, step), {route.layer: route for route in routes(step)}

    def labels(operation: Operation) -> list[str]:
        if "expert" not in operation:
            return tokens
        return [tokens[row] for row in layers[operation["layer"]].tokens_of(operation["expert"])]

    return labels


def blocks(operations: Sequence[Operation]) -> list[tuple[str, list[Operation]]]:
    """The first block of each kind, the first experts if they are in another, and what is before and after blocks."""
    kinds = {"convolve": "convolution", "attend": "attention"}
    layers = {
        operation["layer"]: kinds[operation["operation"]]
        + (f" in a window of {operation['window']}" if "window" in operation else "")
        for operation in operations
        if operation["operation"] in kinds
    }
    sparse = {operation["layer"] for operation in operations if operation["operation"] == "best"}
    known = dict.fromkeys([*kinds.values(), *sorted(layers.values())])
    first = [min((n for n, k in layers.items() if k == kind), default=None) for kind in known]
    groups = [("Before the blocks", [operation for operation in operations if operation["operation"] == "embed"])]
    for layer in first:
        if layer is not None:
            kind = layers[layer] + (", mixture of experts" if layer in sparse else "")
            groups.append(
                (f"Block {layer}: {kind}", [operation for operation in operations if operation["layer"] == layer])
            )
    if sparse and not sparse & set(first):
        layer_operations = [operation for operation in operations if operation["layer"] == min(sparse)]
        start = next(index for index, operation in enumerate(layer_operations) if operation["name"] == "ffn_norm")
        groups.append((f"Block {min(sparse)}, its second half: mixture of experts", layer_operations[start:]))
    after = [operation for operation in operations if operation["layer"] is None and operation["operation"] != "embed"]
    return [*groups, ("After the blocks", after)]


def grouped(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Calls of one line of code, one a request or an expert, together."""
    groups: list[list[Operation]] = []
    for operation in operations:
        same = next((g for g in groups if several(operation) and what(g[0]) == what(operation)), None)
        if same is None:
            groups.append([operation])
        else:
            same.append(operation)
    return groups


def several(operation: Operation) -> bool:
    return operation["class"] == REQUEST or "expert" in operation


def what(operation: Operation) -> tuple[object, ...]:
    return operation["operation"], operation["class"], operation["source"]


def item(group: Sequence[Operation], labels: LabelsOf, with_numbers: bool, known: Sequence[str]) -> Markup:
    first = group[0]
    sizes = "; ".join(sizes_text(operation) for operation in group[:6]) + (" ..." if len(group) > 6 else "")
    calls = f"{len(group)} calls" if len(group) > 1 else "one call"
    title = f"{name_of(group)} ({first['operation']}), {calls}: {sizes}"
    guesses = [
        element("button", name, type="button", class_="guess", data_right="yes" if name == first["class"] else None)
        for name in known
    ]
    return element(
        "li",
        element("span", first["class"], class_=f"class {FRAMES[first['class']]}"),
        element("span", guesses, element("output"), class_="guesses", hidden=True),
        opened(title, group, labels) if with_numbers else element("span", title),
    )


def name_of(group: Sequence[Operation]) -> str:
    """That of the weight; of experts with their numbers."""
    name, experts = str(group[0]["name"]), [str(operation["expert"]) for operation in group if "expert" in operation]
    if not experts:
        return name
    listed = f"experts {', '.join(experts)}" if len(experts) > 1 else f"expert {experts[0]}"
    return f"{name.replace(f'.{experts[0]}.', '.E.')} of {listed}"


def opened(title: str, group: Sequence[Operation], labels: LabelsOf) -> Markup:
    more = element("p", f"and {len(group) - 3} more") if len(group) > 3 else None
    return details(title, [operation_body(operation, labels(operation)) for operation in group[:3]], more)


def sizes_text(operation: Operation) -> str:
    inputs = ", ".join(f"[{shape_text(tensor['shape'])}]" for tensor in operation["inputs"].values())
    window = f", of which a row sees {operation['window']} at most" if "window" in operation else ""
    context = f" over {operation['context']} positions{window}" if "context" in operation else ""
    output = f"[{shape_text(operation['output']['shape'])}]"
    return f"{inputs} → {output}{context}" if inputs else output


def shares(step: Step, known: Sequence[str]) -> Markup:
    rows = []
    for name in known:
        mine = [operation for operation in step.operations if operation["class"] == name]
        rows.append([name, len(mine), f"{sum(operation['output']['shape'][0] for operation in mine):,}"])
    return table("All blocks of this step", ["class", "calls", "rows in all"], rows)
