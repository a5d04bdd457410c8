"""The recorder that an engine's author calls, and the dumps over steps that come of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from lfm2np.checkpoint.config_json import load_config
from lfm2np.errors import DumpError, RequestError
from lfm2np.oracle.locate.dump import Dump, parse_dump, read_dump
from lfm2np.oracle.locate.patterns import Context, Steps, describe_reads, describe_steps
from lfm2np.oracle.recorders import Recorder
from lfm2np.oracle.recorders.registry import require_request

FIXTURES = Path(__file__).parents[3] / "fixtures"
CONFIG = load_config(FIXTURES / "trained")  # D = 128, L = 3, G * E = 64, H = 4
LAYER, KEYS = "model.layers.0", "model.layers.2.self_attn.keys_read"


def rows(count: int, width: int = 128, start: int = 0) -> np.ndarray:
    return (start + np.arange(count * width, dtype=np.float32)).reshape(count, width)


def two_steps() -> Recorder:
    recorder = Recorder(format="bfloat16")
    recorder.step([5, 6, 7])
    recorder.keep(LAYER, rows(3))
    recorder.keep(f"{LAYER}.conv.state", np.zeros((1, 2, 128)))
    recorder.keep(KEYS, rows(3, 64))
    recorder.step([8])
    recorder.keep(LAYER, rows(1, start=1000))
    recorder.keep(f"{LAYER}.conv.state", rows(2)[None])
    recorder.keep(KEYS, rows(4, 64))
    recorder.keep("lm_head", rows(1, 512))
    return recorder


def read(recorder: Recorder) -> Dump:
    return parse_dump(recorder.content(), "dump", CONFIG)


def test_steps_are_put_one_after_another() -> None:
    dump = read(two_steps())
    assert (dump.token_ids.tolist(), dump.sizes, dump.format) == ([5, 6, 7, 8], (3, 1), "bfloat16")
    assert np.array_equal(dump.tensors[LAYER], np.concatenate([rows(3), rows(1, start=1000)]))
    assert np.array_equal(dump.tensors[f"{LAYER}.conv.state"], np.stack([np.zeros(256), rows(2).ravel()]))
    assert [len(dump.tensors[name]) for name in (KEYS, "lm_head")] == [3 + 4, 1]


def test_a_prefix_that_was_cached_has_no_rows() -> None:
    recorder = Recorder(prefix=[1, 2])
    recorder.step([5, 6, 7])
    recorder.keep(LAYER, rows(3))
    recorder.keep(KEYS, rows(5, 64))
    dump = read(recorder)
    assert (dump.steps.first, dump.steps.starts, dump.steps.ends) == (2, (2,), (5,))
    assert len(dump.tensors[LAYER]) == 3


@pytest.mark.parametrize("start", [1, 3])
def test_a_hit_within_a_known_prompt_has_its_tokens_as_the_prefix(start: int) -> None:
    prompt = [5, 6, 7, 8]
    recorder = Recorder(prompt=prompt)
    recorder.step(prompt[start:], start)
    recorder.keep(LAYER, rows(4 - start))
    recorder.step([9], 4)
    recorder.keep(LAYER, rows(1))
    dump = read(recorder)
    assert (dump.token_ids.tolist(), dump.steps.first, dump.steps.ends) == ([*prompt, 9], start, (4, 5))
    recorder.step(prompt[2:], 2)  # after a preemption, with another hit
    assert recorder.token_ids == prompt


@pytest.mark.parametrize(("recorder", "known"), [(Recorder(), 0), (Recorder(prompt=[5]), 0), (Recorder(prefix=[5]), 1)])
def test_a_hit_of_unknown_tokens_is_refused(recorder: Recorder, known: int) -> None:
    with pytest.raises(DumpError, match=rf"start=2 after {known} tokens, .*: Recorder\(prefix=\.\.\.\)"):
        recorder.step([7], 2)


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_written_row_by_row_however_they_lie_in_memory(order: str) -> None:
    """Pinned: those that a transposition had left column by column were written so."""
    recorder, values = Recorder(), np.array(rows(3), order=order)  # type: ignore[call-overload]
    recorder.step([5, 6, 7])
    recorder.keep(LAYER, values)
    values[:] = 0  # what is kept is a copy
    assert np.array_equal(read(recorder).tensors[LAYER], rows(3))


def test_the_end_of_a_block_writes_the_file_and_an_error_in_it_does_not(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.safetensors") as recorder:
        recorder.step([5])
        recorder.keep(LAYER, rows(1))
    assert read_dump(tmp_path / "a.safetensors", CONFIG).token_ids.tolist() == [5]
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path / "b.safetensors") as recorder:
        recorder.step([1 // 0])
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_what_cannot_be_kept_is_an_error_that_says_why() -> None:
    recorder = Recorder()
    for call, words in (
        (lambda: recorder.keep(LAYER, rows(1)), "kept before the first step"),
        (lambda: recorder.step([]), "step 0: no tokens"),
        (lambda: recorder.save(), r"expected Recorder\(path\)"),
        (lambda: Recorder(format="int8"), "format 'int8': expected one of float32, float16, bfloat16"),
    ):
        with pytest.raises(DumpError, match=words):
            call()
    recorder.step([5])
    recorder.keep(LAYER, rows(1))
    for name, values, words in (
        (LAYER, rows(1), "kept already in step 0"),
        ("token_ids", [5], "kept already"),
        ("x", ["text"], "expected numbers with a row for each token"),
        ("x", 3.0, "expected numbers with a row for each token"),
        ("lm_head", np.zeros((4, 4)), "expected at most 1"),
    ):
        with pytest.raises(DumpError, match=words):
            recorder.keep(name, values)
    recorder.step([6])
    recorder.keep(LAYER, rows(1, 5))
    with pytest.raises(DumpError, match=r"rows of shapes \[\(5,\), \(128,\)\] in different steps"):
        recorder.tensors()


def test_a_recorded_dump_that_was_changed_is_refused_and_one_of_others_needs_no_checksum() -> None:
    recorder = two_steps()
    content = recorder.content()
    for place in (content.index(b"bfloat16"), len(content) - 2):  # of the metadata, of a number
        changed = bytearray(content)
        changed[place] ^= 1
        with pytest.raises(
            DumpError, match=r"dump: lfm2np\.file_sha256 '.*' in its metadata, expected \w{64}: changed since"
        ):
            parse_dump(bytes(changed), "dump", CONFIG)
    assert read(recorder).format == "bfloat16"
    assert parse_dump(save(recorder.tensors()), "dump", CONFIG).format is None
    with pytest.raises(DumpError, match="format 'int3' in its metadata"):
        parse_dump(save(recorder.tensors(), {"format": "int3"}), "dump", CONFIG)


# --- steps in words


def test_what_a_window_hides_was_not_read() -> None:
    """A window of 3: the first step's three rows see positions 0 to 4, the others 3 each."""
    steps, context = Steps(7, (3, 1, 1)), Context(3)
    assert (steps.count(context), steps.count(Context(99))) == (5 + 3 + 3, 5 + 6 + 7)
    mask = np.zeros(2 + 5 + 3 + 3, bool)
    mask[[2 + 5 + 1, 2 + 5 + 2]] = True
    assert describe_reads(mask, steps, context) == "positions 4 to 5 of 6, as step 1 read them"
    assert steps.place(context, 2 + 5 + 3) == "position 4 as step 2 read it"
    assert describe_steps(mask, steps, context) == "step 1 of 3"


