"""What `lfm2np fuzz` does once its arguments are read: who is tested and who judges, the traces, the report."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lfm2np.commands.cli.shared import format_options, work
from lfm2np.commands.cli.shared.parser import one_line, option
from lfm2np.commands.cli.shared.prompts import load_model
from lfm2np.commands.cli.shared.terminal import command_line
from lfm2np.engine.loading import Model
from lfm2np.errors import InconclusiveError, RequestError
from lfm2np.oracle.engines.protocol import TOLD
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import FAILED, MOST_REQUESTS, REFUSED
from lfm2np.oracle.engines.target import Abilities, Target
from lfm2np.oracle.report.report import RIGHT, WRONG, Code, Finding, Report, Section, plural
from lfm2np.oracle.vectors_plain import TOKENS_ONLY
from lfm2np.suite.fuzz.campaign import Campaign, Counts, Failure
from lfm2np.suite.fuzz.draw_traces import SPECIAL, TEXTS, Around, alphabet_of
from lfm2np.suite.fuzz.hand_over import Context, hand_over, history, read_trace, require_place
from lfm2np.suite.fuzz.judge import WRONG as WRONG_ANSWER
from lfm2np.suite.fuzz.judge import ByTruth
from lfm2np.suite.fuzz.sizes import BLOCK, CHUNK, EXAMPLES, GENERATING, LEAST_CONTEXT, REPLAYS, SLOTS
from lfm2np.suite.fuzz.started import StartedServer, answers
from lfm2np.suite.itself.target_engine import HTTP, Options, player_of

HINTS = {"block_size": BLOCK, "max_num_batched_tokens": CHUNK, "max_num_seqs": SLOTS}
QUICK = 10.0  # seconds in which a server is started anew for each replay


class Subject(NamedTuple):
    """What is under test: how it is played, who judges, what is drawn for it."""

    player: Target
    judge: ByTruth
    around: Around
    context: Context
    abilities: Abilities


def fuzzed(arguments: argparse.Namespace) -> tuple[Report, bool]:
    """Of all traces, and whether an interrupt ended it after a finding; one before is raised. InconclusiveError if
    nothing can be judged."""
    left_out = without(arguments.without)
    require_place(Path(arguments.output))
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(started_server(arguments))
        subject = by_truth(arguments, left_out, stack)
        campaign, found, is_interrupted = played(arguments, subject, started)
    return report_of(arguments, subject, campaign, found), is_interrupted


@contextlib.contextmanager
def started_server(arguments: argparse.Namespace) -> Iterator[StartedServer | None]:
    """The server of --start, if any."""
    target = arguments.target
    if arguments.start is None:
        yield None
        return
    if not target.startswith(HTTP):
        raise RequestError(f"--start: expected a server as TARGET, not {target!r}")
    with contextlib.closing(StartedServer(arguments.start, lambda: answers(target), arguments.start_seconds)) as server:
        server.start()
        yield server


def by_truth(arguments: argparse.Namespace, left_out: tuple[str, ...], stack: contextlib.ExitStack) -> Subject:
    model = load_model(arguments)
    place = stack.enter_context(work.place_of(arguments, model))
    given = {name: getattr(arguments, name) for name in TOLD}
    rounded = format_options.computed_in(arguments)
    options = Options(model.path, given, model.config.vocab_size, arguments.name, arguments.timeout, rounded)
    player = player_of(arguments.target, options, model.tokenizer_or_none, MOST_REQUESTS, HINTS)  # all that are due
    stack.callback(player.close)
    abilities = player.probe()
    if not abilities.tells_token_ids:
        raise InconclusiveError("the engine does not report token ids: nothing can be judged")
    taken = format_options.format_of(arguments, abilities.engine)
    commands = command_line(), command_line({option(name) for name in ("replay", *GENERATING)})
    context = Context(arguments.target, abilities.engine, taken.name, taken.why, model.path.name, *commands)
    if TEXTS not in left_out and not abilities.tells_texts:
        words = 'the text of the first response is empty, so texts are not judged; leave "text" out where there is none'
        print(f"lfm2np: {words}", file=sys.stderr)
    judge = ByTruth(model, taken.name, place, TEXTS not in left_out and abilities.tells_texts)
    around = around_of(given, left_out, model, abilities)
    return Subject(player, judge, around, context, abilities)


def played(
    arguments: argparse.Namespace, subject: Subject, started: StartedServer | None
) -> tuple[Campaign, list[tuple[Failure, Path]], bool]:
    """The campaign at its end, each failure with its folder, and whether an interrupt came after one."""
    player, judge, around, context, _ = subject
    found: list[tuple[Failure, Path]] = []
    with tqdm(desc="traces", delay=2, leave=False, disable=None, file=sys.stderr, total=arguments.examples) as bar:

        def show(counts: Counts) -> None:
            bar.update(counts.traces - bar.n)
            figures = f"{counts.requests} requests, {counts.tokens} tokens, {counts.findings} findings"
            bar.set_postfix_str(f"{figures}, {counts.replays} replays", refresh=False)

        restart, took = renewal(player, started)
        campaign = Campaign(
            judge,
            player,
            around,
            restart,
            is_quick=restart is not None and took < QUICK,
            is_live=arguments.target.startswith(HTTP),
            shrink_seconds=arguments.shrink_minutes * 60,
            report=show,
            say=say,
        )
        try:
            for failure in failures(arguments, campaign):
                folder = hand_over(Path(arguments.output), failure, judge, player, context)
                found.append((failure, folder))
                say(f"found: {failure.finding.what} -> {folder}")
        except KeyboardInterrupt:
            if not found:
                raise
            return campaign, found, True
    return campaign, found, False


def say(line: str) -> None:
    tqdm.write(f"lfm2np: {one_line(line)}", file=sys.stderr)


def renewal(player: Target, started: StartedServer | None) -> tuple[Callable[[], None] | None, float]:
    """How a new engine is had, if it can be, and how many seconds that takes."""
    if started is not None:
        return started.start, started.took
    is_stepped = isinstance(player, PythonTarget) and player.probe().can_abort
    return (player.close, player.took) if isinstance(player, PythonTarget) and is_stepped else (None, 0.0)


def failures(arguments: argparse.Namespace, campaign: Campaign) -> Iterator[Failure]:
    """Of the traces that are replayed, else of new ones."""
    if not arguments.replay:
        examples = EXAMPLES if arguments.examples is None and arguments.minutes is None else arguments.examples
        seconds = None if arguments.minutes is None else arguments.minutes * 60
        yield from campaign.run(arguments.seed, examples, seconds, arguments.findings)
        return
    traces = {name: read_trace(Path(name)) for name in arguments.replay}
    for name, trace in traces.items():
        if why := campaign.unfit(trace):
            raise RequestError(f"{name}: {why}")
    yield from campaign.known(list(traces.values()), REPLAYS)


def around_of(given: Mapping[str, int | None], left_out: tuple[str, ...], model: Model, abilities: Abilities) -> Around:
    """`given`: of TOLD; what neither the user nor the engine says is assumed. `left_out`: of --without. Without a
    tokenizer no text is known, so no stop string."""
    most, tokenizer = model.config.max_position_embeddings, model.tokenizer_or_none
    asked = given["max_model_len"]
    if asked is not None and asked > most:
        raise RequestError(f"--max-model-len {asked}: expected at most {most}: max_position_embeddings (config.json)")
    reported = (abilities.block, abilities.chunk, abilities.slots, abilities.longest)
    known = {name: given[name] or size for name, size in zip(TOLD, reported, strict=True)}
    block, chunk, slots, longest = known.values()
    alphabet = alphabet_of(tokenizer, model.config.vocab_size)
    return Around(
        block=block or BLOCK,
        chunk=chunk or CHUNK,
        slots=slots or SLOTS,
        longest=max(LEAST_CONTEXT, min(most, longest or most)),
        alphabet=alphabet,
        first=() if tokenizer is None or tokenizer.bos_token_id is None else (tokenizer.bos_token_id,),
        needs_first=not abilities.takes_token_ids,
        stops=() if tokenizer is None or not abilities.takes_stops else (" ", "e", tokenizer.decode(alphabet[:1])),
        samples=abilities.takes_samples,
        sampling=abilities.takes_sampling,
        without=left_out,
        assumed=tuple(name for name, size in known.items() if size is None and name != "max_model_len"),
    )


def without(names: str) -> tuple[str, ...]:
    chosen = tuple(name for name in names.split(",") if name)
    for name in chosen:
        if name not in (*SPECIAL, TEXTS):
            raise RequestError(f"--without {name!r}: expected some of {', '.join(sorted({*SPECIAL, TEXTS} - {''}))}")
    return chosen


def report_of(
    arguments: argparse.Namespace, subject: Subject, campaign: Campaign, found: list[tuple[Failure, Path]]
) -> Report:
    counts, context, around = campaign.counts, subject.context, subject.around
    sizes = dict(zip(TOLD, (around.block, around.chunk, around.slots, around.longest), strict=True))
    unknown = [] if arguments.replay else list(around.assumed)
    shown = [f"{name} {size} ({source_of(name, arguments, subject)})" for name, size in sizes.items()]
    is_lone = any(each.finding.kind == WRONG_ANSWER and len(each.trace.requests) == 1 for each, _ in found)
    lone = ["one request alone is wrong: `lfm2np check` tells a number format from a bug"] if is_lone else []
    is_refused = any(each.finding.kind in (FAILED, REFUSED) for each, _ in found)
    is_known = arguments.replay or arguments.max_model_len or subject.abilities.longest == around.longest
    guess = f"max_model_len {around.longest} is the model's: if the engine takes fewer, give --max-model-len"
    too_long = [guess] if is_refused and not is_known else []
    files = "trace.json, report.html, issue.md" + ", reproduce.py" * arguments.target.startswith(HTTP)
    folders = [f"{folder}: {files}" for _, folder in found]
    return Report(
        command="fuzz",
        verdict=plural(len(found), "finding") if found else "no finding",
        exit_code=WRONG if found else RIGHT,
        findings=[finding_of(failure, folder) for failure, folder in found],
        facts={
            "engine": context.engine,
            "format": f"{context.format_name} ({context.why_format})" if context.why_format else context.format_name,
            "played": f"{counts.traces} traces and {counts.replays} replays: {counts.requests} requests, "
            f"{counts.tokens} tokens, in {counts.seconds:.0f} s",
            "sizes": ", ".join(shown),
        },
        next_steps=[*folders, *lone, *too_long],
        not_tested=[
            *([] if subject.abilities.tells_logprobs else [TOKENS_ONLY]),
            *([assumed_text(unknown)] if unknown and not found else []),
        ],
        sections=[Section(str(folder), [Code(lines_of(failure))]) for failure, folder in found],
        figures={
            "engine": context.engine,
            "format": context.format_name,
            "why_format": context.why_format,
            **{name: getattr(counts, name) for name in ("traces", "replays", "requests", "tokens")},
            "sizes": sizes,
            "assumed": unknown,
            "seconds": round(counts.seconds, 1),
        },
    )


def source_of(name: str, arguments: argparse.Namespace, subject: Subject) -> str:
    """Who says a size, of TOLD."""
    abilities = subject.abilities
    reported = dict(zip(TOLD, (abilities.block, abilities.chunk, abilities.slots, abilities.longest), strict=True))
    if getattr(arguments, name) is not None:
        return "given"
    if reported[name] is not None:
        return "reported"
    return "assumed" if name in subject.around.assumed else "the model's"


def finding_of(failure: Failure, folder: Path) -> Finding:
    evidence = {
        "folder": str(folder),
        "failed": failure.rate[0],
        "replays": failure.rate[1],
        "same_tokens": failure.same_tokens,
        "requests": len(failure.trace.requests),
        "tokens": failure.trace.num_tokens,
        "drawn_requests": len(failure.drawn.requests),
        "drawn_tokens": failure.drawn.num_tokens,
        "traces": failure.traces,
        "seconds": round(failure.seconds, 1),
        "shrinking_seconds": round(failure.shrinking, 1),
    }
    return Finding(failure.finding.kind, failure.finding.what, evidence=evidence)


def lines_of(failure: Failure) -> list[str]:
    said = history(failure)
    return [f"{failure.finding.kind}: {said['found']}", f"  {said['replays']}", f"  {said['size']}"]


def assumed_text(names: list[str]) -> str:
    """A trace meets the borders of an engine's blocks and chunks by chance where they are not known."""
    return f"borders of other sizes than those that were assumed: give {', '.join(map(option, names))}"
