"""Text to ids and back; a stream never cuts a character and never differs from decoding at once."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import SPECIALS, VOCAB_SIZE, byte_level_tokenizer, tiny_config, write_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st

from lfm2np.checkpoint.text.tokenizer import (
    BYTE_OF_LETTER,
    LARGE_TEXT,
    Tokenizer,
    guarded,
    load_tokenizer,
    require_ids,
)
from lfm2np.errors import Lfm2npError, RequestError, TokenizerError

CONFIG = tiny_config()
BOS = SPECIALS[1]


@functools.cache
def tokenizer(post_processor: bool = True, bos_token_id: int | None = 1, context: int = 128) -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), post_processor=post_processor)
        return load_tokenizer(Path(directory), tiny_config(bos_token_id=bos_token_id, max_position_embeddings=context))


def ids_of(text: str) -> list[int]:
    """Ids of the bytes, without merges or BOS."""
    letter_of_byte = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    backend = byte_level_tokenizer()
    return [backend.token_to_id(letter_of_byte[byte]) for byte in text.encode()]


def streamed(ids: list[int]) -> list[str]:
    stream = tokenizer().stream()
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


@pytest.mark.parametrize("post_processor", [True, False])
@pytest.mark.parametrize("text", ["hello", "", f"{BOS}hello", BOS])
def test_a_prompt_begins_with_exactly_one_bos(post_processor: bool, text: str) -> None:
    ids = tokenizer(post_processor).encode(text)
    assert ids[:1] == [1]
    assert ids.count(1) == 1
    assert tokenizer().decode(ids) == text.removeprefix(BOS)


class Noting:
    """The library's tokenizer, and what was called."""

    def __init__(self, inner: object) -> None:
        self.inner, self.called = inner, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize("post_processor", [True, False])
@pytest.mark.parametrize(("length", "call"), [(LARGE_TEXT - 1, "encode"), (LARGE_TEXT, "encode_batch")])
def test_a_large_text_has_the_ids_of_any_other(
    monkeypatch: pytest.MonkeyPatch, post_processor: bool, length: int, call: str
) -> None:
    """By the call that lets other threads run meanwhile."""
    text = (f"hello {SPECIALS[2]} \u2603  {BOS}" * length)[:length]
    subject, backend = tokenizer(post_processor, context=4096), byte_level_tokenizer(post_processor)
    noting = Noting(subject._rust)
    monkeypatch.setattr(subject, "_rust", noting)
    assert subject.encode_more(text) == backend.encode(text, add_special_tokens=False).ids
    assert subject.encode(text) == [1, *subject.encode_more(text)]
    assert set(noting.called) == {call}


def test_one_bos_is_added_where_none_is_merges_apply_and_special_text_is_one_token() -> None:
    assert tokenizer().encode(BOS + BOS) == [1, 1]
    assert tokenizer().encode(f"a{BOS}") == [1, *ids_of("a"), 1]
    assert tokenizer(False, None).encode("a") == ids_of("a"), "nor has the model one"
    assert tokenizer(True, None).encode("a") == [1, *ids_of("a")]
    assert len(tokenizer().encode("hello")) == 1 + 3
    assert tokenizer().encode("<|im_end|>") == [1, 4]


@pytest.mark.parametrize(
    ("text", "named"), [("\ud800", "lone surrogate at position 0"), ("a\udfff", "position 1"), (3, "3, expected a str")]
)
def test_what_is_no_unicode_is_refused(text: Any, named: str) -> None:
    with pytest.raises(RequestError, match=f"text: .*{named}"):
        tokenizer().encode(text)
    with pytest.raises(RequestError, match=r"messages\[0\]\.content: "):
        tokenizer().encode_chat([{"role": "user", "content": text}])


@given(st.text())
def test_decoding_gives_the_text_back(text: str) -> None:
    if any(special in text for special in SPECIALS):
        return
    assert tokenizer().decode(tokenizer().encode(text)) == text


def test_dead_rows_and_special_tokens_decode_to_nothing() -> None:
    assert tokenizer().token(VOCAB_SIZE - 1) is None
    assert tokenizer().decode([VOCAB_SIZE - 1, 1, 4, *ids_of("a")]) == "a"
    assert tokenizer().decode([]) == ""
    assert tokenizer().token_bytes(4) == tokenizer().token_bytes(VOCAB_SIZE - 1) == b""


def test_an_added_token_with_a_letter_that_is_no_byte_stands_for_itself() -> None:
    (token_id,) = tokenizer().encode("tool é → call")[1:]
    assert tokenizer().token_bytes(token_id) == "tool é → call".encode()
    assert streamed([token_id]) == ["tool é → call", ""]


def test_the_byte_alphabet_is_the_library_s() -> None:
    from tokenizers import pre_tokenizers

    assert set(BYTE_OF_LETTER) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF_LETTER.values()) == list(range(256))


