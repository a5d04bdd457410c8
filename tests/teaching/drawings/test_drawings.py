"""The page from recorded runs: what it says is what the trace says, and text stays text."""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict
from pathlib import Path

import drawn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from truths import greedy_tokens

import lfm2np
from lfm2np.commands.cli import main
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import Request
from lfm2np.oracle.report.markup import Markup, element, escaped, harmless, number, visible
from lfm2np.suite.adapters import own
from lfm2np.suite.properties.driver import make
from lfm2np.suite.properties.driver import run as run_scenario
from lfm2np.suite.strategies.scenarios import Scenario, scenarios
from lfm2np.suite.strategies.tiny_models import TinyModel
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.all_views import draw
from lfm2np.teaching.drawings.page.view import short_names
from lfm2np.teaching.drawings.runs.derive import (
    ABSENT,
    DECODE,
    ENDED,
    LETTERS,
    RECOMPUTED,
    moments,
    moments_by_plans,
    pools,
)
from lfm2np.teaching.drawings.runs.leaks import ATTENTION, BROKEN, CONVOLUTION, SOUND
from lfm2np.teaching.drawings.runs.other_policies import answers, one_after_another, under
from lfm2np.teaching.drawings.runs.recorded import Coming, recorded
from lfm2np.teaching.drawings.runs.recorded_run import read_run
from lfm2np.teaching.drawings.terminal_drawing import as_text
from lfm2np.teaching.drawings.views.ragged import leaked, ragged
from lfm2np.truth import reference
from scheduler import SchedulerConfig, replay

pytestmark = pytest.mark.slow

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u202e\u200b\0<!--"


# --- markup


@given(st.text())
def test_text_enters_as_text(text: str) -> None:
    markup = element("p", text, title=text)
    assert html.unescape(markup.split(">", 1)[1].rsplit("<", 1)[0]) == harmless(text)
    assert "<" not in escaped(text)
    assert '"' not in escaped(text)


@given(st.text())
def test_what_is_shown_can_be_seen(text: str) -> None:
    assert visible(text).isprintable()
    assert not set(visible(text)) & set("\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u200b\u200d\ufeff\0")


@given(st.one_of(st.floats(1e-30, 1e6), st.floats(-1e6, -1e-30), st.just(0.0)))
def test_numbers_are_short_and_near(value: float) -> None:
    assert float(number(value)) == pytest.approx(value, rel=1e-3)
    assert len(number(value)) <= 10


def test_attributes_and_markup_are_kept_apart() -> None:
    assert (
        element("a", Markup("<b>x</b>"), "<", href=None, hidden=True, data_x=3)
        == '<a hidden data-x="3"><b>x</b>&lt;</a>'
    )


# --- runs


def test_a_run_is_what_the_trace_says() -> None:
    steps = [line for line in map(json.loads, drawn.demo_lines()) if line["kind"] == "step"]
    for line, step in zip(steps, drawn.demo_run().steps, strict=True):
        entries = line["plan"]["scheduled"]
        assert [entry["request_id"] for entry in entries] == [entry.request_id for entry in step.entries]
        assert {name: list(ids) for name, ids in step.tokens.items()} == line["tokens"]
        assert step.num_tokens == sum(len(entry["token_ids"]) for entry in entries)


