"""An answer of /v1/chat/completions, whole or piece by piece."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.outputs import CompletionOutput, RequestOutput
from lfm2np.sampling.logprobs import TokenLogprobs
from lfm2np.serve.bodies import ChatBody
from lfm2np.serve.replies.shared import Progress, PromptLogprobs, Usage, prompt_logprobs_told
from lfm2np.serve.replies.token_texts import token_bytes, token_name


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class Delta(TypedDict):
    role: NotRequired[str]
    content: NotRequired[str]
    refusal: NotRequired[None]


class ChatChoice(TypedDict):
    """`message` of a whole answer, `delta` of a piece."""

    index: int
    message: NotRequired[Delta]
    delta: NotRequired[Delta]
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class Chat(TypedDict):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class Chats:
    """The choices of one call, which has one conversation."""

    kind = "chat.completion"
    kind_of_piece = "chat.completion.chunk"
    counts_new = True

    def __init__(self, model: LoadedModel, body: ChatBody) -> None:
        self._model, self._body = model, body
        self._told: dict[int, Progress] = {}

    def more(self, prompt_index: int, output: RequestOutput) -> list[ChatChoice]:
        """What is new of each sample, as pieces."""
        found = []
        for sample in output.outputs:
            progress = self._told.setdefault(sample.index, Progress())
            if progress.has_news(sample):
                found.append(self._piece(progress, sample))
        return found

    def _piece(self, progress: Progress, sample: CompletionOutput) -> ChatChoice:
        delta: Delta = {} if progress.is_begun else {"role": "assistant"}
        delta["content"] = (sample.text or "")[progress.num_characters :]
        logprobs = (sample.logprobs or ())[progress.num_tokens :]
        choice: ChatChoice = {
            "index": sample.index,
            "delta": delta,
            "logprobs": {"content": list(map(self._token, logprobs)), "refusal": None} if self._body.logprobs else None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(sample.token_ids[progress.num_tokens :])
        progress.note(sample)
        return choice

    def whole(self, choice: ChatChoice) -> ChatChoice:
        """A piece that is all there is, as a message."""
        delta = choice.pop("delta")
        return {**choice, "message": {"role": "assistant", "content": delta.get("content", ""), "refusal": None}}

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Of the answer as a whole, as its choices share their prompt."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = list(output.prompt_token_ids)
        count = self._body.prompt_logprobs
        if count is not None and output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs_told(self._model, output.prompt_logprobs, count)
        return fields

    def _token(self, chosen: TokenLogprobs) -> TokenLogprob:
        return {**self._one(chosen.token_id, chosen.logprob), "top_logprobs": [self._one(*pair) for pair in chosen.top]}

    def _one(self, token_id: int, logprob: float) -> TopLogprob:
        name = token_name(self._model, token_id, bool(self._body.return_tokens_as_token_ids))
        return {"token": name, "logprob": logprob, "bytes": token_bytes(self._model, token_id)}
