"""On which file systems a cache may be, and what happens to a path that cannot be one."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import counts, write_store

import zloader as zl
from zloader.commands.doctor import about_cache
from zloader.common import file_systems
from zloader.common.errors import OptionError
from zloader.common.file_systems import has_stable_inodes, shared_file_system

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize(
    ("magic", "name", "stable"),
    [
        (0xEF53, None, True),  # ext4
        (0x01021994, None, True),  # tmpfs
        (0x794C7630, None, True),  # overlayfs
        (0x2011BAB0, None, False),  # exfat
        (0x6969, "NFS", True),
        (0x0BD00BD0, "Lustre", True),
        (0x65735546, "FUSE", False),
        (0x12345678, None, False),
        (None, None, False),
    ],
)
def test_file_systems(monkeypatch, tmp_path, magic, name, stable):
    monkeypatch.setattr(file_systems, "_magic", lambda _: magic)
    assert (shared_file_system(tmp_path), has_stable_inodes(tmp_path)) == (name, stable)


def test_there_is_no_cache_on_a_file_system_that_machines_share(tmp_path, monkeypatch):
    write_store(counts(20, 5), tmp_path / "a.zarr", tmp_path)
    shared = tmp_path / "shared"
    monkeypatch.setattr(file_systems, "_magic", lambda path: 0x6969 if Path(path) == tmp_path else 0xEF53)
    with pytest.raises(OptionError, match=r"shared/cache is on NFS, .* a directory on a local disk, or no cache"):
        zl.open_dataset(tmp_path / "a.zarr", cache=shared / "cache")
    (found,) = about_cache(shared / "cache")
    assert (found.name, found.state) == ("place", "broken")
    assert "is on NFS" in found.advice
    assert not shared.exists()
    assert sum(map(len, zl.Loader(zl.open_dataset(tmp_path / "a.zarr"), batch_size=8))) == 20
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "notes.txt").touch()  # other contents do no harm
    assert zl.open_dataset(tmp_path / "a.zarr", cache=tmp_path / "local").cache_statistics().chunks_held == 0
