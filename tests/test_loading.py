"""The Python API on real files: loading, logits, generation, scores."""

import dataclasses
import gc
import json
import os
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
from builders import raw_config, safetensors_bytes, stored, stored_weights, tiny_config, write_model
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from truths import greedy_steps

import lfm2np
from lfm2np.arithmetic import NAMES, numerics_named
from lfm2np.arithmetic.matrix import AttentionScale
from lfm2np.checkpoint.stored import widen
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.engine import engine
from lfm2np.engine.generation import collect
from lfm2np.engine.sampling.logprobs import token_logprobs
from lfm2np.errors import CheckpointError, NumericsError, RequestError, TokenizerError
from lfm2np.oracle.judging.formats import round_to_float16 as to_float16

FIXTURES = Path(__file__).parent.parent / "fixtures"
TORTURE = sorted((FIXTURES / "torture").iterdir())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> lfm2np.Model:
    return lfm2np.load(write_model(tmp_path_factory.mktemp("models") / "model"))


@pytest.mark.slow
def test_the_error_state_that_a_caller_set_changes_no_bit() -> None:
    """Pinned: np.seterr(all="raise") ended in a FloatingPointError of a softmax, a draw or a rounding to float16."""
    drawn = lfm2np.SamplingParams(temperature=1e-3, seed=1, max_tokens=3, logprobs=2)

    def results() -> list[object]:
        model = lfm2np.load()
        samples = [output.outputs[0].logprobs for output in lfm2np.LLM(model).generate(["sort: 3 1 2"], drawn)]
        return [model.logits("sort: 3").tobytes(), model.score("sort: 3"), samples, float(to_float16(np.array(1e-9)))]

    expected = results()
    with np.errstate(all="raise"):
        assert results() == expected


def test_a_file_that_is_cut_off_while_its_weights_are_streamed_is_named(tmp_path):
    path = shutil.copytree(FIXTURES / "torture" / "magnitudes", tmp_path / "model")
    streamed, resident = lfm2np.load(path, weights="streamed"), lfm2np.load(path)
    before = resident.logits([1]).tobytes()
    assert streamed.logits([1]).tobytes() == before, "the control"
    size = (path / "model.safetensors").stat().st_size
    os.truncate(path / "model.safetensors", size - 1)
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors: {size - 1} bytes, expected {size}, as when it was"
    ):
        streamed.logits([1])
    assert resident.logits([1]).tobytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("path", TORTURE, ids=lambda path: path.name)
def test_streamed_weights_change_no_bit(path):
    model = lfm2np.load(path)
    ids = np.random.default_rng(3).integers(0, model.config.vocab_size, 19).tolist()
    assert lfm2np.load(path, weights="streamed").logits(ids).tobytes() == model.logits(ids).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("path", TORTURE, ids=lambda path: path.name)
def test_a_row_of_logits_depends_only_on_the_tokens_before_it(path):
    """Causality of both operators: whatever follows, the bits stay."""
    model = lfm2np.load(path)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.config.vocab_size, 24).tolist()
    whole = model.logits(ids)
    for cut in (1, 2, 5, 23):
        other = ids[:cut] + rng.integers(0, model.config.vocab_size, 5).tolist()
        assert model.logits(other)[:cut].tobytes() == whole[:cut].tobytes()


UNLIKE = ("all_attention", "all_convolution", "lfm3_minimal_config", "lfm3_window_of_one", "moe_published")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [None, *(path for path in TORTURE if path.name in UNLIKE)],
    ids=lambda path: "trained" if path is None else path.name,
)
def test_generation_is_the_reference_s_bit_for_bit(path):
    """The engine and its cache, in chunks and one token after the other, against the whole sequence anew each time.

    Of all fixtures tests/engine/test_engine.py compares runs of many requests.
    """
    model = lfm2np.load(path)
    ids = np.random.default_rng(3).integers(0, model.config.vocab_size, 19).tolist()
    truth = greedy_steps(model, ids, 9)
    tokens = list(model.stream(ids, 9, logprobs=3))
    assert [(token.token_id, token.logits.tobytes()) for token in tokens] == [(t, row.tobytes()) for t, row in truth]
    assert [token.logprobs for token in tokens] == [token_logprobs(model.numerics, row, t, 3) for t, row in truth]
    assert [token.finish_reason for token in tokens[:-1]] == [None] * (len(tokens) - 1)
    assert model.generate(ids, 9).token_ids == tuple(token_id for token_id, _ in truth)


