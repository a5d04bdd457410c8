r"""exec:COMMAND: an engine in any language, as a process that speaks JSON lines on its standard input and output.

The protocol, version 2. One JSON object a line, UTF-8; `>` is what the engine reads, `<` what it writes:

    > {"kind":"hello","protocol":2,"model":"path/to/checkpoint","vocab_size":65536}
    < {"kind":"hello","protocol":2,"engine":"swift-lfm 0.3","logprobs":true,"top_logprobs":5,
       "prompt_logprobs":false,"at_once":8,"abort":true}
    > {"kind":"request","request_id":"0:long","prompt_token_ids":[1,17],"max_tokens":4,"abort_after":1}
    > {"kind":"request","request_id":"1:short","prompt_token_ids":[1],"max_tokens":2}
    > {"kind":"run"}
    < {"kind":"answer","request_id":"1:short","token_ids":[5,7],"logprobs":[-0.1,-2.5],"finish_reason":"length"}
    < {"kind":"answer","request_id":"0:long","token_ids":[5],"logprobs":[-0.1],"finish_reason":"abort"}
    > {"kind":"bye"}

- Decoding is greedy, by exactly max_tokens tokens: an end-of-sequence token is one like any other.
- All requests since the last `run`, at most `at_once`, are to be in flight together; one answer line each, in any
  order.
- `abort_after`: cancel that request once it has so many new tokens (0: before the first), and answer with those that it
  has. Sent only if the hello says abort.
- `"prompt_logprobs":0` asks for those of the prompt's tokens, too, if the hello says that they can be reported.
- An engine with `"stops":true` in its hello also gets requests with `"stop":["..."]`: the text ends before that string,
  and the answer with the token that completes it, with finish_reason "stop".
- `cached_tokens` counts the tokens of the prompt that came from a cache: without it no hit is known to be one.
- `logprobs` and what else is not known is left out, never guessed. Log-probabilities are natural logarithms from the
  raw logits, as numbers; NaN and Infinity are no JSON. `top_logprobs` is a list of objects {"token id": logprob}.
- A request that can't be met: {"kind":"answer","request_id":"...","error":"why"}.
- Standard output is for the protocol only, each line flushed; everything else goes to standard error.

oracle/schemas/exec-protocol.schema.json has every field; exec_server.py beside this file is one to start from.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from lfm2np.checkpoint.strict_json import decode_text
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import DEAD, NO_ANSWER, Answer, Request, Trace, failed, shortened
from lfm2np.oracle.engines.records_json import checked_answer, parse_line, request_as_json
from lfm2np.oracle.engines.target import Abilities, Answers, Arrived, Played, TargetError, ignored, play_in_rounds
from lfm2np.system import kill_session, session, split_command

PROTOCOL = 2
PATIENCE = 120.0  # seconds to wait for a line
MAX_COMPLAINTS = 100
MAX_LINE = 64 * 2**20
KEPT_OF_A_LONG_LINE = 2**16  # enough to tell which request it answers
WAITING_LINES = 8
STDERR_LINES, STDERR_CHARACTERS = 10, 500
GRACE = 5.0  # seconds for a process to end by itself
SILENCE_AFTER_THE_END = 2.0  # seconds
HELLO_FIELDS: dict[str, type] = {
    "protocol": int,
    "engine": str,
    "logprobs": bool,
    "top_logprobs": int,
    "prompt_logprobs": bool,
    "at_once": int,
    "abort": bool,
}
OPTIONAL_FIELDS = {"stops": bool}  # false where it is missing
EXPECTED = {int: "a whole number", str: "text", bool: "true or false"}
ID_OF_A_BAD_LINE = re.compile(rb'"request_id"\s*:\s*("(?:[^"\\]|\\.)*")')


class ExecTarget:
    """An engine behind the protocol, started on first use.

    command     without "exec:"; split as a shell would, but run without a shell
    model       the checkpoint directory, as the engine gets it
    patience    seconds to wait for a line; an engine that takes longer is killed
    complaints  lines that break the protocol, which no answer shows: noise, answers to nothing
    """

    def __init__(self, command: str, model: str | Path, vocab_size: int, patience: float = PATIENCE) -> None:
        self.complaints: list[str] = []
        self._command, self._model, self._vocab_size, self._patience = command, str(model), vocab_size, patience
        self._process: LineProcess | None = None
        self._abilities: Abilities | None = None
        self._gone: str | None = None
        self._serial = itertools.count()  # makes ids unique: a late answer must not be taken for one of another run

    def probe(self) -> Abilities:
        """Starts the engine if it does not run, and exchanges hellos."""
        if self._gone is not None:
            raise TargetError(self._gone)
        if self._abilities is None:
            self._process = LineProcess(self._command, self._patience)
            hello = {"kind": "hello", "protocol": PROTOCOL, "model": self._model, "vocab_size": self._vocab_size}
            self._send(hello)
            try:
                self._abilities = read_hello(self._process.receive(time.monotonic()))
            except RequestError as problem:
                raise self._lose(self._process.complaint(str(problem))) from None
            except TargetError as problem:
                raise self._lose(str(problem)) from None
        return self._abilities

    def play(self, trace: Trace, arrived: Arrived = ignored) -> Played:
        """In runs of at most `at_once`. If the engine dies, requests without an answer get an error."""
        return play_in_rounds(trace, self.probe(), self._together, arrived)

    def close(self) -> None:
        """Says bye, waits a little, and kills what is left. It can't be used afterwards."""
        if self._process is not None and self._gone is None:
            self._send({"kind": "bye"})
            self._process.close(GRACE)
        if self._gone is None:
            self._gone = "the engine was closed"

    def _together(self, requests: Sequence[Request], came: Arrived) -> list[Answers]:
        """One run."""
        answers: dict[int, Answer] = {}
        try:
            if self._gone is None:
                self._run(requests, answers, came)
        except TargetError as problem:
            self._lose(str(problem))
        return [(answers.get(index) or failed(self._gone or "", DEAD),) for index in range(len(requests))]

    def _run(self, requests: Sequence[Request], answers: dict[int, Answer], came: Arrived) -> None:
        """One run, whose answers are added as they come: none is lost when the engine dies. TargetError then."""
        indices: dict[str, int] = {}  # by the id that the engine gets
        for index, request in enumerate(requests):
            name = f"{next(self._serial)}:{request.request_id}"
            indices[name] = index
            self._send(line_of(request, name))
        self._send({"kind": "run"})
        waiting, since = set(indices), time.monotonic()
        while waiting:
            assert self._process is not None
            answered, fields = read_answer(self._process.receive(since))
            if answered is None or answered not in indices:
                unasked = f"an answer to {answered!r}, not asked in this run"
                self._complain(fields if isinstance(fields, str) else unasked)
                continue
            index = indices[answered]
            if answered not in waiting:
                answers[index] = failed("answered twice in one run", NO_ANSWER)
                came(index, (answers[index],))
                continue
            answers[index] = answer_of(requests[index], fields)
            waiting.discard(answered)
            came(index, (answers[index],))
            since = time.monotonic()

    def _complain(self, what: str) -> None:
        if len(self.complaints) < MAX_COMPLAINTS:
            self.complaints.append(shortened(what))

    def _lose(self, how: str) -> TargetError:
        """Gives the engine up for good: what it would answer from now on can't be assigned to requests."""
        self._gone = f"{how}; it also wrote: {self.complaints[-1]}" if self.complaints else how
        if self._process is not None:
            self._process.close(0.0)
        return TargetError(self._gone)

    def _send(self, record: dict[str, Any]) -> None:
        assert self._process is not None
        self._process.send(json.dumps(record))


