"""The plain tokenizer gives the ids and texts of the package `tokenizers`, or refuses the file; `-s` shows counts."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
import subprocess
import sys
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import pytest
from builders import byte_level_tokenizer, tiny_config
from hypothesis import event, example, given, reject
from hypothesis import strategies as st
from numpy.typing import NDArray
from quantise import LFM2_IN_OTHER_WORDS
from safetensors import safe_open
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from vocabularies import ODD, PATTERNS, config_of, generated_texts, keys_of, write_directory, write_file
from vocabulary_keys import FIXTURES, LFM2_SPLIT, TRAINED, trained_keys, write_gguf

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.files import read_tokenizer
from lfm2np.checkpoint.text.plain_tokenizer import CACHED_LENGTH, GPT2, LETTER_OF_BYTE, PlainTokenizer
from lfm2np.checkpoint.text.split_pattern import MAX_TRIES, PatternError, compiled, is_space, is_word, of_category
from lfm2np.checkpoint.text.tokenizer import Backend, PackageTokenizer, backend_of, load_tokenizer
from lfm2np.errors import TokenizerError

TOP = FIXTURES.parent
FIXTURE_SPLIT = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
GPT4O_SPLIT = "|".join(  # as the tokenizers of larger vocabularies have it
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SPLITS = {
    "fixture": FIXTURE_SPLIT,
    "lfm2": LFM2_SPLIT,
    "lfm3": LFM2_IN_OTHER_WORDS,
    "gpt-2": GPT2,
    "gpt-4o": GPT4O_SPLIT,
    "possessive": r"[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{2,}| ?+[^\s\p{L}\p{N}]++[\r\n]*+|\s++",
    "lazy": r"\p{L}+?\d??|\S{2}|\s+?(?=\S)|[a-c\-\]x-z]+|\P{L}\D?",
    "few": r"(?i:[sk]|dr)+|\.|-|\t",
}


def both(raw: dict[str, Any]) -> tuple[PackageTokenizer, PlainTokenizer]:
    return PackageTokenizer(json.dumps(raw).encode(), "tokenizer.json"), PlainTokenizer(raw, "tokenizer.json")


def require_same(backends: tuple[Backend, Backend], text: str) -> int:
    """The number of tokens."""
    package, plain = backends
    ids = package.encode(text, add_special_tokens=True)
    assert plain.encode(text, add_special_tokens=True) == ids
    assert plain.encode(text, add_special_tokens=False) == package.encode(text, add_special_tokens=False)
    assert plain.decode(ids) == package.decode(ids)
    return len(ids)


def require_same_entries(backends: tuple[Backend, Backend], vocab_size: int) -> None:
    package, plain = backends
    assert plain.vocabulary() == package.vocabulary()
    assert plain.special_texts() == package.special_texts()
    for token_id in range(vocab_size):
        assert plain.entry(token_id) == package.entry(token_id)
        assert plain.decode([token_id]) == package.decode([token_id])


@functools.cache
def shipped_texts() -> tuple[str, ...]:
    """Each corpus, the prompts of the goldens, odd texts, and every fifth page."""
    examples = [example for seed in (0, 2) for example in itertools.islice(corpus.examples(seed, seed == 2), 80)]
    texts = [*ODD, *("".join(form(example)) for example in examples for form in (corpus.as_text, corpus.as_chat))]
    for name in ("trained", "moe", "lfm3"):
        with safe_open(FIXTURES / "goldens" / f"{name}.safetensors", "numpy") as golden:
            texts += json.loads(golden.metadata()["texts"])
    pages = [path for path in sorted((TOP / "docs").rglob("*.md")) if "_build" not in path.parts]
    return (*texts, *(path.read_text(encoding="utf-8") for path in pages[::5]))


@functools.cache
def sources() -> tuple[str, ...]:
    folders = (TOP / "lfm2np", TOP / "scheduler", TOP / "tests", TOP / "fixtures", TOP / "docs")
    paths = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".txt", ".md")]
    paths = [path for path in paths if "_build" not in path.parts]
    return tuple(path.read_text(encoding="utf-8") for path in paths)


def raw_of(directory: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    return raw


def with_pattern(raw: dict[str, Any], pattern: str) -> dict[str, Any]:
    changed = copy.deepcopy(raw)
    changed["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    return changed


FIXTURE_FILES = [path.parent for path in sorted(FIXTURES.rglob("tokenizer.json"))]


# --- the same ids and texts


def compare(texts: Iterable[str], raws: Iterable[dict[str, Any]], patterns: Iterable[str]) -> Counter[str]:
    compared: Counter[str] = Counter()
    for raw, pattern in itertools.product(raws, patterns):
        backends = both(with_pattern(raw, pattern))
        for text in texts:
            compared.update(texts=1, tokens=require_same(backends, text), characters=len(text))
    return compared


def fixture_raws() -> list[dict[str, Any]]:
    """One of each, as several fixtures share a tokenizer.json."""
    assert len(FIXTURE_FILES) >= 4
    return [*{json.dumps(raw_of(directory)): raw_of(directory) for directory in FIXTURE_FILES}.values()]


def test_shipped_texts_have_the_same_ids_with_each_fixture_s_tokenizer_and_each_pattern() -> None:
    for raw in fixture_raws():
        require_same_entries(both(raw), load_config(TRAINED).vocab_size)
    patterns = (FIXTURE_SPLIT, LFM2_SPLIT, LFM2_IN_OTHER_WORDS)
    compared = compare(shipped_texts(), fixture_raws()[:1], patterns)
    for raw, pattern in zip(fixture_raws()[1:], itertools.cycle(patterns), strict=False):
        compared += compare(shipped_texts(), [raw], [pattern])
    print(f"\nshipped texts: {dict(compared)}, none different")


@pytest.mark.slow
def test_each_source_file_has_the_same_ids() -> None:
    compared = compare(sources(), fixture_raws(), (FIXTURE_SPLIT, LFM2_SPLIT, LFM2_IN_OTHER_WORDS))
    print(f"\nsource files: {dict(compared)}, none different")


def test_a_gguf_of_the_fixture_has_the_same_ids(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", trained_keys())
    package, plain = (read_tokenizer(path, load_config(TRAINED), plain=is_plain) for is_plain in (False, True))
    for text in shipped_texts():
        if len(text) <= plain.most_characters:
            assert plain.encode(text) == package.encode(text)


@functools.cache
def of_gguf(pattern: str) -> tuple[Any, Any]:
    """The tables of a GGUF file, through the package and without it."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_directory(Path(folder) / "hf", pattern)
        (Path(folder) / "gguf").mkdir()
        path = write_file(Path(folder) / "gguf" / "x.gguf", keys_of(directory, pattern))
        package, plain = (read_tokenizer(path, config_of(), plain=is_plain) for is_plain in (False, True))
        return package, plain


