"""Some rows of a dataset: which they are, how samplings see them, and how rows are split into parts. Pure.

The rows of a view are one bit each, and a count for every 512 of them finds the k-th: 14 MB for 100 million rows,
whichever are chosen. Splitting draws no random numbers: it is a keyed permutation, the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.columns import ObsColumn
from zloader.compiled import compiled
from zloader.errors import OptionError
from zloader.expressions import Mask, matching
from zloader.permutation import key_of, permute
from zloader.sampling import Sampling, checked_once, require_rows
from zloader.sharing import SharesArrays
from zloader.terms import Rows

Column = Callable[[str], ObsColumn]
Condition: TypeAlias = str | Sequence[int] | Sequence[bool] | NDArray[Any] | pd.Series
Shares = Sequence[float] | Mapping[str, float]
_STRIDE = 64  # bytes of bits that are counted together
_WINDOW = 1 << 20  # rows that are split together
_ROUNDING = 1e-6  # that fractions which add up to 1 may be off, as float32 are
_TRIES = 20_000  # of exchanges between two parts: well below a second
_POPULATION = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


@compiled
def _select(bits: NDArray[np.uint8], before: Rows, population: NDArray[np.uint8], positions: Rows, out: Rows) -> None:
    """The places of the set bits number `positions`; `before` counts those before every _STRIDE bytes."""
    for i in range(len(positions)):
        stride = np.searchsorted(before, positions[i], side="right") - 1
        byte, left = stride * _STRIDE, positions[i] - before[stride]
        while left >= population[bits[byte]]:
            left -= population[bits[byte]]
            byte += 1
        word, place = bits[byte], 0
        while left or not word & 1:
            left -= word & 1
            word >>= 1
            place += 1
        out[i] = 8 * byte + place


@dataclass(frozen=True, eq=False)
class RowSet(SharesArrays):
    """Some of `n_all` rows in ascending order, as bits; made by `of`."""

    n_all: int
    bits: NDArray[np.uint8] = field(repr=False)
    before: Rows = field(repr=False)

    @classmethod
    def of(cls, mask: Mask) -> RowSet:
        """Those rows at which the mask is True."""
        bits = np.packbits(mask, bitorder="little")
        counts = np.add.reduceat(np.bitwise_count(bits), np.arange(0, len(bits), _STRIDE), dtype=np.int64)
        return cls(n_all=len(mask), bits=bits, before=np.append(0, np.cumsum(counts)))

    def __len__(self) -> int:
        return int(self.before[-1])

    def mask(self) -> Mask:
        """A boolean for each of `n_all` rows."""
        return np.unpackbits(self.bits, count=self.n_all, bitorder="little").view(bool)

    def numbers(self, positions: Rows) -> Rows:
        """The row numbers at some positions in the set, each at least 0 and below its length."""
        out = np.empty(len(positions), np.int64)
        _select(self.bits, self.before, _POPULATION, np.ascontiguousarray(positions, np.int64), out)
        return out

    def narrowed(self, mask: Mask) -> RowSet:
        """Those rows of the set at which a mask over the set is True."""
        wide = self.mask()
        wide[wide] = mask
        return RowSet.of(wide)

    def digest(self, fingerprint: str) -> str:
        """A fingerprint of these rows of what has that fingerprint: 32 hexadecimal digits."""
        return hashlib.sha256(f"{fingerprint} {self.n_all} ".encode() + self.bits.tobytes()).hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class Within:
    """A sampling of the rows of a view: `sampling` counts them from 0, and the rows given are those of the dataset."""

    sampling: Sampling
    chosen: RowSet

    @property
    def shuffles_fetch(self) -> bool:
        """As the sampling says."""
        return self.sampling.shuffles_fetch

    @property
    def block_size(self) -> int:
        """Consecutive rows of the view; 1 where the sampling has no blocks."""
        return getattr(self.sampling, "block_size", 1)

    @property
    def repeats(self) -> bool:
        """Whether a row may come more than once an epoch."""
        return getattr(self.sampling, "repeats", False)

    @property
    def indices(self) -> Rows:
        """The rows of the dataset that take part, as other samplings name them."""
        positions = getattr(self.sampling, "indices", None)
        if positions is None:
            return np.flatnonzero(self.chosen.mask())
        return self.chosen.numbers(np.asarray(positions))

    def n_rows(self, dataset_rows: int) -> int:
        """How many rows an epoch has."""
        return self.sampling.n_rows(len(self.chosen))

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows at positions `[start, stop)`, numbered as in the dataset."""
        n_rows = len(self.chosen)
        positions = self.sampling.rows(start, stop, dataset_rows=n_rows, seed=seed, epoch=epoch)
        require_rows(positions, self.sampling, start, stop, n_rows)
        return self.chosen.numbers(positions)


