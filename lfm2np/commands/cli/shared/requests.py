"""The requests of `lfm2np generate`: from its options, or from a file of JSON lines."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lfm2np.checkpoint.strict_json import parse_object
from lfm2np.checkpoint.text.tokenizer import require_text
from lfm2np.commands.cli.shared.prompts import prompts, require_chat
from lfm2np.commands.cli.shared.terminal import read_file
from lfm2np.engine.loading import Model
from lfm2np.engine.sampling.params import SamplingParams, from_json
from lfm2np.engine.sequence import sample_name
from lfm2np.errors import RequestError
from lfm2np.values import require_count

Line = TypeVar("Line")
OWN_KEYS = ("request_id", "prompt", "prompt_token_ids", "arrival_step", "priority", "cache_salt")
MOST_STEPS = 100_000  # that a request may arrive late: those in which nothing runs are run one by one, too


@dataclass(frozen=True)
class Job:
    request_id: str
    ids: tuple[int, ...]
    prompt: str | None  # as text, if that is what it came as
    shown: str
    params: SamplingParams
    arrival_step: int = 0
    priority: int = 0
    cache_salt: str = ""
    where: str = ""  # the file and line that it came from, as an error begins


def read_jobs(model: Model, arguments: argparse.Namespace) -> list[Job]:
    """The requests that the options give. RequestError names the line of a bad one."""
    require_chat(arguments)
    defaults: dict[str, Any] = {
        "max_tokens": arguments.max_tokens,
        "temperature": 0.0 if arguments.temperature is None else arguments.temperature,
    }
    if arguments.logprobs is not None:
        defaults["logprobs"] = require_count("logprobs", arguments.logprobs, 0, model.config.vocab_size)
    if arguments.requests is not None:
        return read_requests(model, read_file(arguments.requests), arguments.requests, defaults)
    params = SamplingParams(**defaults)
    chosen = enumerate(prompts(model, arguments))
    return [
        Job(str(index), tuple(model.prompt_ids(ids)), prompt, shown, params) for index, (ids, prompt, shown) in chosen
    ]


def read_requests(model: Model, text: str, source: str, defaults: Mapping[str, Any]) -> list[Job]:
    lines = read_lines(text, source, lambda raw, name: make_job(model, raw, name, defaults))
    jobs = [replace(job, where=f"{where}: ") for where, job in lines]
    names = [sample_name(job.request_id, index) for job in jobs for index in range(job.params.n)]
    require_different(names, f"{source}: two requests have one request_id, or one is named like a sample")
    return jobs


def require_different(names: Sequence[str], what: str) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise RequestError(f"{what}: {twice!r}")


def read_lines(text: str, source: str, make: Callable[[Mapping[str, Any], str], Line]) -> list[tuple[str, Line]]:
    """Where each line stands, and `make(object, name)` of it, named "0", "1", ...

    RequestError for a bad line, with its number, and for a text without requests.
    """
    lines: list[tuple[str, Line]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        raw = parse_object(line.encode(), where, RequestError)
        try:
            lines.append((where, make(raw, str(len(lines)))))
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None
    if not lines:
        raise RequestError(f"{source}: no requests, expected one JSON object a line")
    return lines


SCORED_HELP = "one JSON object a line: prompt or prompt_token_ids, completion or completion_token_ids, request_id"
SCORED_KEYS = {"request_id", "prompt", "prompt_token_ids", "completion", "completion_token_ids"}


def read_named_lines(
    text: str, source: str, make: Callable[[Mapping[str, Any], str], Line], name_of: Callable[[Line], str]
) -> list[Line]:
    """The same; RequestError also for two requests of one name."""
    lines = [line for _, line in read_lines(text, source, make)]
    require_different(list(map(name_of, lines)), f"{source}: two requests have one request_id")
    return lines


def prompt_and_completion(model: Model, raw: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Ids of a line that is to be scored, checked; the completion may be empty. RequestError for other keys."""
    if set(raw) - SCORED_KEYS:
        raise RequestError(f"{min(set(raw) - SCORED_KEYS)!r}: expected some of {', '.join(sorted(SCORED_KEYS))}")
    require_one_prompt(raw)
    if "completion" in raw and "completion_token_ids" in raw:
        raise RequestError("expected completion or completion_token_ids, not both")
    for key in ("prompt", "completion", "request_id"):
        if key in raw and (not isinstance(raw[key], str) or not raw[key]):
            raise RequestError(f"{key} {raw[key]!r}: expected a string that is not empty")
    prompt = model.prompt_ids(raw["prompt"] if "prompt" in raw else raw["prompt_token_ids"])
    if "completion" in raw:
        return prompt, model.tokenizer.encode_more(raw["completion"])
    return prompt, model.prompt_ids(raw["completion_token_ids"]) if "completion_token_ids" in raw else []


def require_one_prompt(raw: Mapping[str, Any]) -> None:
    if ("prompt" in raw) == ("prompt_token_ids" in raw):
        raise RequestError("expected either prompt or prompt_token_ids")


def make_job(model: Model, raw: Mapping[str, Any], request_id: str, defaults: Mapping[str, Any]) -> Job:
    fields = {key: value for key, value in raw.items() if key in OWN_KEYS}
    require_one_prompt(fields)
    if "prompt" in fields and not isinstance(fields["prompt"], str):
        raise RequestError(f"prompt {fields['prompt']!r}: expected a string")
    ids = model.prompt_ids(fields["prompt"] if "prompt" in fields else fields["prompt_token_ids"])
    params = from_json({**defaults, **{key: value for key, value in raw.items() if key not in OWN_KEYS}})
    for key, kind, expected in (("request_id", str, "a string that is not empty"), ("priority", int, "a whole number")):
        if key in fields and (type(fields[key]) is not kind or fields[key] == ""):
            raise RequestError(f"{key} {fields[key]!r}: expected {expected}")
    if "cache_salt" in fields:
        require_text(fields["cache_salt"], "cache_salt")
    arrival_step = require_count("arrival_step", fields.get("arrival_step", 0), 0, None)
    if arrival_step > MOST_STEPS:
        raise RequestError(f"arrival_step {arrival_step}: expected at most {MOST_STEPS}: idle steps are run one by one")
    return Job(
        request_id=fields.get("request_id", request_id),
        ids=tuple(ids),
        prompt=fields.get("prompt"),
        shown=fields.get("prompt") or ",".join(map(str, ids)),
        params=params,
        arrival_step=arrival_step,
        priority=fields.get("priority", 0),
        cache_salt=fields.get("cache_salt", ""),
    )
