"""What a store holds, and what an epoch of it costs: the arithmetic behind `zloader info`.

The cost is counted, not guessed: the plan's own fetches become chunks, spans and reads by the functions that the
reader uses, with the real shard indexes, which are all that is read for it beside indptr. Walking a fetch takes about
a millisecond for 16 384 rows and one for every 30 shards, so of an epoch of very many fetches only some are walked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from zloader.bridge import Bridge, Put
from zloader.dataset import Dataset
from zloader.errors import FormatError, MissingObjectError
from zloader.layout import ABSENT, ArrayLayout, MatrixLayout, chunk_spans, chunks_of, total_bytes
from zloader.plan import Plan
from zloader.store import ObjectSource
from zloader.terms import FetchOptions, Rows

MOST_FETCHES = 256  # an epoch of more is walked in part: about two seconds of walking
SAMPLED_FETCHES = 4  # each of hundreds of blocks from all over the dataset

Indexes = Mapping[int, NDArray[np.uint64]]
_DEFAULTS = FetchOptions()


@dataclass(frozen=True, kw_only=True)
class EpochCost:
    """GETs and bytes that the values of one epoch take, shard indexes included, as Loader.statistics() counts them.

    `exact` is False where some fetches stand for all; with a mirror the GETs are then an upper bound.
    """

    gets: int
    bytes_read: int
    exact: bool


@dataclass(frozen=True, kw_only=True)
class EpochCosts:
    """One epoch without a mirror, and the first one that fills a mirror; the epochs after that one read nothing."""

    unmirrored: EpochCost
    first_mirrored: EpochCost


def epoch_costs(dataset: Dataset, plan: Plan, *, x: str = "X", options: FetchOptions = _DEFAULTS) -> EpochCosts:
    """Counts the reads that an epoch of `plan` makes for the matrix `x`; reads its indptr and shard indexes.

    Raises FormatError for a matrix that cannot be read, and any ReadError.
    """
    matrix, sizes = dataset.matrix(x), dataset.object_sizes()
    numbers = _walked(plan)
    steps = list(_chunks_by_array(plan, matrix, dataset.indptr(matrix), numbers))
    counts = {True: _Count(), False: _Count()}
    scale = plan.n_fetches / len(numbers) if numbers else 1.0
    for array, wanted in zip(matrix.arrays, zip(*steps, strict=True), strict=True):
        indexes = read_indexes(dataset, array, _shards(array, wanted), options)
        for mirrored, count in counts.items():
            count.add(array, _unseen(array, wanted) if mirrored else wanted, indexes, options)
        touched = [shard for shard in indexes if array.sharded and array.shard_key(shard) in sizes]
        if len(numbers) < plan.n_fetches:  # the fetches not walked touch the other shards, too
            touched = [shard for shard in range(array.n_shards) if array.sharded and array.shard_key(shard) in sizes]
        for count in counts.values():
            count.index_gets += len(touched)
            count.index_bytes += len(touched) * array.index_bytes
    exact = len(numbers) == plan.n_fetches
    unmirrored = counts[False].cost(scale, exact=exact)
    if exact:
        return EpochCosts(unmirrored=unmirrored, first_mirrored=counts[True].cost(1.0, exact=True))
    whole = sum(sizes.get(array.shard_key(shard), 0) for array in matrix.arrays for shard in range(array.n_shards))
    at_most = EpochCost(gets=unmirrored.gets, bytes_read=min(whole, unmirrored.bytes_read), exact=False)
    return EpochCosts(unmirrored=unmirrored, first_mirrored=at_most)


def _walked(plan: Plan) -> Sequence[int]:
    """The fetches to walk: all, or some that are spread evenly; of those only full ones."""
    if plan.n_fetches <= MOST_FETCHES:
        return range(plan.n_fetches)
    return [int(number) for number in np.linspace(0, plan.n_fetches - 2, SAMPLED_FETCHES)]


def _chunks_by_array(
    plan: Plan, matrix: MatrixLayout, indptr: NDArray[np.integer] | None, numbers: Sequence[int]
) -> Iterator[list[Rows]]:
    """For each fetch the chunks that it needs of each array."""
    for number in numbers:
        starts, stops = matrix.elements_of(plan.fetch(number).rows, indptr)
        yield [chunks_of(starts, stops, array.chunk_elements) for array in matrix.arrays]


def _shards(array: ArrayLayout, wanted: Sequence[Rows]) -> list[int]:
    found: list[int] = np.unique(np.concatenate(wanted) // array.chunks_per_shard).tolist()
    return found


def _unseen(array: ArrayLayout, wanted: Sequence[Rows]) -> list[Rows]:
    """The chunks of each fetch that no fetch before it needed: those that are read where a mirror keeps them."""
    seen = np.zeros(array.n_chunks, bool)
    unseen = []
    for chunks in wanted:
        unseen.append(chunks[~seen[chunks]])
        seen[chunks] = True
    return unseen


@dataclass(kw_only=True)
class _Count:
    gets: int = 0
    n_bytes: int = 0
    index_gets: int = 0
    index_bytes: int = 0

    def add(self, array: ArrayLayout, wanted: Sequence[Rows], indexes: Indexes, options: FetchOptions) -> None:
        """Counts the reads that bring the chunks of each fetch."""
        for chunks in wanted:
            spans, _ = chunk_spans(
                array, chunks, indexes, gap_bytes=options.gap_bytes, max_read_bytes=options.max_read_bytes
            )
            self.gets += len(spans)
            self.n_bytes += total_bytes(spans)

    def cost(self, scale: float, *, exact: bool) -> EpochCost:
        """The whole epoch's cost, where what was walked is 1 / `scale` of it."""
        return EpochCost(
            gets=round(self.gets * scale) + self.index_gets,
            bytes_read=round(self.n_bytes * scale) + self.index_bytes,
            exact=exact,
        )


