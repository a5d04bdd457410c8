"""What both kinds of answers share: news of each sample, counts, tokens as texts, who answers; and the errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict

import lfm2np
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.text.tokenizer import TextStream
from lfm2np.commands.serve.bodies import Sampled
from lfm2np.engine.outputs import CompletionOutput, RequestOutput
from lfm2np.engine.sampling.logprobs import TokenLogprobs


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


class Sent:
    def __init__(self, index: int, texts: TokenTexts) -> None:
        self.index, self.texts = index, texts
        self.num_tokens = self.num_characters = 0
        self.is_begun = self.is_ended = False

    def has_news(self, sample: CompletionOutput) -> bool:
        """Whether the engine has output that was not sent yet."""
        return not self.is_ended and (len(sample.token_ids) > self.num_tokens or sample.finish_reason is not None)

    def note(self, sample: CompletionOutput) -> None:
        self.num_tokens, self.num_characters = len(sample.token_ids), len(sample.text or "")
        self.is_begun, self.is_ended = True, sample.finish_reason is not None


class Answers:
    """How the outputs of a call's jobs are sent. Its choices are numbered over its prompts and their samples."""

    kind: str
    kind_of_piece: str
    counts_new = True  # False where a token is computed that is not sent

    def __init__(self, model: LoadedModel, body: Sampled) -> None:
        self.model, self.body = model, body
        self._sent: dict[tuple[int, int], Sent] = {}

    def more(self, prompt_index: int, output: RequestOutput) -> list[Any]:
        """What is new of each sample of a prompt, as pieces."""
        pieces = []
        for sample in output.outputs:
            key = prompt_index, sample.index
            if key not in self._sent:
                texts = TokenTexts(self.model, bool(self.body.return_tokens_as_token_ids))
                self._sent[key] = Sent(prompt_index * len(output.outputs) + sample.index, texts)
            sent = self._sent[key]
            if sent.has_news(sample):
                pieces.append(self.piece(sent, output, sample))
                sent.note(sample)
        return pieces

    def piece(self, sent: Sent, output: RequestOutput, sample: CompletionOutput) -> Any:
        raise NotImplementedError

    def whole(self, choice: Any) -> Any:
        return choice

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        return {}

    def about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What was asked for of the prompt's tokens."""
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = list(output.prompt_token_ids)
        count = self.body.prompt_logprobs
        if count is not None and output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs_told(self.model, output.prompt_logprobs, count)
        return fields


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


def prompt_logprobs_told(
    model: LoadedModel, prompt_logprobs: Sequence[TokenLogprobs | None], count: int
) -> PromptLogprobs:
    """As vLLM tells them: null for the first token, then by token id the prompt's own and the `count` most likely."""
    return [
        None
        if logprobs is None
        else {
            str(token_id): {"logprob": logprob, "decoded_token": token_name(model, token_id)}
            for token_id, logprob in {logprobs.token_id: logprobs.logprob, **dict(logprobs.top[:count])}.items()
        }
        for logprobs in prompt_logprobs
    ]


# --- tokens as texts: what each adds to an answer, where, and how it is called by itself


class TokenTexts:
    """Of one sequence, token after token.

    length  characters that the tokens so far complete
    """

    def __init__(self, model: LoadedModel, as_ids: bool) -> None:
        self._model, self._as_ids = model, as_ids
        self._stream: TextStream | None = model.tokenizer.stream() if model.has_tokenizer else None
        self.length = 0

    def push(self, token_id: int) -> int:
        """Where this token's text begins: characters before it."""
        start = self.length
        if self._stream is not None:
            self.length += len(self._stream.push(token_id))
        return start

    def end(self) -> None:
        """Of a text: another goes on behind it."""
        if self._stream is not None:
            self.length += len(self._stream.finish())
            self._stream = self._model.tokenizer.stream()

    def name(self, token_id: int) -> str:
        return token_name(self._model, token_id, self._as_ids)


def token_name(model: LoadedModel, token_id: int, as_id: bool = False) -> str:
    """A token as a text of its own: "token_id:7" if asked for, or where it has none; no two tokens share one.

    Bytes that are no whole characters are told as OpenAI's completions do: "bytes:\\\\xe2\\\\x82".
    """
    if as_id or not model.has_tokenizer:
        return f"token_id:{token_id}"
    spelled = model.tokenizer.token_bytes(token_id)
    if not spelled:
        return model.tokenizer.token(token_id) or f"token_id:{token_id}"
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def token_bytes(model: LoadedModel, token_id: int) -> list[int] | None:
    """What it adds to a text; None for a token that adds nothing."""
    spelled = model.tokenizer.token_bytes(token_id) if model.has_tokenizer else b""
    return list(spelled) or None
