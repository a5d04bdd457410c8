"""The HTTP server of these tests: on 127.0.0.1, it plays a dialect over our own engine, or anything, and misbehaves."""

import contextlib
import copy
import functools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import lfm2np
from lfm2np.engine.outputs import RequestOutput
from lfm2np.oracle.engines.dialects import LLAMA_CPP, SGLANG, TEXT, VLLM
from lfm2np.oracle.engines.dialects.dialect import Dialect, Extras
from lfm2np.oracle.engines.http_target import HttpTarget
from lfm2np.oracle.engines.records import Answer, Ids, Request, greedy

LOCK = threading.Lock()
TEXTS = ("The cat sat", "one two", "pat ->")
Reply = dict[str, Any] | None
Play = Callable[[str, dict[str, Any]], Reply]


@functools.cache
def model() -> lfm2np.Model:
    return lfm2np.load(numerics="float32")


@functools.cache
def computed(ids: Ids, max_tokens: int, ignore_eos: bool, stop: tuple[str, ...] = ()) -> RequestOutput:
    """Our own greedy answer."""
    with LOCK:
        engine = lfm2np.Engine(model())
        limits: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": ignore_eos, "stop": stop}
        params = lfm2np.SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=0, **limits)
        engine.add_request("q", list(ids), params)
        while engine.has_unfinished:
            (output,) = engine.step() or (None,)
        assert output is not None
        return output


def said(ids: Ids, max_tokens: int, stop: tuple[str, ...] = ()) -> Answer:
    """The same, as an answer."""
    (only,) = computed(ids, max_tokens, True, stop).outputs
    logprobs = tuple(each.logprob for each in only.logprobs or ())
    return Answer(tuple(only.token_ids), logprobs, finish_reason=only.finish_reason, text=only.text)


def request_of(name: str, text: str = TEXTS[0], max_tokens: int = 4, **more: Any) -> Request:
    return greedy(name, model().tokenizer.encode(text), max_tokens, prompt_text=text, **more)


def play_vllm(path: str, body: dict[str, Any]) -> Reply:
    if path == "/version":
        return {"version": "0.33.0"}
    if path != "/v1/completions":
        return None
    output = computed(tuple(body["prompt"]), body["max_tokens"], body["ignore_eos"])
    (completion,) = output.outputs
    choice: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_token_ids": body["prompt"],
        "finish_reason": completion.finish_reason,
        "logprobs": {
            "tokens": [f"token_id:{i}" for i in completion.token_ids],
            "token_logprobs": [each.logprob for each in completion.logprobs],
            "top_logprobs": [{f"token_id:{i}": value for i, value in each.top} for each in completion.logprobs],
        },
    }
    if "prompt_logprobs" in body:
        entries = [{str(each.token_id): {"logprob": each.logprob}} for each in output.prompt_logprobs[1:]]
        choice["prompt_logprobs"] = [None, *entries]
    return {"choices": [choice], "usage": usage(output)}


def play_sglang(path: str, body: dict[str, Any]) -> Reply:
    if path == "/server_info":
        return {"version": "0.5.23", "max_running_requests": 200}
    if path != "/generate":
        return None
    sampling = body["sampling_params"]
    output = computed(tuple(body["input_ids"]), sampling["max_new_tokens"], sampling["ignore_eos"])
    (completion,) = output.outputs
    meta: dict[str, Any] = {
        "finish_reason": {"type": completion.finish_reason, "length": len(completion.token_ids)},
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": len(completion.token_ids),
        "output_token_logprobs": [[each.logprob, each.token_id, None] for each in completion.logprobs],
        "output_top_logprobs": [[[value, i, None] for i, value in each.top] for each in completion.logprobs],
        "input_token_logprobs": [],
    }
    if body["logprob_start_len"] == 0:
        entries = [[each.logprob, each.token_id, None] for each in output.prompt_logprobs[1:]]
        meta["input_token_logprobs"] = [[None, body["input_ids"][0], None], *entries]
    return {"text": completion.text, "output_ids": list(completion.token_ids), "meta_info": meta}


def play_llama(path: str, body: dict[str, Any]) -> Reply:
    if path == "/props":
        return {"build_info": "b1-0c1e570", "total_slots": 32}
    if path != "/completion":
        return None
    output = computed(tuple(body["prompt"]), body["n_predict"], body["ignore_eos"])
    (completion,) = output.outputs
    entries = [
        {
            "id": each.token_id,
            "logprob": each.logprob,
            "top_logprobs": [{"id": i, "logprob": value} for i, value in each.top],
        }
        for each in completion.logprobs
    ]
    return {
        "content": completion.text,
        "tokens": list(completion.token_ids),
        "stop_type": "eos" if completion.finish_reason == "stop" else "limit",
        "tokens_evaluated": len(body["prompt"]),
        "tokens_predicted": len(completion.token_ids),
        "truncated": False,
        "completion_probabilities": entries,
    }