END = '{"kind": "end", "lines": 2}'
HEADER = json.dumps({"kind": "header", "version": 4, "checksums": False, "config": asdict(SchedulerConfig(9))})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "an empty trace"),
        ([HEADER, '{"kind": "end", "lines": 1}'], "a trace without a step"),
        (["x"], "line 1: not a line of a trace"),
        ([HEADER, '{"kind": "more"}', END], "line 2: kind 'more'"),
        ([HEADER, '{"kind": "step", "plan": {}}', END], "line 2: not a line"),
        ([HEADER, '{"kind": "detail", "texts": {}}', END], "line 2: not a line"),
    ],
)
def test_what_is_no_trace_is_named(lines: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        read_run(lines)


@settings(max_examples=settings.default.max_examples // 4)
@given(scenarios(kinds=("abort", "preempt", "fork")))
def test_moments_add_up_to_the_trace(scenario: Scenario) -> None:
    engine = make(own, scenario.model, scenario.sizes)
    run_scenario(engine, scenario)
    run = read_run(engine.trace(), is_whole=False)
    states = moments(run)
    known = pools(run)
    for step in run.steps:
        mine = {entry.request_id: len(entry.token_ids) for entry in step.entries}
        assert {name: state[step.number].tokens for name, state in states.items() if state[step.number].tokens} == mine
        for block in known[step.number].owners:
            assert 0 <= block < run.config["num_blocks"]
    assert all(row[-1].state in (*LETTERS, ENDED) for row in states.values())


def test_moments_by_the_plans_alone_are_those_of_the_scheduler() -> None:
    """A fault's schedule has no other source."""
    engine = make(own, TinyModel(), {"block_size": 2, "num_blocks": 20})
    for name in "abc":
        engine.add(Request(name, (3, 4), demo.greedy(6)))
    engine.step()
    engine.preempt("b")
    engine.step()
    engine.abort("c")
    while engine.has_unfinished:
        engine.step()
    runs = [under(drawn.demo_run(), policy).run for policy in ("fcfs", "static", "prefill-first", "waiting-served")]
    runs.append(read_run(engine.trace(), is_whole=False))
    for run in runs:
        assert moments_by_plans(run) == moments(run)
    states = {moment.state for run in runs for row in moments(run).values() for moment in row}
    assert states == {*LETTERS, ENDED}


def test_a_fork_that_is_preempted_before_its_first_step_is_computed_again() -> None:
    """Its parent had computed 4 tokens when it came, two of a prompt and two of its answer."""
    engine = make(own, TinyModel(), {"block_size": 5, "num_blocks": 20, "prefix_caching": False})
    params = demo.greedy(6)
    engine.add(Request("a", (3, 4), params))
    for _ in range(3):
        engine.step()
    engine.fork("a", "b", 0)
    engine.preempt("b")
    while engine.has_unfinished:
        engine.step()
    run = read_run(engine.trace(), is_whole=False)
    assert [(moment.state, moment.recomputed) for moment in moments(run)["b"]][2:5] == [
        (ABSENT, 0),
        (RECOMPUTED, 4),
        (DECODE, 0),
    ]


@settings(max_examples=settings.default.max_examples // 4)
@given(scenarios())
def test_no_policy_changes_how_much_must_be_computed(scenario: Scenario) -> None:
    engine = make(own, scenario.model, {**scenario.sizes, "prefix_caching": False, "num_blocks": 60, "watermark": 0.0})
    run_scenario(engine, scenario)
    run = read_run(engine.trace(), is_whole=False)
    known = answers(run)
    needed = sum(len(run.requests[name].prompt) + len(ids) - 1 for name, ids in known.items())
    assert one_after_another(run)[1] == needed
    for policy in ("fcfs", "static", "waiting-served", "prefill-first"):
        outcome = under(run, policy, num_blocks=400)
        assert outcome.rows == needed
        assert outcome.first.keys() == outcome.last.keys() == known.keys()
        assert all(outcome.first[name] <= outcome.last[name] for name in known)


def test_a_static_batch_keeps_its_rows_until_the_longest_ends() -> None:
    """Prompts of 2 and 3 tokens, answers of 1 and 3: 2 x 3 cells for 5 tokens, then twice 2 x 1 for 1."""
    coming = [Coming("a", [5, 6], demo.greedy(1)), Coming("b", [5, 6, 7], demo.greedy(3))]
    run = read_run(recorded(drawn.trained(), coming))
    assert under(run, "static").padding == 1 + 1 + 1
    assert under(run, "fcfs").padding == 1


# --- what is drawn


def test_detail_changes_nothing_and_is_the_reference() -> None:
    prompt = drawn.trained().prompt_ids("ann has a red")
    coming = [Coming("a", prompt, SamplingParams(temperature=0.0, max_tokens=4))]
    lines = recorded(drawn.trained(), coming)
    run = read_run(lines)
    assert [token for step in run.steps for token in step.tokens["a"]] == list(
        greedy_tokens(drawn.trained(), prompt, 4)
    )
    hidden = reference.hidden_states(drawn.trained().weights, drawn.trained().config, drawn.trained().numerics, prompt)
    output = next(operation for operation in run.steps[0].operations if operation["name"] == "embedding_norm")["output"]
    assert output["shape"] == list(hidden.shape)
    for row, values in enumerate(output["values"]):
        assert np.array_equal(np.float32(values), hidden[row, : len(values)])
    sources = {tuple(operation["source"][:2]) for operation in run.steps[0].operations}
    for file, line in sources:
        text = (Path(lfm2np.__file__).parent.parent / file).read_text().splitlines()[line - 1]
        assert "numerics." in text


def test_operations_are_of_the_three_classes() -> None:
    for step in drawn.demo_run().steps:
        for operation in step.operations:
            if operation["class"] != "per request" and operation["name"] != "lm_head":
                assert operation["output"]["shape"][0] == step.num_tokens
            if operation["operation"] in ("convolve", "attend"):
                assert operation["class"] == "per request"


def test_every_row_sees_its_own_positions_and_the_convolution_its_reach() -> None:
    picture, names = ragged(drawn.demo_run(), None).picture, short_names(drawn.demo_run().requests)
    rows = [(names[entry.request_id], place) for step in drawn.demo_run().steps for entry, place, _ in step.rows]
    seen = re.findall(r"<title>(\S+) at (\d+): [^<]* sees positions (\d+) to (\d+)</title>", picture)
    assert seen == [(name, str(place), "0", str(place)) for name, place in rows]
    reach = re.findall(r"<title>(\S+) at (\d+): [^<]*: the convolution takes in the last (\d+)</title>", picture)
    assert reach == [(name, str(place), str(min(3, place + 1))) for name, place in rows]


def test_a_leak_is_a_leak() -> None:
    leak = demo.leaking(drawn.trained())
    decode, chunk, whole = leak.shares
    assert decode.stop - decode.start == 1
    assert chunk.start > 0
    assert whole.start == 0
    for share in leak.shares:
        alone = reference.logits(
            drawn.trained().weights, drawn.trained().config, drawn.trained().numerics, share.token_ids
        )
        assert np.array_equal(leak.logits[SOUND][share.name], alone[share.start :])
    for what in BROKEN:
        assert not any(leak.changed(what, decode.name)), "nothing stands before the first request"
        assert any(leak.changed(what, whole.name))
        sound, broken = (leak.logits[name][whole.name][-1] for name in (SOUND, what))
        assert np.argmax(sound) != np.argmax(broken), "the demo shows a wrong token"
    assert not any(leak.changed(CONVOLUTION, chunk.name)), "it has a state"
    assert any(leak.changed(ATTENTION, chunk.name))


def test_the_drawn_leaks_are_what_the_faults_do() -> None:
    leak = demo.leaking(drawn.trained())
    chunk = leak.shares[1]
    assert [leaked(leak, CONVOLUTION, 2, at) for at in range(3)] == [
        [(1, chunk.stop - 2), (1, chunk.stop - 1)],
        [(1, chunk.stop - 1)],
        [],
    ]
    for index, share in enumerate(leak.shares):
        for what in (CONVOLUTION, ATTENTION):
            shown = [bool(leaked(leak, what, index, at)) for at in range(share.start, share.stop)]
            changed = leak.changed(what, share.name)
            assert all(is_changed for is_changed, is_shown in zip(changed, shown, strict=True) if is_shown)
            assert any(shown) == any(changed)


def test_the_demo_shows_what_it_is_for() -> None:
    assert any(step.preempted for step in drawn.demo_run().steps)
    assert any(kind == "restore_state" for step in drawn.demo_run().steps for kind, _, _ in step.moves)
    assert any(len(names) > 1 for pool in pools(drawn.demo_run()) for names in pool.owners.values())
    assert any(entry.num_drafts for step in drawn.demo_run().steps for entry in step.entries)


def test_the_page_is_whole_and_the_same_again() -> None:
    page = drawn.demo_page()
    assert page == drawn.draw_demo()
    assert len(page.encode()) < 3_000_000
    checked = drawn.Checked()
    checked.feed(page)
    assert checked.open == []
    assert checked.scripts == 1
    assert len(set(checked.ids)) == len(checked.ids)


def test_a_hostile_prompt_changes_nothing() -> None:
    coming = [Coming(HOSTILE, HOSTILE, demo.greedy(2)), Coming("b", "ann", demo.greedy(2))]
    lines = recorded(drawn.trained(), coming)
    text = draw(read_run(lines), drawn.trained(), HOSTILE, HOSTILE)
    checked = drawn.Checked()
    checked.feed(text)
    assert checked.open == []
    assert checked.scripts == 1
    assert "<title>Continuous batching of LFM2, on real numbers</title>" in text
    assert not set(text) & {"\0", "\u202e", "\u200b"}


# --- the command


def test_the_command_draws_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "run.jsonl", tmp_path / "page.html"
    assert main(["generate", "--prompt", "12+30=", "--max-tokens", "3", "--trace", str(trace), "--trace-detail"]) == 0
    assert main(["draw", str(trace), "--replay"]) == 0
    lines = trace.read_text().splitlines()
    plain = [line for line in lines if json.loads(line)["kind"] != "detail"]
    assert len(lines) == len(plain) + 3
    assert replay(lines) == replay(plain[:-1], is_whole=False)
    assert main(["draw", str(trace), "-o", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == {"page": str(out), "bytes": out.stat().st_size, "steps": 3}
    assert main(["draw", str(trace), "--terminal", "--step", "0"]) == 0
    shown = capsys.readouterr().out
    assert "step 0 of 2" in shown
    assert "\x1b" not in shown
    assert main(["draw", str(trace), "--terminal", "--step", "3"]) == 2
    assert "--step 3: expected 0 to" in capsys.readouterr().err


def test_the_terminal_shows_plan_blocks_and_timeline() -> None:
    for number_ in range(len(drawn.demo_run().steps)):
        shown = as_text(drawn.demo_run(), number_, colour=False)
        assert shown.isascii() or all(character.isprintable() or character == "\n" for character in shown)
        assert f"step {number_} of {len(drawn.demo_run().steps) - 1}" in shown
        assert f"^ step {number_}" in shown
    assert "\x1b[3" in as_text(drawn.demo_run(), 3, colour=True)


def test_the_terminal_leaves_out_blocks_that_nobody_has() -> None:
    run = read_run(recorded(drawn.trained(), [Coming("a", "ann", demo.greedy(1))], num_blocks=400))
    assert "a............................... and 368 free blocks more\n" in as_text(run, 0, colour=False)
