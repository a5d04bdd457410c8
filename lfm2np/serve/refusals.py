"""Why a call is refused: a status and a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from lfm2np.errors import RequestError, TokenizerError


class Refusal(Exception):
    """Ends a call with an HTTP status; `param` is the field that it is about."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, dict(headers or {})


def refusal_for(problem: Exception, seconds: float) -> Refusal:
    """The response to an error; `seconds` is the time limit of a request."""
    if isinstance(problem, Refusal):
        return problem
    if isinstance(problem, TimeoutError):
        return Refusal(504, f"the answer was not complete within {seconds:g} s")
    return Refusal(400 if isinstance(problem, RequestError | TokenizerError) else 500, str(problem))


def refusal_of(problem: ValidationError) -> Refusal:
    """The first field that is not as the document of the protocol has it; of one that may be of several kinds, all."""
    errors = problem.errors(include_url=False, include_context=False, include_input=False)
    where = errors[0]["loc"][:1]
    if errors[0]["type"] == "extra_forbidden":
        path = ".".join(map(str, errors[0]["loc"]))[:200]
        return Refusal(400, f"{path}: unknown field", path)
    messages = dict.fromkeys(
        error["msg"][:1].lower() + error["msg"][1:] for error in errors if error["loc"][:1] == where
    )
    name = str(where[0]) if where else "the body"
    return Refusal(400, f"{name}: {', or '.join(list(messages)[:4])}", name if where else None)
