"""Carries out a trace on a server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.errors import RequestError
from lfm2np.oracle.engines import dialects
from lfm2np.oracle.engines.dialects.dialect import Dialect, Location, value_at
from lfm2np.oracle.engines.http_client import BadReply, HttpError, TimedOut
from lfm2np.oracle.engines.http_target import HttpTarget, judged
from lfm2np.oracle.engines.records import Answer, Ask, shortened
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.workloads import text_of
from lfm2np.suite.fuzz.played import (
    BROKEN,
    DEAD,
    FAILED,
    HANG,
    IMPOSSIBLE,
    LEAK,
    REFUSED,
    Played,
    Reply,
    Takes,
    Trouble,
)
from lfm2np.suite.fuzz.started import Watcher, counted
from lfm2np.suite.fuzz.trace import Sent, Trace, is_due

AT_ONCE = 0.02  # seconds after which a request is left that the trace leaves before its first token
HEALTH_CHECKS, HEALTH_PAUSE = 8, 0.25  # times, seconds
PATIENCE = 20.0  # seconds for memory and slots to come free; less if an answer may take less


class HttpPlayer:
    """One server. `timeout` is seconds for one answer: a server that takes longer hangs. `fields` are added to each
    request."""

    def __init__(
        self,
        url: str,
        tokenizer: Tokenizer | None,
        name: str | None,
        timeout: float,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.timeout = timeout
        self.vocab_size = None if tokenizer is None else tokenizer.vocab_size
        self._tokenizer, self._fields = tokenizer, fields or {}
        self._target = HttpTarget(url, tokenizer, name, timeout=timeout, retries=0)
        self._watcher: Watcher | None = None

    @property
    def dialect(self) -> Dialect:
        return self._target.spoken().dialect

    def probe(self) -> Takes:
        abilities, dialect = self._target.probe(), self.dialect
        self._watcher = Watcher(self._target.client)
        prompt = (1, 2) if self._tokenizer is None else tuple(self._tokenizer.encode("The"))
        return Takes(
            abilities,
            samples=dialect.split_samples is not None and self._works(Sent(prompt, 2, temperature=1.0, samples=2)),
            sampling=dialect.raw_logprobs and self._works(Sent(prompt, 2, temperature=1.0)),
            stops=self._works(Sent(prompt, 2, stop="\u2603")),
            longest=self._target.number_at(each.longest for each in dialects.DIALECTS),
            slots=self._target.number_at(each.slots for each in dialects.DIALECTS),
            streams=self._target.streams,
            cold=self.body(0, Sent(prompt, cold=True)) != self.body(0, Sent(prompt)),
            texts=self._tokenizer is None or not self._hides_texts(prompt, self._tokenizer),
        )

    def number_at(self, locations: Iterable[Location]) -> int | None:
        """The first positive number that the server reports in one of these places."""
        return self._target.number_at(locations)

    def play(self, trace: Trace) -> Played:
        before = self._watcher.metrics() if self._watcher else {}
        held = self._watcher.held() if self._watcher else {}
        replies = Run(self, self._target, trace).replies()
        replies, trouble = self._server_trouble(replies, held)
        after = self._watcher.metrics() if self._watcher and trouble is None else {}
        cached = sum(float(reply.cached) for reply in replies if reply.cached)
        return Played(replies, trouble, {**counted(before, after), "cached prompt tokens": cached})

    def ask(self, index: int, sent: Sent) -> Ask:
        text = None if self._tokenizer is None else text_of(self._tokenizer, sent.prompt)
        factors = {"cold": sent.cold}
        return Ask(str(index), "fuzz", sent.prompt, sent.max_tokens, text, sent.scored, factors)

    def body(self, index: int, sent: Sent) -> dict[str, Any]:
        """What is sent for request number `index` of a trace."""
        dialect, extras, _ = self._target.spoken()
        body = dialect.with_sampling(dialect.request(self.ask(index, sent), extras), sampling_parameters(sent))
        return {**body, **self._fields}

    def close(self) -> None:
        self._target.close()

    def _works(self, sent: Sent) -> bool:
        """Whether the server takes such a request, and reports as many tokens and log-probabilities as it should."""
        (reply,) = Run(self, self._target, Trace((sent,))).replies()
        return reply.trouble is None and all(answer.error is None for answer in reply.answers)

    def _hides_texts(self, prompt: tuple[int, ...], tokenizer: Tokenizer) -> bool:
        (reply,) = Run(self, self._target, Trace((Sent(prompt, 8),))).replies()
        return any(answer.text == "" and tokenizer.decode(answer.token_ids or ()) for answer in reply.answers)

    def _server_trouble(
        self, replies: tuple[Reply, ...], held: Mapping[str, float]
    ) -> tuple[tuple[Reply, ...], Trouble | None]:
        """Whether the server is gone, be it by a request that nobody waited for, or keeps something though all requests
        have ended. If it is still there, it only refused a connection."""
        bad = [reply.trouble for reply in replies if reply.trouble is not None]
        if not self._is_there():
            why = f": {bad[0].what}" if bad else ", though every request that was waited for was answered"
            return replies, Trouble(DEAD, f"{self._target.client.place}: no connection any more{why}")
        if bad or self._watcher is None:
            return tuple(replace(reply, trouble=still_there(reply.trouble)) for reply in replies), None
        more = self._watcher.leak(held, min(PATIENCE, self.timeout))
        return replies, None if more is None else Trouble(LEAK, f"all requests have ended, but {more}")

    def _is_there(self) -> bool:
        """A process that dies may accept connections for a moment more, and break them."""
        for _ in range(HEALTH_CHECKS):
            try:
                self._target.client.get_text("/health")
            except TargetError:
                return False
            except HttpError as problem:
                if problem.status is not None or isinstance(problem, BadReply | TimedOut):
                    break
                time.sleep(HEALTH_PAUSE)
            else:
                break
        return True


class Run:
    """One trace under way: a thread for each request. What they share stands behind one condition."""

    def __init__(self, player: HttpPlayer, target: HttpTarget, trace: Trace) -> None:
        self._player, self._target, self._trace = player, target, trace
        self._changed = threading.Condition()
        self._num_tokens = [0] * len(trace.requests)
        self._has_ended = [False] * len(trace.requests)
        self._replies = [Reply()] * len(trace.requests)
        self._began = time.monotonic()

    def replies(self) -> tuple[Reply, ...]:
        """Of all requests, in their order. An interrupt cuts all connections."""
        indices = range(len(self._trace.requests))
        threads = [threading.Thread(target=self._play, args=(index,), daemon=True) for index in indices]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)
        except BaseException:
            self._target.close()
            raise
        return tuple(self._replies)

    def _play(self, index: int) -> None:
        sent = self._trace.requests[index]
        try:
            with self._changed:
                while not is_due(sent, self._num_tokens, self._has_ended):
                    self._changed.wait(1.0)
            if sent.pause:
                time.sleep(sent.pause / 1000)
            self._note(index, sent=self._now())
            self._note(index, **self._reply(index, sent))
        except BaseException as problem:
            self._note(index, trouble=trouble_of(problem))
        finally:
            self._note(index, ended=self._now())
            with self._changed:
                self._has_ended[index] = True
                self._changed.notify_all()

    def _reply(self, index: int, sent: Sent) -> dict[str, Any]:
        """Fields of a Reply. Errors as HttpClient has them; RequestError for a reply of impossible form."""
        dialect, client = self._player.dialect, self._target.client
        ask = self._player.ask(index, sent)
        if not dialect.takes_token_ids and ask.prompt_text is None:
            raise RequestError("a prompt without a text, for a server that takes only texts")
        body = self._player.body(index, sent)
        if sent.abort_after == 0:
            try:
                client.post(dialect.path, body, AT_ONCE)
            except TimedOut:
                return {"left": True}
            return {}
        if not (self._trace.is_streamed(index) and self._target.streams):
            reply = client.post(dialect.path, body)
            return {"answers": self._answers(reply, ask, sent), "cached": cached_tokens(dialect, reply, ask)}
        events = client.post_and_leave(
            dialect.path, body | {"stream": True}, lambda some: self._is_enough(index, some, sent)
        )
        if (why := stream_error(events)) is not None:
            raise HttpError(f"the stream ended in an error: {why}", status=500)
        left = sent.abort_after is not None and dialect.num_tokens(events) >= sent.abort_after
        reply = dialect.joined(events)
        answers = self._answers(reply, ask, sent, is_streamed=True, is_whole=not left)
        return {"answers": answers, "cached": cached_tokens(dialect, reply, ask), "left": left}

    def _is_enough(self, index: int, events: list[dict[str, Any]], sent: Sent) -> bool:
        """Counts tokens for requests that wait for them; whether the trace leaves here, or nothing more can come."""
        if stream_error(events) is not None:
            return True
        count = self._player.dialect.num_tokens(events)
        with self._changed:
            if count != self._num_tokens[index]:
                if not self._num_tokens[index]:
                    self._replies[index] = replace(self._replies[index], first=self._now())
                self._num_tokens[index] = count
                self._changed.notify_all()
        return sent.abort_after is not None and count >= sent.abort_after

    def _answers(
        self, reply: Mapping[str, Any], ask: Ask, sent: Sent, is_streamed: bool = False, is_whole: bool = True
    ) -> tuple[Answer, ...]:
        """One for each sample; none where events don't hold all tokens."""
        dialect = self._player.dialect
        samples = [reply] if dialect.split_samples is None else dialect.split_samples(reply)
        has_begun = is_whole or len(samples) >= sent.samples  # else it was left before each sample had a token
        if len(samples) != sent.samples and has_begun:
            raise RequestError(f"choices: {len(samples)}, expected {sent.samples}")
        responses = [dialect.read(sample, ask) for sample in samples]
        counts = [(each.new_tokens, len(each.fields.get("token_ids") or ())) for each in responses]
        if is_streamed and not dialect.streams_all and any(there != streamed for there, streamed in counts):
            return ()
        return tuple(judged(ask, response, self._player.vocab_size, is_whole) for response in responses)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _note(self, index: int, **fields: Any) -> None:
        with self._changed:
            self._replies[index] = replace(self._replies[index], **fields)


