"""HDF5 files read by h5py in this process: in blocks that the cache keeps, from servers, with faults, in forks."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from helpers import PATIENCE_S

import zloader as zl
from zloader.common.errors import (
    CacheError,
    DeadlineError,
    FormatError,
    ReadError,
    StoreChangedError,
)
from zloader.common.options import FetchOptions
from zloader.reading.block_file import BlockFile
from zloader.reading.hdf5 import Array, Group, open_hdf5

N = 500


def written(path: Path) -> ad.AnnData:
    rng = np.random.default_rng(0)
    obs = pd.DataFrame(
        {
            "label": pd.Categorical(rng.choice(list("abc"), N)),
            "n": np.arange(N),
            "text": [f"t{i % 7}" for i in range(N)],
        },
        index=[f"cell {i}" for i in range(N)],
    )
    x = scipy.sparse.random(N, 50, 0.2, "csr", np.float32, random_state=0)
    adata = ad.AnnData(x, obs=obs, uns={"text": "words", "list": np.array(["x", "y"], object)})
    adata.write_h5ad(path, compression="gzip", convert_strings_to_categoricals=False)
    return adata


def assert_reads(dataset: zl.Dataset, adata: ad.AnnData) -> None:
    assert dataset.obs_names.tolist() == adata.obs_names.tolist()
    pd.testing.assert_frame_equal(dataset.obs(), adata.obs)
    assert dataset.categories("label").tolist() == ["a", "b", "c"]
    assert dataset.var_names.tolist() == adata.var_names.tolist()
    assert dataset.store.element("uns/text") == "words"
    assert list(dataset.store.element("uns/list")) == ["x", "y"]
    (minibatch,) = zl.Loader(dataset, batch_size=N, shuffle=False, obs=["label", "n"], layout="dense")
    np.testing.assert_array_equal(minibatch.x, adata.X.toarray())
    np.testing.assert_array_equal(minibatch.obs["n"], adata.obs["n"])


def test_a_warm_file_takes_no_bytes_from_its_server_and_then_no_server(tmp_path: Path, sim: Any) -> None:
    (tmp_path / "bucket").mkdir()
    adata = written(tmp_path / "bucket/a.h5ad")
    server = sim()
    options = {"key": "any", "secret": "any", "endpoint_url": server.url}
    open_it = {"url": "s3://bucket/a.h5ad", "storage_options": options, "cache": tmp_path / "cache"}
    with pytest.raises(CacheError, match="no mirror"):
        zl.open_dataset(**open_it, offline=True)
    assert_reads(zl.open_dataset(**open_it), adata)
    n_ranges = sum(entry["range"] is not None for entry in server.log)
    assert n_ranges > 1
    assert_reads(zl.open_dataset(**open_it), adata)
    assert sum(entry["range"] is not None for entry in server.log) == n_ranges
    server.stop()
    assert_reads(zl.open_dataset(**open_it, offline=True), adata)


@pytest.mark.parametrize("first", ["obs_names", "var_names"])
def test_what_libhdf5_has_in_memory_is_kept_too(tmp_path: Path, first: str) -> None:
    """Names of rows are not kept as they are stored. Other text lies beside them in the file."""
    path = tmp_path / "a.h5ad"
    adata = written(path)
    dataset = zl.open_dataset(path, cache=tmp_path / "cache")
    getattr(dataset, first)
    assert_reads(dataset, adata)
    path.unlink()
    assert_reads(zl.open_dataset(path, cache=tmp_path / "cache", offline=True), adata)


def test_bytes_that_are_not_kept_are_named_offline(tmp_path: Path) -> None:
    written(tmp_path / "a.h5ad")
    dataset = zl.open_dataset(tmp_path / "a.h5ad", cache=tmp_path / "cache")
    list(zl.Loader(dataset))
    dataset = zl.open_dataset(tmp_path / "a.h5ad", cache=tmp_path / "cache", offline=True)
    with pytest.raises(CacheError, match=r"bytes \d+-\d+ .*a\.h5ad are not in the cache: read it once online"):
        dataset.obs()


def test_errors_of_a_server_are_not_damage(tmp_path: Path, sim: Any) -> None:
    (tmp_path / "bucket").mkdir()
    written(tmp_path / "bucket/a.h5ad")
    server = sim()
    options = {"key": "any", "secret": "any", "endpoint_url": server.url}
    dataset = zl.open_dataset("s3://bucket/a.h5ad", storage_options=options)
    dataset.store._file._blocks.clear()
    server.faults = [{"kind": "status", "match": "a.h5ad"}]
    with pytest.raises(ReadError, match=r"a\.h5ad of s3://bucket.*is its server running"):
        dataset.store.element("uns/text")
    server.faults = []
    assert dataset.store.element("uns/text") == "words"


def test_a_read_that_takes_too_long(tmp_path: Path, sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bucket").mkdir()
    written(tmp_path / "bucket/a.h5ad")
    server = sim()
    options = {"key": "any", "secret": "any", "endpoint_url": server.url}
    dataset = zl.open_dataset("s3://bucket/a.h5ad", storage_options=options)
    monkeypatch.setattr("zloader.reading.block_file.FetchOptions", lambda: FetchOptions(deadline_s=0.3))
    dataset.store._file._blocks.clear()
    server.configure({"ttfb_ms": 3000})
    with pytest.raises(DeadlineError, match=r"a\.h5ad of s3://bucket could not be read within"):
        dataset.store.element("uns/text")


def test_a_file_is_neither_locked_nor_held_open(tmp_path: Path) -> None:
    adata = written(tmp_path / "a.h5ad")
    dataset = zl.open_dataset(tmp_path / "a.h5ad")
    assert_reads(dataset, adata)
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        file["uns/more"] = 1
    adata.write_h5ad(tmp_path / "a.h5ad")
    with pytest.raises(StoreChangedError, match=r"a\.h5ad"):
        dataset.obs()


def test_an_interpreter_ends_with_files_open(tmp_path: Path) -> None:
    written(tmp_path / "a.h5ad")
    code = "import sys, zloader as zl; d = zl.open_dataset(sys.argv[1]); n = d.store.node('obs/label'); d.obs(['n'])"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.h5ad"], timeout=PATIENCE_S, check=False)
    assert done.returncode == 0


def _labels(dataset: zl.Dataset, answers: Any) -> None:
    answers.put((dataset.obs_column("label").values.tolist(), dataset.obs_names[:3].tolist(), len(dataset.var)))


def test_forked_processes_read_a_file_that_their_parent_has_opened(tmp_path: Path) -> None:
    adata = written(tmp_path / "a.h5ad")
    dataset, context = zl.open_dataset(tmp_path / "a.h5ad"), multiprocessing.get_context("fork")
    dataset.obs(["n"])
    answers = context.SimpleQueue()
    processes = [context.Process(target=_labels, args=(dataset, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    expected = adata.obs["label"].cat.codes.tolist(), adata.obs_names[:3].tolist(), 50
    assert [answers.get() for _ in processes] == [expected] * 3
    for process in processes:
        process.join(PATIENCE_S)
    assert_reads(dataset, adata)


# ---- nodes


def opened(path: Path) -> Group:
    content = path.read_bytes()
    read = lambda pieces: [content[start:stop] for start, stop in pieces]  # noqa: E731
    return open_hdf5(BlockFile(read, len(content), where="a.h5"), "a.h5", "Convert it")


def test_nodes_are_those_of_h5py(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["group/numbers"] = np.arange(12).reshape(4, 3)
        file["group/text"] = np.array(["é", "", "b"], object)
        file["scalar"], file["word"], file["none"] = 5, "word", h5py.Empty("f4")
        file.attrs.update(
            {"text": "t", "bytes": np.bytes_(b"b"), "list": ["x", "y"], "shape": np.array([4, 3]), "one": [1]}
        )
        file.attrs["ref"] = file["group/text"].ref
        file["link"], file["nowhere"], file["loop"] = (h5py.SoftLink(to) for to in ("group/text", "/no", "/loop"))
    root = opened(tmp_path / "a.h5")
    assert dict(root.attrs) == {
        "text": "t", "bytes": "b", "list": ["x", "y"], "shape": [4, 3], "one": 1, "ref": "group/text"
    }  # fmt: skip
    assert sorted(root) == ["group", "link", "loop", "none", "nowhere", "scalar", "word"]
    numbers, text = root["group/numbers"], root["group"]["text"]
    assert isinstance(numbers, Array)
    assert isinstance(text, Array)
    np.testing.assert_array_equal(numbers[1:3], np.arange(3, 9).reshape(2, 3))
    assert (numbers.path, numbers.shape, numbers.chunks, numbers.ndim) == ("group/numbers", (4, 3), (4, 3), 2)
    assert text[...].tolist() == root["link"][...].tolist() == ["é", "", "b"]
    assert (root["scalar"][()], root["word"][()], root["none"].shape) == (5, "word", ())
    assert "group/none" not in root
    assert "group/text/more" not in root
    assert root.get("group/none") is None
    for name, why in (("nowhere", "damaged"), ("loop", "leads to itself")):
        assert name in root
        with pytest.raises(FormatError, match=f"{name} of a.h5 cannot be read in place: .*{why}.*Convert it"):
            root[name]
    with pytest.raises(KeyError):
        root["group/text/more"]
    found = dict(root.members())
    assert {path for path, node in found.items() if isinstance(node, FormatError)} == {"nowhere", "loop"}
    assert {path for path, node in found.items() if isinstance(node, Array)} == {
        "group/numbers", "group/text", "link", "none", "scalar", "word"
    }  # fmt: skip


def test_errors_of_reading_are_not_swallowed_and_garbage_waits(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(300):
            file.create_group(f"g{number}").attrs["text"] = "t" * 3000
    content, fails = (tmp_path / "a.h5").read_bytes(), [False]

    def read(pieces: list[tuple[int, int]]) -> list[bytes]:
        assert not gc.isenabled()
        if fails[0]:
            raise ReadError("the server is down")
        return [content[start:stop] for start, stop in pieces]

    file = BlockFile(read, len(content), where="a.h5", ahead=1)
    root = open_hdf5(file, "a.h5", "")
    assert gc.isenabled()
    fails[0] = True
    with pytest.raises(ReadError, match="the server is down"):
        print([root[f"g{number}"].attrs["text"] for number in range(300)])
    assert gc.isenabled()
    fails[0] = False
    assert all(root[f"g{number}"].attrs["text"] == "t" * 3000 for number in range(300))


def test_groups_without_end_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("/".join("g" * 40))
        file["many/self"] = file.create_group("many")
    found = list(opened(tmp_path / "a.h5").members())
    assert [path for path, node in found if isinstance(node, FormatError)] == ["many/self"]
    assert "contains itself" in str(dict(found)["many/self"])
