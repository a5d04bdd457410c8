"""What is measured of quantised weights: the files that are made, the arithmetic of our engine, readers, tables."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import made
import measure
import numpy as np
import pytest
import reading
import servers
import tables
import through_noise
from arithmetic import q8_0, q8_k
from builders import raw_config
from faults import by_name, inject
from gguf_bytes import gguf_bytes, model_keys, quantised_tensors
from measure import PAGE, RESULTS
from servers import Run
from through_noise import LARGEST, SCALABLE, TWELVE
from wrong_readers import MINIMUM, SCALE, patched

import lfm2np
from lfm2np.checkpoint.config_json import parse_config
from lfm2np.checkpoint.gguf.container import open_container
from lfm2np.checkpoint.stored import widen


def test_the_page_has_the_tables_that_the_results_make() -> None:
    before = after = PAGE.read_text(encoding="utf-8")
    for name, text in tables.made(tables.read(RESULTS)).items():
        after = tables.put_between(after, name, text)
    assert after == before, "python fixtures/quantised/measure.py table"


def test_all_positions_of_servers_that_are_right_are_counted() -> None:
    ones = [("trained-Q4_0.gguf", {"EXACT": 1000, "BUG": 2, "DRIFT": 1}), ("trained-mlx-4-bfloat16", {"BUG": 5})]
    records = [{"kind": servers.KIND, "file": file, "counts": counts} for file, counts in ones]
    summary = tables.right_ones([*records, {"kind": reading.KIND, "file": "trained-Q4_0.gguf"}])
    assert summary == "Servers that are right: 1,003 positions, 3 called wrong."


def test_the_wide_checkpoint_computes_what_the_trained_one_does(tmp_path: Path) -> None:
    made.make_wide(tmp_path / "wide")
    trained, wide = lfm2np.load(), lfm2np.load(tmp_path / "wide")
    assert (wide.config.hidden_size, wide.config.feed_forward_size) == (256, 512)
    ids = list(range(30, 50))
    assert np.abs(wide.logits(ids) - trained.logits(ids)).max() < 1e-4
    weights = np.asarray(wide.weights.embedding.values)
    assert len(weights) == trained.config.vocab_size


def as_q8_0(numbers: list[Fraction]) -> list[float]:
    """By the definition: steps of 1/127 of the largest, ties away from zero, times the step as float16."""
    step = max(map(abs, numbers)) / 127
    codes = [
        0 if not step else int(abs(number) / step + Fraction(1, 2)) * (1 if number >= 0 else -1) for number in numbers
    ]
    return [float(code * Fraction(float(np.float16(float(step))))) for code in codes]


def test_inputs_are_rounded_as_llama_cpp_rounds_them() -> None:
    random = np.random.default_rng(0)
    x = (random.normal(size=(40, 64)) * np.exp2(random.integers(-8, 8, (40, 1)))).astype(np.float32)
    x[3, :32] = 0.0
    for row, actual in zip(x, q8_0(x), strict=True):
        exact = [Fraction(float(value)) for value in row]
        expected = as_q8_0(exact[:32]) + as_q8_0(exact[32:])
        assert actual.tolist() == expected
    wide = random.normal(size=(9, 512)).astype(np.float32)
    blocks, actual = wide.reshape(9, 2, 256), q8_k(wide).reshape(9, 2, 256)
    largest = np.abs(blocks).max(-1, keepdims=True)
    assert (np.abs(actual - blocks) <= largest / 127 * 0.50001).all()
    assert (np.abs(actual).max(-1) <= largest[..., 0] * 1.000001).all()
    codes = actual / largest * 127
    assert np.abs(codes - np.rint(codes)).max() < 1e-4


@pytest.mark.parametrize(("dtype", "reader"), [("Q8_0", SCALE), ("Q4_0", SCALE), ("Q5_K", MINIMUM)])
def test_a_patched_file_says_what_the_wrong_reader_reads(dtype: str, reader: object, tmp_path: Path) -> None:
    config = parse_config(raw_config(hidden_size=256, intermediate_size=256, vocab_size=64), "config.json")
    right = tmp_path / "right.gguf"
    right.write_bytes(gguf_bytes(model_keys(config), quantised_tensors(config, dtype)))
    changed = patched(right, tmp_path / "wrong.gguf", reader)
    before, after = open_container(right).tensors, open_container(tmp_path / "wrong.gguf").tensors
    for name, value in before.items():
        was, now = widen(value.values, value.dtype), widen(after[name].values, value.dtype)
        assert (name in changed) == (was.tobytes() != now.tobytes()) == (value.dtype == dtype), name
        if name in changed and dtype != "Q5_K":
            codes = np.where(was == 0, 1, was) / np.where(now == 0, 1, now)  # of one block the same factor
            assert all(len(np.unique(np.round(block[block != 1], 9))) <= 1 for block in codes.reshape(-1, 32))
        if name in changed and dtype == "Q5_K":
            assert (now - was).reshape(-1, 32).std(-1).max() < 1e-6  # of one group the same minimum
    only = patched(right, tmp_path / "one.gguf", reader, "blk.0.ffn_down.weight")
    assert only == ["blk.0.ffn_down.weight"]


def test_every_fault_that_is_measured_fits_the_code() -> None:
    for fault in [*map(by_name, TWELVE), *(part.of(LARGEST) for part in SCALABLE)]:
        with inject(fault):
            pass
    assert len(set(TWELVE)) == 12


RIGHT, WRONG = "trained-Q4_0.gguf", "trained-mlx-4-bfloat16"
NEWS = {  # what came, whether it is other than expected, whether it is written down
    "right": ({"file": RIGHT, "verdict": "TIE", "counts": {"EXACT": 3}}, False, True),
    "right, called wrong": ({"file": RIGHT, "verdict": "BUG", "counts": {"BUG": 3}}, True, True),
    "right, some answers": ({"file": RIGHT, "verdict": "INCONCLUSIVE", "counts": {"EXACT": 3}}, False, True),
    "right, no answer": ({"file": RIGHT, "verdict": "INCONCLUSIVE", "counts": {}}, True, False),
    "right, not started": ({"file": RIGHT, "verdict": "refused"}, True, False),
    "wrong": ({"file": WRONG, "verdict": "BUG", "counts": {"BUG": 3}}, False, True),
    "wrong, not started": ({"file": WRONG, "verdict": "refused"}, True, False),
}


@pytest.mark.parametrize("name", NEWS)
def test_a_server_that_tells_nothing_is_news_and_is_tried_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    came, is_news, is_written = NEWS[name]
    record = {"kind": servers.KIND, "weights": "a", "kv": "", "seed": 0, "rms": 1.0, "worst": 2.0, "reasons": ["so"]}
    monkeypatch.setitem(measure.WAYS, "servers", lambda *_: iter([record | came]))
    results = tmp_path / "results.jsonl"
    arguments = measure.parsed(["servers", "--results", str(results), "--cache", str(tmp_path)])
    assert len(measure.run(arguments)) == is_news
    assert str(came["verdict"]) in capsys.readouterr().out
    assert len(tables.read(results)) == is_written


def test_a_reader_that_told_nothing_is_news_and_is_tried_again() -> None:
    for only, verdict, counts in (("", "BUG", {"BUG": 3}), ("x", "TIE", {"EXACT": 3}), ("x", "INCONCLUSIVE", {})):
        outcome = {"verdict": verdict, "counts": counts}
        record = {"kind": reading.KIND, "only": only, through_noise.AGAINST_FILE: outcome}
        assert (tables.was_judged(record), tables.is_news(record)) == (bool(counts), not counts)


def test_a_fault_that_is_not_seen_is_news() -> None:
    def of(name: str, by: float | None, verdict: str) -> dict[str, object]:
        return {"kind": through_noise.KIND, "name": name, "by": by, through_noise.AGAINST_FILE: {"verdict": verdict}}

    assert tables.is_news(of(TWELVE[0], None, "TIE")) and tables.is_news(of("none", None, "BUG"))
    for expected in (of(TWELVE[0], None, "BUG"), of("none", None, "TIE")):
        assert not tables.is_news(expected)
    scaled = [of(SCALABLE[0].name, 1e-4, verdict) for verdict in ("BUG", "TIE")]
    assert not any(map(tables.is_news, scaled))
    assert not any(map(tables.is_news, (record for record in tables.read(RESULTS) if record["kind"] != servers.KIND)))


def test_a_record_of_an_unknown_form_is_told_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "server", "weights": "x"}\n{"kind": "server"}\n')
    with pytest.raises(ValueError, match="2: expected an object with kind, weights"):
        tables.read(path)


def test_kept_answers_are_those_of_the_weights_pins_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those of an older engine were judged as a newer one's. Judged as another format they are the same."""
    file = made.FILES[0]
    run = Run(file, "float16", 0, file.format)
    kept = run.kept("a")
    assert replace(run, judged_as="float32").kept("a") == kept
    others = [run.kept("b"), replace(run, seed=1).kept("a"), replace(run, kv="float32").kept("a")]
    newer = replace(file.recipe, installs=(*file.recipe.installs, "numpy==0.0.1"))
    with monkeypatch.context() as patch:
        patch.setattr(made, "RECIPES", (newer,))
        others.append(run.kept("a"))
    monkeypatch.setattr(servers, "LLAMA_SERVER", f"{servers.LLAMA_SERVER} -b 7")
    others.append(run.kept("a"))
    assert len({kept, *others}) == 6
