"""Questions to a provider through OpenAI's chat completions or completions, as any of its clients would ask them.

What a strict server may refuse is tried in turn: token ids and log-probabilities, either of them, neither.
A refused or failed request is a Reply with `error`; the bounds and retries are those of targets/http_client.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lfm2np.errors import RequestError
from lfm2np.oracle.targets.http_client import BadReply, HttpClient, HttpError
from lfm2np.oracle.targets.records import shortened
from lfm2np.oracle.targets.target import TargetError
from lfm2np.oracle.vet.hypotheses import sent
from lfm2np.oracle.vet.questions import Question
from lfm2np.oracle.vet.replies import Reply, is_id, numbers
from lfm2np.sampling.params import SamplingParams

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
            self._search_name()
            first, questions = [self._first(questions[0])], questions[1:]
        with ThreadPoolExecutor(self._at_once) as pool:
            try:
                return first + list(pool.map(self._one, questions))
            except BaseException:
                self.client.close()
                raise

    def close(self) -> None:
        self.client.close()

    def _search_name(self) -> None:
        if self._model is None:
            try:
                listed = self.client.get("/v1/models").get("data")
            except HttpError:
                return
            names = [row.get("id") for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
            if len(names) == 1 and isinstance(names[0], str):
                self._model = names[0]

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

    def _one(self, question: Question) -> Reply:
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
    """What an answer says; a field of another form than OpenAI's or vLLM's counts as not reported."""
    choices = raw.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return Reply(question, error="answers without choices")
    choice, usage = choices[0], raw.get("usage")
    message = choice.get("message")
    text = choice.get("text") if message is None else message.get("content") if isinstance(message, dict) else None
    counts = usage if isinstance(usage, dict) else {}
    tokens, logprobs = tokens_and_logprobs(choice.get("logprobs"))
    finish = choice.get("finish_reason")
    ids = choice.get("token_ids")
    token_ids = tuple(ids) if isinstance(ids, list) and ids and all(map(is_id, ids)) else ids_of_entries(choice)
    return Reply(
        question,
        text if isinstance(text, str) else None,
        finish if isinstance(finish, str) else None,
        token_ids,
        tokens,
        logprobs,
        count_of(counts.get("prompt_tokens")),
        count_of(counts.get("completion_tokens")),
    )


def ids_of_entries(choice: Mapping[str, Any]) -> tuple[int, ...] | None:
    """As llama.cpp and mlx-lm name them among the log-probabilities."""
    part = choice.get("logprobs")
    entries = part.get("content") if isinstance(part, dict) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        return None
    ids = tuple(entry.get("id") for entry in entries)
    return tuple(token_id for token_id in ids if is_id(token_id)) if all(map(is_id, ids)) else None


def count_of(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def tokens_and_logprobs(part: Any) -> tuple[tuple[str, ...] | None, tuple[float | None, ...] | None]:
    """Of OpenAI's chat ({"content": [{"token", "logprob", "bytes"}]}) or completions ({"tokens", "token_logprobs"})."""
    if not isinstance(part, dict):
        return None, None
    content = part.get("content")
    if isinstance(content, list) and content and all(isinstance(entry, dict) for entry in content):
        texts, values = [text_of(entry) for entry in content], [entry.get("logprob") for entry in content]
    else:
        texts, values = part.get("tokens") or [], part.get("token_logprobs") or []
    if not isinstance(texts, list) or not isinstance(values, list) or not texts:
        return None, None
    if not all(isinstance(text, str) for text in texts):
        return None, None
    try:
        return tuple(texts), numbers(values) if len(values) == len(texts) else None
    except RequestError:
        return tuple(texts), None


def text_of(entry: Mapping[str, Any]) -> Any:
    """By its bytes where they are reported: a token may be a part of a character."""
    spelled = entry.get("bytes")
    if isinstance(spelled, list) and spelled and all(type(byte) is int and 0 <= byte < 256 for byte in spelled):
        return bytes(spelled).decode("utf-8", "replace")
    return entry.get("token")