def mask_of(condition: Condition, column: Column, n_rows: int, names: Sequence[str] = ()) -> Mask:
    """Which of `n_rows` rows an expression, a mask or row numbers (each once, in any order) choose.

    Raises OptionError, or MissingColumnError for an expression.
    """
    if isinstance(condition, str):
        return matching(condition, column, n_rows, names)
    chosen = np.asarray(condition)
    if chosen.dtype == bool:
        if chosen.shape != (n_rows,):
            raise OptionError(f"a mask over {n_rows} rows is needed, not one of shape {chosen.shape}")
        return chosen
    mask = np.zeros(n_rows, bool)
    if chosen.shape != (0,):
        rows = checked_once(chosen)
        assert rows is not None
        if rows[0] < 0 or rows[-1] >= n_rows:
            bad = rows[0] if rows[0] < 0 else rows[-1]
            raise OptionError(f"row {bad} is not there: there are the rows 0 to {n_rows - 1}")
        mask[rows] = True
    return mask


def split_rows(
    shares: Shares, column: Column, n_rows: int, *, by: str | None, stratify: str | None, seed: int
) -> NDArray[np.integer]:
    """For each of `n_rows` rows the number of the part that it goes to; one that is in no part has the next number.

    Raises OptionError, or MissingColumnError.
    """
    if by is not None and stratify is not None:
        raise OptionError("by and stratify exclude each other: whole groups cannot keep the proportions of labels")
    for option, name in (("by", by), ("stratify", stratify)):
        if not isinstance(name, str | None):
            raise OptionError(f"{option} takes the name of one obs column, such as 'donor', not {name!r}")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise OptionError(f"seed must be a whole number of at least 0, not {seed!r}")
    try:
        sizes = _sizes(list(shares.values() if isinstance(shares, Mapping) else shares), n_rows)
    except TypeError as error:
        raise OptionError(f"give the parts as a list such as [0.9, 0.1], or a dict by name, not {shares!r}") from error
    if by is not None:
        groups, counts = _classes(by, column(by))
        needed, there = np.count_nonzero(sizes[:-1]), np.count_nonzero(counts)
        if needed > there:
            raise OptionError(
                f"{needed} parts need as many labels, but obs column {by!r} has {there}: give fewer parts"
            )
        parts = _parts_of_groups(counts, sizes, key_of(seed))
        return np.asarray(parts[groups])  # rows without a label, -1, are the last group
    if stratify is not None:
        return _spread(*_classes(stratify, column(stratify)), sizes, seed)
    return _spread(None, np.array([n_rows]), sizes, seed)


def _sizes(shares: Sequence[float], n_rows: int) -> Rows:
    """Rows of each part, and of what is left over."""
    if not shares or any(
        isinstance(share, bool) or not isinstance(share, int | float | np.number) or not share >= 0 for share in shares
    ):
        raise OptionError(f"give each part a fraction or a number of rows, not {list(shares)!r}")
    whole = [isinstance(share, int | np.integer) for share in shares]
    if all(whole):
        sizes = [int(share) for share in shares]
        if sum(sizes) > n_rows:
            raise OptionError(f"parts of {' + '.join(map(str, sizes))} rows are more than the {n_rows} that there are")
        return np.array([*sizes, n_rows - sum(sizes)], np.int64)
    if any(whole):
        raise OptionError(f"give all parts fractions, or all of them numbers of rows, not {list(shares)!r}")
    ends = np.cumsum(np.asarray(shares, np.float64))
    if not ends[-1] <= 1 + _ROUNDING:
        raise OptionError(f"the fractions {list(shares)!r} add up to {ends[-1]:g}, more than 1")
    if ends[-1] >= 1 - _ROUNDING:
        ends[ends >= ends[-1]] = 1
    rows: Rows = np.floor(np.minimum(ends, 1) * n_rows + 0.5).astype(np.int64)
    return np.diff(rows, prepend=0, append=n_rows)


def _classes(name: str, column: ObsColumn) -> tuple[NDArray[np.integer], Rows]:
    """For each row the number of its label, from 0, or -1, and how many rows have each; -1 at the end."""
    codes = column.values
    if column.categories is None:
        # Whole numbers and booleans are held as floats where some are missing, which are NaN and get code -1.
        if codes.dtype.kind not in "biu" and not (np.isnan(codes) | (np.trunc(codes) == codes)).all():
            raise OptionError(f"obs column {name!r} holds {codes.dtype}: labels, whole numbers or booleans are needed")
        codes, labels = pd.factorize(codes, sort=True)
        n_labels = len(labels)
    else:
        n_labels = len(column.categories)
    counts = np.zeros(n_labels + 1, np.int64)
    for start in range(0, len(codes), _WINDOW):
        counts += np.bincount(codes[start : start + _WINDOW].astype(np.int64) % (n_labels + 1), minlength=n_labels + 1)
    return codes, counts


