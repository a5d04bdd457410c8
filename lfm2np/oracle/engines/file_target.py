"""FILE.jsonl: what an engine answered earlier, one line {"request": {...}, "answer": {...}} a sample.

The record of a check, from which an interrupted one is resumed; also a target for engines that run elsewhere. The
same file may hold what was computed to judge them (engine/work/results_file.py).
A check writes a checksum into each line, {..., "sha256": "..."}, behind its answers {"end": 12, "sha256": "..."}: how
many there are since the previous end, and its verdict, {"verdict": "EXACT", "sha256": "..."}. Lines from elsewhere need
none of this.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from lfm2np.checkpoint.strict_json import decode_json
from lfm2np.engine.work.results_file import LineFile
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import IMPOSSIBLE, Answer, Pair, Request, Trace, failed, samples_of
from lfm2np.oracle.engines.records_json import (
    NOTED,
    ImpossibleValueError,
    answer_as_json,
    answer_from_json,
    parse_line,
    request_as_json,
    request_from_json,
)
from lfm2np.oracle.engines.target import Abilities, Played, TargetError
from lfm2np.values import same, show
from scheduler.checksum import FIELD, damage, sealed

RESULTS = b'{"format_version"'  # how lines of computed results begin


class Transcript:
    """The asks and answers of a file; of several lines with the same id, the last. A missing file has none.

    RequestError that names the line for anything invalid, except a torn last line, which a crash may leave: it is
    dropped, with a warning, and overwritten by the next `append`.
    """

    def __init__(self, file: str | Path | LineFile, is_target: bool = False, vocab_size: int | None = None) -> None:
        """`is_target`: refuses an answer that a later line contradicts, as the later one would mask it, and lines with
        checksums that no end follows, as some may be missing. `vocab_size` bounds prompts; None: unknown."""
        self._lines = file if isinstance(file, LineFile) else LineFile(file)
        self.path = self._lines.path
        self.verdict: str | None = None  # of the check, if it came to one
        self._pairs: dict[str, Pair] = {}
        self._num_open = 0  # lines with a checksum behind the last end
        num_repeated = 0
        for where, line in self._lines.read():
            if line.startswith(RESULTS):
                if is_target:
                    read_line(line, where)
                continue
            raw = read_line(line, where)
            if "verdict" in raw:
                self.verdict = str(raw["verdict"])
            elif "end" in raw:
                if not same(raw["end"], self._num_open):
                    expected = f"expected {self._num_open}, as stand before it"
                    raise RequestError(f"{where}: the end of {show(raw['end'])} answers, {expected}")
                self._num_open = 0
            else:
                self._num_open += FIELD in raw
                pair = read_pair(raw, where, vocab_size)
                name = pair[0].request_id
                if is_target and contradicts(self._pairs.get(name), pair):
                    raise RequestError(f"{where}: {name!r}: another request or answer than an earlier line's")
                num_repeated += pair[1].error is None and self._pairs.get(name) == pair
                self._pairs[name] = pair
        if is_target and self._num_open:
            raise RequestError(
                f"{self.path}: no end behind the last {self._num_open} of its answers: its check broke off, and is to "
                "be resumed, or the file was cut off"
            )
        if is_target and num_repeated:
            warnings.warn(f"{self.path}: answers that stand there again, and count once: {num_repeated}", stacklevel=2)

    def pairs(self) -> list[Pair]:
        """In the order in which their ids first came."""
        return list(self._pairs.values())

    def known(self, request: Request) -> Answer | None:
        """The answer to this request, if there is one. RequestError for one to another request of the same id: such a
        file is of another check."""
        recorded = self._pairs.get(request.request_id)
        if recorded is None:
            return None
        if request_text(recorded[0]) != request_text(request):
            why = "another seed, engine, model or version"
            raise RequestError(
                f"{self.path}: {request.request_id!r} is another request there ({why}): save into another file"
            )
        return recorded[1]

    def append(self, request: Request, answer: Answer) -> None:
        """Adds a line, which is on the disk when this returns. RequestError if it can't be written."""
        try:
            line = json.dumps({"request": request_as_json(request), "answer": answer_as_json(answer)}, allow_nan=False)
        except (TypeError, ValueError) as problem:
            raise RequestError(
                f"{self.path}: request {request.request_id!r}: can't be written as JSON: {problem}"
            ) from None
        self._lines.append(json.dumps(sealed(json.loads(line))).encode() + b"\n")
        self._num_open += 1
        self._pairs[request.request_id] = (request, answer)

    def end(self) -> None:
        """Writes that the check is complete, unless nothing was appended since the last end."""
        if self._num_open:
            self._lines.append(json.dumps(sealed({"end": self._num_open})).encode() + b"\n")
            self._num_open = 0

    def judged(self, verdict: str) -> None:
        """Writes the verdict: nothing goes on with the file."""
        self._lines.append(json.dumps(sealed({"verdict": verdict})).encode() + b"\n")

    def close(self) -> None:
        """Any number of times; the next `append` opens the file again."""
        self._lines.close()

    def __enter__(self) -> Transcript:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class FileTarget:
    """A file in place of an engine: it answers what was recorded, and nothing else."""

    def __init__(self, path: str | Path, vocab_size: int | None = None) -> None:
        self._path, self._vocab_size = Path(path), vocab_size
        self._transcript: Transcript | None = None

    def probe(self) -> Abilities:
        """What its answers report."""
        answers = [answer for _, answer in self._read().pairs() if answer.error is None]
        tops = [len(top) for answer in answers for top in answer.top_logprobs or ()]
        return Abilities(
            engine=f"recorded in {self._path.name}",
            tells_token_ids=any(answer.token_ids is not None for answer in answers),
            tells_logprobs=any(answer.logprobs is not None for answer in answers),
            num_top_logprobs=max(tops, default=0),
            tells_prompt_logprobs=any(answer.prompt_logprobs is not None for answer in answers),
            at_once=max(1, len(self._read().pairs())),  # nothing runs, so nothing limits it
            can_abort=any(answer.finish_reason == "abort" for answer in answers),
        )

    def pairs(self) -> list[Pair]:
        return self._read().pairs()

    def play(self, trace: Trace) -> Played:
        recorded = {request_text(request): answer for request, answer in self._read().pairs()}
        none = failed("not recorded")
        return Played(
            tuple(
                tuple(recorded.get(request_text(sample)) or none for sample in samples_of(request))
                for request in trace.requests
            )
        )

    def close(self) -> None:
        self._transcript = None

    def _read(self) -> Transcript:
        """TargetError without a file, RequestError that names an invalid line."""
        if self._transcript is None:
            if not self._path.is_file():
                raise TargetError(f"{self._path}: no such file, expected lines of requests and answers")
            self._transcript = Transcript(self._path, True, self._vocab_size)
            if not self._transcript.pairs():
                raise TargetError(f"{self._path}: no answers, expected lines of requests and answers")
        return self._transcript


