"""Runs against one engine: what is found, replayed, shrunk and kept, whatever the engine and the user do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faults import inject
from served_here import folder, model

from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import DEAD, FAILED, HANG, Answer, Trace, failed, greedy
from lfm2np.oracle.engines.target import Abilities, Played, TargetError
from lfm2np.suite.adapters import Own
from lfm2np.suite.fuzz.campaign import BATCH, FIRST_REPLAYS, LAST_REPLAYS, Campaign, Failure
from lfm2np.suite.fuzz.draw_traces import Around, alphabet_of
from lfm2np.suite.fuzz.judge import ByTruth, Finding

pytestmark = pytest.mark.slow

A = alphabet_of(None, 300)
AROUND = Around(block=4, chunk=16, slots=3, longest=60, alphabet=A, sampling=True)
Says = Callable[[Trace], Answer | None]
BAD = failed("it broke")


class Scripted:
    """A player whose engine does what a function says of each trace; `played` is all that it got."""

    def __init__(self, says: Says) -> None:
        self.says = says
        self.played: list[Trace] = []

    def probe(self) -> Abilities:
        raise AssertionError("it is not asked")

    def play(self, trace: Trace) -> Played:
        self.played.append(trace)
        first = self.says(trace) or Answer()
        return Played(((first,), *((Answer(),) for _ in trace.requests[1:])))

    def close(self) -> None:
        """Nothing."""


def campaign_on(says: Says, around: Around = AROUND, **fields: Any) -> tuple[Campaign, Scripted]:
    player = Scripted(says)
    return Campaign(ByTruth(model(), "float32"), player, around, **fields), player


def long_prompt(trace: Trace) -> Answer | None:
    return BAD if any(len(request.prompt_token_ids) >= 7 for request in trace.requests) else None


def test_what_fails_is_found_shrunk_and_measured() -> None:
    campaign, player = campaign_on(long_prompt)
    (failure,) = campaign.run(0, 100, None)
    assert failure.finding.kind == FAILED and failure.rate == (LAST_REPLAYS, LAST_REPLAYS)
    (request,) = failure.trace.requests
    assert request == greedy("", request.prompt_token_ids, 1) and len(request.prompt_token_ids) == 7
    assert failure.drawn.num_tokens >= failure.trace.num_tokens
    assert failure.traces == campaign.counts.traces and campaign.counts.findings == 1
    assert len(player.played) == campaign.counts.traces + 2 * campaign.counts.replays  # each behind short ones
    last = [trace.requests[0].prompt_token_ids for trace in player.played[-2 * LAST_REPLAYS :]][1::2]
    assert len(set(last)) == LAST_REPLAYS and request.prompt_token_ids == last[-1]  # each of other tokens
    again, same = campaign_on(long_prompt)
    assert [found.trace for found in again.run(0, 100, None)] == [failure.trace] and same.played == player.played


def test_a_right_engine_gets_as_many_traces_as_were_asked_for() -> None:
    campaign, player = campaign_on(lambda trace: None)
    assert list(campaign.run(3, 60, None)) == []
    assert campaign.counts.traces == len(player.played) == 60 and campaign.counts.replays == 0
    assert list(campaign.run(3, None, 0.0)) == [] and len(player.played) == 60  # no time


@pytest.mark.parametrize("most", [1, 3])
def test_without_time_to_shrink_what_was_drawn_is_handed_over_up_to_so_many_findings(most: int) -> None:
    campaign, _ = campaign_on(long_prompt, shrink_seconds=0.0)
    failures = list(campaign.run(0, 10_000, None, most))
    assert [failure.rate for failure in failures] == [(10, 10)] * most
    for failure in failures:
        assert len(failure.trace.requests) == len(failure.drawn.requests)
        assert failure.trace.num_tokens == failure.drawn.num_tokens


def test_what_fails_now_and_then_has_its_rate() -> None:
    turns = itertools.cycle([True, False])
    campaign, _ = campaign_on(lambda trace: BAD if long_prompt(trace) and next(turns) else None)
    (failure,) = campaign.run(0, 1000, None)
    assert failure.rate == (5, 10) and len(failure.trace.requests[0].prompt_token_ids) == 7


def test_what_never_fails_again_is_handed_over_as_it_was() -> None:
    once = iter([BAD])
    campaign, player = campaign_on(lambda trace: long_prompt(trace) and next(once, None))
    (failure,) = campaign.run(0, 1000, None)
    assert failure.rate == (0, FIRST_REPLAYS) and failure.trace == failure.drawn
    assert len(player.played) > campaign.counts.traces


def test_what_fails_only_behind_another_is_replayed_behind_it() -> None:
    """The engine breaks on its second trace, and is then as new."""

    def says(trace: Trace) -> Answer | None:
        is_bad = any(request.after is not None for request in trace.requests) and sum(
            request.after is None for request in trace.requests
        )
        return BAD if len(trace.requests) >= 5 and is_bad else None

    campaign, _ = campaign_on(says)
    campaign.history = [Trace((greedy("", A[:3], 2),) * 3)]
    drawn = Trace((greedy("", A[:2], 1), greedy("", A[:2], 1)))
    failure = campaign.minimize(drawn, Played(((BAD,), (Answer(),))), Finding(FAILED, "it broke", 0))
    assert failure.rate == (10, 10) and len(failure.trace.requests) == 5 and failure.drawn == drawn


class LeavesBehind:
    """A server on which whatever comes within so many traces after a long prompt fails."""

    def __init__(self, most: int) -> None:
        self.most, self.left = most, 0

    def __call__(self, trace: Trace) -> Answer | None:
        is_bad = self.left > 0
        self.left = self.most if long_prompt(trace) else max(0, self.left - 1)
        return BAD if is_bad else None


@pytest.mark.parametrize("most", [1, 3])
def test_what_fails_by_what_larger_traces_left_behind_is_none_of_a_small_one(most: int) -> None:
    """Short requests before each replay hide what was left for one trace; what is left for longer shows in the end."""
    campaign, _ = campaign_on(LeavesBehind(most))
    (failure,) = campaign.run(1, 1000, None)
    if most > 1:
        assert failure.rate[0] > 5 and long_prompt(failure.trace)
    else:
        assert (failure.rate[0] > 5 and len(failure.trace.requests) > 1) or failure.rate == (0, FIRST_REPLAYS)


def test_a_trace_that_fails_with_its_own_tokens_only_is_replayed_with_them() -> None:
    """Wrong for two token ids, say: with other tokens in their places nothing fails."""
    wanted: list[tuple[int, ...]] = []

    def says(trace: Trace) -> Answer | None:
        prompt = trace.requests[0].prompt_token_ids
        if not wanted and long_prompt(trace):
            wanted.append(prompt[:2])
        return BAD if wanted and prompt[:2] == wanted[0] and len(prompt) > 2 else None

    campaign, _ = campaign_on(says)
    (failure,) = campaign.run(0, 1000, None)
    assert failure.same_tokens and failure.rate == (LAST_REPLAYS, LAST_REPLAYS)
    assert len(failure.trace.requests[0].prompt_token_ids) == 3 and not campaign.keeps_tokens


@pytest.mark.parametrize("kind", [DEAD, HANG])
def test_without_a_server_nothing_is_replayed(kind: str) -> None:
    """It would fail whatever the trace holds, and the smallest of all would be handed over."""
    is_gone: list[bool] = []

    def says(trace: Trace) -> Answer | None:
        if long_prompt(trace):
            is_gone.append(True)
        return failed("gone", kind) if is_gone else None

    campaign, player = campaign_on(says)
    (failure,) = campaign.run(0, 1000, None, most=9)
    assert failure.rate == (0, 0) and failure.trace == failure.drawn == player.played[-1]
    assert campaign.counts.replays == 0


def test_a_server_that_dies_is_started_anew_before_the_next_trace() -> None:
    log: list[str] = []

    def says(trace: Trace) -> Answer | None:
        log.append("long" if long_prompt(trace) else "short")
        return failed("gone", DEAD) if long_prompt(trace) else None

    campaign, _ = campaign_on(says, restart=lambda: log.append("start"))
    (failure,) = campaign.run(0, 1000, None)
    assert failure.rate == (10, 10) and len(failure.trace.requests[0].prompt_token_ids) == 7 and not failure.is_fresh
    assert all(after == "start" for before, after in itertools.pairwise(log) if before == "long")
    assert all(before == "long" for before, after in itertools.pairwise(log) if after == "start")


def test_a_finding_is_kept_whose_server_does_not_start_again() -> None:
    def restart() -> None:
        raise TargetError("it does not start")

    campaign, _ = campaign_on(lambda trace: long_prompt(trace) and failed("gone", DEAD), restart=restart)
    runs = campaign.run(0, 1000, None, most=2)
    failure = next(runs)
    assert failure.finding.kind == DEAD and failure.trace == failure.drawn
    with pytest.raises(TargetError, match="does not start"):
        next(runs)


def test_where_a_start_is_quick_each_replay_has_a_new_server() -> None:
    log: list[str] = []

    def says(trace: Trace) -> Answer | None:
        log.append("trace")
        return long_prompt(trace)

    campaign, _ = campaign_on(says, restart=lambda: log.append("start"), is_quick=True)
    (failure,) = campaign.run(0, 1000, None)
    replays = campaign.counts.replays
    assert failure.is_fresh and log[-2 * replays :] == ["start", "trace"] * replays
    drawn = log[: -2 * replays]
    assert drawn[0] == "start" and drawn.count("trace") == campaign.counts.traces
    assert drawn.count("start") == -(-campaign.counts.traces // BATCH)  # one a batch
    assert not campaign.is_fresh


def test_what_fails_on_no_fresh_server_is_replayed_on_the_old_one() -> None:
    started: list[None] = []
    says: Says = lambda trace: None if len(started) > 1 else long_prompt(trace)  # noqa: E731
    campaign, _ = campaign_on(says, restart=lambda: started.append(None), is_quick=True)
    failure = next(campaign.run(0, 1000, None))
    assert failure.rate == (0, FIRST_REPLAYS) and not failure.is_fresh


LONG = Trace((greedy("", A[:9], 1),))


@pytest.mark.parametrize(
    ("runs_of", "when"),
    [
        (lambda campaign: campaign.run(0, 1000, None, most=5), 1),
        (lambda campaign: campaign.run(0, 1000, None, most=5), 30),
        (lambda campaign: campaign.known([LONG], 3), 2),
    ],
)
def test_an_interrupt_while_shrinking_keeps_what_is_small_so_far(
    runs_of: Callable[[Campaign], Iterator[Failure]], when: int
) -> None:
    campaign, player = campaign_on(long_prompt)

    def says(trace: Trace) -> Answer | None:
        if campaign.counts.replays == when:
            raise KeyboardInterrupt
        return long_prompt(trace)

    player.says = says
    runs = runs_of(campaign)
    failure = next(runs)
    assert long_prompt(failure.trace) and failure.trace.num_tokens <= failure.drawn.num_tokens
    with pytest.raises(KeyboardInterrupt):
        next(runs)


def test_what_the_engine_can_not_be_asked_is_not_tried_while_shrinking() -> None:
    """A text server puts the BOS before each text: a prompt that lost it would be judged as another."""
    campaign, player = campaign_on(long_prompt, Around(4, 16, 3, 60, A, (1,), True))
    (failure,) = campaign.run(0, 1000, None)
    prompts = [request.prompt_token_ids for trace in player.played for request in trace.requests]
    (small,) = failure.trace.requests
    assert small.prompt_token_ids[0] == 1 and len(small.prompt_token_ids) == 7
    assert all(prompt[0] == 1 and len(prompt) > 1 for prompt in prompts)


# Of earlier runs


def test_an_earlier_failure_is_played_as_it_is_and_then_with_other_tokens() -> None:
    campaign, player = campaign_on(lambda trace: None)
    trace = Trace((greedy("", A[:5], 3), greedy("", A[:5], 2, after=0)))
    assert list(campaign.known([trace], 10)) == []
    assert player.played[0] == trace and campaign.counts.traces == len(player.played) == 10
    assert all(shrunk != trace and shrunk.requests[1].after == 0 for shrunk in player.played[1:])


def test_each_earlier_failure_that_fails_again_is_reported_once() -> None:
    campaign, _ = campaign_on(long_prompt)
    failures = list(campaign.known([LONG, Trace((greedy("", A[:2], 1),)), LONG], 3))
    assert [failure.drawn for failure in failures] == [LONG, LONG] and campaign.counts.traces == 5


def test_earlier_failures_end_where_the_server_is_gone() -> None:
    campaign, _ = campaign_on(lambda trace: failed("gone", DEAD))
    assert len(list(campaign.known([LONG] * 4, 3))) == 1


# On our own engine


@pytest.mark.rounding
def test_a_fault_of_two_requests_is_shrunk_to_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lfm2np.suite.fuzz.campaign.LAST_REPLAYS", 3)
    player = PythonTarget(lambda *_: Own(model(), {"block_size": 4, "max_num_seqs": 3}), folder())
    around = Around(block=4, chunk=16, slots=1, longest=28, alphabet=A, sampling=True)
    with inject("convolution-crosses-requests"):
        campaign = Campaign(ByTruth(model(), "float32"), player, around, restart=player.close, is_quick=True)
        (failure,) = campaign.run(2, 100, None)
    assert failure.finding.kind == "wrong" and failure.is_fresh and failure.rate == (3, 3)
    assert [request == greedy("", request.prompt_token_ids, 1) for request in failure.trace.requests] == [True, True]
