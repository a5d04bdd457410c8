"""Carries out a trace on a server: a thread a request, each waiting for its moment."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lfm2np.checkpoint.tokenizer import Tokenizer
from lfm2np.errors import RequestError
from lfm2np.fuzz.observe import Watcher, counted
from lfm2np.fuzz.played import BROKEN, DEAD, FAILED, HANG, IMPOSSIBLE, LEAK, REFUSED, Played, Reply, Takes, Trouble
from lfm2np.fuzz.trace import Sent, Trace
from lfm2np.oracle.targets.checked import shortened
from lfm2np.oracle.targets.http_client import BadReply, HttpClient, HttpError, TimedOut
from lfm2np.oracle.targets.http_dialects import LLAMA, SGLANG, VLLM, Dialect
from lfm2np.oracle.targets.http_replies import Said
from lfm2np.oracle.targets.http_streams import choices_apart, whole_reply
from lfm2np.oracle.targets.http_target import HttpTarget, judged, num_tokens
from lfm2np.oracle.targets.records import Answer, Ask
from lfm2np.oracle.targets.target import TargetError
from lfm2np.oracle.workloads import text_of

AT_ONCE = 0.02  # seconds after which a request that is left before its first token is left
PATIENCE = 20.0  # seconds for memory and slots to come free; less if an answer may take less


class HttpPlayer:
    """One server. `timeout` is seconds for one answer: a server that takes longer hangs."""

    def __init__(self, url: str, tokenizer: Tokenizer | None, name: str | None, timeout: float) -> None:
        self._tokenizer, self._timeout = tokenizer, timeout
        self._target = HttpTarget(url, tokenizer, name, timeout=timeout, retries=0)
        self._watcher: Watcher | None = None
        self._vocab_size = None if tokenizer is None else tokenizer.vocab_size

    def probe(self) -> Takes:
        abilities = self._target.probe()
        dialect, _ = self._target.spoken()
        self._watcher = Watcher(self._target.client)
        has_sampling = dialect.name in (VLLM.name, LLAMA.name)  # whose log-probabilities are of the raw logits
        longest, slots = limits_of(self._target.client)
        takes = Takes(abilities, dialect.name == VLLM.name, has_sampling, True, longest, slots)
        first = self._probe_prompt()
        return replace(
            takes,
            sampling=takes.sampling and self._answers(Sent(first, 2, temperature=1.0)),
            samples=takes.samples and self._answers(Sent(first, 2, temperature=1.0, samples=2)),
            stops=self._answers(Sent(first, 2, stop="\u2603")),
        )

    def play(self, trace: Trace) -> Played:
        before = self._watcher.metrics() if self._watcher else {}
        held = self._watcher.held() if self._watcher else {}
        replies = Run(self._target, trace, self._ask, self._vocab_size).replies()
        replies, trouble = self._server_trouble(replies, held)
        after = self._watcher.metrics() if self._watcher and trouble is None else {}
        cached = [float(one.cached) for one in replies if one.cached]
        return Played(replies, trouble, {**counted(before, after), "cached prompt tokens": sum(cached)})

    def sent_bodies(self, trace: Trace) -> tuple[str, str, float, list[dict[str, Any]]]:
        """For whoever sends a trace by himself: the dialect's name, its path, seconds for one answer, and each body."""
        dialect, wants = self._target.spoken()
        bodies = [
            wished(dialect, dialect.request(self._ask(index, sent), wants), sent)
            for index, sent in enumerate(trace.requests)
        ]
        return dialect.name, dialect.path, self._timeout, bodies

    def close(self) -> None:
        self._target.close()

    def _probe_prompt(self) -> tuple[int, ...]:
        return (1, 2) if self._tokenizer is None else tuple(self._tokenizer.encode("The"))

    def _answers(self, sent: Sent) -> bool:
        """Whether the server takes such a request, and says as many tokens and log-probabilities as it should."""
        (reply,) = Run(self._target, Trace((sent,)), self._ask, self._vocab_size).replies()
        return reply.trouble is None and all(one.error is None for one in reply.answers)

    def _ask(self, index: int, sent: Sent) -> Ask:
        text = None if self._tokenizer is None else text_of(self._tokenizer, sent.prompt)
        return Ask(str(index), "fuzz", sent.prompt, sent.max_tokens, text, factors={"cold": sent.cold})

    def _server_trouble(
        self, replies: tuple[Reply, ...], held: Mapping[str, float]
    ) -> tuple[tuple[Reply, ...], Trouble | None]:
        """Whether the server is gone, be it by a request that nobody waited for, or keeps something though all requests
        have ended. One that is still there only refused a connection."""
        bad = [one.trouble for one in replies if one.trouble is not None]
        if not self._is_there():
            why = f": {bad[0].what}" if bad else ", though every request that was waited for was answered"
            return replies, Trouble(DEAD, f"{self._target.client.place}: no connection any more{why}")
        if bad or self._watcher is None:
            return tuple(still_there(one) for one in replies), None
        more = self._watcher.leak(held, min(PATIENCE, self._timeout))
        return replies, None if more is None else Trouble(LEAK, f"all requests have ended, but {more}")

    def _is_there(self) -> bool:
        try:
            self._target.client.get_text("/health")
        except TargetError:
            return False
        except HttpError:
            return True
        return True


