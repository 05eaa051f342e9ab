"""What `zloader bench` measures: stores opened as one dataset, and a loader of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zloader.commands.bill_run import Prices

if TYPE_CHECKING:
    from zloader.common.options import FetchOptions
    from zloader.dataset.dataset import Dataset
    from zloader.training.loader import Loader


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured, and how it is reported. Sizes that are None are those of a Loader."""

    urls: list[str]
    cache: Path | None
    epochs: int
    step_s: float
    join: str | None
    genes_by: str | None
    x: str | list[str]
    obs: list[str]
    sizes: dict[str, int]
    memory: str
    layout: str
    dtype: str
    label: str | None
    link_bytes_per_s: int | None
    prices: Prices
    access: dict[str, Any]

    def opened(self, cache: Path | None) -> Dataset:
        """The stores as one dataset, with or without a cache."""
        from zloader.dataset.dataset import open_dataset

        source: Any = self.urls[0] if len(self.urls) == 1 else self.urls
        named: Any = {"storage_options": self.access, "join": self.join, "genes_by": self.genes_by}
        return open_dataset(source, cache=cache, **named)

    def loader(self, dataset: Dataset, sampling: Any, obs: Sequence[str] = ()) -> Loader:
        """A loader of a dataset with these options."""
        from zloader.training.loader import Loader

        return Loader(
            dataset,
            batch_size=self.sizes["batch_size"],
            fetch_factor=self.sizes["fetch_factor"],
            sampling=sampling,
            options=self.fetching,
            x=self.x,
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
        """The flags that make the same loader, apart from those of access and of the cache."""
        listed: dict[str, Any] = {f"--{name.replace('_', '-')}": size for name, size in self.sizes.items()}
        listed |= {"--join": self.join, "--genes-by": self.genes_by, "--obs": ",".join(self.obs)}
        listed |= {"--layout": self.layout, "--dtype": self.dtype}
        x = [self.x] if isinstance(self.x, str) else self.x
        words = [word for name, value in listed.items() if value for word in (name, str(value))]
        return words + [word for name in x for word in ("--x", name)]
