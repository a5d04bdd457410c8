"""What the engine computed as choices of completions and chats, whole or piece by piece."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import lfm2np
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.text.replies import Message, ReplyStream, join, opens_reasoning
from lfm2np.commands.serve.bodies import ChatBody, CompletionBody, Sampled
from lfm2np.engine.outputs import CompletionOutput, RequestOutput
from lfm2np.engine.sampling.logprobs import TokenLogprobs

Fields = dict[str, Any]


class Sent:
    """What a client has of one sample.

    length  characters that its tokens so far complete
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.num_tokens = self.num_characters = self.length = 0
        self.has_begun = self.has_ended = False
        self.reply: ReplyStream | None = None  # of a chat
        self.num_calls = self._num_read = 0
        self._held: list[tuple[int, int]] = []  # tokens whose text may begin a stop string, and where it ends
        self.begin_text()

    def begin_text(self) -> None:
        self._stream = self._model.tokenizer.stream() if self._model.has_tokenizer else None

    def end_text(self) -> None:
        """Another one follows: a character that is not complete stays so."""
        if self._stream is not None:
            self.length += len(self._stream.finish())
        self.begin_text()

    def push(self, token_id: int) -> int:
        """Where this token's text begins: characters before it."""
        start = self.length
        if self._stream is not None:
            self.length += len(self._stream.push(token_id))
        return start

    def read(self, token_ids: Sequence[int], text: str, is_last: bool) -> Message:
        """What the tokens add to the reply, as far as `text` goes: a stop string may cut it, within a token."""
        assert self.reply is not None
        for token_id in token_ids:
            self.push(token_id)
            self._held.append((token_id, self.length))
        added = []
        while self._held and self._held[0][1] <= len(text):
            token_id, self._num_read = self._held.pop(0)
            added.append(self.reply.feed([token_id]))
        if is_last:
            added += [self.reply.feed(text[self._num_read :])] if self._held else []
            added.append(self.reply.finish())
        return join(added)

    def has_news(self, sample: CompletionOutput) -> bool:
        return not self.has_ended and (len(sample.token_ids) > self.num_tokens or sample.finish_reason is not None)

    def note(self, sample: CompletionOutput) -> None:
        self.num_tokens, self.num_characters = len(sample.token_ids), len(sample.text or "")
        self.has_begun, self.has_ended = True, sample.finish_reason is not None


class Answers:
    """The choices of one call, numbered over its prompts and their samples."""

    kind: ClassVar[str]
    kind_of_piece: ClassVar[str]

    def __init__(self, model: LoadedModel, body: Sampled) -> None:
        self.model, self.body = model, body
        self._sent: dict[int, Sent] = {}  # by the choice's number

    def pieces(self, outputs: Iterable[tuple[int, RequestOutput]]) -> list[Fields]:
        """What is new, as choices."""
        pieces = []
        for prompt_index, output in outputs:
            for sample in output.outputs:
                index = prompt_index * len(output.outputs) + sample.index
                if index not in self._sent:
                    self._sent[index] = Sent(self.model)
                sent = self._sent[index]
                if sent.has_news(sample):
                    pieces.append({"index": index, **self.piece(sent, output, sample)})
                    sent.note(sample)
        return pieces

    def piece(self, sent: Sent, output: RequestOutput, sample: CompletionOutput) -> Fields:
        raise NotImplementedError

    def whole(self, choice: Fields) -> Fields:
        """The only piece of a choice as the response has it that is not streamed."""
        return choice

    def shared(self, output: RequestOutput) -> Fields:
        """What stands beside the choices."""
        return {}

    def usage(self, outputs: Sequence[tuple[int, RequestOutput]]) -> Fields:
        """Counts. Cached tokens are left out after a preemption, when some of them were the request's own."""
        every = [output for _, output in outputs]
        prompt = sum(len(output.prompt_token_ids) for output in every)
        new = sum(len(sample.token_ids) for output in every for sample in output.outputs)
        usage: Fields = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        metrics = [output.metrics for output in every if output.metrics is not None]
        if not any(each.preemptions for each in metrics):
            usage["prompt_tokens_details"] = {"cached_tokens": sum(each.cached_tokens for each in metrics)}
        return usage

    def of_prompt(self, output: RequestOutput) -> Fields:
        """What was requested of the prompt's tokens. Log-probabilities are as vLLM has them: null for the first token,
        then by token id the prompt's own and the most likely."""
        fields: Fields = {"prompt_token_ids": list(output.prompt_token_ids)} if self.body.return_token_ids else {}
        count = self.body.prompt_logprobs
        if count is not None and output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [
                logprobs
                and {
                    str(token_id): {"logprob": logprob, "decoded_token": token_name(self.model, token_id)}
                    for token_id, logprob in {logprobs.token_id: logprobs.logprob, **dict(logprobs.top[:count])}.items()
                }
                for logprobs in output.prompt_logprobs
            ]
        return fields

    def name(self, token_id: int) -> str:
        return token_name(self.model, token_id, bool(self.body.return_tokens_as_token_ids))