def read_indexes(
    dataset: Dataset, array: ArrayLayout, shards: Sequence[int], options: FetchOptions = _DEFAULTS
) -> dict[int, NDArray[np.uint64]]:
    """The index of each shard: offset and size of its chunks. One GET each, none for arrays without shards.

    Raises MissingObjectError for a shard that must be there, and any ReadError.
    """
    sizes = {shard: dataset.object_sizes().get(array.shard_key(shard)) for shard in shards}
    indexes: dict[int, NDArray[np.uint64]] = {}
    there = {}
    for shard, size in sizes.items():
        if size is None and not array.absent_is_fill:
            raise MissingObjectError(
                f"{array.shard_key(shard)} is not in the store: it is incomplete. Convert it again"
            )
        if size is None:
            indexes[shard] = np.full((array.chunks_per_shard, 2), ABSENT, np.uint64)
        elif array.sharded:
            there[shard] = size
        else:
            indexes[shard] = np.array([[0, size]], np.uint64)
    spans = [array.index_span(shard, size) for shard, size in there.items()]
    source = ObjectSource(dataset.location, options)

    async def produce(put: Put[list[bytes]]) -> None:
        await put([await source.read(spans)], 0)

    (stored,) = Bridge(produce, ready_bytes=1, name="zloader-indexes") if spans else ([],)
    for (shard, size), body in zip(there.items(), stored, strict=True):
        indexes[shard] = array.parse_index(body, shard=shard, object_size=size)
    return indexes


# ---- what a store holds


@dataclass(frozen=True, kw_only=True)
class ArraySummary:
    """One array of a matrix. `stored_bytes` are its objects', `decoded_bytes` what a mirror of it takes."""

    path: str
    dtype: str
    original_dtype: str
    elements: int
    chunk_elements: int
    rows_per_chunk: float
    chunks_per_shard: int
    shards: int
    stored_bytes: int
    decoded_bytes: int
    codecs: str


@dataclass(frozen=True, kw_only=True)
class MatrixSummary:
    """One matrix: X, a layer or raw/X. `values` are those stored; `problem` says why it cannot be read, if so."""

    name: str
    encoding: str
    rows: int
    genes: int
    values: int
    density: float
    arrays: Sequence[ArraySummary]
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class ColumnSummary:
    """One obs column: `kind` is `categorical`, `string` or a dtype; `categories` is None where it has none."""

    name: str
    kind: str
    categories: int | None


