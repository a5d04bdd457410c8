"""`lfm2np locate`: the first operation of an engine whose output differs from what its inputs give; and `record`, which
writes what it reads: an engine's activations of one request."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from lfm2np.checkpoint.config_json import READINGS
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.commands.cli.shared.parser import MODEL_HELP, Commands, add, add_command, to_write
from lfm2np.commands.cli.shared.terminal import parse_ids, print_result, progress_bar, show_report
from lfm2np.oracle.locate.dump import parse_dump, read_dump, shortened
from lfm2np.oracle.locate.locate import locate
from lfm2np.oracle.locate.locate_report import report_of
from lfm2np.oracle.locate.spread import PRECISIONS
from lfm2np.oracle.recorders.registry import FORMS, record_of, require_request
from lfm2np.system import write_whole


def run(arguments: argparse.Namespace) -> None:
    """Prints what was found. ProofError (1) if a tensor is wrong, InconclusiveError (2) if too few can tell.

    DumpError, ConfigError and CheckpointError (3) for files that can't be read or don't fit each other.
    """
    path = checkpoint_path(arguments.model)
    if arguments.model is None:
        print(f"lfm2np: without --model: compared with {path}", file=sys.stderr)
    config = read_config(path, arguments.rope)
    tensors = read_tensors(path, config)
    dump = read_dump(Path(arguments.dump), config)
    if dump.unknown:
        warnings.warn(f"{arguments.dump}: {len(dump.unknown)} unknown names: {shortened(dump.unknown)}", stacklevel=1)
    with progress_bar("locating") as show:
        located = locate(tensors, config, dump, arguments.format, show)
    hints = []
    if config.is_rope_relabelled and any(finding.name.endswith("_rotated") for finding in located.findings):
        other = next(reading for reading in READINGS if reading != arguments.rope)
        hints.append(f"the rotation's label has another reading: --rope {other}")
    show_report(arguments, report_of(located, str(path), hints))


def add_locate(commands: Commands) -> None:
    text = "find the first tensor in an engine's activations that differs from what its inputs give"
    example = "lfm2np locate dump.safetensors --model LFM2-350M --format bfloat16"
    parser = add_command(commands, "locate", run, text, example, is_verdict=True)
    add(parser, "DUMP", "safetensors file: token_ids [T], and module outputs named as in transformers")
    format_help = "number format of the engine (default: as the dump says, else its storage format)"
    add(parser, "--format", format_help, choices=list(PRECISIONS))


# --- record


def run_record(arguments: argparse.Namespace) -> None:
    """Writes the dump. RequestError (2) for arguments that can't be met, TargetError (3) for an engine that can't."""
    path = checkpoint_path(arguments.model)
    reading = READINGS[1] if arguments.target.startswith("transformers:") else READINGS[0]  # its own
    config = read_config(path, reading)
    prompts = [parse_ids(text, "--prompt-ids") for text in arguments.prompt_ids]
    require_request(prompts, arguments.request, arguments.max_tokens, config)
    record = record_of(arguments.target, path, arguments.format)
    content = record(prompts, arguments.request, arguments.max_tokens)
    dump = parse_dump(content, arguments.target, config)
    write_whole(arguments.output, content)
    fields = {
        "target": arguments.target,
        "model": str(path),
        "output": arguments.output,
        "token_ids": dump.token_ids.tolist(),
        "steps": list(dump.steps.sizes),
        "format": dump.format,
        "tensors": {name: list(values.shape) for name, values in dump.tensors.items()},
        "unknown": list(dump.unknown),
    }
    sizes = ", ".join(map(str, dump.steps.sizes))
    content_text = f"{len(dump.token_ids)} tokens, in steps of {sizes}; {len(dump.tensors)} tensors"
    print_result(arguments, fields, f"{arguments.output}: {content_text}")


def add_record(commands: Commands) -> None:
    text = "write an engine's activations of one request, for `lfm2np locate`"
    example = "lfm2np record transformers: --prompt-ids 1,17,42 -o dump.safetensors"
    parser = add_command(commands, "record", run_record, text, example, model=False)
    add(parser, "--model DIR", MODEL_HELP)
    add(parser, "TARGET", FORMS)
    add(parser, "-o --output FILE", "the dump to write", type=to_write, required=True)
    ids = "token ids, separated by commas or spaces; may be repeated: another request, run together with the first"
    add(parser, "--prompt-ids IDS", ids, action="append", required=True)
    add(parser, "--request N", "index of the request to write, from 0 (0)", default=0)
    add(parser, "--max-tokens N", "greedy tokens to generate for each (4)", default=4)
    format_help = "number format to compute in (float32); q8: llama.cpp's where weights are quantised"
    add(parser, "--format", format_help, choices=list(PRECISIONS), default="float32")
