"""The models of scvi-tools train and predict from a dataset, set up as for an AnnData in memory.

`as_anndata` makes an AnnData with the obs of all rows, whose matrices stay in the store. scvi-tools sets it up, encodes
its columns, splits its rows, and loads and saves models of it, all by its own code. `attach` replaces two attributes of
a model, through which it reads minibatches: a Loader gathers the matrices, and scvi-tools' own torch dataset adds the
other fields of these rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse
import torch
from numpy.typing import NDArray

try:
    from scvi.dataloaders import AnnDataLoader
    from scvi.model import TOTALVI
except ImportError as error:
    raise ImportError(f'zloader.integrations.scvi needs scvi-tools ({error}): pip install "zloader[scvi]"') from error

from zloader.common.checks import names_of
from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.common.locks import cached_property
from zloader.common.machine import require_memory
from zloader.common.options import FetchOptions
from zloader.common.records import CsrArrays, Rows
from zloader.dataset.dataset import Dataset, require_dataset
from zloader.dataset.elements import load_anndata, modality_of
from zloader.dataset.matrices import as_scipy, used_categories
from zloader.dataset.views import Condition
from zloader.integrations.lightning import EvaluationEpochs, TrainingEpochs, rank_of
from zloader.order.sampling import Sampling
from zloader.selecting.rows import positions_of
from zloader.training.arrays import PackedRows
from zloader.training.loader import Loader
from zloader.training.minibatch import Minibatch
from zloader.transforms.transform import Transforms

__all__ = ["as_anndata", "attach"]

Tensors = dict[str, Any]

# What scvi-tools and its users give to data loaders, and a Loader does not need.
_WITHOUT_EFFECT = ("num_workers", "persistent_workers", "pin_memory", "distributed_sampler", "drop_dataset_tail")
_ALONE = {"rank": 0, "world_size": 1}  # options of a Loader for all rows in one process
_FEW = 20  # rows that are looked at to see whether they are counts
_BLOCK = 2**28  # bytes of rows that are summed at once


class _Dense(np.ndarray[Any, Any]):
    """Rows of a dense matrix, with the methods of sparse ones that scvi-tools calls. Results are plain arrays."""

    def toarray(self) -> NDArray[Any]:
        return np.asarray(self)

    def multiply(self, other: Any) -> Any:
        return np.asarray(self) * other

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else np.array(array, copy=None)


class StoredRows(scipy.sparse.csr_matrix):  # type: ignore[misc]
    """A matrix of a dataset in the place of one in memory. `matrix[rows]` reads these rows; the rest is not there."""

    nnz = 1  # scvi-tools takes a matrix without any value for that of a minified AnnData

    def __init__(self, dataset: Dataset, name: str) -> None:
        self.dataset, self.name = dataset, name
        self._shape = (dataset.n_obs, dataset.matrices.n_genes(name))

    @cached_property
    def data(self) -> NDArray[Any]:
        """The values of the first rows, in which scvi-tools looks for values that are no counts."""
        first = self[:_FEW]
        return np.asarray(first.data if scipy.sparse.issparse(first) else first).ravel()

    def __repr__(self) -> str:
        return f"{self.name} of {self.dataset.url}, {self.shape[0]} x {self.shape[1]}, in the store"

    __str__ = __repr__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self.__dict__.get('name')} stays in the store, and has no {name}: take some of its rows, x[rows]"
        )

    def __getitem__(self, key: Any) -> Any:
        rows, columns = key if isinstance(key, tuple) else (key, slice(None))
        found = positions_of(rows if isinstance(rows, slice) else np.ravel(rows), self.shape[0], pd.Index)
        n_bytes = int(len(found) * self.dataset.matrices.row_bytes(self.name))
        require_memory(n_bytes, f"{len(found)} rows of {self.name} in memory", "give the model fewer rows at once")
        x = self.dataset.read_rows(found, x=self.name)
        x = as_scipy(x) if isinstance(x, CsrArrays) else x.view(_Dense)
        return x[:, columns if isinstance(columns, slice) else np.ravel(columns)]

    def sum(self, axis: int | None = None, **options: Any) -> Any:
        """The sums of rows, with axis=1 or -1. scvi-tools normalises the counts of differential_expression by them."""
        if axis not in (1, -1):
            return super().sum(axis, **options)
        size = max(1, int(_BLOCK / max(1, self.dataset.matrices.row_bytes(self.name))))
        blocks = (self[first : first + size] for first in range(0, self.shape[0], size))
        sums = [np.asarray(block.sum(axis=1)).ravel() for block in blocks]
        return np.concatenate(sums or [np.zeros(0)])[:, None]

    def toarray(self, *_: Any, **__: Any) -> NDArray[Any]:
        """All rows, if they fit in memory."""
        return np.asarray(self[:].toarray())

    def copy(self) -> StoredRows:
        """The matrix itself, because nothing changes it."""
        return self


@answers
def as_anndata(dataset: Dataset, obs: Sequence[str] | None = None, *, obsm: Sequence[str] = (), x: str = "X") -> Any:
    """An AnnData of all rows for scvi-tools, whose X and layers stay in the store. A MuData, if there are modalities.

    >>> import zloader as zl
    >>> from scvi.model import SCVI
    >>> from zloader.integrations.scvi import as_anndata, attach
    >>> adata = as_anndata(zl.open_dataset("cells.zarr"), obs=["donor", "cell_type"])
    >>> SCVI.setup_anndata(adata, batch_key="donor", labels_key="cell_type")
    >>> model = attach(SCVI(adata))
    >>> model.train(max_epochs=2)
    >>> latent = model.get_latent_representation()
    >>> model.save("model")
    >>> model = attach(SCVI.load("model", adata))

    - `dataset`: a Dataset or a View. A panel, `dataset[:, genes]`, has the genes of the model.
    - `obs`: names of the obs columns that the model needs. They are in memory for all rows. Default: all columns.
    - `obsm`: names of obsm arrays to have in memory, too.
    - `x`: the matrix that becomes X, such as `"raw/X"`. Layers stay layers: `setup_anndata(adata, layer="counts")`.

    Categories that no row has are left out. `adata.X[rows]` reads rows of the store. Rows that a modality lacks are
    zeros there. Raises OptionError or MissingColumnError.
    """
    require_dataset(dataset)
    frame = used_categories(dataset.obs(None if obs is None else names_of(obs=obs)))
    arrays = {name: dataset.obsm_array(name) for name in names_of(obsm=obsm)}
    if not dataset.modalities:
        return _part(dataset, frame, "", x, arrays)
    import mudata

    if arrays or x != "X":
        raise OptionError(
            f"the modalities of {dataset.url} have matrices and arrays of their own: leave x and obsm out"
        )
    frame.index = pd.Index(load_anndata().utils.make_index_unique(frame.index))
    store = dataset.stores[0]
    owner = {name: store.modality_at(store.obs_paths[name]) for name in frame}
    parts: dict[str, Any] = {}
    for each in dataset.modalities:
        of_part = {name.removeprefix(f"{each}:"): frame[name] for name in frame if owner[name] == each}
        parts[each] = _part(dataset, pd.DataFrame(of_part, index=frame.index), f"{each}:", "X", {})
    made = mudata.MuData(parts)
    for name in frame:
        if owner[name] is None:
            made.obs[name] = frame[name]
    return made


def _part(dataset: Dataset, obs: pd.DataFrame, prefix: str, x: str, obsm: dict[str, Any]) -> Any:
    """An AnnData of the matrix `x` and, if it is X, of the layers, of a modality or of the whole."""
    layers = [name for name in dataset.matrix_names if name.startswith(f"{prefix}layers/") and x == "X"]
    has_x = x != "X" or f"{prefix}X" in dataset.matrix_names
    var = dataset.matrices.var_of(f"{prefix}{x}" if has_x else layers[0])
    adata = load_anndata().AnnData(
        StoredRows(dataset, f"{prefix}{x}") if has_x else None, obs, var[[]], obsm=obsm, shape=None
    )
    for name in layers:
        adata.layers[name.removeprefix(f"{prefix}layers/")] = StoredRows(dataset, name)
    return adata


@answers
def attach(
    model: Any,
    *,
    validation: Dataset | Condition | None = None,
    seed: int = 0,
    fetch_factor: int = 256,
    sampling: Sampling | str | None = None,
    transforms: Transforms = (),
    options: FetchOptions | None = None,
) -> Any:
    """The model of scvi-tools itself, which reads the matrices of `as_anndata` with Loaders from now on.

    Call it after a model was made, loaded, or made of another, and before it trains or predicts. Everything else is as
    with an AnnData in memory: `train` splits the rows as scvi-tools does, and methods return values of all rows, or of
    `indices`, in their order. SCANVI trains with pairs of minibatches, of any rows and of labelled rows. A model
    that was not attached computes the same, but reads row by row.

    - `validation`: the rows for validation, instead of the split of `train`: a view of the dataset, such as
      `dataset.split([0.9, 0.1], by="donor")[1]`, or a condition, such as `"donor == 'd1'"`. Others are for training.
    - `seed`: decides the order of the rows. Each further training has orders of its own.
    - `fetch_factor`, `sampling`, `transforms`, `options`: as in zl.Loader.

    Under several processes, each reads its own rows. A minibatch of a single row, with which batch normalisation cannot
    train, does not occur: if there would be one, other rows are left out in each epoch. Raises OptionError.
    """
    manager = getattr(model, "adata_manager", None)
    if manager is None or not _stored(manager):
        raise OptionError(
            "attach takes a model of scvi-tools whose AnnData as_anndata made, with a matrix in the store"
        )
    dataset = _dataset_of(manager)
    held_out = None if validation is None else dataset.rows_of(validation).mask()
    if isinstance(model, TOTALVI):
        _require_every_modality(manager, dataset)
    of_loaders: dict[str, Any] = {"seed": seed, "fetch_factor": fetch_factor, "sampling": sampling}
    of_loaders |= {"transforms": transforms, "options": options or FetchOptions()}
    _loader(manager, np.arange(dataset.n_obs), batch_size=2, device=torch.device("cpu"), **_ALONE, **of_loaders)
    model._data_loader_cls = functools.partial(_in_order, model, {**of_loaders, "sampling": None})
    model._data_splitter_cls = _splitter(type(model)._data_splitter_cls, held_out, of_loaders)
    return model


def _stored(manager: Any) -> dict[str, StoredRows]:
    """The fields of a model that are in a store, by their keys in its registry."""
    fields = {key: manager.get_from_registry(key) for key in manager.data_registry}
    return {key: value for key, value in fields.items() if isinstance(value, StoredRows)}


def _dataset_of(manager: Any) -> Dataset:
    return next(iter(_stored(manager).values())).dataset


def _require_every_modality(manager: Any, dataset: Dataset) -> None:
    modalities = list(dict.fromkeys(filter(None, (modality_of(each.name) for each in _stored(manager).values()))))
    for modality in modalities:
        lacking = np.flatnonzero(~dataset.present(modality))
        if len(lacking):
            raise OptionError(
                f"TOTALVI learns from rows that have every modality, but {len(lacking)} of {dataset.n_obs} rows have "
                f"no {modality}, such as row {lacking[0]}: take the others with "
                f"dataset.where({' & '.join(f'dataset.present({each!r})' for each in modalities)})"
            )


# ---- minibatches


@dataclass(frozen=True, kw_only=True)
class _Encoder:
    """Makes scvi-tools' tensors of a minibatch, in the threads that gather it. Packed rows become dense later."""

    fields: Any  # scvi-tools' torch dataset of what is in memory
    rows: Rows
    matrices: dict[str, str]  # the name of each matrix by its key in the registry
    pinned: bool

    def __call__(self, minibatch: Minibatch) -> Tensors:
        found = self.fields[self.rows[minibatch.row.numpy()]]
        tensors: Tensors = {key: torch.from_numpy(values) for key, values in found.items()}
        tensors |= {key: minibatch.x[name] for key, name in self.matrices.items()}
        return {key: value.pin_memory() for key, value in tensors.items()} if self.pinned else tensors


