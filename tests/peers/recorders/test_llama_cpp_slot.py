"""The decisions of llama.cpp's server for one slot, as its log shows them."""

from __future__ import annotations

from recorders.llama_cpp_slot import Checkpoint, chosen_checkpoint, common_prefix, cut


def checkpoint(num_tokens: int) -> Checkpoint:
    return Checkpoint(num_tokens, num_tokens - 1, num_tokens - 1, b"")


def test_what_two_prompts_share_ends_at_the_first_token_that_differs() -> None:
    assert common_prefix([1, 35], [1, 239]) == 1
    assert common_prefix([60, 61], [1, 35]) == 0
    assert common_prefix([1, 2], [1, 2, 3]) == 2


def test_a_prompt_is_cut_four_tokens_before_its_end() -> None:
    assert [cut(0, length) for length in (1, 2, 4, 5, 9)] == [1, 2, 4, 1, 5]
    assert cut(1, 5) == 5


def test_a_long_prompt_is_also_cut_a_micro_batch_before_that() -> None:
    assert [cut(0, 600), cut(84, 600), cut(596, 600)] == [84, 596, 600]
    assert cut(0, 5000) == 2048


def test_a_checkpoint_is_chosen_by_its_positions_alone() -> None:
    """[60, ...] left one behind its first token; [1, 239] shares its first token with [1, 35], and gets that one."""
    stale = checkpoint(1)
    assert chosen_checkpoint([stale], 1, 1) is stale


def test_the_latest_checkpoint_that_fits_is_chosen() -> None:
    after_1, after_3, after_9 = checkpoint(1), checkpoint(3), checkpoint(9)
    assert chosen_checkpoint([after_1, after_3, after_9], 5, 5) is after_3
    assert chosen_checkpoint([after_9], 5, 5) is None
    assert chosen_checkpoint([], 5, 5) is None