def answer_of(request: Request, fields: dict[str, Any] | str) -> Answer:
    """`fields`: as read_answer has them."""
    return failed(fields, NO_ANSWER) if isinstance(fields, str) else checked_answer(request, fields)


def line_of(request: Request, name: str) -> dict[str, Any]:
    """The line that sends a request, under the id `name`; without what no engine needs to know."""
    plain = replace(request, request_id=name, tags={}, prompt_text=None, cold=False, streamed=False)
    return {"kind": "request", **request_as_json(replace(plain, after=None, after_tokens=None, pause=0))}


def read_hello(line: Line) -> Abilities:
    """What the engine says about itself. RequestError for anything but a hello of this protocol."""
    fields = read_fields(line, "its first line")
    if fields.pop("kind", None) != "hello":
        raise RequestError(f"its first line {shown(line)}: expected kind hello")
    fields = dict.fromkeys(OPTIONAL_FIELDS, False) | fields
    known = HELLO_FIELDS | OPTIONAL_FIELDS
    for name, kind in known.items():
        if type(fields.get(name)) is not kind:
            value = repr(fields[name])[:80] if name in fields else "missing"
            raise RequestError(f"hello: {name} {value}, expected {EXPECTED[kind]}")
    for name in fields:
        if name not in known:
            raise RequestError(f"hello: {name[:80]!r}, expected no more than {', '.join(known)}")
    for name, least in (("top_logprobs", 0), ("at_once", 1)):
        if fields[name] < least:
            raise RequestError(f"hello: {name} {fields[name]}, expected at least {least}")
    if fields["protocol"] != PROTOCOL:
        raise RequestError(f"hello: protocol {fields['protocol']}, expected {PROTOCOL}")
    return Abilities(
        engine=shortened(fields["engine"], 200),
        tells_logprobs=fields["logprobs"],
        num_top_logprobs=fields["top_logprobs"],
        tells_prompt_logprobs=fields["prompt_logprobs"],
        at_once=fields["at_once"],
        can_abort=fields["abort"],
        takes_stops=fields["stops"],
        slots=fields["at_once"],
    )


