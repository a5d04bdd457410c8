"""From a verdict to its cause: the shortest wrong request of a check, recorded alone or beside others, and located."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.errors import Lfm2npError
from lfm2np.model.config import ModelConfig
from lfm2np.oracle.check import Cause, Checked
from lfm2np.oracle.judging.verdict import Position
from lfm2np.oracle.locate.dump import parse_dump
from lfm2np.oracle.locate.locate import Report, finding_lines, locate, shortened
from lfm2np.oracle.recorders.registry import Record
from lfm2np.oracle.targets.records import Ask
from lfm2np.progress import Progress

MOST_ASKS = 3  # wrong requests that are tried, the shortest first
MOST_BESIDE = 7  # others that one is tried with
IDS_OF_A_LINE, MOST_IDS = 64, 512  # of a prompt


@dataclass(frozen=True)
class Trial:
    """Prompts that run together, and the one among them that is recorded."""

    ask: str
    prompts: tuple[tuple[int, ...], ...]
    request: int
    max_tokens: int

    def without(self, index: int) -> Trial:
        kept = tuple(prompt for number, prompt in enumerate(self.prompts) if number != index)
        return Trial(self.ask, kept, self.request - (index < self.request), self.max_tokens)


def cause_of(
    checked: Checked,
    target: str,
    record: Record,
    tensors: Mapping[str, StoredTensor],
    config: ModelConfig,
    progress: Progress | None = None,
) -> Cause | None:
    """Where the engine goes wrong in one of its wrong requests; None if no token or log-probability was wrong.

    target     what `record` records, in words
    progress   called with (recordings done, the most that there may be)
    An engine that can't be recorded gives a cause without a finding: the check's result stays.
    """
    asks = wrong_asks(checked.positions)
    if not asks:
        return None
    done = 0

    def report_of(trial: Trial) -> Report:
        nonlocal done
        content = record(trial.prompts, trial.request, trial.max_tokens)
        dump = parse_dump(content, f"what {target} recorded of {trial.ask}", config)
        done += 1
        if progress:
            progress(done, 2 * MOST_ASKS + MOST_BESIDE)
        return locate(tensors, config, dump)

    try:
        for trial in trials(checked, asks):
            report = report_of(trial)
            if report.findings:
                return cause(target, *without_needless(trial, report, report_of))
    except Lfm2npError as problem:
        return cause(target, alone(*asks[0]), None, str(problem))
    return cause(target, alone(*asks[0]), None)


def cause_to_dump(checked: Checked, target: str, then: str) -> Cause | None:
    """For an engine that shows only answers: which wrong request to dump, which tensors, and what to run `then`.

    None if no token or log-probability was wrong.
    """
    asks = wrong_asks(checked.positions)
    if not asks:
        return None
    *_, trial = trials(checked, asks[:1])  # alone, or as it was asked: beside others
    others = [prompt for index, prompt in enumerate(trial.prompts) if index != trial.request]
    how = f"beside {len(others)} others" if others else "alone"
    lines = (
        f"not recorded        {target} shows answers only; if the same engine runs in Python: --locate RECORDER",
        f"request to dump     {trial.ask}: {trial.max_tokens} new, greedy, {how}",
        *prompt_lines("its prompt ids", trial.prompts[trial.request]),
        *(line for prompt in others for line in prompt_lines("one beside it", prompt)),
        "tensors to write    token_ids [T] and steps [S], whole numbers; model.layers.N [T, hidden] of each layer N",
        "                    and lm_head find the layer, in it conv.in_proj, conv.conv, conv.state,",
        "                    self_attn.q_rotated, self_attn.attended, feed_forward.w2, ... the operation; all names:",
        "                    docs/engine/7-locate.md",
        "how to write them   as safetensors: the same page has a writer in C++ and one in Rust, without dependencies",
        f"then                {then}",
    )
    return cause_with(target, trial, lines)


def prompt_lines(name: str, ids: Sequence[int]) -> list[str]:
    """All ids of a prompt, or the first MOST_IDS and where the others are."""
    starts = range(0, min(len(ids), MOST_IDS), IDS_OF_A_LINE)
    lines = [",".join(map(str, ids[start : start + IDS_OF_A_LINE])) for start in starts]
    rest = [f"... {len(ids)} in all: cause.prompts of --json"] if ids[MOST_IDS:] else []
    return [f"{'' if index else name:<20}{line}" for index, line in enumerate([*lines, *rest])]


def wrong_asks(positions: Sequence[Position]) -> list[tuple[Ask, int]]:
    """Wrong requests and the first wrong row of each, the shortest first; those alone before those beside others."""
    first: dict[str, tuple[Ask, int]] = {}
    for position in positions:
        if position.is_wrong and (position.ask.id not in first or position.row < first[position.ask.id][1]):
            first[position.ask.id] = (position.ask, position.row)
    return sorted(first.values(), key=lambda pair: (bool(pair[0].factors.get("beside")), pair[1], pair[0].id))


def trials(checked: Checked, asks: Sequence[tuple[Ask, int]]) -> Iterator[Trial]:
    """Each alone, then each that ran in a batch beside others of its case that were in flight with it or near it."""
    for ask, row in asks[:MOST_ASKS]:
        yield alone(ask, row)
    for ask, row in [pair for pair in asks if pair[0].factors.get("beside")][:MOST_ASKS]:
        case = [other for other, _ in checked.pairs if other.case == ask.case]
        place = next(index for index, other in enumerate(case) if other.id == ask.id)
        start = max(0, min(place - MOST_BESIDE // 2, len(case) - 1 - MOST_BESIDE))
        near = case[start : start + MOST_BESIDE + 1]
        yield Trial(
            ask.id, tuple(neighbour.prompt_token_ids for neighbour in near), place - start, new_tokens(ask, row)
        )


def alone(ask: Ask, row: int) -> Trial:
    return Trial(ask.id, (ask.prompt_token_ids,), 0, new_tokens(ask, row))


def new_tokens(ask: Ask, row: int) -> int:
    """As many as are needed to compute that row."""
    return max(1, row + 2 - len(ask.prompt_token_ids))


def without_needless(trial: Trial, report: Report, report_of: Callable[[Trial], Report]) -> tuple[Trial, Report]:
    """The trial without neighbours that are not needed for it to be wrong."""
    for index in reversed(range(len(trial.prompts))):
        if index != trial.request and len(trial.prompts) > 1:
            smaller = trial.without(index)
            smaller_report = report_of(smaller)
            if smaller_report.findings:
                trial, report = smaller, smaller_report
    return trial, report


def cause(target: str, trial: Trial, report: Report | None, problem: str = "") -> Cause:
    """Of a report with a finding; or of none, and the problem."""
    first = report.findings[0] if report else None
    tokens = f"prompt of {len(trial.prompts[trial.request])}, {trial.max_tokens} new"
    others = f"beside {len(trial.prompts) - 1} others" if len(trial.prompts) > 1 else "alone"
    if report and first:
        lines = finding_lines(first)
        more = shortened([finding.name for finding in report.findings[1:]])
        lines += [f"also wrong          {more}"] if more else []
    elif problem:
        lines = [f"not recorded        {problem}"]
    else:
        lines = ["nothing is wrong    there: the bug needs what was not recorded (a cache, other requests, the server)"]
    lines = [f"recorded            {target} {trial.ask}: {tokens}, {others}", *lines]
    return cause_with(target, trial, lines, asdict(first) if first else None)


def cause_with(target: str, trial: Trial, lines: Sequence[str], finding: Mapping[str, Any] | None = None) -> Cause:
    is_beside = len(trial.prompts) > 1
    return Cause(target, trial.ask, trial.prompts, trial.request, trial.max_tokens, is_beside, finding, tuple(lines))
