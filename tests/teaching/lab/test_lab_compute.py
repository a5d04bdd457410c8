"""The page's runs are the engine's, with a fault and without; they end, and the same link gives the same bytes."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from faults import inject

from lfm2np.engine.drafters import NgramDrafter
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.teaching.drawings.runs.recorded import Coming, recorded
from lfm2np.teaching.drawings.runs.recorded_run import read_run
from lfm2np.teaching.lab import compute as computing
from lfm2np.teaching.lab.compute import Outcome, compute, leaking_step, sizes_of
from lfm2np.teaching.lab.lab_page import answer
from lfm2np.teaching.lab.models import Models, token_ids
from lfm2np.teaching.lab.proof import prove
from lfm2np.teaching.lab.settings import NAMES, PAPER_REQUESTS, TEACHING_FAULTS, Asked, Settings, query_of

DEFAULT = Settings()
PAPER = Settings(model="paper", requests=PAPER_REQUESTS)
MANY = tuple(Asked(f"copy: {name} red blue cat dog red blue cat dog red blue ->", 0, 48) for name in NAMES)

compute_plainly = functools.cache(functools.partial(computing.compute, is_drawn=False))


def texts_of(outcome: Outcome) -> list[str]:
    assert outcome.run is not None
    return ["".join(map(outcome.run.word, outcome.tokens[name])) for name in outcome.tokens]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(DEFAULT, marks=pytest.mark.slow),
        PAPER,
        replace(DEFAULT, drafts=3, prefix_caching=False, budget=40),
    ],
)
def test_a_run_is_the_recorded_one(settings: Settings, models: Models):
    of = models.by_name[settings.model]
    coming = [
        Coming(
            name, token_ids(asked.prompt, of), SamplingParams(temperature=0, max_tokens=asked.max_tokens), asked.arrival
        )
        for name, asked in zip(NAMES, settings.requests, strict=False)
    ]
    drafter = {"drafter": NgramDrafter(), "num_speculative_tokens": settings.drafts} if settings.drafts else {}
    lines = recorded(
        of.model,
        coming,
        of.words,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        max_num_batched_tokens=settings.budget,
        max_num_seqs=settings.slots,
        policy=settings.policy,
        prefix_caching=settings.prefix_caching,
        watermark=0.0,
        **drafter,
    )
    plain, outcome = read_run(lines), compute(settings, models)
    assert outcome.run is not None and not outcome.stopped
    texts = {token_id: outcome.run.texts[token_id] for token_id in plain.texts}
    assert replace(outcome.run, texts=texts) == plain


def test_the_default_run_shows_chunks_a_preemption_and_a_hit_and_answers_that_are_right(models: Models):
    outcome = compute(DEFAULT, models)
    assert outcome.run is not None and outcome.counts is not None
    assert 15 <= outcome.counts.steps <= 25 and outcome.counts.preemptions and outcome.counts.prefix_hit_tokens
    ended = "<|im_end|>"
    answers = [" tivu zo sa mi", " 92", " 1 2 4 7 9", " tivu zo sa mi", " 23 24 25 26 27", " 7"]
    assert sorted(texts_of(outcome)) == sorted(answer + ended for answer in answers)
    assert not outcome.changed and outcome.sound is None and outcome.leaking is not None


def test_counts_are_those_of_the_run(models: Models):
    settings = replace(DEFAULT, num_blocks=64, budget=64, requests=(Asked("copy: red ->", 0, 8),) * 2)
    outcome = compute_plainly(settings, models)
    assert outcome.counts is not None
    # 5 tokens of the prompt and " red", of each; the second request comes in the same step, so there is no hit
    assert (outcome.counts.steps, outcome.counts.rows) == (2, 12)
    assert (outcome.counts.preemptions, outcome.counts.prefix_hit_tokens) == (0, 0)
    later = (settings.requests[0], replace(settings.requests[1], arrival=1))
    outcome = compute_plainly(replace(settings, requests=later), models)
    assert outcome.counts is not None and outcome.counts.prefix_hit_tokens == 4


def test_without_chunks_no_prompt_is_cut(models: Models):
    settings = replace(DEFAULT, chunked=False, num_blocks=64, budget=2)
    outcome = compute_plainly(settings, models)
    assert outcome.run is not None
    lengths = {name: len(asked.prompt) for name, asked in outcome.run.requests.items()}
    begun = [entry for step in outcome.run.steps for entry in step.entries if entry.request_id in step.admitted]
    assert len(begun) == 6 and all(entry.stop == lengths[entry.request_id] for entry in begun)
    assert sizes_of(settings, models)["max_num_batched_tokens"] > 64


DRAFTED = replace(DEFAULT, drafts=2)
PREEMPTING = replace(
    DEFAULT,
    requests=tuple(Asked(f"count: {first} to {first + 4} ->", 0, 12) for first in (23, 31, 41)),
    num_blocks=9,
    budget=40,
    prefix_caching=False,
)
SHOWN = {  # where a fault does not show in the default run, a run in which it does
    "rejected-drafts-stay-in-the-state": DRAFTED,
    "preempted-request-loses-its-output": PREEMPTING,
}


@pytest.mark.parametrize("name", TEACHING_FAULTS)
def test_each_fault_ends_and_shows_something(name: str, models: Models):
    settings = replace(SHOWN.get(name, DEFAULT), fault=name)
    sound = compute_plainly(replace(settings, fault=""), models)
    outcome = compute_plainly(settings, models)
    assert outcome.run is not None and outcome.sound is not None
    assert any(changed.tokens or changed.logits or changed.cut for changed in outcome.changed.values())
    assert outcome.sound == sound.run, "the fault was not taken away again"
    assert bool(outcome.stopped) == (name == "full-cache-raises-instead-of-evicting")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("full-cache-raises-instead-of-evicting", "With this fault the engine ended with PoolError"),
        ("single-token-step-has-no-state", "Request a: its tokens are "),
        ("convolution-crosses-requests", "Request b: the tokens are right, and the logits are not those"),
    ],
)
def test_a_broken_run_is_not_proved(name: str, sentence: str, models: Models):
    proof = prove(query_of(replace(DEFAULT, fault=name)), models)
    assert not proof.right and proof.sentence.startswith(sentence), proof


def test_a_sound_run_is_proved(models: Models):
    for settings in (DRAFTED, PREEMPTING):
        assert prove(query_of(settings), models).right


def test_a_proof_counts_what_it_compared(models: Models):
    query = "model=paper&prompt=the+cat&tokens=3&prompt=a+dog&tokens=2"
    assert prove(query, models).sentence.startswith("2 requests, 5 tokens, 50 logits: every one equals")


def test_a_fault_that_is_only_in_the_logits_is_told_from_one_in_the_tokens(models: Models):
    outcome = compute_plainly(replace(DEFAULT, fault="convolution-crosses-requests"), models)
    changed = {name: (request.tokens, request.logits) for name, request in outcome.changed.items()}
    assert changed["a"] == (False, False) and changed["b"] == (False, True)
    tokens = compute_plainly(replace(DEFAULT, fault="prefix-hit-without-its-state"), models).changed
    assert tokens["d"].tokens and not tokens["a"].tokens


def test_what_a_fault_raises_is_told_and_what_came_before_is_there(models: Models):
    outcome = compute(replace(DEFAULT, fault="full-cache-raises-instead-of-evicting"), models)
    assert outcome.stopped == "With this fault the engine ended with PoolError: all blocks are in use."
    assert outcome.run is not None and outcome.sound is not None
    assert 0 < len(outcome.run.steps) < len(outcome.sound.steps)
    status, page = answer(query_of(outcome.settings), models)
    assert status == 200 and "PoolError" in page and 'id="pool"' in page


def test_a_lost_output_is_missing_in_the_answer(models: Models):
    settings = replace(PREEMPTING, fault="preempted-request-loses-its-output")
    broken, sound = (compute_plainly(each, models) for each in (settings, PREEMPTING))
    lost = [name for name in sound.tokens if broken.tokens[name] != sound.tokens[name]]
    assert lost and all(sound.tokens[name][-len(broken.tokens[name]) :] == broken.tokens[name] for name in lost)


def test_a_run_that_is_too_long_is_stopped_and_says_so(models: Models, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(computing, "MOST_STEPS", 60)
    settings = replace(DEFAULT, requests=MANY, slots=1, num_blocks=128, budget=1)
    outcome = computing.compute(settings, models, is_drawn=False)
    assert outcome.run is not None and len(outcome.run.steps) == 60
    assert outcome.stopped == "The run was stopped after 60 steps, before all requests had ended."


def test_a_run_in_which_nobody_gets_a_token_is_told_and_not_drawn(models: Models, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(computing, "MOST_STEPS", 20)
    settings = replace(DEFAULT, requests=(Asked("a1" * 100, 0, 1),), num_blocks=128, budget=1)
    status, page = answer(query_of(settings), models)
    assert status == 200 and "stopped after 20 steps" in page and 'id="pool"' not in page


def test_the_leaking_step_is_the_first_in_which_a_request_begins_behind_another(models: Models):
    leaking = leaking_step(DEFAULT, models)
    assert leaking is not None
    assert [(share.name, share.start, share.stop) for share in leaking.shares] == [("a", 0, 10), ("b", 0, 2)]
    assert leaking_step(replace(DEFAULT, slots=1), models) is None


def test_the_leaking_step_is_one_without_prefix_cache_drafts_and_fault(models: Models):
    twice = tuple(Asked("copy: tivu zo sa ->", arrival, 8) for arrival in (0, 2))
    sound = replace(DEFAULT, requests=twice, num_blocks=64, budget=40)  # with the cache the second begins at 8
    for settings in (sound, replace(sound, drafts=3, fault="single-token-step-has-no-state")):
        leaking = leaking_step(settings, models)
        assert leaking is not None
        assert [(share.name, share.start, share.stop) for share in leaking.shares] == [("a", 10, 11), ("b", 0, 9)]


def test_the_same_link_is_the_same_page(models: Models):
    settings = replace(PAPER, fault="attention-crosses-requests", lesson=3)
    first = answer(query_of(settings), models)
    with inject("budget-ignored"):
        computing.compute(DEFAULT, models, is_drawn=False)  # whatever ran before
    assert answer(query_of(settings), models) == first


@pytest.mark.slow
def test_the_largest_runs_of_the_form_are_drawn(models: Models):
    """Eight long prompts in one step: too many rows for pictures, and none of them grows with their square."""
    long = tuple(Asked(f"{name} {'z' * 198}", 0, 2) for name in "abcdefgh")
    wide = Settings(requests=long, num_blocks=128, block_size=32, slots=8, chunked=False)
    words = tuple(Asked(" ".join(["a"] * 40), 0, 4) for _ in "ab")
    paper = Settings(model="paper", requests=words, num_blocks=128, block_size=8, slots=8, budget=256)
    for settings, message in ((wide, "too many rows to draw"), (paper, "rows are too many for a picture")):
        status, page = answer(query_of(settings), models)
        assert status == 200 and message in page
        assert len(page) < 10_000_000


def test_an_answer_that_was_cut_off_is_not_called_wrong(models: Models):
    outcome = compute_plainly(replace(DEFAULT, fault="full-cache-raises-instead-of-evicting"), models)
    assert outcome.changed["a"].cut and not outcome.changed["a"].tokens


def test_padding_is_that_of_the_steps_that_are_shown(models: Models):
    drafted = replace(DEFAULT, drafts=4, num_blocks=64, slots=8)
    outcome = compute_plainly(drafted, models)
    assert outcome.run is not None and outcome.counts is not None
    shares = [[len(entry.token_ids) for entry in step.entries] for step in outcome.run.steps]
    assert any(entry.num_drafts for step in outcome.run.steps for entry in step.entries)
    assert outcome.counts.wasted == sum(len(rows) * max(rows, default=0) - sum(rows) for rows in shares)
