"""Random words and permutations, computed element by element from an index. Pure.

A keyed permutation is a Feistel network with cycle walking (Black and Rogaway 2002). It takes constant memory, and it
uses integer arithmetic only, so it is the same on every machine and with every NumPy version.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.records import Rows

_ROUNDS = 8
_LANES = 1024  # numbers processed at once, which fit into the L1 cache
_U64 = np.uint64
_FIRST = np.zeros(1, np.int64)
GOLDEN = _U64(0x9E3779B97F4A7C15)  # the increment of splitmix64


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), a bijection of 64-bit words that scatters every bit."""
    words = (words ^ (words >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> _U64(27))) * _U64(0x94D049BB133111EB)
    return words ^ (words >> _U64(31))


def words_at(key: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A random 64-bit word for each counter. Different counters give different words under the same key."""
    return mix(_U64(key) + GOLDEN * counters)


def key_of(*parts: int) -> int:
    """A 64-bit key derived from whole numbers such as seed and epoch. It changes with each of them."""
    key = np.full(1, len(parts), _U64)
    for part in parts:
        key = mix(key + GOLDEN + mix(np.asarray([int(part) & 0xFFFFFFFFFFFFFFFF], _U64) + GOLDEN))
    return int(key[0])


mix_word = compiled(mix)  # mix of a single word, for compiled loops


@compiled
def _feistel(words: NDArray[np.uint64], tweaks: NDArray[np.uint64], keys: NDArray[np.uint64], half: np.uint64) -> None:
    """Permutes the words below 4**half in place. A function of its own, because LLVM then vectorises the loop."""
    mask = (_U64(1) << half) - _U64(1)
    for i in range(len(words)):
        left, right = words[i] >> half, words[i] & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (mix_word(right ^ tweaks[i] ^ keys[number]) & mask)
        words[i] = (left << half) | right


@compiled
def _permute(index: Rows, sizes: Rows, which: Rows, keys: NDArray[np.uint64], half: np.uint64, out: Rows) -> None:
    """Writes the results of `permute` to `out`. Numbers still out of range walk on, next to new ones."""
    words, tweaks, targets = np.empty(_LANES, np.uint64), np.empty(_LANES, np.uint64), np.empty(_LANES, np.int64)
    each, sized = len(which) > 1, len(sizes) > 1
    walking, taken = 0, 0
    while walking or taken < len(index):
        while walking < _LANES and taken < len(index):
            words[walking], targets[walking] = index[taken], taken
            tweaks[walking] = mix_word(GOLDEN * _U64(which[taken if each else 0]))  # type: ignore[arg-type]
            walking, taken = walking + 1, taken + 1
        _feistel(words[:walking], tweaks, keys, half)
        left = 0
        for i in range(walking):
            out[targets[i]] = words[i]
            words[left], tweaks[left], targets[left] = words[i], tweaks[i], targets[i]
            left += out[targets[i]] >= sizes[targets[i] if sized else 0]
        walking = left


def permute(index: Rows, n: int, key: int, *, which: Rows = _FIRST, sizes: Rows | None = None) -> Rows:
    """The images of `index` (int64, each in `range(n)`) under a keyed permutation of `range(n)`.

    Each key defines a family of permutations; `which` holds the number of the permutation for each element of `index`.
    With `sizes` (at most `n`, one per element of `index`), an element is permuted within `range(size)` and must lie
    there. Elements with the same `which` must have the same size.
    """
    half = max(1, (int(n - 1).bit_length() + 1) // 2)  # the network permutes range(4**half), and 4**half >= n
    keys = words_at(key, np.arange(1, _ROUNDS + 1, dtype=_U64))
    out = np.empty(len(index), np.int64)
    sizes = np.full(1, n, np.int64) if sizes is None else sizes
    _permute(np.ascontiguousarray(index, np.int64), sizes, which, keys, _U64(half), out)
    return out


def permute_each(index: Rows, sizes: Rows, which: Rows, key: int) -> Rows:
    """The images of `index` under permutations of `range(size)`, one for each number in `which`, as `permute` has them.

    Sizes may differ a lot: elements of similar sizes are permuted together, in networks that are not much larger.
    """
    halves = np.maximum(1, (np.frexp(sizes - 1)[1] + 1) // 2)  # the exponent of a whole number is its bit length
    out = np.empty(len(index), np.int64)
    for half in np.unique(halves).tolist():
        at = np.flatnonzero(halves == half)
        out[at] = permute(index[at], 4**half, key, which=which[at], sizes=sizes[at])
    return out


def shuffled(n: int, key: int) -> Rows:
    """A keyed permutation of `range(n)` as an array, for the rows of one buffer. Sorts raw words of Philox."""
    words = np.random.Philox(key=key).random_raw(n)
    low = _U64((1 << n.bit_length()) - 1)
    # Sorting words whose low bits hold their index is ten times as fast as argsort and gives the same result...
    numbered = np.sort((words & ~low) | np.arange(n, dtype=_U64))
    if ((numbered[1:] ^ numbered[:-1]) <= low).any():  # ...unless two words differ only in the low bits
        return np.argsort(words, kind="stable").astype(np.int64, copy=False)
    return (numbered & low).astype(np.int64)
