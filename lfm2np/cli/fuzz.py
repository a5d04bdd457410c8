"""`lfm2np fuzz TARGET`: timed traces of many requests, drawn, judged, and shrunk where one fails."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lfm2np.cli.check import target_of
from lfm2np.cli.conformance import require_hypothesis
from lfm2np.cli.shared import formats, work
from lfm2np.cli.shared.parser import Commands, add_command, one_line
from lfm2np.cli.shared.terminal import progress_bar, terminal_text
from lfm2np.engine_protocol import load_factory
from lfm2np.errors import InconclusiveError, ProofError, RequestError
from lfm2np.loading import Model, load
from lfm2np.oracle.targets.target import TargetError
from lfm2np.work.place import Place

if TYPE_CHECKING:
    from lfm2np.fuzz.campaign import Campaign, Failure
    from lfm2np.fuzz.played import Player, Takes
    from lfm2np.fuzz.started import StartedServer

EXIT_CODES = """exit codes:
  0    no trace failed
  1    a trace failed: what is wrong stands in a folder
  2    inconclusive: the engine does not tell its tokens
  3    it could not run
  130  interrupted; what was found until then is kept"""
EXAMPLE = """lfm2np fuzz http://127.0.0.1:8000 --model LFM2-350M --format bfloat16 --minutes 10
  lfm2np fuzz http://127.0.0.1:8080 --model DIR --start "./llama-server -m model.gguf -np 4 --port 8080"
  lfm2np fuzz package.module:factory --model DIR --examples 500 --block-size 16 --chunk 64
  lfm2np fuzz http://127.0.0.1:8000 --model DIR --replay lfm2np-findings/wrong-1/trace.json"""
BLOCK, CHUNK, SLOTS = 16, 512, 8
EXAMPLES, REPLAYS, EARLIER_REPLAYS = 200, 10, 3
LEAST_CONTEXT = 4  # tokens: a BOS, a token, and an answer to it, with one to spare
QUICK = 10.0  # seconds in which a server is started anew for each replay


def run(arguments: argparse.Namespace) -> None:
    """Prints what was found. ProofError (1) for a finding, InconclusiveError (2), TargetError (3)."""
    require_hypothesis()
    from lfm2np.fuzz.hand_over import require_place

    try:
        require_numbers(arguments)
        require_place(Path(arguments.out))
        with progress_bar("loading") as show:
            model = load(arguments.model, "exact", show, tokenizer=arguments.tokenizer)
        with work.place_of(arguments, model) as place, player_of(arguments, model) as (player, started):
            findings, counts = found(arguments, model, place, player, started)
    except RequestError as error:
        raise TargetError(str(error)) from None
    if arguments.json:
        print(json.dumps({"findings": findings, **counts}))
    else:
        print(terminal_text(as_text(findings, counts)))
    if findings:
        raise ProofError(f"{len(findings)} findings, first {findings[0]['what']}")


def require_numbers(arguments: argparse.Namespace) -> None:
    least = {
        "--examples": arguments.examples,
        "--findings": arguments.findings,
        "--block-size": arguments.block_size,
        "--chunk": arguments.chunk,
        "--max-num-seqs": arguments.max_num_seqs,
    }
    for name, value in least.items():
        if value is not None and value < 1:
            raise RequestError(f"{name} {value}: expected at least 1")
    more = {"--minutes": arguments.minutes, "--timeout": arguments.timeout, "--start-seconds": arguments.start_seconds}
    for name, number in more.items():
        if number is not None and not 0 < number < 1e7:
            raise RequestError(f"{name} {number}: expected more than 0")
    if arguments.max_model_len is not None and arguments.max_model_len < LEAST_CONTEXT:
        raise RequestError(f"--max-model-len {arguments.max_model_len}: expected at least {LEAST_CONTEXT}")
    if not 0 <= arguments.shrink_minutes < 1e7:
        raise RequestError(f"--shrink-minutes {arguments.shrink_minutes}: expected at least 0")
    without(arguments.without)
    if arguments.seed < 0:
        raise RequestError(f"--seed {arguments.seed}: expected at least 0")


