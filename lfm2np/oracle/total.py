"""The verdict on a whole check: what the positions say together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.causes.everywhere import constant_cause, unrelated_cause
from lfm2np.oracle.causes.findings import (
    CERTAIN,
    EVERYWHERE,
    GUESS,
    LIKELY,
    MOST_CAUSES,
    UNSTEADY,
    Suspicion,
    findings,
    requests_of,
)
from lfm2np.oracle.causes.groups import OFF
from lfm2np.oracle.causes.other_formats import Fit, other_format
from lfm2np.oracle.causes.replies import SAMPLER, chosen_cause, contradictions, reply_cause
from lfm2np.oracle.coverage import unseen
from lfm2np.oracle.engines.records import Pair
from lfm2np.oracle.judging.constants import ConstantSearch, search_constants
from lfm2np.oracle.judging.drawn import AS_IF
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.scored import Evidence, Known
from lfm2np.oracle.judging.verdict import (
    FLIPS_LIMIT,
    LIMIT,
    WRONG,
    Position,
    Verdict,
    chance_together,
    flip_probability,
    largest_error,
    probability_words,
    route_probability,
    size_of,
)
from lfm2np.oracle.report.report import are, plural
from lfm2np.oracle.workloads import CASES
from lfm2np.values import Progress

MOST_SIZE = 1.5  # root mean square of right engines' errors in units of their own format's noise
LEAST_TOLD = 256  # log-probabilities from which on another format is the verdict by the size of its errors


@dataclass(frozen=True)
class Total:
    """`verdict` is EXACT, ROUTE, TIE, DRIFT, BUG or INCONCLUSIVE."""

    verdict: Verdict
    grounds: tuple[str, ...]  # what makes it so, in words
    counts: dict[str, int]  # of positions, by verdict
    rms: float  # of the errors of log-probabilities, in units of the format's noise
    worst: float
    flips: int
    flip_chance: float  # that a right engine of this format has as many
    first_wrong: Position | None
    unanswered: tuple[str, ...]  # ids of asks that got no usable answer
    rerouted: int = 0  # tokens that went to other experts, as far as that is known
    route_chance: float = 1.0  # that a right engine of this format sends as many elsewhere
    causes: tuple[Suspicion, ...] = ()  # of a bug, the first one first
    constants: ConstantSearch | None = None  # what was seen of them; None: not looked for
    errs_like: str = ""  # the format by which all errors are explained, if it is not the declared one

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is so: the first cause, what else makes it so, the other causes."""
        lines = [cause.line for cause in self.causes]
        return (*lines[:1], *self.grounds, *lines[1:])


