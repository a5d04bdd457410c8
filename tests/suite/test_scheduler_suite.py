"""The suite for schedulers: ours passes it, planted bugs are caught, bad adapters end in one line."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from schedulers.managed import ManagedScheduler

from lfm2np.errors import RequestError
from lfm2np.suite.schedulers import adapter_calls, own, suite
from lfm2np.suite.schedulers.adapter_calls import Violation
from lfm2np.suite.schedulers.demands import DEMANDS
from lfm2np.suite.schedulers.program_run import Run
from lfm2np.suite.schedulers.programs import carry_out
from lfm2np.suite.schedulers.scheduler_faults import FAULTS, faults_for, try_fault
from scheduler.protocol import FEATURES, Copy, Entry, Step, Window, entry

SIZES = {"block_size": 2, "num_blocks": 6, "max_num_seqs": 2, "max_num_batched_tokens": 8}


@pytest.fixture
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where any program shows it, or all that is shown is that programs run."""
    monkeypatch.setitem(suite.PROGRAMS, "quick", 40)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(suite.PROGRAMS, "quick", 150)


class Sharing:
    """Blocks by request. A child has its parent's; whoever writes to a block of both gets a copy first."""

    lacks = frozenset({"prefix-caching", "salts"})

    def __init__(self, sizes):
        self.size, self.tables, self.lengths = sizes["block_size"], {}, {}
        self.free_list = list(range(sizes["num_blocks"]))

    def allocate(self, name, token_ids, cache_salt):
        self.tables[name], self.lengths[name] = [], 0
        if self.append(name, token_ids) is False:
            del self.tables[name]
            return None
        return 0

    def append(self, name, token_ids):
        table, length = self.tables[name], self.lengths[name]
        is_shared = bool(length % self.size and self.owners(table[-1]) > 1)
        missing = -(-(length + len(token_ids)) // self.size) - len(table) + is_shared
        if missing > len(self.free_list):
            return False
        blocks = [self.free_list.pop() for _ in range(missing)]
        copies = [Copy(("block", table.pop()), ("block", blocks[0]))] if is_shared else []
        table += blocks
        self.lengths[name] += len(token_ids)
        return copies

    def places(self, name):
        every = [block * self.size + offset for block in self.tables[name] for offset in range(self.size)]
        return every[: self.lengths[name]]

    def fork(self, parent, child):
        self.tables[child], self.lengths[child] = list(self.tables[parent]), self.lengths[parent]

    def owners(self, block):
        return sum(block in table for table in self.tables.values())

    def free(self, name):
        self.free_list += [block for block in self.tables.pop(name) if not self.owners(block)]

    def free_blocks(self):
        return list(self.free_list)


class Tiny(ManagedScheduler):
    """Neither a prefix cache nor states, windows, stops, samples and priorities; it promises no order."""

    lacks = frozenset({"prefix-caching", "priorities", "salts", "stops", "children", "states", "windows", "drafts"})

    def __init__(self, sizes, manager=Sharing):
        super().__init__(manager(sizes), sizes)
        del self.free_blocks, self.lacks
        self.policies = frozenset()

    def free_blocks(self):
        return self.manager.free_blocks()


# --- what is right passes


def test_our_scheduler_meets_every_demand_and_meets_every_situation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(suite.PROGRAMS, "quick", 250)
    outcome = suite.try_scheduler(own.factory)
    assert outcome.broken == {} and outcome.programs == 250 and not outcome.lacks
    assert {outcome.status(demand)[0] for demand in DEMANDS} == {"passed"}
    assert not [line for line in outcome.summary() if "never met" in line]


@pytest.mark.slow
def test_a_scheduler_without_much_passes_and_is_told_what_was_left_out(few):
    outcome = suite.try_scheduler(Tiny)
    assert outcome.broken == {} and outcome.met["forks"] and outcome.met["copies"]
    assert outcome.status("states") == ("skipped", "the scheduler lacks states: recurrent states")
    assert outcome.status("fcfs")[0] == "skipped" and outcome.met["finished"] > 25


class Least:
    """Only what every scheduler has, and no prompt is taken in chunks. `free_blocks` is no method."""

    lacks = Tiny.lacks | {"chunks"}

    def __init__(self, sizes):
        self.sizes = {"num_blocks": 24}  # nothing is too large
        self.most, self.tiny = sizes["max_num_batched_tokens"], Tiny({**sizes, **self.sizes})
        self.step, self.update = self.tiny.step, self.tiny.update
        self.free_blocks = list(range(24))

    def add(self, request):
        assert len(request.prompt_token_ids) + request.max_tokens <= self.most
        self.tiny.add(request)


def test_a_scheduler_of_three_methods_is_called_by_them_alone_and_given_what_one_step_holds(fewer):
    assert adapter_calls.Calls(Least, SIZES).lacks == Least.lacks | set(adapter_calls.NEEDED)
    assert first_broken(Least) is None


# --- what is wrong is caught


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_on_our_scheduler(name, few):
    trial = try_fault(own.factory, FAULTS[name], suite.Outcome("own", frozenset(), frozenset()), "quick")
    assert trial.by not in ("", "calls", "reports", "verify") and trial.applied, trial


@pytest.mark.slow
def test_every_fault_is_caught_on_another_scheduler(few):
    lacks = adapter_calls.Calls(Tiny, SIZES).lacks
    bare = suite.Outcome("tiny", lacks, frozenset())
    trials = [try_fault(Tiny, fault, bare, "quick") for fault in faults_for(lacks)]
    assert len(trials) > 15 and [trial.fault.name for trial in trials if not trial.by] == []


def test_the_page_has_every_feature_numbers_of_programs_and_faults_and_the_results() -> None:
    top = Path(__file__).parents[2]
    page = (top / "docs" / "engine" / "14-schedulers.md").read_text(encoding="utf-8")
    listed = page.partition("Programs are drawn without what `lacks` names")[2].partition("`FEATURES`")[0]
    assert listed.split("`")[1::2] == list(FEATURES)
    quick, ci, deep = (f"{suite.PROGRAMS[name]:,}" for name in ("quick", "ci", "deep"))
    assert f"`quick` ({quick} programs), `ci` ({ci}) or `deep` ({deep}," in " ".join(page.split())
    assert f"puts {len(FAULTS)} bugs of real engines into it" in (top / "CHANGELOG.md").read_text(encoding="utf-8")
    command = [sys.executable, str(top / "fixtures" / "schedulers" / "run.py"), "--table"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table.count("\n") > 10 and table in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("promised", "policy", "caching"),
    [
        ("fcfs", "priority", True),
        ("priority", "fcfs", True),
        ("finds-prefixes", "fcfs", False),
        ("resumes-first", "priority", True),
    ],
)
def test_a_policy_that_is_promised_and_not_kept(promised, policy, caching, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(suite.PROGRAMS, "quick", 600)

    class Promising(own.OwnScheduler):
        def __init__(self, sizes):
            super().__init__({**sizes, "policy": policy, "prefix_caching": caching, "sliding_window": None})
            self.sizes, self.policies, self.lacks = {"sliding_window": None}, {promised}, {"windows"}

    assert first_broken(Promising) == promised


def first_broken(factory) -> str | None:
    """The demand that the first program breaks that breaks one, unshrunk."""
    broken = []

    def judge(sizes, program):
        try:
            carry_out(Run(factory, sizes), program)
        except Violation as violation:
            broken.append(violation.demand)
            raise

    with contextlib.suppress(Violation):
        suite.drawn(judge, adapter_calls.Calls(factory, suite.FIRST_SIZES).lacks, "quick", shrinks=False)
    return broken[0] if broken else None


def test_an_entry_has_the_places_of_its_block_table():
    assert entry("r0", [5, 6, 7, 8], 1, 3, [4, 2], 2) == Entry("r0", 1, (6, 7), [9, 4], [8, 9, 4])


def test_whoever_preempts_the_first_does_not_preempt_the_last():
    class First(ManagedScheduler):
        steps = 0

        def __init__(self, sizes):
            super().__init__(Sharing(sizes), sizes)

        def step(self):
            self.steps += 1
            return super().step() if self.steps < 2 else Step([], preempted=[self.running[0].name])

    run = Run(First, SIZES)
    run.add("r0", [0, 1], 3)
    run.add("r1", [0, 2], 3)
    with pytest.raises(Violation, match="preempts-last: r0 is preempted, and r1, which came later, runs on"):
        run.step(2)


# --- aborts


class Late(own.OwnScheduler):
    """Aborts after the next step, as SGLang does, and names the request then."""

    lacks = frozenset({"abort-at-once"})
    aborted = None

    def abort(self, request_id):
        self.aborted = request_id

    def update(self, tokens):
        ended = list(super().update(tokens))
        if self.aborted is not None:
            super().abort(self.aborted)
            ended.append(self.aborted)
            self.aborted = None
        return ended


def having(base, **attributes):
    """A scheduler with other methods."""
    return type("Having", (base,), attributes)


@pytest.mark.parametrize(
    ("factory", "broken"),
    [
        (Late, ""),
        (having(Late, lacks=()), "it ended in step"),
        (having(own.OwnScheduler, lacks={"abort-at-once"}), "r0: unfinished"),
    ],
)
def test_an_abort_may_come_late_where_that_is_declared_and_named(factory, broken):
    run = Run(factory, {"num_blocks": 4, "block_size": 2, "max_num_seqs": 2, "max_num_batched_tokens": 8})
    with pytest.raises(Violation, match=broken) if broken else contextlib.nullcontext():
        run.add("r0", [0, 1, 0], 3)
        run.step(1)
        run.abort("r0")
        run.step(1)
        run.drain()
        run.add("r1", [0, 1, 0], 3)
        run.abort_in_flight("r1")
        run.drain()


# --- the smallest program


class Leaking(Tiny):
    def update(self, tokens):
        ended = super().update(tokens)
        if ended:
            self.manager.free_list.pop()
        return ended


@pytest.mark.slow
def test_a_failure_is_shrunk_to_a_program_that_shows_it_again(fewer):
    lacks = adapter_calls.Calls(Leaking, SIZES).lacks
    broken = suite.smallest(Leaking, "somewhere:Leaking", lacks, "leaks", 1, "quick")
    assert broken.message.startswith("leaks: no request is left, and 1 of ")
    assert broken.script.count("run.add(") == 1 and "run.drain()" in broken.script
    again = broken.script.replace("'somewhere:Leaking'", "Leaking")
    with pytest.raises(Violation) as raised:
        exec(again, {"Leaking": Leaking})
    assert str(raised.value) == broken.message


# --- adapters that are wrong themselves


def changed(**fields):
    """Tiny, whose entries have other values in these fields."""

    class Changed(Tiny):
        def step(self):
            step = super().step()
            for each in step.entries:
                for name, value in fields.items():
                    object.__setattr__(each, name, value)
            return step

    return Changed


def says(value):
    return lambda *_: value


RAISING = having(Tiny, step=lambda self: {}["a"])
GENERATING = having(Tiny, step=lambda self: Step(each for each in Tiny.step(self).entries))
LOST = having(Tiny, step=lambda self: Step(Tiny.step(self).entries, [Copy(("blocks", 0), ("block", 1))]))
TWICE = having(Tiny, update=lambda self, tokens: Tiny.update(self, tokens) * 2)
FREE = r"reports: free_blocks\(\) returned {}, expected block numbers"


class Endless(Tiny):
    def update(self, tokens):
        while True:
            pass


class Catching(Endless):
    def update(self, tokens):
        try:
            super().update(tokens)
        except Exception:
            raise ValueError("the model cannot be inspected") from None


@pytest.mark.parametrize(
    ("adapter", "line"),
    [
        (RAISING, r"calls: step\(\) raised KeyError: 'a' \(test_scheduler_suite.py, line \d+\)"),
        (having(Tiny, step=lambda self: sys.exit(3)), r"calls: step\(\) raised SystemExit: 3"),
        (GENERATING, r"reports: step\(\): entries: generator, expected a list or a tuple"),
        (having(Tiny, update=says(3)), r"reports: update\(\): int, expected request ids"),
        (TWICE, r"ends: update\(\) says 2 times that r0 ends"),
        (changed(writes=None), r"reports: step\(\): entries\[0\].writes: NoneType, expected a list or a tuple"),
        (changed(request_id=["r0"]), r"reports: step\(\): entries\[0\].request_id: list, expected a str"),
        (changed(checkpoints=[3]), r"reports: step\(\): entries\[0\].checkpoints\[0\]: 3, expected \(tokens, "),
        (Endless, r"calls: update\(.*\) raised Endless: update\(\) has not returned for 0.2 seconds"),
        (Catching, r"calls: update\(.*\) raised Endless: update\(\) has not returned for 0.2 seconds"),
        (having(Tiny, step=says(None)), r"reports: step\(\) returned NoneType, expected a Step"),
        (LOST, r"reports: step\(\): copies\[0\]: \('blocks', 0\), expected \(memory, number\), one of block, "),
        (changed(start=-1), r"reports: step\(\): entries\[0\].start: -1, expected an integer of at least 0"),
        (changed(writes=[0]), r"reports: step\(\): entries\[0\].writes: 1 places, expected 2"),
        (changed(reads=[0, 99]), r"reports: step\(\): entries\[0\].reads\[1\]: 99, expected 0 to 11"),
        (changed(reads=[0, "1"]), r"reports: step\(\): entries\[0\].reads\[1\]: '1', expected 0 to 11"),
        (changed(request_id="x"), r"ends: x is scheduled: no such request was added"),
        (having(Tiny, free_blocks=says(None)), FREE.format("NoneType")),
        (having(Tiny, free_blocks=says("abc")), FREE.format("'abc'")),
        (having(Tiny, free_blocks=says(-1)), FREE.format("-1")),
        (having(Tiny, free_blocks=says([0, "1"])), r"reports: free_blocks\(\): '1', expected a block number"),
        (having(Tiny, free_blocks=says([0, -1])), r"reports: free_blocks\(\): -1, expected a block number"),
        (changed(token_ids=[7, 7]), r"tokens: r0: token ids \[7, 7\] from position 0 on, expected \[0, 1\]"),
    ],
)
def test_a_bad_adapter_ends_in_one_line(adapter, line, monkeypatch: pytest.MonkeyPatch):
    if issubclass(adapter, Endless):
        monkeypatch.setattr(adapter_calls, "SECONDS", 0.2)
    run = Run(adapter, SIZES)
    with pytest.raises(Violation, match=rf"^{line}.*\Z"):
        run.add("r0", [0, 1], 1 if adapter is TWICE else 2)
        run.step()


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"lacks": {"swaps"}}, "lacks 'swaps': expected names among abort, "),
        ({"policies": {"fair"}}, "policies 'fair': expected names among fcfs, "),
        ({"sizes": {"blocks": 3}}, "sizes 'blocks': expected names among block_size, "),
        ({"sizes": {"block_size": "4"}}, "sizes 'block_size': '4', expected an integer of at least 1"),
        ({"sizes": None}, "sizes None: expected a mapping"),
        ({"lacks": "states"}, "lacks 'states': expected a set of names"),
        ({"lacks": ("fork" for _ in range(10**12))}, "lacks <generator .*: expected a set of names"),
        ({"lacks": [["fork"]]}, r"lacks \['fork'\]: expected names among abort, "),
        ({"lacks": {"x" * 10**6}}, r"^lacks 'x+\.\.\.x+': expected names"),
    ],
)
def test_what_is_declared_wrong_is_named(fields, line):
    def factory(sizes):
        engine = Tiny(sizes)
        for name, value in fields.items():
            setattr(engine, name, value)
        return engine

    with pytest.raises(RequestError, match=line):
        Run(factory, SIZES)
    with pytest.raises(RequestError, match="dict: no scheduler"):
        Run(dict, SIZES)