class Run:
    """One trace under way. What its threads share stands behind one condition."""

    def __init__(self, target: HttpTarget, trace: Trace, ask: Any, vocab_size: int | None) -> None:
        self._target, self._trace, self._ask, self._vocab_size = target, trace, ask, vocab_size
        self._changed = threading.Condition()
        self._came = [0] * len(trace.requests)  # tokens
        self._ended = [False] * len(trace.requests)
        self._replies = [Reply()] * len(trace.requests)
        self._began = time.monotonic()

    def replies(self) -> tuple[Reply, ...]:
        """Of all requests, in their order. An interrupt cuts what is under way."""
        threads = [
            threading.Thread(target=self._one, args=(index,), daemon=True) for index in range(len(self._trace.requests))
        ]
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

    def _one(self, index: int) -> None:
        sent = self._trace.requests[index]
        try:
            self._wait(sent)
            if sent.pause:
                time.sleep(sent.pause / 1000)
            self._note(index, sent=self._now())
            self._note(index, **self._asked(index, sent))
        except TargetError as problem:
            self._note(index, trouble=Trouble(DEAD, str(problem)))
        except TimedOut as problem:
            self._note(index, trouble=Trouble(HANG, str(problem)))
        except HttpError as problem:
            is_form = isinstance(problem, BadReply) and problem.status is None
            self._note(index, trouble=Trouble(IMPOSSIBLE if is_form else kind_of(problem.status), str(problem)))
        except RequestError as problem:
            self._note(index, trouble=Trouble(IMPOSSIBLE, str(problem)))
        except BaseException as problem:
            self._note(index, trouble=Trouble(IMPOSSIBLE, f"{type(problem).__name__}: {problem}"))
        finally:
            self._note(index, ended=self._now())
            with self._changed:
                self._ended[index] = True
                self._changed.notify_all()

    def _wait(self, sent: Sent) -> None:
        if sent.after is None:
            return
        with self._changed:
            while not self._ended[sent.after] and (
                sent.after_tokens is None or self._came[sent.after] < sent.after_tokens
            ):
                self._changed.wait(1.0)

    def _asked(self, index: int, sent: Sent) -> dict[str, Any]:
        """Fields of a Reply. Errors as HttpClient has them; RequestError for a reply of impossible form."""
        dialect, wants = self._target.spoken()
        ask = self._ask(index, sent)
        if not dialect.takes_token_ids and ask.prompt_text is None:
            raise RequestError("a prompt without a text, for a server that takes only texts")
        fields = wished(dialect, dialect.request(ask, wants), sent)
        client = self._target.client
        if sent.abort_after == 0:
            try:
                client.post(dialect.path, fields, AT_ONCE)
            except TimedOut:
                return {"left": True}
            return {}
        if not (self._trace.is_streamed(index) and self._target.streams):
            reply = client.post(dialect.path, fields)
            return {"answers": self._read(dialect, reply, ask, sent, False), "cached": cached_of(reply, ask)}
        events = client.post_and_leave(
            dialect.path, fields | {"stream": True}, lambda some: self._enough(index, dialect, some, sent)
        )
        if (why := stream_error(events)) is not None:
            raise HttpError(f"the stream ended in an error: {why}", status=500)
        left = sent.abort_after is not None and num_tokens(dialect, events) >= sent.abort_after
        reply = whole_reply(dialect, events)
        answers = self._read(dialect, reply, ask, sent, True, not left)
        return {"answers": answers, "cached": cached_of(reply, ask), "left": left}

    def _enough(self, index: int, dialect: Dialect, events: list[dict[str, Any]], sent: Sent) -> bool:
        """Counts the tokens for those that wait for them; whether the trace leaves here, or nothing more can come."""
        if stream_error(events) is not None:
            return True
        came = num_tokens(dialect, events)
        with self._changed:
            if came != self._came[index]:
                if not self._came[index]:
                    self._replies[index] = replace(self._replies[index], first=self._now())
                self._came[index] = came
                self._changed.notify_all()
        return sent.abort_after is not None and came >= sent.abort_after

    def _read(
        self, dialect: Dialect, reply: Mapping[str, Any], ask: Ask, sent: Sent, is_streamed: bool, is_whole: bool = True
    ) -> tuple[Answer, ...]:
        apart = choices_apart(reply)
        is_begun = not is_whole and len(apart) < sent.samples  # left before each sample had a token
        if len(apart) != sent.samples and not is_begun:
            raise RequestError(f"choices: {len(apart)}, expected {sent.samples}")
        said = [dialect.read(one, ask) for one in apart]
        if is_streamed and dialect.name == LLAMA.name and any(has_gaps(one) for one in said):
            return ()
        return tuple(judged(ask, one, self._vocab_size, is_whole) for one in said)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _note(self, index: int, **fields: Any) -> None:
        with self._changed:
            self._replies[index] = replace(self._replies[index], **fields)


