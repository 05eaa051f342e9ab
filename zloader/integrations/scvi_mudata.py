"""Trains TOTALVI and MULTIVI of scvi-tools from the modalities of a dataset.

These models are built from a MuData that was set up, and split and read it themselves. So they get a sample of the rows
in memory (scvi_sample.py), of which `setup_mudata` makes the registry that it would make of all rows. Then the model is
told the number of rows, what splits them, and what its methods read. These are two attributes of the model. No code of
scvi-tools is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from scvi import REGISTRY_KEYS
from scvi.model import TOTALVI

from zloader.common.checks import require_count
from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.common.messages import printable
from zloader.dataset.dataset import Dataset, require_dataset
from zloader.dataset.views import Condition
from zloader.integrations.scvi_encoding import Encoding, LookUp, MinibatchEncoder, Tensors, encoding_of, require_finite
from zloader.integrations.scvi_registry import ALONE, InferenceBatches, TrainingBatches, warn_unless_counts
from zloader.integrations.scvi_rows import TrainingRows, with_genes
from zloader.integrations.scvi_sample import Contents, Sample, rows_with_proteins, sampled_rows
from zloader.integrations.scvi_setup import KEYS, Setup
from zloader.training.minibatch import Minibatch

_INDICES = REGISTRY_KEYS.INDICES_KEY


@dataclass(frozen=True, kw_only=True, eq=False)
class _Encoder:
    """Makes the tensors of a minibatch of several matrices: `matrices` has the name of each by scvi's key."""

    matrices: Mapping[str, str]
    obs: MinibatchEncoder
    panel: tuple[str, LookUp] | None
    size_factors: Sequence[str]
    indices: bool

    @property
    def columns(self) -> list[str]:
        """The obs columns that minibatches need."""
        return list(dict.fromkeys([*self.obs.columns, *(self.panel or ())[:1], *self.size_factors]))

    def __call__(self, minibatch: Any) -> Tensors:
        """Those of MinibatchEncoder, and the other matrices as dense float32."""
        first, *others = (Minibatch(minibatch, x=minibatch.x[name]) for name in self.matrices.values())
        of_obs = self.obs(first)
        matrices = [of_obs.pop("X"), *(self.obs(each)["X"] for each in others)]
        tensors = dict(zip(self.matrices, matrices, strict=True)) | of_obs
        if self.panel is not None:
            column, look_up = self.panel
            tensors["panel"] = look_up.codes(minibatch.obs[column]).to(torch.float32)  # as scvi's own
        if self.size_factors:
            columns = [minibatch.obs[name].to(torch.float32) for name in self.size_factors]
            tensors[REGISTRY_KEYS.SIZE_FACTOR_KEY] = torch.stack(columns, dim=1)
        if self.indices:
            tensors[_INDICES] = minibatch.index[:, None]
        return tensors