def _loader(manager: Any, rows: Rows, *, batch_size: int, device: torch.device, **options: Any) -> Loader:
    """A Loader of some rows, in ascending order, whose minibatches are tensors by their keys in the registry."""
    dataset, matrices = _dataset_of(manager), {key: each.name for key, each in _stored(manager).items()}
    in_memory = [key for key in manager.data_registry if key not in matrices]
    return Loader(
        dataset if len(rows) == dataset.n_obs else dataset.where(rows),
        x=list(dict.fromkeys(matrices.values())),
        batch_size=batch_size,
        layout="dense" if device.type == "cpu" else "packed",
        batch_transform=_Encoder(
            fields=manager.create_torch_dataset(data_and_attributes=in_memory),
            rows=rows,
            matrices=matrices,
            pinned=device.type == "cuda",
        ),
        **options,
    )


def _moved(batch: Any, device: torch.device) -> Any:
    """A minibatch, or a pair of them, on a device, with dense rows."""
    if not isinstance(batch, dict):
        return batch if batch is None else [_moved(each, device) for each in batch]
    beside = device.type != "mps"  # where such copies race
    found = {key: value.to(device, non_blocking=beside) for key, value in batch.items()}
    return {key: value.dense() if isinstance(value, PackedRows) else value for key, value in found.items()}


