"""Tokens of which any row is a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lfm2np
from lfm2np.suite.fuzz.draw_traces import CONTROL, LARGEST, alphabet_of, is_plain, row_text

MODEL = lfm2np.load()
TOKENIZER = MODEL.tokenizer
ALPHABET = alphabet_of(TOKENIZER, MODEL.config.vocab_size)


@given(st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=60))
def test_any_row_is_a_text_with_these_very_tokens(row: list[int]) -> None:
    text = row_text(TOKENIZER, row)
    assert text is not None and text.isprintable()
    assert TOKENIZER.encode_more(text) == row
    assert TOKENIZER.encode(text) == [TOKENIZER.bos_token_id, *row]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_is_the_same_for_the_same_seed_each_token_once_and_none_special(seed: int) -> None:
    alphabet = alphabet_of(TOKENIZER, MODEL.config.vocab_size, seed)
    assert alphabet == alphabet_of(TOKENIZER, MODEL.config.vocab_size, seed)
    assert len(set(alphabet)) == len(alphabet) and 8 <= len(alphabet) <= LARGEST
    assert all(TOKENIZER.token_bytes(token).decode().isprintable() for token in alphabet)
    assert not set(alphabet) & {0, *MODEL.config.eos_token_ids, TOKENIZER.bos_token_id}


def test_specials_pieces_of_characters_and_controls_are_not_plain() -> None:
    tokens = {TOKENIZER.token_bytes(token): token for token in range(MODEL.config.vocab_size)}
    piece = next(token for text, token in tokens.items() if text and text[0] >= 0x80)
    asked = (1, 7, tokens[b"\n"], piece, tokens[b"a"])
    assert [is_plain(TOKENIZER, token) for token in asked] == [False] * 4 + [True]


def test_without_a_tokenizer_it_is_any_tokens_but_the_first_few() -> None:
    alphabet = alphabet_of(None, 300)
    assert len(alphabet) == LARGEST and len(set(alphabet)) == LARGEST
    assert all(CONTROL <= token < 300 for token in alphabet)
    assert alphabet_of(None, 9) == (8,)
    assert alphabet_of(None, 2) == (1,)
