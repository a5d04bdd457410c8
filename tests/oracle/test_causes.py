"""The split of wrong from right positions, and the first cause: on positions made by hand, of which it is known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from lfm2np.oracle.causes import findings as findings_module
from lfm2np.oracle.causes.findings import CERTAIN, LIKELY, Repeats, Suspicion, findings, with_repeats
from lfm2np.oracle.causes.groups import ranges
from lfm2np.oracle.causes.split import described
from lfm2np.oracle.causes.tags import BEHIND, LEAK, TAGS, phase_of, place_of
from lfm2np.oracle.engines.records import Request, Trace, changed, greedy
from lfm2np.oracle.judging.verdict import Position, Verdict
from lfm2np.oracle.workloads import CASES, noted

pytestmark = pytest.mark.slow

NEW = 4  # tokens of each request


def request_of(index: int, prompt: Sequence[int], beside: bool = False) -> Request:
    return greedy(
        f"neighbours-{index}", tuple(prompt), NEW, case="neighbours", tags={"length": len(prompt), "beside": beside}
    )


def plan() -> list[Trace]:
    """Prompts of 1 to 20 tokens alone, three times; then four at a time; then some beside which one is cancelled."""
    count = iter(range(1000))
    alone = []
    for length in range(1, 21):
        prompt = [next(count) + 1000 for _ in range(length)]
        alone += [Trace((request_of(next(count), prompt),)) for _ in range(3)]
    beside = []
    for turn in range(12):  # those of one round begin alike
        lengths = [3 * (1 + (turn + place) % 4) for place in range(4)]
        start = 2000 + 100 * turn
        beside.append(
            Trace(tuple(request_of(next(count), range(start, start + size), beside=True) for size in lengths))
        )
    cancelled = []
    for first in range(3200, 3500, 50):  # every other one comes after a cancelled request, and is beside none
        requests = tuple(
            request_of(next(count), range(start, start + 5), beside=True) for start in range(first, first + 48, 8)
        )
        cancelled.append(Trace(requests if first % 100 else (replace(requests[0], abort_after=2), *requests[1:])))
    return noted([*alone, *beside, *cancelled])


PLAN = plan()
PLAN_IDS = {request.request_id for round_ in PLAN for request in round_.requests if request.abort_after is None}


def luck(*key: int, of: Sequence[Trace] = tuple(PLAN)) -> dict[str, float]:
    """A random number for each request, 0 to 1."""
    random = np.random.Generator(np.random.Philox(key=list(key)))
    return {request.request_id: random.random() for round_ in of for request in round_.requests}


def unlucky(share: float, *key: int, of: Sequence[Trace] = tuple(PLAN)) -> list[str]:
    """So many of all requests."""
    return [name for name, number in luck(*key, of=of).items() if number < share]


def requests_of(judged: Iterable[Position]) -> set[str]:
    return {position.request.request_id for position in judged}


def wrong_of(judged: Iterable[Position]) -> set[str]:
    return requests_of(position for position in judged if position.is_wrong)


def positions(is_wrong: Callable[[Position], bool], of: Sequence[Trace] = tuple(PLAN)) -> list[Position]:
    """Every row of every request that is judged. The wrong ones are a thousand times the noise off."""
    judged = []
    for round_ in of:
        for request in round_.requests:
            if request.abort_after is None:
                for row in range(len(request.prompt_token_ids) - 1 + NEW):
                    is_new = row >= len(request.prompt_token_ids) - 1
                    right = Position(request, row, is_new, 5, 5, 0.0, 0.0, 99.0, 0.0, 0.0, 0.0, Verdict.EXACT)
                    wrong = replace(right, error=1.0, error_ratio=1e3, error_size=1e3, verdict=Verdict.DRIFT)
                    judged.append(wrong if is_wrong(right) else right)
    return judged


def wrong_in(names: Collection[str], of: Sequence[Trace] = tuple(PLAN)) -> list[Position]:
    """Of these requests every row is wrong."""
    return positions(lambda position: position.request.request_id in names, of)


def decode(position: Position) -> bool:
    return phase_of(position) == "decode"


def later(position: Position) -> bool:
    return place_of(position) == "later"


def warm(position: Position) -> bool:
    return position.request.tags["seen"] >= 8


def abort_of(position: Position) -> str:
    return str(position.request.tags["abort"])


def words(judged: Sequence[Position]) -> tuple[list[str], list[str]]:
    """What is right, and what is wrong by itself, in order."""
    description = described(judged)
    splits = () if description is None else description.splits
    return [split.right for split in splits], [split.wrong for split in splits]


WARM = "in prompts whose first 8 tokens were asked before"
COLD = "in prompts whose first 8 tokens are new"
SINGLE: dict[str, tuple[Callable[[Position], bool], str, str]] = {
    # which positions are wrong, what is said to be wrong, and right
    "decode": (decode, "in decode", "in prefill"),
    "later": (later, "later in a batch", "alone or first of a batch"),
    "beside": (lambda at: place_of(at) != "alone", "only beside other requests", "alone"),
    "warm": (warm, WARM, COLD),
    "rows": (lambda at: at.row >= 8, "from position 8 on", "before position 8"),
    "short": (
        lambda at: len(at.request.prompt_token_ids) < 3,
        "in prompts of fewer than 3 tokens",
        "in prompts of 3 tokens or more",
    ),
    "scored": (lambda at: not at.is_new, "at the prompts' own tokens", "at new tokens"),
    "first token": (
        lambda at: at.row + 1 == len(at.request.prompt_token_ids),
        "at the first new token",
        "at all other tokens",
    ),
    "end": (
        lambda at: at.row + 2 == len(at.request.prompt_token_ids) + at.request.max_tokens,
        "at the last token of an answer",
        "before it",
    ),
    "aborted": (  # and those after are right
        lambda at: abort_of(at) == "beside",
        "beside cancelled requests",
        "before any cancelled request or after",
    ),
    "last": (  # as where a chunk's last row is given another's number
        lambda at: at.row % 8 == 7,
        "at the last position of each 8",
        "elsewhere than at the last position of each 8",
    ),
    "vocabulary": (
        lambda at: max(at.request.prompt_token_ids[: at.row + 1]) >= 2048,
        "once a token id is 2048 or more",
        "while token ids are below 2048",
    ),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_cause_of_one_tag_is_named(name: str) -> None:
    is_wrong, wrong, right = SINGLE[name]
    assert words(positions(is_wrong)) == ([right], [wrong])


def test_a_case_is_named_where_nothing_else_separates() -> None:
    judged = [
        replace(position, request=changed(position.request, tags={"case": "stops"})) if position.is_wrong else position
        for position in positions(lambda position: int(position.request.request_id.split("-")[1]) % 2 == 0)
    ]
    first, *_ = findings(judged)
    assert first.where == "wrong in the case stops, right elsewhere"
    assert first.suspect == CASES["stops"].suspect


def test_a_temperature_is_named_whether_or_not_its_requests_are_streamed() -> None:
    """And not that they are late: plain requests behind them are right."""

    def asked(request: Request) -> Request:
        order = request.tags["order"]
        params = {"temperature": 0.5, "seed": order} if 60 <= order < 120 else {}
        return replace(changed(request, **params), streamed=90 <= order < 120)

    late = [Trace(tuple(map(asked, round_.requests))) for round_ in PLAN]
    first, *others = findings(positions(lambda position: position.request.is_sampled, late))
    assert first.where == "wrong in requests at a temperature other than 0 and 1, right elsewhere" and not others
    assert first.sure == CERTAIN and first.suspect == "log-probabilities that are not of the raw logits"


def test_late_requests_of_which_some_are_right_are_a_guess() -> None:
    """Something else than what earlier requests left behind sets them apart."""
    random = np.random.Generator(np.random.Philox(key=[2, 0]))
    mixed = noted([PLAN[index] for index in random.permutation(72)])
    luck = {request.request_id: random.random() for round_ in mixed for request in round_.requests}

    def first(share: float) -> Suspicion:
        return findings(
            positions(lambda at: at.request.tags["order"] >= 64 and luck[at.request.request_id] < share, mixed)
        )[0]

    assert first(1.0).suspect == first(0.75).suspect == BEHIND
    assert first(1.0).sure == CERTAIN and first(1.0).where.startswith("wrong in requests after the first 64, right in")
    assert first(0.75).sure == "a guess" and ", though some of those are right, right in the first" in first(0.75).where


@pytest.mark.parametrize(
    "names", [("decode", "later"), ("decode", "warm"), ("later", "rows"), ("decode", "later", "warm")]
)
def test_what_is_wrong_on_the_right_side_is_split_again(names: tuple[str, ...]) -> None:
    judged = positions(lambda position: any(SINGLE[name][0](position) for name in names))
    right, wrong = words(judged)
    assert set(wrong) == {SINGLE[name][1] for name in names} and set(right) == {SINGLE[name][2] for name in names}
    assert words(list(reversed(judged))) == (right, wrong)
    description = described(judged)
    assert description is not None and description.inside == {at.place for at in judged if not at.is_wrong}


def test_nothing_is_described_where_all_is_right_or_all_is_wrong() -> None:
    assert described(positions(lambda position: False)) is None
    assert described(positions(lambda position: True)) is None
    assert described([]) is None


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_nothing_separates_by_chance(share: float) -> None:
    """Requests that are wrong at random depend on nothing."""
    for seed in range(8):
        assert described(wrong_in(unlucky(share, seed, 0))) is None
    few = positions(decode, PLAN[6:8])
    assert len(requests_of(few)) == 2 and described(few) is None


# --- findings


EVERYWHERE = f"wrong everywhere: {findings_module.EVERYWHERE}"


def lines(judged: Sequence[Position], repeats: Sequence[Repeats] = ()) -> list[str]:
    return [cause.line for cause in with_repeats(findings(judged), judged, repeats)]


def test_wrong_everywhere_is_reported_only_if_every_request_is_wrong() -> None:
    assert lines(positions(lambda position: True)) == [f"certain: {EVERYWHERE}"]
    right = PLAN[5].requests[0].request_id
    (sentence,) = lines(wrong_in(PLAN_IDS - {right}))
    apart, count = "which nothing in the requests clearly sets apart", len(PLAN_IDS)
    assert sentence == f"a guess: wrong in {count - 1} of {count} requests, {apart}; right: {right}"
    once = PLAN[:60:3]
    few = [round_.requests[0].request_id for round_ in once[3::4]]
    (sentence,) = lines(wrong_in(few, once))
    assert sentence == f"a guess: wrong in 5 of 20 requests, {apart}; wrong: {', '.join(few[:3])}, ..."


def test_everywhere_is_not_said_where_most_positions_are_exact() -> None:
    """Every request is wrong, at each third token: no operator, weight or constant errs so."""
    judged = positions(lambda position: (position.row + len(position.request.prompt_token_ids)) % 3 == 0)
    wrong, requests = sum(position.is_wrong for position in judged), len(PLAN_IDS)
    where = f"wrong in {requests} of {requests} requests, at {wrong} of {len(judged)} reported positions"
    assert lines(judged) == [f"a guess: {where}, which nothing clearly sets apart"]
    silent = [
        each if each.is_wrong else replace(each, error=None, error_ratio=None, error_size=None) for each in judged
    ]
    assert lines(silent) == [f"certain: {EVERYWHERE}"]  # right tokens alone show little


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_errors_that_differ_where_the_same_tokens_are_sent_again_are_no_operators(share: float) -> None:
    """Each prompt that is sent alone is sent three times. `share` of an error is another one each time."""
    random = np.random.Generator(np.random.Philox(key=[7, 0]))
    by_tokens: dict[tuple[object, ...], float] = {}
    judged = [
        replace(
            at,
            error=by_tokens.setdefault((at.request.prompt_token_ids, at.row), random.normal())
            + (share and share * random.normal() - share * by_tokens[at.request.prompt_token_ids, at.row]),
        )
        for at in positions(lambda position: True)
    ]
    (first,) = findings(judged)
    assert (first.sure, first.suspect) == (
        (findings_module.LIKELY, findings_module.UNSTEADY) if share == 1.0 else (CERTAIN, findings_module.EVERYWHERE)
    )


@pytest.mark.parametrize(("share", "alone"), [(0.2, 0.0), (0.3, 0.05)])
def test_what_is_only_more_often_wrong_is_said_with_its_counts(share: float, alone: float) -> None:
    """Most right positions are beside others, so no split has them; `nothing sets them apart` would be untrue."""
    drawn = luck(3, 0)
    judged = positions(lambda at: drawn[at.request.request_id] < (alone if place_of(at) == "alone" else share))
    (first,) = findings(judged)
    assert described(judged) is None and first.sure == "a guess" and first.suspect == LEAK and first.chance is not None
    of = [requests_of(at for at in judged if (place_of(at) == "alone") == is_alone) for is_alone in (False, True)]
    wrong = wrong_of(judged)
    here, there = (f"{len(some & wrong)} of {len(some)}" for some in of)
    often = "more often" if alone else "only"
    counts = f", {often} beside other requests: {here} against {there} alone (by accident: 0.00"
    assert first.where.startswith(f"wrong in {len(wrong)} of {len(PLAN_IDS)} requests{counts}")


def test_a_clean_split_of_few_requests_is_said_and_not_the_case_in_which_most_of_them_are() -> None:
    """As in `--cases short-prompts,long-prompts`, where rotation wraps at position 64: a tag of numbers is tried at as
    many edges as cases have names."""

    def request(index: int, length: int) -> Request:
        name = "short-prompts" if index < 10 else "long-prompts"
        prompt = range(1000 * index, 1000 * index + length)
        return changed(request_of(index, prompt), request_id=f"{name}-{index}", tags={"case": name})

    lengths = (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 300, 515, 200, 3, 130, 1)
    few = noted([Trace((request(index, length),)) for index, length in enumerate(lengths)])
    (first,) = findings(positions(lambda at: at.row >= 64, few))
    of = "4 of 4 against 0 of 16 before position 64"
    assert first.where.startswith(f"wrong in 4 of 16 requests, only from position 64 on: {of} (by accident: 0.0")
    assert first.sure == "a guess" and first.suspect.startswith("state, positions")


def test_a_beginning_that_all_requests_share_is_right_once() -> None:
    """Everything is wrong, as with a wrong operator, but the first row of what begins with a BOS: one computation."""
    begun = [
        Trace(
            tuple(replace(request, prompt_token_ids=(1, *request.prompt_token_ids[1:])) for request in round_.requests)
        )
        for round_ in PLAN
    ]
    judged = positions(lambda position: position.row >= 1 or position.request.prompt_token_ids[0] != 1, begun)
    assert not any(cause.sure == CERTAIN and "right" in cause.where for cause in findings(judged)), lines(judged)
    first, *_ = findings(positions(lambda at: at.row >= 1))  # right once a request where those begin with other tokens
    assert first.sure == CERTAIN and first.where.startswith("wrong from position 1 on")


def test_a_wrong_operator_that_is_right_by_luck_is_no_split() -> None:
    """Three of four positions are wrong; in prompts of 4 tokens or more nearly all are. That explains little."""
    random = np.random.Generator(np.random.Philox(key=[5, 5]))

    def is_wrong(position: Position) -> bool:
        return random.random() < (0.2 if len(position.request.prompt_token_ids) < 4 else 0.85)

    assert all(cause.sure == "a guess" for cause in findings(positions(is_wrong))[:1])


def test_requests_that_are_wrong_at_random_are_a_rate_and_blame_nothing() -> None:
    """A race: what it hits differs from run to run, what is said of it does not."""
    said = set()
    for seed in range(8):
        judged = wrong_in([*unlucky(0.03, seed, 1), PLAN[0].requests[0].request_id])
        wrong = wrong_of(judged)
        (first,) = with_repeats(findings(judged), judged, [Repeats(name, 0, 5) for name in sorted(wrong)])
        assert first.where.startswith(f"wrong in {len(wrong)} of {len(PLAN_IDS)} requests, and in 0 of ")
        said.add((first.sure, first.suspect.partition(",")[0]))
    assert said == {("likely", "not deterministic")}


def test_what_repeats_say_comes_first_only_where_nothing_else_is_likely() -> None:
    """An engine whose slots differ may be right and wrong in turn, and still be wrong beside others only."""
    hit = unlucky(0.3, 1, 2)
    judged = positions(lambda position: later(position) and position.request.request_id in hit)
    name = next(position.request.request_id for position in judged if position.is_wrong)
    first, second, *more = with_repeats(findings(judged), judged, [Repeats(name, 2, 5)])
    assert first.where.startswith("wrong later in a batch") and len(more) <= 1
    assert ", and in 2 of 5 repeats of 1 of them" in second.where and second.suspect.startswith("not deterministic")
    assert with_repeats(findings(judged), judged, [Repeats(name, 5, 5)]) == findings(judged)
    assert lines(positions(decode), [Repeats(name, 2, 5)]) == lines(positions(decode))
    few = wrong_in(sorted(PLAN_IDS)[3:43:8])  # nothing sets these apart
    assert "not deterministic" in lines(few, [Repeats(name, 2, 5)])[0]
    assert lines(few, [Repeats(name, 5, 5), Repeats("other", 0, 5)]) == lines(few)  # each is deterministic


# --- what is noted of a request


def test_requests_that_are_wrong_beside_others_only_are_reported_as_such() -> None:
    """Two of many, so that no tag tells them apart; the repeats of both do: 10 of 10, alone 0 of 10."""
    names = [round_.requests[2].request_id for round_ in PLAN if len(round_.requests) > 2][:2]
    judged = wrong_in(names)
    first, *_ = with_repeats(findings(judged), judged, [Repeats(name, 5, 5, 0) for name in names])
    assert first.line.startswith("likely: wrong beside others in 10 of 10 repeats of 2 wrong requests, right alone")


def test_wrong_beside_others_only_is_no_race_though_repeats_are_right_now_and_then() -> None:
    """As where the fourth row of a batch reads the third's state: requests have other rows in each repeat."""

    def again(request: Request, turn: int) -> Request:
        prompt = tuple(10000 * turn + token for token in request.prompt_token_ids)
        return changed(request, request_id=f"{request.request_id}-{turn}", prompt_token_ids=prompt)

    # Three times as many rounds of several, so that those alone are no half of what is right.
    rounds = [(round_, turn) for turn in range(3) for round_ in PLAN[60:]]
    beside = [Trace(tuple(again(request, turn) for request in round_.requests)) for round_, turn in rounds]
    plan, names, alone = [*PLAN[:60], *beside], unlucky(0.3, 4, 0, of=beside), PLAN[0].requests[0].request_id
    judged = wrong_in(names, plan)
    wrong = len(wrong_of(judged))
    repeats = [Repeats(names[0], 2, 5, 0), Repeats(names[1], 1, 5, 0)]
    first, *_ = with_repeats(findings(judged), judged, repeats)
    assert first.sure == LIKELY and first.suspect == f"{LEAK}; or a race"
    assert first.where.startswith(f"wrong only beside other requests, {wrong} of ")
    assert first.where.endswith(" against 0 of 60 alone, and in 3 of 10 repeats of 2 of them, right alone")
    for other in ([*repeats, Repeats(alone, 1, 5)], [*repeats, Repeats(names[2], 1, 5, 1)]):
        assert with_repeats(findings(judged), judged, other)[0].suspect.startswith("not deterministic")
    judged = wrong_in([*names, alone], plan)
    assert with_repeats(findings(judged), judged, repeats)[0].suspect.startswith("not deterministic")