def require_same_with_gguf(pattern: str, text: str) -> int:
    package, plain = of_gguf(pattern)
    ids: list[int] = package.encode(text)
    assert plain.encode(text) == ids and plain.encode_more(text) == package.encode_more(text)
    assert plain.decode(ids) == package.decode(ids)
    streams = [tokenizer.stream() for tokenizer in (package, plain)]
    pieces = [[*map(stream.push, ids), stream.finish()] for stream in streams]
    assert pieces[0] == pieces[1] and "".join(pieces[1]) == plain.decode(ids)
    assert [plain.token_bytes(token_id) for token_id in ids] == [package.token_bytes(token_id) for token_id in ids]
    return len(ids)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_gguf_s_tables_are_the_same_tokenizer_without_the_package(pattern: str) -> None:
    texts = [*ODD, *generated_texts(400)]
    tokens = sum(require_same_with_gguf(pattern, text) for text in texts)
    print(f"\nGGUF, {pattern}: {len(texts)} texts, {tokens} tokens, none different")
    package, plain = of_gguf(pattern)
    for token_id in range(config_of().vocab_size):
        assert plain.token(token_id) == package.token(token_id)
        assert plain.token_bytes(token_id) == package.token_bytes(token_id)
    assert plain.most_characters == package.most_characters
    messages = [{"role": "user", "content": "12 + 34\n\n it's?"}]
    assert plain.encode_chat(messages) == package.encode_chat(messages)


