"""`lfm2np fuzz TARGET`: timed traces of many requests, drawn, judged, and shrunk where one fails."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from lfm2np.commands.cli.check import target_of
from lfm2np.commands.cli.conformance import require_hypothesis
from lfm2np.commands.cli.shared import against, format_options, work
from lfm2np.commands.cli.shared.parser import (
    Commands,
    add,
    add_command,
    add_modes,
    one_line,
    option,
    refuse_unused,
    require_at_least,
    require_times,
)
from lfm2np.commands.cli.shared.prompts import load_model
from lfm2np.commands.cli.shared.terminal import command_line, show_report
from lfm2np.engine.loading import Model
from lfm2np.errors import InconclusiveError, RequestError
from lfm2np.oracle.engines.protocol import TOLD
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import MOST_REQUESTS
from lfm2np.oracle.report.report import RIGHT, WRONG, Code, Finding, Report, Section, plural
from lfm2np.suite.fuzz.sizes import (
    ASSUMED,
    BLOCKS,
    CHUNKS,
    GIVEN,
    MODELS,
    REPORTED,
    SLOTS,
    Size,
    Sizes,
    arounds_of,
    assumed,
    sizes_of,
)

if TYPE_CHECKING:
    from lfm2np.checkpoint.text.tokenizer import Tokenizer
    from lfm2np.oracle.engines.target import Abilities, Target
    from lfm2np.suite.fuzz.campaign import Campaign, Failure
    from lfm2np.suite.fuzz.draw_traces import Around
    from lfm2np.suite.fuzz.hand_over import Context
    from lfm2np.suite.fuzz.judge import Judge
    from lfm2np.suite.fuzz.started import StartedServer

EXIT_CODES = """exit codes:
  0    no trace failed
  1    a trace failed; its findings are in a folder
  2    inconclusive: the engine does not report its token ids
  3    it could not run
  130  interrupted; findings so far are kept"""
EXAMPLE = """lfm2np fuzz http://127.0.0.1:8000 --model LFM2-350M --format bfloat16 --minutes 10
  lfm2np fuzz http://127.0.0.1:8080 --model DIR --start "./llama-server -m model.gguf -np 4 --port 8080"
  lfm2np fuzz package.module:factory --model DIR --examples 500 --block-size 16 --max-num-batched-tokens 64
  lfm2np fuzz http://127.0.0.1:8000 --model DIR --replay lfm2np-findings/wrong-1/trace.json
  lfm2np fuzz http://127.0.0.1:8000 --against itself --format bfloat16 --vocab-size 32000"""
HINTS = {"block_size": 16, "max_num_batched_tokens": 512, "max_num_seqs": 8}  # what a factory gets where none are given
EXAMPLES, REPLAYS, EARLIER_REPLAYS = 200, 10, 3
LEAST_CONTEXT = 4  # tokens: a BOS, a token, and an answer to it, with one to spare
NO_START = "only with --start"
UNUSED = {  # options that a mode does not use
    against.WITH: against.NEED_TRUTH,
    against.WITHOUT: against.NEED_AGAINST,
    against.LOCAL: against.NEED_SERVER,
    NO_START: ("start_seconds",),
}
QUICK = 10.0  # seconds in which a server is started anew for each replay


def run(arguments: argparse.Namespace) -> None:
    """Prints the findings. ProofError (1) if there are any, InconclusiveError (2) if nothing can be judged."""
    require_hypothesis()
    from lfm2np.suite.fuzz.hand_over import require_place

    refuse_unused(arguments, *against.modes(arguments), *([NO_START] if arguments.start is None else []))
    require_numbers(arguments)
    require_place(Path(arguments.out))
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(started_server(arguments))
        subject = by_truth(arguments, stack) if arguments.against is None else by_itself(arguments, stack)
        findings, counts = fuzzed(arguments, subject, started)
    show_report(arguments, report_of(findings, counts))


def require_numbers(arguments: argparse.Namespace) -> None:
    require_at_least(arguments, examples=1, findings=1, block_size=1, max_num_batched_tokens=1, max_num_seqs=1, seed=0)
    require_at_least(arguments, max_model_len=LEAST_CONTEXT)
    require_times(arguments, "minutes", "timeout", "start_seconds")
    if not 0 <= arguments.shrink_minutes < 1e7:
        raise RequestError(f"--shrink-minutes {arguments.shrink_minutes}: expected at least 0")
    without(arguments.without)


class Subject(NamedTuple):
    """What is under test: how it is played, what is drawn for it, around what sizes, who judges."""

    player: Target
    judge: Judge
    around: Around
    sizes: Sizes
    context: Context


