"""The page's runs are the engine's, with a fault and without; they end, and the same link gives the same bytes."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
from faults import inject

from lfm2np.engine.drafters import NgramDrafter
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.teaching.drawings.runs.derive import prefix_hit_tokens
from lfm2np.teaching.drawings.runs.recorded import Coming, recorded
from lfm2np.teaching.drawings.runs.recorded_run import read_run
from lfm2np.teaching.lab import run as running
from lfm2np.teaching.lab.page import compute, result
from lfm2np.teaching.lab.run import Outcome, chosen, leaking_step, play, prove, sizes_of, token_ids
from lfm2np.teaching.lab.settings import (
    DEFAULT_REQUESTS,
    NAMES,
    TEACHING_FAULTS,
    Asked,
    Settings,
    link_of,
    read_link,
    settings_of,
)

pytestmark = pytest.mark.slow

DEFAULT = Settings()
PAPER = Settings(model="paper", requests=DEFAULT_REQUESTS["paper"])
play_once = functools.cache(play)


def texts_of(outcome: Outcome) -> list[str]:
    assert outcome.run is not None
    return ["".join(map(outcome.run.word, outcome.tokens[name])) for name in outcome.tokens]


@pytest.mark.parametrize("settings", [PAPER, replace(DEFAULT, drafts=3, prefix_cache="off", budget=40)])
def test_a_run_is_the_recorded_one(settings: Settings) -> None:
    of = chosen(settings.model)
    coming = [
        Coming(name, token_ids(asked.prompt, of), SamplingParams(temperature=0, max_tokens=asked.tokens), asked.arrival)
        for name, asked in zip(NAMES, settings.requests, strict=False)
    ]
    drafter = {"drafter": NgramDrafter(), "num_speculative_tokens": settings.drafts} if settings.drafts else {}
    lines = recorded(
        of.model,
        coming,
        of.words,
        block_size=settings.block_size,
        num_blocks=settings.blocks,
        max_num_batched_tokens=settings.budget,
        max_num_seqs=settings.slots,
        policy=settings.policy,
        prefix_caching=settings.prefix_cache == "on",
        watermark=0.0,
        **drafter,
    )
    plain, outcome = read_run(lines), play(settings, is_detailed=True)
    assert outcome.run is not None and not outcome.stopped
    texts = {token_id: outcome.run.texts[token_id] for token_id in plain.texts}
    assert replace(outcome.run, texts=texts) == plain


def test_the_default_run_shows_chunks_a_preemption_and_a_hit_and_answers_that_are_right() -> None:
    outcome = play_once(DEFAULT)
    assert outcome.run is not None and leaking_step(DEFAULT) is not None
    steps = outcome.run.steps
    assert 15 <= len(steps) <= 25 and any(step.preempted for step in steps) and prefix_hit_tokens(outcome.run)
    ended = "<|im_end|>"
    answers = [" tivu zo sa mi", " 92", " 1 2 4 7 9", " tivu zo sa mi", " 23 24 25 26 27", " 7"]
    assert sorted(texts_of(outcome)) == sorted(answer + ended for answer in answers)
    assert not outcome.changed and outcome.sound is None


def test_counts_are_those_of_the_run() -> None:
    settings = replace(DEFAULT, blocks=64, budget=64, requests=(Asked("copy: red ->", 0, 8),) * 2)
    # 5 tokens of the prompt and " red", of each; the second request comes in the same step, so there is no hit
    assert figures_of(settings) == ["2 steps", "12 rows", "0 preemptions", "0 tokens", "0 cells"]
    later = (settings.requests[0], replace(settings.requests[1], arrival=1))
    assert figures_of(replace(settings, requests=later))[3] == "4 tokens"


def figures_of(settings: Settings) -> list[str]:
    return re.findall(r"<li><strong>([^<]*)", result(play_once(settings)))


def test_without_chunks_no_prompt_is_cut() -> None:
    settings = replace(DEFAULT, chunked="off", blocks=64, budget=2)
    outcome = play_once(settings)
    assert outcome.run is not None
    lengths = {name: len(asked.prompt) for name, asked in outcome.run.requests.items()}
    begun = [entry for step in outcome.run.steps for entry in step.entries if entry.request_id in step.admitted]
    assert len(begun) == 6 and all(entry.stop == lengths[entry.request_id] for entry in begun)
    assert sizes_of(settings)["max_num_batched_tokens"] > 64


DRAFTED = replace(DEFAULT, drafts=2)
PREEMPTING = replace(
    DEFAULT,
    requests=tuple(Asked(f"count: {first} to {first + 4} ->", 0, 12) for first in (23, 31, 41)),
    blocks=9,
    budget=40,
    prefix_cache="off",
)
SHOWN = {  # where a fault does not show in the default run, a run in which it does
    "rejected-drafts-stay-in-the-state": DRAFTED,
    "preempted-request-loses-its-output": PREEMPTING,
}


@pytest.mark.parametrize("name", TEACHING_FAULTS)
def test_each_fault_ends_and_shows_something(name: str) -> None:
    settings = replace(SHOWN.get(name, DEFAULT), fault=name)
    sound = play_once(replace(settings, fault=""))
    outcome = play_once(settings)
    assert outcome.run is not None and outcome.sound is not None
    assert any(outcome.changed.values())
    assert outcome.sound.run == sound.run, "the fault was not taken away again"
    assert bool(outcome.stopped) == (name == "full-cache-raises-instead-of-evicting")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("full-cache-raises-instead-of-evicting", "With this fault the engine ended with PoolError"),
        ("single-token-step-has-no-state", "Request a: its tokens are "),
        ("convolution-crosses-requests", "Request b: the tokens are right, and the logits are not those"),
    ],
)
def test_a_broken_run_is_not_proved(name: str, sentence: str) -> None:
    proof = prove(replace(DEFAULT, fault=name))
    assert not proof.right and proof.sentence.startswith(sentence), proof


def test_a_sound_run_is_proved_and_what_was_compared_is_counted() -> None:
    assert prove(DRAFTED).right
    query = "model=paper&prompt=the+cat&tokens=3&prompt=a+dog&tokens=2"
    assert prove(settings_of(read_link(query))).sentence.startswith("2 requests, 5 tokens, 50 logits: every one equals")


def test_a_fault_that_is_only_in_the_logits_is_told_from_one_in_the_tokens() -> None:
    changed = play_once(replace(DEFAULT, fault="convolution-crosses-requests")).changed
    assert (changed["a"], changed["b"]) == ("", "logits")
    changed = play_once(replace(DEFAULT, fault="prefix-hit-without-its-state")).changed
    assert (changed["a"], changed["d"]) == ("", "tokens")


def test_what_a_fault_raises_is_told_and_what_came_before_is_there() -> None:
    outcome = play_once(replace(DEFAULT, fault="full-cache-raises-instead-of-evicting"))
    assert outcome.stopped == "With this fault the engine ended with PoolError: all blocks are in use."
    assert outcome.run is not None and outcome.sound is not None and outcome.sound.run is not None
    assert 0 < len(outcome.run.steps) < len(outcome.sound.run.steps)
    assert outcome.changed["a"] == "cut", "what was cut off is not called wrong"
    status, page = compute(link_of(outcome.settings))
    assert status == 200 and 'id="pool"' in page
    assert "With this fault the engine ended" in page[page.index('id="problem-fault"') :]


def test_a_lost_output_is_missing_in_the_answer() -> None:
    settings = replace(PREEMPTING, fault="preempted-request-loses-its-output")
    broken, sound = (play_once(each) for each in (settings, PREEMPTING))
    lost = [name for name in sound.tokens if broken.tokens[name] != sound.tokens[name]]
    assert lost and all(sound.tokens[name][-len(broken.tokens[name]) :] == broken.tokens[name] for name in lost)


def test_a_run_in_which_nobody_gets_a_token_is_told_and_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MOST_STEPS", 20)
    settings = replace(DEFAULT, requests=(Asked("a1" * 100, 0, 1),), blocks=128, budget=1)
    status, page = compute(link_of(settings))
    assert status == 200 and "stopped after 20 steps" in page and 'id="pool"' not in page


TWICE = tuple(Asked("copy: tivu zo sa ->", arrival, 8) for arrival in (0, 2))
CACHED = replace(DEFAULT, requests=TWICE, blocks=64, budget=40)  # with the cache the second begins at 8
BEHIND = [("a", 10, 11), ("b", 0, 9)]


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        (DEFAULT, [("a", 0, 10), ("b", 0, 2)]),
        (replace(DEFAULT, slots=1), None),
        (CACHED, BEHIND),
        (replace(CACHED, drafts=3, fault="single-token-step-has-no-state"), BEHIND),
    ],
)
def test_the_leaking_step_is_the_first_in_which_a_request_begins_behind_another(
    settings: Settings, shares: list[tuple[str, int, int]] | None
) -> None:
    """One without prefix cache, drafts and fault."""
    leaking = leaking_step(settings)
    assert (leaking and [(share.name, share.start, share.stop) for share in leaking.shares]) == shares


def test_the_same_link_is_the_same_page() -> None:
    settings = replace(PAPER, fault="attention-crosses-requests", lesson="3")
    first = compute(link_of(settings))
    with inject("budget-ignored"):
        play(DEFAULT)  # whatever ran before
    assert compute(link_of(settings)) == first


@pytest.mark.night
def test_the_largest_runs_of_the_form_are_drawn() -> None:
    """Eight long prompts in one step: too many rows for pictures, and none of them grows with their square."""
    long = tuple(Asked(f"{name} {'z' * 198}", 0, 2) for name in "abcdefgh")
    wide = Settings(requests=long, blocks=128, block_size=32, slots=8, chunked="off")
    words = tuple(Asked(" ".join(["a"] * 40), 0, 4) for _ in "ab")
    paper = Settings(model="paper", requests=words, blocks=128, block_size=8, slots=8, budget=256)
    for settings in (wide, paper):
        status, page = compute(link_of(settings))
        assert status == 200 and "too many rows to draw" in page
        assert len(page) < 10_000_000


def test_padding_is_that_of_the_steps_that_are_shown() -> None:
    drafted = replace(DEFAULT, drafts=4, blocks=64, slots=8)
    outcome = play_once(drafted)
    assert outcome.run is not None
    shares = [[len(entry.token_ids) for entry in step.entries] for step in outcome.run.steps]
    assert any(entry.num_drafts for step in outcome.run.steps for entry in step.entries)
    assert outcome.wasted == sum(len(rows) * max(rows, default=0) - sum(rows) for rows in shares)