class _Predictions(EvaluationEpochs):
    """Rows in order, on the device of the model: methods of scvi-tools apply no hook of a data module."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        super().__init__(loader)
        self._device = device

    def __iter__(self) -> Iterator[Tensors]:
        torch.empty((), dtype=torch.int64).random_()  # as torch's DataLoader, so that draws are those of an AnnData
        return (_moved(each, self._device) for each in super().__iter__())


def _in_order(model: Any, options: Any, manager: Any, *, indices: Any, batch_size: int, **more: Any) -> Any:
    """What the methods of a model read: a Loader, or scvi-tools' own data loader for other AnnDatas and orders."""
    rows = np.asarray(indices)
    rows = np.flatnonzero(rows) if rows.dtype == bool else rows
    wanted = {name for name, value in more.items() if value and name not in _WITHOUT_EFFECT}
    if not _stored(manager) or not len(rows) or wanted or (np.diff(rows) <= 0).any():
        return AnnDataLoader(manager, indices=rows, batch_size=batch_size, **more)
    options = options | {"shuffle": False, **_ALONE}
    return _Predictions(_loader(manager, rows, batch_size=batch_size, device=model.device, **options), model.device)


class _Paired:
    """Adds a minibatch of labelled rows to each, for the classifier of SCANVI. These rows go on in epochs of their own.

    The labelled epochs begin anew with each epoch, so that their position follows from that of the epoch.
    """

    def __init__(self, *of_epochs: Any, labelled: Any) -> None:
        super().__init__(*of_epochs)
        self._labelled = labelled  # makes the Loader of an epoch of labelled rows; None if there are none

    def resample_labels(self) -> None:
        """Nothing: each epoch of labelled rows draws its own."""

    def __iter__(self) -> Iterator[list[Tensors | None]]:
        others: Iterator[Tensors | None] | None = None
        for minibatch in super().__iter__():  # type: ignore[misc]
            others = others or self._others()
            yield [minibatch, next(others)]

    def _others(self) -> Iterator[Tensors | None]:
        if self._labelled is None:
            yield from itertools.repeat(None)
        loader: Any = self._loader  # type: ignore[attr-defined]
        of_epoch = len(self._labelled(0))
        number, done = divmod(getattr(self, "_steps_before", 0), of_epoch)
        first = loader.statistics().epoch * -(-len(loader) // of_epoch)
        for epoch in itertools.count(first + number):
            labelled = self._labelled(epoch)
            labelled.set_epoch(epoch)
            yield from itertools.islice(labelled, done, None)
            done = 0


class _TrainingPairs(_Paired, TrainingEpochs):
    pass


class _EvaluationPairs(_Paired, EvaluationEpochs):
    pass


def _splitter(base: Any, held_out: NDArray[np.bool_] | None, options: dict[str, Any]) -> Any:
    """A class that splits rows as the one of scvi-tools, `base`, and reads them with Loaders."""
    trainings = itertools.count()

    class Splitter(base):  # type: ignore[misc]
        train_idx: Rows
        val_idx: Rows
        test_idx: Rows

        def __init__(self, manager: Any = None, *, adata_manager: Any = None, **split: Any) -> None:
            if held_out is not None:
                given = [name for name in ("validation_size", "external_indexing") if split.get(name) is not None]
                given += ["train_size"] if split.get("train_size") not in (None, 0.9) else []  # the default of SCANVI
                if given:
                    raise OptionError(f"attach(validation=...) gives the rows for validation: leave {given[0]} out")
                split["external_indexing"] = [np.flatnonzero(~held_out), np.flatnonzero(held_out)]
            super().__init__(manager or adata_manager, **split)
            self._training = next(trainings)

        def setup(self, stage: str | None = None) -> None:
            super().setup(stage)
            if self.trainer is not None:  # each rank has drawn a split of its own, unless scvi.settings.seed is set
                split = self.train_idx, self.val_idx, self.test_idx
                self.train_idx, self.val_idx, self.test_idx = self.trainer.strategy.broadcast(split)

        def train_dataloader(self) -> Any:
            rows = np.sort(self.train_idx)
            loader = self._shuffled(rows)
            if not self._pairs:
                return TrainingEpochs(loader, self.trainer)
            if not len(labelled := self._labelled(rows)):
                raise OptionError(
                    f"none of the {len(rows)} rows for training has a label, but SCANVI learns from labelled rows: "
                    "split in another way, or train SCVI, which needs none"
                )
            return _TrainingPairs(loader, self.trainer, labelled=functools.partial(self._epoch_of, labelled))

        def val_dataloader(self) -> Any:
            return self._evaluated(self.val_idx)

        def test_dataloader(self) -> Any:
            return self._evaluated(self.test_idx)

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return _moved(batch, device)

        def state_dict(self) -> dict[str, Any]:
            return {"training": self._training}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self._training = state["training"]

        @property
        def _pairs(self) -> bool:
            return "n_samples_per_label" in self.data_loader_kwargs  # where rows are labelled, for SCANVI

        def _labelled(self, rows: Rows) -> Rows:
            return np.intersect1d(rows, self._labeled_indices)

        def _epoch_of(self, labelled: Rows, epoch: int) -> Loader:
            most = self.data_loader_kwargs["n_samples_per_label"]
            if most is not None:
                codes = self.adata_manager.get_from_registry("labels")[labelled].ravel()
                random = np.random.default_rng([options["seed"], self._training, epoch])
                drawn = [random.permutation(labelled[codes == code])[:most] for code in np.unique(codes)]
                labelled = np.sort(np.concatenate(drawn))
            return self._shuffled(labelled)

        def _evaluated(self, rows: Rows) -> Any:
            rows = np.sort(rows)
            if not len(rows):
                return []
            loader = self._made(rows, shuffle=False, sampling=None)
            if not self._pairs:
                return EvaluationEpochs(loader)
            labelled = self._labelled(rows)
            again = functools.partial(self._made, labelled, shuffle=False, sampling=None)
            return _EvaluationPairs(loader, labelled=(lambda _: again()) if len(labelled) else None)

        def _shuffled(self, rows: Rows) -> Loader:
            """The rows in a new order each epoch, in minibatches of more than one row."""
            loader = self._made(rows, drop_last=bool(self.drop_last))
            ranks = loader.plan(0).world_size
            if loader.drop_last or not 0 < len(rows) % (loader.batch_size * ranks) < 2 * ranks:
                return loader
            if len(rows) < loader.batch_size * ranks:
                raise OptionError(
                    f"batch normalisation trains on 2 rows or more, and there are {len(rows)} for {ranks} ranks: "
                    "choose more rows for training"
                )
            return self._made(rows, drop_last=True)

        def _made(self, rows: Rows, **more: Any) -> Loader:
            made = options | {"seed": options["seed"] + self._training} | rank_of(self.trainer) | more
            device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
            return _loader(
                self.adata_manager, rows, batch_size=self.data_loader_kwargs["batch_size"], device=device, **made
            )

    Splitter.__name__ = Splitter.__qualname__ = base.__name__  # by which scvi-tools knows it, and Lightning its state
    return Splitter
