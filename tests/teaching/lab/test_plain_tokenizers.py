"""The stand-in for the package `tokenizers`: the same ids and texts on the fixtures."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from unittest.mock import patch

import corpus
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Regex, pre_tokenizers
from vocabularies import ODD

from lfm2np.checkpoint.files import read_config
from lfm2np.checkpoint.text.tokenizer import LARGE_TEXT, Tokenizer, load_tokenizer
from lfm2np.teaching.lab.static import plain_tokenizers
from lfm2np.teaching.lab.static.browser import FIXTURES
from lfm2np.teaching.lab.static.plain_tokenizers import KINDS, kind

pytestmark = pytest.mark.slow

GOLDENS = FIXTURES["trained"]().parent / "goldens"
# What the fixtures' texts have, special tokens among it, and what the pattern tells apart.
WORDS = st.sampled_from(["sort", ": ", " ->", "\n", "\x1c", "\u2003", "\u00bd", "e\u0301", "<|im_end|>", "<|pad", "|>"])
ASSIGNED = st.characters(exclude_categories=["Cs", "Cn"])  # others may have a kind in the package's tables
TEXTS = st.lists(WORDS | st.text(max_size=4, alphabet=st.characters(max_codepoint=127)) | st.text(ASSIGNED, max_size=4))


@functools.cache
def both(fixture: str) -> tuple[Tokenizer, Tokenizer]:
    """By the package, and by the stand-in under its name."""
    directory = FIXTURES[fixture]()
    package = load_tokenizer(directory, read_config(directory))
    with patch.dict(sys.modules, tokenizers=plain_tokenizers):
        return package, load_tokenizer(directory, read_config(directory))


@functools.cache
def split_of(fixture: str) -> str:
    raw = json.loads((FIXTURES[fixture]() / "tokenizer.json").read_text(encoding="utf-8"))
    pattern: str = raw["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    return pattern


def require_same(fixture: str, text: str) -> None:
    package, plain = both(fixture)
    ids = package.encode(text)
    assert plain.encode(text) == ids
    assert plain.encode_more(text) == package.encode_more(text)
    assert plain.decode(ids) == package.decode(ids)
    pieces = [piece for piece, _ in pre_tokenizers.Split(Regex(split_of(fixture)), "isolated").pre_tokenize_str(text)]
    assert pieces == [text[slice(*match.span())] for match in KINDS.finditer("".join(map(kind, text)))]


@pytest.mark.parametrize("fixture", FIXTURES)
@given(text=TEXTS.map("".join), ids=st.lists(st.integers(0, 511)))
@example(text="<|startoftext|>" * 2 + "a" * LARGE_TEXT, ids=[])
def test_any_text_has_the_same_ids_and_any_ids_the_same_text(fixture: str, text: str, ids: list[int]) -> None:
    require_same(fixture, text)
    package, plain = both(fixture)
    assert plain.decode(ids) == package.decode(ids)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_each_entry_and_the_texts_of_the_fixture_are_the_same(fixture: str) -> None:
    package, plain = both(fixture)
    assert plain.most_characters == package.most_characters
    for token_id in range(package.vocab_size):
        assert plain.token(token_id) == package.token(token_id)
        assert plain.token_bytes(token_id) == package.token_bytes(token_id)
    with safe_open(GOLDENS / f"{fixture}.safetensors", "numpy") as golden:
        texts = [*ODD, *json.loads(golden.metadata()["texts"])]
    for seed, form in itertools.product((0, 2), (corpus.as_text, corpus.as_chat)):
        texts += ["".join(form(each)) for each in itertools.islice(corpus.examples(seed, held_out=seed == 2), 80)]
    for text in texts:
        require_same(fixture, text)
