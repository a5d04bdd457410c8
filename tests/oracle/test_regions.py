"""The largest right region, and what is wrong by itself: on positions made by hand, of which it is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.oracle.causes.findings import CERTAIN, Repeats, findings
from lfm2np.oracle.causes.findings import lines as in_lines
from lfm2np.oracle.causes.regions import described
from lfm2np.oracle.causes.scales import SCALES
from lfm2np.oracle.check import possible_asks
from lfm2np.oracle.factors import abort_of, phase_of, place_of
from lfm2np.oracle.judging.verdict import WRONG, Position, Verdict
from lfm2np.oracle.targets.file_target import Transcript
from lfm2np.oracle.targets.records import Answer, Ask
from lfm2np.oracle.targets.target import Abilities
from lfm2np.oracle.workloads import Round, noted

NEW = 4  # tokens of each request


def ask_of(index: int, prompt: Sequence[int], beside: bool = False) -> Ask:
    return Ask(
        f"neighbours-{index}", "neighbours", tuple(prompt), NEW, factors={"length": len(prompt), "beside": beside}
    )


def plan() -> list[Round]:
    """Prompts of 1 to 20 tokens alone, three times; then four at a time; then some beside which one is cancelled."""
    count = iter(range(1000))
    alone = []
    for length in range(1, 21):
        prompt = [next(count) + 1000 for _ in range(length)]
        alone += [Round((ask_of(next(count), prompt),)) for _ in range(3)]
    beside = []
    for turn in range(12):  # those of one round begin alike
        lengths = [3 * (1 + (turn + place) % 4) for place in range(4)]
        start = 2000 + 100 * turn
        beside.append(Round(tuple(ask_of(next(count), range(start, start + one), beside=True) for one in lengths)))
    cancelled = []
    for first in range(3200, 3500, 50):  # every other one comes after a cancelled request, and is beside none
        asks = tuple(ask_of(next(count), range(start, start + 5), beside=True) for start in range(first, first + 48, 8))
        cancelled.append(Round(asks, () if first % 100 else (asks[0].id,)))
    return noted([*alone, *beside, *cancelled])


PLAN = plan()


def positions(is_wrong: Callable[[Position], bool], of: Sequence[Round] = tuple(PLAN)) -> list[Position]:
    """Every row of every request that is judged. The wrong ones are a thousand times the noise off."""
    found = []
    for one in of:
        for ask in one.asks:
            if ask.id not in one.aborted:
                for row in range(len(ask.prompt_token_ids) - 1 + NEW):
                    is_new = row >= len(ask.prompt_token_ids) - 1
                    right = Position(ask, row, is_new, 5, 5, 0.0, 0.0, 99.0, 0.0, 0.0, 0.0, Verdict.EXACT)
                    wrong = replace(right, error=1.0, error_ratio=1e3, error_size=1e3, verdict=Verdict.DRIFT)
                    found.append(wrong if is_wrong(right) else right)
    return found


def decode(one: Position) -> bool:
    return phase_of(one) == "decode"


def later(one: Position) -> bool:
    return place_of(one) == "later"


def warm(one: Position) -> bool:
    return one.ask.factors["seen"] >= 8


def words(found: Sequence[Position]) -> tuple[list[str], list[str]]:
    """Of the right region, and of what is wrong by itself, sorted."""
    regions = described(found)
    if regions is None:
        return [], []
    return [one.words for one in regions.right], sorted(one.words for one in regions.parts)


WARM = "prompts whose first 8 tokens were asked before"
COLD = "prompts whose first 8 tokens are new"


@pytest.mark.parametrize(
    ("is_wrong", "right", "parts"),
    [
        (decode, ["prefill"], ["decode"]),
        (later, ["alone or first of a batch"], ["later in a batch"]),
        (lambda one: place_of(one) != "alone", ["alone"], ["first of a batch or later in a batch"]),
        (warm, [COLD], [WARM]),
        (lambda one: one.row >= 8, ["before position 8"], ["from position 8 on"]),
        (
            lambda one: len(one.ask.prompt_token_ids) < 3,
            ["prompts of 3 tokens or more"],
            ["prompts of fewer than 3 tokens"],
        ),
        (
            lambda one: decode(one) or later(one),
            ["prefill", "alone or first of a batch"],
            ["decode", "later in a batch"],
        ),
        (lambda one: decode(one) or warm(one), ["prefill", COLD], ["decode", WARM]),
        (
            lambda one: later(one) or one.row >= 8,
            ["alone or first of a batch", "before position 8"],
            ["later in a batch", "from position 8 on"],
        ),
        (
            lambda one: decode(one) or later(one) or warm(one),
            ["prefill", "alone or first of a batch", COLD],
            ["decode", "later in a batch", WARM],
        ),
        (  # and those after are right
            lambda one: abort_of(one) == "beside",
            ["before any cancelled request or after cancelled requests"],
            ["beside cancelled requests"],
        ),
        (lambda one: decode(one) and later(one), [], ["decode, later in a batch"]),
        (
            lambda one: one.row % 8 == 7,  # as where a chunk's last row is given another's number
            ["except at the last position of each 8"],
            ["at the last position of each 8"],
        ),
    ],
)
def test_each_cause_is_named(is_wrong: Callable[[Position], bool], right: list[str], parts: list[str]) -> None:
    assert words(positions(is_wrong)) == (right, sorted(parts))


def test_nothing_is_described_where_all_is_right_or_all_is_wrong() -> None:
    assert described(positions(lambda one: False)) is None
    assert described(positions(lambda one: True)) is None
    assert described([]) is None


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_no_region_is_right_by_chance(share: float) -> None:
    """Requests that are wrong at random depend on nothing."""
    for seed in range(8):
        random = np.random.Generator(np.random.Philox(key=[seed, 0]))
        wrong = {ask.id for one in PLAN for ask in one.asks if random.random() < share}
        assert described(positions(lambda one, wrong=wrong: one.ask.id in wrong)) is None  # type: ignore[misc]


def test_few_positions_are_no_region() -> None:
    few = positions(decode, PLAN[6:8])
    assert {one.ask.id for one in few} == {PLAN[6].asks[0].id, PLAN[7].asks[0].id}
    assert described(few) is None


SINGLE = st.sampled_from([decode, later, warm, lambda one: one.row >= 8, lambda one: len(one.ask.prompt_token_ids) < 3])


@pytest.mark.slow
@given(st.lists(SINGLE, min_size=1, max_size=3, unique=True))
def test_the_right_region_is_right_and_what_is_wrong_by_itself_is_wrong(causes) -> None:  # type: ignore[no-untyped-def]
    found = positions(lambda one: any(cause(one) for cause in causes))
    regions = described(found)
    assert regions is not None and 1 <= len(regions.right) <= len(causes)
    inside = [one for one in found if (one.ask.id, one.row) in regions.inside]
    assert inside and not any(one.verdict in WRONG for one in inside)
    assert len(inside) >= 0.8 * sum(one.verdict not in WRONG for one in found)
    assert len(regions.parts) == len(causes)
    assert words(found) == words(list(reversed(found)))


def test_every_level_that_an_ask_can_have_has_words() -> None:
    for name, scale in SCALES.items():
        assert set(scale.words) == set(scale.suspects), name
        levels = {scale.level(one, one.ask.prompt_token_ids) for one in positions(lambda one: False)}
        assert scale.edges or levels <= set(scale.words), name


# --- findings


EVERYWHERE = (
    "wrong everywhere, and no format errs like this: a wrong operator, weight or constant (--locate says which)"
)


def lines(found: Sequence[Position], repeats: Sequence[Repeats] = ()) -> list[str]:
    return in_lines(findings(found, repeats))


def test_wrong_everywhere_is_reported_only_if_every_request_is_wrong() -> None:
    assert lines(positions(lambda one: True)) == [f"certain: {EVERYWHERE}"]
    names = [ask.id for one in PLAN for ask in one.asks if ask.id not in one.aborted]
    right = names[5]
    (found,) = lines(positions(lambda one: one.ask.id != right))
    apart = "which nothing in the requests sets apart"
    assert found == f"a guess: wrong in {len(names) - 1} of {len(names)} requests, {apart}; right: {right}"
    few = names[3:43:8]
    found = lines(positions(lambda one: one.ask.id in few))[0]
    assert found == f"a guess: wrong in {len(few)} of {len(names)} requests, {apart}; wrong: {', '.join(few[:3])}, ..."


def test_the_first_cause_says_where_it_is_wrong_and_others_stand_under_it() -> None:
    first, growing = lines(positions(decode))
    assert first == "certain: wrong in decode, right in prefill: what prefill leaves behind is not what decode expects"
    assert growing.startswith("errors grow with the position")
    first, second, *more = findings(positions(lambda one: decode(one) or later(one)))
    assert first.where == "wrong later in a batch, right in prefill, alone or first of a batch"
    assert second.where == "also wrong by itself: in decode" and len(more) <= 1
    first, *_ = findings(positions(lambda one: one.row >= 1))
    assert first.sure == CERTAIN and first.suspect.startswith("attention or rotation of positions")


def test_a_sliver_is_not_called_right() -> None:
    """Right where 13 rows of 5 tokens are, beside cancelled requests; of all other requests those of odd length."""

    def is_wrong(one: Position) -> bool:
        return len(one.ask.prompt_token_ids) % 2 == 1 and abort_of(one) != "beside"

    found = positions(is_wrong)
    right = sum(not is_wrong(one) for one in found)
    regions = described(found)
    assert regions is None or 2 * len(regions.inside) >= right


def test_a_vocabulary_id_is_a_factor() -> None:
    found = positions(lambda one: max(one.ask.prompt_token_ids[: one.row + 1]) >= 2048)
    (first, *_) = findings(found)
    assert first.where == "wrong once a token id is 2048 or more, right while token ids are below 2048"
    predicted = [replace(one, token_id=7 if decode(one) and one.row % 2 else 900) for one in positions(lambda _: False)]
    wrong = {"error": 1.0, "error_ratio": 1e3, "error_size": 1e3, "verdict": Verdict.DRIFT}
    found = [replace(one, **wrong) if one.token_id == 900 else one for one in predicted]  # type: ignore[arg-type]
    assert "where the predicted token's id is" in findings(found)[0].where


def test_requests_that_are_wrong_at_random_are_a_rate_and_blame_nothing() -> None:
    """A race: what it hits differs from run to run, what is said of it does not."""
    said = set()
    for seed in range(8):
        random = np.random.Generator(np.random.Philox(key=[seed, 1]))
        hit = {ask.id for one in PLAN for ask in one.asks if random.random() < 0.03} | {PLAN[0].asks[0].id}
        found = positions(lambda one, hit=hit: one.ask.id in hit)  # type: ignore[misc]
        (first,) = findings(found, [Repeats(name, 0, 5) for name in sorted(hit)])
        requests = len({one.ask.id for one in found if one.verdict in WRONG})
        of = len({one.ask.id for one in found})
        assert first.where.startswith(f"wrong in {requests} of {of} requests, and in 0 of ")
        said.add((first.sure, first.suspect.partition(",")[0]))
    assert said == {("likely", "not deterministic")}


def test_what_repeats_say_comes_first_only_where_nothing_else_is_likely() -> None:
    """An engine whose slots differ may be right and wrong in turn, and still be wrong beside others only."""
    random = np.random.Generator(np.random.Philox(key=[1, 2]))
    hit = {ask.id for one in PLAN for ask in one.asks if random.random() < 0.3}
    found = positions(lambda one: later(one) and one.ask.id in hit)
    name = next(one.ask.id for one in found if one.verdict in WRONG)
    first, second, *more = findings(found, [Repeats(name, 2, 5)])
    assert first.where.startswith("wrong later in a batch") and len(more) <= 1
    assert ", and in 2 of 5 repeats of 1 of them" in second.where and second.suspect.startswith("not deterministic")
    assert findings(found, [Repeats(name, 5, 5)]) == findings(found)
    assert lines(positions(decode), [Repeats(name, 2, 5)]) == lines(positions(decode))


# --- what is noted of an ask


def test_requests_that_are_wrong_beside_others_only_are_reported_as_such() -> None:
    """Two of many, so that no factor tells them apart; the repeats of both do: 10 of 10, alone 0 of 10."""
    names = [one.asks[2].id for one in PLAN if len(one.asks) > 2][:2]
    found = positions(lambda one: one.ask.id in names)
    first, *_ = findings(found, [Repeats(name, 5, 5, 0) for name in names])
    assert first.line.startswith("likely: wrong beside others in 10 of 10 repeats of 2 wrong requests, right alone")


def test_an_ask_is_noted_with_its_place_what_was_asked_before_and_what_was_cancelled() -> None:
    first, second = ask_of(1, [1, 2, 3]), ask_of(2, [1, 2, 4, 5], True)
    third, fourth = ask_of(3, [1, 2, 4, 6, 7], True), ask_of(4, [9])
    found = noted([Round((first,)), Round((second, third), (third.id,)), Round((fourth,))])
    facts = [tuple(ask.factors[name] for name in ("place", "seen", "abort")) for one in found for ask in one.asks]
    more = [tuple(ask.factors[name] for name in ("order", "together", "tenant")) for one in found for ask in one.asks]
    assert more == [(0, 1, "first"), (1, 2, "later"), (2, 2, "first"), (3, 1, "later")]
    assert facts == [(0, 0, "none"), (0, 2, "beside"), (1, 3, "beside"), (0, 0, "after")]
    assert [one.aborted for one in found] == [(), (third.id,), ()]
    assert noted(found) == found


def test_the_first_of_a_batch_is_the_first_that_could_be_put() -> None:
    silent, told = ask_of(1, [1]), replace(ask_of(2, [2]), prompt_text="b")
    possible, impossible = possible_asks(Round((silent, told)), Abilities("texts only", takes_token_ids=False))
    assert impossible == [silent]
    assert noted([possible])[0].asks[0].factors["place"] == 0


def test_a_transcript_without_these_notes_still_answers(tmp_path: Path) -> None:
    bare = ask_of(1, [1, 2, 3])
    with Transcript(tmp_path / "earlier.jsonl") as transcript:
        transcript.append(bare, Answer(bare.id, (5,)))
    ((one,),) = (each.asks for each in noted([Round((bare,))]))
    with Transcript(tmp_path / "earlier.jsonl") as transcript:
        assert transcript.known(one) == Answer(bare.id, (5,))
        assert transcript.known(replace(one, factors={**one.factors, "prefix": "warm"})) is None
