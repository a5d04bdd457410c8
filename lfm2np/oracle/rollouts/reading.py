"""A file of rollouts: JSON lines, one sequence each, also under the names that TRL and verl have.

TRL    trl/trainer/grpo_trainer.py: the output of a rollout_func and of _generate_and_score_completions
verl   verl/experimental/agent_loop/agent_loop.py, AgentLoopOutput, and verl/protocol.py, DataProto

A record of theirs may be a batch, a list of lists in each column. Fields that neither project has a name for
(temperature, step, pack, ...) stand under the schema's names; what the table does not name is not read.

In a long file a few bad lines are no reason to refuse the rest: they are left out, counted by field, and the first of
each field is shown. What no side can have computed, as NaN for a log-probability, is counted by itself: it is a bug.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lfm2np.checkpoint.strict_json import KINDS as JSON_KINDS
from lfm2np.checkpoint.strict_json import parse_value
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import shortened
from lfm2np.oracle.engines.records_json import ImpossibleValueError
from lfm2np.oracle.rollouts.rollout import FIELDS, Rollout, listed, require_known, rollout_from_json
from lfm2np.truth.config import ModelConfig
from lfm2np.values import plain

Record = Mapping[str, Any]
# The project's name and the schema's. Where a record has two names of one field, the first counts.
NAMES = {
    "prompt_ids": "prompt_token_ids",  # both
    "prompts": "prompt_token_ids",  # verl's DataProto
    "completion_ids": "token_ids",  # TRL
    "response_ids": "token_ids",  # verl's AgentLoopOutput
    "responses": "token_ids",  # verl's DataProto
    "logprobs": "sampler_logprobs",  # TRL, of a rollout_func
    "sampling_per_token_logps": "sampler_logprobs",  # TRL
    "response_logprobs": "sampler_logprobs",  # verl's AgentLoopOutput
    "rollout_log_probs": "sampler_logprobs",  # verl's DataProto
    "old_per_token_logps": "trainer_logprobs",  # TRL
    "old_log_probs": "trainer_logprobs",  # verl
    "env_mask": "is_sampled",  # TRL
    "tool_mask": "is_sampled",  # TRL
    "response_mask": "is_sampled",  # verl
    "routed_experts": "routes",  # verl
    "uid": "group",  # verl
    "min_global_steps": "step",  # verl: of the weights at the answer's first token, if they are those at its last
}
ANSWERS = ("completion_ids", "response_ids", "responses")
MASKS = ("prompt_mask", "completion_mask", "attention_mask")
OF_ANSWER = ("token_ids", "sampler_logprobs", "trainer_logprobs", "is_sampled")
TEXTS = {
    "verl's rollout_data_dir": ("input", "output", "score"),
    "TRL's log_completions": ("prompt", "completion", "advantage"),
}


@dataclass(frozen=True)
class Left:
    """Lines, or sequences of a batch, that are left out because of the same field.

    kind   the field's name; "record" for a line that holds none
    count  how many
    first  the first of them, as one line: file, line number, field, value, what was expected
    is_impossible  whether no side can have computed that value
    """

    kind: str
    count: int
    first: str
    is_impossible: bool = False


def read_rollouts(
    text: str | Iterable[str],
    source: str,
    config: ModelConfig,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[list[Rollout], list[Left]]:
    """The usable sequences in the file's order, and what is left out, the most frequent kind first.

    text      JSON lines, or an iterable of them, such as an open file; a line may be a list of records
    source    its name, for messages
    defaults  fields such as temperature or logprobs_mode, for sequences that lack them

    Of sequences with one id the first counts. Without ids, equal ones are as many samples. RequestError where no
    sequence can be used, and for a default that can't be.
    """
    defaults = defaults or {}
    require_known(defaults)
    rollouts: dict[str, Rollout] = {}
    places: dict[str, str] = {}
    left: dict[tuple[str, bool], Left] = {}
    for where, raw in sequences_in(text):
        try:
            if isinstance(raw, RequestError):
                raise raw
            reported = {key: value for key, value in raw.items() if value is not None}
            rollout = rollout_from_json({"id": where, **defaults, **reported}, config)
            if rollout.id in places:
                raise RequestError(f"id {plain(rollout.id)}: as in {places[rollout.id]}, expected another")
        except RequestError as problem:
            kind = re.split(r"[\[: ]", str(problem), maxsplit=1)[0]
            key = kind, isinstance(problem, ImpossibleValueError)
            known = left.get(key) or Left(kind, 0, shortened(f"{source}, {where}: {problem}"), key[1])
            left[key] = replace(known, count=known.count + 1)
        else:
            rollouts[rollout.id], places[rollout.id] = rollout, where
    by_count = sorted(left.values(), key=lambda kind: -kind.count)
    if not rollouts and not left:
        raise RequestError(f"{source}: no rollouts, expected one JSON object a line")
    if not rollouts:
        reasons = "; ".join(f"{kind.kind} ({kind.count}), first {kind.first}" for kind in by_count)
        count = sum(kind.count for kind in by_count)
        raise RequestError(f"{source}: {count} sequences, none of which can be used: {reasons}")
    return list(rollouts.values()), by_count


def sequences_in(text: str | Iterable[str]) -> Iterator[tuple[str, Record | RequestError]]:
    """Where each sequence stands in the file, and what it is in the schema's form, or why it can't be read.

    Lines end with a line feed alone: JSON's strings may hold the other characters at which str.splitlines ends one.
    """
    for number, line in enumerate(text.split("\n") if isinstance(text, str) else text, 1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            value = parse_value(line.encode(errors="surrogatepass"), "record", RequestError)
        except RequestError as problem:
            yield where, problem
            continue
        entries = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, entry in entries:
            at = where if index is None else f"{where}, entry {index}"
            try:
                rows = sequences_of(entry)
            except RequestError as problem:
                yield at, problem
                continue
            for row, sequence in enumerate(rows):
                yield at if len(rows) == 1 else f"{at}, row {row}", sequence


def sequences_of(record: object) -> list[Record]:
    """Under the schema's names. RequestError where columns do not belong together."""
    if not isinstance(record, dict):
        raise RequestError(f"record: a JSON {JSON_KINDS[type(record)]}, expected an object")
    answer = next((name for name in ANSWERS if name in record), None)
    if answer is not None:
        return [renamed(row) for row in rows_of(record, answer)]
    for writer, keys in TEXTS.items():
        if all(key in record for key in keys):
            raise RequestError(f"record: texts as {writer} has them, expected token ids")
    return [record]