@contextlib.contextmanager
def player_of(arguments: argparse.Namespace, model: Model) -> Iterator[tuple[Player, StartedServer | None]]:
    """The way to the engine, and its process if it is started here."""
    from lfm2np.fuzz.play_http import HttpPlayer
    from lfm2np.fuzz.started import StartedServer, answers

    target, is_http = arguments.target, arguments.target.startswith(("http:", "https:"))
    if arguments.start is not None and not is_http:
        raise RequestError(f"--start: expected a server as TARGET, not {target!r}")
    started: StartedServer | None = None
    if arguments.start is not None:
        started = StartedServer(arguments.start, lambda: answers(target), arguments.start_seconds)
    try:
        if started is not None:
            started.start()
        if is_http:
            tokenizer = model.tokenizer if model.has_tokenizer else None
            player: Player = HttpPlayer(target, tokenizer, arguments.name, arguments.timeout)
        else:
            player = local_player(arguments, model)
        with contextlib.closing(player):
            yield player, started
    finally:
        if started is not None:
            started.close()


def local_player(arguments: argparse.Namespace, model: Model) -> Player:
    """Step by step where the engine steps, else in rounds."""
    from lfm2np.fuzz.play_engine import RoundsPlayer, StepsPlayer

    if re.fullmatch(r"[\w.]+:[\w.]+", arguments.target) and not arguments.target.startswith("transformers:"):
        factory = load_factory(arguments.target)
        sizes = {"block_size": arguments.block_size, "max_num_batched_tokens": arguments.chunk}
        sizes |= {"max_num_seqs": arguments.max_num_seqs or SLOTS}

        player = StepsPlayer(arguments.target, model.path, lambda: factory(str(model.path), dict(sizes)))
        if player.steps():
            return player
    return RoundsPlayer(target_of(argparse.Namespace(**{**vars(arguments), "at_once": SLOTS}), model))


