"""`lfm2np fuzz TARGET`: timed traces of many requests, drawn, judged, and shrunk where one fails."""

from __future__ import annotations

import argparse

from lfm2np.commands.cli.shared import against, format_options, work
from lfm2np.commands.cli.shared.parser import (
    Commands,
    add,
    add_command,
    add_modes,
    refuse_unused,
    require_at_least,
    require_times,
)
from lfm2np.commands.cli.shared.terminal import show_report
from lfm2np.errors import RequestError
from lfm2np.suite.fuzz.sizes import BLOCK, CHUNK, EXAMPLES, GENERATING, LEAST_CONTEXT, REPLAYS, SLOTS
from lfm2np.suite.itself.target_engine import HTTP

EXAMPLE = """lfm2np fuzz http://127.0.0.1:8000 --model LFM2-350M --format bfloat16 --minutes 10
  lfm2np fuzz http://127.0.0.1:8080 --model DIR --start "./llama-server -m model.gguf -np 4 --port 8080"
  lfm2np fuzz package.module:factory --model DIR --examples 500 --block-size 16 --max-num-batched-tokens 64
  lfm2np fuzz http://127.0.0.1:8000 --model DIR --replay lfm2np-findings/wrong-1/trace.json"""
NO_START, REPLAYED = "only with --start", "not with --replay, which generates nothing"
UNUSED = {  # options that a mode does not use
    against.LOCAL: against.NEED_SERVER,
    NO_START: ("start_seconds",),
    REPLAYED: GENERATING,
}


def run(arguments: argparse.Namespace) -> None:
    """Prints the findings. ProofError (1) if there are any, InconclusiveError (2) if nothing can be judged."""
    from lfm2np.commands.cli.shared.fuzzing import fuzzed

    is_server = arguments.target.startswith(HTTP)
    is_off = {against.LOCAL: not is_server, NO_START: arguments.start is None, REPLAYED: bool(arguments.replay)}
    refuse_unused(arguments, *(words for words, is_met in is_off.items() if is_met))
    require_at_least(arguments, examples=1, findings=1, block_size=1, max_num_batched_tokens=1, max_num_seqs=1, seed=0)
    require_at_least(arguments, max_model_len=LEAST_CONTEXT)
    require_times(arguments, "minutes", "timeout", "start_seconds")
    if not 0 <= arguments.shrink_minutes < 1e7:
        raise RequestError(f"--shrink-minutes {arguments.shrink_minutes}: expected at least 0")
    show_report(arguments, *fuzzed(arguments))


def add_fuzz(commands: Commands) -> None:
    text = "test a running engine with timed traces of many requests, and shrink what fails"
    parser = add_command(commands, "fuzz", run, text, EXAMPLE, tokenizer=True, is_verdict=True)
    add(parser, "TARGET", "http(s)://HOST:PORT, package.module:factory, transformers:[DIR], exec:COMMAND")
    format_options.add_options(parser)
    add(parser, "--minutes N", "generate traces for N minutes", type=float)
    add(parser, "--examples N", f"generate N traces ({EXAMPLES}, without --minutes)")
    add(parser, "--seed N", "seed of the generated traces (0)", default=0)
    add(parser, "--findings N", "stop after N findings (1)", default=1)
    add(parser, "-o --output DIR", "folder for findings (lfm2np-findings)", default="lfm2np-findings")
    replay = f"replay this trace.json, up to {REPLAYS} times until it fails, and generate nothing"
    add(parser, "--replay FILE", replay, action="append")
    add(parser, "--shrink-minutes N", "time for shrinking a finding (5)", type=float, default=5.0)
    add(parser, "--block-size N", f"tokens in a cache block of the engine (as it reports, else {BLOCK})")
    add(parser, "--max-num-batched-tokens N", f"most tokens in a step of the engine (as it reports, else {CHUNK})")
    add(parser, "--max-num-seqs N", f"requests that the engine runs at once (as it reports, else {SLOTS})")
    add(parser, "--max-model-len N", "most tokens of a request (as the engine reports, else the model's)")
    add(
        parser,
        "--without NAMES",
        "do not generate these kinds of requests: aborted, cold (new cache salt), sampled, samples (n > 1), stop, "
        "streamed; text: do not compare texts",
        default="",
    )
    add(parser, "--name NAME", "model name, for a server with more than one")
    add(parser, "--timeout S", "seconds for a response; the engine hangs if it takes longer (60)", default=60.0)
    add(parser, "--start COMMAND", "command that starts the server, run again if it ends or hangs")
    add(parser, "--start-seconds S", "seconds until the started server responds (300)", default=300.0)
    work.add_options(parser)
    add_modes(parser, UNUSED)
