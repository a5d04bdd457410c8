"""An answer of /v1/completions, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, cast

from typing_extensions import TypedDict

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.commands.serve.bodies import CompletionBody
from lfm2np.commands.serve.replies.shared import Answers, PromptLogprobs, Sent, TokenTexts, Usage
from lfm2np.engine.outputs import CompletionOutput, RequestOutput
from lfm2np.engine.sampling.logprobs import TokenLogprobs


class Logprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(TypedDict):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class Completion(TypedDict):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: NotRequired[Usage | None]


class Completions(Answers):
    """The choices of one call, each with what was asked for of its prompt."""

    kind = kind_of_piece = "text_completion"
    body: CompletionBody

    def __init__(self, model: LoadedModel, body: CompletionBody) -> None:
        super().__init__(model, body)
        self.counts_new = body.max_tokens != 0

    def piece(self, sent: Sent, output: RequestOutput, sample: CompletionOutput) -> Choice:
        body, ids = self.body, list(sample.token_ids[sent.num_tokens :]) if self.counts_new else []
        text = (sample.text or "")[sent.num_characters :] if self.counts_new else ""
        wants_logprobs = body.logprobs is not None
        logprobs: Logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if not sent.is_begun and body.echo:
            text = self._prompt_text(output) + text
            if wants_logprobs:
                of_prompt = output.prompt_token_ids, output.prompt_logprobs or ()
                add_logprobs(logprobs, sent.texts, *of_prompt, body.logprobs or 0)
                sent.texts.end()
        if wants_logprobs and self.counts_new:
            chosen = (sample.logprobs or ())[sent.num_tokens :]
            add_logprobs(logprobs, sent.texts, ids, chosen, body.logprobs or 0)
        choice: Choice = {
            "index": sent.index,
            "text": text,
            "logprobs": logprobs if wants_logprobs else None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if not self.counts_new:
            choice |= {"finish_reason": "length", "stop_reason": None}
        if body.return_token_ids:
            choice["token_ids"] = ids
        if not sent.is_begun:
            choice |= cast(Choice, self.about_prompt(output))
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        """As its tokens spell it, so that offsets fit whatever came: special tokens have none."""
        return self.model.tokenizer.decode(output.prompt_token_ids) if self.model.has_tokenizer else ""


def add_logprobs(
    columns: Logprobs, texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], count: int
) -> None:
    """The `count` most likely tokens, and the chosen one whether it is among them or not."""
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        columns["text_offset"].append(texts.push(token_id))
        columns["tokens"].append(texts.name(token_id))
        columns["token_logprobs"].append(None if logprob is None else logprob.logprob)
        every = {} if logprob is None else {**dict(logprob.top[:count]), logprob.token_id: logprob.logprob}
        named = {texts.name(key): value for key, value in every.items()}
        columns["top_logprobs"].append(None if logprob is None else named)