def read_answer(line: Line) -> tuple[str | None, dict[str, Any] | str]:
    """The id of an answer and its fields; for a bad line the id, if it can be read, and what is wrong."""
    try:
        fields = read_fields(line, "a line")
    except RequestError as problem:
        return id_of_a_bad_line(line.content), f"{problem}: {shown(line)}"
    kind, name = fields.pop("kind", None), fields.pop("request_id", None)
    if kind != "answer" or not isinstance(name, str):
        return None, f"expected a line of kind answer with a request_id: {shown(line)}"
    return name, fields


def read_fields(line: Line, what: str) -> dict[str, Any]:
    """The object on a line. RequestError if there is none."""
    if line.fault:
        raise RequestError(f"{what}: {line.fault}")
    fields = parse_line(decode_text(line.content, what, RequestError), what)
    if not isinstance(fields, dict):
        raise RequestError(f"{what}: {type(fields).__name__}, expected a JSON object")
    return fields


def id_of_a_bad_line(content: bytes) -> str | None:
    """So that NaN in an answer is reported as the error of that answer."""
    match = ID_OF_A_BAD_LINE.search(content)
    if match is None:
        return None
    try:
        name = json.loads(match[1])
    except ValueError:
        return None
    return name if isinstance(name, str) else None


def shown(line: Line) -> str:
    return repr(shortened(line.content[:400].decode(errors="replace"), 100))


# --- the process


@dataclass(frozen=True)
class Line:
    """One line without its end. With a `fault`, `content` is only its beginning."""

    content: bytes
    fault: str | None = None


