"""http://HOST:PORT: an engine behind an HTTP server, in the first of DIALECTS in which token ids come back.

`probe` sends small requests in each. A server that only knows text comes last, and its answers have no token ids: those
of the text, tokenised again, might be others. A response that holds what its dialect says, but that no right engine
gives, is evidence about the engine, which is judged in that dialect if ids come back in no other. What a server claims
to be is only its name.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from lfm2np.checkpoint.text.tokenizer import Tokenizer, text_of
from lfm2np.errors import RequestError
from lfm2np.oracle.engines import dialects
from lfm2np.oracle.engines.dialects.dialect import (
    ContradictionError,
    Dialect,
    Extras,
    Location,
    split_choices,
    value_at,
)
from lfm2np.oracle.engines.http_client import BadReply, HttpClient, HttpError, TimedOut, metrics_of
from lfm2np.oracle.engines.records import (
    BROKEN,
    DEAD,
    FAILED,
    HANG,
    IMPOSSIBLE,
    NO_ANSWER,
    REFUSED,
    Answer,
    Request,
    Trace,
    changed,
    failed,
    greedy,
    is_due,
    shortened,
)
from lfm2np.oracle.engines.records_json import answer_from_json, checked_answer
from lfm2np.oracle.engines.target import Abilities, Answers, Played, TargetError, in_flight
from lfm2np.oracle.engines.validate import validate

PROBE_TEXT, PROBE_IDS, PROBE_TOKENS = "The", (1, 2, 3), 2
AT_ONCE = 0.02  # seconds after which a request is cancelled whose first token is not waited for
UNSTREAMED_SECONDS = 0.2  # likewise, if the server doesn't stream


class Spoken(NamedTuple):
    """What a server understands, and what it can do."""

    dialect: Dialect
    extras: Extras
    abilities: Abilities


class Heard(NamedTuple):
    """A response to the first probe that was read in a dialect; `refuted`: why no right engine gives it."""

    dialect: Dialect
    extras: Extras
    request: Request
    reply: Mapping[str, Any]
    fields: Mapping[str, Any]
    refuted: str | None

    @property
    def has_ids(self) -> bool:
        """Of the prompt, and of the answer."""
        return self.dialect.takes_token_ids and "token_ids" in self.fields


class SpoiledError(RequestError):
    """A response in a dialect's form, with ids, but with a value that no answer has."""