# Blanks of all kinds, runs of digits, contractions in all cases, marks, letters of one, two and four bytes in UTF-8.
WORDS = (
    *("'s", "'S", "'\u017f", "'LL", "'ve", "'Re", "'d", "'m", "'t", "'", "\u212a"),
    *(" ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\n\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85"),
    *("\u00a0", "\u2003", "\u2028", "\u3000", "\u200b", "\u200c", "\u200d", "\ufeff", "\x00", "\x7f"),
    *("1", "12", "345", "6789", "\u0663\u0664", "\u00bd", "\u2167", "\u2460", "\U0001d7ce"),
    *("e\u0301", "\u0301", "\u0323\u0301", "\u212b", "\u1e9b\u0323", "\u0939\u093f", "\uac00\u11a8", "\u1100\u1161"),
    *("the", "The", "THE", "na\u00efve", "\u4e2d\u6587", "\u0e44\u0e17", "\u01c5", "\u02b0", "\u24d0", "_", "a_b"),
    *("!", "...", "-->", "#", "/", "]", "\\", "^", "\U0001f642", "\U0001f642\u200d\U0001f680", "\U0001f1e9\U0001f1ea"),
    *("<|pad|>", "<|im_start|>", "<|im_end|>", "<|im_start", "|>", "<tool>", "n\u00e9e \u2192 call", "[PAD7]"),
)
ASSIGNED = st.characters(exclude_categories=["Cs", "Cn"])
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(ASSIGNED, max_size=4), max_size=25).map("".join)


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=TEXTS)
def test_any_text_has_the_same_ids_with_a_gguf_s_tables(pattern: str, text: str) -> None:
    require_same_with_gguf(pattern, text)


@functools.cache
def fixture_backends(name: str) -> tuple[PackageTokenizer, PlainTokenizer]:
    return both(with_pattern(raw_of(TRAINED), SPLITS[name]))


@pytest.mark.parametrize("name", SPLITS)
@given(text=TEXTS)
@example(text="a  b \n \r c'\u017f\u212a'LL")
def test_any_text_has_the_same_ids_and_pieces_under_each_pattern(name: str, text: str) -> None:
    require_same(fixture_backends(name), text)
    split = pre_tokenizers.Split(Regex(SPLITS[name]), behavior="removed", invert=True)
    assert [match[0] for match in compiled(SPLITS[name]).finditer(text)] == [
        piece for piece, _ in split.pre_tokenize_str(text)
    ]


@given(text=TEXTS)
@example(text="it's I've we'll they're you'd I'm can't 'S 'VE")
def test_use_regex_means_the_pattern_of_gpt_2(text: str) -> None:
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True).pre_tokenize_str(text)
    letters = ["".join(LETTER_OF_BYTE[byte] for byte in match[0].encode()) for match in compiled(GPT2).finditer(text)]
    assert letters == [piece for piece, _ in pieces]


@pytest.mark.parametrize("ignore_merges", [False, True, None])
def test_a_whole_piece_that_no_merges_lead_to_is_an_id_only_if_merges_are_ignored(ignore_merges: bool | None) -> None:
    raw = json.loads(byte_level_tokenizer().to_str())
    raw["model"]["ignore_merges"] = ignore_merges
    raw["model"]["vocab"]["hello"] = len(raw["model"]["vocab"])
    assert require_same(both(raw), "hello hello") == (1 + 1 + 4 if ignore_merges else 1 + 3 + 4)


def test_merges_as_lines_may_begin_with_a_version() -> None:
    raw = json.loads(byte_level_tokenizer().to_str())
    raw["model"]["merges"] = ["#version: 0.2", *map(" ".join, raw["model"]["merges"])]
    assert require_same(both(raw), "hello") == 1 + 3


@given(ids=st.lists(st.integers(0, 699), max_size=60))
def test_any_ids_have_the_same_text_and_stream(ids: list[int]) -> None:
    package, plain = of_gguf("lfm2")
    streams = [tokenizer.stream() for tokenizer in (package, plain)]
    assert [*map(streams[0].push, ids), streams[0].finish()] == [*map(streams[1].push, ids), streams[1].finish()]
    assert plain.decode(ids) == package.decode(ids)


# --- any tokenizer


@functools.cache
def newer_than_their_nfc() -> frozenset[str]:
    """Characters that Python's NFC orders or joins, and that of the package does not know yet, or the other way."""
    letters = known_letters().replace("\n", "")
    newer = set("\U00011930\U00011935\U00011938")  # Dives Akuru, of Unicode 13: two letters that are one
    for around in ("{}", "a{}\u0301\u0323", "a\u0323{}"):
        text = "\n".join(map(around.format, letters))
        ours, theirs = unicodedata.normalize("NFC", text), normalizers.NFC().normalize_str(text)
        forms = zip(letters, ours.split("\n"), theirs.split("\n"), strict=True)
        newer |= {letter for letter, our_form, their_form in forms if our_form != their_form}
    return frozenset(newer)


FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def drawn_merges(rng: random.Random, text: str, count: int) -> tuple[list[str], list[list[str]]]:
    """Entries, letters of bytes first, and merges that occur in the text; not always in an order that reaches all."""
    symbols = [LETTER_OF_BYTE[byte] for byte in text.encode()]
    entries, merges = list(LETTER_OF_BYTE.values()), []
    while len(merges) < count and len(symbols) > 1:
        place = rng.randrange(len(symbols) - 1)
        first, second = symbols[place : place + 2]
        if [first, second] not in merges:
            merges.append([first, second])
        if first + second not in entries:
            entries.append(first + second)
        if rng.random() < 0.8:
            symbols[place : place + 2] = [first + second]
    if rng.random() < 0.3:
        rng.shuffle(merges)
    return entries, merges


def drawn_raw(rng: random.Random, text: str) -> dict[str, Any]:
    """A tokenizer.json of what is accepted, whose merges and added tokens occur in the text."""
    entries, merges = drawn_merges(rng, text, rng.choice((0, 3, 20, 60)))
    begins = [rng.randrange(len(text) + 1) for _ in range(4)]
    inside = {text[begin : begin + rng.randrange(1, 6)] for begin in begins}
    contents = rng.sample([*sorted(inside), *WORDS, "a", "the ", " <|x|>", "\u00e9"], rng.randrange(6))
    contents = [content for content in dict.fromkeys(contents) if content and content not in entries]
    in_vocabulary = [content for content in contents if rng.random() < 0.5]
    if rng.random() < 0.1 and not merges:
        entries.remove("a")  # a letter that no entry has
    names = [*entries, *in_vocabulary]
    rng.shuffle(names)
    is_legacy = rng.random() < 0.3
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": rng.choice([*SPLITS.values()])}, "behavior": "Isolated", "invert": False}
        for _ in range(rng.choice((0, 1, 1, 1, 2)))
    ]
    if rng.random() < 0.2:
        pattern = {"String": rng.choice(("the", " ", ".", "e\u0301"))}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": rng.random() < 0.5})
    flags = {"add_prefix_space": 0.2, "trim_offsets": 0.5, "use_regex": 0.3}
    byte_level = {"type": "ByteLevel", **{flag: rng.random() < chance for flag, chance in flags.items()}}
    sequence = {"type": "Sequence", "pretokenizers": [*steps, byte_level]}
    special: dict[str, Any] = {
        "<b>": {"id": "<b>", "ids": [1, 2], "tokens": ["x", "y"]},
        "<e>": {"id": "<e>", "ids": [3], "tokens": ["z"]},
    }
    pieces = [[{"SpecialToken": {"id": name, "type_id": 0}}] * rng.randrange(3) for name in special]
    single = [*pieces[0], {"Sequence": {"id": "A", "type_id": 0}}, *pieces[1]]
    template = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}
    processors = rng.choice(([], [byte_level], [template], [template, byte_level], [byte_level, template]))
    nfc = {"type": "NFC"}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 500 + index, "content": content, **{flag: rng.random() < 0.4 for flag in FLAGS}}
            for index, content in enumerate(contents)
        ],
        "normalizer": rng.choice((None, nfc, {"type": "Sequence", "normalizers": [nfc, nfc]})),
        "pre_tokenizer": sequence if steps or rng.random() < 0.5 else byte_level,
        "post_processor": {"type": "Sequence", "processors": processors} if processors != [template] else template,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": rng.random() < 0.3,
            "byte_fallback": False,
            "vocab": {name: index for index, name in enumerate(names)},
            "merges": [" ".join(pair) for pair in merges] if is_legacy else merges,
        },
    }


