"""What the trace of a broken relation is compared with when it is handed over: each of its requests alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from lfm2np.oracle.engines.records import IMPOSSIBLE, Answer, Request, Trace
from lfm2np.oracle.engines.target import Played, Target
from lfm2np.oracle.engines.validate import validate
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.suite.fuzz.judge import DIFFERS, Finding, Right, right_token, trouble_finding
from lfm2np.suite.itself.pairs import allowed_by, compared, reported
from lfm2np.suite.itself.rounding_spread import Spread, beyond

LEAST = 1e-10  # nats of a spread: bits that never moved may still do so once
ANY = 1e9  # nats: a bound where no log-probability was reported; a script has it as JSON, which knows no infinity


@dataclass
class ByItself:
    """`player` answers alone, and `spread` says how far off an answer may be from that."""

    player: Target
    spread: Spread
    is_bitwise: bool = False
    ends: Collection[int] = ()
    known: dict[Request, Answer] = field(default_factory=dict)

    @property
    def expected(self) -> str:
        return (
            "What is expected is this engine's own answer to the same request, alone and without a cached prefix. "
            f"Between two such answers one logit differs by {self.spread.nats:.2g} nat (root mean square, as measured "
            "on this engine)."
        )

    def finding(self, trace: Trace, played: Played) -> Finding | None:
        """The first answer that is not as alone."""
        if (trouble := trouble_finding(trace, played)) is not None:
            return trouble
        for index, (request, (answer, *_)) in enumerate(zip(trace.requests, played.answers, strict=True)):
            if answer.token_ids is not None:
                seen, whole = validate(request, answer), not answer.is_aborted
                most = None if whole else answer.num_tokens
                pair = compared(self.answer(request), seen, most=most, is_whole=whole, is_drawn=request.is_sampled)
                what, _ = beyond(self.spread, pair.positions, self.is_bitwise) or (None, 0)
                if (why := seen.error or pair.fault or what) is not None:
                    return Finding(IMPOSSIBLE if seen.error else DIFFERS, f"request {index}: {why}", index, seen=answer)
        return None

    def right(self, request: Request, seen: Answer | None) -> list[Right]:
        """Of the answer alone, within the limit of the spread."""
        if request.is_sampled:
            return []
        answer = self.answer(request)
        return [self.right_at(answer, index) for index in range(answer.num_tokens)]

    def right_at(self, answer: Answer, index: int) -> Right:
        token, logprobs = (answer.token_ids or ())[index], reported(answer, index)
        if token not in logprobs:
            return Right(token, 0.0, ANY, False)
        return right_token(token, allowed_by(logprobs, token, max(self.spread.limit / LIMIT, LEAST)), False)

    def alone(self, request: Request) -> Request:
        plain = replace(request, after=None, after_tokens=None, pause=0, abort_after=None, cold=True, streamed=False)
        return replace(plain, request_id="", tags={})

    def answer(self, request: Request) -> Answer:
        """To the request alone; what was asked before is known."""
        asked = self.alone(request)
        if asked not in self.known:
            self.known[asked] = self.player.play(Trace((asked,))).answers[0][0]
        return self.known[asked]
