"""From a verdict to its cause: the shortest wrong request of a check, recorded alone or beside others, and located."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.engine.loading import Model
from lfm2np.errors import Lfm2npError
from lfm2np.oracle.check import Cause, Checked
from lfm2np.oracle.engines.records import Answer, Request, greedy, whole_request
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.position import is_wrong
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.verdict import Position
from lfm2np.oracle.locate.dump import Dump, parse_dump, shortened
from lfm2np.oracle.locate.locate import Report, locate, logits_at
from lfm2np.oracle.locate.locate_report import finding_lines
from lfm2np.oracle.recorders.registry import Record
from lfm2np.values import Progress

MOST_ASKS = 3  # wrong requests that are tried, the shortest first
MOST_BESIDE = 7  # others that one is tried with
MOST_TRIALS = 4  # of each: alone, beside others, those as far as they ran, and alone after those that were sent before
MOST_IDS = 64  # of a prompt, in a line
RIGHT = "nothing is wrong    there: the bug needs what was not recorded (a cache, other requests, the choice of tokens)"
NOTHING = "not located         the recorded logits are wrong, too, but every recorded tensor follows from its inputs"


@dataclass(frozen=True)
class Trial:
    """Prompts that run together, and the one among them that is recorded up to a row."""

    wrong: Request
    row: int  # whose logits were wrong
    prompts: tuple[tuple[int, ...], ...]
    request: int
    max_tokens: int
    before: tuple[Request, ...] = ()  # what runs before, one after the other

    def cause(self, target: str, report: Report | None, *lines: str) -> Cause:
        """By a report with a finding, or none, and more lines."""
        finding = None if report is None else asdict(report.findings[0])
        beside, name = len(self.prompts) > 1, self.wrong.request_id
        before = tuple(request.prompt_token_ids for request in self.before)
        return Cause(target, name, self.prompts, self.request, self.max_tokens, beside, finding, lines, before)

    def __str__(self) -> str:
        others = f"beside {len(self.prompts) - 1} others" if len(self.prompts) > 1 else "alone"
        if self.before:
            others = f"{others} after {shortened([request.request_id for request in self.before])}"
        size = f"prompt of {len(self.prompts[self.request])}, {self.max_tokens} new"
        return f"{self.wrong.request_id}: {size}, {others}"


def cause_of(
    checked: Checked,
    target: str,
    renew: Callable[[], Record],
    tensors: Mapping[str, StoredTensor],
    model: Model,
    progress: Progress | None = None,
    known: Known | None = None,
) -> Cause | None:
    """Where the engine goes wrong in one of its wrong requests; None if no token or log-probability was wrong.

    target     what is recorded, in words
    renew      makes a recorder, for each trial, with an engine that ran nothing: what an earlier trial left behind must
               not show
    progress   called with (recordings done, the most that there may be)
    known      what the check computed
    An engine that can't be recorded gives a cause without a finding: the check's result stays. So does a record that
    does not show the error: what `locate` finds there, if anything, is another.
    """
    if not (wrong := wrong_requests(checked.positions)):
        return None
    answers = {request.request_id: answer for request, answer in checked.pairs}
    reasons: dict[str, Trial] = {}
    trial = alone(*wrong[0])
    try:
        for done, trial in enumerate(trials(checked, wrong, model.config.max_position_embeddings)):
            if progress:
                progress(done, MOST_TRIALS * MOST_ASKS)
            record = renew()
            for request in trial.before:
                record((request.prompt_token_ids,), 0, request.max_tokens)
            content = record(trial.prompts, trial.request, trial.max_tokens, trial.row)
            dump = parse_dump(content, f"what {target} recorded of {trial.wrong.request_id}", model.config)
            answer, report = answers[trial.wrong.request_id], locate(tensors, model.config, dump)
            why = why_not_shown(model, checked.format, known or Known(), tensors, dump, trial, answer)
            if report.findings and not why:
                also = shortened([finding.name for finding in report.findings[1:]])
                more = [f"also wrong          {also}"] if report.findings[1:] else []
                shown = f"recorded            {target} {trial}", *finding_lines(report.findings[0]), *more
                return trial.cause(target, report, *shown)
            reasons.setdefault(why or NOTHING, trial)
        why = NOTHING if NOTHING in reasons else next(iter(reasons))
    except Lfm2npError as problem:
        why = f"not recorded        {problem}"
        reasons = {why: trial}
    return reasons[why].cause(target, None, f"recorded            {target} {reasons[why]}", why)


def why_not_shown(
    model: Model,
    format_name: str,
    known: Known,
    tensors: Mapping[str, StoredTensor],
    dump: Dump,
    trial: Trial,
    answer: Answer,
) -> str:
    """Why the dump does not show the wrong row of the answer; empty if its logits there are wrong, too.

    They are judged as an engine's that reports its likeliest token, and the log-probabilities of those reported before.
    """
    prompt, row = trial.wrong.prompt_token_ids, trial.row
    ids, new = (*prompt, *(answer.token_ids or ())), row + 1 - len(prompt)
    recorded = dump.token_ids[: row + 1].tolist()
    if len(recorded) <= row:
        return f"not shown           the record ends after {len(recorded)} tokens, before the wrong row {row}"
    if recorded != list(ids[: row + 1]):
        place = next(index for index, (here, there) in enumerate(zip(recorded, ids, strict=False)) if here != there)
        return f"not shown           the recorded run has another token at {place} than the request that the check saw"
    logits = logits_at(tensors, model.config, dump, row)
    if not np.isfinite(logits).all():
        return ""
    shifted = logits - logits.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    best = int(logprobs.argmax())
    others = answer.top_logprobs[new] if answer.top_logprobs and new >= 0 else ()
    tops = {token: float(logprobs[token]) for token in {best, ids[row + 1], *others}}
    pair = greedy(trial.wrong.request_id, recorded, 1, case=trial.wrong.case), Answer((best,), (tops[best],), (tops,))
    return "" if is_wrong(judge(model, format_name, [pair], known=known)) else RIGHT


def cause_to_dump(checked: Checked, target: str, why: str, then: str) -> Cause | None:
    """For an engine that can't be recorded, and `why`: which wrong request to dump, and what to run `then`.

    None if no token or log-probability was wrong.
    """
    if not (wrong := wrong_requests(checked.positions)):
        return None
    trial = beside_others(checked, *wrong[0]) if wrong[0][0].tags.get("beside") else alone(*wrong[0])
    return trial.cause(
        target,
        None,
        f"not recorded        {why}",
        f"request to dump     {trial}; greedy; all ids: cause.prompts of --json",
        f"its prompt ids      {','.join(map(str, trial.prompts[trial.request][:MOST_IDS]))}",
        "how                 docs/engine/7-locate.md: names of tensors, and writers in C++ and Rust",
        f"then                {then}",
    )


def sent_before(checked: Checked, wrong: Request) -> list[Request]:
    """Whole requests, in the order in which they were sent."""
    requests = {whole.request_id: whole for whole in (whole_request(request) for request, _ in checked.pairs)}
    return list(requests.values())[: list(requests).index(whole_request(wrong).request_id)]


def wrong_requests(positions: Sequence[Position]) -> list[tuple[Request, int]]:
    """Wrong requests and the first wrong row of each, the shortest first; those alone before those beside others."""
    first: dict[str, tuple[Request, int]] = {}
    for position in sorted(positions, key=lambda position: position.row):
        if position.is_wrong:
            first.setdefault(position.request.request_id, (position.request, position.row))
    return sorted(first.values(), key=lambda pair: (bool(pair[0].tags.get("beside")), pair[1], pair[0].request_id))


def trials(checked: Checked, wrong: Sequence[tuple[Request, int]], positions: int) -> Iterator[Trial]:
    """Each alone, then each that ran in a batch beside others of its case: up to its wrong row, then as far as they all
    ran (a request has at most `positions` tokens), as it may be wrong only where memory was short. At last each alone
    after those that were sent before it.
    """
    in_batches = [(wrong, row) for wrong, row in wrong if wrong.tags.get("beside")][:MOST_ASKS]
    yield from (alone(wrong, row) for wrong, row in wrong[:MOST_ASKS])
    company = [beside_others(checked, wrong, row) for wrong, row in in_batches]
    yield from company
    for trial in company:
        longest = max(wrong.max_tokens for wrong, _ in checked.pairs if wrong.case == trial.wrong.case)
        room = positions - max(map(len, trial.prompts))
        yield replace(trial, max_tokens=max(trial.max_tokens, min(longest, room)))
    for request, row in wrong[:MOST_ASKS]:
        if before := sent_before(checked, request)[-MOST_BESIDE:]:
            yield replace(alone(request, row), before=tuple(before))


def beside_others(checked: Checked, wrong: Request, row: int) -> Trial:
    """Beside those of its case that were in flight with it or near it."""
    case = [other for other, _ in checked.pairs if other.case == wrong.case]
    place = next(index for index, other in enumerate(case) if other.request_id == wrong.request_id)
    start = max(0, min(place - MOST_BESIDE // 2, len(case) - 1 - MOST_BESIDE))
    near = case[start : start + MOST_BESIDE + 1]
    prompts = tuple(neighbour.prompt_token_ids for neighbour in near)
    return Trial(wrong, row, prompts, place - start, new_tokens(wrong, row))


def alone(wrong: Request, row: int) -> Trial:
    return Trial(wrong, row, (wrong.prompt_token_ids,), 0, new_tokens(wrong, row))


def new_tokens(wrong: Request, row: int) -> int:
    """As many as are needed to compute that row."""
    return max(1, row + 2 - len(wrong.prompt_token_ids))
