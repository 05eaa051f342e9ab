"""`zr.read`: the rows of a dataset as a ray.data.Dataset. Its read tasks are stretches of a Loader's plan."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from zloader.common.checks import names_of, require_whole
from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.common.locks import cached_property
from zloader.common.records import CsrArrays, MinibatchArrays, Rows
from zloader.dataset.dataset import Dataset
from zloader.order.plan import Fetch, Plan
from zloader.order.sampling import Sampling
from zloader.ray.producers import pickled, unpickled
from zloader.ray.tables import table_of
from zloader.reading.column_rows import rows_of
from zloader.reading.fetch import FetchScheduler
from zloader.reading.resources import BufferPool
from zloader.selecting.groups import shares
from zloader.training.loader import Loader

_GROUPS = ("obs/", "obsm/")
_MOST_TASKS = 200  # as many blocks as Ray Data makes of a read by default
_MOST_COUNTED = 1024  # fetches whose bytes are counted row by row, which takes 7 ms for each


@answers
def read(
    dataset: Dataset,
    *,
    fields: Sequence[str] = ("X",),
    epoch: int = 0,
    ray_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The rows of a dataset as a `ray.data.Dataset`, for `map_batches`, `streaming_split` and `iter_torch_batches`.

    >>> ds = zr.read(dataset, fields=["X", "obs/cell_type", "obsm/X_pca"], shuffle=False)  # doctest: +SKIP
    >>> ds.count()  # doctest: +SKIP
    8000000

    The column `index` has the row numbers in the dataset. A CSR matrix `X` is two columns of lists, `X/genes` (int32,
    ascending) and `X/values`. With `layout="dense"` it is a tensor column `X`. Obs columns have the numbers that
    minibatches have: categories and strings are codes (int64), and `dataset.obs_column(name).labels` are their labels.
    With matrices or obsm arrays of modalities, the column `present/rna` says which rows the modality rna has (bool).
    `zr.Collate` makes torch tensors of these columns, for `iter_torch_batches(collate_fn=...)`.

    Each read task makes some consecutive fetches of the plan, and yields a block of `batch_size` rows after another. A
    task that is retried makes the same blocks. The numbers of rows are exact before anything is read. So are the bytes
    of up to 1 024 fetches, unless `genes`, a panel or `transforms` change how many values a row has. Others are
    estimated.

    Args:
        dataset: a Dataset or a View.
        fields: matrices (`"X"`, `"layers/NAME"`, `"raw/X"`, `"rna:X"`), `"obs/NAME"`, `"obsm/NAME"` and `"obs_names"`.
        epoch: which epoch of the order.
        ray_options: of `ray.data.read_datasource`, such as `{"num_cpus": 2, "override_num_blocks": 64}`. Default: one
            task per fetch, and at most 200.
        options: those of a Loader that decide rows, their order and x: `batch_size` (default: 1 024), `fetch_factor`
            (default: 16), `sampling`, `shuffle`, `seed`, `drop_last`, `genes`, `layout` ("csr" or "dense"), `dtype`,
            `transforms`, `rank`, `world_size` and `options`.

    Raises OptionError, MissingColumnError or FormatError. Reading raises any ReadError, in Ray's error for tasks.
    """
    source = PlanDatasource(_loader_of(dataset, names_of(fields=fields), options), epoch)
    ray_options = {"override_num_blocks": min(_MOST_TASKS, source.n_fetches), **(ray_options or {})}
    return ray.data.read_datasource(source, **ray_options)


def _loader_of(dataset: Dataset, fields: Sequence[str], options: Mapping[str, Any]) -> Loader:
    refused = options.keys() & {"x", "obs", "obsm", "obs_names", "tokens", "device", "fetch_transform"}
    refused |= options.keys() & {"batch_transform", "locality", "local_world_size", "parts", "redeal", "remainder"}
    if refused:
        raise OptionError(f"zr.read does not take {sorted(refused)[0]}=: it reads columns, named by fields=")
    sampling = options.get("sampling")
    if (
        options.get("controls") is not None
        or options.get("neighbors") is not None
        or (isinstance(sampling, Sampling) and sampling.set_size is not None)
    ):
        raise OptionError("zr.read has no sets, controls or neighbours, which are parts of minibatches: take zr.stream")
    groups = {group: [name.removeprefix(group) for name in fields if name.startswith(group)] for group in _GROUPS}
    matrices = [name for name in fields if name != "obs_names" and not name.startswith(_GROUPS)]
    options = {"batch_size": 1024, "fetch_factor": 16, "rank": 0, "world_size": 1} | dict(options)
    if options.get("layout", "csr") not in ("csr", "dense") or "bfloat16" in str(options.get("dtype")):
        raise OptionError("zr.read has layout 'csr' or 'dense', and no bfloat16, which Arrow cannot hold")
    return Loader(
        dataset,
        x=matrices or None,
        obs=groups["obs/"],
        obsm=groups["obsm/"],
        obs_names="obs_names" in fields,
        **options,
    )


