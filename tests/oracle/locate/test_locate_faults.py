"""`locate` names the operation of every injected fault: of the network (section E) and of the convolution state (A)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from dumps import dump_of

import lfm2np
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.faults import FAULTS, inject
from lfm2np.loading import Model
from lfm2np.numerics import attention
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.recorders.own import RecordedEngine, record
from lfm2np.speculation.drafters import ScriptedDrafter

pytestmark = pytest.mark.rounding

FIXTURES = Path(__file__).parents[3] / "fixtures"
TRAINED, BIASED, UNTIED = "trained", "torture/biased_two_taps", "torture/all_attention"
Recorded = dict[str, np.ndarray]


@cache
def loaded(name: str, numerics: str) -> Model:
    return lfm2np.load(FIXTURES / name, numerics)


def located(
    model: Model, recorded: Recorded, kept: Callable[[str], bool] = lambda name: True, stored: str = "float32"
) -> Report:
    chosen = {name: values for name, values in recorded.items() if name in ("token_ids", "steps") or kept(name)}
    return locate(open_checkpoint(model.path, model.config), model.config, dump_of(chosen, stored))


# --- section E: the network itself, as reference.py computes it


@dataclass(frozen=True)
class Expected:
    """Where a fault has to be found, on which fixture, and how its rows and channels are described."""

    tensor: str
    rows: str = "all 24 rows"
    channels: str = "all"
    fixture: str = TRAINED
    recomputed: int = 0


READ = ("self_attn.keys_read", "self_attn.values_read")
ATTENDED, ROTATED = "model.layers.2.self_attn.attended", "model.layers.2.self_attn.q_rotated"
ALONE = "from row 1 on, right for row 0"  # which sees nothing but itself, at angle 0
NETWORK = {
    "two-thirds-rule-applied-twice": Expected(
        "model.layers.0.feed_forward.gated", channels="channels 170 to 255 of 256"
    ),
    "two-thirds-rule-skipped": Expected("model.layers.0.feed_forward.gated"),
    "rope-theta-of-the-file-ignored": Expected("model.layers.0.self_attn.q_rotated", ALONE, fixture=UNTIED),
    "final-norm-is-another-tensor": Expected("model.embedding_norm"),
    "embedding-norm-taken-by-its-name": Expected("model.layers.0.operator_norm"),
    "operator-norm-is-the-feed-forward-norm": Expected("model.layers.0.operator_norm"),
    "untied-head-ignored": Expected("lm_head", fixture=UNTIED),
    "bias-on-the-head": Expected("lm_head", channels="scattered channels of 512"),
    "no-causal-mask": Expected(ATTENDED, rows="rows 0 to 22 of 24"),
    "head-norm-reads-strided-rows-as-contiguous": Expected(
        "model.layers.2.self_attn.q_layernorm", rows=ALONE, channels="all 4 heads"
    ),
    "head-norm-after-the-rotation": Expected("model.layers.2.self_attn.q_layernorm", rows=ALONE),
    "head-norm-missing": Expected(ROTATED, recomputed=1),
    "query-heads-share-keys-by-remainder": Expected(
        "model.layers.1.self_attn.attended", channels="heads 1 to 4 of 6", fixture=BIASED
    ),
    "rotation-of-interleaved-pairs": Expected(ROTATED),
    "rotation-backwards": Expected("model.layers.2.self_attn.k_rotated", ALONE),
    "attention-scale-missing": Expected(ATTENDED, ALONE),
    "attention-scale-of-the-hidden-size": Expected(ATTENDED, ALONE),
    "convolution-gates-swapped": Expected("model.layers.0.conv.u"),
    "convolution-taps-reversed": Expected("model.layers.0.conv.conv"),
    "convolution-bias-ignored": Expected("model.layers.0.conv.conv", fixture=BIASED),
    "projection-bias-ignored": Expected("model.layers.0.conv.in_proj", fixture=BIASED),
    "activation-behind-the-convolution": Expected("model.layers.0.conv.conv"),
    "gate-and-up-swapped": Expected("model.layers.0.feed_forward.gated"),
    "feed-forward-residual-missing": Expected("model.layers.0"),
    "residual-taken-behind-the-norm": Expected("model.layers.0.residual"),
}


AT_LENGTH = {  # where, and how the rows are described
    "positions-stop-at-40": (ROTATED, "from row 41 on"),
    "partitions-joined-without-rescaling": (ATTENDED, "from row 64 on"),
    "later-piece-of-queries-misses-its-own-position": (ATTENDED, "from row 10 on"),
}


def prompt(seed: int, length: int, vocabulary: int = 60) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(10, vocabulary, length)]


@pytest.mark.parametrize("name", NETWORK)
def test_a_fault_of_the_network_is_found_at_its_operation(name: str) -> None:
    expected = NETWORK[name]
    model = loaded(expected.fixture, "exact")
    with inject(name):
        recorded = record(model, prompt(0, 24))
    first = located(model, recorded).findings[0]
    assert first.name == expected.tensor
    assert first.rows.startswith(expected.rows)
    assert expected.channels in first.channels
    assert len(first.recomputed) == expected.recomputed
    assert first.error > 1000


def edits_exact_only(name: str) -> bool:
    (fault,) = (one for one in FAULTS if one.name == name)
    return all(edit.where.startswith("lfm2np.numerics.exact:") for edit in fault.edits)


@pytest.mark.parametrize("name", [name for name in NETWORK if not edits_exact_only(name)])
def test_in_bfloat16_it_is_found_at_the_same_operation(name: str) -> None:
    """Whose bounds are 2**16 times as wide."""
    expected = NETWORK[name]
    model = loaded(expected.fixture, "bfloat16")
    with inject(name):
        recorded = record(model, prompt(0, 24))
    first = located(model, recorded, stored="bfloat16").findings[0]
    assert first.name == expected.tensor
    assert first.error > 4
    assert located(model, record(model, prompt(0, 24)), stored="bfloat16").findings == ()


@pytest.mark.parametrize("fixture", [TRAINED, BIASED, UNTIED])
def test_without_a_fault_nothing_is_found(fixture: str) -> None:
    for numerics in ("exact", "float32"):
        model = loaded(fixture, numerics)
        report = located(model, record(model, prompt(0, 24)))
        assert report.findings == ()
        assert max(one.error for one in report.checks) < 0.7


def test_every_fault_of_the_network_is_in_a_table() -> None:
    assert {*NETWORK, *AT_LENGTH} == {one.name for one in FAULTS if one.section == "E"}


def test_from_module_outputs_alone_the_fault_lies_in_what_was_recomputed() -> None:
    """As a transformers user has them: without what runs between modules."""
    model = loaded(TRAINED, "exact")
    with inject("no-causal-mask"):
        recorded = record(model, prompt(0, 24))
    first = located(model, recorded, lambda name: not name.endswith((".attended", ".residual"))).findings[0]
    assert first.name == "model.layers.2.self_attn.out_proj"
    assert first.recomputed == (ATTENDED,)


def test_from_block_outputs_alone_the_layer_is_found() -> None:
    model = loaded(TRAINED, "exact")
    with inject("rotation-backwards"):
        recorded = record(model, prompt(0, 24))
    first = located(model, recorded, lambda name: name.count(".") == 2).findings[0]
    assert (first.name, first.layer) == ("model.layers.2", 2)
    assert ATTENDED in first.recomputed
    assert "model.layers.1" not in first.recomputed


# --- section A: the engine, its steps, chunks, neighbours and caches


def engine(model: Model, **options: object) -> RecordedEngine:
    return RecordedEngine(model, **({"block_size": 4, "prefix_caching": False} | options))


def in_chunks(model: Model) -> RecordedEngine:
    run = engine(model, max_num_batched_tokens=5)
    run.add("a", prompt(1, 13), 5)
    return run


def token_by_token(model: Model) -> RecordedEngine:
    run = engine(model, max_num_batched_tokens=1)
    run.add("a", prompt(1, 6), 3)
    return run


def with_neighbours(model: Model) -> RecordedEngine:
    run = engine(model)
    for index, length in enumerate((9, 5, 7)):
        run.add("abc"[index], prompt(index, length), 2 + 2 * index)
    return run


def one_after_another(model: Model) -> RecordedEngine:
    run = engine(model, max_num_seqs=1)
    for index, length in enumerate((9, 6, 1)):
        run.add("abc"[index], prompt(index + 1, length), 3)
    return run


def after_a_prefix_hit(model: Model) -> RecordedEngine:
    run = engine(model, prefix_caching=True, max_num_batched_tokens=20)
    run.add("a", prompt(9, 8) + prompt(1, 5), 3)
    run.run()
    run.add("b", prompt(9, 8) + prompt(2, 4), 3)
    return run


def with_a_shared_prefix(model: Model) -> RecordedEngine:
    run = engine(model, prefix_caching=True)
    run.add("a", prompt(9, 8) + prompt(1, 5), 3)
    run.add("b", prompt(9, 8) + prompt(2, 4), 3)
    return run


def at_length(model: Model) -> RecordedEngine:
    run = engine(model, block_size=16, max_num_batched_tokens=48)
    run.add("a", prompt(1, 90), 3)
    return run


def short_of_blocks(model: Model) -> RecordedEngine:
    run = engine(model, num_blocks=8, num_host_blocks=16, max_num_seqs=3, watermark=0.0)
    for index in range(3):
        run.add("abc"[index], prompt(index, 8), 10)
    return run


def sampled_thrice(model: Model) -> RecordedEngine:
    run = engine(model)
    run.add("a", prompt(1, 9), 4, n=3, temperature=2.0, seed=1)
    return run


def with_wrong_drafts(model: Model) -> RecordedEngine:
    run = engine(model, drafter=ScriptedDrafter({"a": prompt(7, 12)}), num_speculative_tokens=3)
    run.add("a", prompt(1, 9), 8)
    return run


# The run, whose rows, which rows of layer 0's convolution are wrong, and which steps found a wrong state there.
STATE = {
    "convolution-crosses-requests": (with_neighbours, "b", "rows 0 to 1 of 8", "step 0 of 4"),
    "state-read-by-index-in-the-batch": (with_neighbours, "c", "from row 8 on", "from step 2 on"),
    "slot-index-wraps-modulo-2": (with_neighbours, "c", "from row 7 on", "from step 1 on"),
    "state-written-to-every-slot": (with_neighbours, "b", "from row 5 on", "from step 1 on"),
    "slot-freed-twice": (one_after_another, "b", "only row 6", "step 1 of 3"),
    "previous-tenants-state-is-read": (one_after_another, "b", "rows 0 to 1 of 8", "step 0 of 3"),
    "one-token-prompt-reads-the-previous-tenants-state": (
        one_after_another,
        "c",
        "rows 0 to 1 of 3",
        "steps 0 to 1 of 3",
    ),
    "masked-padding-gets-a-bias": (in_chunks, "a", "only the first row, 0", "step 0 of 7"),
    "left-padding-enters-the-convolution": (with_neighbours, "b", "rows 0 to 1 of 8", "step 0 of 4"),
    "right-padding-enters-the-state": (with_neighbours, "b", "rows 5 to 6 of 8", "steps 1 to 2 of 4"),
    "state-dropped-after-the-prompt": (in_chunks, "a", "rows 13 to 14 of 17", "steps 3 to 4 of 7"),
    "single-token-step-has-no-state": (in_chunks, "a", "from row 13 on", "from step 3 on"),
    "state-zeroed-when-the-batch-is-repacked": (with_neighbours, "b", "from row 6 on", "from step 2 on"),
    "chunk-ignores-the-past-state": (in_chunks, "a", "the 2 rows at multiples of 5, 5 to 11", "steps 1 to 2 of 7"),
    "chunk-truncates-the-past-state": (in_chunks, "a", "the row at multiples of 5, 5 to 10", "steps 1 to 2 of 7"),
    "chunk-deep-in-a-prompt-ignores-the-past-state": (at_length, "a", "rows 48 to 49 of 92", "step 1 of 4"),
    "short-chunk-leaves-the-state-one-behind": (token_by_token, "a", "rows 1 to 6 of 8", "steps 1 to 6 of 8"),
    "state-never-advanced": (token_by_token, "a", "from row 1 on", "from step 1 on"),
    "rejected-drafts-stay-in-the-state": (with_wrong_drafts, "a", "from row 9 on", "from step 1 on"),
    "prefix-hit-without-its-state": (after_a_prefix_hit, "b", "rows 8 to 9 of 14", "step 0 of 3"),
    "checkpoint-taken-at-the-end-of-the-chunk": (after_a_prefix_hit, "b", "rows 8 to 9 of 14", "step 0 of 3"),
    "checkpoint-taken-before-the-chunk": (after_a_prefix_hit, "b", "rows 8 to 9 of 14", "step 0 of 3"),
    "checkpoint-one-token-ahead-of-its-key": (after_a_prefix_hit, "b", "rows 8 to 9 of 14", "step 0 of 3"),
    "blocks-published-before-they-are-written": (with_a_shared_prefix, "b", "rows 8 to 9 of 14", "step 0 of 3"),
    "swap-drops-the-state": (short_of_blocks, "c", "rows 8 to 9 of 17", "steps 1 to 2 of 10"),
    "fork-does-not-copy-the-state": (sampled_thrice, "a#1", "rows 9 to 10 of 12", "steps 0 to 1 of 3"),
}
CHANGES_NO_ACTIVATION = {"slot-leaked-when-admission-fails-after-a-match", "prompts-are-never-published"}


def rows_of(run: RecordedEngine, request: str) -> Recorded:
    run.run()
    name, _, index = request.partition("#")
    return run.dump(name, int(index or 0))


def broken_rows(name: str) -> tuple[Model, Recorded]:
    build, request, _, _ = STATE[name]
    model = loaded(BIASED if name == "masked-padding-gets-a-bias" else TRAINED, "float32")
    with inject(name):
        return model, rows_of(build(model), request)


@pytest.mark.parametrize("name", STATE)
def test_a_fault_of_the_state_is_found_in_what_a_step_found_and_not_in_what_it_computed(name: str) -> None:
    model, recorded = broken_rows(name)
    findings = located(model, recorded).findings
    first = findings[0]
    assert first.name == "model.layers.0.conv.state"
    assert first.steps.startswith(STATE[name][3])
    stored = ("conv.state", "keys_read", "values_read")
    assert all(one.name.endswith(stored) for one in findings) and first.recomputed == ()


@pytest.mark.parametrize("name", STATE)
def test_without_the_states_it_is_found_at_the_first_convolution(name: str) -> None:
    model, recorded = broken_rows(name)
    first = located(model, recorded, lambda name: not name.endswith(".conv.state")).findings[0]
    assert first.name == "model.layers.0.conv.conv"
    assert first.rows.startswith(STATE[name][2])
    assert first.channels.startswith("all")


# Sections B and C: the run, whose rows, the first wrong tensor of a layer, and the steps.
CACHED = {
    "attention-crosses-requests": (with_neighbours, "b", "self_attn.keys_read", "steps 0 to 1 of 4"),
    "hit-blocks-omitted-from-the-plan": (after_a_prefix_hit, "b", "self_attn.keys_read", "step 0 of 3"),
    "last-block-of-a-hit-dropped": (after_a_prefix_hit, "b", "self_attn.keys_read", "each of the 3"),
    "checkpoint-of-another-block-restored": (after_a_prefix_hit, "b", "conv.state", "step 0 of 3"),
    "prefill-restarts-at-0-over-cached-blocks": (after_a_prefix_hit, "b", "conv.state", "step 0 of 3"),
    "half-the-block-size-used-for-offsets": (in_chunks, "a", "self_attn.keys_read", "from step 1 on"),
    "old-content-of-a-cell-is-read": (in_chunks, "a", "self_attn.keys_read", "each of the 7"),
    "rejected-drafts-stay-in-the-blocks": (with_wrong_drafts, "a", "self_attn.keys_read", "from step 1 on"),
    "shared-block-written-without-a-copy": (sampled_thrice, "a#1", "self_attn.keys_read", "from step 1 on"),
    "copy-on-write-copies-the-first-block": (sampled_thrice, "a#1", "self_attn.keys_read", "each of the 3"),
    "swapped-blocks-come-back-in-reverse": (short_of_blocks, "c", "self_attn.keys_read", "from step 1 on"),
    "duplicate-block-freed-while-in-a-table": (with_a_shared_prefix, "b", "self_attn.keys_read", "from step 2 on"),
    "swapped-request-resumes-one-token-early": (short_of_blocks, "c", "conv.state", "step 1 of 10"),
    "positions-are-rows-of-the-batch": (with_neighbours, "b", "self_attn.q_rotated", "each of the 4"),
    "positions-restart-at-each-chunk": (in_chunks, "a", "self_attn.q_rotated", "steps 1 to 2 of 7"),
}


@pytest.mark.parametrize("name", CACHED)
def test_a_fault_of_what_is_cached_is_told_from_one_of_what_is_computed(name: str) -> None:
    """What is stored in blocks and checkpoints is named where a step found it; a wrong position at the rotation."""
    build, request, tensor, steps = CACHED[name]
    model = loaded(TRAINED, "float32")
    with inject(name):
        recorded = rows_of(build(model), request)
    findings = located(model, recorded).findings
    assert findings[0].name.endswith(f".{tensor}")
    assert findings[0].steps.startswith(steps)
    kinds = {one.name.split(".", 3)[3] for one in findings}
    stored = {"conv.state", *READ} | ({"self_attn.attended"} if name == "attention-crosses-requests" else set())
    assert kinds <= ({"self_attn.q_rotated", "self_attn.k_rotated"} if tensor.endswith("rotated") else stored)


@pytest.mark.parametrize("name", AT_LENGTH)
def test_a_fault_that_shows_only_at_length_is_found_at_its_operation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine's steps, whose queries attend in pieces of a few rows."""
    monkeypatch.setattr(attention, "SCORES", 2**14)
    model = loaded(TRAINED, "exact")
    with inject(name):
        recorded = rows_of(at_length(model), "a")
    first = located(model, recorded).findings[0]
    tensor, rows = AT_LENGTH[name]
    assert (first.name, first.error > 1000) == (tensor, True)
    assert first.rows.startswith(rows)


