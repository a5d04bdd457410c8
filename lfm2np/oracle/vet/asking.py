"""Questions to a provider through OpenAI's chat completions or completions, as any of its clients would ask them.

What a strict server may refuse is tried in turn: token ids and log-probabilities, either of them, neither.
A refused or failed request is a Reply with `error`; the bounds and retries are those of targets/http_client.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.engines.http_client import BadReply, HttpClient, HttpError
from lfm2np.oracle.engines.records import shortened
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.vet.hypotheses import sent
from lfm2np.oracle.vet.provider_answers import Reply, is_id, numbers
from lfm2np.oracle.vet.questions import Question

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EXTRAS: dict[str, tuple[Mapping[str, Any], ...]] = {
    CHAT: ({"logprobs": True, "return_token_ids": True}, {"logprobs": True}, {"return_token_ids": True}, {}),
    COMPLETIONS: ({"logprobs": 1, "return_token_ids": True}, {"logprobs": 1}, {"return_token_ids": True}, {}),
}


class Provider:
    """One address. model: its name there; None: the only one that it lists, or none at all."""

    def __init__(
        self,
        url: str,
        sampling: SamplingParams,
        max_tokens: int,
        model: str | None = None,
        chat: bool = True,
        logprobs: bool = True,
        timeout: float = 60.0,
        at_once: int = 4,
    ) -> None:
        self.client = HttpClient(url, timeout)
        self.path = CHAT if chat else COMPLETIONS
        self._fields: dict[str, Any] = {**sent(sampling), "max_tokens": max_tokens}
        self._extras = list(EXTRAS[self.path] if logprobs else EXTRAS[self.path][2:])
        self._model, self._at_once = model, at_once
        self._is_known = False

    def ask(self, questions: Sequence[Question]) -> list[Reply]:
        """All of them, some together. TargetError if the server can't be reached for the first."""
        if not questions:
            return []
        first: list[Reply] = []
        if not self._is_known:
            self._model = self._model or self.client.only_model()
            first, questions = [self._first(questions[0])], questions[1:]
        with ThreadPoolExecutor(self._at_once) as pool:
            try:
                return first + list(pool.map(self._later, questions))
            except BaseException:
                self.client.close()
                raise

    def close(self) -> None:
        self.client.close()

    def _first(self, question: Question) -> Reply:
        """In the first form that is not refused."""
        while True:
            try:
                reply = self._send(question)
            except BadReply as problem:
                if len(self._extras) > 1 and problem.status in (None, 400, 404, 422):
                    del self._extras[0]
                    continue
                raise TargetError(f"{self.client.place}{self.path}: {problem}") from None
            except HttpError as problem:
                if problem.status in (401, 403):
                    raise TargetError(f"{self.client.place}{self.path}: {problem}") from None
                return Reply(question, error=reason(problem))
            self._is_known = True
            return reply

    def _later(self, question: Question) -> Reply:
        try:
            return self._send(question)
        except (HttpError, TargetError) as problem:
            return Reply(question, error=reason(problem))

    def _send(self, question: Question) -> Reply:
        body: dict[str, Any] = {**self._fields, **self._extras[0]}
        if self._model is not None:
            body["model"] = self._model
        if question.messages is not None:
            body["messages"] = [dict(message) for message in question.messages]
        else:
            body["prompt"] = question.prompt
        return reply_of(question, self.client.post(self.path, body))


def reason(problem: Exception) -> str:
    """Short and alike for alike problems, as these are counted."""
    status = getattr(problem, "status", None)
    return f"HTTP {status}" if status is not None else shortened(str(problem).split("(")[0], 80)


def reply_of(question: Question, raw: Mapping[str, Any]) -> Reply:
    """What an answer says; a field of another form than OpenAI's or vLLM's counts as not reported.

    Log-probabilities are those of OpenAI's chat ({"content": [{"token", "logprob", "bytes"}]}), with the ids by which
    llama.cpp and mlx-lm name tokens there, or of its completions ({"tokens", "token_logprobs"}).
    """
    choices = raw.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return Reply(question, error="answers without choices")
    choice, usage, part = choices[0], as_object(raw.get("usage")), as_object(choices[0].get("logprobs"))
    text = choice.get("text") if choice.get("message") is None else as_object(choice["message"]).get("content")
    finish = choice.get("finish_reason")
    texts, values, ids = part.get("tokens"), part.get("token_logprobs"), None
    entries = part.get("content")
    if isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries):
        texts, values = [text_of(entry) for entry in entries], [entry.get("logprob") for entry in entries]
        ids = [entry.get("id") for entry in entries]
    tokens = tuple(texts) if isinstance(texts, list) and texts and all(isinstance(t, str) for t in texts) else None
    return Reply(
        question,
        text if isinstance(text, str) else None,
        finish if isinstance(finish, str) else None,
        ids_of(choice.get("token_ids")) or ids_of(ids),
        tokens,
        numbers(values) if tokens and isinstance(values, list) and len(values) == len(tokens) else None,
        count_of(usage.get("prompt_tokens")),
        count_of(usage.get("completion_tokens")),
    )


def as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def ids_of(values: Any) -> tuple[int, ...] | None:
    return tuple(values) if isinstance(values, list) and values and all(map(is_id, values)) else None


def count_of(value: Any) -> int | None:
    return value if is_id(value) else None


def text_of(entry: Mapping[str, Any]) -> Any:
    """By its bytes where they are reported: a token may be a part of a character."""
    spelled = entry.get("bytes")
    if isinstance(spelled, list) and spelled and all(type(byte) is int and 0 <= byte < 256 for byte in spelled):
        return bytes(spelled).decode("utf-8", "replace")
    return entry.get("token")