@dataclass(frozen=True, kw_only=True)
class StoreSummary:
    """What a store holds. `others` names obsm, varm and the like as `obsm/X_pca`."""

    url: str
    fingerprint: str
    rows: int
    genes: int
    objects: int
    stored_bytes: int
    obs: Sequence[ColumnSummary]
    matrices: Sequence[MatrixSummary]
    others: Sequence[str]


def summarize(dataset: Dataset) -> StoreSummary:
    """What the store holds, from its metadata alone."""
    root: Any = zarr.open_group(dataset.location.zarr_store(read_only=True), mode="r")
    names = [name for name in ("X", "raw/X") if name in root]
    names += [f"layers/{layer}" for layer in sorted(root.get("layers", {}))]
    sizes = dataset.object_sizes()
    return StoreSummary(
        url=dataset.location.url,
        fingerprint=dataset.fingerprint,
        rows=dataset.n_obs,
        genes=dataset.n_vars,
        objects=len(sizes),
        stored_bytes=sum(sizes.values()),
        obs=[_column(name, root[f"obs/{name}"]) for name in dataset.obs_columns],
        matrices=[_matrix(dataset, name, root[name]) for name in names],
        others=[f"{group}/{key}" for group in _OTHERS for key in sorted(root.get(group, {}))],
    )


_OTHERS = ("obsm", "varm", "obsp", "varp", "uns")


def _column(name: str, node: Any) -> ColumnSummary:
    encoding = str(node.attrs.get("encoding-type", "array"))
    if encoding == "categorical":
        return ColumnSummary(name=name, kind="categorical", categories=int(node["categories"].shape[0]))
    if "string" in encoding:
        return ColumnSummary(name=name, kind="string", categories=None)
    values = node if isinstance(node, zarr.Array) else node.get("values")
    kind = encoding if values is None else str(values.dtype)
    return ColumnSummary(name=name, kind=kind, categories=None)


def _matrix(dataset: Dataset, name: str, node: Any) -> MatrixSummary:
    encoding = "dense" if isinstance(node, zarr.Array) else str(node.attrs.get("encoding-type"))
    rows, genes = (int(size) for size in (node.shape if encoding == "dense" else node.attrs["shape"]))
    arrays: list[ArraySummary] = []
    problem = None
    values = rows * genes if encoding == "dense" else int(node["data"].shape[0])
    try:
        layout = dataset.matrix(name)
    except FormatError as error:
        problem = str(error)
    else:
        recorded = node.attrs.get("zloader", {}).get("dtype", {})
        arrays = [_array(dataset, array, rows, recorded) for array in layout.arrays]
    return MatrixSummary(
        name=name,
        encoding=encoding,
        rows=rows,
        genes=genes,
        values=values,
        density=values / (rows * genes) if rows * genes else 0.0,
        arrays=arrays,
        problem=problem,
    )


def _array(dataset: Dataset, array: ArrayLayout, rows: int, recorded: Mapping[str, str]) -> ArraySummary:
    sizes = dataset.object_sizes()
    part = "indices" if array.path.endswith("/indices") else "data"
    return ArraySummary(
        path=array.path,
        dtype=array.dtype.name,
        original_dtype=str(recorded.get(part, array.dtype.name)),
        elements=array.n_elements,
        chunk_elements=array.chunk_elements,
        rows_per_chunk=array.chunk_elements * rows / array.n_elements if array.n_elements else 0.0,
        chunks_per_shard=array.chunks_per_shard,
        shards=array.n_shards,
        stored_bytes=sum(sizes.get(array.shard_key(shard), 0) for shard in range(array.n_shards)),
        decoded_bytes=array.n_elements * array.dtype.itemsize,
        codecs=", ".join(map(_codec, array.codecs)),
    )


def _codec(codec: Mapping[str, Any]) -> str:
    """`blosc(lz4, shuffle)` or the codec's bare name."""
    settings = codec.get("configuration") or {}
    if codec["name"] == "blosc":
        return f"blosc({settings['cname']}, {settings['shuffle']})"
    return str(codec["name"])