def rows_of(record: Record, answer: str) -> list[Record]:
    """The record, or the rows of a batch: of each column that is a list the row's entry."""
    values = record[answer]
    if not isinstance(values, list) or not values or not all(isinstance(value, list) for value in values):
        return [record]
    if answer == "responses" and record.get("attention_mask") is None:
        raise RequestError("attention_mask: missing, expected it in a batch, to know what is padding")
    columns = {name: column for name, column in record.items() if isinstance(column, list)}
    for name in (*NAMES, *MASKS):
        if name in columns and len(columns[name]) != len(values):
            raise RequestError(f"{name}: {len(columns[name])} rows, expected {len(values)}, as many as {answer}")
    split = {name: column for name, column in columns.items() if len(column) == len(values)}
    return [{**record, **{name: column[row] for name, column in split.items()}} for row in range(len(values))]


def renamed(row: Record) -> Record:
    """Without padding: prompt_mask and completion_mask, or attention_mask for both, say what is none."""
    if isinstance(row.get("extra_fields"), Mapping):  # of verl's AgentLoopOutput
        row = {**row, **row["extra_fields"]}
    sequence = {name: row[name] for name in row if name in FIELDS}
    for theirs, ours in NAMES.items():
        if sequence.get(ours) is None:
            sequence[ours] = row.get(theirs)
    if row.get("max_global_steps") != row.get("min_global_steps") and "min_global_steps" in row:
        sequence["step"] = None
    border = len(listed(sequence, "prompt_token_ids", "a list of token ids"))
    prompt_mask, answer_mask = row.get("prompt_mask"), row.get("completion_mask")
    if row.get("attention_mask") is not None:
        count = border + len(listed(sequence, "token_ids", "a list of token ids"))
        whole = listed(row, "attention_mask", "a list of 0 and 1", count)
        prompt_mask, answer_mask = whole[:border], whole[border:]
    sequence["prompt_token_ids"], padded = unpadded(sequence, "prompt_token_ids", prompt_mask)
    if padded:
        sequence["left_padding"] = padded
        if isinstance(sequence["routes"], list):
            sequence["routes"] = sequence["routes"][padded:]
    for name in OF_ANSWER:
        sequence[name], _ = unpadded(sequence, name, answer_mask)
    logprobs = sequence["sampler_logprobs"]
    if isinstance(logprobs, list) and logprobs and all(isinstance(entry, list) for entry in logprobs):
        if any(len(entry) != 1 for entry in logprobs):  # [tokens][alternatives], as vLLM gives them to TRL
            raise RequestError("logprobs: several alternatives, expected the sampled token's alone")
        sequence["sampler_logprobs"] = [entry[0] for entry in logprobs]
    return sequence


def unpadded(sequence: Record, name: str, mask: Any) -> tuple[Sequence[Any] | None, int]:
    """The entries from the first to the last that the mask has, and how many stand before them."""
    values = sequence.get(name)
    if values is None or mask is None:
        return values, 0
    values = listed(sequence, name, "a list", len(listed({"mask": mask}, "mask", "a list of 0 and 1")))
    kept = [index for index, is_token in enumerate(mask) if is_token]
    return (values[kept[0] : kept[-1] + 1], kept[0]) if kept else ([], len(mask))
