"""One step of a model that fits on paper, part by part: every matrix beside those that it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lfm2np.oracle.report.markup import Markup, element, visible
from lfm2np.teaching.drawings.page.grid import across, grid
from lfm2np.teaching.drawings.page.view import row_labels
from lfm2np.teaching.drawings.runs.paged import Cells, context
from lfm2np.teaching.drawings.runs.recorded_run import Operation, Run, Step

Weights = Mapping[str, Any]  # by name in the checkpoint, NumPy arrays
PRODUCT, ROW, REQUEST = "c0", "c1", "c2"  # classes of operations, as in page.css
MOST_ROWS = 8  # of a step that is drawn
EPS = "0.00001"
EMBEDDINGS = "embeddings, a column for each word"


@dataclass(frozen=True)
class Stage:
    """What a picture is drawn from: a step, the weights, and what attention finds in the blocks."""

    run: Run
    step: Step
    weights: Weights
    cells: Cells

    @property
    def labels(self) -> list[str]:
        """Of the rows; without the request's name where there is only one."""
        if len(self.run.requests) > 1:
            return row_labels(self.run, self.step)
        (entry,) = self.step.entries
        return [f"{place} {visible(self.run.word(id_))}" for place, id_ in enumerate(entry.token_ids, entry.start)]

    @property
    def starts(self) -> list[int]:
        sizes = [len(entry.token_ids) for entry in self.step.entries]
        return [sum(sizes[:count]) for count in range(len(sizes))]

    def of(self, layer: int | None, operation: str) -> list[Operation]:
        return [each for each in self.step.operations if each["layer"] == layer and each["operation"] == operation]

    def weight(self, name: str) -> list[list[float]]:
        """[out, in]; of a vector one row."""
        stored = np.asarray(self.weights[f"model.{name}.weight"], np.float64)
        return (stored.reshape(1, -1) if stored.ndim == 1 else stored.reshape(len(stored), -1)).tolist()

    def name(self, index: int) -> str:
        """Of the request with that place in the step, for captions."""
        return f" of {visible(self.step.entries[index].request_id)}" if len(self.step.entries) > 1 else ""


def values(operation: Operation, of: str = "") -> list[list[float]]:
    """Of its output, or of the input with that name."""
    rows: list[list[float]] = (operation["inputs"][of] if of else operation["output"])["values"]
    return rows


def row(*parts: object) -> Markup:
    return element("div", parts, class_="row")


def stack(*parts: Markup) -> Markup:
    """Weights, and below them what is made with them."""
    return element("div", parts, class_="stack")


def sign(text: str) -> Markup:
    return element("span", text, class_="op", aria_hidden="true")


def weights(key: str, name: str, rows: Sequence[Sequence[float]], **more: Any) -> Markup:
    return grid(key, name, rows, class_="weights", **more)


def normed(stage: Stage, key: str, name: str, of: str, weight: str, result: Operation, size: int) -> Markup:
    """Rows, or heads of `size` channels, divided by their root mean square."""
    return stack(
        weights(f"{key}w", "weight", stage.weight(weight)),
        grid(key, name, values(result), "norm", f"{of} {key}w", class_=ROW, size=size, eps=EPS),
    )


def product(key: str, name: str, of: str, above: Sequence[Sequence[float]], result: Operation, **more: Any) -> Markup:
    """Weights [in, out] above the product of the matrix at its left with them."""
    head = more.pop("head", ())
    made_of = f"{of} {key}w"
    return stack(
        weights(f"{key}w", more.pop("called", "weights"), above, head=head),
        grid(key, name, values(result), "linear", made_of, class_=PRODUCT, head=head, bare=True, **more),
    )


def tokens_in(stage: Stage) -> list[Markup]:
    table = stage.weight("embed_tokens")
    words = [f"{index} {visible(stage.run.word(index))}" for index in range(len(table))]
    (x,) = stage.of(None, "embed")
    ids = " ".join(str(token) for entry in stage.step.entries for token in entry.token_ids)
    return [
        row(
            weights("table", "embeddings, a row for each word", table, labels=words),
            sign("\u2192"),
            grid("x", "x, a row for each token", values(x), "embed", "table", labels=stage.labels, class_=ROW, ids=ids),
        )
    ]


def block(stage: Stage, layer: int) -> list[Markup]:
    """A whole block: convolution or attention, then the feed-forward."""
    first = stage.of(layer, "rms_norm")[0]
    hidden = first["inputs"]["x"]["shape"][1]
    begin = [
        grid("x", "x", values(first, "x"), "embed" if layer == 0 else "before", labels=stage.labels),
        sign("\u2192"),
        normed(stage, "n", "normed", "x", f"layers.{layer}.operator_norm", first, hidden),
        sign("\u00d7"),
    ]
    operator = convolution if stage.of(layer, "convolve") else attention
    return [*operator(stage, layer, begin), feed_forward(stage, layer, hidden)]