def test_numpy_numbers_are_numbers():
    class Arrays(Tiny):
        def step(self):
            step = super().step()
            for each in step.entries:
                object.__setattr__(each, "writes", np.array(each.writes))
                object.__setattr__(each, "reads", np.array(each.reads))
                object.__setattr__(each, "start", np.int64(each.start))
            return step

        def update(self, tokens):
            return np.array(super().update(tokens))

        def free_blocks(self):
            return np.array(super().free_blocks())

    run = Run(Arrays, SIZES)
    assert run.add("r0", [0, 1, 2], 3) and not run.add("r1", [0] * 12, 2)  # which is refused
    run.drain()


@pytest.mark.slow
def test_a_scheduler_that_runs_nothing_has_passed_nothing(fewer):
    outcome = suite.try_scheduler(RAISING)
    statuses = {demand: outcome.status(demand)[0] for demand in DEMANDS}
    assert statuses.pop("calls") == "failed" and statuses.pop("reports") == "passed"
    assert set(statuses.values()) == {"skipped"}
    assert outcome.status("reads")[1] == "not seen: no request ended in any program"


def test_a_call_that_does_not_return_is_waited_for_once(fewer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adapter_calls, "SECONDS", 0.2)
    outcome = suite.try_scheduler(Endless)
    assert list(outcome.broken) == ["calls"] and outcome.stopped["calls"] == 1
    assert outcome.broken["calls"].script.count("\nrun.")


