"""The plain text of sampling's noise, in whole numbers, against NumPy's generator of the same name."""

import numpy as np
import plain
from hypothesis import given
from hypothesis import strategies as st

WORDS = st.integers(0, 2**64 - 1)


@given(seed=WORDS, sample_index=WORDS, position=WORDS, purpose=WORDS)
def test_noise_is_a_philox_block_of_its_seed_and_place(
    seed: int, sample_index: int, position: int, purpose: int
) -> None:
    key, counter = (np.array(words, np.uint64) for words in ([seed, sample_index], [0, position, purpose, 0]))
    generator = np.random.Philox(key=key, counter=counter)  # counts up first
    words = [int(word) for word in generator.random_raw(4)]
    assert plain.noise_words(seed, sample_index, position, purpose) == tuple(words)
    assert plain.uniform_noise(seed, sample_index, position, purpose) == words[0] * 2**64 + words[1]