@answers
@dataclass(eq=False, repr=False)
class MuDataModule(TrainingRows):
    """A dataset with modalities for TOTALVI and MULTIVI of scvi-tools, in the place of a MuData.

    >>> import zloader as zl
    >>> from scvi.model import TOTALVI
    >>> from zloader.integrations.scvi import MuDataModule
    >>> dataset = zl.open_dataset("cite.h5mu")
    >>> dm = MuDataModule(dataset, rna="rna:layers/counts", proteins="prot:X", batch_key="rna:donor")
    >>> model = dm.model(TOTALVI, n_latent=10)
    >>> model.train(max_epochs=2)
    >>> latent = model.get_latent_representation()
    >>> model.save("totalvi")
    >>> model = dm.load(TOTALVI, "totalvi")

    The model trains from the Loader's minibatches, and `get_latent_representation()` and other methods return values
    for all rows of `dataset`, in order. Its `adata` is a sample of the rows, from which it was built.

    Args:
        dataset: a Dataset with modalities, or a View of one. TOTALVI needs rows that have all of them. The model has
            the genes of a view such as `dataset[:, {"rna:X": genes}]`.
        rna, proteins, atac: the matrices of counts, such as `"rna:X"` or `"prot:layers/counts"`. TOTALVI needs rna and
            proteins. MULTIVI takes any of the three, and zeros in the rows that a modality lacks.
        batch_key: the obs column of batches, such as `"donor"` or `"rna:donor"`. Every row needs a value. Default: one
            batch.
        panel_key: for TOTALVI, the obs column of the panels with which proteins were measured. Default: the batches.
        size_factor_key: for TOTALVI the obs column of size factors, for MULTIVI two columns: of RNA, and of ATAC.
        categorical_covariate_keys, continuous_covariate_keys: obs columns that the model gets as covariates.
        train_size, validation_size, split_by, stratify, validation: as in DataModule.
        sample_rows: how many rows scvi-tools gets in memory to build a model. A few more are added: all rows, or 100,
            of each batch, and a row for each protein that a batch of the sample lacks and all of its rows do not.
        seed: decides the sample, the split and every order.
        loader_options: further options of zl.Loader, such as `{"fetch_factor": 64}`.

    Raises OptionError, MissingColumnError or FormatError when it is constructed, and OptionError for models that
    cannot be trained from this dataset.
    """

    dataset: Dataset
    _: KW_ONLY
    rna: str | None = "rna:X"
    proteins: str | None = None
    atac: str | None = None
    batch_key: str | None = None
    panel_key: str | None = None
    size_factor_key: str | Sequence[str] | None = None
    categorical_covariate_keys: Sequence[str] | None = None
    continuous_covariate_keys: Sequence[str] | None = None
    train_size: float = 0.9
    validation_size: float | None = None
    split_by: str | None = None
    stratify: str | None = None
    validation: Dataset | Condition | None = None
    sample_rows: int = 10_000
    seed: int = 0
    loader_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._begin()
        require_count(sample_rows=self.sample_rows)
        self.batch_size = 128  # of inference; `model.train(batch_size=...)` decides for the training
        layers = {"rna_layer": self.rna, "atac_layer": self.atac, "protein_layer": self.proteins}
        self._setup = Setup.of(self.dataset, layers, vars(self))
        matrices = self.dataset.matrices
        genes = {name: matrices.gene_names(name) for name in self._setup.matrices}
        self._contents = Contents(genes=genes, columns=self._setup.places)
        require_finite(self.dataset, [*self._setup.size_factors, *self._setup.continuous])
        labelled = [None, self.batch_key, self.panel_key, *self._setup.categorical]
        self._codes = {name: encoding_of(self.dataset, name) for name in labelled}
        self._encoder = self._encoder_of(self._codes, self.dataset)
        self.training_rows, self.validation_rows = self._split()
        self._shuffled(self.training_rows, None, **ALONE)  # raises for options that cannot be used
        for name in self._setup.matrices:
            warn_unless_counts(self.dataset, name)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(genes)} columns of {printable(name)}" for name, genes in self._contents.genes.items())
        return f"MuDataModule({self.n_train} rows for training, {self.n_val} for validation, {sizes})"

    __str__ = __repr__  # Lightning's takes minibatches for DataLoaders

    @property
    def uns(self) -> NoReturn:
        """Not there: scvi-tools asks for it of a MuData, when a model is given a module in the place of one."""
        raise OptionError("a MuDataModule is not a MuData: write dm.model(TOTALVI, n_latent=10), not TOTALVI(dm, ...)")

    # ---- the model

    def model(self, model_class: Any, **options: Any) -> Any:
        """`TOTALVI(mdata, **options)` or `MULTIVI(mdata, **options)` for all rows, without a MuData of all rows.

        Raises OptionError for matrices and columns that the class does not take, and for rows without a modality if the
        class is TOTALVI.
        """
        setup = self._setup.options(model_class)

        def make(sample: Sample) -> Any:
            model_class.setup_mudata(sample, **setup)
            return model_class(sample, **options)

        return self._attached(make, model_class)

    def load(self, model_class: Any, directory: Any, *, query: bool = False, **options: Any) -> Any:
        """`TOTALVI.load(directory, mdata, **options)`: a saved model, with the codes of its training.

        With `query`, `TOTALVI.load_query_data(mdata, directory, **options)`: the model learns the new batches of this
        module (scArches). Raises OptionError for a model that was set up with other matrices or columns.
        """
        setup = self._setup.options(model_class)
        registry = model_class.load_registry(str(directory), options.get("prefix"))
        self._setup.require_same(registry, setup, self._contents.genes)
        if query:
            return self._attached(
                lambda sample: model_class.load_query_data(sample, str(directory), **options), model_class
            )
        return self._attached(lambda sample: model_class.load(str(directory), sample, **options), model_class)

    def _sample(self) -> Sample:
        batches = self._codes[self.batch_key if self.panel_key is None else self.panel_key]
        each = [self._codes[self.batch_key], batches]
        rows = sampled_rows(self.dataset, self.sample_rows, each, self.seed)
        if self.proteins is not None and len(rows) < self.dataset.n_obs:
            rows = np.union1d(rows, rows_with_proteins(self.dataset, self.proteins, batches, rows))
        return self._contents.of(self.dataset.where(rows), self._codes)

    def _attached(self, make: Callable[[Sample], Any], model_class: Any) -> Any:
        """A model that is made of a sample, and then reads all rows."""
        if issubclass(model_class, TOTALVI):
            self._setup.require_all_modalities()
        sample = self._sample()
        model = make(sample)
        if getattr(model.module, "modality_weights", None) == "cell":
            raise OptionError(
                "modality_weights='cell' has a weight for each row in memory: take 'universal' or 'equal'"
            )
        for each in model.registry["field_registries"].values():
            for part in (each["state_registry"], each["summary_stats"]):
                part.update({name: self.dataset.n_obs for name in ("n_obs", "n_cells") if name in part})
        model.summary_stats = model.adata_manager.summary_stats
        sample.stands_for = self.dataset.n_obs
        trained = copy.copy(self)  # each model has its own position in the training
        trained._encoder = self._encoder_for(model, self.dataset)
        model._data_splitter_cls = trained._as_splitter
        model._make_data_loader = partial(self._data_loader, model)
        return model

    def _as_splitter(self, manager: Any, **options: Any) -> MuDataModule:
        """What `model.train` takes for its DataSplitter."""
        batch_size, train_size = options.pop("batch_size"), options.pop("train_size", None)
        self.set_split(train_size, options.pop("validation_size", None))
        options.pop("distributed_sampler", None)  # the Loader asks the Trainer
        if wrong := [
            name for name, value in options.items() if value is not None and value is not (name == "shuffle_set_split")
        ]:
            raise OptionError(f"model.train({wrong[0]}=...) has no effect on a MuDataModule: leave it out")
        require_count(batch_size=batch_size)
        self.batch_size = batch_size
        return self

    def _data_loader(self, model: Any, adata: Any, indices: Any = None, batch_size: Any = None, **options: Any) -> Any:
        """What the methods of a model read. Of its own MuData, they read all rows of the dataset."""
        if adata is not model.adata:
            return type(model)._make_data_loader(model, adata, indices=indices, batch_size=batch_size, **options)
        if indices is not None:
            raise OptionError(
                "this method of scvi-tools looks at rows of the model's own MuData, which is a sample: give it the "
                "rows that you mean in memory, as adata=dm.mudata(dataset.where(...))"
            )
        return self.inference_dataloader(model, batch_size=batch_size)

    # ---- minibatches

    def inference_dataloader(
        self, model: Any, dataset: Dataset | None = None, *, batch_size: int | None = None
    ) -> InferenceBatches:
        """All rows of a dataset in order, for `model.get_latent_representation(dataloader=...)` and the like.

        - `dataset`: the module's own, or another one with the same modalities, genes and obs columns.
        - `batch_size`: rows per minibatch. Default: 128.

        Raises OptionError for genes, batches and covariates that the model does not know, and MissingColumnError.
        """
        rows = self.dataset if dataset is None else dataset
        require_dataset(rows)
        require_finite(rows, [*self._setup.size_factors, *self._setup.continuous])
        size = self.batch_size if batch_size is None else batch_size
        return self._inference(rows, self._encoder_for(model, rows), torch.device(model.device), size)

    def train_dataloader(self) -> TrainingBatches:
        """The rows for training, in a new order each epoch. A second training goes on with new orders."""
        return self._epochs()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The tensors of a minibatch, made where it is."""
        return self._encoder(batch) if isinstance(batch, Minibatch) else batch

    def _read(self, rows: Dataset) -> tuple[Dataset, list[str]]:
        return with_genes(rows, self._contents.genes), self._setup.matrices

    def _encoder_for(self, model: Any, rows: Dataset) -> _Encoder:
        """The encoder of the minibatches of some rows, with the codes of a model."""
        fields = model.registry["field_registries"]
        states = {name: each["state_registry"] for name, each in fields.items()}
        labels = {self.batch_key: states[REGISTRY_KEYS.BATCH_KEY]["categorical_mapping"]}
        if self.panel_key is not None:
            labels[self.panel_key] = states["panel"]["categorical_mapping"]
        mappings = states[REGISTRY_KEYS.CAT_COVS_KEY].get("mappings", {}).values()
        labels |= dict(zip(self._setup.categorical, mappings, strict=True))
        codes = {name: Encoding(name=name, labels=np.asarray(each)) for name, each in labels.items()}
        return self._encoder_of(codes, rows, indices=_INDICES in fields)

    def _encoder_of(self, codes: Mapping[str | None, Encoding], rows: Dataset, *, indices: bool = False) -> _Encoder:
        panel = None if self.panel_key is None else codes[self.panel_key].look_up(rows)
        return _Encoder(
            matrices={KEYS[option]: name for option, name in self._setup.layers.items()},
            obs=MinibatchEncoder(
                batch=codes[self.batch_key].look_up(rows),
                labels=None,
                no_label=0,
                batch_key=self.batch_key,
                label_key=None,
                categorical={name: codes[name].look_up(rows) for name in self._setup.categorical},
                continuous=self._setup.continuous,
            ),
            panel=None if panel is None or self.panel_key is None else (self.panel_key, panel),
            size_factors=self._setup.size_factors,
            indices=indices,
        )

    def mudata(self, rows: Dataset) -> Any:
        """Rows as a MuData in memory, with the matrices and obs columns of the module, for methods that take `adata`.

        `model.get_normalized_expression(dm.mudata(dataset.where("donor == 'd1'")))`. Rows that a modality lacks are
        zeros there. Raises OptionError for rows that do not fit in memory, and for genes that are not there.
        """
        require_dataset(rows)
        return self._contents.of(rows, {})