def total(
    model: LoadedModel,
    format_name: str,
    pairs: Sequence[Pair],
    positions: Sequence[Position],
    progress: Progress | None = None,
    known: Known | None = None,
    constants: bool = False,
) -> Total:
    """All positions together; where they drift, ways of reporting, constants and other formats are tried as reasons.

    constants  look for constants that the format hides however long it takes
    """
    flips, chance = flip_probability(positions)
    rerouted, route_chance = route_probability(positions)
    wrong = [position for position in positions if position.is_wrong]
    unanswered = tuple(
        request.request_id for request, answer in pairs if answer.error is not None or not answer.token_ids
    )
    evidence = Evidence(model, format_name, pairs, positions, Known() if known is None else known, progress)
    is_off = bool(wrong) or size_of(positions) > OFF
    causes = findings(positions) if is_off else []
    cause = (reply_cause(evidence) or chosen_cause(positions)) if wrong else None
    seen: ConstantSearch | None = None
    errs_like = ""
    is_split = bool(causes) and causes[0].explained is not None
    if cause is None and wrong and not (is_split and causes[0].sure != GUESS):
        cause = unrelated_cause(evidence)
    if cause is None and not (is_split and causes[0].sure == CERTAIN):  # a split tells all
        seen = search_constants(evidence, is_off, constants)
        cause = constant_cause(seen, is_off)
    if cause is not None:
        more = causes if cause.suspect == SAMPLER else []
        verdict, reasons, causes = Verdict.BUG, wrong_reasons(format_name, positions), [cause, *more][:MOST_CAUSES]
    elif is_off or chance_together(positions) < FLIPS_LIMIT:
        verdict, reasons, causes, errs_like = beyond_its_format(evidence, causes or findings(positions))
    else:
        verdict, reasons, causes = *within_its_format(evidence, unanswered), []
    if wrong:
        reasons += contradictions(pairs)
    if refuted := [answer for _, answer in pairs if answer.is_refuted]:
        reasons = refuted_reasons(pairs, reasons if verdict in WRONG else None)
        verdict = Verdict.BUG
        causes = causes if 2 * len(refuted) < len(pairs) else []  # they are of the few answers that were judged
    return Total(
        verdict=verdict,
        grounds=tuple(reasons),
        counts=dict(Counter(str(position.verdict) for position in positions)),
        rms=size_of(positions),
        worst=largest_error(positions),
        flips=flips,
        flip_chance=chance,
        rerouted=rerouted,
        route_chance=route_chance,
        first_wrong=min(wrong, key=lambda position: (position.verdict is not Verdict.BUG, position.row), default=None),
        unanswered=unanswered,
        causes=tuple(causes),
        constants=seen,
        errs_like=errs_like,
    )


def beyond_its_format(evidence: Evidence, causes: list[Suspicion]) -> tuple[Verdict, list[str], list[Suspicion], str]:
    """With its grounds, the causes of a bug: where no part of the requests is named, what other formats say; and the
    format that it errs like."""
    format_name, positions = evidence.format_name, evidence.positions
    grounds = wrong_reasons(format_name, positions)
    if 0.0 < size_of(positions) <= MOST_SIZE:  # all but a few errors are the declared format's: those are no format's
        return Verdict.BUG, grounds, causes, ""
    other = other_format(evidence)
    name, fit = other or ("", None)
    words = "" if fit is None else fit.format(name, format_name)
    told = sum(position.error is not None for position in positions)
    if fit is Fit.BY_SIZE and told < LEAST_TOLD:
        return Verdict.BUG, grounds, [*causes, Suspicion(GUESS, f"of {told} log-probabilities: {words}")], name
    if fit is not None and fit is not Fit.SMALLER:
        return Verdict.DRIFT, [words], [], name
    everywhere = causes[0].suspect if causes and causes[0].suspect in (EVERYWHERE, UNSTEADY) else ""
    if everywhere and fit is None:
        causes = [replace(causes[0], where=f"{causes[0].where}, and no format errs like this"), *causes[1:]]
    if fit is not None and not format_named(name).levels:  # under steps of weights almost anything is right
        wrong, asked = requests_of(positions)
        where = Fit.SMALLER.format(name)
        suspect = f"run again with it if the engine computes in it; else {everywhere or EVERYWHERE}"
        if len(wrong) == len(asked) and all(cause.sure == GUESS or cause.explained is None for cause in causes):
            causes = [Suspicion(LIKELY, where, suspect), *(cause for cause in causes if cause.sure == GUESS)]
        else:
            causes = [*causes, Suspicion(GUESS, where, suspect)]
    return Verdict.BUG, grounds, causes, ""


