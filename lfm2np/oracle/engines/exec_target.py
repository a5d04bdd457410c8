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
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lfm2np.errors import Lfm2npError, RequestError
from lfm2np.oracle.engines.records import DEAD, NO_ANSWER, Answer, Request, Trace, failed, shortened
from lfm2np.oracle.engines.records_json import checked_answer, read_switch, read_text, request_as_json, whole_number
from lfm2np.oracle.engines.target import Abilities, Answers, Played, TargetError, play_in_rounds
from lfm2np.system import kill_session, session, split_command

PROTOCOL = 2
PATIENCE = 120.0  # seconds to wait for an answer
MAX_LINE = 64 * 2**20
STDERR_BYTES = 500  # that a message has of it
GRACE, FAREWELL = 5.0, 1.0  # seconds for a process to end by itself: after a bye, and after it failed
ID_OF_A_BAD_LINE = re.compile(rb'"request_id"\s*:\s*"([^"\\]*)"')
HELLO: dict[str, Callable[[Any, str], Any]] = {  # the fields of an engine's hello
    "protocol": whole_number,
    "engine": read_text,
    "logprobs": read_switch,
    "top_logprobs": whole_number,
    "prompt_logprobs": read_switch,
    "at_once": lambda value, name: whole_number(value, name, 1),
    "abort": read_switch,
    "stops": read_switch,
}


class ExecTarget:
    """An engine behind the protocol, started on first use.

    command     without "exec:"; split as a shell would, but run without a shell
    model       the checkpoint directory, as the engine gets it
    patience    seconds to wait for an answer; an engine that takes longer is killed
    """

    def __init__(self, command: str, model: str | Path, vocab_size: int, patience: float = PATIENCE) -> None:
        if not patience > 0:
            raise RequestError(f"patience {patience}: expected seconds, more than 0")
        self.command, self.patience = command, patience
        self._hello = {"kind": "hello", "protocol": PROTOCOL, "model": str(model), "vocab_size": vocab_size}
        self._process: LineProcess | None = None
        self._abilities: Abilities | None = None
        self._gone: str | None = None
        self._noise = ""  # the last line that broke the protocol, which no answer shows
        self._serial = itertools.count()  # makes ids unique: a late answer must not be taken for one of another run

    def probe(self) -> Abilities:
        """Starts the engine if it does not run, and exchanges hellos."""
        if self._gone is not None:
            raise TargetError(self._gone)
        if self._abilities is None:
            self._process = process = LineProcess(self.command)
            try:
                with process.patient(self.patience):
                    process.send([self._hello])
                    self._abilities = read_hello(process.receive())
            except Lfm2npError as problem:
                raise self._lost(process, problem) from None
        return self._abilities

    def play(self, trace: Trace) -> Played:
        """In runs of at most `at_once`. If the engine dies, requests without an answer get an error."""
        return play_in_rounds(trace, self.probe(), self._together)

    def close(self) -> None:
        """Says bye, waits a little, and kills what is left. It can't be used afterwards."""
        if self._process is not None and self._gone is None:
            self._process.close(GRACE, is_friendly=True)
        self._gone = self._gone or "the engine was closed"

    def _together(self, requests: Sequence[Request]) -> list[Answers]:
        """One run, whose answers are kept as they come: none is lost when the engine dies."""
        answers: dict[int, Answer] = {}
        process, names = self._process, [f"{next(self._serial)}:{request.request_id}" for request in requests]
        assert process is not None
        try:
            if self._gone is None:
                with process.patient(self.patience):
                    process.send([*map(line_of, requests, names), {"kind": "run"}])
            while self._gone is None and len(answers) < len(requests):
                with process.patient(self.patience):
                    index, fields = self._next_answer(process, names)
                if index in answers:
                    fields = {"error": "answered twice in one run", "kind": NO_ANSWER}
                answers[index] = checked_answer(requests[index], fields)
        except TargetError as problem:
            self._lost(process, problem)
        return [(answers.get(index) or failed(self._gone or "", DEAD),) for index in range(len(requests))]

    def _next_answer(self, process: LineProcess, names: Sequence[str]) -> tuple[int, dict[str, Any]]:
        """Which of the run's requests is answered, and the answer's fields; all other lines are noise."""
        while True:
            name, fields = read_answer(process.receive())
            if name in names:
                return names.index(name), fields
            what = fields.get("error") if name is None else f"an answer to {name!r}, not asked in this run"
            self._noise = f"; it also wrote: {shortened(str(what))}"

    def _lost(self, process: LineProcess, problem: Exception) -> TargetError:
        """Gives the engine up for good: what it would answer from now on can't be assigned to requests."""
        why = "; ".join(filter(None, (str(problem), process.close(FAREWELL))))
        self._gone = f"exec:{shortened(self.command, 200)}: {why}{self._noise}"
        return TargetError(self._gone)


