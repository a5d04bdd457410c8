"""Stop strings, likeliest tokens, sampled neighbours, prompts that confuse a prefix cache, a spread of few pairs."""

from __future__ import annotations

import pytest
from pretend_engine import VOCAB, Pretend

from lfm2np.oracle.engines.records import Answer
from lfm2np.suite.itself.asked import Asking
from lfm2np.suite.itself.pairs import stopped
from lfm2np.suite.itself.questions import Sizes, questions
from lfm2np.suite.itself.relations import RELATIONS, piece_of
from lfm2np.suite.itself.rounding_spread import spread_of

SIZES = Sizes(block=4, chunk=12, slots=4, longest=96, vocab=VOCAB)
BY_NAME = {relation.name: relation for relation in RELATIONS}
WHOLE = Answer((1, 2, 3, 4), text="ab cd ef gh", finish_reason="length")


def cut(ids: tuple[int, ...], text: str | None, reason: str = "stop") -> str | None:
    return stopped(WHOLE, Answer(ids, text=text, finish_reason=reason), "d e", 4).fault


def test_an_answer_ends_where_its_text_first_has_the_stop_string() -> None:
    assert cut((1, 2, 3), "ab c") is None
    assert cut((1, 2), "ab c") is None, "some servers leave out the tokens of the stop string"
    assert cut((1, 2, 3), None) is None
    assert "expected 'ab c'" in str(cut((1, 2, 3, 4), "ab cd ef gh"))
    assert "expected 'ab c'" in str(cut((1, 2, 3), "ab cd"))
    assert "'length' after 3 of 4" in str(cut((1, 2, 3), "ab c", "length"))


def test_after_another_token_the_text_is_another() -> None:
    assert cut((1, 5), "ab zz") is None


def test_only_a_stop_string_that_stays_in_the_text_breaks_its_relation() -> None:
    player = Pretend(1e-6, late_stop=1)
    checked = Asking({"": player}, player.probe(), SIZES, "float32").run()
    assert [held.relation.name for held in checked.broken] == ["stop"]


def test_a_token_that_is_not_the_likeliest_breaks_only_that() -> None:
    player = Pretend(1e-6, second_at=0)
    checked = Asking({"": player}, player.probe(), SIZES, "float32").run([BY_NAME["greedy"], BY_NAME["batch"]])
    assert [held.relation.name for held in checked.broken] == ["greedy"]


def test_a_stop_string_has_no_blanks_at_its_ends_and_no_broken_character() -> None:
    assert piece_of("abc def", at_end=True) == "def" and piece_of("abc def", at_end=False) == "def"
    assert piece_of("one two ", at_end=True) == "two"
    for text in ("", "  ", "\ufffd\ufffd", "\n\n\n\n"):
        assert piece_of(text, at_end=True) is None and piece_of(text, at_end=False) is None
    for at_end in (True, False):
        piece = piece_of("one two\ufffd three", at_end)
        assert piece is not None and piece == piece.strip() and piece in "one two\ufffd three"


@pytest.mark.parametrize("block", [4, 16])
def test_prompts_share_blocks_as_a_prefix_cache_may_confuse_them(block: int) -> None:
    prompts = [sent.prompt_token_ids for sent in questions(Sizes(block=block, chunk=128, vocab=500), 0)]
    longest, changed, inner = prompts[7], prompts[3], prompts[4]
    assert [index for index, pair in enumerate(zip(changed, longest, strict=False)) if pair[0] != pair[1]] == [
        block + 1
    ]
    assert inner == changed[block : 3 * block + 1]


def test_few_pairs_that_move_measure_nothing() -> None:
    moved, equal = [[1e-4], [1e-4], *[[0.02]] * 5], [[0.0]] * 25
    assert not spread_of(moved + equal, [], "bfloat16").is_measured
    assert spread_of(moved, [], "bfloat16").is_measured