@given(seed=st.integers(0, 2**32), texts=st.lists(TEXTS.filter(bool), min_size=1, max_size=4))
def test_any_accepted_tokenizer_gives_the_same_ids(seed: int, texts: list[str]) -> None:
    rng = random.Random(seed)
    raw = drawn_raw(rng, "".join(texts))
    if raw["normalizer"] is not None and newer_than_their_nfc() & set("".join(texts)):
        reject()
    try:
        backends = both(raw)
    except TokenizerError as problem:
        assert "after NFC" in str(problem) or "another token's rstrip" in str(problem)
        reject()
    event(f"{len(raw['model']['merges'])} merges")
    require_same_entries(backends, len(raw["model"]["vocab"]) + 6)
    rng.shuffle(texts)
    for text in [*texts, "".join(texts), " ".join(texts), ""]:
        require_same(backends, text)


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}], ids=["none", "nfc"])
@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=4)))
def test_an_added_token_is_cut_out_by_each_of_its_flags(flags: tuple[bool, ...], normalizer: object) -> None:
    """Beside two others that begin as it does, of which one is a special token and the other is not."""
    raw = json.loads(byte_level_tokenizer().to_str())
    first, plain_flags = dict(zip(FLAGS, flags, strict=False)), dict.fromkeys(FLAGS, False)
    tokens = [("<a>", {**first, "special": True}), ("<a>b", plain_flags), ("<a>e\u0301", {**first, "special": False})]
    added = raw["added_tokens"]
    added += [{"id": 290, "content": content, **token_flags} for content, token_flags in tokens]
    raw["normalizer"] = normalizer
    backends = both(raw)
    require_same_entries(backends, 300)
    parts = ("<a>", "<a>b", "<a>\u00e9", "<a>e\u0301", " ", "\u2003\n", "_", "-\u0301")
    for text in map("".join, itertools.product(parts, repeat=3)):
        require_same(backends, text)


@pytest.mark.parametrize("length", [CACHED_LENGTH, CACHED_LENGTH + 1, 5000])
def test_a_long_piece_merges_as_a_short_one(length: int) -> None:
    raw = json.loads(byte_level_tokenizer().to_str())
    rng = random.Random(length)
    entries, merges = drawn_merges(rng, "".join(rng.choices("abc", k=300)), 100)
    raw["model"].update(vocab={name: index for index, name in enumerate(entries)}, merges=merges)
    raw["post_processor"] = None
    backends = both(raw)
    assert 0 < require_same(backends, "".join(rng.choices("abc", k=length))) < length


