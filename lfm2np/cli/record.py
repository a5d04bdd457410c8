"""`lfm2np record TARGET`: an engine's activations of one request, as `lfm2np locate` reads them."""

from __future__ import annotations

import argparse

from lfm2np.checkpoint.files import read_config
from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.cli.shared.parser import Commands, add, add_command
from lfm2np.cli.shared.terminal import parse_ids, print_result
from lfm2np.oracle.locate.dump import Dump, parse_dump
from lfm2np.oracle.locate.spread import PRECISIONS
from lfm2np.oracle.recorders.demands import require_request
from lfm2np.oracle.recorders.registry import FORMS, format_of, record_of
from lfm2np.whole_file import write_whole

EXIT_CODES = """exit codes:
  0    the dump is written
  2    the arguments can't be met
  3    the checkpoint can't be read, or the engine can't be run or recorded
  130  interrupted"""


def run(arguments: argparse.Namespace) -> None:
    """Writes the dump. RequestError (2) for arguments that can't be met, TargetError (3) for an engine that can't."""
    path = checkpoint_path(arguments.model)
    config = read_config(path)
    prompts = [parse_ids(text, "--prompt-ids") for text in arguments.prompt_ids]
    require_request(prompts, arguments.request, arguments.max_tokens, config)
    record = record_of(arguments.target, path, arguments.format or format_of(arguments.target))
    content = record(prompts, arguments.request, arguments.max_tokens)
    dump = parse_dump(content, arguments.target, config)
    write_whole(arguments.output, content)
    fields = {"target": arguments.target, "model": str(path), **as_json(arguments.output, dump)}
    sizes = ", ".join(map(str, dump.steps.sizes))
    content_text = f"{len(dump.token_ids)} tokens, in steps of {sizes}; {len(dump.tensors)} tensors"
    print_result(arguments, fields, f"{arguments.output}: {content_text}")


def as_json(output: str, dump: Dump) -> dict[str, object]:
    return {
        "output": output,
        "token_ids": dump.token_ids.tolist(),
        "steps": list(dump.steps.sizes),
        "format": dump.format,
        "tensors": {name: list(values.shape) for name, values in dump.tensors.items()},
        "unknown": list(dump.unknown),
    }


def add_record(commands: Commands) -> None:
    text = "write an engine's activations of one request, for `lfm2np locate`"
    example = "lfm2np record transformers: --prompt-ids 1,17,42 -o dump.safetensors"
    parser = add_command(commands, "record", run, text, example, exit_codes=EXIT_CODES)
    add(parser, "TARGET", FORMS)
    add(parser, "-o --output FILE", "the dump to write", required=True)
    ids = "token ids, separated by commas or spaces; may be repeated: another request, run together with the first"
    add(parser, "--prompt-ids IDS", ids, action="append", required=True)
    add(parser, "--request N", "index of the request to write, from 0 (0)", default=0)
    add(parser, "--max-tokens N", "greedy tokens to generate for each (4)", default=4)
    format_help = (
        "number format to compute in (float32; for llama.cpp that of its file, q8 where weights are quantised)"
    )
    add(parser, "--format", format_help, choices=list(PRECISIONS))
