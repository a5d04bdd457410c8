"""Other projects' records of sampled answers as lines of rollouts.schema.json: one function each.

Every function takes one JSON object and gives the sequences in it: more than one if it is a batch, a list of lists in
each field. Fields of the schema that the project has no name for (temperature, step, group, pack, ...) may stand in the
record under the schema's names and are taken over. Unfit if a record lacks what is needed. The names are those of

- TRL 1.16, trl/trainer/grpo_trainer.py: the output of a rollout_func and of _generate_and_score_completions;
- verl 0.9, verl/experimental/agent_loop/agent_loop.py, AgentLoopOutput, and verl/protocol.py, DataProto;
- vLLM 0.32, vllm/outputs.py, RequestOutput, and vllm/entrypoints/openai, the two kinds of completions;
- slime (2026-08), slime/utils/types.py, Sample, and slime/ray/rollout.py, the training data;
- NeMo RL (2026-08), nemo_rl/algorithms/grpo.py, train_data_step*.jsonl;
- prime-rl 0.8, prime_rl/trainer/rl/token_export.py, and prime_rl/transports/rollouts/types.py, TrainingSample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lfm2np.oracle.engines.dialects import vllm as vllm_dialect
from lfm2np.oracle.rollouts import kinds
from lfm2np.oracle.rollouts.kinds import Unfit
from lfm2np.values import show_json

Record = Mapping[str, Any]
Fields = dict[str, Any]

NATIVE = "native"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
TAKEN_OVER = (
    *("id", "step", "group", "pack", "logprobs_mode", "trainer_logprobs_mode", "trainer_logprobs", "trainer_routes"),
    *("left_padding", "pad_token_id", *SAMPLING),
)
# the schema's names and the project's
AGENT_LOOP = {
    "prompt_token_ids": "prompt_ids",
    "token_ids": "response_ids",
    "sampler_logprobs": "response_logprobs",
    "is_sampled": "response_mask",
    "routes": "routed_experts",
    "group": "uid",
}
DATA_PROTO = {
    "token_ids": "responses",
    "sampler_logprobs": "rollout_log_probs",
    "trainer_logprobs": "old_log_probs",
    "is_sampled": "response_mask",
}
SLIME = {
    "id": "index",
    "sampler_logprobs": "rollout_log_probs",
    "trainer_logprobs": "log_probs",
    "is_sampled": "loss_mask",
    "routes": "rollout_routed_experts",
    "group": "group_index",
}
PRIME_RL = {
    "prompt_token_ids": "prompt_ids",
    "token_ids": "completion_ids",
    "sampler_logprobs": "completion_logprobs",
    "is_sampled": "completion_mask",
}
STEPS = ("min_global_steps", "max_global_steps")  # verl: of the weights at an answer's first and last token
VLLM_LEAST = -9999.0  # vLLM's servers write it for what is less, minus infinity above all, as JSON has no infinity


def from_trl(raw: Record) -> list[Fields]:
    """TRL: prompt_ids, completion_ids, logprobs or sampling_per_token_logps, env_mask or tool_mask.

    old_per_token_logps are the trainer's. prompt_mask and completion_mask, where they are, say what is padding. Of
    logprobs [tokens][alternatives], as vLLM gives them to TRL, there may be one alternative only.
    """
    masks = ("env_mask", "tool_mask")
    names = ("completion_ids", "logprobs", "sampling_per_token_logps", "old_per_token_logps", *masks)
    sequences = []
    for row in _rows(raw, "completion_ids", ("prompt_ids", *names, "prompt_mask", "completion_mask")):
        padded, prompt = _without(row, "prompt_ids", "prompt_mask")
        answer = {name: _without(row, name, "completion_mask")[1] for name in names}
        logprobs = answer["logprobs"] if answer["logprobs"] is not None else answer["sampling_per_token_logps"]
        sequence = {
            "prompt_token_ids": prompt,
            "token_ids": answer["completion_ids"],
            "sampler_logprobs": _only_alternative(logprobs, "logprobs"),
            "trainer_logprobs": answer["old_per_token_logps"],
            "is_sampled": next((answer[mask] for mask in masks if answer[mask] is not None), None),
            "left_padding": padded,
        }
        sequences.append(_take_over(sequence, row))
    return sequences


def from_verl(raw: Record) -> list[Fields]:
    """verl: AgentLoopOutput, and the rows of a DataProto, padded to the left and right of the border.

    AgentLoopOutput: prompt_ids, response_ids, response_mask, response_logprobs, routed_experts. DataProto: prompts,
    responses, response_mask, attention_mask, rollout_log_probs, old_log_probs (the trainer's), routed_experts; of its
    non-tensor part uid is the group, min_global_steps and max_global_steps, if they are equal, are the step. A batch of
    a DataProto must have its attention_mask.
    """
    if "response_ids" in raw:
        rows = _rows(raw, "response_ids", (*AGENT_LOOP.values(), *STEPS, "extra_fields"))
        return [
            _take_over(_renamed(row, AGENT_LOOP) | {"step": _only_step(row.get("extra_fields"))}, row) for row in rows
        ]
    if _is_batch(raw, "responses") and raw.get("attention_mask") is None:
        raise Unfit(kinds.MISSING, "attention_mask: missing, expected it in a batch, to know what is padding")
    columns = ("prompts", *DATA_PROTO.values(), "attention_mask", "routed_experts", "uid", *STEPS, "extra_fields")
    return [_of_data_proto(row) for row in _rows(raw, "responses", columns)]


def _of_data_proto(row: Record) -> Fields:
    prompts, responses = (listed(row, name) for name in ("prompts", "responses"))
    mask, border = row.get("attention_mask"), len(prompts)
    parts = dict(row)
    if mask is not None:
        require_length("attention_mask", listed(row, "attention_mask"), border + len(responses))
        parts |= {"prompt_mask": mask[:border], "completion_mask": mask[border:]}
    padded, prompt = _without(parts, "prompts", "prompt_mask")
    routes = row.get("routed_experts")
    sequence = {
        "prompt_token_ids": prompt,
        **{ours: _without(parts, name, "completion_mask")[1] for ours, name in DATA_PROTO.items()},
        "routes": routes[padded:] if isinstance(routes, list) else routes,
        "group": row.get("uid"),
        "step": _only_step(row),
        "left_padding": padded,
    }
    return _take_over(sequence, row)


def _only_step(row: object) -> object:
    """The step whose weights answered, if they were not replaced midway."""
    steps = [row.get(name) for name in STEPS] if isinstance(row, Mapping) else [None]
    return steps[0] if all(step == steps[0] for step in steps) else None


def from_vllm(raw: Record) -> list[Fields]:
    """vLLM: a response of its server, asked with logprobs and return_token_ids; or a RequestOutput as a dictionary.

    A response: id, choices with token_ids, logprobs (token_logprobs, or content of a chat), routed_experts, and
    prompt_token_ids in the choice or, of a chat, beside it. A RequestOutput: request_id, prompt_token_ids, outputs with
    token_ids and logprobs, {id: {logprob}} a token or FlatLogprobs. {"request": ..., "response": ...} takes the
    request's parameters. -9999 is what its servers write for minus infinity.
    """
    if isinstance(raw.get("response"), Mapping):
        request = raw["request"] if isinstance(raw.get("request"), Mapping) else {}
        asked = {name: request[name] for name in SAMPLING if request.get(name) is not None}
        raw = {**asked, **{name: raw[name] for name in TAKEN_OVER if name in raw}, **raw["response"]}
    choices = listed(raw, "outputs" if "outputs" in raw else "choices")
    request_id = raw.get("request_id", raw.get("id"))
    sequences = []
    for position, choice in enumerate(choices):
        where = f"{'outputs' if 'outputs' in raw else 'choices'}[{position}]"
        if not isinstance(choice, Mapping):
            raise Unfit(kinds.WRONG_VALUE, f"{where} {show_json(choice)}: expected an object")
        ids = choice.get("token_ids")
        routes = choice.get("routed_experts")
        if ids is None:
            raise Unfit(kinds.MISSING, f"{where}.token_ids: missing, expected them as return_token_ids gives them")
        prompt = choice.get("prompt_token_ids") or raw.get("prompt_token_ids")
        index = choice.get("index", position)
        sequence = {
            "id": request_id if len(choices) == 1 or request_id is None else f"{request_id}/{index}",
            "prompt_token_ids": prompt,
            "token_ids": ids,
            "sampler_logprobs": _vllm_logprobs(choice.get("logprobs"), listed(choice, "token_ids"), where),
            "routes": vllm_dialect.routes(routes, f"{where}.routed_experts") if isinstance(routes, str) else routes,
            "group": request_id if len(choices) > 1 else None,
        }
        sequences.append(_take_over(sequence, raw, but=("id",)))
    return sequences


def _vllm_logprobs(raw: Any, ids: Sequence[Any], where: str) -> list[Any] | None:
    if raw is None:
        return None
    if isinstance(raw, Mapping) and "start_indices" in raw:
        raw = _unflattened(raw, where)
    elif isinstance(raw, Mapping):
        raw = raw["token_logprobs"] if raw.get("token_logprobs") is not None else raw.get("content")
    if not isinstance(raw, list) or len(raw) != len(ids):
        shown = f"{len(raw)} entries" if isinstance(raw, list) else show_json(raw)
        raise Unfit(kinds.LENGTHS, f"{where}.logprobs: {shown}, expected {len(ids)}, one for each of token_ids")
    values = []
    for token_id, entry in zip(ids, raw, strict=True):
        if isinstance(entry, Mapping) and "logprob" not in entry:
            entry = entry.get(str(token_id), entry.get(token_id))
        value = entry.get("logprob") if isinstance(entry, Mapping) else entry
        is_least = isinstance(value, int | float) and value <= VLLM_LEAST
        values.append(-math.inf if is_least else value)
    return values


def _unflattened(raw: Record, where: str) -> list[dict[str, Any]]:
    """vllm/logprobs.py, FlatLogprobs, as {id: log-probability} a token."""
    names = ("start_indices", "end_indices", "token_ids", "logprobs")
    starts, ends, ids, logprobs = (listed(raw, name) for name in names)
    if len(starts) != len(ends) or len(ids) != len(logprobs) or set(map(type, (*starts, *ends))) - {int}:
        raise Unfit(kinds.WRONG_VALUE, f"{where}.logprobs {show_json(raw)}: expected vLLM's FlatLogprobs")
    ranges = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    if any(rows and not 0 <= rows[0] <= rows[-1] < len(ids) for rows in ranges):
        raise Unfit(kinds.WRONG_VALUE, f"{where}.logprobs {show_json(raw)}: expected indices below {len(ids)}")
    return [{str(ids[row]): logprobs[row] for row in rows} for rows in ranges]


def from_slime(raw: Record) -> list[Fields]:
    """slime: a Sample's to_dict(), the debug data of rollouts and of training, and columns of training data.

    Sample: tokens (prompt and answer), response_length, loss_mask, rollout_log_probs, rollout_routed_experts, index,
    group_index. Debug data, which slime writes with torch.save: {"rollout_id", "samples"}, whose rollout_id is the
    step. Training data: response_lengths, loss_masks, sample_index, and log_probs, the trainer's; as columns, these are
    lists.
    """
    if isinstance(raw.get("samples"), list):
        sequences = []
        for index, sample in enumerate(raw["samples"]):
            if not isinstance(sample, Mapping):
                raise Unfit(kinds.WRONG_VALUE, f"samples[{index}] {show_json(sample)}: expected an object")
            sequences += from_slime({"step": raw.get("rollout_id"), **sample})
        return sequences
    plural = {"response_lengths": "response_length", "loss_masks": "loss_mask", "sample_index": "index"}
    raw = {plural.get(name, name): value for name, value in raw.items()}
    sequences = []
    for row in _rows(raw, "tokens", ("tokens", "response_length", *SLIME.values())):
        tokens, count = listed(row, "tokens"), row.get("response_length")
        if type(count) is not int or not 0 <= count <= len(tokens):
            raise Unfit(
                kinds.WRONG_VALUE, f"response_length {show_json(count)}: expected 0 to {len(tokens)}, a part of tokens"
            )
        border = len(tokens) - count
        parts = {"prompt_token_ids": tokens[:border], "token_ids": tokens[border:]}
        sequences.append(_take_over(_renamed(row, SLIME) | parts, row))
    return sequences


def from_nemo_rl(raw: Record) -> list[Fields]:
    """NeMo RL: train_data_step*.jsonl: token_ids, token_loss_mask, input_lengths, generation_logprobs, prev_logprobs.

    Log-probabilities stand at their token, padding to the right; prev_logprobs are the trainer's. The answer begins
    with the first token that the mask has.
    """
    logprobs = ("generation_logprobs", "prev_logprobs")
    names = ("token_ids", "token_loss_mask", "input_lengths", *logprobs)
    sequences = []
    for row in _rows(raw, "token_ids", names):
        length = row.get("input_lengths", len(listed(row, "token_ids")))
        length = length[0] if isinstance(length, list) and length else length
        if type(length) is not int or length < 0:
            raise Unfit(kinds.WRONG_VALUE, f"input_lengths {show_json(length)}: expected a whole number, at least 0")
        shortened = {name: listed(row, name)[:length] for name in names if isinstance(row.get(name), list)}
        sequences.append(_take_over(_of_flat(shortened, "token_ids", "token_loss_mask", logprobs), row))
    return sequences


def from_prime_rl(raw: Record) -> list[Fields]:
    """prime-rl: token_exports, and a TrainingSample by the names of its fields.

    token_exports: token_ids, loss_mask, inference_logprobs, trainer_logprobs, step. TrainingSample: token_ids, mask,
    logprobs, temperatures; before: prompt_ids, completion_ids, completion_mask, completion_logprobs,
    completion_temperatures. The answer begins with the first token that the mask has, and its tokens must have one
    temperature.
    """
    if "inference_logprobs" in raw:
        sequence = _of_flat(raw, "token_ids", "loss_mask", ("inference_logprobs", "trainer_logprobs"))
        return [_take_over(sequence, raw, but=("trainer_logprobs",))]
    if "completion_logprobs" in raw:
        sequence = _renamed(raw, PRIME_RL)
        sequence["temperature"] = _only_temperature(raw, "completion_temperatures", "completion_mask")
    else:
        sequence = _of_flat(raw, "token_ids", "mask", ("logprobs",))
        sequence["temperature"] = _only_temperature(raw, "temperatures", "mask")
    return [_take_over(sequence, raw)]


CONVERTERS: dict[str, Callable[[Record], Iterable[Fields]]] = {
    "trl": from_trl,
    "verl": from_verl,
    "vllm": from_vllm,
    "slime": from_slime,
    "nemo-rl": from_nemo_rl,
    "prime-rl": from_prime_rl,
}
# Names of a record's form, each with the keys of which one set has to be there; the first that fits counts.
KEYS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    (NATIVE, (("prompt_token_ids", "token_ids"), ("sampler_logprobs",))),
    ("vllm", (("choices",), ("outputs", "prompt_token_ids"), ("request", "response"))),
    ("verl", (("prompt_ids", "response_ids"), ("prompts", "responses"))),
    (
        "prime-rl",
        (
            ("token_ids", "inference_logprobs"),
            ("completion_ids", "completion_logprobs"),
            ("token_ids", "mask", "logprobs"),
        ),
    ),
    ("trl", (("prompt_ids", "completion_ids"),)),
    ("slime", (("tokens", "response_length"), ("tokens", "response_lengths"), ("samples",))),
    ("nemo-rl", (("token_ids", "generation_logprobs"), ("token_ids", "prev_logprobs"))),
)
TEXTS = (
    ("verl's rollout_data_dir", ("input", "output", "score")),
    ("TRL's log_completions", ("prompt", "completion", "advantage")),
)


def form_of(raw: Record) -> str:
    """ "native" or a name of CONVERTERS, by the keys; Unfit for others."""
    for name, sets in KEYS:
        if any(all(key in raw for key in keys) for keys in sets):
            return name
    for writer, keys in TEXTS:
        if all(key in raw for key in keys):
            words = f"keys {', '.join(keys)}: texts as {writer} has them, expected token ids"
            raise Unfit(kinds.UNKNOWN_FORM, words)
    some = "; ".join(f"{name}: {' and '.join(sets[0])}" for name, sets in KEYS)
    raise Unfit(kinds.UNKNOWN_FORM, f"keys {show_json(sorted(raw))}: expected those of a form ({some})")


def _renamed(row: Record, names: Mapping[str, str]) -> Fields:
    """Under the schema's names what the project has under its own; None where it has nothing."""
    return {ours: row.get(name) for ours, name in names.items()}


def _take_over(sequence: Fields, row: Record, but: Sequence[str] = ()) -> Fields:
    """Adds fields that the record has under the schema's names, unless the project's names already gave them."""
    for name in TAKEN_OVER:
        if sequence.get(name) is None and row.get(name) is not None and name not in but:
            sequence[name] = row[name]
    return sequence


def _is_batch(raw: Record, name: str) -> bool:
    values = raw.get(name)
    return isinstance(values, list) and len(values) > 0 and all(isinstance(value, list) for value in values)


def _rows(raw: Record, main: str, columns: Iterable[str]) -> list[Record]:
    """The record, or the rows of a batch: of `columns` and the fields taken over, those that are lists are split."""
    if not _is_batch(raw, main):
        return [raw]
    count = len(raw[main])
    split = {name: raw[name] for name in (*columns, *TAKEN_OVER) if isinstance(raw.get(name), list)}
    for name, values in split.items():
        if len(values) != count:
            raise Unfit(kinds.LENGTHS, f"{name}: {len(values)} rows, expected {count}, as many as {main}")
    shared = {name: value for name, value in raw.items() if name not in split}
    return [{**shared, **{name: values[row] for name, values in split.items()}} for row in range(count)]


def listed(raw: Record, name: str, expected: str = "a list") -> Sequence[Any]:
    value = raw.get(name)
    if value is None:
        raise Unfit(kinds.MISSING, f"{name}: missing, expected {expected}")
    if not isinstance(value, list | tuple):
        raise Unfit(kinds.WRONG_VALUE, f"{name} {show_json(value)}: expected {expected}")
    return value


def require_length(name: str, values: Sequence[Any], count: int, of: str = "") -> None:
    if len(values) != count:
        raise Unfit(kinds.LENGTHS, f"{name}: {len(values)} entries, expected {count}{of}")


def _without(row: Record, name: str, mask_name: str) -> tuple[int, Sequence[Any] | None]:
    """(number of the first entry that is no padding, the entries from it to the last that is none)."""
    if row.get(name) is None:
        return 0, None
    values, mask = listed(row, name), row.get(mask_name)
    if mask is None:
        return 0, values
    require_length(name, values, len(listed(row, mask_name)))
    kept = [index for index, is_token in enumerate(mask) if is_token]
    return (kept[0], values[kept[0] : kept[-1] + 1]) if kept else (len(values), [])


def _only_alternative(logprobs: Sequence[Any] | None, name: str) -> Sequence[Any] | None:
    if not logprobs or not all(isinstance(entry, list) for entry in logprobs):
        return logprobs
    for index, entry in enumerate(logprobs):
        if len(entry) != 1:
            raise Unfit(
                kinds.LENGTHS, f"{name}[{index}]: {len(entry)} alternatives, expected the sampled token's alone"
            )
    return [entry[0] for entry in logprobs]


def _of_flat(row: Record, ids: str, mask: str, logprobs: Sequence[str]) -> Fields:
    """Prompt and answer of one list of tokens. `logprobs`: names of the sampler's and, if two, the trainer's."""
    tokens, is_sampled = listed(row, ids), listed(row, mask)
    values = {name: listed(row, name) for name in logprobs if row.get(name) is not None}
    for name, entries in {mask: is_sampled, **values}.items():
        require_length(name, entries, len(tokens))
    border = next((index for index, drawn in enumerate(is_sampled) if drawn), len(tokens))
    answer = {name: entries[border:] for name, entries in values.items()}
    names = dict(zip(("sampler_logprobs", "trainer_logprobs"), logprobs, strict=False))
    return {
        "prompt_token_ids": tokens[:border],
        "token_ids": tokens[border:],
        "is_sampled": is_sampled[border:],
        **{field: answer.get(name) for field, name in names.items()},
    }


def _only_temperature(raw: Record, name: str, mask: str) -> float | None:
    if raw.get(name) is None:
        return None
    values, drawn = listed(raw, name), raw.get(mask)
    if isinstance(drawn, list):
        require_length(name, values, len(drawn))
        values = [value for value, is_sampled in zip(values, drawn, strict=True) if is_sampled]
    if any(value != values[0] for value in values):
        raise Unfit(kinds.WRONG_VALUE, f"{name} {show_json(sorted(set(values)))}: expected the same for all tokens")
    return values[0] if values else None
