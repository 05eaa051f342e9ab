"""Equal parts of the rows for machines: `dataset.split(n)`."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers import counts, plan_of, write_store
from hypothesis import given
from hypothesis import strategies as st

import zloader as zl
from zloader.common.errors import OptionError
from zloader.dataset.splits import dealt_in_blocks
from zloader.testing import assert_resumes_anywhere

N_ROWS = 1501
SIZES = {"batch_size": 4, "fetch_factor": 2, "x": None}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_store(counts(N_ROWS, 20), folder / "counts.zarr", folder)
    return folder / "counts.zarr"


@given(
    n_parts=st.integers(1, 70), n_rows=st.integers(1, 5000), block_size=st.integers(1, 600), seed=st.integers(0, 2**70)
)
def test_parts_are_equal_and_hold_every_row_once(n_parts, n_rows, block_size, seed):
    if n_rows < n_parts:
        with pytest.raises(OptionError, match=f"{n_rows} rows cannot be divided into {n_parts} parts"):
            dealt_in_blocks(n_parts, n_rows, block_size=block_size, seed=seed)
        return
    found = dealt_in_blocks(n_parts, n_rows, block_size=block_size, seed=seed)
    sizes = np.bincount(found, minlength=n_parts + 1)
    assert (sizes[:n_parts] == n_rows // n_parts).all()
    assert sizes[n_parts] == n_rows % n_parts


def test_a_part_has_blocks_of_all_rows():
    """Each tenth of the rows gives each of 8 parts a tenth of its rows, up to a block."""
    found = dealt_in_blocks(8, 100_000, block_size=512, seed=3)
    for part in range(8):
        rows = np.flatnonzero(found == part)
        assert abs(np.bincount(rows // 10_000, minlength=10) - 1250).max() <= 2 * 195
        assert np.diff(np.flatnonzero(np.diff(rows) > 1)).min() >= 195  # blocks, two of which may touch


def test_the_deal_of_the_parts_is_always_the_same():
    """A resumed run must get the same parts with every later version."""
    dealt = {
        (n_rows, n_parts, block_size): zlib.crc32(dealt_in_blocks(n_parts, n_rows, block_size=block_size, seed=3))
        for n_rows, n_parts, block_size in ((1501, 2, 512), (1501, 4, 16), (30_000, 3, 64))
    }
    assert dealt == DEALT


DEALT = {(1501, 2, 512): 2330549856, (1501, 4, 16): 352748103, (30_000, 3, 64): 1128531438}


@pytest.mark.parametrize("n_parts", [4, 8, 32])
def test_minibatches_of_a_part_mix_like_those_of_all_rows(n_parts):
    """Rows sorted by 14 plates have 3.66 bits at most in minibatches of 64."""
    n_rows = 100_000
    found, plates = dealt_in_blocks(n_parts, n_rows, block_size=512, seed=0), np.arange(n_rows) * 14 // n_rows
    for part in (0, n_parts - 1):
        labels = plates[found == part]
        plan = plan_of(
            dataset_rows=len(labels), sampling=zl.BlockShuffling(64, n_strata=64), batch_size=64, fetch_factor=256
        )
        assert zl.quality(labels, plan).entropy_bits >= 3.45


def test_machines_have_equally_many_minibatches_of_other_rows(store):
    dataset = zl.open_dataset(store)
    parts = dataset.split(4, block_size=16, seed=1)
    assert [part.n_obs for part in parts] == [N_ROWS // 4] * 4
    loaders = [zl.Loader(part, rank=rank, world_size=2, **SIZES) for part in parts for rank in range(2)]
    made = [[minibatch.index.tolist() for minibatch in loader] for loader in loaders]
    assert len({len(minibatches) for minibatches in made}) == 1
    seen = [row for minibatches in made for rows in minibatches for row in rows]
    assert len(seen) == len(set(seen)) == N_ROWS // 4 * 4
    assert_resumes_anywhere(lambda: zl.Loader(parts[1][:60], **SIZES))


@pytest.mark.slow
def test_the_mirrors_of_all_machines_are_one_copy(store, tmp_path):
    """But for the blocks of the mirror at the ends of blocks of a part. A second epoch reads nothing from the store."""
    kept = []
    for number, part in enumerate([None, 0, 1]):
        dataset = zl.open_dataset(store, cache=tmp_path / str(number))
        loader = zl.Loader(dataset if part is None else dataset.split(2)[part], batch_size=4, fetch_factor=64)
        for _ in range(2):
            list(loader)
        assert loader.statistics().bytes_read == 0
        kept.append(loader.statistics().bytes_from_mirror)
    assert kept[1] + kept[2] < 1.6 * kept[0]


@pytest.mark.parametrize(
    ("parts", "options", "says"),
    [
        (2000, {}, "1501 rows cannot be divided into 2000 parts: give fewer parts"),
        (0, {}, "parts must be"),
        (2, {"block_size": 0}, "block_size must be"),
        (2, {"by": "donor"}, "2 equal parts are of blocks: leave by and stratify out"),
        (2, {"seed": -1}, "seed must be a whole number"),
        ([0.5, 0.5], {"block_size": 64}, "block_size goes with a number of parts"),
    ],
)
def test_options_that_make_no_sense_are_refused(store, parts, options, says):
    with pytest.raises(OptionError, match=says):
        zl.open_dataset(store).split(parts, **options)
