"""Small stores with edge cases, and checks of minibatches against the AnnData they were written from."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse
import torch.utils.data

import zloader as zl
from zloader.conversion.encode import ConvertOptions
from zloader.dataset.views import RowSet
from zloader.order.plan import Plan
from zloader.storage.layout import ArrayLayout, Placement
from zloader.storage.row_offsets import RowOffsets

# Chunks of about 1 024 values and shards of two chunks, so that a few hundred rows cross many of both.
SMALL = ConvertOptions(chunk_rows=1, shard_size=2048)
TESTS = Path(__file__).parent
# How long a test waits before it reports a hang: far longer than a busy machine needs.
PATIENCE_S = 300.0
# A deadline for tests in which nothing may wait for the deadline.
NEVER_S = 3600.0


def fetch_options(**given: Any) -> zl.FetchOptions:
    """Options with other values of the constants and the derived budgets, too."""
    public = {field.name for field in dataclasses.fields(zl.FetchOptions)}
    options = zl.FetchOptions(**{name: value for name, value in given.items() if name in public})
    vars(options).update({name: value for name, value in given.items() if name not in public})
    return options


def vector_layout(
    path: str, dtype: np.dtype[Any] | str, *, n_elements: int, chunk_elements: int, chunks_per_shard: int = 1
) -> ArrayLayout:
    """A vector in uncompressed chunks. Several chunks per shard have an index as in stores that zloader writes."""
    return ArrayLayout(
        path=path,
        dtype=np.dtype(dtype),
        n_elements=n_elements,
        chunk_elements=chunk_elements,
        codecs=({"name": "bytes"},),
        placement=Placement(path=path, chunks_per_object=chunks_per_shard, sharded=chunks_per_shard > 1),
    )


def counts(n_rows: int, n_genes: int, *, density: float = 0.3, seed: int = 0) -> ad.AnnData:
    """Random counts with empty rows at the start, middle and end, and with obs columns of every kind."""
    rng = np.random.default_rng(seed)
    x = scipy.sparse.random(n_rows, n_genes, density, "csr", np.float32, random_state=rng)
    x.data[:] = rng.integers(1, 400, x.nnz)
    if n_rows > 4:
        keep = np.ones(n_rows, np.float32)
        keep[[0, n_rows // 2, n_rows // 2 + 1, n_rows - 1]] = 0
        x = (scipy.sparse.diags(keep) @ x).tocsr().astype(np.float32)
        x.eliminate_zeros()
        x.sort_indices()
    labels = pd.Categorical.from_codes(rng.integers(-1, 3, n_rows), ["a", "b", "c", "never used"])
    obs = pd.DataFrame(
        {
            "cell_type": labels,
            "donor": rng.choice(["d1", "d2", "d10"], n_rows),
            "n_counts": np.asarray(x.sum(axis=1)).ravel().astype(np.float32),
            "passed": rng.random(n_rows) < 0.5,
            "lane": rng.integers(0, 5, n_rows).astype(np.int32),
        },
        index=[f"cell {row}" for row in range(n_rows)],
    )
    obs["donor"] = obs["donor"].astype(object)
    return ad.AnnData(X=x, obs=obs, var=pd.DataFrame(index=[f"gene {gene}" for gene in range(n_genes)]))


def write_store(adata: ad.AnnData, dest: str | Path, tmp: Path, **options: Any) -> None:
    """Converts `adata` to a store with small chunks and shards at `dest`."""
    tmp.mkdir(parents=True, exist_ok=True)
    adata.write_h5ad(tmp / "source.h5ad", convert_strings_to_categoricals=False)
    zl.convert(tmp / "source.h5ad", dest, options=SMALL, progress=False, **options)


def fill_bucket(root: Path, content: bytes) -> None:
    """Files for a server of `root`: an object with some content, others, and a link out of the bucket."""
    (root / "bucket/deep").mkdir(parents=True)
    (root / "bucket/object").write_bytes(content)
    (root / "bucket/deep/two words & more").write_bytes(b"deep")
    (root / "bucket/empty").write_bytes(b"")
    (root / "secret").write_bytes(b"outside")
    (root / "bucket/leak").symlink_to(root / "secret")


def of_genes(dataset: zl.Dataset, genes: Any) -> zl.Dataset:
    """The dataset, or some of its genes if `genes` are not None."""
    return dataset if genes is None else dataset[:, genes]


def dense(x: Any) -> np.ndarray:
    """The x of a minibatch, in any layout, as a dense array."""
    if isinstance(x, torch.Tensor):
        return x.to_dense().numpy()
    if isinstance(x, zl.PackedRows):
        return x.dense().numpy()
    if isinstance(x, ad.AnnData):
        x = x.X
    return x.toarray() if scipy.sparse.issparse(x) else np.asarray(x)


def plan_of(
    *,
    dataset_rows: int = 0,
    sampling: zl.Sampling,
    batch_size: int,
    fetch_factor: int = 16,
    table: Any = None,
    chosen: RowSet | None = None,
    **options: Any,
) -> Plan:
    """The plan of an epoch in the order of a sampling: of so many rows, a table, or the rows `chosen` from them."""
    table = SimpleNamespace(n_obs=dataset_rows if chosen is None else len(chosen)) if table is None else table
    order = sampling.order(table, int(batch_size), int(batch_size) * int(fetch_factor))
    order = order if chosen is None else chosen.ordered(order)
    return Plan(order=order, batch_size=batch_size, fetch_factor=fetch_factor, **options)


def check_seen_once(plan: Plan, seen: list[int], world_size: int) -> None:
    """Asserts that an epoch that ended on `world_size` ranks had each row once, but for those that it drops."""
    assert len(set(seen)) == len(seen)
    assert plan.n_rows - len(seen) < world_size * (plan.batch_size if plan.drop_last else 1)


def check_minibatch(minibatch: zl.Minibatch, adata: ad.AnnData) -> np.ndarray:
    """Compares the values of a minibatch with the AnnData. Returns its row numbers."""
    rows = minibatch.index.numpy()
    if minibatch.x is not None:
        np.testing.assert_array_equal(dense(minibatch.x), adata.X[rows].toarray())
    for name, values in minibatch.obs.items():
        column = adata.obs[name].iloc[rows]
        wanted = column.cat.codes if isinstance(column.dtype, pd.CategoricalDtype) else column
        if name == "donor":
            wanted = np.searchsorted(np.unique(adata.obs["donor"]), column.to_numpy(str))
        np.testing.assert_array_equal(values.numpy(), np.asarray(wanted))
    return rows


class _WebServer(http.server.ThreadingHTTPServer):
    """Remembers its connections, because clients keep them after the last answer."""

    def __init__(self, handler: Any) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the client has closed its connection
            super().handle_error(request, client_address)


@contextlib.contextmanager
def web_server(handler: Any) -> Iterator[str]:
    """Serves with a handler of `http.server` and yields the URL. The connections end with the server."""
    with _WebServer(handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(PATIENCE_S)
            for connection in server.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def assert_threads_end(prefix: str = "zloader") -> None:
    """Waits until all threads whose names start with `prefix` have ended."""
    deadline = time.monotonic() + PATIENCE_S
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert [thread.name for thread in threads if thread.is_alive()] == []


def assert_same(found: Any, wanted: Any) -> None:
    """Compares tensors, in all bits, and PackedRows and dicts of them."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            assert_same(found[name], value)
    elif isinstance(wanted, zl.PackedRows):
        assert found.shape == wanted.shape
        for part in ("indptr", "genes", "values"):
            assert_same(getattr(found, part), getattr(wanted, part))
    elif wanted.layout == torch.sparse_csr:
        assert found.layout == torch.sparse_csr
        assert found.shape == wanted.shape
        for part in (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values):
            assert_same(part(found), part(wanted))
    else:
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.cpu().view(-1).view(torch.uint8).equal(wanted.cpu().contiguous().view(-1).view(torch.uint8))