@pytest.mark.parametrize(
    ("letter", "length"),
    [
        *((letter, 50_000 // len(letter.encode())) for letter in ("a", " ", "\n", "1", "\U0001f642")),
        *(pytest.param(letter, 10**6, marks=pytest.mark.slow) for letter in ("a", " ")),
    ],
)
def test_a_million_of_one_character_do_not_take_the_square_of_the_time(letter: str, length: int) -> None:
    """Nothing is timed: it would take hours."""
    raw = with_pattern(raw_of(TRAINED), LFM2_SPLIT)
    symbols = [LETTER_OF_BYTE[byte] for byte in letter.encode()]
    merges = [["".join(symbols[:count]), symbols[count]] for count in range(1, len(symbols))]
    merges += [["".join(symbols) * 2**power] * 2 for power in range(5)]
    vocabulary = raw["model"]["vocab"]
    for first, second in merges:
        vocabulary.setdefault(first + second, len(vocabulary))
    raw["model"]["merges"] = merges
    assert require_same(both(raw), letter * length) > 10


# --- tables of characters


CODES = np.array([code for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000], np.uint32)
LETTERS = CODES.tobytes().decode(f"utf-32-{sys.byteorder[0]}e")


@functools.cache
def known_letters() -> str:
    """Those that Python's version of Unicode has."""
    return "".join(letter for letter in LETTERS if unicodedata.category(letter) != "Cn")


def members(letters: str) -> NDArray[np.bool_]:
    """Of each code point whether it is among these characters."""
    is_member = np.zeros(sys.maxunicode + 1, np.bool_)
    is_member[np.frombuffer(letters.encode("utf-32-le"), "<u4")] = True
    return is_member


def package_class(words: str) -> NDArray[np.bool_]:
    """Of each code point whether the package has it in [words].

    A decoder takes patterns as a Split does, and is ten times as fast on a text of all characters.
    """
    return members(decoders.Replace(Regex(f"[^{words}]+"), "").decode([LETTERS]))


def test_classes_are_the_package_s_for_all_characters_that_both_know() -> None:
    """Another version of Unicode has more letters; what both know has but one category, with one exception."""
    known = members(known_letters())
    both_know = known & ~package_class(r"\p{Cn}")
    exception, different = members("\U0001171e"), np.zeros_like(known)
    for name in (*"LMNPSZC", "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Nd", "Nl", "No", "Cc", "Cf"):
        ours = np.zeros_like(known)
        for first, last in of_category(name):
            ours[first : last + 1] = True
        ours[0xD800:0xE000] = False
        unequal = ours ^ package_class(rf"\p{{{name}}}")
        assert not np.any(unequal & both_know & ~(exception & (name in ("Mn", "Mc")))), name
        different |= unequal & ~exception & (len(name) == 1)
    for words in (r"\P{L}", r"\S", r"\D", r"[^\s\p{L}\p{N}]", r"[\P{N}\s]", r"\p{N}"):
        ours = members("".join(compiled(f"{words}+").findall(LETTERS)))
        assert not np.any((ours ^ package_class(words)) & both_know), words
    assert np.array_equal(members("".join(filter(is_space, LETTERS))), package_class(r"\s"))
    assert not np.any(different & known)  # what is new is unassigned for Python
    print(f"\nclasses, Unicode {unicodedata.unidata_version}: {different.sum()} characters differ, all unassigned")


def test_what_is_beside_a_single_word_is_the_package_s_for_all_characters_that_python_knows() -> None:
    raw = json.loads(byte_level_tokenizer(post_processor=False).to_str())
    number = raw["added_tokens"][0]["id"]
    raw["added_tokens"][0].update(single_word=True, content="<T>")
    raw["model"]["vocab"]["<T>"] = raw["model"]["vocab"].pop("<|pad|>")
    letters = known_letters()
    encodings = Tokenizer.from_str(json.dumps(raw)).encode_batch_fast([f"{letter}<T>" for letter in letters])
    assert [encoding.ids[-1] != number for encoding in encodings] == list(map(is_word, letters))


def test_nfc_differs_only_for_characters_of_unicode_11_and_later() -> None:
    differs = newer_than_their_nfc()
    assert "\u0301" not in differs and "\u07fd" in differs
    assert not set("".join(WORDS)) & differs
    print(f"\nNFC, Unicode {unicodedata.unidata_version}: {len(differs)} characters differ")


# --- what is refused

PATTERNS_REFUSED = {
    r"\w+": "not known here",
    r"\p{Han}+": "expected a general category",
    r"(?:\S+)+b": "not known here",
    r"(\S+)+b": "not known here",
    r"a$": "not known here",
    r"a{2}+": "not known here",
    r"a{3,2}": "the smaller number first",
    r"[a&&b]": "not known here",
    r"[z-a]": "the smaller character first",
    r"[\s-a]": "not known here",
    r"(?i:ss)": "ligature",
    r"(?i:\p{L})": "not known here",
    r"(?i)a": "not known here",
    r"\s*": "an empty text",
    r"a|": "an empty text",
    r"(?!a)": "an empty text",
    "": "at least a character",
    r"\s*\s*b": "behind two endless repeats",
    r"a*b*c*d": "behind two endless repeats",
    r"\s+\S+(?!a)": "behind two endless repeats",
    "a?" * 9 + "a": f"more than {MAX_TRIES} ways",
    "(?i:a|b|c|d)" * 5: f"more than {MAX_TRIES} ways",
    "a\\": "not known here",
    r"[a": "not known here",
    r".": "not known here",
}


@pytest.mark.parametrize("pattern", PATTERNS_REFUSED)
def test_a_pattern_that_is_not_known_is_refused_by_what_it_has(pattern: str) -> None:
    if pattern:
        with pytest.raises(PatternError, match=PATTERNS_REFUSED[pattern]):
            compiled(pattern)
    with pytest.raises(TokenizerError, match=PATTERNS_REFUSED[pattern]) as caught:
        PlainTokenizer(with_pattern(raw_of(TRAINED), pattern), "t.json")
    assert str(caught.value).startswith("t.json: pre_tokenizer.pattern: ")


NOT_DONE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "removed": (
        lambda raw: raw["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
        "pre_tokenizer.behavior: 'Removed', expected 'Isolated'",
    ),
    "an empty text": (
        lambda raw: raw["pre_tokenizer"]["pretokenizers"][0].update(pattern={"String": ""}),
        "pre_tokenizer.pattern: '', expected at least a character",
    ),
    "unknown": (
        lambda raw: (raw["model"].update(unk_token="?"), rename(raw["model"], "x")),
        "model.vocab: \"no 'x'\", expected all letters, beside unk_token or byte_fallback",
    ),
    "fallback": (
        lambda raw: (raw["model"].update(byte_fallback=True), rename(raw["model"], "x")),
        "model.vocab: \"no 'x'\", expected all letters, beside unk_token or byte_fallback",
    ),
    "two entries of an id": (
        lambda raw: raw["model"]["vocab"].update(zz=1),
        "model.vocab['zz']: 1, expected another id than '<|startoftext|>' has",
    ),
    "a token twice": (
        lambda raw: raw["added_tokens"].append(raw["added_tokens"][1]),
        "added_tokens: '<|startoftext|>', expected an id of its own, not 1",
    ),
    "a blank": (
        lambda raw: raw["added_tokens"].append({**raw["added_tokens"][1], "content": " x", "rstrip": True}),
        "added_tokens: ' ', expected no blank first, as another token's rstrip would take it",
    ),
    "two templates": (
        lambda raw: raw.update(post_processor={"type": "Sequence", "processors": [raw["post_processor"]] * 2}),
        "expected at most one TemplateProcessing",
    ),
    "another type": (
        lambda raw: raw["post_processor"].update(sep=["x", 1], cls=["y", 2]),
        "post_processor: 'sep', expected no key but type, single, pair, special_tokens",
    ),
    "a key of none": (lambda raw: raw.update(note=1), "keys: 'note', expected no key but version, truncation,"),
    "no id": (lambda raw: raw["added_tokens"][0].update(id=-1), "added_tokens[0].id: -1, expected an integer from 0"),
    "true": (lambda raw: raw["model"]["vocab"].update(zz=True), "model.vocab['zz']: True, expected a text and its id"),
    "half a character": (
        lambda raw: raw.update(post_processor=None, version="1.0", truncation=None, padding=None, decoder=SURROGATE),
        "a text: '\\ud800', expected valid Unicode, no lone surrogate",
    ),
}
SURROGATE = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "note": "\ud800"}


def rename(model: dict[str, Any], letter: str) -> None:
    """The letter is no entry any more."""
    model["merges"] = [pair for pair in model["merges"] if letter not in "".join(pair)]
    model["vocab"] = {text.replace(letter, "\u2603"): token_id for text, token_id in model["vocab"].items()}


@pytest.mark.parametrize("name", NOT_DONE)
def test_what_is_not_done_here_is_refused_by_file_key_and_value(name: str) -> None:
    change, message = NOT_DONE[name]
    raw = copy.deepcopy(raw_of(TRAINED))
    PlainTokenizer(raw, "t.json")
    change(raw)
    with pytest.raises(TokenizerError) as caught:
        PlainTokenizer(raw, "t.json")
    assert str(caught.value).startswith("t.json: ") and message in str(caught.value)


@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from(
                [
                    *("a", " ", "'", "-", "&", "#", "\u00e9", r"\s", r"\S", r"\d", r"\D", r"\p{L}", r"\P{N}"),
                    *(r"[^\s\p{L}]", r"[a-c]", r"[^a-c\-]", r"[\r\nb]", r"(?i:'s|k)", r"(?i:[sk]|dr)", r"\.", r"\n"),
                    *(r"(?!\S)", r"(?=\s)", r"(?=a)", r"[\P{L}x]", r"\'", r"\<", r"\/", r"\`", r"\~", r"\&", r"\#"),
                ]
            ),
            st.sampled_from(["", "", "", "?", "*", "+", "??", "*?", "+?", "?+", "*+", "++", "{2}", "{1,2}", "{2,}"]),
            st.sampled_from(["", "", "", "|"]),
        ),
        min_size=1,
        max_size=6,
    ),
    text=st.lists(st.sampled_from("aAbBcsSkK\u017f\u212adDrR1 \n'-.&#\u00e9<>/`~"), max_size=30).map("".join),
)
def test_any_pattern_matches_as_it_does_in_the_package_or_is_refused(
    parts: list[tuple[str, str, str]], text: str
) -> None:
    pattern = "".join(map("".join, parts))
    try:
        regex = compiled(pattern)
    except PatternError:
        reject()
    split = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    assert [match[0] for match in regex.finditer(text)] == [piece for piece, _ in split.pre_tokenize_str(text)]


