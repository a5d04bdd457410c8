"""All views of a run, in the order of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lfm2np.engine.loading import Model
from lfm2np.oracle.report.markup import Markup, element, joined
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.page.deck import deck
from lfm2np.teaching.drawings.page.run_page import page
from lfm2np.teaching.drawings.page.view import View
from lfm2np.teaching.drawings.runs.expert_choices import is_sparse
from lfm2np.teaching.drawings.runs.recorded_run import Run
from lfm2np.teaching.drawings.views.batched_operations import ledger
from lfm2np.teaching.drawings.views.batching import batching
from lfm2np.teaching.drawings.views.experts import experts
from lfm2np.teaching.drawings.views.isolation import isolation
from lfm2np.teaching.drawings.views.order import order
from lfm2np.teaching.drawings.views.policies_view import policies
from lfm2np.teaching.drawings.views.pool_view import memory
from lfm2np.teaching.drawings.views.positions_view import positions
from lfm2np.teaching.drawings.views.single import Weights, single
from lfm2np.teaching.drawings.views.speculation import speculation
from lfm2np.teaching.drawings.views.timeline import timeline
from lfm2np.teaching.drawings.views.worksheet import worksheet
from lfm2np.values import Progress

TITLE = "Continuous batching of LFM2, on real numbers"
START = "batching"  # a picture that needs no explanation; the first view has twenty matrices


@dataclass(frozen=True)
class Still:
    """What a page shows that is not of its run: the hand model's, and a dot product of the trained fixture's."""

    alone: Run
    together: Run
    weights: Weights
    single: View
    positions: View
    order: View


def still(trained: Model) -> Still:
    model, words, weights = demo.hand_model()
    alone, together = demo.hand_alone(model, words), demo.hand_together(model, words)
    dot_product = order(*demo.dot_product(trained))
    return Still(alone, together, weights, single(alone, weights), positions(together), dot_product)


def views_of(run: Run, beside: Still, opening: Sequence[View], isolated: View) -> list[View]:
    """In the order of the page: the `opening` three, then those of the run, `isolated` among them.

    A run with a mixture of experts has a view more, the fifth, and exercises of its own.
    """
    return [
        *opening,
        ledger(run),
        *([experts(run)] if is_sparse(run) else []),
        isolated,
        memory(run),
        timeline(run),
        policies(run),
        speculation(run),
        worksheet(beside.alone, beside.together, beside.weights, run),
        beside.order,
    ]


def no_progress(done: int, count: int) -> None:
    pass


def draw(run: Run, trained: Model, source: str, command: str, progress: Progress = no_progress) -> str:
    """The page of a run. `trained` is the trained fixture, `command` what makes the page again."""
    views = views_beside(run, trained, progress)
    return page(TITLE, about(run, source, command), views, start=START)


def slides(run: Run, trained: Model, source: str, command: str, progress: Progress = no_progress) -> str:
    """The pictures of the same views, one a slide."""
    views = views_beside(run, trained, progress)
    paper = element("p", "Every number comes from a run: of a model that fits on paper, or ", size_of(run, source))
    return deck(TITLE, joined(paper, element("p", "Made by ", element("code", command), ".")), views)


def views_beside(run: Run, trained: Model, progress: Progress) -> list[View]:
    """The views of a run, with what pages show that is not of it."""
    beside = still(trained)
    progress(1, 3)
    isolated = isolation(demo.leaking(trained))
    progress(2, 3)
    views = views_of(run, beside, [beside.single, batching(beside.together), beside.positions], isolated)
    progress(3, 3)
    return views


def size_of(run: Run, source: str) -> str:
    config = run.config
    return (
        f"{source} (sequences: {len(run.requests)}, steps: {len(run.steps)}): "
        f"policy {config['policy']}, {config['num_blocks']} blocks of {config['block_size']} tokens, at most "
        f"{config['max_num_batched_tokens']} tokens and {config['max_num_seqs']} sequences a step."
    )


def about(run: Run, source: str, command: str) -> Markup:
    views, paper = "views 4 and 6 to 9", "the worksheet"
    if is_sparse(run):
        views, paper = "views 4, 5 and 7 to 10 and what the worksheet asks of experts", "the rest of the worksheet"
    return joined(
        element(
            "p",
            f"Every number here comes from a run. Views 1 to 3 and {paper} show a model that fits on paper, "
            f"{views} {size_of(run, source)}",
        ),
        element("p", "Made by ", element("code", command), ". Arrow keys step the view in sight, P plays it."),
    )


__all__ = ["View", "draw", "slides"]
