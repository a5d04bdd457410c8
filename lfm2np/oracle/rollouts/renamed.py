"""TRL's and verl's records under the names of rollouts.schema.json: one table, and what padding and batches need.

TRL    trl/trainer/grpo_trainer.py: the output of a rollout_func and of _generate_and_score_completions
verl   verl/experimental/agent_loop/agent_loop.py, AgentLoopOutput, and verl/protocol.py, DataProto

A record may be a batch, a list of lists in each column. Fields that neither project has a name for (temperature, step,
pack, ...) stand under the schema's names. What the table does not name is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lfm2np.errors import RequestError
from lfm2np.values import show_json

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


class Unfit(RequestError):
    """Why one sequence, or one record of several, is left out; `kind` is what it is counted as."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def sequences_of(record: Record) -> list[Record]:
    """The sequences of one record, under the schema's names. Unfit where columns do not belong together."""
    answer = next((name for name in ANSWERS if name in record), None)
    if answer is not None:
        return [one_sequence(row) for row in rows_of(record, answer)]
    for writer, keys in TEXTS.items():
        if all(key in record for key in keys):
            raise Unfit("unknown form", f"keys {', '.join(keys)}: texts as {writer} has them, expected token ids")
    return [record]


def rows_of(record: Record, answer: str) -> list[Record]:
    """The record, or the rows of a batch: of each column that is a list the row's entry."""
    values = record[answer]
    if not isinstance(values, list) or not values or not all(isinstance(value, list) for value in values):
        return [record]
    if answer == "responses" and record.get("attention_mask") is None:
        raise Unfit("missing field", "attention_mask: missing, expected it in a batch, to know what is padding")
    columns = {name: column for name, column in record.items() if isinstance(column, list)}
    for name in (*NAMES, *MASKS):
        if len(columns.get(name, values)) != len(values):
            shown = f"{len(columns[name])} rows, expected {len(values)}, as many as {answer}"
            raise Unfit("different lengths", f"{name}: {shown}")
    split = {name: column for name, column in columns.items() if len(column) == len(values)}
    return [{**record, **{name: column[row] for name, column in split.items()}} for row in range(len(values))]


def one_sequence(row: Record) -> Record:
    """Renamed, without padding: prompt_mask and completion_mask, or attention_mask for both, say what is none."""
    if isinstance(row.get("extra_fields"), Mapping):  # of verl's AgentLoopOutput
        row = {**row, **row["extra_fields"]}
    sequence = {name: row[name] for name in row if name not in NAMES}
    for theirs, ours in NAMES.items():
        if sequence.get(ours) is None:
            sequence[ours] = row.get(theirs)
    if row.get("max_global_steps") != row.get("min_global_steps") and "min_global_steps" in row:
        sequence["step"] = None
    border = len(listed(sequence, "prompt_token_ids", "a list of token ids"))
    whole = row.get("attention_mask")
    if whole is not None:
        require_length("attention_mask", whole, border + len(listed(sequence, "token_ids", "a list of token ids")))
    prompt_mask = row.get("prompt_mask") if whole is None else whole[:border]
    answer_mask = row.get("completion_mask") if whole is None else whole[border:]
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
            raise Unfit("different lengths", "logprobs: several alternatives, expected the sampled token's alone")
        sequence["sampler_logprobs"] = [entry[0] for entry in logprobs]
    return sequence


def unpadded(sequence: Record, name: str, mask: Any) -> tuple[Any, int]:
    """The entries from the first to the last that the mask has, and how many stand before them."""
    values = sequence.get(name)
    if values is None or mask is None:
        return values, 0
    require_length(name, listed(sequence, name, "a list"), len(mask))
    kept = [index for index, is_token in enumerate(mask) if is_token]
    return (values[kept[0] : kept[-1] + 1], kept[0]) if kept else ([], len(mask))


def listed(raw: Record, name: str, expected: str) -> Sequence[Any]:
    value = raw.get(name)
    if value is None:
        raise Unfit("missing field", f"{name}: missing, expected {expected}")
    if not isinstance(value, list | tuple):
        raise Unfit("wrong value", f"{name} {show_json(value)}: expected {expected}")
    return value


def require_length(name: str, values: Any, count: int, of: str = "") -> None:
    if not isinstance(values, list | tuple) or len(values) != count:
        shown = f"{len(values)} entries" if isinstance(values, list | tuple) else show_json(values)
        raise Unfit("different lengths", f"{name}: {shown}, expected {count}{of}")