class HttpTarget:
    """A server.

    tokenizer   of the checkpoint: bounds the ids, and gives the probe its prompt; None does neither
    model_name  for a server that serves several; None names none, or the only one that it lists if it wants a name
    at_once     most requests in flight together; None: as target.in_flight has it for the server's slots
    timeout     seconds for one request; retries and backoff: see http_client.py
    fields      are added to each request
    chat        its chat completions, which lay out prompts themselves, and nothing else
    """

    def __init__(
        self,
        url: str,
        tokenizer: Tokenizer | None,
        model_name: str | None = None,
        at_once: int | None = None,
        timeout: float = 60.0,
        retries: int = 3,
        backoff: float = 0.25,
        fields: Mapping[str, Any] | None = None,
        chat: bool = False,
    ) -> None:
        self.client = HttpClient(url, timeout, retries, backoff)
        self.is_streaming = False  # whether the server sends its answer token by token; known after `probe`
        self._tokenizer, self._fields = tokenizer, fields or {}
        self._vocab_size = None if tokenizer is None else tokenizer.vocab_size
        self._probe_ids = PROBE_IDS if tokenizer is None else tuple(tokenizer.encode(PROBE_TEXT))
        self._model_name, self._at_once, self._is_chat = model_name, at_once, chat
        self._spoken: Spoken | None = None
        self.counts_hits = True  # until /metrics lacks them
        self._num_hits: float | None = None  # as it was last read there

    def spoken(self) -> Spoken:
        """The first dialect that works. TargetError, with each one's problem, if none does or there is no server."""
        if self._spoken is None:
            self._spoken = self._search()
        return self._spoken

    def probe(self) -> Abilities:
        return self.spoken().abilities

    def play(self, trace: Trace) -> Played:
        """All requests as the trace says. One that is aborted has its connection closed when so many tokens have come;
        its answer holds those that came, if the server streams ids."""
        return HttpRun(self, trace, self.probe().at_once).played()

    def close(self) -> None:
        self.client.close()

    def body(self, request: Request) -> dict[str, Any]:
        """What is sent for the request; not that it is cold, where that is refused."""
        dialect, extras, abilities = self.spoken()
        request = request if abilities.takes_cold else replace(request, cold=False)
        return {**dialect.request(request, extras), **self._fields}

    def with_text(self, request: Request) -> Request:
        """With the text of its prompt, where the server takes no ids. RequestError if there is none."""
        if self._is_chat or self.spoken().dialect.takes_token_ids or request.prompt_text is not None:
            return request
        text = None if self._tokenizer is None else text_of(self._tokenizer, request.prompt_token_ids)
        if text is None:
            raise RequestError("prompt_text: none, and this server takes no token ids")
        return replace(request, prompt_text=text)

    def read(self, reply: Mapping[str, Any], request: Request, is_streamed: bool, is_aborted: bool) -> Answers:
        """One answer a sample; RequestError for a reply of impossible form."""
        dialect = self.spoken().dialect
        samples = split_choices(reply) if dialect.takes_samples else [dict(reply)]
        has_begun = not is_aborted or len(samples) >= request.params.n  # else it was left before each had a token
        if len(samples) != request.params.n and has_begun:
            return (failed(f"{len(samples)} samples, expected {request.params.n}", IMPOSSIBLE),)
        responses = [read_fields(dialect, sample, request) for sample in samples]
        kind = kind_of(dialect, is_streamed)
        if len(samples) > 1 and (why := miscounted(reply, [fields for fields, _ in responses])) and not is_aborted:
            return (failed(why, kind),)
        is_whole = all(fields.get("new_tokens") == len(fields.get("token_ids", ())) for fields, _ in responses)
        if is_streamed and not dialect.streams_all and not is_whole:
            return (Answer(finish_reason="abort" if is_aborted else None, is_aborted=is_aborted),)
        count = None if dialect.cached is None else value_at(reply, dialect.cached)
        cached = count if type(count) is int and 0 <= count < 2**63 else None
        answers = [read_answer(request, fields, why, kind) for fields, why in responses]
        return tuple(replace(answer, is_aborted=is_aborted, cached_tokens=cached) for answer in answers)

    def new_hits(self) -> int | None:
        """Prompt tokens that came from the cache since the last call, by the server's own counter; None: it has none.

        Not since the round began: a counter may rise after the answer is sent. At first 0: those are of others.
        """
        metrics: dict[str, float] = {}
        with contextlib.suppress(HttpError, TargetError):
            metrics = metrics_of(self.client.get_text("/metrics"))
        counts = [metrics[name] for name in self.spoken().dialect.metrics.cached if name in metrics]
        self.counts_hits = bool(counts)
        before, self._num_hits = self._num_hits, sum(counts)
        return None if not counts else max(0, int(self._num_hits - (self._num_hits if before is None else before)))

    # --- the search for a dialect

    def _search(self) -> Spoken:
        refused: dict[tuple[str, str], str] = {}  # dialect and problem -> the first probe that met it
        spoiled: list[str] = []  # why responses that hold ids are no answers
        taken: Heard | None = None
        for dialect, extras in self._attempts():
            try:
                heard = self._heard(dialect, extras)
            except (BadReply, RequestError) as problem:
                why = str(problem)
                if isinstance(problem, SpoiledError):
                    spoiled.append(f"{dialect.name} ({dialect.path}): {why}")
            except HttpError as problem:
                if taken is not None:
                    break
                raise TargetError(f"{self.client.place}{dialect.path}: {problem}") from None
            else:
                why = heard.refuted or ""
                if not why and (taken is None or heard.has_ids):  # text only says less than ids that are wrong
                    taken = heard
                    break
                taken = taken or heard
            key = dialect.name, shortened(why, 200)
            refused.setdefault(key, f"{dialect.name} ({dialect.path}, {extras}): {key[1]}")
        if spoiled and (taken is None or not taken.has_ids):
            raise TargetError(f"{self.client.place}: token ids come back, but no answer: {spoiled[0]}")
        if taken is None:
            raise TargetError(f"{self.client.place}: no known dialect: {'; '.join(refused.values())}")
        spoken, every = self._spoken_in(taken), not taken.has_ids  # then all are told, else its own
        kept = tuple(words for (name, _), words in refused.items() if every or name == spoken.dialect.name)
        return spoken._replace(abilities=replace(spoken.abilities, refused=kept))

    def _attempts(self) -> Iterator[tuple[Dialect, Extras]]:
        for model in self._models():
            for dialect in dialects.CHATS if self._is_chat else dialects.DIALECTS:
                for extras in dialect.extras:
                    yield dialect, replace(extras, model=model)

    def _models(self) -> Iterator[str | None]:
        """Names to try: most servers want none, some the only one that they list, some would load another by it."""
        yield self._model_name
        if self._model_name is None:
            with contextlib.suppress(HttpError):
                listed = self.client.get("/v1/models")
                name = value_at(listed, ("data", 0, "id"))
                if isinstance(name, str) and value_at(listed, ("data", 1)) is None:
                    yield name

    def _heard(self, dialect: Dialect, extras: Extras) -> Heard:
        """BadReply or RequestError if the server does not answer so."""
        ids = self._probe_ids if dialect.takes_token_ids or self._tokenizer is not None else ()
        scored = {"prompt_logprobs": 0} if extras.prompt_logprobs else {}
        request = greedy("probe", ids, PROBE_TOKENS, prompt_text=PROBE_TEXT, message=PROBE_TEXT, **scored)
        reply = self.client.post(dialect.path, dialect.request(request, extras))
        fields, why = read_fields(dialect, reply, request)
        if not dialect.takes_token_ids:
            fields.pop("new_tokens", None)  # perhaps with one that is not shown; a check judges it
        answer = read_answer(request, fields, why, kind_of(dialect, is_streamed=False))
        answer = validate(request, replace(answer, is_aborted=True), self._vocab_size)  # its end is the check's
        if answer.error is not None and not answer.is_refuted:
            raise (SpoiledError if "token_ids" in fields else RequestError)(answer.error)
        if dialect.takes_token_ids and "token_ids" not in fields:
            places = " or ".join(field.path for field in dialect.fields if field.says == "token_ids")
            raise RequestError(f"no token ids in the reply, expected {places}")
        return Heard(dialect, extras, request, reply, fields, answer.error)

    def _spoken_in(self, heard: Heard) -> Spoken:
        dialect, extras = heard.dialect, heard.extras
        self.is_streaming = self._does_stream(dialect, dialect.request(heard.request, extras))
        self._spoken = Spoken(dialect, extras, self._reported(heard))  # for the probes that follow
        try:
            return self._spoken._replace(abilities=self._probed(heard))
        finally:
            self._spoken = None

    def _reported(self, heard: Heard) -> Abilities:
        """What the server says about itself, and what one answer shows."""
        dialect, fields = heard.dialect, heard.fields
        version = heard.reply.get("system_fingerprint")
        if dialect.version is not None:
            with contextlib.suppress(HttpError):
                version = value_at(self.client.get(dialect.version.url), dialect.version.path) or version
        told = shortened(version, 120) if isinstance(version, str) and version else "not told"
        slots = self.number_at([dialect.slots, *(each.slots for each in dialects.DIALECTS)])
        return Abilities(
            engine=f"{dialect.name} dialect, version {told}",
            takes_token_ids=dialect.takes_token_ids,
            tells_token_ids="token_ids" in fields,
            tells_logprobs="logprobs" in fields,
            num_top_logprobs=min((len(top) for top in fields.get("top_logprobs", ())), default=0),
            tells_prompt_logprobs="prompt_logprobs" in fields,
            at_once=in_flight(self._at_once, slots),
            can_abort=True,
            takes_seeds=dialect.takes_seeds,
            processors=dialect.processors,
            takes_cold=True,  # until it is tried
            is_streaming=self.is_streaming,
            slots=slots,
            longest=self.number_at(each.longest for each in dialects.DIALECTS),
        )

    def _probed(self, heard: Heard) -> Abilities:
        """What it accepts besides greedy requests, each tried. Samples are drawn, as some servers refuse several of a
        greedy request."""
        dialect, request = heard.dialect, heard.request
        works = partial(self._works, known=heard.refuted)
        plain = changed(request, prompt_logprobs=None)
        drawn, cold = changed(plain, temperature=1.0, seed=1), changed(request, cold=True)
        is_whole = self.is_streaming and dialect.streams_all and dialect.takes_token_ids
        tokenizer = self._tokenizer
        return replace(
            self.spoken().abilities,
            takes_stops=works(changed(plain, stop="\u2603")),
            takes_sampling=dialect.raw_logprobs and works(drawn),
            takes_samples=dialect.takes_samples and works(changed(drawn, n=2)),
            takes_streams=is_whole and self._takes_stream(heard),
            takes_cold=self.body(cold) != self.body(request) and works(cold),
            tells_texts=tokenizer is None
            or all(
                answer.text != "" or not tokenizer.decode(answer.ids)
                for answer in self._tried(changed(plain, max_tokens=8))
            ),
        )

    def _works(self, request: Request, known: str | None) -> bool:
        """Whether the server takes such a request, and reports as many tokens and log-probabilities as it should.

        known   what is wrong with its answer to a plain one
        """
        return all(answer.error in (None, known) for answer in self._tried(request))

    def _tried(self, request: Request) -> Answers:
        (answers,) = HttpRun(self, Trace((request,)), 1).played().answers
        return tuple(validate(request, answer) for answer in answers)

    def _takes_stream(self, heard: Heard) -> bool:
        """Whether its events hold what the whole answer does: tokens, and log-probabilities if that reports them."""
        (streamed,) = self._tried(changed(heard.request, streamed=True))
        if streamed.error is not None:
            return streamed.is_refuted or streamed.error == heard.refuted
        return streamed.token_ids is not None and (streamed.logprobs is not None or "logprobs" not in heard.fields)

    def _does_stream(self, dialect: Dialect, body: Mapping[str, Any]) -> bool:
        try:
            return bool(self.client.post_and_leave(dialect.path, {**body, "stream": True}, bool))
        except HttpError:
            return False

    def number_at(self, locations: Iterable[Location | None]) -> int | None:
        """The first positive number that the server reports in one of these places; None: in none of them."""
        for location in dict.fromkeys(locations):
            if location is not None:
                with contextlib.suppress(HttpError):
                    value = value_at(self.client.get(location.url), location.path)
                    if type(value) is int and value > 0:
                        return value
        return None