def test_a_character_in_four_tokens_comes_out_whole_with_the_last() -> None:
    assert streamed(ids_of("🙂")) == ["", "", "", "🙂", ""]
    assert streamed(ids_of("é")) == ["", "é", ""]
    assert streamed(ids_of("🙂")[:3]) == ["", "", "", "\ufffd"]
    assert streamed([*ids_of("🙂")[:2], *ids_of("a")]) == ["", "", "\ufffda", ""]


BYTES = st.integers(len(SPECIALS), len(SPECIALS) + 255)


@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60) | st.lists(BYTES, max_size=40))
@example(ids=ids_of("\ufffd🙂é\ufffd")[:-1])
def test_the_pieces_of_a_stream_are_the_decoded_text(ids: list[int]) -> None:
    assert "".join(streamed(ids)) == tokenizer().decode(ids)


@given(text=st.text(min_size=1, max_size=20), keep=st.integers(0, 3))
def test_a_stream_of_split_characters_never_shows_half_of_one(text: str, keep: int) -> None:
    ids = ids_of(text)
    pieces = streamed(ids[: len(ids) - keep])
    assert "".join(pieces) == tokenizer().decode(ids[: len(ids) - keep])
    assert text.startswith("".join(pieces[:-1]))


def test_a_finished_stream_takes_no_more_tokens() -> None:
    stream = tokenizer().stream()
    stream.finish()
    assert stream.finish() == ""
    with pytest.raises(RequestError, match="push after finish"):
        stream.push(5)


def test_good_ids_come_back_as_plain_ints() -> None:
    checked = require_ids(np.array([0, 299]), 300)  # type: ignore[arg-type]
    assert checked == [0, 299]
    assert [type(i) for i in checked] == [int, int]


BAD_IDS = [
    ([], "ids: none, expected at least one"),
    ([1, 300], r"ids\[1\]: 300, expected 0 to vocab_size-1=299"),
    ([-1], r"ids\[0\]: -1, expected 0"),
    ([2**70], r"ids\[0\]: 1180591620717411303424"),
    ([10**5000], r"ids\[0\]: an integer of thousands of digits"),
    ([1, 2, True], r"ids\[2\]: True, expected an integer"),
    ([np.True_], r"ids\[0\]: .*True.*, expected an integer"),
    ([1.0], r"ids\[0\]: 1\.0, expected an integer"),
    (["1"], r"ids\[0\]: '1', expected an integer"),
    ([None], r"ids\[0\]: None"),
]


@pytest.mark.parametrize(("ids", "fragment"), BAD_IDS)
def test_a_bad_id_is_named_with_its_position_and_bound(ids: list[int], fragment: str) -> None:
    with pytest.raises(RequestError, match=fragment):
        require_ids(ids, 300)
    if ids:
        with pytest.raises(RequestError, match=fragment):
            tokenizer().decode(ids)
        with pytest.raises(RequestError):
            tokenizer().stream().push(ids[-1])


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BOS_PIECE = {"SpecialToken": {"id": BOS, "type_id": 0}}
FAILED = "the tokenizer failed: "  # what follows is the package's reason


def split(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def steps(*parts: dict[str, object]) -> dict[str, object]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*parts, BYTE_LEVEL]}}


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    parsed = json.loads(path.read_text())
    change(parsed)
    path.write_text(json.dumps(parsed))


BAD_TEXTS = [  # not the file, but this
    ("{", "not JSON"),
    ("{}", "model: None, expected BPE"),
    ("[1]", "expected an object"),
    ('{"vocab": {}, "vocab": {}}', "'vocab' stands twice"),
]
CORRUPT: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda t: t.update(model={"type": "WordLevel", "vocab": {}, "unk_token": "?"}), "'WordLevel', expected BPE"),
    (lambda t: t["model"].update(dropout=0.1), "model.dropout: 0.1"),
    (lambda t: t["model"].update(merges=[["zz", "y"]]), FAILED),
    (lambda t: t["model"].update(vocab=[]), FAILED),
    (lambda t: t.update(decoder=None), "decoder: None, expected ByteLevel"),
    (lambda t: t.update(decoder={"type": "WordPiece"}), "decoder: 'WordPiece', expected ByteLevel"),
    (lambda t: t.update(pre_tokenizer={"type": "Nonsense"}), "pre_tokenizer: {'type': 'Nonsense'}, expected By"),
    (lambda t: t.update(pre_tokenizer=None), "pre_tokenizer: None, expected ByteLevel"),
    (lambda t: t["pre_tokenizer"].update(use_regex=7), FAILED),
    (lambda t: t["post_processor"]["special_tokens"][BOS].update(ids=[999]), "id 999, expected"),
    (lambda t: t["model"]["vocab"].update(zz=300), "id 300, expected ids below vocab_size=300"),
    (lambda t: t["model"]["vocab"].update(zz=-1), FAILED),
    (lambda t: t["model"].update(end_of_word_suffix="x"), "model.end_of_word_suffix: 'x', expected null or an"),
    # What would make endless texts, or tables
    (lambda t: t["model"]["vocab"].update({"a" * 1025: 299}), "model.vocab: an entry of 1025 characters, expected"),
    (lambda t: t["added_tokens"].append({"content": "a" * 1025}), "added_tokens: an entry of 1025 characters"),
    (lambda t: t["added_tokens"].extend([{"content": "a" * 1024}] * 1024), "at most 1048576 of all entries together"),
    (lambda t: t.update(normalizer={"type": "Prepend", "prepend": "x"}), "'Prepend'}, expected null or NFC"),
    (lambda t: t.update(normalizer={"type": "Sequence", "normalizers": [LONGER] * 3}), "normalizer: {"),
    (lambda t: t.update(steps(split("a" * 2048))), "a pattern of 2061 characters"),
    (lambda t: t.update(steps(*[split("a")] * 8)), "9 parts, expected at most 8"),
    (lambda t: t.update(steps(*[BYTE_LEVEL] * 3)), "pre_tokenizer: {"),
    (lambda t: t.update(post_processor={"type": "RobertaProcessing"}), "expected ByteLevel, or TemplateProcess"),
    (lambda t: t["post_processor"].update(single=[BOS_PIECE] * 9 + [TEXT]), "post_processor: {"),
    (lambda t: t["post_processor"].update(single=[TEXT] * 2), "post_processor: {"),
    (lambda t: t["post_processor"]["special_tokens"][BOS].update(ids=[1] * 9, tokens=["x"] * 9), "post_processor: {"),
]


