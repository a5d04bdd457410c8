"""Why a sequence of a file of rollouts is left out: the kinds that are counted, in words."""

from __future__ import annotations

from lfm2np.errors import RequestError

NOT_JSON = "not JSON"
UNKNOWN_FORM = "unknown form"
UNKNOWN_FIELD = "unknown field"
MISSING = "missing field"
WRONG_VALUE = "wrong value"
LENGTHS = "different lengths"
EMPTY = "empty prompt or answer"
NO_LOGPROBS = "no log-probabilities"
NO_SAMPLED = "no sampled token"
ABSENT = "missing log-probability"  # of one token
NAN = "NaN log-probability"
INFINITE = "infinite log-probability"
POSITIVE = "positive log-probability"
OUTSIDE = "token id outside the vocabulary"
TOO_LONG = "longer than the model's context"
BAD_ROUTES = "unusable routes"
SAME_ID = "duplicate id"  # of another answer
SAME_ROLLOUT = "duplicate rollout"


class Unfit(RequestError):
    """Why one sequence, or one record of several, is left out; `kind` is what it is counted as."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
