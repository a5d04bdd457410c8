"""An engine behind the protocol of exec_target.py: the model for authors in other languages.

    python -m lfm2np.oracle.example_engine [--numerics exact|float32|float64|bfloat16]

It reads lines until `run`, computes those requests together, answers each, and reads on.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import lfm2np
from lfm2np.arithmetic import NAMES

TOP, AT_ONCE = 5, 64


def main() -> None:
    parser = argparse.ArgumentParser(description="lfm2np's engine behind the exec protocol")
    parser.add_argument("--numerics", default="exact", choices=NAMES)
    serve(parser.parse_args().numerics)


def serve(numerics: str) -> None:
    hello = read()
    model = lfm2np.load(hello["model"], numerics)
    if hello["protocol"] != 2 or hello["vocab_size"] != model.config.vocab_size:
        sys.exit(f"{hello}: expected protocol 2 and vocab_size {model.config.vocab_size}")
    name = f"lfm2np {lfm2np.__version__} {numerics}"
    abilities = {"logprobs": True, "top_logprobs": TOP, "prompt_logprobs": True, "at_once": AT_ONCE, "abort": True}
    write({"kind": "hello", "protocol": 2, "engine": name, **abilities, "stops": model.has_tokenizer})
    engine = lfm2np.Engine(model, max_num_seqs=AT_ONCE)
    limits: dict[str, int] = {}  # request id -> after how many tokens it ends, or is to be aborted
    while (line := read())["kind"] != "bye":
        if line["kind"] == "request" and add(engine, line):
            limits[line["request_id"]] = line.get("abort_after", line["max_tokens"])
        elif line["kind"] == "run":
            run(engine, limits)
            limits = {}


def add(engine: lfm2np.Engine, request: dict[str, Any]) -> bool:
    """Whether it can run; if not, it is answered at once with an error."""
    try:
        params = lfm2np.SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            logprobs=TOP,
            prompt_logprobs=request.get("prompt_logprobs"),
            stop=request.get("stop") or (),
        )
        engine.add_request(request["request_id"], request["prompt_token_ids"], params)
    except lfm2np.Lfm2npError as problem:
        write({"kind": "answer", "request_id": request["request_id"], "error": str(problem)})
        return False
    return True


def run(engine: lfm2np.Engine, limits: dict[str, int]) -> None:
    """All requests to their ends, each answered when it finishes."""
    for name in [name for name, limit in limits.items() if limit == 0]:
        answer(engine.abort(name))
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                answer(output)
            elif len(output.outputs[0].token_ids) >= limits[output.request_id]:
                answer(engine.abort(output.request_id))


def answer(output: lfm2np.RequestOutput) -> None:
    (completion,) = output.outputs
    if completion.error is not None:
        write({"kind": "answer", "request_id": output.request_id, "error": completion.error})
        return
    logprobs = completion.logprobs or ()
    line: dict[str, Any] = {
        "kind": "answer",
        "request_id": output.request_id,
        "token_ids": completion.token_ids,
        "logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [dict(each.top) for each in logprobs],
        "finish_reason": completion.finish_reason,
        "text": completion.text,
    }
    if output.prompt_logprobs is not None and completion.finish_reason != "abort":
        line["prompt_logprobs"] = [each.logprob for each in output.prompt_logprobs if each]  # the first has none
    if output.metrics is not None and not output.metrics.preemptions:  # else some are its own
        line["cached_tokens"] = output.metrics.cached_tokens
    write(line)


def read() -> dict[str, Any]:
    """The next line; the end of the input is a bye."""
    line: dict[str, Any] = json.loads(sys.stdin.readline() or '{"kind": "bye"}')
    return line


def write(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