# --- a block manager


class Ring(Tiny):
    """Beside its blocks, a ring of a window's size for each request."""

    lacks = Tiny.lacks - {"windows"}
    phase, is_read_first = 0, True

    def __init__(self, sizes):
        super().__init__({**sizes, "num_window_blocks": None})

    def step(self):
        size = self.sizes["sliding_window"]
        entries = super().step().entries
        return Step([replace(each, window=self.window(each, size)) for each in entries] if size else entries)

    def window(self, each, size):
        base, stop = size * int(each.request_id[1:]), each.start + len(each.token_ids)
        first = max(0, each.start - size + 1)
        writes = [base + at % size if at >= stop - size else None for at in range(each.start, stop)]
        last = each.start if self.is_read_first else stop
        reads = [base + (at + self.phase) % size for at in range(first, last)]
        return Window(writes, reads, first, is_ring=self.is_read_first)


class Samples(Tiny):
    """Each sample of a prompt computes it itself."""

    lacks = Tiny.lacks - {"children"}
    reports = True

    def __init__(self, sizes):
        super().__init__(sizes)
        self.parted = []

    def add(self, request):
        for name in (request.request_id, *request.children):
            super().add(replace(request, request_id=name, children=()))
        self.parted += request.children

    def step(self):
        parted, self.parted = self.parted if self.reports else [], []
        return replace(super().step(), parted=parted)


