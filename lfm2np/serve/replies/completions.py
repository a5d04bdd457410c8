"""An answer of /v1/completions, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.outputs import CompletionOutput, RequestOutput
from lfm2np.sampling.logprobs import TokenLogprobs
from lfm2np.serve.bodies import CompletionBody
from lfm2np.serve.replies.shared import Progress, PromptLogprobs, Usage, prompt_logprobs_told
from lfm2np.serve.replies.token_texts import TokenTexts


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


class Sample(Progress):
    """How much of a choice has been sent."""

    def __init__(self, index: int, texts: TokenTexts) -> None:
        super().__init__()
        self.index, self.texts = index, texts


class Completions:
    """The choices of one call, numbered over its prompts and their samples."""

    kind = "text_completion"
    kind_of_piece = kind

    def __init__(self, model: LoadedModel, body: CompletionBody) -> None:
        self._model, self._body = model, body
        self._samples: dict[tuple[int, int], Sample] = {}
        self.counts_new = body.max_tokens != 0

    def more(self, prompt_index: int, output: RequestOutput) -> list[Choice]:
        """What is new of each sample of a prompt."""
        found = []
        for sample in output.outputs:
            progress = self._sample(prompt_index, sample.index, len(output.outputs))
            if progress.has_news(sample):
                found.append(self._choice(progress, output, sample))
        return found

    def _sample(self, prompt_index: int, index: int, count: int) -> Sample:
        key = prompt_index, index
        if key not in self._samples:
            texts = TokenTexts(self._model, bool(self._body.return_tokens_as_token_ids))
            self._samples[key] = Sample(prompt_index * count + index, texts)
        return self._samples[key]

    def _choice(self, progress: Sample, output: RequestOutput, sample: CompletionOutput) -> Choice:
        body, ids = self._body, list(sample.token_ids[progress.num_tokens :]) if self.counts_new else []
        text = (sample.text or "")[progress.num_characters :] if self.counts_new else ""
        wants_logprobs = body.logprobs is not None
        logprobs: Logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if not progress.is_begun and body.echo:
            text = self._prompt_text(output) + text
            if wants_logprobs:
                add_logprobs(
                    logprobs, progress.texts, output.prompt_token_ids, output.prompt_logprobs or (), body.logprobs or 0
                )
                progress.texts.end()
        if wants_logprobs and self.counts_new:
            chosen = (sample.logprobs or ())[progress.num_tokens :]
            add_logprobs(logprobs, progress.texts, ids, chosen, body.logprobs or 0)
        choice: Choice = {
            "index": progress.index,
            "text": text,
            "logprobs": logprobs if wants_logprobs else None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if not self.counts_new:
            choice |= {"finish_reason": "length", "stop_reason": None}
        if body.return_token_ids:
            choice["token_ids"] = ids
        if not progress.is_begun:
            self._add_prompt(choice, output)
        progress.note(sample)
        return choice

    def whole(self, choice: Choice) -> Choice:
        """A piece that is all there is."""
        return choice

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Of the answer as a whole: a completion's are its choices'."""
        return {}

    def _add_prompt(self, choice: Choice, output: RequestOutput) -> None:
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
        count = self._body.prompt_logprobs
        if count is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_told(self._model, output.prompt_logprobs, count)

    def _prompt_text(self, output: RequestOutput) -> str:
        """As its tokens spell it, so that offsets fit whatever came: special tokens have none."""
        return self._model.tokenizer.decode(output.prompt_token_ids) if self._model.has_tokenizer else ""


def add_logprobs(
    told: Logprobs, texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], count: int
) -> None:
    """The `count` most likely tokens, and the chosen one whether it is among them or not."""
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        told["text_offset"].append(texts.push(token_id))
        told["tokens"].append(texts.name(token_id))
        told["token_logprobs"].append(None if logprob is None else logprob.logprob)
        every = {} if logprob is None else {**dict(logprob.top[:count]), logprob.token_id: logprob.logprob}
        told["top_logprobs"].append(
            None if logprob is None else {texts.name(key): value for key, value in every.items()}
        )
