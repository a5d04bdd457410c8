"""What a check tested and what it did not: a verdict covers nothing else.

Errors that change no token show in log-probabilities only. So a case, or its decodes, without any reported
log-probability leaves the whole check inconclusive. What was never requested is listed only.

Some servers stop at an end-of-sequence token although ignore_eos was requested. The missing tokens are requested again,
with the prompt and the answer so far as the prompt; what can't be requested again counts as not tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lfm2np.checkpoint.text.tokenizer import Tokenizer, text_of
from lfm2np.oracle.engines.records import PROCESSORS, Pair, Request, greedy
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging.verdict import Position
from lfm2np.oracle.prefix_hits import prefix_hits
from lfm2np.oracle.report.report import plural
from lfm2np.oracle.workloads import CASES, DEFAULT_CASES, PROCESSED, option_of

MOST_TIMES = 4  # that one request is continued
CONTINUES = "continues"  # the tag of such a request: the id of the one that ended early


def unseen(pairs: Sequence[Pair], positions: Sequence[Position]) -> list[str]:
    """Cases, and decodes of cases, of which no log-probability was reported; in words.

    The first new token belongs to prefill: a server that reports no log-probabilities of prompts is judged there.
    """
    reported = [position for position in positions if position.error_ratio is not None]
    seen = {position.request.case for position in reported}
    decoded = {at.request.case for at in reported if at.row >= len(at.request.prompt_token_ids)}
    several = {request.case for request, _ in pairs if request.max_tokens > 1 and not request.stop}
    cases = dict.fromkeys(request.case for request, _ in pairs)
    silent = {
        "the case": [case for case in cases if case not in seen],
        "decode of the case": [case for case in cases if case in seen & several - decoded],
    }
    return [f"{what}{'s' * (len(names) > 1)} {', '.join(names)}" for what, names in silent.items() if names]


def largest_batch(abilities: Abilities, pairs: Sequence[Pair]) -> int:
    """The most requests that were in flight together, limited by what adapter and engine take at once."""
    places = [int(request.tags.get("place") or 0) for request, _ in pairs if request.tags.get("beside")]
    most = abilities.at_once if abilities.slots is None else min(abilities.at_once, abilities.slots)
    return min(most, 1 + max(places, default=0))


def case_of(request_id: str) -> str:
    """The case of a request by its id: `Writer.request` numbers them."""
    return request_id.rpartition("-")[0] or request_id


def not_tested(
    abilities: Abilities,
    pairs: Sequence[Pair],
    not_put: Sequence[str],
    left: int,
    positions: Sequence[Position],
    unjudged: Sequence[str] = (),
) -> list[str]:
    """What this check does not cover, in words: not wanted, not possible, or not answered. `unjudged`: ids of requests
    whose processors were not judged."""
    batch, early, hits = largest_batch(abilities, pairs), early_ends(pairs), prefix_hits(pairs)
    silent = sum(position.error_ratio is None for position in positions)
    answers = [answer for _, answer in pairs if answer.token_ids]
    optional = [name for name, case in CASES.items() if case.option]
    asked = {request.case for request, _ in pairs if option_of(request) or request.case not in optional}
    unasked = [name for name in DEFAULT_CASES if name not in asked]
    cases = [
        name for name in unasked if not (CASES[name].option or (CASES[name].needs_batches and abilities.at_once == 1))
    ]
    sent = {name for request, _ in pairs for name in request.processors}
    unsent = [name for name in PROCESSORS if name not in sent and ("processors" in asked or name not in PROCESSED)]
    counts = ", ".join(f"{case} {count}" for case, count in Counter(map(case_of, not_put)).items())
    # No engine's counters of preemptions are read; one that takes several requests may run out of blocks or slots.
    unless = ", unless the engine preempted some by itself" if batch > 1 else ""
    lines = {
        f"{left} requests after one that is certainly wrong": left,
        f"{len(not_put)} requests whose token ids no text encodes to ({counts}): the engine takes texts": not_put,
        f"{early.lost} of {early.tokens} tokens that {early.answers} answers left out by ending early": early.lost,
        f"errors in {silent} of {len(positions)} positions (no log-probability)": 0 < silent < len(positions),
        f"case{'s' * (len(cases) > 1)} {', '.join(cases)}": cases,
        f"batches of more than {batch}": batch > 1,
        "batches": batch == 1,
        "cancelled requests": not abilities.can_abort,
        f"the prefix cache ({hits.words()})": hits.repeated and not hits.is_hit,
        **{CASES[name].option: CASES[name].option for name in unasked},
        "texts": answers and not any(answer.text for answer in answers),
        "log-probabilities of prompts": not any(answer.prompt_logprobs for answer in answers),
        f"requests with {', '.join(unsent)}": unsent,
        f"what penalties and filters exclude, in {plural(len(unjudged), 'request')} (no routes reported)": unjudged,
        f"preempted requests{unless} (lfm2np fuzz)": True,
    }
    return [words for words, is_so in lines.items() if is_so]


# --- answers that ended early: fewer tokens than requested, without a stop string


@dataclass(frozen=True)
class EarlyEnds:
    """Answers that ended early, the tokens that are missing, and those of them that no continuation has."""

    answers: int
    tokens: int
    lost: int


def missing_tokens(pair: Pair) -> int:
    """How many an answer with some tokens lacks."""
    request, answer = pair
    if answer.error is not None or not answer.token_ids or request.stop or answer.finish_reason != "stop":
        return 0
    return max(0, request.max_tokens - len(answer.token_ids))


def continuations(pairs: Sequence[Pair], tokenizer: Tokenizer | None, takes_token_ids: bool) -> tuple[Request, ...]:
    """Requests for the missing tokens, whose place is not yet noted; none for sampled answers, as a seed would start
    again."""
    requests = []
    for request, answer in pairs:
        missing, ids = missing_tokens((request, answer)), (*request.prompt_token_ids, *(answer.token_ids or ()))
        text = text_of(tokenizer, ids) if tokenizer is not None and missing else None
        if missing and request.is_greedy and (takes_token_ids or text is not None):
            seen = {"length": len(ids), "prefix": "warm", "seen": len(ids), CONTINUES: request.request_id}
            name = f"{request.request_id}+{len(ids) - len(request.prompt_token_ids)}"
            requests.append(greedy(name, ids, missing, prompt_text=text, tags={**request.tags, **seen}))
    return tuple(requests)


def early_ends(pairs: Sequence[Pair]) -> EarlyEnds:
    first = [missing_tokens(pair) for pair in pairs if CONTINUES not in pair[0].tags]
    continued = {request.tags.get(CONTINUES) for request, _ in pairs}
    lost = sum(missing_tokens(pair) for pair in pairs if pair[0].request_id not in continued)
    return EarlyEnds(sum(map(bool, first)), sum(first), lost)