class PlanDatasource(Datasource):  # type: ignore[misc]
    """Reads the epoch of a Loader, whose read tasks are stretches of its plan."""

    def __init__(self, loader: Loader, epoch: int) -> None:
        super().__init__()
        require_whole(0, epoch=epoch)
        self._loader = loader
        self._plan = loader.plan(epoch)
        self._shared = ray.put(pickled((loader, self._plan)))

    @property
    def n_fetches(self) -> int:
        """Fetches of the plan."""
        return self._plan.n_fetches

    def get_name(self) -> str:
        """The name of the read in Ray's progress bars."""
        return "Zloader"

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all blocks."""
        return sum(self._fetch_bytes)

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, **_: Any) -> list[ReadTask]:
        """At most `parallelism` tasks, each with consecutive fetches."""
        n_tasks = max(1, min(parallelism, self.n_fetches))
        bounds = [task * self.n_fetches // n_tasks for task in range(n_tasks + 1)]
        urls = tuple(store.location.url for store in self._loader.dataset.stores)
        tasks = []
        for first, last in itertools.pairwise(bounds):
            metadata = BlockMetadata(
                num_rows=sum(self._plan.n_positions(number) for number in range(first, last)),
                size_bytes=sum(self._fetch_bytes[first:last]),
                exec_stats=None,
                input_files=urls,
            )
            read_fn = functools.partial(_read, self._shared, first, last)
            tasks.append(ReadTask(read_fn, metadata, self._schema, per_task_row_limit))
        return tasks

    @cached_property
    def _schema(self) -> pa.Schema:
        return table_of(_no_rows(self._loader)).schema

    @cached_property
    def _fetch_bytes(self) -> list[int]:
        """The bytes of the blocks of each fetch."""
        plan, count = self._plan, RowBytes(self._loader)
        if self.n_fetches <= _MOST_COUNTED:
            return [count.of(plan.fetch(number)) for number in range(self.n_fetches)]
        few = np.linspace(0, self.n_fetches - 1, 16).astype(int).tolist()
        mean = sum(count.of(plan.fetch(number)) for number in few) / sum(map(plan.n_positions, few))
        return [int(mean * plan.n_positions(number)) for number in range(self.n_fetches)]


class RowBytes:
    """Counts the bytes of the blocks of fetches, from the lengths of rows. Reads indptr."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._dataset = loader, loader.dataset.whole
        self._fixed = table_of(_no_rows(loader))
        self._ends = np.cumsum([store.n_obs for store in self._dataset.stores], dtype=np.int64)

    def of(self, fetch: Fetch) -> int:
        """Bytes of all columns, as `nbytes` of Arrow counts them: with one offset per row."""
        n_rows, total = len(fetch.order), 0
        for name in self._fixed.column_names:
            kind = self._fixed.schema.field(name).type
            if pa.types.is_list(kind):
                n_values = self._n_values(name.rpartition("/")[0], fetch.rows)
                total += 4 * n_rows + n_values * kind.value_type.bit_width // 8
            elif pa.types.is_string(kind):
                names = self._dataset.names_of(fetch.rows[fetch.order])
                total += 4 * n_rows + sum(len(each.encode()) for each in names)
            elif pa.types.is_boolean(kind):
                total += sum(-(-int(rows) // 8) for rows in np.diff(fetch.cuts))
            else:
                total += n_rows * _width(kind)
        return int(total)

    def _n_values(self, matrix: str, rows: Rows) -> int:
        total = 0
        layouts = self._dataset.matrices.layouts(matrix)
        for number, at in shares(self._ends, rows):
            layout, store = layouts[number], self._dataset.stores[number]
            of_matrix = store.rows_in(layout.path, rows[at] - (self._ends[number] - store.n_obs))
            starts, stops = layout.elements_of(of_matrix, store.offsets(layout))
            total += int((stops - starts).sum())
        return total


def _width(kind: pa.DataType) -> int:
    """Bytes of a value of a fixed width."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return int(np.prod(kind.shape)) * int(kind.value_type.bit_width) // 8
    return int(kind.bit_width) // 8


def _no_rows(loader: Loader) -> MinibatchArrays:
    """A minibatch of no rows, with the dtypes of all others."""
    recipe, none = loader.recipes().recipe(0), np.empty(0, np.int64)
    x: dict[str, Any] = {}
    for name, parts in recipe.x.items():
        dtype, transforming = np.dtype(str(recipe.form.dtype)), recipe.transforms.get(name)
        later = None if transforming is None else transforming.genes  # chosen after the transforms
        n_genes = parts[0].n_columns if later is None else len(later)
        x[name] = np.empty((0, n_genes), dtype)
        if not recipe.form.dense:
            x[name] = CsrArrays(
                indptr=np.zeros(1, np.int32),
                indices=np.empty(0, np.int32),
                values=np.empty(0, dtype),
                n_genes=n_genes,
            )
    return MinibatchArrays(
        x=x,
        obs={name: rows_of(column, none, {}) for name, column in recipe.columns.obs().items()},
        obsm={name: rows_of(array, none, {}) for name, array in recipe.columns.obsm().items()},
        index=none,
        names=None if recipe.columns.names is None else np.empty(0, object),
        present={modality: has[none] for modality, has in recipe.columns.present.items()},
    )


class _Opened:
    """The loader, the plan and the memory that the tasks of a read share in one process."""

    last: tuple[str, Loader, Plan, BufferPool] | None = None

    @classmethod
    def of(cls, reference: Any) -> tuple[Loader, Plan, BufferPool]:
        """Opens them, unless the last task in this process has done it."""
        key = reference.hex()
        if cls.last is None or cls.last[0] != key:
            cls.last = key, *unpickled(ray.get(reference)), BufferPool()
        return cls.last[1:]


def _read(reference: Any, first: int, last: int) -> Iterator[pa.Table]:
    """The blocks of the fetches `[first, last)`."""
    loader, plan, buffers = _Opened.of(reference)
    options = replace(loader.options, threads=_task_threads(loader))
    scheduler = FetchScheduler(loader.recipes().recipe(plan.epoch), options, buffers)
    blocks = scheduler.start(map(plan.fetch, range(first, last)), name="zloader-fetch")
    with contextlib.closing(blocks):
        for arrays in blocks:
            yield table_of(arrays)


def _task_threads(loader: Loader) -> int:
    """As many threads as this task has cores."""
    cores = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    return max(1, min(int(cores), loader.options.threads))