# --- where the package is not installed, and files that are damaged

WITHOUT_THE_PACKAGE = """
import sys
sys.modules["tokenizers"] = None
import lfm2np
tokenizer = lfm2np.load().tokenizer
assert type(tokenizer._backend).__name__ == "PlainTokenizer"
ids = tokenizer.encode(sys.argv[1])
print([ids, tokenizer.encode_chat([{"role": "user", "content": sys.argv[1]}]), tokenizer.decode(ids)])
assert not [name for name in sys.modules if name.startswith("tokenizers.")]
"""


def test_without_the_package_a_checkpoint_loads_and_has_the_same_ids() -> None:
    text = "sort: 3 1 2 -> na\u00efve <|im_end|> \U0001f642"
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE, text], cwd=TOP, capture_output=True, text=True, encoding="utf-8"
    )
    assert child.returncode == 0, child.stderr[-500:]
    tokenizer = load_tokenizer(TRAINED, load_config(TRAINED))
    ids = tokenizer.encode(text)
    chat = tokenizer.encode_chat([{"role": "user", "content": text}])
    assert child.stdout.strip() == str([ids, chat, tokenizer.decode(ids)])


def test_the_package_is_taken_where_it_is_installed_unless_the_plain_one_is_asked_for() -> None:
    config = load_config(TRAINED)
    content = (TRAINED / "tokenizer.json").read_bytes()
    assert isinstance(backend_of(content, config, "x"), PackageTokenizer)
    assert isinstance(backend_of(content, config, "x", plain=True), PlainTokenizer)


