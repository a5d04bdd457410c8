"""Request-level above token-level batching: what the moving picture shows is what the two schedules say."""

from __future__ import annotations

import re
from collections import Counter

import drawn
import pytest

from lfm2np.teaching.drawings.runs.other_policies import Outcome, answers, under
from lfm2np.teaching.drawings.runs.recorded_run import Run
from lfm2np.teaching.drawings.views import batching as view
from lfm2np.teaching.drawings.views.batching import batching

pytestmark = pytest.mark.slow

RUNS = {"hand": drawn.hand_run, "demo": drawn.demo_run}
POLICIES = ("static", "fcfs")
TITLE = re.compile(r"<title>step (\d+), (\S+): ([^;<]+), (\d+) tokens?(?:; (?:(\d+) )?(wasted))?</title>")


@pytest.fixture(params=list(RUNS))
def run(request: pytest.FixtureRequest) -> Run:
    return RUNS[request.param]()


def test_the_page_opens_on_batching_and_says_what_to_look_at() -> None:
    """Pinned: it opened on some twenty small matrices, and "On" beside "Play" read as a switch."""
    page = drawn.demo_page()
    lesson = page.partition('id="batching-title"')[2].partition('class="lesson">')[2]
    assert lesson.startswith("Look at the hatched cells. By requests, ")
    assert ">Next</button>" in page and ">On</button>" not in page


def outcomes(run: Run) -> list[Outcome]:
    return [under(run, policy) for policy in POLICIES]


def sums(outcome: Outcome, number: int) -> list[int]:
    """Of the steps up to one, from the plans and answers alone: steps, tokens given, rows, padding, finished."""
    steps = outcome.run.steps[: number + 1]
    batch: set[str] = set()
    ended: set[str] = set()
    given = rows = padding = 0
    for step in steps:
        if batch <= ended:
            batch = set()  # the next batch begins only when all of this one have ended
        shares = {entry.request_id: len(entry.token_ids) for entry in step.entries}
        batch |= shares.keys()
        rows += sum(shares.values())
        padding += sum(max(shares.values(), default=0) - shares.get(name, 0) for name in batch)
        given += sum(map(len, step.tokens.values()))
        ended |= step.finished.keys()
    return [len(steps), given, rows, padding if outcome.policy == "static" else 0, len(ended)]


def test_the_sums_of_every_step_are_those_of_the_schedule(run: Run) -> None:
    picture, both = batching(run).picture, outcomes(run)
    tables = re.findall(r"<caption>After step (\d+)</caption>.*?<tbody>(.*?)</tbody>", picture)
    count = max(len(one.run.steps) for one in both)
    assert [int(number) for number, _ in tables] == list(range(count))
    for number, body in tables:
        shown = [re.findall(r"<td>(.*?)</td>", row) for row in body.split("</tr>")[:2]]
        for outcome, cells in zip(both, shown, strict=True):
            *numbers, ended = sums(outcome, int(number))
            steps = outcome.run.steps
            waiting = steps[int(number)].waiting if int(number) < len(steps) else 0
            assert cells == [*map(str, numbers), f"{ended} of {len(answers(run))}", str(waiting)]


def test_both_halves_hold_every_token_of_every_request(run: Run) -> None:
    halves = batching(run).picture.split('<g class="half">')[1:]
    known = answers(run)
    for half, outcome in zip(halves, outcomes(run), strict=True):
        computed: Counter[str] = Counter()
        wasted = 0
        titles = TITLE.findall(half)
        apart = Counter(title[:4] for title in titles if not title[5])
        for (_, name, _, count), copies in apart.items():
            assert copies in (1, int(count))  # as one cell, or as a cell for each token
            computed[name] += int(count)
        for title in titles:
            wasted += int(title[4] or 1) if title[5] else 0
        for name, ids in known.items():
            entries = [entry for step in outcome.run.steps for entry in step.entries if entry.request_id == name]
            assert computed[name] == sum(len(entry.token_ids) for entry in entries)
            known_positions = {*range(entries[0].start)}.union(*(range(entry.start, entry.stop) for entry in entries))
            assert known_positions == {*range(len(run.requests[name].prompt) + len(ids) - 1)}
            given = [token for step in outcome.run.steps for token in step.tokens.get(name, ())]
            assert given == ids, "neither way changes a token"
        assert wasted == sums(outcome, len(outcome.run.steps))[3]


@pytest.mark.slow
def test_waiting_and_preempted_requests_are_drawn() -> None:
    picture = batching(drawn.demo_run()).picture
    above, below = picture.split('<g class="half">')[1:]
    bars = re.compile(r"<title>(\S+), steps? (\d+)(?: to (\d+))?: (waiting|preempted)</title>")
    for half, outcome in ((above, outcomes(drawn.demo_run())[0]), (below, outcomes(drawn.demo_run())[1])):
        waiting = sum(1 + int(last or first) - int(first) for _, first, last, _ in bars.findall(half))
        assert waiting == sum(step.waiting for step in outcome.run.steps)
        assert (": preempted<" in half) == any(step.preempted for step in outcome.run.steps)
    assert ": preempted<" in below
    assert "preempted: its memory was taken" in picture


def test_a_step_is_one_sentence() -> None:
    """Pinned: of the hand model's run, where b has ended and c is not yet admitted."""
    (shown,) = re.findall(r"<strong>Step 5\. </strong>([^<]*)</p>", batching(drawn.hand_run()).picture)
    assert shown == (
        "By requests, decode: a; ended, but keeps its slot: b; waiting: c. By tokens, decode: a, c; ends: a."
    )


def test_what_is_too_long_to_draw_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "MOST_STEPS", 5)
    shown = batching(drawn.hand_run())
    assert shown.num_steps == 5
    assert "7 steps more are not drawn." in shown.text
    assert "all finished after" not in shown.picture