def test_a_request_is_noted_with_its_place_what_was_asked_before_and_what_was_cancelled() -> None:
    first, second = request_of(1, [1, 2, 3]), request_of(2, [1, 2, 4, 5], True)
    third, fourth = request_of(3, [1, 2, 4, 6, 7], True), request_of(4, [9])
    traces = noted([Trace((first,)), Trace((second, replace(third, abort_after=1))), Trace((fourth,))])
    names = ("place", "seen", "abort", "order", "together")
    facts = [tuple(request.tags[name] for name in names) for trace in traces for request in trace.requests]
    assert facts == [(0, 0, "none", 0, 1), (0, 2, "beside", 1, 2), (1, 3, "beside", 2, 2), (0, 0, "after", 3, 1)]
    assert noted(traces) == traces


def test_certain_is_only_what_leaves_right_engines_errors() -> None:
    """What is not wrong before position 8 errs four times as much as a format: the limit hides what is wrong there."""
    judged = [
        position if position.is_wrong else replace(position, error=1.0, error_ratio=4.0, error_size=4.0)
        for position in positions(lambda position: position.row >= 8)
    ]
    assert findings(judged)[0].sure != CERTAIN


def test_a_sliver_is_not_called_right() -> None:
    """Right where 13 rows of 5 tokens are, beside cancelled requests; of all other requests those of odd length."""

    def is_wrong(position: Position) -> bool:
        return len(position.request.prompt_token_ids) % 2 == 1 and abort_of(position) != "beside"

    judged = positions(is_wrong)
    right = sum(not is_wrong(position) for position in judged)
    description = described(judged)
    assert description is None or 2 * len(description.inside) >= right


def test_what_another_format_says_stays_beside_what_repeats_say() -> None:
    """total.py puts it first; repeats that fail each time show nothing, others come before it."""
    judged = positions(lambda position: True)
    names = sorted(PLAN_IDS)[:2]
    format_ = Suspicion(LIKELY, "wrong by less than bfloat16 rounds", "run again with it")
    assert with_repeats([format_], judged, [Repeats(name, 5, 5, 5) for name in names]) == [format_]
    first, second = with_repeats([format_], judged, [Repeats(name, 5, 5, 0) for name in names])
    assert "right alone" in first.where and second == format_


def test_ranges_of_a_number_are_named_by_their_first_and_last() -> None:
    assert [*ranges(TAGS["row"])[:6], ranges(TAGS["row"])[-1]] == ["0", "1", "2", "3", "4-7", "8-15", "65536+"]
