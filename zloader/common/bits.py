"""Bits of 64-bit words, for compiled loops. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from zloader.common.compiled import compiled


@compiled
def count_bits(word: Any) -> Any:
    """The number of set bits of a uint64, which LLVM compiles to one instruction."""
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))
