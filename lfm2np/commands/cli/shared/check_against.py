"""`lfm2np check TARGET --against itself | TARGET2`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lfm2np.commands.cli.shared import against
from lfm2np.commands.cli.shared.terminal import command_line, progress_bar, show_report
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.target import Abilities
from lfm2np.suite.itself.asked import Asking, Checked, Held, between
from lfm2np.suite.itself.by_itself import ByItself
from lfm2np.suite.itself.invariance_report import Result, report_of
from lfm2np.suite.itself.relations import NAMES, RELATIONS, Relation
from lfm2np.suite.itself.target_engine import engine_of, smaller

SHRINK_SECONDS = 60.0


def run(arguments: argparse.Namespace) -> None:
    """Prints the relations that hold and those that are broken, and writes the pages.

    ProofError (1) for a broken relation, InconclusiveError (2) if that can't be said.
    """
    require(arguments)
    show_report(arguments, report_of(compared(arguments)))


def require(arguments: argparse.Namespace) -> None:
    against.require(arguments)
    chosen(arguments.relations)
    if arguments.out is not None:
        from lfm2np.suite.fuzz.hand_over import require_place

        require_place(Path(arguments.out))


def chosen(names: str | None) -> Sequence[Relation]:
    if names is None:
        return RELATIONS
    for name in names.split(","):
        if name not in NAMES:
            raise RequestError(f"--relations {name!r}: expected some of {', '.join(NAMES)}")
    return [relation for relation in RELATIONS if relation.name in names.split(",")]


def compared(arguments: argparse.Namespace) -> Result:
    options = against.options_of(arguments)
    relations, two = chosen(arguments.relations), arguments.against != against.ITSELF
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(engine_of(arguments.target, options))]
        if two:
            engines.append(stack.enter_context(engine_of(arguments.against, options)))
        sizes = engines[0].sizes if not two else smaller(engines[0].sizes, engines[1].sizes)
        until, name = against.until(arguments), against.format_name(arguments)
        askings = []
        checked: list[Checked] = []
        for target, engine in zip((arguments.target, arguments.against), engines, strict=False):
            abilities = named(engine.abilities, target) if two else engine.abilities
            with progress_bar("relations") as show:
                asking = Asking(engine.players, abilities, sizes, name, arguments.seed, arguments.bitwise, until, show)
                checked.append(asking.run(relations))
            askings.append(asking)
        is_gone = any(asking.gone for asking in askings)
        other = between(askings[0], askings[1], (checked[0].spread, checked[1].spread)) if two and not is_gone else None
        folders = []
        if arguments.out is not None:
            for asking, each in zip(askings, checked, strict=True):
                folders += handed_over(arguments, asking, each)
    notes = () if all(engine.abilities.takes_cold for engine in engines) else (NO_COLD,)
    return Result(tuple(checked), other, tuple(folders), notes)


def named(abilities: Abilities, target: str) -> Abilities:
    """With the target, where there are two."""
    return replace(abilities, engine=f"{target} ({abilities.engine})")


NO_COLD = "the engine takes no request without cached prefixes: `alone` is the first time that a prompt is sent"


def handed_over(arguments: argparse.Namespace, asking: Asking, checked: Checked) -> list[tuple[str, str]]:
    """Broken relations, each shrunk and as it was asked, written into folders; or why it is not."""
    return [
        (f"{held.relation.name}, {how}", where)
        for held in checked.broken
        for how, where in written(arguments, asking, checked, held)
    ]


def written(arguments: argparse.Namespace, asking: Asking, checked: Checked, held: Held) -> Iterator[tuple[str, str]]:
    """A server that can't be started from here keeps what earlier requests left behind, and shrinking may end in a
    trace that needs that. The whole trace brings its own past."""
    from lfm2np.suite.fuzz.campaign import Campaign
    from lfm2np.suite.fuzz.draw_traces import Around
    from lfm2np.suite.fuzz.hand_over import Context, hand_over

    trace = held.broken.trace if held.broken is not None else None
    if trace is None or held.relation.player or held.relation.samples:
        yield "no script", "it needs more than requests to one server"
        return
    player, sizes = asking.players[""], asking.sizes
    scores = asking.abilities.tells_prompt_logprobs
    judge = ByItself(player, checked.spread, sizes.vocab, with_scores=scores, is_bitwise=checked.is_bitwise)
    around = Around(sizes.block, sizes.chunk, sizes.slots, sizes.longest, tuple(range(sizes.vocab)))
    campaign = Campaign(judge, player, around, shrink_seconds=SHRINK_SECONDS)
    campaign.counts.traces += 1
    played, finding = campaign.play(trace)
    if finding is None:
        yield "no script", "not seen again when its requests were compared with themselves alone"
        return
    failure = campaign.minimize(trace, played, finding)
    campaign.raise_interrupt()
    context = Context(arguments.target, checked.engine, checked.format_name, "", "none", command_line())
    yield "shrunk", str(hand_over(Path(arguments.out), failure, judge, player, context))
    if failure.trace != trace and not failure.is_fresh:
        whole = replace(failure, trace=trace, played=played, finding=finding, rate=(1, 1), before=())
        yield "as it was asked", str(hand_over(Path(arguments.out), whole, judge, player, context))