def contradicts(earlier: Pair | None, later: Pair) -> bool:
    """Whether both are answers, and differ. A request that failed may be sent again."""
    if earlier is None or (earlier[1].error is not None and not earlier[1].is_refuted):
        return False
    return request_text(earlier[0]) != request_text(later[0]) or earlier[1] != later[1]


def read_line(line: bytes, where: str) -> dict[str, Any]:
    """Of any kind, its checksum checked, if it has one. RequestError that names the line."""
    raw = parse_line(decode_json(line, where, RequestError), where, with_nan=True)  # as Python writes it
    known = ({"request", "answer"}, {"request", "answer", FIELD}, {"end", FIELD}, {"verdict"}, {"verdict", FIELD})
    if not isinstance(raw, dict) or (set(raw) not in known and not line.startswith(RESULTS)):
        names = (", ".join(sorted(raw)) or "no fields") if isinstance(raw, dict) else type(raw).__name__
        raise RequestError(f"{where}: {names[:80]}, expected an object with request and answer")
    if FIELD in raw and (changed := damage(raw)):
        raise RequestError(f"{where}: {changed}; a line of your own needs none")
    return raw


def read_pair(raw: Mapping[str, Any], where: str, vocab_size: int | None) -> Pair:
    """RequestError that names the line."""
    try:
        request = request_from_json(raw["request"])
        for index, token_id in enumerate(request.prompt_token_ids):
            if vocab_size is not None and token_id >= vocab_size:
                raise RequestError(f"prompt_token_ids[{index}] {token_id}: expected 0 to {vocab_size - 1}")
        try:
            return request, answer_from_json(raw["answer"])
        except ImpossibleValueError as problem:
            return request, failed(f"{where}: {problem}", IMPOSSIBLE)
    except RequestError as problem:
        raise RequestError(f"{where}: {problem}") from None


def request_text(request: Request) -> str:
    """As JSON, in which lists and tuples are the same; without the tags in NOTED."""
    tags = {name: value for name, value in request.tags.items() if name not in NOTED}
    return json.dumps({**request_as_json(request), "tags": tags}, sort_keys=True)
