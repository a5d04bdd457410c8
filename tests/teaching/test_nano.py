"""nano.py against the reference: whatever arrives when, and however little memory there is."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lfm2np
from lfm2np.checkpoint.loaded import trained_fixture
from lfm2np.teaching import nano

pytestmark = pytest.mark.rounding

TORTURE = Path(__file__).parents[2] / "fixtures" / "torture"
DENSE = (
    "all_attention",
    "all_convolution",
    "biased_two_taps",
    "five_heads_old_config",
    "six_heads_two_kv",
    "wide_heads",
)
CHECKPOINTS = (trained_fixture(), *(TORTURE / name for name in DENSE))
BASE = (7, 3, 3, 11, 2, 7, 3, 5, 13, 2, 2, 9)  # what prompts begin with
NEW = 6  # tokens of a request, at most
FAR = 1e-4  # of the largest logit: more than float32 loses here, and less than any wrong row, state or block changes


@cache
def logits(path: Path, token_ids: tuple[int, ...]) -> np.ndarray:
    """The reference's, [T, V] float64."""
    return lfm2np.load(path).logits(token_ids).astype(np.float64)


def require_reference(path: Path, sequence: nano.Sequence) -> None:
    """Each token is the reference's, but for ties, and each log-probability near enough."""
    rows = logits(path, tuple(sequence.token_ids[:-1] or sequence.token_ids))[sequence.num_prompt_tokens - 1 :]
    far = FAR * np.abs(rows).max(initial=1.0)
    for row, token, logprob in zip(
        rows, sequence.new_token_ids, sequence.logprobs, strict=bool(sequence.new_token_ids)
    ):
        assert row.max() - row[token] < far
        assert abs(row[token] - row.max() - np.log(np.exp(row - row.max()).sum()) - logprob) < far


def require_consistent(engine: nano.Engine) -> None:
    """A block is in as many tables as it has users, free if in none; hashes and blocks are pairs; no slot is two's."""
    tables = Counter(block for sequence in engine.running for block in sequence.block_table)
    blocks = engine.blocks
    assert [tables[block] for block in range(len(blocks.num_users))] == blocks.num_users
    assert set(blocks.free) == {block for block, users in enumerate(blocks.num_users) if not users}
    assert {content: block for block, content in blocks.hash_of.items()} == blocks.block_of
    slots = [sequence.slot for sequence in engine.running]
    assert sorted([*slots, *engine.free_slots]) == list(range(len(engine.states)))


