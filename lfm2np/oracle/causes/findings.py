"""What the errors of a check depend on: one first cause, how certain it is, and at most two more.

certain   all that is wrong lies where the cause says, at least PURE of the requests there are wrong, the chance of that
          by accident is below SURE_CHANCE (split.so_unlike), the rest errs like a right engine, and nothing else
          explains as much: at least SURE_SHARE of what is right and what is wrong; or every request is wrong, at least
          half of what was reported, and no tag separates them
likely    the first two, with a larger chance, or one of both with a chance below LIKELY_CHANCE, and LIKELY_SHARE is
          explained; or no tag separates wrong from right, and wrong requests were right in some or all of their
          repeats, or right alone and wrong beside others
a guess   anything else
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lfm2np.oracle.causes.groups import group_of, grouped
from lfm2np.oracle.causes.split import Description, described, is_unsteady, so_unlike, tendency_of
from lfm2np.oracle.causes.tags import BEHIND, LEAK, place_of
from lfm2np.oracle.judging.verdict import Position, probability_words

MOST_NAMES = 3  # of requests, in one line
MOST_CAUSES = 3
PURE = 0.9
SURE_CHANCE, LIKELY_CHANCE = 1e-9, 1e-6
SURE_SHARE, LIKELY_SHARE = 0.5, 0.2  # of what is explained: a wrong operator is right by luck here and there
ALONE_CHANCE = 1e-3  # of such a difference between repeats alone and beside others: one hypothesis, not hundreds
CERTAIN, LIKELY, GUESS = "certain", "likely", "a guess"
EVERYWHERE = (
    "a wrong operator, weight or constant (--locate says which), another checkpoint (lfm2np vet), or what requests "
    "before this check left behind (start the engine anew)"
)
UNSTEADY = (
    "no weight, operator or constant errs so: a state, rows or blocks that requests leave each other, or uninitialised "
    "memory"
)
RACE = (
    "not deterministic, or left over from other requests: a race, uninitialised memory, or cached blocks "
    "that are taken for others"
)


@dataclass(frozen=True)
class Suspicion:
    """One cause of what is wrong: where, and what that points to.

    explained  share of the entropy of right and wrong positions that `where` removes
    chance     of this by accident
    """

    sure: str
    where: str
    suspect: str = ""
    explained: float | None = None
    chance: float | None = None

    @property
    def of(self) -> tuple[str, float | None, float | None]:
        """What it is told by, whatever words came to it."""
        return self.suspect, self.explained, self.chance

    @property
    def line(self) -> str:
        """As it stands in a report."""
        return f"{self.sure}: {self.where}{self.suspect and ': '}{self.suspect}"


@dataclass(frozen=True)
class Repeats:
    """A wrong request that was repeated beside the same requests, and, unless it was alone, as often alone."""

    request: str
    failed: int
    times: int
    failed_alone: int | None = None  # None: it was alone


def findings(positions: Sequence[Position]) -> list[Suspicion]:
    """The first cause, then others; none of errors that the format explains."""
    if not any(group.is_off for group in grouped(positions, "case").values()):
        return []
    description = described(positions)
    return [undescribed(positions)] if description is None else split_causes(positions, description)


def with_repeats(
    causes: Sequence[Suspicion], positions: Sequence[Position], repeats: Sequence[Repeats]
) -> list[Suspicion]:
    """The causes, and what repeats show: behind a split or hits that are likely, if some repeats differ; else first,
    and then nothing is said any more of what no tag separates."""
    shown = repeated(positions, repeats)
    is_tested = bool(causes) and (causes[0].explained, causes[0].chance) != (None, None)
    if not causes or causes[0].sure == GUESS or not is_tested:
        undone = undescribed(positions).of if shown else None
        return [*shown, *(cause for cause in causes if cause.of != undone)][:MOST_CAUSES]
    if causes[0].sure == LIKELY and any(0 < repeat.failed < repeat.times for repeat in repeats):
        return [causes[0], *shown, *causes[1:]][:MOST_CAUSES]
    return list(causes)


def requests_of(positions: Sequence[Position]) -> tuple[list[str], list[str]]:
    """Ids of the wrong requests, and of all."""
    asked = {position.request.request_id: None for position in positions}
    wrong = {position.request.request_id: None for position in positions if position.is_wrong}
    return list(wrong), list(asked)


def split_causes(positions: Sequence[Position], description: Description) -> list[Suspicion]:
    """What is wrong by itself, the most telling first."""
    pure, alone = description.purity >= PURE, not description.wrong_inside
    chance, explained = description.chance, description.explained
    is_likely = (pure or alone) and explained >= LIKELY_SHARE and (chance < LIKELY_CHANCE or pure == alone)
    is_late = description.splits[0].suspect == BEHIND and not pure  # some later ones are right: it may be another tag
    is_certain = pure and alone and explained >= SURE_SHARE and chance < SURE_CHANCE
    is_certain = is_certain and group_of([each for each in positions if each.place in description.inside]).is_fine
    sure = CERTAIN if is_certain else LIKELY if is_likely and not is_late else GUESS
    most = ", though some of those are right" if is_late else ""
    where = [f"wrong {description.splits[0].wrong}{most}, right {description.right}"]
    where += [f"also wrong by itself: {split.wrong}" for split in description.splits[1:]]
    return [
        Suspicion(sure, words, split.suspect, explained, chance)
        for words, split in zip(where, description.splits, strict=True)
    ]


def repeated(positions: Sequence[Position], repeats: Sequence[Repeats]) -> list[Suspicion]:
    """What repeats of wrong requests show: nothing, if some are wrong each time and the others never.

    Sometimes right, sometimes wrong is no proof of a race: an engine may give a request another slot each time.
    """
    beside = [repeat for repeat in repeats if repeat.failed_alone is not None]
    failed, times = sum(repeat.failed for repeat in beside), sum(repeat.times for repeat in beside)
    alone = sum(repeat.failed_alone or 0 for repeat in beside)
    chance = so_unlike(failed, times, alone, times)
    if not alone and chance < ALONE_CHANCE:
        where = f"wrong beside others in {failed} of {times} repeats of {len(beside)} wrong requests, right alone"
        return [Suspicion(LIKELY, where, LEAK, chance=chance)]
    is_random = any(0 < repeat.failed < repeat.times for repeat in repeats)
    if is_random and all(repeat.failed_alone == 0 for repeat in repeats) and (cause := beside_only(positions, repeats)):
        return [cause]
    if not repeats or (not is_random and any(repeat.failed for repeat in repeats)):
        return []
    failed, times = sum(repeat.failed for repeat in repeats), sum(repeat.times for repeat in repeats)
    wrong, asked = requests_of(positions)
    count = len({*wrong, *(repeat.request for repeat in repeats)})  # of a wrong stop no position is wrong
    where = f"wrong in {count} of {len(asked)} requests, and in {failed} of {times} repeats of {len(repeats)} of them"
    return [Suspicion(LIKELY, where, RACE)]


def beside_only(positions: Sequence[Position], repeats: Sequence[Repeats]) -> Suspicion | None:
    """That no request of the check was wrong alone, so many were beside others, and so it is in repeats.

    A request that is wrong in one row of a batch may have another row each time: then too few repeats fail to say it by
    themselves.
    """
    wrong, asked = requests_of(positions)
    alone = {position.request.request_id for position in positions if place_of(position) == "alone"}
    beside = len(asked) - len(alone)
    chance = so_unlike(len(wrong), beside, 0, len(alone))
    if alone & set(wrong) or chance >= LIKELY_CHANCE:
        return None
    failed, times = sum(repeat.failed for repeat in repeats), sum(repeat.times for repeat in repeats)
    where = f"wrong only beside other requests, {len(wrong)} of {beside} against 0 of {len(alone)} alone, and in "
    where += f"{failed} of {times} repeats of {len(repeats)} of them, right alone"
    return Suspicion(LIKELY, where, f"{LEAK}; or a race", chance=chance)


def undescribed(positions: Sequence[Position]) -> Suspicion:
    """If no tag separates right from wrong: where it is wrong more often, if anywhere; whether the same tokens err
    alike. Other formats: total.py."""
    wrong, asked = requests_of(positions)
    right = [name for name in asked if name not in set(wrong)]
    count = sum(position.is_wrong for position in positions)
    exact = sum(position.error_size is not None and not position.is_wrong for position in positions)
    is_everywhere = not wrong or (not right and exact <= count)
    words = "wrong everywhere" if is_everywhere else f"wrong in {len(wrong)} of {len(asked)} requests"
    words += "" if right or is_everywhere else f", at {count} of {count + exact} reported positions"
    if right and (tendency := tendency_of(positions)):
        where, suspect, explained, chance = tendency
        accident = f"(by accident: {probability_words(chance)})"
        return Suspicion(GUESS, f"{words}, {where} {accident}", suspect, explained, chance)
    if is_unsteady(positions):
        return Suspicion(LIKELY, f"{words}, and by other amounts where the same tokens are sent again", UNSTEADY)
    if is_everywhere:
        return Suspicion(CERTAIN, words, EVERYWHERE)
    if not right:
        return Suspicion(GUESS, f"{words}, which nothing clearly sets apart")
    word, fewer = ("right", right) if len(right) < len(wrong) else ("wrong", wrong)
    names = ", ".join(fewer[:MOST_NAMES]) + ", ..." * (len(fewer) > MOST_NAMES)
    return Suspicion(GUESS, f"{words}, which nothing in the requests clearly sets apart; {word}: {names}")