def still_there(reply: Reply) -> Reply:
    """A server that answers is not dead."""
    if reply.trouble is None or reply.trouble.kind != DEAD:
        return reply
    return replace(reply, trouble=replace(reply.trouble, kind=BROKEN))


def limits_of(client: HttpClient) -> tuple[int | None, int | None]:
    """Tokens of a request and requests at once, as vLLM's list of models or llama.cpp's /props tell them."""
    longest: Any = None
    slots: Any = None
    with contextlib.suppress(HttpError):
        listed = client.get("/v1/models").get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        longest = first.get("max_model_len") if isinstance(first, dict) else None
    with contextlib.suppress(HttpError):
        told = client.get("/props")
        slots, defaults = told.get("total_slots"), told.get("default_generation_settings")
        longest = defaults.get("n_ctx", longest) if isinstance(defaults, dict) else longest
    return (longest if is_count(longest) else None), (slots if is_count(slots) else None)


def is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def has_gaps(said: Said) -> bool:
    """llama.cpp streams no token that ends within a character, or that may belong to a stop text, but counts it."""
    return bool(said.new_tokens != len(said.fields.get("token_ids") or ()))


def stream_error(events: Sequence[Mapping[str, Any]]) -> str | None:
    """What the last event says instead of tokens: vLLM's and llama.cpp's of a request that failed midway."""
    error = events[-1].get("error") if events else None
    return None if not error else shortened(error if isinstance(error, str) else json.dumps(error), 300)


def kind_of(status: int | None) -> str:
    if status is None:
        return BROKEN
    return FAILED if status >= 500 else REFUSED


def wished(dialect: Dialect, fields: dict[str, Any], sent: Sent) -> dict[str, Any]:
    """The fields of a greedy request, with what this one wants beside."""
    more: dict[str, Any] = {}
    if sent.temperature:
        more |= {"temperature": sent.temperature, "seed": sent.seed}
    if sent.samples > 1:
        more |= {"n": sent.samples}
    if sent.stop is not None:
        more |= {"stop": [sent.stop]}
    if dialect.name == SGLANG.name:
        return {**fields, "sampling_params": {**fields["sampling_params"], **more}}
    return {**fields, **more}


def cached_of(reply: Mapping[str, Any], ask: Ask) -> int | None:
    """Prompt tokens that were not computed again: as OpenAI's usage, SGLang's meta_info or llama.cpp's timings say.

    None for a number that can't be one.
    """
    usage, meta, timings = (reply.get(name) for name in ("usage", "meta_info", "timings"))
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    for place, name in ((details, "cached_tokens"), (meta, "cached_tokens"), (timings, "cache_n")):
        if isinstance(place, dict) and type(place.get(name)) is int:
            return int(place[name]) if 0 <= place[name] <= len(ask.prompt_token_ids) else None
    return None