def line_of(request: Request, name: str) -> dict[str, Any]:
    """The line that sends a request, under the id `name`; without what no engine needs to know."""
    plain = replace(request, request_id=name, tags={}, prompt_text=None, cold=False, streamed=False)
    return {"kind": "request", **request_as_json(replace(plain, after=None, after_tokens=None, pause=0))}


def read_hello(line: bytes) -> Abilities:
    """What the engine says about itself. RequestError for anything but a hello of this protocol."""
    fields = {"stops": False, **read_fields(line, "its first line")}
    if fields.pop("kind", None) != "hello":
        raise RequestError(f"its first line {shown(line)}: expected kind hello")
    if other := fields.keys() ^ HELLO.keys():
        raise RequestError(f"hello: {', '.join(sorted(other))[:80]}: expected exactly {', '.join(HELLO)}")
    for name, read in HELLO.items():
        read(fields[name], f"hello: {name}")
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


def read_answer(line: bytes) -> tuple[Any, dict[str, Any]]:
    """The id of an answer and its fields; of a bad line the id, if it can be read, and what is wrong as its error.

    So what C's printf makes of NaN is an error of that answer.
    """
    try:
        fields = read_fields(line, "a line")
    except RequestError as problem:
        match = ID_OF_A_BAD_LINE.search(line)
        name = None if match is None else match[1].decode(errors="replace")
        return name, {"error": str(problem), "kind": NO_ANSWER}
    kind = fields.pop("kind", None)
    if kind != "answer":
        return None, {"error": f"a line of kind {kind!r}, expected an answer: {shown(line)}"}
    return fields.pop("request_id", None), fields


def read_fields(line: bytes, what: str) -> dict[str, Any]:
    """The object on a line, with NaN and Infinity, which no answer may have. RequestError if there is none."""
    try:
        fields = json.loads(line.decode())
    except (ValueError, RecursionError) as problem:  # a UnicodeDecodeError, too
        raise RequestError(f"{what} {shown(line)}: not JSON: {problem}") from None
    if not isinstance(fields, dict):
        raise RequestError(f"{what} {shown(line)}: {type(fields).__name__}, expected a JSON object")
    return fields


def shown(line: bytes) -> str:
    return repr(shortened(line[:400].decode(errors="replace"), 100))


# --- the process


class LineProcess:
    """A child process that exchanges lines, and leads a session of its own, so that it ends with all that it started.

    Its stderr goes to a file, for messages. RequestError for an invalid command, TargetError if it can't be started.
    """

    def __init__(self, command: str) -> None:
        try:
            words = split_command(command)
        except ValueError as problem:
            raise RequestError(f"exec:{command}: {problem}, expected a command as a shell would split it") from None
        if not words:
            raise RequestError("exec: without a command, expected exec:COMMAND")
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr}
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(words, **pipes, **session())
        except (OSError, ValueError) as problem:  # ValueError: a NUL in a word
            raise TargetError(f"exec:{command}: can't be started: {problem}") from None
        self._late = ""  # that it was killed for its silence

    @contextlib.contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Kills it if what is done inside takes longer: then no read and no write waits any more."""

        def kill() -> None:
            self._late = f"no answer in {seconds:g} s"
            kill_session(self.process)

        timer = threading.Timer(seconds, kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def send(self, records: Sequence[Mapping[str, Any]]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone: the reader will notice
            self.process.stdin.write("".join(json.dumps(record) + "\n" for record in records).encode())
            self.process.stdin.flush()

    def receive(self) -> bytes:
        """The next line. TargetError if there is none, or it is too long."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline(MAX_LINE)
        if len(line) == MAX_LINE:
            raise TargetError(f"a line of more than {MAX_LINE} bytes")
        if not line.endswith(b"\n"):
            raise TargetError(f"half a line, and then its output ended: {shown(line)}" if line else "")
        return line

    def close(self, grace: float, is_friendly: bool = False) -> str:
        """After `grace` seconds kills it and all that it started. How it ended, and the end of its stderr.

        is_friendly  says bye before
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        if is_friendly:
            with self.patient(grace), contextlib.suppress(OSError):
                self.send([{"kind": "bye"}])
                self.process.stdin.close()
        try:
            how = self._late or f"it ended {how_it_ended(self.process.wait(grace))}"
        except subprocess.TimeoutExpired:
            how = "it still ran, and was ended"
        kill_session(self.process)
        self.process.wait()
        self._stderr.seek(-min(self._stderr.seek(0, 2), STDERR_BYTES), 2)
        last = shortened(self._stderr.read().decode(errors="replace").strip().replace("\n", " | "), 2 * STDERR_BYTES)
        for file in (self.process.stdin, self.process.stdout, self._stderr):
            with contextlib.suppress(OSError):
                file.close()
        return f"{how}; {f'last on stderr: {last}' if last else 'nothing on stderr'}"


def how_it_ended(code: int) -> str:
    try:
        return f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
