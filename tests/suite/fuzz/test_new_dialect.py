"""A dialect is one value: no other file knows its name, and a new one works through target, fuzz run and script."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_here import model

import lfm2np
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.commands.cli.shared.format_options import taken_format
from lfm2np.oracle.engines import dialects
from lfm2np.oracle.engines.dialects.dialect import Dialect, Extras, Field, Location, Metrics, sampling_fields
from lfm2np.oracle.engines.http_target import HttpTarget
from lfm2np.oracle.engines.records import Request, Trace, greedy
from lfm2np.suite.fuzz.campaign import Failure
from lfm2np.suite.fuzz.draw_traces import alphabet_of
from lfm2np.suite.fuzz.hand_over import Context, hand_over
from lfm2np.suite.fuzz.judge import ByTruth, Finding
from lfm2np.suite.fuzz.watched import WatchedServer

pytestmark = pytest.mark.rounding
A = alphabet_of(model().tokenizer, 300)
PACKAGE = Path(lfm2np.__file__).parent
NAMES = "|".join(re.escape(each.name) for each in dialects.DIALECTS if each.name != "text")  # also a field of answers
SINGLED_OUT = re.compile(
    r"import\b[^\n]*\b(VLLM|SGLANG|LLAMA_CPP|TEXT)\b"
    r"|\bdialects(\.| import [^\n]*)\b(openai|sglang|llama_cpp)\b"
    r"|dialect\.name\b[^\n]*(==|!=| in )"
    rf"|(==|!=| in )[^\n]*[\"']({NAMES})[\"']|[\"']({NAMES})[\"'] in "
)


def sources() -> list[Path]:
    folders = (("oracle", "engines"), ("suite", "fuzz"), ("commands", "cli"))
    found = [list(PACKAGE.joinpath(*folder).rglob("*.py")) for folder in folders]
    assert all(found)
    return [path for paths in found for path in paths if path.parent.name != "dialects"]


def test_no_other_file_imports_a_dialect_or_compares_its_name() -> None:
    """In any other place a new dialect would have to be added, too."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sources()}
    assert {name: found[0] for name, text in texts.items() if (found := SINGLED_OUT.search(text))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from lfm2np.oracle.engines.dialects import VLLM",
        "from lfm2np.oracle.engines.dialects import DIALECTS, sglang",
        "from lfm2np.oracle.engines.dialects.llama_cpp import request",
        "import lfm2np.oracle.engines.dialects.openai",
        "if dialect.name == other: pass",
        "if engine.startswith('x') and kind == 'llama.cpp': pass",
        "if 'sglang' in (kind, other): pass",
    ],
)
def test_a_file_that_does_is_seen(source: str) -> None:
    assert SINGLED_OUT.search(source)


# A fifth dialect, which is nothing but this value.


def request(request: Request, extras: Extras) -> dict[str, Any]:
    parameters: dict[str, Any] = {"count": request.max_tokens, "temperature": 0.0, **sampling_fields(request)}
    return {"ids": list(request.prompt_token_ids), "parameters": parameters}


def join(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    pairs = [pair for event in events for pair in event["new"]]
    return {**events[-1], "new": pairs, "shown": "".join(event["shown"] for event in events)}


QUILL = Dialect(
    name="quill",
    path="/quill",
    takes_token_ids=True,
    extras=(Extras(prompt_logprobs=False),),
    request=request,
    fields=(
        Field("token_ids", "new", "list of `[id, number]`", lambda pairs, reading: [pair[0] for pair in pairs]),
        Field("logprobs", "new", "list of `[id, number]`", lambda pairs, reading: [pair[1] for pair in pairs]),
        Field("finish_reason", "end", "text"),
        Field("text", "shown", "text"),
    ),
    join=join,
    reproducer="""def answer(replies):
    pairs = [pair for reply in replies for pair in reply["new"]]
    return [token for token, _ in pairs], [logprob for _, logprob in pairs]""",
    event_ids=lambda event: [token for token, _ in event["new"]],
    takes_stops=True,
    takes_seeds=True,
    ignores_eos=True,
    raw_logprobs=True,
    gguf_format="bfloat16",
    version=Location("/about", ("build", "number")),
    slots=Location("/about", ("slots",)),
    longest=Location("/about", ("longest", 1)),
    cached=("cached",),
    metrics=Metrics(active=("quill:active",)),
)


class Handler(BaseHTTPRequestHandler):
    server: Quill

    def do_GET(self) -> None:
        if self.path == "/about":
            self.send({"build": {"number": "7"}, "slots": 3, "longest": [0, 90]})
        elif self.path == "/metrics":
            self.send("quill:active 0\n", "text/plain")
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != QUILL.path:
            return self.send_error(404)
        pieces = self.server.pieces(body["ids"], body["parameters"])
        if not body.get("stream"):
            return self.send(join(pieces))
        return self.send("".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces), "text/event-stream")

    def send(self, content: Any, kind: str = "application/json") -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


