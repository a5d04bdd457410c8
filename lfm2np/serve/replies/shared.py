"""What both kinds of answers share: counts, prompts' log-probabilities, who answers; and the errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NotRequired

from typing_extensions import TypedDict

import lfm2np
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.outputs import CompletionOutput, RequestOutput
from lfm2np.sampling.logprobs import TokenLogprobs
from lfm2np.serve.replies.token_texts import token_name


class PromptDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptDetails]


class PromptLogprob(TypedDict):
    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ModelTold(TypedDict):
    """`max_model_len` is what context and cache have room for."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    numerics: str
    checkpoint_sha256: str


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    prompt: str


class TokenizerTold(TypedDict):
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class ErrorTold(TypedDict):
    message: str
    type: str
    param: str | None
    code: int


class ErrorReply(TypedDict):
    error: ErrorTold


TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "method_not_allowed_error",
    408: "timeout_error",
    413: "request_too_large_error",
    415: "unsupported_media_type_error",
    421: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class Progress:
    """How much of a sample has been sent."""

    def __init__(self) -> None:
        self.num_tokens = self.num_characters = 0
        self.is_begun = self.is_ended = False

    def has_news(self, sample: CompletionOutput) -> bool:
        """Whether the engine has output that was not sent yet."""
        return not self.is_ended and (len(sample.token_ids) > self.num_tokens or sample.finish_reason is not None)

    def note(self, sample: CompletionOutput) -> None:
        """All output so far has been sent."""
        self.num_tokens, self.num_characters = len(sample.token_ids), len(sample.text or "")
        self.is_begun, self.is_ended = True, sample.finish_reason is not None


def error_reply(status: int, message: str, param: str | None = None) -> ErrorReply:
    return {"error": {"message": message, "type": TYPES[status], "param": param, "code": status}}


def fingerprint_of(model: LoadedModel) -> str:
    """Which model in which arithmetic answered: in `exact`, all that an answer hangs on beside the request.

    Source: OpenAI's system_fingerprint, the configuration that an answer can be repeated with.
    """
    return f"lfm2np-{lfm2np.__version__}-{model.numerics.name}-{model.sha256}"


def usage_of(outputs: Iterable[RequestOutput], counts_new: bool = True) -> Usage:
    """`counts_new` is False where a token was computed that is not sent.

    What a preempted request took from the cache is partly its own: then that is not told.
    """
    every = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in every)
    new = sum(len(sample.token_ids) for output in every for sample in output.outputs) if counts_new else 0
    usage: Usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    metrics = [output.metrics for output in every if output.metrics is not None]
    if not any(sample.preemptions for sample in metrics):
        usage["prompt_tokens_details"] = {"cached_tokens": sum(sample.cached_tokens for sample in metrics)}
    return usage


def prompt_logprobs_told(model: LoadedModel, told: Sequence[TokenLogprobs | None], count: int) -> PromptLogprobs:
    """As vLLM tells them: null for the first token, then by token id the prompt's own and the `count` most likely."""
    return [
        None
        if logprobs is None
        else {
            str(token_id): {"logprob": logprob, "decoded_token": token_name(model, token_id)}
            for token_id, logprob in {logprobs.token_id: logprobs.logprob, **dict(logprobs.top[:count])}.items()
        }
        for logprobs in told
    ]
