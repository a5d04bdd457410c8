"""What a check may have found: by lfm2np's own engine, right and with a fault, and made by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from engines import Kept, checked_target
from faults import inject

import lfm2np
from lfm2np.oracle.check import Checked
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Request, failed, greedy
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging.verdict import Position, Verdict, root_mean_square
from lfm2np.oracle.total import Total

COMMAND = "lfm2np check 'package.module:factory' --format float32"
HOSTILE = (
    "</title></style></bdi></td><script>alert(1)</script><img src=http://evil.example/x onerror=a()>\"'&amp;]]>-->"
    "\x00\x07\x1b[2J\r\n\u202eevil\u2066\u200b\ud800\ufffe"
)


@lru_cache
def right() -> Checked:
    return run_check(Kept)


@lru_cache
def wrong() -> Checked:
    with inject("state-never-advanced"):
        return run_check(PythonTarget)


def run_check(kind: type[PythonTarget]) -> Checked:
    """Of lfm2np's own engine, whose cache and state the oracle does not use: a fault there is the engine's alone."""
    model = lfm2np.load()
    target = kind("lfm2np.suite.adapters:own", model.path)
    return checked_target(model, target, cases=("short-prompts",))


def position(request: Request, row: int, verdict: Verdict, error: float | None, flip: bool = False) -> Position:
    return Position(
        request=request,
        row=row,
        is_new=True,
        token_id=5,
        best=6 if flip else 5,
        gap=0.25 if flip else 0.0,
        gap_ratio=3.5 if flip else 0.0,
        margin_ratio=3.5 if flip else 77.0,
        error=None if error is None else error / 1000,
        error_ratio=error,
        error_size=None if error is None else abs(error),
        verdict=verdict,
    )


def made(verdict: Verdict, positions: list[Position], reason: str, engine: str = "hand made") -> Checked:
    """A Checked that no engine said; each position's request has one answer."""
    pairs = {judged.request.request_id: (judged.request, Answer((5,))) for judged in positions}
    ratios = [abs(judged.error_ratio) for judged in positions if judged.error_ratio is not None]
    wrong = [judged for judged in positions if judged.verdict in (Verdict.DRIFT, Verdict.BUG)]
    total = Total(
        verdict=verdict,
        grounds=(reason,),
        counts={str(one): sum(p.verdict is one for p in positions) for one in {p.verdict for p in positions}},
        rms=root_mean_square(ratios),
        worst=max(ratios, default=0.0),
        flips=sum(judged.is_flip for judged in positions),
        flip_chance=0.125,
        first_wrong=wrong[0] if wrong else None,
        unanswered=(),
    )
    return Checked(
        Abilities(engine, tells_logprobs=True), "float32", tuple(pairs.values()), (), tuple(positions), total
    )


def short(case: str = "borders", index: int = 1) -> Request:
    return greedy(f"{case}-{index}", (1, 2, 3), 4, case=case, tags={"length": 3, "beside": False})


def drift() -> Checked:
    positions = [position(short(), row, Verdict.DRIFT, 12.5 + row) for row in range(4)]
    return made(Verdict.DRIFT, positions, "errs like bfloat16 everywhere: not the float32 that it declares")


def inconclusive() -> Checked:
    return made(Verdict.INCONCLUSIVE, [position(short(), 2, Verdict.EXACT, None)], "no log-probabilities were told")


def tie() -> Checked:
    positions = [position(short(), 0, Verdict.EXACT, 0.5), position(short(), 1, Verdict.TIE, 1.5, flip=True)]
    return made(Verdict.TIE, positions, "every flip is within what float32 explains")


def hostile() -> Checked:
    """Everything that an engine, a file of answers or a prompt may say."""
    request = greedy(
        f"{HOSTILE}-1", (1, 2, 3), 4, case=HOSTILE, prompt_text=HOSTILE, tags={"length": 3, "prefix": HOSTILE}
    )
    base = made(Verdict.BUG, [position(request, row, Verdict.BUG, 99.0, True) for row in range(4)], HOSTILE, HOSTILE)
    silent = greedy("silent-1", (1,), 4, case="silent", tags={"length": 1})
    pairs = (*base.pairs, (silent, Answer(error=HOSTILE)))
    return replace(
        base,
        format=HOSTILE,
        pairs=pairs,
        not_put=(HOSTILE,),
        total=replace(base.total, unanswered=(silent.request_id,)),
    )


def unanswered() -> Checked:
    """Some requests failed, with twelve messages; some could not be put."""
    requests = [short("prefixes", index) for index in range(24)]
    pairs = tuple((request, failed(f"message {min(index, 11)}")) for index, request in enumerate(requests))
    base = made(Verdict.INCONCLUSIVE, [], "24 requests got no usable answer")
    total = replace(base.total, unanswered=tuple(request.request_id for request in requests))
    return replace(base, pairs=pairs, not_put=("borders-7", "borders-9", "families-2"), total=total)