@pytest.mark.parametrize(
    ("factory", "broken"),
    [
        (Ring, None),
        (having(Ring, phase=1), "windows"),
        (having(Ring, is_read_first=False), "windows"),
        (Samples, None),
        (having(Samples, reports=False), "tokens"),
    ],
)
def test_rings_and_samples_that_part_early(factory, broken, fewer):
    assert first_broken(factory) == broken


# --- from the command line


SUITE = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--pyargs", "lfm2np.suite"]


@pytest.mark.slow
def test_pytest_runs_it(fewer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """In this process, so that it draws few programs."""
    (tmp_path / "wrong_adapter.py").write_text(
        "from lfm2np.suite.schedulers import own\n"
        "from lfm2np.suite.schedulers.scheduler_faults import with_fault\n"
        "factory = with_fault(own.factory, 'rows-get-each-others-tokens')\n"
    )
    (tmp_path / "known.txt").write_text("tokens  # known\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--scheduler", "wrong_adapter:factory", "--xfails", "known.txt"]
    code = pytest.main([*SUITE, *options])
    printed = capsys.readouterr().out
    assert code == 0 and "1 xfailed" in printed and "40 programs" in printed, printed
    assert pytest.main([*SUITE, "--scheduler", "wrong_adapter:no"]) == 4
    assert "has no attribute 'no'" in capsys.readouterr().err
    assert pytest.main([*SUITE, "--scheduler", ""]) == 4
    assert "--scheduler: an empty name" in capsys.readouterr().err
    assert pytest.main([*SUITE, "--scheduler", "wrong_adapter:factory", "--engine", "a:b"]) == 4
    assert "--scheduler and --engine: expected one of them" in capsys.readouterr().err


@pytest.mark.slow
def test_faults_of_a_scheduler_from_the_command_line(
    fewer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One that survives fails; a demand that is broken without a fault catches none."""
    target = ["--scheduler", "lfm2np.suite.schedulers.own:factory", "--faults", "-k", "test_fault and block-leaked"]
    assert pytest.main([*SUITE, *target, "-rP"]) == 0
    printed = capsys.readouterr().out
    assert "block-leaked (vLLM 18485, SGLang 16067): caught by leaks after" in printed, printed
    assert "run = Run(with_fault('lfm2np.suite.schedulers.own:factory', 'block-leaked')" in printed
    broken = suite.Broken("leaks", "", "", 1)
    bare = suite.Outcome("own", frozenset(), frozenset(), broken={"leaks": broken})
    monkeypatch.setattr(suite, "try_scheduler", lambda name, profile: bare)
    assert pytest.main([*SUITE, *target]) == 1
    assert "block-leaked survives 40 programs" in capsys.readouterr().out
    assert pytest.main([*SUITE, "--faults"]) == 4
    assert "--faults: expected with --scheduler" in capsys.readouterr().err


def test_a_block_that_two_own_is_not_written(few):
    missing = having(Sharing, owners=lambda self, block: 1)
    assert first_broken(lambda sizes: Tiny(sizes, missing)) in ("ownership", "reads", "leaks")
