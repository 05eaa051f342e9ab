"""The flags of `zloader bench`: stores opened as one dataset, a loader of it, and what is measured and reported."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zloader.commands.bill_run import Prices
from zloader.commands.flags import (
    Access,
    Dtype,
    GenesBy,
    GigabyteEgress,
    GpuHour,
    Json,
    Layout,
    LoaderSizes,
    Matrices,
    Memory,
    NvmeGigabyteMonth,
    ObsColumns,
    ThousandGets,
    genes_by_of,
    x_of,
)
from zloader.common.errors import OptionError

if TYPE_CHECKING:
    from zloader.common.options import FetchOptions
    from zloader.dataset.dataset import Dataset
    from zloader.training.loader import Loader


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """The flags, and the values that they stand for. Raises OptionError for a price or a speed that cannot be."""

    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL", help="Stores, read as one dataset: local paths or s3://BUCKET/KEY.", show_default=False
        ),
    ]
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Cache directory. Its mirror stays for later runs.", show_default="no mirror"),
    ] = None
    epochs: Annotated[int, typer.Option(min=1, help="Epochs to measure.")] = 3
    step_ms: Annotated[float, typer.Option(min=0, help="Simulated training time per minibatch, in ms.")] = 0.0
    report: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write an HTML report.", show_default=False),
    ] = None
    label: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="obs column: say how well its labels are mixed.", show_default=False),
    ] = None
    link_speed: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes per second of the link to the store, or of the disk of a local one.",
            show_default="measured, 2 s",
        ),
    ] = None
    join: Annotated[
        str | None, typer.Option(help="Genes of stores that differ: inner or outer.", show_default="must be equal")
    ] = None
    genes_by: GenesBy = None
    x: Matrices = None
    obs: ObsColumns = ""
    loader_sizes: LoaderSizes = field(default_factory=LoaderSizes)
    memory: Memory = "0"
    layout: Layout = "csr"
    dtype: Dtype = None
    gpu_hour: GpuHour = Prices.gpu_hour
    thousand_gets: ThousandGets = Prices.thousand_gets
    gigabyte_egress: GigabyteEgress = Prices.gigabyte_egress
    nvme_gigabyte_month: NvmeGigabyteMonth = Prices.nvme_gigabyte_month
    access: Access = field(default_factory=Access)
    as_json: Json = False

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self.prices).items():
            if not (math.isfinite(value) and value >= 0):
                raise OptionError(f"--{name.replace('_', '-')} must be a number of at least 0, not {value:g}")
        _ = self.link_bytes_per_s

    @property
    def step_s(self) -> float:
        """Simulated training time per minibatch."""
        return self.step_ms / 1000

    @property
    def link_bytes_per_s(self) -> int | None:
        """The stated speed of the link; None if it has to be measured."""
        from zloader.common.checks import parse_size, require_at_least

        if self.link_speed is None:
            return None
        n_bytes = parse_size(self.link_speed.removesuffix("/s"))
        require_at_least(1, link_speed=n_bytes)
        return n_bytes

    @property
    def prices(self) -> Prices:
        """The prices of reading and computing."""
        return Prices(
            gpu_hour=self.gpu_hour,
            thousand_gets=self.thousand_gets,
            gigabyte_egress=self.gigabyte_egress,
            nvme_gigabyte_month=self.nvme_gigabyte_month,
        )

    @property
    def matrices(self) -> str | list[str]:
        """The x of the loader."""
        return x_of(self.x)

    @property
    def obs_columns(self) -> list[str]:
        """The obs columns of the loader."""
        return [column.strip() for column in self.obs.split(",") if column.strip()]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the loader, by name."""
        return self.loader_sizes.by_name

    def opened(self, cache: Path | None) -> Dataset:
        """The stores as one dataset, with or without a cache."""
        from zloader.dataset.open_dataset import open_dataset

        source: Any = self.urls[0] if len(self.urls) == 1 else self.urls
        named: Any = {"storage_options": self.access.storage_options, "join": self.join}
        return open_dataset(source, cache=cache, genes_by=genes_by_of(self.genes_by), **named)

    def loader(self, dataset: Dataset, sampling: Any, obs: Sequence[str] = ()) -> Loader:
        """A loader of a dataset with these options."""
        from zloader.training.loader import Loader

        return Loader(
            dataset,
            batch_size=self.sizes["batch_size"],
            fetch_factor=self.sizes["fetch_factor"],
            sampling=sampling,
            options=self.fetching,
            x=self.matrices,
            obs=list(obs),
            layout=self.layout,  # type: ignore[arg-type]
            dtype=self.dtype,
            rank=0,
            world_size=1,
        )

    @property
    def fetching(self) -> FetchOptions:
        """The options of reading."""
        from zloader.common.options import FetchOptions

        return FetchOptions(memory=self.memory)

    @property
    def words(self) -> list[str]:
        """The flags that make the same loader, apart from those of the cache."""
        listed: dict[str, Any] = {f"--{name.replace('_', '-')}": size for name, size in self.sizes.items()}
        listed |= {"--join": self.join, "--obs": ",".join(self.obs_columns)}
        listed |= {"--layout": self.layout, "--dtype": self.dtype}
        x = [self.matrices] if isinstance(self.matrices, str) else self.matrices
        words = [word for name, value in listed.items() if value for word in (name, str(value))]
        repeated = [("--genes-by", named) for named in self.genes_by or ()] + [("--x", name) for name in x]
        return [*words, *(word for pair in repeated for word in pair), *self.access.words]
