"""http://HOST:PORT: an engine behind an HTTP server, in the first of DIALECTS in which token ids come back.

`probe` sends small requests in each. A server that only knows text comes last, and its answers have no token ids: those
of the text, tokenised again, might be others. What a server claims to be is only its name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, NamedTuple

from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.errors import RequestError
from lfm2np.oracle.engines import dialects
from lfm2np.oracle.engines.dialects.dialect import Dialect, Extras, Location, Response, value_at
from lfm2np.oracle.engines.http_client import BadReply, HttpClient, HttpError, TimedOut
from lfm2np.oracle.engines.records import Answer, Ask, checked_answer, failed, shortened
from lfm2np.oracle.engines.target import Abilities, Arrived, TargetError, ignored, in_flight, requests_of
from lfm2np.oracle.engines.validate import validate

PROBE_TEXT, PROBE_IDS, PROBE_TOKENS = "The", (1, 2, 3), 2
UNSTREAMED_SECONDS = 0.2  # after which an ask is cancelled if the server doesn't stream


class Spoken(NamedTuple):
    """What a server understands, and what it can do."""

    dialect: Dialect
    extras: Extras
    abilities: Abilities


class HttpTarget:
    """A server.

    tokenizer   of the checkpoint: bounds the ids, and gives the probe its prompt; None does neither
    model_name  for a server that serves several; None names none, or the only one that it lists if it wants a name
    at_once     most requests in flight together; None: as target.in_flight has it for the server's slots
    timeout     seconds for one request; retries and backoff: see http_client.py
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
    ) -> None:
        self.client = HttpClient(url, timeout, retries, backoff)
        self.streams = False  # whether the server sends its answer token by token; known after `probe`
        self._vocab_size = None if tokenizer is None else tokenizer.vocab_size
        self._probe_ids = None if tokenizer is None else tuple(tokenizer.encode(PROBE_TEXT))
        self._model_name, self._at_once = model_name, at_once
        self._spoken: Spoken | None = None

    def spoken(self) -> Spoken:
        """The first dialect that works. TargetError, with each one's problem, if none does or there is no server."""
        if self._spoken is None:
            self._spoken = self._search()
        return self._spoken

    def probe(self) -> Abilities:
        return self.spoken().abilities

    def answer(self, asks: Sequence[Ask], aborted: Collection[str] = (), arrived: Arrived = ignored) -> list[Answer]:
        """All asks together, at most `at_once`; those that a server left unanswered when it went get an error.

        An ask in `aborted` has its connection closed when half of its tokens have come; its answer holds those that
        came, if the server streams ids, and the finish reason "abort". TargetError if the server is gone for all.
        """
        at_once = self.probe().at_once
        if not asks:
            return []
        pool = ThreadPoolExecutor(min(at_once, len(asks)))
        futures = [pool.submit(self._answers, some, aborted) for some in requests_of(asks)]
        try:
            for future in as_completed(futures):
                report(future, arrived)
        except BaseException:
            self.close()
            with contextlib.suppress(RequestError):  # which it may be that came
                for future in futures:
                    report(future, arrived)
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        answers = [answer for future in futures for answer in future.result()]
        if all(isinstance(each, TargetError) for each in answers):
            raise TargetError(str(answers[0]))
        return [
            failed(ask, str(each)) if isinstance(each, TargetError) else each
            for ask, each in zip(asks, answers, strict=True)
        ]

    def close(self) -> None:
        self.client.close()

    def _answers(self, asks: Sequence[Ask], aborted: Collection[str]) -> Sequence[Answer | TargetError]:
        """Of one request."""
        (ask, *_) = asks
        if not self.spoken().dialect.takes_token_ids and ask.prompt_text is None:
            return [failed(ask, "prompt_text: none, and this server takes no token ids") for ask in asks]
        try:
            return [self._abort(ask)] if ask.id in aborted else self._whole(asks)
        except (HttpError, RequestError) as problem:
            return [failed(ask, str(problem)) for ask in asks]
        except TargetError as problem:
            return [problem] * len(asks)

    def _whole(self, asks: Sequence[Ask], seconds: float | None = None) -> list[Answer]:
        dialect, extras, _ = self.spoken()
        (first, *_) = asks
        body = dialect.request(first, extras)
        body = dialect.with_sampling(body, {"n": first.samples}) if first.samples > 1 else body
        reply = self._joined(dialect, body) if first.streamed else self.client.post(dialect.path, body, seconds)
        if first.samples == 1:
            return [judged(first, dialect.read(reply, first), self._vocab_size)]
        replies = [] if dialect.split_samples is None else dialect.split_samples(reply)
        if len(replies) != first.samples:
            return [failed(ask, f"{len(replies)} samples, expected {ask.samples}", refuted=True) for ask in asks]
        return [judged(ask, dialect.read(replies[ask.sample], ask), self._vocab_size) for ask in asks]

    def _joined(self, dialect: Dialect, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole response of a stream. BadReply for one that ends in an error."""
        fields = {**body, "stream": True}
        events = self.client.post_and_leave(dialect.path, fields, lambda some: bool(some and some[-1].get("error")))
        if events and events[-1].get("error"):
            raise BadReply(f"the stream ended in an error: {shortened(repr(events[-1]['error']), 300)}")
        return dialect.joined(events)

    def _abort(self, ask: Ask) -> Answer:
        """Cancels midway. A server that doesn't stream may have answered in whole before that."""
        if not self.streams:
            try:
                return self._whole([ask], UNSTREAMED_SECONDS)[0]
            except TimedOut:
                return Answer(ask.id, finish_reason="abort")
        dialect, extras, _ = self.spoken()
        half = max(1, ask.max_tokens // 2)
        body = dialect.request(ask, extras) | {"stream": True}
        events = self.client.post_and_leave(dialect.path, body, lambda some: dialect.num_tokens(some) >= half)
        reason = "abort" if dialect.num_tokens(events) >= half else None  # None: it ended by itself
        pieces = [dialect.event_ids(event) for event in events]
        if not pieces or not all(isinstance(piece, list) for piece in pieces):
            return Answer(ask.id, finish_reason=reason)
        ids = [token_id for piece in pieces for token_id in piece]
        return judged(ask, Response({"token_ids": ids, "finish_reason": reason}), self._vocab_size, is_whole=False)

    def _search(self) -> Spoken:
        refused: dict[tuple[str, str], str] = {}  # dialect and problem -> the first probe that met it
        for model in self._models():
            for dialect in dialects.DIALECTS:
                for extras in dialect.extras:
                    try:
                        spoken = self._try(dialect, replace(extras, model=model))
                    except (BadReply, RequestError) as problem:
                        key = dialect.name, shortened(str(problem), 200)
                        refused.setdefault(key, f"{dialect.name} ({dialect.path}, {extras}): {key[1]}")
                    except HttpError as problem:
                        raise TargetError(f"{self.client.place}{dialect.path}: {problem}") from None
                    else:
                        return with_refused(spoken, refused)
        raise TargetError(f"{self.client.place}: no known dialect: {'; '.join(refused.values())}")

    def _models(self) -> Iterator[str | None]:
        """Names to try: most servers want none, and some would load another model by its name."""
        yield self._model_name
        if self._model_name is None and (name := self.client.only_model()) is not None:
            yield name

    def _try(self, dialect: Dialect, extras: Extras) -> Spoken:
        """BadReply or RequestError if the server does not answer so."""
        unknown = PROBE_IDS if dialect.takes_token_ids else ()
        ids = unknown if self._probe_ids is None else self._probe_ids
        ask = Ask("probe", "probe", ids, PROBE_TOKENS, PROBE_TEXT, prompt_logprobs=extras.prompt_logprobs)
        body = dialect.request(ask, extras)
        reply = self.client.post(dialect.path, body)
        answer = judged(ask, dialect.read(reply, ask), self._vocab_size, is_whole=False)  # how it ends is for the check
        if answer.error is not None:
            raise RequestError(answer.error)
        if dialect.takes_token_ids and answer.token_ids is None:
            places = " or ".join(field.path for field in dialect.fields if field.says == "token_ids")
            raise RequestError(f"no token ids in the reply, expected {places}")
        self.streams = self._does_stream(dialect, body)
        abilities = self._abilities(dialect, answer, reply)
        samples = dialect.split_samples is not None and self._takes_samples(dialect, body)
        is_whole = self.streams and dialect.streams_all and dialect.takes_token_ids
        streams = is_whole and self._takes_stream(dialect, body, ask, answer)
        return Spoken(dialect, extras, replace(abilities, takes_samples=samples, takes_streams=streams))

    def _takes_samples(self, dialect: Dialect, body: Mapping[str, Any]) -> bool:
        """Drawn, as some servers refuse several samples of a greedy request."""
        fields = dialect.with_sampling(dict(body), {"temperature": 1.0, "seed": 1, "n": 2})
        try:
            return len((dialect.split_samples or (lambda reply: []))(self.client.post(dialect.path, fields))) == 2
        except (HttpError, RequestError):
            return False

    def _takes_stream(self, dialect: Dialect, body: Mapping[str, Any], ask: Ask, whole: Answer) -> bool:
        """Whether its events hold what the whole answer does: tokens, and log-probabilities if that reports them."""
        try:
            streamed = judged(ask, dialect.read(self._joined(dialect, body), ask), self._vocab_size)
        except (HttpError, RequestError):
            return False
        tells = streamed.token_ids is not None and (streamed.logprobs is not None or whole.logprobs is None)
        return bool(streamed.refuted) or (tells and streamed.error is None)

    def _does_stream(self, dialect: Dialect, body: Mapping[str, Any]) -> bool:
        try:
            return bool(self.client.post_and_leave(dialect.path, {**body, "stream": True}, bool))
        except HttpError:
            return False

    def _abilities(self, dialect: Dialect, answer: Answer, reply: Mapping[str, Any]) -> Abilities:
        slots = self.number_at([dialect.slots])
        return Abilities(
            engine=f"{dialect.name} dialect, {self._version(dialect, reply)}",
            takes_token_ids=dialect.takes_token_ids,
            tells_token_ids=answer.token_ids is not None,
            tells_logprobs=answer.logprobs is not None,
            num_top_logprobs=min((len(top) for top in answer.top_logprobs or ()), default=0),
            tells_prompt_logprobs=answer.prompt_logprobs is not None,
            at_once=in_flight(self._at_once, slots),
            can_abort=True,
            takes_stops=dialect.takes_stops,
            takes_seeds=dialect.takes_seeds,
            slots=slots,
        )

    def number_at(self, locations: Iterable[Location | None]) -> int | None:
        """The first positive number that the server reports in one of these places; None: in none of them."""
        for location in locations:
            if location is not None:
                with contextlib.suppress(HttpError):
                    value = value_at(self.client.get(location.url), location.path)
                    if type(value) is int and value > 0:
                        return value
        return None

    def _version(self, dialect: Dialect, reply: Mapping[str, Any]) -> str:
        version = reply.get("system_fingerprint")
        if dialect.version is not None:
            with contextlib.suppress(HttpError):
                version = value_at(self.client.get(dialect.version.url), dialect.version.path) or version
        return f"version {shortened(version, 120)}" if isinstance(version, str) and version else "version not told"


def report(future: Future[Sequence[Answer | TargetError]], arrived: Arrived) -> None:
    """Answers that are there; not those of connections that were closed here."""
    if future.done() and not future.cancelled() and future.exception() is None:
        for answer in future.result():
            if isinstance(answer, Answer) and (answer.error is None or answer.refuted):
                arrived(answer)


def with_refused(spoken: Spoken, refused: Mapping[tuple[str, str], str]) -> Spoken:
    """With the probes that failed before: all where no ids are taken or reported, else those of the same dialect."""
    is_least = not (spoken.abilities.takes_token_ids and spoken.abilities.tells_token_ids)
    kept = tuple(words for (name, _), words in refused.items() if is_least or name == spoken.dialect.name)
    return spoken._replace(abilities=replace(spoken.abilities, refused=kept))


def judged(ask: Ask, response: Response, vocab_size: int | None, is_whole: bool = True) -> Answer:
    """An Answer with `error`, naming the field, unless all of it can be true of this ask."""
    fields, expected = response.fields, len(ask.prompt_token_ids)
    if response.prompt_tokens is not None and expected and response.prompt_tokens != expected:
        return failed(ask, f"prompt tokens: the server counted {response.prompt_tokens!r}, expected {expected}")
    if fields.get("token_ids") is None:
        return judged_text(ask, fields)
    answer = checked_answer(ask, fields)
    ids = answer.token_ids
    if answer.error is not None or ids is None:
        return answer
    if response.new_tokens is not None and response.new_tokens != len(ids):
        return failed(ask, f"token_ids: {len(ids)}, but the server counted {response.new_tokens!r} new tokens")
    return validate(ask, answer, vocab_size, is_aborted=not is_whole)


def judged_text(ask: Ask, fields: Mapping[str, Any]) -> Answer:
    """An answer in text only: it can't be right or wrong, only inconclusive."""
    text, reason = fields.get("text"), fields.get("finish_reason")
    if not isinstance(text, str):
        return failed(ask, f"text {text!r}: expected text")
    if reason is not None and not isinstance(reason, str):
        return failed(ask, f"finish_reason {reason!r}: expected text")
    return Answer(ask.id, text=text, finish_reason=reason)
