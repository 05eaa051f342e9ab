"""Random words, permutations, and orders of blocks and sets, computed element by element from an index. Pure.

A keyed permutation is a Feistel network with cycle walking (Black and Rogaway 2002). It takes constant memory, and it
uses integer arithmetic only, so it is the same on every machine and with every NumPy version.

**Blocks** are ordered in strata, so that any run of consecutive blocks comes evenly from all rows. The blocks are cut
into strata, equal stretches of the rows, and every round of the order holds one random block of each. Blocks in random
order would by chance over-represent one plate and under-represent another. A fetch rarely begins and ends with a round,
and may be shorter than one. So a round does not take its strata in purely random order: it alternates between the two
halves of the rows, within each half between its quarters, and so on. This is van der Corput's sequence with Owen's
nested scrambling (1995): at random, each half, quarter and so on decides anew which of its parts comes first. Any
stretch of a round then takes blocks nearly evenly from the rows.

**Sets** are dealt like cards: sorted by group, with the groups in random order, one set to each minibatch in turn, and
the minibatches in random order. So a group that has no more sets than there are minibatches never comes twice in one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled, compiled_after
from zloader.common.records import Rows

_ROUNDS = 8
_LANES = 1024  # numbers processed at once, which fit into the L1 cache
_FEW = 1 << 16  # numbers; whoever permutes more of them at once may do so often, and needs the compiler
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


def _permute_few(index: Rows, sizes: Rows, which: Rows, keys: NDArray[np.uint64], half: np.uint64, out: Rows) -> Any:
    """The same as `_permute` with NumPy. All numbers still out of range walk on together."""
    if len(index) > _FEW:
        return NotImplemented
    words, at = index.astype(_U64), np.arange(len(index))
    tweaks = np.broadcast_to(mix(GOLDEN * which.astype(_U64)), len(words))
    sizes = np.broadcast_to(sizes, len(words))
    mask = (_U64(1) << half) - _U64(1)
    while len(at):
        left, right = words >> half, words & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (mix(right ^ tweaks ^ keys[number]) & mask)
        words = (left << half) | right
        out[at] = words
        beyond = out[at] >= sizes
        words, at, tweaks, sizes = words[beyond], at[beyond], tweaks[beyond], sizes[beyond]
    return None


@compiled_after(_permute_few)
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


def strata_of(n_blocks: int, n_strata: int) -> int:
    """The number of strata of `n_blocks` blocks: `n_strata`, or the next lower power of two if there are fewer blocks.

    A power of two can be halved down to single strata, so that all of them alternate. In fetches of 16 of 78 blocks,
    minibatches have 3.51 bits with 64 strata, 3.41 with 78 strata, and 3.15 without strata.
    """
    return n_strata if n_strata <= n_blocks else 1 << max(0, n_blocks.bit_length() - 1)


def blocks_at(slots: Rows, n_blocks: int, n_strata: int, key: int) -> Rows:
    """The number of the block at each of the given consecutive `slots` in the order."""
    n_strata = strata_of(n_blocks, n_strata)
    if n_strata <= 1 or not len(slots):
        return permute(slots, n_blocks, key)
    n_rounds = n_blocks // n_strata
    # If the blocks do not divide evenly, some strata have one block more than the others. These get another turn after
    # the last full round. Which strata these are changes with the epoch.
    bounds = (np.arange(n_strata + 1) * n_blocks + key_of(key, 4) % n_strata) // n_strata
    sizes = np.diff(bounds)
    turn, within = np.divmod(slots, n_strata)
    turns = np.arange(turn[0], turn[-1] + 1)
    places = _places(turns, n_strata, key)
    places[turns[:, None] >= sizes] += 2 * n_strata  # after those that have another turn
    stratum = np.argsort(places, axis=1)[turn - turn[0], within]
    blocks: Rows = bounds[stratum] + permute(turn, n_rounds + 1, key_of(key, 3), which=stratum, sizes=sizes[stratum])
    return blocks


def _places(turns: Rows, n_strata: int, key: int) -> NDArray[np.int64]:
    """Numbers below `2 * n_strata`, turns x strata: in each turn, the strata come in the order of their numbers."""
    depth = int(n_strata - 1).bit_length()  # of a binary tree with the strata as leaves
    words = words_at(key_of(key, 2), np.arange(turns[0] << depth, (turns[-1] + 1) << depth, dtype=np.uint64))
    words = words.reshape(len(turns), 1 << depth)
    # The first leaf is another stratum in each turn, so that all strata are alike if they do not fill the tree.
    leaf = (np.arange(n_strata) + (words[:, :1] % np.uint64(n_strata)).astype(np.int64)) % n_strata
    swapped = words.view(np.int64) < 0  # for each inner node, whether its second part comes first
    places = np.zeros_like(leaf)
    for level in range(depth):
        node = (1 << level) | (leaf >> (depth - level))
        second = (leaf >> (depth - level - 1)) & 1
        places |= (second ^ np.take_along_axis(swapped, node, axis=1)) << level
    return places


def shared_out(weights: Rows, total: int, key: int) -> Rows:
    """`total` divided by weight (whole numbers). Each share is rounded up or down, at random, to a whole number.

    On average over keys a share is exactly `total * weight / sum of weights`.
    """
    order = shuffled(len(weights), key_of(key, 1))
    ends = np.cumsum(weights[order]).tolist()  # Python's integers do not overflow
    offset = key_of(key, 2) % ends[-1]
    counts = np.empty(len(weights), np.int64)
    counts[order] = np.diff([(total * end + offset) // ends[-1] for end in ends], prepend=0)
    return counts


def dealt(counts: Rows, per_minibatch: int, key: int) -> tuple[NDArray[np.int32], Rows]:
    """The order of the sets of groups that have `counts` sets: the group of each set, and its number in the group."""
    total = int(counts.sum())
    order = shuffled(len(counts), key_of(key, 1))
    taken = counts[order]
    group = np.repeat(order, taken)
    number = np.arange(total) - np.repeat(np.cumsum(taken) - taken, taken)
    minibatches = shuffled(-(-total // per_minibatch), key_of(key, 2))
    places = (minibatches * per_minibatch + np.arange(per_minibatch)[:, None]).reshape(-1)
    places = places[places < total]  # the last minibatch may have fewer sets
    groups, numbers = np.empty(total, np.int32), np.empty(total, np.int64)
    groups[places], numbers[places] = group, number
    return groups, numbers