def found(
    arguments: argparse.Namespace, model: Model, place: Place, player: Player, started: StartedServer | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each finding as its folder tells it, and what was done."""
    from lfm2np.fuzz.campaign import Campaign, Counts
    from lfm2np.fuzz.hand_over import Context, hand_over

    takes = player.probe()
    if not takes.abilities.tells_token_ids:
        raise InconclusiveError("the engine does not tell the ids of its tokens: nothing can be judged")
    command = shlex.join(["lfm2np", *sys.argv[1:]])
    taken = formats.format_of(arguments, takes.abilities.engine)
    context = Context(arguments.target, takes.abilities.engine, taken.name, taken.why, model.path.name, command)
    findings: list[dict[str, Any]] = []
    with tqdm(desc="traces", delay=2, leave=False, disable=None, file=sys.stderr, total=arguments.examples) as bar:

        def tell(counts: Counts) -> None:
            bar.update(counts.traces - bar.n)
            told = f"{counts.requests} requests, {counts.tokens} tokens, {counts.findings} findings"
            bar.set_postfix_str(f"{told}, {counts.replays} replays", refresh=False)

        restart, took = renewal(player, started)
        campaign = Campaign(
            model,
            player,
            taken.name,
            around_of(arguments, model, takes),
            place,
            restart,
            restart is not None and took < QUICK,
            arguments.target.startswith(("http:", "https:")),
            arguments.shrink_minutes * 60,
            tell,
        )
        for failure in failures(arguments, campaign):
            folder = hand_over(Path(arguments.out), failure, model, player, context)
            findings.append(as_row(failure, folder))
            tqdm.write(f"lfm2np: found: {one_line(f'{failure.finding.what} -> {folder}')}", file=sys.stderr)
    counts = campaign.counts
    told: dict[str, Any] = {"format": taken.name, "why_format": taken.why}
    told |= {"traces": counts.traces, "replays": counts.replays, "requests": counts.requests, "tokens": counts.tokens}
    return findings, {"engine": takes.abilities.engine, **told, "seconds": round(counts.seconds, 1)}


def renewal(player: Player, started: StartedServer | None) -> tuple[Callable[[], None] | None, float]:
    """How a new engine is had, if it can be, and how many seconds that takes."""
    from lfm2np.fuzz.play_engine import StepsPlayer

    if started is not None:
        return started.start, started.took
    return (player.close, player.took) if isinstance(player, StepsPlayer) else (None, 0.0)


def failures(arguments: argparse.Namespace, campaign: Campaign) -> Iterator[Failure]:
    """Of the traces that are replayed; else of those that earlier runs left in --out, and then of new ones."""
    from lfm2np.fuzz.campaign import known_traces
    from lfm2np.fuzz.hand_over import TRACE, read_trace

    if arguments.replay:
        traces = {name: read_trace(Path(name)) for name in arguments.replay}
        for name, trace in traces.items():
            if why := campaign.unfit(trace):
                raise RequestError(f"{name}: {why}")
        yield from known_traces(list(traces.values()), campaign, REPLAYS)
        return
    earlier = []
    for path in sorted(Path(arguments.out).glob(f"[!.]*/{TRACE}")):
        earlier.append(read_trace(path))
        if why := campaign.unfit(earlier[-1]):
            tqdm.write(f"lfm2np: {one_line(f'{path}: left out: {why}')}", file=sys.stderr)
            earlier.pop()
    for failure in known_traces(earlier, campaign, EARLIER_REPLAYS):
        yield failure
        campaign.raise_interrupt()
        if campaign.counts.findings >= arguments.findings or campaign.is_lost(failure.finding):
            return
    examples = EXAMPLES if arguments.examples is None and arguments.minutes is None else arguments.examples
    seconds = None if arguments.minutes is None else arguments.minutes * 60
    yield from campaign.run(arguments.seed, examples, seconds, arguments.findings)


def around_of(arguments: argparse.Namespace, model: Model, takes: Takes) -> Any:
    from lfm2np.fuzz.alphabet import alphabet_of
    from lfm2np.fuzz.draw import Around

    tokenizer = model.tokenizer if model.has_tokenizer else None
    alphabet = alphabet_of(tokenizer, model.config.vocab_size)
    most = model.config.max_position_embeddings
    if arguments.max_model_len is not None and arguments.max_model_len > most:
        told = f"--max-model-len {arguments.max_model_len}: expected at most {most}"
        raise RequestError(f"{told}: max_position_embeddings (config.json)")
    longest = max(LEAST_CONTEXT, arguments.max_model_len or min(most, takes.longest or most))
    return Around(
        block=arguments.block_size,
        chunk=arguments.chunk,
        slots=arguments.max_num_seqs or takes.slots or SLOTS,
        longest=longest,
        alphabet=alphabet,
        first=() if tokenizer is None or tokenizer.bos_token_id is None else (tokenizer.bos_token_id,),
        needs_first=not takes.abilities.takes_token_ids,
        stops=() if tokenizer is None or not takes.stops else (" ", "e", tokenizer.decode(alphabet[:1])),
        samples=takes.samples,
        sampling=takes.sampling,
        without=without(arguments.without),
    )


def without(names: str) -> tuple[str, ...]:
    from lfm2np.fuzz.draw import SPECIAL, TEXTS

    chosen = tuple(name for name in names.split(",") if name)
    for name in chosen:
        if name not in (*SPECIAL, TEXTS):
            raise RequestError(f"--without {name!r}: expected some of {', '.join(sorted({*SPECIAL, TEXTS} - {''}))}")
    return chosen


def as_row(failure: Failure, folder: Path) -> dict[str, Any]:
    return {
        "kind": failure.finding.kind,
        "what": failure.finding.what,
        "folder": str(folder),
        "failed": failure.rate[0],
        "replays": failure.rate[1],
        "same_tokens": failure.same_tokens,
        "before": sum(len(one.requests) for one in failure.before),
        "needs_before": failure.needs_before,
        "requests": len(failure.trace.requests),
        "tokens": failure.trace.num_tokens,
        "drawn_requests": len(failure.drawn.requests),
        "drawn_tokens": failure.drawn.num_tokens,
        "traces": failure.traces,
        "seconds": round(failure.seconds, 1),
        "shrinking_seconds": round(failure.shrinking, 1),
    }


def as_text(findings: list[dict[str, Any]], counts: dict[str, Any]) -> str:
    lines = [
        f"engine    {counts['engine']}",
        *([f"format    {counts['format']} ({counts['why_format']})"] if counts["why_format"] else []),
        f"played    {counts['traces']} traces and {counts['replays']} replays: {counts['requests']} requests, "
        f"{counts['tokens']} tokens, in {counts['seconds']:.0f} s",
        f"findings  {len(findings)}",
    ]
    for one in findings:
        lines += [
            "",
            f"{one['kind']}: {one['what']}",
            f"  after {one['traces']} traces and {one['seconds']:.0f} s; {rate_of(one)}",
            f"  shrunk from {one['drawn_requests']} requests ({one['drawn_tokens']} tokens) to {one['requests']} "
            f"({one['tokens']}) in {one['shrinking_seconds']:.0f} s",
            f"  {one['folder']}: trace.json, report.html, issue.md and, for a server, reproduce.py",
        ]
        if one["kind"] == "wrong" and one["requests"] == 1:
            lines.append("  one request alone is wrong: `lfm2np check` tells another format from a bug")
    return "\n".join(lines)


def rate_of(one: dict[str, Any]) -> str:
    if not one["replays"]:
        return "not played again: the server is gone, and there is no --start"
    tokens = "the same tokens" if one["same_tokens"] else "other tokens"
    before = f"; needs what came before: {one['before']} requests" if one["needs_before"] else ""
    return f"fails in {one['failed']} of {one['replays']} replays, each with {tokens}{before}"


def add_fuzz(commands: Commands) -> None:
    parser = add_command(
        commands,
        "fuzz",
        run,
        "try a running engine with timed traces of many requests, and make what fails small",
        EXAMPLE,
        tokenizer=True,
        exit_codes=EXIT_CODES,
    )
    add = parser.add_argument
    add(
        "target", metavar="TARGET", help="http(s)://HOST:PORT, package.module:factory, transformers:[DIR], exec:COMMAND"
    )
    formats.add_options(parser)
    add("--minutes", metavar="N", type=float, help="draw for so long")
    add("--examples", metavar="N", type=int, help=f"draw so many traces ({EXAMPLES}, without --minutes)")
    add("--seed", metavar="N", type=int, default=0, help="of what is drawn (0)")
    add("--findings", metavar="N", type=int, default=1, help="end after so many (1)")
    add("--out", metavar="DIR", default="lfm2np-findings", help="where findings are put (lfm2np-findings)")
    add(
        "--replay",
        metavar="FILE",
        action="append",
        help=f"play this trace.json, up to {REPLAYS} times until it fails, and draw nothing",
    )
    add("--shrink-minutes", metavar="N", type=float, default=5.0, help="for making one finding small (5)")
    add("--block-size", metavar="N", type=int, default=BLOCK, help=f"tokens of the engine's cache blocks ({BLOCK})")
    add(
        "--max-num-batched-tokens",
        "--chunk",
        dest="chunk",
        metavar="N",
        type=int,
        default=CHUNK,
        help=f"most tokens of its steps ({CHUNK})",
    )
    add("--max-num-seqs", metavar="N", type=int, help=f"requests that it runs at once (as it tells, else {SLOTS})")
    add("--max-model-len", metavar="N", type=int, help="most tokens of a request (as it tells, else the model's)")
    add(
        "--without",
        metavar="NAMES",
        default="",
        help="draw no left, cold, sampled, several, stop or streamed requests; text: do not compare texts",
    )
    add("--name", metavar="NAME", help="of the model, for a server that serves several")
    add(
        "--timeout",
        metavar="S",
        type=float,
        default=60.0,
        help="seconds for one answer; one that takes longer hangs (60)",
    )
    add("--start", metavar="COMMAND", help="starts the server, and again where it is gone or hangs")
    add("--start-seconds", metavar="S", type=float, default=300.0, help="that it may take until it answers (300)")
    work.add_options(parser)