LEAVES = (None, True, False, -1, 0, 1, 1.5, 2**32, "", "a", "A", "ByteLevel", "Split", "NFC", "\ud800", "a b")
NAMES = st.sampled_from(["type", "sep", "id", "a", "use_regex", "dropout", "fuse_unk"])
JSON = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)
SMALL = byte_level_tokenizer().to_str()


def places(part: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value can be changed; of the vocabulary the first and the last few."""
    keys = list(part) if isinstance(part, dict) else list(range(len(part))) if isinstance(part, list) else []
    keys = keys[:4] + keys[-4:] if len(keys) > 20 else keys
    return [path, *(place for key in keys for place in places(part[key], (*path, key)))]


@functools.cache
def bases() -> tuple[dict[str, Any], ...]:
    small = json.loads(SMALL)
    split = {"type": "Split", "pattern": {"Regex": LFM2_SPLIT}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    sequences = {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {"type": "Sequence", "processors": [small["post_processor"], byte_level]},
    }
    legacy = {**small["model"], "merges": ["h e", "l l"], "unk_token": None, "dropout": None}
    return small, {**small, **sequences}, {**small, "model": legacy, "truncation": None}


@given(data=st.data())
def test_a_damaged_file_is_refused_if_the_package_refuses_it_and_else_gives_the_same_ids(data: st.DataObject) -> None:
    raw = copy.deepcopy(bases()[data.draw(st.integers(0, len(bases()) - 1))])
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from(places(raw)[1:]))
        part = functools.reduce(lambda inner, key: inner[key], path, raw)
        kind = data.draw(st.sampled_from(["change", "remove", "add", "double"]))
        if kind == "change":
            part[last] = data.draw(JSON)
        elif kind == "remove":
            del part[last]
        elif kind == "double" and isinstance(part, list):
            part.append(copy.deepcopy(part[last]))
        elif isinstance(part, dict):
            part[data.draw(NAMES)] = data.draw(JSON)
    text = "hello <|im_end|> e\u0301 tool \u00e9 \u2192 call  hell"
    outcomes: list[tuple[Any, ...]] = []
    for is_plain in (False, True):
        try:
            backend = backend_of(json.dumps(raw).encode(), tiny_config(), "t.json", plain=is_plain)
            outcomes.append((backend.encode(text, True), backend.encode(text, False), backend.vocabulary()))
        except TokenizerError as problem:
            assert str(problem).startswith("t.json: ")
            outcomes.append(())
    event(f"package {bool(outcomes[0])}, plain {bool(outcomes[1])}")
    assert not outcomes[1] or outcomes[1] == outcomes[0]