def convolution(stage: Stage, layer: int, begin: list[Markup]) -> list[Markup]:
    projected, out = stage.of(layer, "linear")[:2]
    hidden = out["output"]["shape"][1]
    gated = stage.of(layer, "multiply")[1]
    parts = [("gate_in (B)", hidden), ("gate_out (C)", hidden), ("value (x)", hidden)]
    above = across(stage.weight(f"layers.{layer}.conv.in_proj"))
    windows, mixed = [], []
    for index, operation in enumerate(stage.of(layer, "convolve")):
        history = values(operation, "history")
        name, rows = f"u, gate_in \u00d7 value{stage.name(index)}", [*history, *values(operation, "u")]
        places: dict[str, Any] = {"kept": len(history), "skip": len(history), "row": stage.starts[index]}
        windows.append(grid(f"u{index}", name, rows, "multiply", f"p:0 p:{2 * hidden}", class_=ROW, **places))
        mixed += values(operation)
    taps = across(stage.weight(f"layers.{layer}.conv.conv"))
    of = " ".join([*(f"u{index}" for index in range(len(windows))), "taps"])
    starts = " ".join(map(str, stage.starts))
    return [
        row(*begin, product("p", "in_proj", "n", above, projected, head=parts, called="in_proj, weights")),
        row(
            *windows,
            sign("\u2217"),
            stack(
                weights("taps", "taps", taps),
                grid("v", "convolved", mixed, "convolve", of, class_=REQUEST, starts=starts),
            ),
            sign("\u2192"),
            grid("y", "\u00d7 gate_out", values(gated), "multiply", f"v:0 p:{hidden}", class_=ROW),
            sign("\u00d7"),
            product("o", "out_proj", "y", across(stage.weight(f"layers.{layer}.conv.out_proj")), out),
            sign("+ x ="),
            grid("r", "x", values(stage.of(layer, "add")[0]), "add", "x o", class_=ROW),
        ),
    ]


def attention(stage: Stage, layer: int, begin: list[Markup]) -> list[Markup]:
    projected, out = stage.of(layer, "linear")[:2]
    _, q_normed, k_normed, _ = stage.of(layer, "rms_norm")
    q_turned, k_turned = stage.of(layer, "rotate")
    _, heads, size = q_normed["output"]["shape"]
    groups = k_normed["output"]["shape"][1]
    q, kv = heads * size, groups * size
    name = f"layers.{layer}.self_attn"
    above = across([line for letter in ("q", "k", "v") for line in stage.weight(f"{name}.{letter}_proj")])
    parts = [("queries", q), ("keys", kv), ("values", kv)]
    angles = [grid(key, text, values(q_turned, key), "angle") for key, text in (("cos", "cosine"), ("sin", "sine"))]
    of, seen, words = [], [], []
    for index, operation in enumerate(stage.of(layer, "attend")):
        drawn, keys = attended(stage, layer, index, values(q_turned), (heads, groups, size))
        seen.append(row(*drawn))
        of += keys
        words += values(operation)
    sizes = {"size": size, "heads": heads, "groups": groups, "starts": " ".join(map(str, stage.starts))}
    return [
        row(*begin, product("p", "q, k, v", "n", above, projected, head=parts, called="q_proj, k_proj, v_proj")),
        row(
            *angles,
            normed(stage, "qn", "queries, normed", "p:0", f"{name}.q_layernorm", q_normed, size),
            sign("\u21bb"),
            grid("q", "rotated", values(q_turned), "rotate", "qn cos sin", class_=ROW, size=size),
            normed(stage, "kn", "keys, normed", f"p:{q}", f"{name}.k_layernorm", k_normed, size),
            sign("\u21bb"),
            grid("k", "rotated", values(k_turned), "rotate", "kn cos sin", class_=ROW, size=size),
        ),
        *seen,
        row(
            grid("a", "attended", words, "weigh", " ".join(of), class_=REQUEST, **sizes),
            sign("\u00d7"),
            product("o", "out_proj", "a", across(stage.weight(f"{name}.out_proj")), out),
            sign("+ x ="),
            grid("r", "x", values(stage.of(layer, "add")[0]), "add", "x o", class_=ROW),
        ),
    ]