def _parts_of_groups(counts: Rows, sizes: Rows, key: int) -> NDArray[np.integer]:
    """The part that each group goes to: large groups first, in random order where less than twice as large as others.

    Each goes where most rows are missing yet; then no part stays empty that should have rows, and then groups are moved
    and exchanged between two parts while that brings both together nearer to their sizes.
    """
    order = np.lexsort((permute(np.arange(len(counts)), len(counts), key), -np.frexp(counts)[1]))
    dealt = counts[order[counts[order] > 0]]
    missing, parts = sizes.copy(), np.zeros(len(dealt), np.intp)
    for group, count in enumerate(dealt.tolist()):
        part = parts[group] = np.argmax(missing)
        missing[part] -= count
    needed = np.append(sizes[:-1] > 0, False)  # what is left over may be nothing
    _fill(dealt, parts, missing, needed)
    tries, nearer = 0, True
    while nearer and tries < _TRIES:
        before = missing.copy()
        pairs = product(np.flatnonzero(missing < 0).tolist(), np.flatnonzero(missing > 0).tolist())
        for giver, taker in islice(pairs, _TRIES - tries):
            _exchange(dealt, parts, missing, needed, giver, taker)
            tries += 1
        nearer = not np.array_equal(missing, before)
    of_group = np.zeros(len(counts), np.min_scalar_type(len(sizes)))
    of_group[order[: len(dealt)]] = parts
    return of_group


def _fill(dealt: Rows, parts: NDArray[np.intp], missing: Rows, needed: Mask) -> None:
    """Gives each empty part that needs a group the one that costs the others least."""
    for taker in np.flatnonzero(needed & (np.bincount(parts, minlength=len(missing)) == 0)).tolist():
        spare = (np.bincount(parts, minlength=len(missing)) > 1) | ~needed
        groups = np.flatnonzero(spare[parts])
        short = missing[parts[groups]]
        costs = abs(short + dealt[groups]) - abs(short) + abs(missing[taker] - dealt[groups])
        group = groups[np.argmin(costs)]
        missing[parts[group]] += dealt[group]
        missing[taker] -= dealt[group]
        parts[group] = taker


def _exchange(dealt: Rows, parts: NDArray[np.intp], missing: Rows, needed: Mask, giver: int, taker: int) -> None:
    """Moves a group from a part with too many rows to one with too few, for one in return or for none, if that helps.

    What is moved on balance should be what `taker` lacks: of the sorted groups that may return, one of two neighbours
    is the best for each that is given.
    """
    given, returned = np.flatnonzero(parts == giver), np.flatnonzero(parts == taker)
    returned = returned[np.argsort(dealt[returned], kind="stable")]
    if len(given) > 1 or not needed[giver]:
        returned = np.append(-1, returned)  # none
    if not len(given) or not len(returned):
        return
    back = np.where(returned < 0, 0, dealt[returned])
    after = np.searchsorted(back, dealt[given] - missing[taker])
    places = np.clip([after - 1, after], 0, len(back) - 1)
    moved = dealt[given] - back[places]
    apart = abs(missing[giver] + moved) + abs(missing[taker] - moved)
    best = np.unravel_index(np.argmin(apart), apart.shape)
    if apart[best] < abs(missing[giver]) + abs(missing[taker]):
        missing[giver] += moved[best]
        missing[taker] -= moved[best]
        parts[given[best[1]]] = taker
        if returned[places[best]] >= 0:
            parts[returned[places[best]]] = giver


def _spread(codes: NDArray[np.integer] | None, counts: Rows, sizes: Rows, seed: int) -> NDArray[np.integer]:
    """The part of each row: parts have just these sizes, and of each label their share, to a row."""
    ends = np.cumsum(_quotas(counts, sizes), axis=1)
    n_rows, n_labels = int(sizes.sum()), len(counts)
    parts = np.empty(n_rows, np.min_scalar_type(len(sizes)))
    reached = np.zeros(n_labels, np.int64)
    for start in range(0, n_rows, _WINDOW):
        stop = min(start + _WINDOW, n_rows)
        labels = np.zeros(stop - start, np.uint8)
        if codes is not None:  # in the smallest type: the fewer bytes, the faster they are sorted
            labels = (codes[start:stop].astype(np.int64) % n_labels).astype(np.min_scalar_type(n_labels))
        order = np.argsort(labels, kind="stable")
        firsts = np.searchsorted(labels[order], np.arange(n_labels + 1))
        for label in np.flatnonzero(np.diff(firsts)).tolist():
            rows = order[firsts[label] : firsts[label + 1]]
            number = reached[label] + np.arange(len(rows))  # of the row, among those with its label
            place = permute(number, int(counts[label]), key_of(seed, label))
            parts[start + rows] = np.searchsorted(ends[label], place, side="right")
            reached[label] += len(rows)
    return parts


def _quotas(counts: Rows, sizes: Rows) -> Rows:
    """Rows of each label (down) in each part (across): whole numbers that add up to both.

    Part by part, of the rows that are left: what is rounded in running sums adds up.
    """
    left = counts.copy()
    quotas = np.empty((len(counts), len(sizes)), np.int64)
    for part, size in enumerate(sizes.tolist()):
        total = max(1, int(left.sum()))
        running = [(2 * end * size + total) // (2 * total) for end in np.cumsum(left).tolist()]
        quotas[:, part] = np.diff(running, prepend=0)
        left -= quotas[:, part]
    return quotas