def test_every_fault_of_the_state_is_in_the_table() -> None:
    assert {one.name for one in FAULTS if one.section == "A"} == STATE.keys() | CHANGES_NO_ACTIVATION


@pytest.mark.parametrize(("build", "request_name"), sorted({(b, r) for b, r, *_ in STATE.values()}, key=str))
def test_without_a_fault_the_engines_rows_are_right(
    build: Callable[[Model], RecordedEngine], request_name: str
) -> None:
    model = loaded(TRAINED, "float32")
    recorded = rows_of(build(model), request_name)
    report = located(model, recorded)
    assert report.findings == ()
    assert len(report.checks) == len(recorded) - 2 > 80


def test_rows_of_rejected_drafts_are_no_ones() -> None:
    """A request that continues another's answer has the rows of its blocks, not those of what was rejected there."""
    model = loaded(TRAINED, "float32")
    run = engine(model, prefix_caching=True, drafter=ScriptedDrafter({"a": prompt(7, 12)}), num_speculative_tokens=3)
    run.add("a", prompt(1, 9), 8)
    run.run()
    (answer,) = run.finished["a"].outputs
    run.add("b", [*prompt(1, 9), *answer.token_ids, 20], 2)
    assert located(model, rows_of(run, "b")).findings == ()


def test_the_engines_rows_are_the_references_own_bits() -> None:
    """In exact arithmetic, from chunks, after a hit and with neighbours: nothing is lost on the way to the dump."""
    model = loaded(TRAINED, "exact")
    for build, request in cases():
        recorded = rows_of(build(model), request)
        whole = record(model, recorded["token_ids"].tolist())
        for name, values in recorded.items():
            if name.endswith(".conv.state"):
                u = np.pad(whole[name.replace("state", "u")], ((2, 0), (0, 0)))  # L = 3
                starts = len(whole["token_ids"]) - np.cumsum(recorded["steps"][::-1])[::-1]
                assert np.array_equal(values, [u[start : start + 2].ravel() for start in starts]), name
            elif name != "steps":
                assert np.array_equal(values, whole[name]), name


def cases() -> Iterator[tuple[Callable[[Model], RecordedEngine], str]]:
    yield in_chunks, "a"
    yield with_neighbours, "c"
    yield after_a_prefix_hit, "b"
    yield with_wrong_drafts, "a"


def test_a_recorded_dump_holds_every_tensor_that_locate_knows() -> None:
    model = loaded(TRAINED, "exact")
    recorded = record(model, [1, 2, 3])
    report = located(model, recorded)
    assert report.unreached == ()
    assert {one.name for one in report.checks} == recorded.keys() - {"token_ids"}
    assert json.dumps([one.name for one in report.checks])