def test_a_row_of_logits_is_no_batch_of_one_where_the_vocabulary_is_as_large_as_the_step() -> None:
    """Pinned: shapes () and (3,) in different steps, of a model of 37 ids and a prompt of 37 tokens."""
    recorder = Recorder()
    for token_ids in ([0, 1, 2], [1]):
        recorder.step(token_ids)
        recorder.keep("lm_head", np.zeros((1, 3), np.float32))
    assert recorder.tensors()["lm_head"].shape == (2, 3)
    recorder = Recorder()
    recorder.step([0, 1, 2])
    recorder.keep("lm_head", np.zeros((1, 3, 3), np.float32))
    assert recorder.tensors()["lm_head"].shape == (3, 3)


# requests that no engine can run


@pytest.mark.parametrize(
    ("prompts", "request_number", "max_tokens", "message"),
    [
        ([[1]], 1, 1, "request 1: expected one of 1"),
        ([[1]], -1, 1, "request -1: expected one of 1"),
        ([[1]], 0, 0, "max_tokens 0: expected at least 1"),
        ([[1], []], 0, 1, "ids: none, expected at least one"),
        ([[1], [2, 512]], 0, 1, "512, expected 0 to vocab_size-1=511"),
        ([[1], [-1]], 0, 1, "-1, expected 0 to"),
        ([[1] * 1000], 0, 25, "1025 tokens with new ones, max_position_embeddings=1024"),
    ],
)
def test_requests_that_no_engine_can_run_are_refused(
    prompts: list[list[int]], request_number: int, max_tokens: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        require_request(prompts, request_number, max_tokens, CONFIG)


def test_a_request_that_just_fits_is_taken() -> None:
    require_request([[1] * 1000, [511]], 1, 24, CONFIG)