def attended(
    stage: Stage, layer: int, index: int, queries: Sequence[Sequence[float]], sizes: tuple[int, int, int]
) -> tuple[list[Markup], list[str]]:
    """One request's keys, values, scores and weights, and the keys of those that its output is made of.

    Scores and weights are no part of a trace: they are worked out here, of its queries and keys.
    """
    heads, groups, size = sizes
    entry, first = stage.step.entries[index], stage.starts[index]
    (stored,) = stage.of(layer, "cache_entries")
    span = slice(first, first + len(entry.token_ids))
    block_size = int(stage.run.config["block_size"])
    cached_keys, cached_values = context(stage.cells, layer, entry.block_table, entry.start, block_size)
    keys = [*cached_keys, *values(stored, "keys")[span]]
    drawn = [
        grid(f"{letter}{index}", f"{what}{stage.name(index)}", rows, "cached", kept=entry.start)
        for letter, what, rows in (
            ("K", "keys", keys),
            ("V", "values", [*cached_values, *values(stored, "values")[span]]),
        )
    ]
    names = []
    for head in range(heads):
        group = head * groups // heads
        column = slice(group * size, (group + 1) * size)
        scores = scores_of([query[head * size : (head + 1) * size] for query in queries[span]], keys, column)
        at = f"{head * size} {first} {group * size}"
        scored = grid(f"S{index}.{head}", f"scores, head {head}", scores, "score", f"q K{index}", at=at, size=size)
        shares = [softmax(line) for line in scores]
        weighed = grid(f"P{index}.{head}", "weights", shares, "softmax", f"S{index}.{head}", class_=REQUEST)
        drawn.append(element("div", scored, sign("\u2192"), weighed, class_="together"))
        names.append(f"P{index}.{head}")
    return drawn, [*names, f"V{index}"]


def scores_of(
    queries: Sequence[Sequence[float]], keys: Sequence[Sequence[float]], column: slice
) -> list[list[float | None]]:
    """[t, C]: a row's query times the keys up to its own position, by the root of the head's size."""
    before, rows = len(keys) - len(queries), []
    for index, query in enumerate(queries):
        line = [
            rounded(math.fsum(a * b for a, b in zip(query, key[column], strict=True)) / math.sqrt(len(query)))
            for key in keys[: before + index + 1]
        ]
        rows.append([*line, *[None] * (len(keys) - len(line))])
    return rows


def softmax(scores: Sequence[float | None]) -> list[float | None]:
    known = [score for score in scores if score is not None]
    largest = max(known)
    total = math.fsum(math.exp(score - largest) for score in known)
    return [None if score is None else rounded(math.exp(score - largest) / total) for score in scores]


def rounded(value: float) -> float:
    """As many digits as float32 has."""
    return float(f"{value:.8g}")


def feed_forward(stage: Stage, layer: int, hidden: int) -> Markup:
    wide, narrow = stage.of(layer, "linear")[2:]
    (swiglu,) = stage.of(layer, "swiglu")
    width = swiglu["output"]["shape"][1]
    name = f"layers.{layer}"
    above = across([*stage.weight(f"{name}.feed_forward.w1"), *stage.weight(f"{name}.feed_forward.w3")])
    last = stage.of(layer, "add")[1]
    return row(
        normed(stage, "fn", "normed", "r", f"{name}.ffn_norm", stage.of(layer, "rms_norm")[-1], hidden),
        sign("\u00d7"),
        product("g", "w1, w3", "fn", above, wide, head=[("gate", width), ("up", width)], called="w1, w3"),
        sign("\u2192"),
        grid("h", "swiglu", values(swiglu), "swiglu", f"g:0 g:{width}", class_=ROW),
        sign("\u00d7"),
        product("d", "w2", "h", across(stage.weight(f"{name}.feed_forward.w2")), narrow, called="w2"),
        sign("+ x ="),
        grid("z", "x", values(last), "add", "r d", class_=ROW),
    )


def tokens_out(stage: Stage) -> list[Markup]:
    """The last norm, the head over the rows that need a token, and the largest logit."""
    if not stage.of(None, "linear"):
        return [element("p", "No row of this step needs a token: the last one of a prompt is still to come.")]
    result, head = stage.of(None, "rms_norm")[-1], stage.of(None, "linear")[-1]
    hidden, table = result["output"]["shape"][1], stage.weight("embed_tokens")
    words = [(visible(stage.run.word(index)), 1) for index in range(len(table))]
    said = [
        f"{visible(entry.request_id)} \u2192 {' '.join(visible(stage.run.word(token)) for token in answer)}"
        for entry in stage.step.entries
        if (answer := stage.step.tokens.get(entry.request_id))
    ]
    return [
        row(
            grid("x", "x", values(result, "x"), "before", labels=stage.labels),
            sign("\u2192"),
            normed(stage, "n", "normed", "x", "embedding_norm", result, hidden),
        ),
        row(
            grid("l", "rows that need a token", values(head, "x"), "picked", "n"),
            sign("\u00d7"),
            product("t", "logits", "l", across(table), head, head=words, called=EMBEDDINGS, best=True),
        ),
        element("p", "The largest logit is the next token: ", element("strong", ", ".join(said)), "."),
    ]