def within_its_format(evidence: Evidence, unanswered: Sequence[str]) -> tuple[Verdict, list[str]]:
    format_name, pairs, positions = evidence.format_name, evidence.pairs, evidence.positions
    if unanswered:
        answer = next(answer for request, answer in pairs if request.request_id == unanswered[0])
        silent = "no answer reported the ids of its tokens"
        ended = f"finish_reason {answer.finish_reason!r} after 0 tokens"
        first = f"{unanswered[0]}: {answer.error or (silent if answer.token_ids is None else ended)}"
        return Verdict.INCONCLUSIVE, [f"{len(unanswered)} of {len(pairs)} requests got no usable answer, first {first}"]
    if not positions:
        return Verdict.INCONCLUSIVE, ["no answer reported the ids of its tokens: nothing could be judged"]
    if all(position.error is None for position in positions):
        return Verdict.INCONCLUSIVE, ["no log-probabilities were reported: errors that change no token can't be seen"]
    if missing := unseen(pairs, positions):
        return Verdict.INCONCLUSIVE, [f"no log-probability was reported in {'; in '.join(missing)}"]
    if any(position.verdict is Verdict.TIE for position in positions):
        return Verdict.TIE, [f"every flip is within what {format_name} explains, and so are all of them together"]
    if any(position.is_rerouted for position in positions):
        return Verdict.ROUTE, ["tokens went to other experts only where the format can't tell the scores apart"]
    reported = sum(position.error_ratio is not None for position in positions)
    return Verdict.EXACT, [f"all {reported:,} log-probabilities are within {format_name}"]


def refuted_reasons(pairs: Sequence[Pair], others: Sequence[str] | None) -> list[str]:
    """The first answer that no right engine gives, and what else is wrong; if nothing is, the cases of such answers,
    unless those are most of the cases, or others have such answers, too. How tokens seem to be drawn is the cause,
    whatever the case suspects."""
    refuted = [(request, answer) for request, answer in pairs if answer.is_refuted]
    request, answer = refuted[0]
    first = f"first of {request.request_id}" if request.request_id else "first"
    summary = f"{plural(len(refuted), 'answer')} that no right engine gives, {first}: {answer.error}"
    cases = defaultdict[str, set[str]](set)  # by the first word of what is wrong
    for request, answer in refuted:
        cases[(answer.error or "").split()[0]].add(request.case)
    alone = {case for of in cases.values() if len(of) == 1 for case in of}
    wrong = {request.case for request, answer in refuted if AS_IF not in (answer.error or "")} & alone
    asked = dict.fromkeys(request.case for request, _ in pairs)
    named = [case for case in asked if case in wrong and case in CASES] if 2 * len(wrong) <= len(asked) else []
    return [summary, *([f"wrong in {case}: {CASES[case].suspect}" for case in named] if others is None else others)]


def wrong_reasons(format_name: str, positions: Sequence[Position]) -> list[str]:
    """How much is wrong, by kind: tokens that are too far behind, or routed to experts that are; log-probabilities."""
    bugs = [position for position in positions if position.verdict is Verdict.BUG]
    drifts = sum(position.verdict is Verdict.DRIFT for position in positions)
    routes = [position.route for position in bugs if position.route is not None and position.route.ratio > LIMIT]
    worst = max(routes, key=lambda route: route.ratio, default=None)
    example = "" if worst is None else f"in layer {worst.layer} one to expert {worst.expert} instead of "
    example += "" if worst is None else f"{worst.instead_of}, {worst.ratio:.3g} times the noise behind"
    chance, route_chance = flip_probability(positions)[1], route_probability(positions)[1]
    together = f"{probability_words(chance)} together, though each alone could be a tie"
    is_tie = any(position.is_flip and position.verdict is not Verdict.BUG for position in positions)
    further, routed = f"than {format_name} explains", plural(len(routes), "token")
    reasons = {
        f"{are(len(bugs) - len(routes), 'token')} further behind the oracle's {further}": len(routes) < len(bugs),
        f"{routed} went to experts whose scores are further behind {further}; {example}": bool(routes),
        f"{are(drifts, 'log-probability')} further off {further}": drifts > 0,
        f"this many flips have a probability of {together}": chance < FLIPS_LIMIT and is_tie,
        f"this many tokens routed to other experts have a probability of {probability_words(route_chance)}": (
            route_chance < FLIPS_LIMIT
        ),
    }
    return [words for words, is_so in reasons.items() if is_so]