class HttpRun:
    """One trace under way: a thread for each request. What they share stands behind one condition."""

    def __init__(self, target: HttpTarget, trace: Trace, at_once: int) -> None:
        self._target, self._trace = target, trace
        self._changed = threading.Condition()
        self._free = threading.Semaphore(at_once)
        self._num_tokens = [0] * len(trace.requests)
        self._has_ended = [False] * len(trace.requests)
        self._first: list[float | None] = [None] * len(trace.requests)
        self._answers: list[Answers] = [()] * len(trace.requests)
        self._began = time.monotonic()

    def played(self) -> Played:
        """The answers to all requests. An interrupt cuts all connections."""
        indices = range(len(self._trace.requests))
        threads = [threading.Thread(target=self._play, args=(index,), daemon=True) for index in indices]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)  # an interrupt must not wait for it
            held = next(filter(self._lacks_hits, indices), None)
            if held is not None and self._target.counts_hits:  # it gets the round's
                first, *others = self._answers[held]
                self._answers[held] = (replace(first, round_cached_tokens=self._target.new_hits()), *others)
        except BaseException:
            self._target.close()
            raise
        return Played(tuple(self._answers))

    def _lacks_hits(self, index: int) -> bool:
        """Whether it is a judged answer that does not say what came from the cache."""
        (answer, *_), request = self._answers[index], self._trace.requests[index]
        return answer.error is None and answer.cached_tokens is None and request.abort_after is None

    def _play(self, index: int) -> None:
        request, sent = self._trace.requests[index], None
        try:
            with self._changed:
                while not is_due(request, self._num_tokens, self._has_ended):
                    self._changed.wait(1.0)
            time.sleep(request.pause / 1000)
            with self._free:
                sent = self._now()
                answers = self._sent(index, request)
        except BaseException as problem:
            answers = (failure_of(problem),)
        times: dict[str, Any] = {"sent": sent, "first": self._first[index], "ended": self._now()}
        self._answers[index] = tuple(replace(answer, **times) for answer in answers)
        with self._changed:
            self._has_ended[index] = True
            self._changed.notify_all()

    def _sent(self, index: int, request: Request) -> Answers:
        """Errors as HttpClient has them; RequestError for a reply of impossible form."""
        target, client = self._target, self._target.client
        path, request = target.spoken().dialect.path, target.with_text(request)
        body, seconds = target.body(request), None
        if self._trace.is_streamed(index) and target.is_streaming and request.abort_after != 0:
            return self._streamed(index, request, body)
        if request.abort_after is not None:
            seconds = UNSTREAMED_SECONDS if request.abort_after else AT_ONCE
        try:
            return target.read(client.post(path, body, seconds), request, is_streamed=False, is_aborted=False)
        except TimedOut:
            if seconds is None:
                raise
            return (Answer(finish_reason="abort", is_aborted=True),)

    def _streamed(self, index: int, request: Request, body: Mapping[str, Any]) -> Answers:
        target, dialect = self._target, self._target.spoken().dialect
        events = target.client.post_and_leave(
            dialect.path, {**body, "stream": True}, lambda some: self._is_enough(index, some, request)
        )
        if (why := stream_error(events)) is not None:
            raise HttpError(f"the stream ended in an error: {why}", status=500)
        is_aborted = request.abort_after is not None and dialect.num_tokens(events) >= request.abort_after
        answers = target.read(dialect.joined(events), request, is_streamed=True, is_aborted=is_aborted)
        return tuple(replace(each, finish_reason="abort") if is_aborted else each for each in answers)

    def _is_enough(self, index: int, events: list[dict[str, Any]], request: Request) -> bool:
        """Counts tokens for requests that wait for them; whether the request is cancelled here, or nothing more can
        come."""
        if stream_error(events) is not None:
            return True
        count = self._target.spoken().dialect.num_tokens(events)
        with self._changed:
            if count != self._num_tokens[index]:
                if self._first[index] is None:
                    self._first[index] = self._now()
                self._num_tokens[index] = count
                self._changed.notify_all()
        return request.abort_after is not None and count >= request.abort_after

    def _now(self) -> float:
        return time.monotonic() - self._began