def still_there(trouble: Trouble | None) -> Trouble | None:
    """A server that answers is not dead."""
    return replace(trouble, kind=BROKEN) if trouble is not None and trouble.kind == DEAD else trouble


def stream_error(events: Sequence[Mapping[str, Any]]) -> str | None:
    """What the last event says instead of tokens: vLLM's and llama.cpp's of a request that failed midway."""
    error = events[-1].get("error") if events else None
    return None if not error else shortened(error if isinstance(error, str) else json.dumps(error), 300)


def trouble_of(problem: BaseException) -> Trouble:
    if isinstance(problem, TargetError):
        kind = DEAD
    elif isinstance(problem, TimedOut):
        kind = HANG
    elif isinstance(problem, HttpError) and problem.status is not None:
        kind = FAILED if problem.status >= 500 else REFUSED
    elif isinstance(problem, HttpError) and not isinstance(problem, BadReply):
        kind = BROKEN
    else:
        kind = IMPOSSIBLE
    is_known = isinstance(problem, TargetError | HttpError | RequestError)
    return Trouble(kind, str(problem) if is_known else f"{type(problem).__name__}: {problem}")


def sampling_parameters(sent: Sent) -> dict[str, Any]:
    """Beside those of a greedy request."""
    parameters: dict[str, Any] = {}
    if sent.temperature:
        parameters |= {"temperature": sent.temperature, "seed": sent.seed}
    if sent.samples > 1:
        parameters["n"] = sent.samples
    if sent.stop is not None:
        parameters["stop"] = [sent.stop]
    return parameters


def cached_tokens(dialect: Dialect, reply: Mapping[str, Any], ask: Ask) -> int | None:
    """Prompt tokens that came from the cache; None where that is not reported, or can't be."""
    count = None if dialect.cached is None else value_at(reply, dialect.cached)
    return count if type(count) is int and 0 <= count <= len(ask.prompt_token_ids) else None