class Quill(ThreadingHTTPServer):
    """Our own engine behind that dialect. `wrong`: it adds to each log-probability."""

    daemon_threads, block_on_close = True, False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.wrong = threading.Lock(), 0.0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def pieces(self, ids: list[int], parameters: dict[str, Any]) -> list[dict[str, Any]]:
        names = {name: value for name, value in parameters.items() if name != "count"}
        params = lfm2np.SamplingParams(**names, max_tokens=parameters["count"], ignore_eos=True, logprobs=0)
        with self.lock:
            engine = lfm2np.Engine(model())
            engine.add_request("q", ids, params)
            while engine.has_unfinished:
                (output,) = engine.step() or (None,)
        assert output is not None
        (sample,) = output.outputs
        pairs = [[each.token_id, each.logprob + self.wrong] for each in sample.logprobs]
        fields = {"end": sample.finish_reason, "cached": 0}
        return [
            *({**fields, "new": [pair], "shown": ""} for pair in pairs),
            {**fields, "new": [], "shown": sample.text},
        ]


@pytest.fixture
def quill(monkeypatch: pytest.MonkeyPatch) -> Iterator[Quill]:
    monkeypatch.setattr(dialects, "DIALECTS", (*dialects.DIALECTS, QUILL))
    server = Quill()
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


TRACE = Trace(
    (
        greedy("", A[:9], 6),
        greedy("", A[:12], 4, after=0, after_tokens=2, streamed=True),
        greedy("", A[:12], 4, abort_after=1),
        greedy("", A[:4], 3, after=0, temperature=1.0, seed=2),
        greedy("", A[:3], 6, stop=model().tokenizer.decode(A[:1])),
    )
)


def test_a_target_finds_a_new_dialect_and_requests_in_it(quill: Quill) -> None:
    with contextlib.closing(HttpTarget(quill.url, model().tokenizer, retries=0)) as target:
        abilities = target.probe()
        ((answer,),) = target.play(Trace((greedy("a", A[:4], 3, case="case"),))).answers
    assert abilities.engine == "quill dialect, version 7"
    assert (abilities.tells_token_ids, abilities.tells_logprobs, abilities.slots) == (True, True, 3)
    assert answer.error is None and len(answer.token_ids or ()) == len(answer.logprobs or ()) == 3


def test_a_fuzz_run_and_its_script_work_in_a_new_dialect(quill: Quill, tmp_path: Path) -> None:
    with contextlib.closing(WatchedServer(quill.url, model().tokenizer, None, 20.0)) as player:
        abilities = player.probe()
        assert (abilities.takes_sampling, abilities.takes_samples, abilities.takes_stops) == (True, False, True)
        assert (abilities.longest, abilities.slots) == (90, 3)
        played = player.play(TRACE)
        assert ByTruth(model(), "float32").finding(TRACE, played) is None
        assert [len(answers) for answers in played.answers] == [1] * 5 and played.answers[2][0].is_aborted
        failure = Failure(TRACE, played, Finding("wrong", "none", 0), (1, 1), TRACE, 1, 0.0, 0.0)
        context = Context(quill.url, abilities.engine, "float32", "", "model", "lfm2np fuzz")
        script = hand_over(tmp_path, failure, ByTruth(model(), context.format_name), player, context) / "reproduce.py"
        assert scripted(script, quill.url) == (0, "all as it should be\nwrong in 0 of 1\n")
        quill.wrong = -0.5
        finding = ByTruth(model(), "float32").finding(TRACE, player.play(TRACE))
    assert finding is not None and finding.kind == "wrong"
    assert scripted(script, quill.url)[0] == 1


def scripted(path: Path, url: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-I", str(path), url], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_format_auto_takes_the_hint_of_a_new_dialect(quill: Quill) -> None:
    tensors = {
        "m": StoredTensor("m", "Q8_0", np.zeros((2, 34), np.uint8)),
        "model.embedding_norm.weight": StoredTensor("n", "F32", np.zeros(2, np.float32)),
    }
    taken = taken_format(tensors, True, False, "quill dialect, version 7")
    assert taken.name == "bfloat16" and "it multiplies them by bfloat16" in taken.why
