"""An answer of /v1/chat/completions, whole or piece by piece."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from lfm2np.commands.serve.bodies import ChatBody
from lfm2np.commands.serve.replies.shared import Answers, PromptLogprobs, Sent, Usage, token_bytes, token_name
from lfm2np.engine.outputs import CompletionOutput, RequestOutput
from lfm2np.engine.sampling.logprobs import TokenLogprobs


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


class Chats(Answers):
    """The choices of one call, which has one conversation."""

    kind = "chat.completion"
    kind_of_piece = "chat.completion.chunk"
    body: ChatBody

    def piece(self, sent: Sent, output: RequestOutput, sample: CompletionOutput) -> ChatChoice:
        delta: Delta = {} if sent.is_begun else {"role": "assistant"}
        delta["content"] = (sample.text or "")[sent.num_characters :]
        logprobs = (sample.logprobs or ())[sent.num_tokens :]
        choice: ChatChoice = {
            "index": sample.index,
            "delta": delta,
            "logprobs": {"content": list(map(self._token, logprobs)), "refusal": None} if self.body.logprobs else None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(sample.token_ids[sent.num_tokens :])
        return choice

    def whole(self, choice: ChatChoice) -> ChatChoice:
        delta = choice.pop("delta")
        return {**choice, "message": {"role": "assistant", "content": delta.get("content", ""), "refusal": None}}

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """The choices share their prompt."""
        return self.about_prompt(output)

    def _token(self, chosen: TokenLogprobs) -> TokenLogprob:
        return {**self._one(chosen.token_id, chosen.logprob), "top_logprobs": [self._one(*pair) for pair in chosen.top]}

    def _one(self, token_id: int, logprob: float) -> TopLogprob:
        name = token_name(self.model, token_id, bool(self.body.return_tokens_as_token_ids))
        return {"token": name, "logprob": logprob, "bytes": token_bytes(self.model, token_id)}