@pytest.mark.parametrize(("corrupt", "fragment"), [*BAD_TEXTS, *CORRUPT])
def test_a_corrupt_tokenizer_is_refused_by_the_name_of_its_file(tmp_path: Path, corrupt: Any, fragment: str) -> None:
    path = write_tokenizer(tmp_path)
    path.write_text(corrupt) if isinstance(corrupt, str) else edited(path, corrupt)
    with pytest.raises(TokenizerError, match=rf"^{path}: .*{re.escape(fragment)}"):
        load_tokenizer(tmp_path, CONFIG)


@pytest.mark.slow
def test_a_pattern_that_backtracks_without_end_is_an_error_of_the_file(tmp_path: Path) -> None:
    edited(write_tokenizer(tmp_path), lambda t: t.update(steps(split(r"(\S+)+b"))))
    with pytest.raises(TokenizerError, match=f"tokenizer.json: {FAILED}"):
        load_tokenizer(tmp_path, CONFIG).encode("\u00e9" * 1000 + "a cb")


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    backend = byte_level_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(path))
    assert load_tokenizer(tmp_path, CONFIG).encode("abcdef") == [1, *ids_of("abcdef")]


def test_a_normalizer_that_composes_and_several_splits_are_allowed(tmp_path: Path) -> None:
    nfc = {"normalizer": {"type": "NFC"}}
    edited(write_tokenizer(tmp_path), lambda t: t.update(nfc | steps(split(r"\d"), split(" +"))))
    assert load_tokenizer(tmp_path, CONFIG).encode("e\u0301") == [1, *ids_of("\u00e9")]


WITHOUT_THE_PACKAGE = """
import sys
sys.modules["tokenizers"] = None
import lfm2np
model = lfm2np.load()
assert model.prompt_ids([1, 2]) == [1, 2]
try:
    model.prompt_ids("a")
except lfm2np.errors.TokenizerError as problem:
    print(problem)
"""


@pytest.mark.slow
def test_without_the_package_a_checkpoint_loads_and_a_text_is_refused() -> None:
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE]
    child = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-500:]
    assert "tokenizer.json: needs the package tokenizers: " in child.stdout and child.stdout.count("\n") == 1


class PanicException(BaseException):
    """Looks like what pyo3 raises when Rust panics."""


def test_a_panic_becomes_our_error_and_an_interrupt_stays_one() -> None:
    def fail(problem: BaseException) -> None:
        raise problem

    with pytest.raises(TokenizerError, match=r"t\.json: the tokenizer failed: index out of bounds"):
        guarded(lambda: fail(PanicException("index out of bounds")), "t.json")
    with pytest.raises(KeyboardInterrupt):
        guarded(lambda: fail(KeyboardInterrupt()), "t.json")


@pytest.mark.slow
@given(
    edits=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 127)), max_size=4),
    keep=st.none() | st.integers(0, 2**13),
)
def test_a_damaged_tokenizer_loads_or_raises_our_error(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], keep: int | None
) -> None:
    directory = tmp_path_factory.mktemp("tokenizer")
    path = write_tokenizer(directory)
    content = bytearray(json.dumps(json.loads(path.read_text())).encode())
    for position, byte in edits:
        content[position % len(content)] = byte
    path.write_bytes(content[:keep])
    try:
        loaded = load_tokenizer(directory, CONFIG)
        ids = loaded.encode("hello, wörld 🙂")
        stream = loaded.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == loaded.decode(ids)
    except Lfm2npError as error:
        assert str(directory) in str(error) or isinstance(error, RequestError)
