"""Shape notes that are checked: one letter a dimension, the same letter the same size."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from lfm2np.errors import NumericsError


def check(arrays: dict[str, tuple[NDArray[Any], str]], **sizes: int) -> dict[str, int]:
    """The size of every letter in `{"keys": (keys, "CGE"), ...}`; `sizes` are known beforehand.

    NumericsError names the array, its shape and the letter that has another size elsewhere.
    """
    for name, (array, letters) in arrays.items():
        for letter, size in zip(letters, array.shape, strict=False):
            if sizes.setdefault(letter, size) != size or array.ndim != len(letters):
                raise NumericsError(
                    f"{name}: shape {array.shape}, expected [{', '.join(letters)}] with {letter} = {sizes[letter]}"
                )
    return sizes