@contextlib.contextmanager
def started_server(arguments: argparse.Namespace) -> Iterator[StartedServer | None]:
    """The server of --start, if any."""
    from lfm2np.suite.fuzz.started import StartedServer, answers

    target = arguments.target
    if arguments.start is None:
        yield None
        return
    if not target.startswith(("http:", "https:")):
        raise RequestError(f"--start: expected a server as TARGET, not {target!r}")
    with contextlib.closing(StartedServer(arguments.start, lambda: answers(target), arguments.start_seconds)) as server:
        server.start()
        yield server


def by_truth(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> Subject:
    from lfm2np.suite.fuzz.draw_traces import TEXTS
    from lfm2np.suite.fuzz.hand_over import Context
    from lfm2np.suite.fuzz.judge import ByTruth
    from lfm2np.suite.fuzz.watched import WatchedServer

    model = load_model(arguments)
    place = stack.enter_context(work.place_of(arguments, model))
    if arguments.target.startswith(("http:", "https:")):
        player: Target = WatchedServer(arguments.target, model.tokenizer_or_none, arguments.name, arguments.timeout)
    else:
        player = local_target(arguments, model)
    stack.callback(player.close)
    abilities = player.probe()
    if not abilities.tells_token_ids:
        raise InconclusiveError("the engine does not report token ids: nothing can be judged")
    taken = format_options.format_of(arguments, abilities.engine)
    context = Context(arguments.target, abilities.engine, taken.name, taken.why, model.path.name, command_line())
    left_out = without(arguments.without)
    texts = TEXTS not in left_out
    if texts and not abilities.tells_texts:
        words = 'the text of the first response is empty, so texts are not judged; leave "text" out where there is none'
        print(f"lfm2np: {words}", file=sys.stderr)
    judge = ByTruth(model, taken.name, place, texts and abilities.tells_texts)
    sizes = sizes_of(given(arguments), abilities, longest_of(arguments, model, abilities))
    around = around_of(left_out, model.tokenizer_or_none, model.config.vocab_size, abilities, sizes)
    return Subject(player, judge, around, sizes, context)


def by_itself(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> Subject:
    """Its spread is measured first; with another engine the larger of both."""
    from lfm2np.suite.fuzz.hand_over import Context
    from lfm2np.suite.itself.asked import Asking
    from lfm2np.suite.itself.by_itself import ByItself
    from lfm2np.suite.itself.target_engine import engine_of, smaller

    against.require(arguments)
    name = against.format_name(arguments)
    targets = [arguments.target] if arguments.against == against.ITSELF else [arguments.target, arguments.against]
    engines = [stack.enter_context(engine_of(target, against.options_of(arguments))) for target in targets]
    first, last = engines[0], engines[-1]
    if not first.abilities.tells_logprobs:
        raise InconclusiveError("the engine reports no log-probabilities: other tokens can't be judged without a truth")
    sizes = smaller(first.sizes, last.sizes)
    spreads = [Asking(each.players, each.abilities, sizes, name, arguments.seed).begin() for each in engines]
    judge = ByItself(
        last.players[""],
        max(spreads, key=lambda each: each.nats),
        sizes.vocab,
        is_same=first is last,
        with_scores=first.abilities.tells_prompt_logprobs,
        is_bitwise=arguments.bitwise,
    )
    source = GIVEN if arguments.max_model_len else REPORTED if first.abilities.longest else ASSUMED
    around_sizes = sizes_of(given(arguments), first.abilities, Size((sizes.longest,), source))
    abilities = replace(first.abilities, takes_sampling=first.abilities.takes_sampling and first.abilities.takes_seeds)
    around = around_of(without(arguments.without), None, sizes.vocab, abilities, around_sizes)
    context = Context(arguments.target, first.abilities.engine, name, "", "none", command_line())
    return Subject(first.players[""], judge, around, around_sizes, context)


def given(arguments: argparse.Namespace) -> dict[str, int | None]:
    return {name: getattr(arguments, name) for name in HINTS}


def local_target(arguments: argparse.Namespace, model: Model) -> Target:
    """With the sizes that are given as hints; all requests that are due go to the engine at once."""
    if re.fullmatch(r"[\w.]+:[\w.]+", arguments.target) and not arguments.target.startswith("transformers:"):
        sizes = {name: number or HINTS[name] for name, number in given(arguments).items()}
        return PythonTarget(arguments.target, model.path, sizes, MOST_REQUESTS)
    return target_of(argparse.Namespace(**{**vars(arguments), "at_once": HINTS["max_num_seqs"]}), model)


def fuzzed(
    arguments: argparse.Namespace, subject: Subject, started: StartedServer | None
) -> tuple[list[Finding], dict[str, Any]]:
    from lfm2np.suite.fuzz.campaign import Campaign, Counts
    from lfm2np.suite.fuzz.hand_over import hand_over

    player, judge, around, sizes, context = subject
    findings: list[Finding] = []
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
            restart is not None and took < QUICK,
            arguments.target.startswith(("http:", "https:")),
            arguments.shrink_minutes * 60,
            show,
            say,
            arounds=arounds_of(around, sizes),
        )
        for failure in failures(arguments, campaign):
            folder = hand_over(Path(arguments.out), failure, judge, player, context)
            findings.append(finding_of(failure, folder))
            say(f"found: {failure.finding.what} -> {folder}")
    counts = campaign.counts
    figures = {name: getattr(counts, name) for name in ("traces", "replays", "requests", "tokens")}
    if not judge.is_certain:
        figures |= {"against": arguments.against, "expected": judge.expected, "once": counts.once}
    head = {"engine": context.engine, "format": context.format_name, "why_format": context.why_format}
    figures["sizes"] = {name: {"values": list(size.values), "from": size.source} for name, size in sizes.items()}
    figures["assumed"] = [] if arguments.replay else assumed(sizes)
    return findings, {**head, **figures, "seconds": round(counts.seconds, 1)}


def say(line: str) -> None:
    tqdm.write(f"lfm2np: {one_line(line)}", file=sys.stderr)


def renewal(player: Target, started: StartedServer | None) -> tuple[Callable[[], None] | None, float]:
    """How a new engine is had, if it can be, and how many seconds that takes."""
    if started is not None:
        return started.start, started.took
    is_stepped = isinstance(player, PythonTarget) and player.probe().can_abort
    return (player.close, player.took) if isinstance(player, PythonTarget) and is_stepped else (None, 0.0)


def failures(arguments: argparse.Namespace, campaign: Campaign) -> Iterator[Failure]:
    """Of the traces that are replayed; else of those that earlier runs left in --out, and then of new ones."""
    from lfm2np.suite.fuzz.campaign import known_traces
    from lfm2np.suite.fuzz.hand_over import TRACE, read_trace

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
            say(f"{path}: left out: {why}")
            earlier.pop()
    for failure in known_traces(earlier, campaign, EARLIER_REPLAYS):
        yield failure
        campaign.raise_interrupt()
        if campaign.counts.findings >= arguments.findings or campaign.is_lost(failure.finding):
            return
    examples = EXAMPLES if arguments.examples is None and arguments.minutes is None else arguments.examples
    seconds = None if arguments.minutes is None else arguments.minutes * 60
    yield from campaign.run(arguments.seed, examples, seconds, arguments.findings)


def longest_of(arguments: argparse.Namespace, model: Model, abilities: Abilities) -> Size:
    most = model.config.max_position_embeddings
    if arguments.max_model_len is not None and arguments.max_model_len > most:
        expected = f"expected at most {most}: max_position_embeddings (config.json)"
        raise RequestError(f"--max-model-len {arguments.max_model_len}: {expected}")
    if arguments.max_model_len is not None:
        return Size((arguments.max_model_len,), GIVEN)
    longest = min(most, abilities.longest or most)
    return Size((max(LEAST_CONTEXT, longest),), MODELS if longest == most else REPORTED)


def around_of(
    left_out: tuple[str, ...], tokenizer: Tokenizer | None, vocab_size: int, abilities: Abilities, sizes: Sizes
) -> Around:
    """`left_out`: of --without. Without a tokenizer no text is known, so no stop string."""
    from lfm2np.suite.fuzz.draw_traces import Around, alphabet_of

    alphabet = alphabet_of(tokenizer, vocab_size)
    block, chunk, slots, longest = (max(sizes[name].values) for name in TOLD)
    return Around(
        block=block,
        chunk=chunk,
        slots=slots,
        longest=longest,
        alphabet=alphabet,
        first=() if tokenizer is None or tokenizer.bos_token_id is None else (tokenizer.bos_token_id,),
        needs_first=not abilities.takes_token_ids,
        stops=() if tokenizer is None or not abilities.takes_stops else (" ", "e", tokenizer.decode(alphabet[:1])),
        samples=abilities.takes_samples,
        sampling=abilities.takes_sampling,
        without=left_out,
    )


def without(names: str) -> tuple[str, ...]:
    from lfm2np.suite.fuzz.draw_traces import SPECIAL, TEXTS

    chosen = tuple(name for name in names.split(",") if name)
    for name in chosen:
        if name not in (*SPECIAL, TEXTS):
            raise RequestError(f"--without {name!r}: expected some of {', '.join(sorted({*SPECIAL, TEXTS} - {''}))}")
    return chosen


def finding_of(failure: Failure, folder: Path) -> Finding:
    evidence = {
        "folder": str(folder),
        "failed": failure.rate[0],
        "replays": failure.rate[1],
        "same_tokens": failure.same_tokens,
        "before": sum(len(trace.requests) for trace in failure.before),
        "needs_before": failure.needs_before,
        "requests": len(failure.trace.requests),
        "tokens": failure.trace.num_tokens,
        "drawn_requests": len(failure.drawn.requests),
        "drawn_tokens": failure.drawn.num_tokens,
        "traces": failure.traces,
        "seconds": round(failure.seconds, 1),
        "shrinking_seconds": round(failure.shrinking, 1),
    }
    return Finding(failure.finding.kind, failure.finding.what, evidence=evidence)


def report_of(findings: Sequence[Finding], counts: Mapping[str, Any]) -> Report:
    why, once = counts["why_format"], counts.get("once")
    has_lone = any(finding.kind == "wrong" and finding.evidence["requests"] == 1 for finding in findings)
    lone = ["one request alone is wrong: `lfm2np check` tells a number format from a bug"] if has_lone else []
    return Report(
        command="fuzz",
        verdict=plural(len(findings), "finding") if findings else "no finding",
        exit_code=WRONG if findings else RIGHT,
        findings=findings,
        facts={
            "engine": counts["engine"],
            "format": f"{counts['format']} ({why})" if why else counts["format"],
            **({"judged": counts["expected"]} if "expected" in counts else {}),
            "played": f"{counts['traces']} traces and {counts['replays']} replays: {counts['requests']} requests, "
            f"{counts['tokens']} tokens, in {counts['seconds']:.0f} s",
            "sizes": sizes_text(counts["sizes"]),
            **({"once": f"{once} differences that were seen once and never again"} if once else {}),
        },
        next_steps=[*map(folder_text, findings), *lone],
        not_tested=[] if findings or not counts["assumed"] else [assumed_text(counts["assumed"])],
        sections=[Section(finding.evidence["folder"], [Code(lines_of(finding))]) for finding in findings],
        figures=counts,
    )


def lines_of(finding: Finding) -> list[str]:
    evidence = finding.evidence
    return [
        f"{finding.kind}: after {evidence['traces']} traces and {evidence['seconds']:.0f} s; {rate_of(evidence)}",
        f"  shrunk from {evidence['drawn_requests']} requests ({evidence['drawn_tokens']} tokens) to "
        f"{evidence['requests']} ({evidence['tokens']}) in {evidence['shrinking_seconds']:.0f} s",
    ]


def folder_text(finding: Finding) -> str:
    return f"{finding.evidence['folder']}: trace.json, report.html, issue.md and, for a server, reproduce.py"


def sizes_text(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {' or '.join(map(str, size['values']))} ({size['from']})" for name, size in sizes.items())


def assumed_text(names: Sequence[str]) -> str:
    """A trace meets the borders of an engine's blocks and chunks by chance where they are not known."""
    return f"borders of other sizes than those that were assumed: give {', '.join(map(option, names))}"


def rate_of(evidence: Mapping[str, Any]) -> str:
    if not evidence["replays"]:
        return "not played again: the server is gone, and there is no --start"
    tokens = "the same tokens" if evidence["same_tokens"] else "other tokens"
    before = f"; needs what came before: {evidence['before']} requests" if evidence["needs_before"] else ""
    return f"fails in {evidence['failed']} of {evidence['replays']} replays, each with {tokens}{before}"


def add_fuzz(commands: Commands) -> None:
    text = "test a running engine with timed traces of many requests, and shrink what fails"
    parser = add_command(commands, "fuzz", run, text, EXAMPLE, tokenizer=True, exit_codes=EXIT_CODES, is_verdict=True)
    add(parser, "TARGET", "http(s)://HOST:PORT, package.module:factory, transformers:[DIR], exec:COMMAND")
    format_options.add_options(parser)
    add(parser, "--minutes N", "generate traces for N minutes", type=float)
    add(parser, "--examples N", f"generate N traces ({EXAMPLES}, without --minutes)")
    add(parser, "--seed N", "seed of the generated traces (0)", default=0)
    add(parser, "--findings N", "stop after N findings (1)", default=1)
    add(parser, "--out DIR", "folder for findings (lfm2np-findings)", default="lfm2np-findings")
    replay = f"replay this trace.json, up to {REPLAYS} times until it fails, and generate nothing"
    add(parser, "--replay FILE", replay, action="append")
    add(parser, "--shrink-minutes N", "time for shrinking a finding (5)", type=float, default=5.0)
    blocks, chunks = (" and ".join(map(str, sizes)) for sizes in (BLOCKS, CHUNKS))
    add(parser, "--block-size N", f"tokens in a cache block of the engine (as it reports, else {blocks} in turn)")
    tokens = f"most tokens in a step of the engine (as it reports, else {chunks} in turn)"
    add(parser, "--max-num-batched-tokens N", tokens)
    add(parser, "--max-num-seqs N", f"requests that the engine runs at once (as it reports, else {SLOTS[0]})")
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
    against.add_options(parser)
    add_modes(parser, UNUSED)
