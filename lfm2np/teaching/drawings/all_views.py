"""The views of a run, in the order of the page."""

from __future__ import annotations

from lfm2np.engine.loading import Model
from lfm2np.oracle.report.markup import Markup, element, joined
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.page.run_page import page
from lfm2np.teaching.drawings.page.view import View
from lfm2np.teaching.drawings.runs.expert_choices import is_sparse
from lfm2np.teaching.drawings.runs.recorded_run import Run
from lfm2np.teaching.drawings.views.batching import batching
from lfm2np.teaching.drawings.views.experts import experts
from lfm2np.teaching.drawings.views.pool import pool
from lfm2np.teaching.drawings.views.ragged import ragged
from lfm2np.teaching.drawings.views.schedule import schedule
from lfm2np.teaching.drawings.views.speculation import speculation
from lfm2np.teaching.drawings.views.worksheet import worksheet
from lfm2np.values import Progress

TITLE = "Continuous batching of LFM2, on real numbers"


def views_of(run: Run, paper: demo.Paper, of_step: View) -> list[View]:
    """`of_step` is `ragged` of the run and some step. Experts are a view of a model that has them."""
    mixture = [experts(run)] if is_sparse(run) else []
    return [
        batching(run),
        of_step,
        pool(run),
        schedule(run),
        speculation(run),
        *mixture,
        worksheet(paper.run, paper.weights, run),
    ]


def draw(run: Run, trained: Model, source: str, command: str, progress: Progress = lambda done, count: None) -> str:
    """The page of a run. `trained` is the trained fixture, `command` what makes the page again."""
    paper = demo.paper()
    progress(1, 3)
    leak = demo.leaking(trained)
    progress(2, 3)
    views = views_of(run, paper, ragged(run, leak))
    progress(3, 3)
    return page(TITLE, about(run, source, command), views)


def about(run: Run, source: str, command: str) -> Markup:
    config = run.config
    return joined(
        element(
            "p",
            f"Every number here comes from a run: {source} (sequences: {len(run.requests)}, steps: {len(run.steps)}): "
            f"policy {config['policy']}, {config['num_blocks']} blocks of {config['block_size']} tokens, at most "
            f"{config['max_num_batched_tokens']} tokens and {config['max_num_seqs']} sequences a step. The worksheet's "
            "first exercises are of a model that fits on paper.",
        ),
        element("p", "Made by ", element("code", command), ". Arrow keys step the view in sight, P plays it."),
    )
