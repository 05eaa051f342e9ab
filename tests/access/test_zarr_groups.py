"""Stores that are opened at the same time give no warnings of zarr."""

from __future__ import annotations

import itertools
import threading
import time
import warnings

import pytest
import zarr
from helpers import counts

import zloader as zl
from zloader.access.zarr_groups import member_of

DEADLINE_S = 60


def test_warnings_of_zarr_stay_hidden_while_several_stores_open(tmp_path, monkeypatch):
    """A thread that leaves its context restores the filters from before, while another is still in its own."""
    urls = [tmp_path / f"{name}.zarr" for name in "ab"]
    for url in urls:
        zl.convert(counts(20, 5), url, progress=False)
    calls, begun, open_group = itertools.count(), threading.Event(), zarr.open_group

    def interleaved(*args, **options):
        call = next(calls)
        if call == 0:
            assert begun.wait(DEADLINE_S)
        elif call == 1:
            filters, deadline = warnings.filters, time.monotonic() + DEADLINE_S
            begun.set()
            while warnings.filters is filters and time.monotonic() < deadline:  # until the other has left its own
                time.sleep(0)
            warnings.warn("Numcodecs codecs are not in the Zarr version 3 specification", UserWarning, stacklevel=2)
        return open_group(*args, **options)

    monkeypatch.setattr(zarr, "open_group", interleaved)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        zl.open_dataset(urls)
    assert [str(each.message) for each in seen] == []


@pytest.mark.parametrize("consolidated", [True, False])
def test_a_member_is_that_of_zarr(tmp_path, consolidated):
    url = tmp_path / "counts.zarr"
    zl.convert(counts(20, 5), url, progress=False)
    group = zarr.open_group(url, mode="r", use_consolidated=consolidated)
    paths = [path for path, _ in group.members(max_depth=None)]
    assert {"X", "X/data", "obs/cell_type/codes"} <= set(paths)
    for path in paths:
        found, expected = member_of(group, path), group[path]
        assert type(found) is type(expected)
        assert (found.path, found.metadata) == (expected.path, expected.metadata)
    assert (member_of(group, "X/data")[:] == group["X/data"][:]).all()
    assert (member_of(member_of(group, "obs"), "cell_type/codes")[:] == group["obs/cell_type/codes"][:]).all()
    for path in ("nothing", "X/nothing", "nothing/at/all"):
        with pytest.raises(KeyError):
            group[path]
        with pytest.raises(KeyError):
            member_of(group, path)
