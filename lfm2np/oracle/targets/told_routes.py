"""Which experts each token went to, as servers tell it: [positions][layers][experts] from base64.

vLLM 0.32 (--enable-return-routed-experts): an .npy file, all layers of the model. SGLang: int32, whose shape is not
told; its ids are given back as those of one layer, to be divided by whoever knows the model (oracle/judging/routes.py).
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

import numpy as np

from lfm2np.errors import RequestError

Told = list[list[list[int]]]


def from_npy(text: Any, where: str) -> Told:
    try:
        array = np.load(io.BytesIO(decoded(text, where)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as problem:
        raise RequestError(f"{where}: not an .npy file: {problem}") from None
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise RequestError(
            f"{where}: {array.dtype} of shape {array.shape}, expected integers [tokens, layers, experts]"
        )
    told: Told = array.tolist()
    return told


def from_int32(text: Any, positions: int, where: str) -> Told:
    """Little-endian ids of `positions` tokens, as many of each."""
    content = decoded(text, where)
    if len(content) % 4 or positions < 1 or (len(content) // 4) % positions:
        raise RequestError(f"{where}: {len(content)} bytes, expected int32 of {positions} positions")
    ids = np.frombuffer(content, "<i4").reshape(positions, 1, -1)
    told: Told = ids.tolist()
    return told


def decoded(text: Any, where: str) -> bytes:
    if not isinstance(text, str):
        raise RequestError(f"{where}: {type(text).__name__}, expected base64")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as problem:
        raise RequestError(f"{where}: not base64: {problem}") from None