def assert_same_minibatches(found: Iterable[zl.Minibatch], wanted: Iterable[zl.Minibatch]) -> None:
    """Compares the minibatches of two epochs, in all bits. They may be on different devices."""
    for one, other in zip(found, wanted, strict=True):
        for part in ("obs", "obsm", "row", "index"):
            assert_same(getattr(one, part), getattr(other, part))
        if other.x is not None:
            assert_same(one.x, other.x)


class InTurn(torch.utils.data.IterableDataset):
    """Named loaders in sequence, so that they share the workers, which may take seconds to start."""

    def __init__(self, loaders: dict[str, Any]) -> None:
        self.loaders = loaders

    def __len__(self) -> int:
        return sum(map(len, self.loaders.values()))

    def __iter__(self) -> Iterator[tuple[str, zl.Minibatch]]:
        for name, loader in self.loaders.items():
            for minibatch in loader:
                yield name, minibatch


def digest(loader: Any) -> str:
    """A hash of all bytes of an epoch, in order."""
    total = hashlib.sha256()
    for minibatch in loader:
        for part in (minibatch.x.crow_indices(), minibatch.x.col_indices(), minibatch.x.values(), minibatch.index):
            total.update(part.numpy().tobytes())
        for column in minibatch.obs.values():
            total.update(column.numpy().tobytes())
        total.update(b"|")
    return total.hexdigest()


def processes_that_name(path: Path) -> list[str]:
    """Command lines of running processes that mention a path."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes()
        except OSError:  # the process has just ended
            continue
        if os.fsencode(path) in line:
            found.append(line.replace(b"\0", b" ").decode())
    return found


def offsets_in_memory(indptr: np.ndarray) -> RowOffsets:
    """Row offsets that nothing has to be read for."""
    return RowOffsets(lambda start, stop: indptr[start:stop], len(indptr), 1, n_values=int(indptr[-1]), where="made up")