class LineProcess:
    """A child process that exchanges lines, and may misbehave: hang, die, flood, leave children behind. It gets
    `patience` seconds for a line.

    Three threads keep the pipes from blocking: one writes what is to be sent, one reads whole lines, one drains stderr
    and keeps its end for messages. The process leads its own session, and is ended with all that it started.

    RequestError for an invalid command, TargetError if it can't be started.
    """

    def __init__(self, command: str, patience: float) -> None:
        if not patience > 0:
            raise RequestError(f"patience {patience}: expected seconds, more than 0")
        self.command, self.patience = command, min(patience, threading.TIMEOUT_MAX)
        self._process = start(command)
        self._lines: queue.Queue[Line | None] = queue.Queue(maxsize=WAITING_LINES)  # None: there will be no more
        self._to_send: queue.Queue[bytes | None] = queue.Queue()
        self._stderr: deque[bytes] = deque(maxlen=STDERR_LINES)
        self._closing = threading.Event()
        self._killed = False
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._stderr_thread = start_thread(self._drain_stderr, process.stderr)
        self._threads = [
            self._stderr_thread,
            start_thread(self._read_lines, process.stdout),
            start_thread(self._write_lines, process.stdin),
        ]

    def send(self, line: str) -> None:
        """Never waits: a process that does not read is noticed when it does not answer."""
        self._to_send.put(line.encode() + b"\n")

    def receive(self, since: float) -> Line:
        """The next line. TargetError if the process is gone, or silent since then (time.monotonic) for too long."""
        deadline = since + self.patience
        while True:
            ended = self._process.poll() is not None  # its children may keep the pipe open and write nothing
            until = min(deadline, time.monotonic() + SILENCE_AFTER_THE_END) if ended else deadline
            wait = max(0.0, until - time.monotonic())
            try:
                line = self._lines.get(timeout=wait if ended else min(wait, 0.2))
            except queue.Empty:
                if ended or time.monotonic() >= deadline:
                    raise TargetError(self.complaint("" if ended else f"no answer in {self.patience:g} s")) from None
                continue
            if line is None:
                self._lines.put(None)  # for the next call
                raise TargetError(self.complaint(""))
            return line

    def complaint(self, what: str) -> str:
        """What it did, how it ended if it has, and the end of its stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not what:
                self._process.wait(timeout=1.0)
        code = self._process.poll()
        if code is None:
            parts = [what or "it closed its output, and still runs"]
        else:
            parts = [*([what] if what else []), f"it ended {how_it_ended(code)}"]
            self._kill()  # its children, which would keep stderr open
            self._stderr_thread.join(timeout=1.0)
        lines = [shortened(line.decode(errors="replace"), STDERR_CHARACTERS) for line in list(self._stderr)]
        last = " | ".join(line for line in lines if line)
        last = last if len(last) <= STDERR_CHARACTERS else f"...{last[-STDERR_CHARACTERS:]}"
        parts.append(f"last on stderr: {last}" if last else "nothing on stderr")
        return f"exec:{shortened(self.command, 200)}: {'; '.join(parts)}"

    def close(self, grace: float = GRACE) -> None:
        """Closes its input, and after `grace` seconds kills it and all that it started. Any number of times."""
        self._to_send.put(None)
        end = time.monotonic() + grace
        while self._process.poll() is None and time.monotonic() < end:
            self._discard_lines()
            time.sleep(0.01)
        self._closing.set()
        self._kill()
        for thread in self._threads:
            thread.join(timeout=1.0)  # one may stay, if another process keeps the pipe open

    def _discard_lines(self) -> None:
        """At most as many as the queue holds: they are not needed any more, and the process must not block on them."""
        with contextlib.suppress(queue.Empty):
            for _ in range(WAITING_LINES):
                if self._lines.get_nowait() is None:
                    self._lines.put(None)
                    return

    def _kill(self) -> None:
        """The whole session, once, as its number may be reused later. Waits for its leader."""
        if self._killed:
            return
        self._killed = True
        kill_session(self._process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=GRACE)

    # --- the threads

    def _write_lines(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the process is gone: the reader will notice
            while (line := self._to_send.get()) is not None:
                pipe.write(line)
                pipe.flush()
        with contextlib.suppress(OSError):
            pipe.close()

    def _read_lines(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError), pipe:
            while content := pipe.readline(MAX_LINE + 1):
                if not self._put(checked_line(content, pipe)):
                    return
        self._put(None)

    def _put(self, line: Line | None) -> bool:
        """Whether it is still needed. Waits while the queue is full, so that a flood does not fill the memory."""
        while not self._closing.is_set():
            with contextlib.suppress(queue.Full):
                self._lines.put(line, timeout=0.1)
                return True
        return False

    def _drain_stderr(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError), pipe:
            while line := pipe.readline(4096):
                self._stderr.append(line)


def start(command: str) -> subprocess.Popen[bytes]:
    """The process of a command line, without a shell."""
    try:
        words = split_command(command)
    except ValueError as problem:
        raise RequestError(f"exec:{command}: {problem}, expected a command as a shell would split it") from None
    if not words:
        raise RequestError("exec: without a command, expected exec:COMMAND")
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **session(),
        )
    except (OSError, ValueError) as problem:  # ValueError: a NUL in a word
        raise TargetError(f"exec:{command}: can't be started: {problem}") from None


def start_thread(work: Callable[[IO[bytes]], None], pipe: IO[bytes]) -> threading.Thread:
    thread = threading.Thread(target=work, args=(pipe,), daemon=True)
    thread.start()
    return thread


def checked_line(content: bytes, pipe: IO[bytes]) -> Line:
    """What readline() returned, whole or with its fault. The rest of a line that is too long is skipped."""
    if content.endswith(b"\n"):
        return Line(content[:-1])
    if len(content) <= MAX_LINE:
        return Line(content[:KEPT_OF_A_LONG_LINE], "half a line, and then its output ended")
    while (rest := pipe.readline(2**20)) and not rest.endswith(b"\n"):
        pass
    return Line(content[:KEPT_OF_A_LONG_LINE], f"a line of more than {MAX_LINE} bytes")


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