class Completions(Answers):
    """Of /v1/completions; each choice has what was requested of its prompt."""

    kind = kind_of_piece = "text_completion"
    body: CompletionBody

    def pieces(self, outputs: Iterable[tuple[int, RequestOutput]]) -> list[Fields]:
        return super().pieces((index, self._requested(output)) for index, output in outputs)

    def usage(self, outputs: Sequence[tuple[int, RequestOutput]]) -> Fields:
        return super().usage([(index, self._requested(output)) for index, output in outputs])

    def _requested(self, output: RequestOutput) -> RequestOutput:
        """Without the token that is computed where a prompt is only scored."""
        if self.body.max_tokens != 0:
            return output
        none: Fields = {"text": "", "token_ids": (), "logprobs": (), "finish_reason": "length", "stop_reason": None}
        samples = (replace(sample, **none) if sample.finish_reason else sample for sample in output.outputs)
        return replace(output, outputs=tuple(samples))

    def piece(self, sent: Sent, output: RequestOutput, sample: CompletionOutput) -> Fields:
        ids, text = list(sample.token_ids[sent.num_tokens :]), (sample.text or "")[sent.num_characters :]
        logprobs: Fields = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self.body.echo and not sent.has_begun:  # as its tokens spell it, so that offsets fit: special ones have none
            text = (self.model.tokenizer.decode(output.prompt_token_ids) if self.model.has_tokenizer else "") + text
            if self.body.logprobs is not None:
                self._add(logprobs, sent, output.prompt_token_ids, output.prompt_logprobs or ())
                sent.end_text()
        if self.body.logprobs is not None:
            self._add(logprobs, sent, ids, (sample.logprobs or ())[sent.num_tokens :])
        return {
            "text": text,
            "logprobs": None if self.body.logprobs is None else logprobs,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            **({"token_ids": ids} if self.body.return_token_ids else {}),
            **({} if sent.has_begun else self.of_prompt(output)),
        }

    def _add(
        self, columns: Fields, sent: Sent, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> None:
        """The most likely tokens, and the chosen one whether it is among them or not."""
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            columns["text_offset"].append(sent.push(token_id))
            columns["tokens"].append(self.name(token_id))
            columns["token_logprobs"].append(None if logprob is None else logprob.logprob)
            top = () if logprob is None else (*logprob.top[: self.body.logprobs], (token_id, logprob.logprob))
            columns["top_logprobs"].append({self.name(key): value for key, value in top} or None)


class Chats(Answers):
    """Of /v1/chat/completions: the choices share their prompt."""

    kind, kind_of_piece = "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def piece(self, sent: Sent, output: RequestOutput, sample: CompletionOutput) -> Fields:
        ids, logprobs = sample.token_ids[sent.num_tokens :], (sample.logprobs or ())[sent.num_tokens :]
        if sent.reply is None:
            has_tools = bool(self.body.tools) and self.body.tool_choice != "none"
            in_reasoning = opens_reasoning(output.prompt_token_ids, self.model.tokenizer)
            sent.reply = ReplyStream(self.model.tokenizer, in_reasoning, calls=has_tools)
        added = sent.read(ids, sample.text or "", sample.finish_reason is not None)
        calls = []
        for call in added.tool_calls:
            head = {"index": sent.num_calls, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
            calls.append({**head, "function": {"name": call.name, "arguments": call.arguments_json}})
            sent.num_calls += 1
        is_calling = sample.finish_reason == "stop" and sent.num_calls > 0
        return {
            "delta": {
                **({} if sent.has_begun else {"role": "assistant"}),
                "content": added.content,
                **({"reasoning_content": added.reasoning} if added.reasoning is not None else {}),
                **({"tool_calls": calls} if calls else {}),
            },
            "logprobs": {"content": list(map(self._token, logprobs)), "refusal": None} if self.body.logprobs else None,
            "finish_reason": "tool_calls" if is_calling else sample.finish_reason,
            "stop_reason": sample.stop_reason,
            **({"token_ids": list(ids)} if self.body.return_token_ids else {}),
        }

    def whole(self, choice: Fields) -> Fields:
        message = {**choice.pop("delta"), "refusal": None}
        message["content"] = message["content"] or (None if "tool_calls" in message else "")
        return {**choice, "message": message}

    def shared(self, output: RequestOutput) -> Fields:
        return self.of_prompt(output)

    def _token(self, chosen: TokenLogprobs) -> Fields:
        top = [self._logprob(token_id, logprob) for token_id, logprob in chosen.top]
        return {**self._logprob(chosen.token_id, chosen.logprob), "top_logprobs": top}

    def _logprob(self, token_id: int, logprob: float) -> Fields:
        spelled = self.model.tokenizer.token_bytes(token_id) if self.model.has_tokenizer else b""
        return {"token": self.name(token_id), "logprob": logprob, "bytes": list(spelled) or None}


def fingerprint_of(model: LoadedModel) -> str:
    """Which model in which arithmetic computed: in `exact`, all that a response depends on beside the request.

    Source: OpenAI's system_fingerprint, the configuration that a response can be repeated with.
    """
    return f"lfm2np-{lfm2np.__version__}-{model.numerics.name}-{model.sha256}"


def token_name(model: LoadedModel, token_id: int, as_id: bool = False) -> str:
    """A token as a text of its own: "token_id:7" if requested, or where it has none; no two tokens share one.

    Bytes that are not whole characters are written as OpenAI's completions do: "bytes:\\\\xe2\\\\x82".
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