def play_mlx(path: str, body: dict[str, Any]) -> Reply:
    if path != "/v1/completions" or not isinstance(body["prompt"], str) or type(body.get("logprobs")) is not bool:
        return None
    output = computed(tuple(model().tokenizer.encode(body["prompt"])), body["max_tokens"], False)
    (completion,) = output.outputs
    content = [{"id": each.token_id, "logprob": each.logprob} for each in completion.logprobs]
    choice = {"text": completion.text, "finish_reason": completion.finish_reason, "logprobs": {"content": content}}
    return {"choices": [choice], "usage": usage(output), "system_fingerprint": "0.32.2-0.32.4"}


def play_text(path: str, body: dict[str, Any]) -> Reply:
    """A server that knows OpenAI's fields only, and tells text."""
    if path == "/v1/models":
        return {"data": [{"id": "only"}]}
    if path != "/v1/completions" or not {"prompt", "max_tokens", "temperature", "model", "stream"} >= body.keys():
        return None
    if body.get("model") != "only" or not isinstance(body["prompt"], str):
        return None
    output = computed(tuple(model().tokenizer.encode(body["prompt"])), body["max_tokens"], False)
    return {"choices": [{"text": output.outputs[0].text, "finish_reason": "length"}]}


def usage(output: RequestOutput) -> dict[str, int]:
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(output.outputs[0].token_ids),
    }


PLAYS: dict[str, tuple[Dialect, Play]] = {
    "vllm": (VLLM, play_vllm),
    "sglang": (SGLANG, play_sglang),
    "llama.cpp": (LLAMA_CPP, play_llama),
    "mlx": (TEXT, play_mlx),
    "text": (TEXT, play_text),
}
TELLING = ("vllm", "sglang", "llama.cpp", "mlx")  # of more than text


def reply_of(name: str, request: Request) -> dict[str, Any]:
    """A response with all that it may hold."""
    dialect, play = PLAYS[name]
    return copy.deepcopy(play(dialect.path, dialect.request(request, Extras())) or {})


class Handler(BaseHTTPRequestHandler):
    server: "Player"

    def do_GET(self) -> None:
        self.handle_one({})

    def do_POST(self) -> None:
        self.handle_one(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def handle_one(self, body: dict[str, Any]) -> None:
        self.server.seen.append((self.path, dict(self.headers), body))
        with contextlib.suppress(ConnectionError):
            if self.server.trouble is None or not self.server.trouble(self):
                self.play(body)

    def play(self, body: dict[str, Any]) -> None:
        reply = self.server.play(self.path, body)
        if reply is None:
            self.say({"error": {"message": "no such thing"}}, 404)
        elif body.get("stream"):
            self.stream(
                reply, is_probe=2 in (body.get("max_tokens"), body.get("sampling_params", {}).get("max_new_tokens"))
            )
        else:
            self.server.spoil(reply)
            self.say(reply)

    def say(self, reply: Any, status: int = 200, **headers: str) -> None:
        content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        chosen = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        for name, value in (chosen | {k.replace("_", "-"): v for k, v in headers.items()}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def stream(self, reply: dict[str, Any], is_probe: bool) -> None:
        """All but the last token, then comments until the client leaves; nothing more in a probe."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        choice = reply["choices"][0] if "choices" in reply else reply
        ids = choice.get("token_ids") or choice.get("tokens") or choice.get("output_ids") or [0] * 9
        try:
            for count, token_id in enumerate(ids[:-1], 1):
                piece = {"token_ids": [token_id], "tokens": [token_id], "text": "x"}
                if "output_ids" in reply:  # SGLang repeats what came before
                    piece = {"text": "x", "output_ids": ids[:count], "meta_info": {"completion_tokens": count}}
                event = {"choices": [piece]} if "choices" in reply else piece
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            while not is_probe and not self.server.freed.wait(0.01):
                self.wfile.write(b": still here\n\n")
        except ConnectionError:
            self.server.left.set()

    def log_message(self, *args: object) -> None:
        pass


class Player(ThreadingHTTPServer):
    """trouble   called first; True if it has dealt with the request
    spoil     changes a reply
    freed     set at the end, so that no handler waits longer
    left      set when a client closed a stream
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, play: Play) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.play = play
        self.trouble: Callable[[Handler], bool] | None = None
        self.spoil: Callable[[dict[str, Any]], object] = lambda reply: None
        self.freed, self.left, self.reached = threading.Event(), threading.Event(), threading.Event()
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that left


@contextlib.contextmanager
def playing(play: str | Play) -> Iterator[Player]:
    """A dialect by its name, or a function of path and body."""
    player = Player(PLAYS[play][1] if isinstance(play, str) else play)
    thread = threading.Thread(target=lambda: player.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield player
    finally:
        player.freed.set()
        player.shutdown()
        player.server_close()
        thread.join()


def target_of(player: Player, **options: Any) -> HttpTarget:
    return HttpTarget(player.url, model().tokenizer, **{"retries": 1, "backoff": 0.01, "timeout": 20.0} | options)