def test_one_request_takes_the_memory_of_one_request(monkeypatch):
    """Not the 1 GiB that an engine takes for requests that it does not know yet."""
    caches = []
    make = engine.make_cache
    monkeypatch.setattr(engine, "make_cache", lambda *args: caches.append(make(*args)) or caches[-1])
    model = lfm2np.load()
    model.generate([1, 5, 6], max_tokens=4)
    (cache,) = caches
    assert {len(array) for layer in cache.blocks for array in layer} == {1}, "blocks of 16 tokens"
    assert len(cache.states) == 1
    assert cache.checkpoints.size == 0


def test_generation_stops_at_the_longest_context(model):
    endless = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_token_ids=()))
    completion = endless.generate([1] * 125, max_tokens=50)
    assert len(completion.token_ids) == 3
    assert completion.finish_reason == "length"


def test_the_end_of_sequence_is_no_text_even_if_it_is_an_ordinary_token(model):
    first = model.generate("a", max_tokens=1)
    assert first.text
    stopping = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_token_ids=first.token_ids))
    completion = stopping.generate("a", max_tokens=9)
    assert (completion.finish_reason, completion.text) == ("stop", "")
    assert completion.token_ids == first.token_ids


def test_an_untied_embedding_that_is_not_finite_is_refused(tmp_path):
    config = raw_config(tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = stored_weights(tiny_config(tie_word_embeddings=False))
    tensors["model.embed_tokens.weight"] = stored(np.full((300, 16), np.nan), "BF16")
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight: nan at index \(0, 0\)"):
        lfm2np.load(tmp_path)


@pytest.mark.rounding
def test_weights_prepared_for_exact_are_refused_by_the_others(model):
    with pytest.raises(NumericsError, match="prepared for exact, not for float32"):
        numerics_named("float32").linear(np.ones((1, 16), np.float32), model.weights.head)


def test_equal_logits_give_the_lowest_id():
    """In `magnitudes` token 0 embeds to zero, so every logit is exactly 0."""
    model = lfm2np.load(FIXTURES / "torture" / "magnitudes")
    assert not model.logits([0]).any()
    assert model.generate([0], max_tokens=1).token_ids == (0,)
    assert [s.rank for s in model.score([0, 0])] == [1]
    assert [s.rank for s in model.score([0, 7])] == [8], "ties rank by id"
    assert [s.margin for s in model.score([0, 7])] == [0.0]


@pytest.mark.slow
@given(st.lists(st.integers(0, 299), min_size=2, max_size=12))
def test_scores_are_those_of_a_brute_force_over_the_logits(model, ids):
    logits = model.logits(ids).astype(np.float64)
    for s in model.score(ids):
        row = logits[s.position - 1]
        order = sorted(range(300), key=lambda i: (-row[i], i))
        assert s.token_id == ids[s.position]
        assert s.greedy_token_id == order[0]
        assert s.rank == order.index(s.token_id) + 1
        assert s.margin == row[s.token_id] - max(row[i] for i in range(300) if i != s.token_id)
        assert s.logprob == pytest.approx(row[s.token_id] - np.log(np.exp(row - row.max()).sum()) - row.max(), abs=1e-9)


def test_the_size_of_temporary_pieces_changes_no_bit(model, monkeypatch):
    before = model.digest()
    monkeypatch.setattr("lfm2np.arithmetic.pieces.PIECE", 1)
    again = lfm2np.load(model.path)
    assert again.digest() == before


def test_the_same_weights_stored_wider_give_the_same_bits(model, tmp_path):
    """bfloat16 values in a float32 file are the same model."""
    (tmp_path / "config.json").write_text(json.dumps(raw_config()))
    tensors = {n: widen(t.values, t.dtype) for n, t in open_checkpoint(model.path, model.config).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert lfm2np.load(tmp_path).logits([1, 2, 3]).tobytes() == model.logits([1, 2, 3]).tobytes()


@pytest.mark.parametrize(
    ("call", "fragment"),
    [
        (lambda m: m.logits([]), "ids: none, expected at least one"),
        (lambda m: m.logits([-1]), "-1"),
        (lambda m: m.logits([True]), "True"),
        (lambda m: m.logits([1.0]), "1.0"),
        (lambda m: m.logits([1] * 129), "129 tokens: expected at most max_position_embeddings=128"),
        (lambda m: m.generate([1], max_tokens=0), "max_tokens 0"),
        (lambda m: m.generate([1] * 128), "prompt of 128 tokens"),
        (lambda m: m.generate([1], max_tokens=2.5), "max_tokens 2.5: expected a whole number"),
        (lambda m: m.generate([1], logprobs=1.5), "logprobs 1.5: expected a whole number, 0 to 300"),
        (lambda m: m.generate(b"ab"), "ids: b'ab', expected a sequence of integers"),
        (lambda m: m.logits(5), "ids: 5, expected a sequence of integers"),
        (lambda m: m.score({1, 2}), "expected a sequence of integers"),
        (lambda m: m.generate("a" * 10**6), "1000000 characters, expected at most"),
        (lambda m: m.stream([1], max_tokens=0), "max_tokens 0"),
        (lambda m: m.score([1]), "1 token to score"),
        (lambda m: lfm2np.load(m.path, weights="gpu"), "weights 'gpu': expected one of resident, streamed"),
        (lambda m: lfm2np.load(m.path, "float8"), "numerics 'float8': expected one of exact, float32"),
    ],
)
def test_a_request_that_cannot_be_met_raises_at_once(model, call, fragment):
    with pytest.raises(RequestError) as caught:
        call(model)
    assert fragment in str(caught.value)


@pytest.mark.slow
def test_a_completion_keeps_no_logits(model):
    """At a vocabulary of 65,536 each row is 256 KiB: ten thousand tokens would be 2.6 GB."""
    rows = []
    completion = collect([1], (rows.append(weakref.ref(t.logits)) or t for t in model.stream([1], 12)))
    assert len(completion.token_ids) == len(rows)
    gc.collect()
    assert sum(row() is not None for row in rows) <= 1


def test_a_corrupt_tokenizer_shows_before_the_work(model, tmp_path):
    shutil.copytree(model.path, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    other = lfm2np.load(tmp_path / "model")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        other.generate([1], max_tokens=1)
    assert other.logits([1]).shape == (1, 300)


def test_a_missing_fixture_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "lfm2np.checkpoint.loaded.__file__", str(tmp_path / "site" / "lfm2np" / "checkpoint" / "loaded.py")
    )
    with pytest.raises(CheckpointError, match="trained fixture is not in this installation"):
        lfm2np.trained_fixture()


@pytest.mark.parametrize("numerics", NAMES)
def test_operands_of_other_shapes_are_refused_by_name(numerics):
    arithmetic = numerics_named(numerics)
    scale = AttentionScale(np.zeros(4, np.int32), np.zeros((2, 4), np.int32))
    ones = np.ones((2, 2, 4), np.float32)
    with pytest.raises(NumericsError, match=r"keys: shape \(2, 1, 6\), expected \[C, G, E\] with E = 4"):
        arithmetic.attend(ones, np.ones((2, 1, 6), np.float32), ones, scale)
    with pytest.raises(NumericsError, match="expected T <= C"):
        arithmetic.attend(ones, ones[:1], ones[:1], scale)
    with pytest.raises(NumericsError, match=r"history: shape \(3, 4\), expected \[K, D\] with K = 2"):
        arithmetic.convolve(np.ones((3, 4), np.float32), ones[0], np.ones((4, 3), np.float32))