prompts = st.builds(
    lambda shared, rest: [*BASE[:shared], *rest],
    st.integers(0, len(BASE)),
    st.lists(st.sampled_from((2, 3, 4)), min_size=1, max_size=2),
)
arrivals = st.tuples(
    st.tuples(st.just("add"), prompts, st.sampled_from((NEW, NEW, 3, 1))),
    st.lists(st.just(("step",)), max_size=4),
    st.lists(st.tuples(st.sampled_from(("preempt", "preempt", "abort")), st.integers(0, 3)), max_size=1),
    st.lists(st.just(("step",)), max_size=3),
)
traces = st.lists(arrivals, min_size=2, max_size=6).map(
    lambda drawn: [operation for first, *others in drawn for operation in (first, *chain(*others))]
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Path, dict[str, int], list[tuple]]:
    """A checkpoint, a trace, and sizes from "just fits the longest request" and a token a step up."""
    trace, block_size = draw(traces), draw(st.integers(1, 5))
    longest = max(len(operation[1]) + operation[2] for operation in trace if operation[0] == "add")
    sizes = {
        "block_size": block_size,
        "num_blocks": -(-longest // block_size) + draw(st.sampled_from((0, 0, 1, 4))),
        "max_num_seqs": draw(st.integers(1, 4)),
        "max_num_batched_tokens": draw(st.integers(1, 20)),
        "prefix_caching": draw(st.integers(0, 4)) > 0,
    }
    return draw(st.sampled_from(CHECKPOINTS)), sizes, trace


def played(path: Path, sizes: dict[str, int], trace: list[tuple]) -> tuple[Counter[str], list[nano.Sequence]]:
    """What was met, and all requests, ended."""
    engine, met, sequences = nano.Engine(path, **sizes), Counter[str](), list[nano.Sequence]()

    def step() -> None:
        before = {sequence.request_id: sequence.slot for sequence in sequences}
        engine.step()
        require_consistent(engine)
        met["chunks"] += sum(
            0 < sequence.num_computed_tokens < sequence.num_prompt_tokens for sequence in engine.running
        )
        met["preempted"] += sum(
            before[sequence.request_id] is not None and sequence.slot is None and sequence.finish_reason is None
            for sequence in sequences
        )

    admit = engine.admit

    def counted() -> nano.Sequence:
        sequence = admit()
        met["hits"] += sequence.num_computed_tokens > 0
        met["resumed with a state"] += bool(sequence.num_computed_tokens and sequence.new_token_ids)
        return sequence

    engine.admit = counted  # type: ignore[method-assign]
    for kind, *arguments in trace:
        if kind == "add":
            sequences.append(engine.add(f"r{len(sequences)}", *arguments))
        elif kind == "step":
            step()
        elif kind == "abort" and engine.unfinished:
            engine.finish([*engine.unfinished.values()][arguments[0] % len(engine.unfinished)], "abort")
        elif kind == "preempt" and engine.running:
            engine.preempt(engine.running[arguments[0] % len(engine.running)])
    for _ in range(200 + 40 * len(sequences)):
        if engine.unfinished:
            step()
    assert not engine.unfinished
    assert len(engine.blocks.free) == sizes["num_blocks"]
    return met, sequences


def test_every_token_is_the_references_under_any_trace() -> None:
    met: Counter[str] = Counter()

    @settings(max_examples=100)
    @given(runs())
    def compare(run: tuple[Path, dict[str, int], list[tuple]]) -> None:
        path, sizes, trace = run
        seen, sequences = played(path, sizes, trace)
        met.update(seen)
        for sequence in sequences:
            require_reference(path, sequence)
            assert sequence.finish_reason == "abort" or len(sequence.new_token_ids) == sequence.max_tokens

    compare()
    assert min(met[what] for what in ("chunks", "preempted", "hits", "resumed with a state")) > 10, met


def test_it_ends_at_a_stop_token() -> None:
    engine = nano.Engine(trained_fixture())
    (whole,) = engine.generate([list(BASE)], 8)
    stop = whole.new_token_ids[3]
    sequence = engine.add("stopped", BASE, 8, (stop,))
    while engine.unfinished:
        engine.step()
    assert (sequence.finish_reason, sequence.new_token_ids[-1]) == ("stop", stop)


@pytest.mark.parametrize("prompt", [(), (512,), (-1,), (1,) * 40], ids=["empty", "unknown", "negative", "too long"])
def test_what_can_not_be_met_is_refused_and_changes_nothing(prompt: tuple[int, ...]) -> None:
    engine = nano.Engine(trained_fixture(), block_size=4, num_blocks=10)
    with pytest.raises(ValueError, match="expected a new id, 1 to 39 tokens below 512"):
        engine.add("a", prompt, 1)
    assert not engine.unfinished and not engine.step()


@pytest.mark.parametrize("name", ["moe_published", "lfm3_no_gate"])
def test_other_models_are_refused_by_their_config(name: str) -> None:
    with pytest.raises(ValueError, match="expected lfm2: no experts, no windows"):
        nano.Engine(TORTURE / name)


def test_it_is_one_file_that_imports_numpy_and_the_reading_of_checkpoints() -> None:
    assert nano.__file__ is not None and len(Path(nano.__file__).read_text().splitlines()) <= 350
    code = "import sys, {}; print(*sorted(name for name in sys.modules if name.startswith('lfm2np')))"
    reading, all_of_it = (
        subprocess.run(
            [sys.executable, "-c", code.format(names)], capture_output=True, text=True, check=True
        ).stdout.split()
        for names in ("numpy, lfm2np.checkpoint.files", "lfm2np.teaching.nano")
    )
    assert set(all_of_it) - set(reading) == {"lfm2np.teaching", "lfm2np.teaching.nano"}