def failure_of(problem: BaseException) -> Answer:
    """What a failed request is answered with."""
    if isinstance(problem, TargetError):
        kind = DEAD
    elif isinstance(problem, TimedOut):
        kind = HANG
    elif isinstance(problem, HttpError) and problem.status is not None:
        kind = FAILED if problem.status >= 500 else REFUSED
    else:
        kind = BROKEN if isinstance(problem, HttpError) and not isinstance(problem, BadReply) else NO_ANSWER
    is_known = isinstance(problem, TargetError | HttpError | RequestError)
    return failed(str(problem) if is_known else f"{type(problem).__name__}: {problem}", kind)


def stream_error(events: Sequence[Mapping[str, Any]]) -> str | None:
    """What the last event says instead of tokens: vLLM's and llama.cpp's of a request that failed midway."""
    error = events[-1].get("error") if events else None
    return None if not error else shortened(error if isinstance(error, str) else json.dumps(error), 300)


def read_fields(dialect: Dialect, reply: Mapping[str, Any], request: Request) -> tuple[dict[str, Any], str | None]:
    """What a dialect reads, and what it contradicts, if anything; RequestError for another form."""
    try:
        return dialect.read(reply, request), None
    except ContradictionError as problem:
        return problem.values, str(problem)


def miscounted(reply: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> str | None:
    """Where OpenAI's usage, which counts all samples of a request together, is another number than their tokens."""
    counted = value_at(reply, ("usage", "completion_tokens"))
    total = sum(len(fields.get("token_ids") or ()) for fields in samples)
    if counted in (None, total):
        return None
    return f"usage.completion_tokens {counted!r}: expected {total}, the tokens of all {len(samples)} samples"


def kind_of(dialect: Dialect, is_streamed: bool) -> str:
    """Of a response's contradictions. Some servers count a last token that they don't list, or lay out a text in their
    own way; and events may have been meant to be put together otherwise."""
    return IMPOSSIBLE if dialect.takes_token_ids and not is_streamed else NO_ANSWER


def read_answer(request: Request, read: Mapping[str, Any], why: str | None = None, kind: str = NO_ANSWER) -> Answer:
    """What a dialect read: an Answer with `error`, naming the field, where it contradicts the request or itself.

    why, kind   what was contradicted, if anything; and how bad that is
    """
    fields, expected = dict(read), len(request.prompt_token_ids)
    in_prompt, new = fields.pop("prompt_tokens", None), fields.pop("new_tokens", None)
    if in_prompt is not None and expected and in_prompt != expected:
        why = why or f"prompt tokens: the server counted {in_prompt!r}, expected {expected}"
        kind = kind if type(in_prompt) is int else NO_ANSWER
    if fields.get("token_ids") is None:  # in text only: it can't be right or wrong, only inconclusive
        if why is not None:
            return failed(why, NO_ANSWER)
        if not isinstance(fields.get("text"), str):
            return failed(f"text {fields.get('text')!r}: expected text", NO_ANSWER)
        return answer_from_json({name: fields.get(name) for name in ("text", "finish_reason")})
    answer = checked_answer(request, fields)
    if new is not None and new != answer.num_tokens:
        why = why or f"token_ids: {answer.num_tokens}, but the server counted {new!r} new tokens"
        kind = kind if type(new) is int else NO_ANSWER
    return answer if why is None or answer.error is not None else failed(why, kind)
