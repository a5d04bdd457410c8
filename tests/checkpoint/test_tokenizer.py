"""Text to ids and back; a stream never cuts a character and never differs from decoding at once."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


@pytest.mark.parametrize("post_processor", [True, False])
@pytest.mark.parametrize("length", [LARGE_TEXT - 1, LARGE_TEXT])
def test_a_large_text_has_the_ids_of_any_other(post_processor: bool, length: int) -> None:
    """It goes through another call of the library."""
    text = (f"hello {SPECIALS[2]} \u2603  {BOS}" * length)[:length]
    subject, backend = tokenizer(post_processor, context=4096), byte_level_tokenizer(post_processor)
    assert subject.encode_more(text) == backend.encode(text, add_special_tokens=False).ids
    assert subject.encode(text) == [1, *subject.encode_more(text)]


def test_other_threads_go_on_while_a_large_text_is_encoded() -> None:
    subject, turns = tokenizer(context=8192), 0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(subject.encode, "hello, world. " * (subject.most_characters // 14))
        while not encoding.done():
            turns += 1
            time.sleep(0)
    assert encoding.result()
    assert turns > 100, "the library holds the lock of the interpreter"


def test_a_bos_that_the_text_repeats_is_kept_but_none_is_added() -> None:
    assert tokenizer().encode(BOS + BOS) == [1, 1]
    assert tokenizer().encode(f"a{BOS}") == [1, *ids_of("a"), 1]


def test_a_model_without_bos_gets_what_the_post_processor_gives() -> None:
    assert tokenizer(False, None).encode("a") == ids_of("a")
    assert tokenizer(True, None).encode("a") == [1, *ids_of("a")]


def test_merges_apply_and_special_text_is_one_token() -> None:
    assert len(tokenizer().encode("hello")) == 1 + 3
    assert tokenizer().encode("<|im_end|>") == [1, 4]


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_a_lone_surrogate_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=rf"text: lone surrogate at position {len(text) - 1}"):
        tokenizer().encode(text)
    with pytest.raises(RequestError, match=r"messages\[0\]\.content: .*valid Unicode"):
        tokenizer().encode_chat([{"role": "user", "content": text}])


def test_text_that_is_not_a_string_is_refused() -> None:
    with pytest.raises(RequestError, match="text: 3, expected a string"):
        tokenizer().encode(3)  # type: ignore[arg-type]


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


def test_a_special_token_inside_a_character_does_not_cut_it() -> None:
    first, second = ids_of("é")
    assert "".join(streamed([first, 4, second])) == tokenizer().decode([first, 4, second]) == "é"


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


def edited(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        parsed = json.loads(text)
        change(parsed)
        return json.dumps(parsed)

    return edit


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(parts: list[dict[str, object]]) -> dict[str, object]:
    return {"type": "Sequence", "pretokenizers": parts}


FAILED = "the tokenizer failed: "  # what follows is the package's reason


CORRUPT = [
    (lambda text: "", "not JSON"),
    (lambda text: "{}", "model: None, expected BPE"),
    (lambda text: "[1]", "expected an object"),
    (lambda text: text[: len(text) // 2], "not JSON"),
    (lambda text: text.replace('"vocab"', '"vocab": {}, "vocab"', 1), "'vocab' stands twice"),
    (
        edited(lambda t: t.update(model={"type": "WordLevel", "vocab": {}, "unk_token": "?"})),
        "'WordLevel', expected BPE",
    ),
    (edited(lambda t: t["model"].update(dropout=0.1)), "model.dropout: 0.1"),
    (edited(lambda t: t["model"].update(merges=[["zz", "y"]])), FAILED),
    (edited(lambda t: t["model"].update(vocab=[])), FAILED),
    (edited(lambda t: t.update(decoder=None)), "decoder: None, expected ByteLevel"),
    (edited(lambda t: t.update(decoder={"type": "WordPiece"})), "decoder: 'WordPiece', expected ByteLevel"),
    (
        edited(lambda t: t.update(pre_tokenizer={"type": "Nonsense"})),
        "pre_tokenizer: {'type': 'Nonsense'}, expected By",
    ),
    (edited(lambda t: t.update(pre_tokenizer=None)), "pre_tokenizer: None, expected ByteLevel"),
    (edited(lambda t: t["pre_tokenizer"].update(use_regex=7)), FAILED),
    (edited(lambda t: t["post_processor"]["special_tokens"]["<|startoftext|>"].update(ids=[999])), "id 999, expected"),
    (edited(lambda t: t["model"]["vocab"].update(zz=300)), "id 300, expected ids below vocab_size=300"),
    (edited(lambda t: t["model"]["vocab"].update(zz=-1)), FAILED),
    (edited(lambda t: t["model"].update(end_of_word_suffix="x")), "model.end_of_word_suffix: 'x', expected null or an"),
    (
        edited(lambda t: t["model"]["vocab"].update({"a" * 1025: 299})),
        "model.vocab: an entry of 1025 characters, expected",
    ),
    (edited(lambda t: t["added_tokens"].append({"content": "a" * 1025})), "added_tokens: an entry of 1025 characters"),
    (
        edited(lambda t: t["added_tokens"].extend([{"content": "a" * 1024}] * 1024)),
        " characters, expected at most 1048576 of all entries together",
    ),
    (edited(lambda t: t.update(normalizer={"type": "Prepend", "prepend": "x"})), "'Prepend'}, expected null or NFC"),
    (
        edited(lambda t: t.update(pre_tokenizer=sequence([split("a" * 2048), BYTE_LEVEL]))),
        "a pattern of 2061 characters",
    ),
    (
        edited(lambda t: t.update(pre_tokenizer=sequence([split("a")] * 8 + [BYTE_LEVEL]))),
        "9 parts, expected at most 8",
    ),
    (
        edited(lambda t: t.update(post_processor={"type": "RobertaProcessing"})),
        "expected ByteLevel, or TemplateProcess",
    ),
]


@pytest.mark.parametrize(("corrupt", "fragment"), CORRUPT)
def test_a_corrupt_tokenizer_is_refused_by_the_name_of_its_file(
    tmp_path: Path, corrupt: Callable[[str], str], fragment: str
) -> None:
    path = write_tokenizer(tmp_path)
    path.write_text(corrupt(path.read_text()))
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path, CONFIG)
    assert str(caught.value).startswith(f"{path}: ")
    assert fragment in str(caught.value)


def test_a_missing_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: does not exist"):
        load_tokenizer(tmp_path, CONFIG)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    backend = byte_level_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(path))
    assert load_tokenizer(tmp_path, CONFIG).encode("abcdef") == [1, *ids_of("abcdef")]


LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BOS_PIECE = {"SpecialToken": {"id": BOS, "type_id": 0}}
PADDING = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
BOMBS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a text that grows": (
        lambda t: t.update(normalizer={"type": "Sequence", "normalizers": [LONGER] * 3}),
        "normalizer: {",
    ),
    "an added token that grows": (
        lambda t: (
            t.update(normalizer={"type": "Sequence", "normalizers": [LONGER] * 3}),
            t["added_tokens"].append({"id": 299, "content": "a", **FLAGS}),
        ),
        "normalizer: {",
    ),
    "letters of letters": (
        lambda t: t.update(pre_tokenizer=sequence([BYTE_LEVEL] * 30)),
        "pre_tokenizer: {",
    ),
    "many times many BOS": (
        lambda t: (
            t["post_processor"].update(single=[BOS_PIECE] * 6000 + [TEXT]),
            t["post_processor"]["special_tokens"][BOS].update(ids=[1] * 20000, tokens=["x"] * 20000),
        ),
        "post_processor: {",
    ),
    "a text many times": (lambda t: t["post_processor"].update(single=[TEXT] * 20000), "post_processor: {"),
    "a pattern that backtracks": (lambda t: t.update(pre_tokenizer=sequence([split("(\\S+)+b"), BYTE_LEVEL])), FAILED),
    "padding": (lambda t: t.update(padding=PADDING), "2005 ids"),
}
IN_A_CHILD = """
import contextlib, json, sys
from pathlib import Path
with contextlib.suppress(ImportError, ValueError, OSError):
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
from builders import tiny_config
from lfm2np.checkpoint.text.tokenizer import load_tokenizer
from lfm2np.errors import TokenizerError
for directory in sys.argv[1:]:
    try:
        tokenizer = load_tokenizer(Path(directory), tiny_config())
        line = f"{len(tokenizer.encode('\u00e9' * 1000 + 'a cb'))} ids"
    except TokenizerError as problem:
        line = str(problem)
    print(json.dumps(line), flush=True)
"""


def test_a_small_file_takes_no_endless_memory(tmp_path: Path) -> None:
    """In a process with 2 GiB, which the library ends where it gets no more."""
    directories = [tmp_path / str(number) for number in range(len(BOMBS))]
    for directory, (change, _) in zip(directories, BOMBS.values(), strict=True):
        directory.mkdir()
        path = write_tokenizer(directory)
        path.write_text(edited(change)(path.read_text()))
    command = [sys.executable, "-c", IN_A_CHILD, *map(str, directories)]
    child = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert child.returncode == 0, (child.stdout[-300:], child.stderr[-300:])
    for (bomb, (_, fragment)), line in zip(BOMBS.items(), child.stdout.splitlines(), strict=True):
        assert fragment in json.loads(line), bomb


def test_a_normalizer_that_composes_and_several_splits_are_allowed(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    steps = sequence([split(r"\d"), split(" +"), BYTE_LEVEL])
    path.write_text(edited(lambda t: t.update(normalizer={"type": "NFC"}, pre_tokenizer=steps))(path.read_text()))
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
