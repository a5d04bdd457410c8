"""http://HOST:PORT: an engine behind an HTTP server, in whichever of the known dialects it really answers.

`probe` puts small requests in each dialect, and takes the first in which token ids come back; a server that only
knows text comes last, and its answers have no token ids: those of the text, tokenised again, might be others.
What a server claims to be is only its name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from lfm2np.checkpoint.tokenizer import Tokenizer
from lfm2np.errors import RequestError
from lfm2np.oracle.targets.checked import checked_answer, failed, shortened
from lfm2np.oracle.targets.http_client import BadReply, HttpClient, HttpError, TimedOut
from lfm2np.oracle.targets.http_dialects import DIALECTS, Dialect, Wants
from lfm2np.oracle.targets.http_replies import Said
from lfm2np.oracle.targets.records import Answer, Ask
from lfm2np.oracle.targets.target import Abilities, TargetError, in_flight

PROBE_TEXT, PROBE_IDS, PROBE_TOKENS = "The", (1, 2, 3), 2
UNSTREAMED_SECONDS = 0.2  # after which an ask is cancelled if the server doesn't stream


class HttpTarget:
    """A server, asked in one dialect.

    tokenizer   of the checkpoint: bounds the ids, and gives the probe its prompt; None does neither
    model_name  for a server that serves several; None names none, or the only one that it lists if it wants a name
    at_once     most requests in flight together; None: what target.in_flight makes of the server's slots
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
        self._client = HttpClient(url, timeout, retries, backoff)
        self._vocab_size = None if tokenizer is None else tokenizer.vocab_size
        self._probe_ids = None if tokenizer is None else tuple(tokenizer.encode(PROBE_TEXT))
        self._model_name, self._at_once = model_name, at_once
        self._found: tuple[Dialect, Wants, Abilities] | None = None
        self._streams = False

    @property
    def client(self) -> HttpClient:
        """For whoever asks in a way of his own."""
        return self._client

    @property
    def streams(self) -> bool:
        """Whether the server sends its answer token by token; known after `probe`."""
        return self._streams

    def spoken(self) -> tuple[Dialect, Wants]:
        """What the server understands. TargetError as `probe`."""
        self.probe()
        assert self._found is not None
        return self._found[0], self._found[1]

    @property
    def notes(self) -> list[str]:
        """What was tried again, and why: no answer shows it."""
        return self._client.notes

    def probe(self) -> Abilities:
        """The first dialect that works. TargetError, with what each said, if none does or nobody is there."""
        if self._found is None:
            self._found = self._search()
        return self._found[2]

    def answer(self, asks: Sequence[Ask], aborted: Collection[str] = ()) -> list[Answer]:
        """All asks together, at most `at_once`. Those that a server that goes did not answer get an error.

        An ask in `aborted` has its connection closed when half of its tokens have come; its answer holds those that
        came, if the server streams ids, and the finish reason "abort". TargetError if the server is gone for all.
        """
        at_once = self.probe().at_once
        if not asks:
            return []
        pool = ThreadPoolExecutor(min(at_once, len(asks)))
        try:
            answers = list(pool.map(lambda ask: self._one(ask, ask.id in aborted), asks))
        except BaseException:
            self.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        if all(isinstance(each, TargetError) for each in answers):
            raise TargetError(str(answers[0]))
        return [
            failed(ask, str(each)) if isinstance(each, TargetError) else each
            for ask, each in zip(asks, answers, strict=True)
        ]

    def close(self) -> None:
        self._client.close()

    def _one(self, ask: Ask, is_aborted: bool) -> Answer | TargetError:
        assert self._found is not None
        dialect, wants, _ = self._found
        if not dialect.takes_token_ids and ask.prompt_text is None:
            return failed(ask, "prompt_text: none, and this server takes no token ids")
        try:
            if is_aborted:
                return self._leave(ask, dialect, wants)
            return judged(ask, self._put(ask, dialect, wants), self._vocab_size)
        except (HttpError, RequestError) as problem:
            return failed(ask, str(problem))
        except TargetError as problem:
            return problem

    def _put(self, ask: Ask, dialect: Dialect, wants: Wants, seconds: float | None = None) -> Said:
        reply = self._client.post(dialect.path, dialect.request(ask, wants), seconds)
        return dialect.read(reply, ask)

    def _leave(self, ask: Ask, dialect: Dialect, wants: Wants) -> Answer:
        """Cancels midway. A server that doesn't stream may have answered in whole before that."""
        if not self._streams:
            try:
                return judged(ask, self._put(ask, dialect, wants, UNSTREAMED_SECONDS), self._vocab_size)
            except TimedOut:
                return Answer(ask.id, finish_reason="abort")
        half = max(1, ask.max_tokens // 2)
        fields = dialect.request(ask, wants) | {"stream": True}
        events = self._client.post_and_leave(dialect.path, fields, lambda some: num_tokens(dialect, some) >= half)
        reason = "abort" if num_tokens(dialect, events) >= half else None  # None: it ended by itself
        pieces = [dialect.streamed_ids(event) for event in events]
        if not pieces or not all(isinstance(piece, list) for piece in pieces):
            return Answer(ask.id, finish_reason=reason)
        ids = [token_id for piece in pieces for token_id in piece]
        return judged(ask, Said({"token_ids": ids, "finish_reason": reason}), self._vocab_size, is_whole=False)

    def _search(self) -> tuple[Dialect, Wants, Abilities]:
        refused: dict[tuple[str, str], str] = {}  # dialect and problem -> the first probe that met it
        for model in self._models():
            for dialect in DIALECTS:
                for wants in dialect.tries:
                    try:
                        found = self._tried(dialect, replace(wants, model=model))
                    except (BadReply, RequestError) as problem:
                        key = dialect.name, shortened(str(problem), 200)
                        refused.setdefault(key, f"{dialect.name} ({dialect.path}, {wants}): {key[1]}")
                    except HttpError as problem:
                        raise TargetError(f"{self._client.place}{dialect.path}: {problem}") from None
                    else:
                        return with_refused(*found, refused)
        raise TargetError(f"{self._client.place}: no known dialect: {'; '.join(refused.values())}")

    def _models(self) -> Iterator[str | None]:
        """Names to try: most servers want none, and some would load another model by its name."""
        yield self._model_name
        if self._model_name is None:
            with contextlib.suppress(HttpError):
                listed = self._client.get("/v1/models").get("data")
                names = [one.get("id") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
                if len(names) == 1 and isinstance(names[0], str):
                    yield names[0]

    def _tried(self, dialect: Dialect, wants: Wants) -> tuple[Dialect, Wants, Abilities]:
        """BadReply or RequestError if the server does not answer so."""
        unknown = PROBE_IDS if dialect.takes_token_ids else ()
        ids = unknown if self._probe_ids is None else self._probe_ids
        ask = Ask("probe", "probe", ids, PROBE_TOKENS, PROBE_TEXT, prompt_logprobs=wants.prompt_logprobs)
        reply = self._client.post(dialect.path, dialect.request(ask, wants))
        answer = judged(ask, dialect.read(reply, ask), self._vocab_size)
        if answer.error is not None:
            raise RequestError(answer.error)
        if dialect.takes_token_ids and answer.token_ids is None:
            places = " or ".join(one.path for one in dialect.fields if one.says == "token_ids")
            raise RequestError(f"no token ids in the reply, expected {places}")
        self._streams = self._does_stream(dialect, dialect.request(ask, wants))
        return dialect, wants, self._abilities(dialect, answer, reply)

    def _does_stream(self, dialect: Dialect, fields: Mapping[str, Any]) -> bool:
        try:
            return bool(self._client.post_and_leave(dialect.path, {**fields, "stream": True}, bool))
        except HttpError:
            return False

    def _abilities(self, dialect: Dialect, answer: Answer, reply: Mapping[str, Any]) -> Abilities:
        slots = self._slots(dialect)
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

    def _slots(self, dialect: Dialect) -> int | None:
        """None where the server does not say."""
        slots = None
        if dialect.slots is not None:
            path, name = dialect.slots
            with contextlib.suppress(HttpError):
                slots = self._client.get(path).get(name)
        return slots if type(slots) is int and slots > 0 else None

    def _version(self, dialect: Dialect, reply: Mapping[str, Any]) -> str:
        found = reply.get("system_fingerprint")
        if dialect.version is not None:
            path, name = dialect.version
            with contextlib.suppress(HttpError):
                found = self._client.get(path).get(name, found)
        return f"version {shortened(found, 120)}" if isinstance(found, str) and found else "version not told"


def with_refused(
    dialect: Dialect, wants: Wants, abilities: Abilities, refused: Mapping[tuple[str, str], str]
) -> tuple[Dialect, Wants, Abilities]:
    """With the probes that failed before: all where no ids are taken or reported, else those of the same dialect."""
    is_least = not (abilities.takes_token_ids and abilities.tells_token_ids)
    told = tuple(words for (name, _), words in refused.items() if is_least or name == dialect.name)
    return dialect, wants, replace(abilities, refused=told)


def num_tokens(dialect: Dialect, events: Sequence[Mapping[str, Any]]) -> int:
    """So far; an event that doesn't tell counts for one."""
    pieces = (dialect.streamed_ids(event) for event in events)
    return sum(len(piece) if isinstance(piece, list) else 1 for piece in pieces)


def judged(ask: Ask, said: Said, vocab_size: int | None, is_whole: bool = True) -> Answer:
    """An Answer with `error`, naming the field, unless all of it can be true of this ask."""
    fields = said.fields
    expected = len(ask.prompt_token_ids)
    if said.prompt_tokens is not None and expected and said.prompt_tokens != expected:
        return failed(ask, f"prompt tokens: the server counted {said.prompt_tokens!r}, expected {expected}")
    if fields.get("token_ids") is None:
        return judged_text(ask, fields)
    answer = checked_answer(ask, fields)
    ids = answer.token_ids
    if answer.error is not None or ids is None:
        return answer
    if said.new_tokens is not None and said.new_tokens != len(ids):
        return failed(ask, f"token_ids: {len(ids)}, but the server counted {said.new_tokens!r} new tokens")
    is_short = is_whole and len(ids) < ask.max_tokens and answer.finish_reason != "stop"
    if len(ids) > ask.max_tokens or is_short:
        why = f"finish_reason {answer.finish_reason!r}"
        told = f"token_ids: {len(ids)} with {why}, expected {ask.max_tokens}, or fewer with 'stop'"
        return failed(ask, told, refuted=len(ids) > ask.max_tokens)
    for where, named in (
        ("token_ids", ids),
        *((f"top_logprobs[{i}]", t) for i, t in enumerate(answer.top_logprobs or ())),
    ):
        for token_id in named:
            if vocab_size is not None and token_id >= vocab_size:
                told = f"{where}: id {token_id}, expected ids below vocab_size={vocab_size}"
                return failed(ask, told, refuted=True)
    return answer


def judged_text(ask: Ask, fields: Mapping[str, Any]) -> Answer:
    """An answer in text only: it can't be right or wrong, only inconclusive."""
    text, reason = fields.get("text"), fields.get("finish_reason")
    if not isinstance(text, str):
        return failed(ask, f"text {text!r}: expected text")
    if reason is not None and not isinstance(reason, str):
        return failed(ask, f"finish_reason {reason!r}: expected text")
    return Answer(ask.id, text=text, finish_reason=reason)
