"""The arithmetic of `zloader bill`: rows per second, hours and dollars of the epochs of a training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

_HOURS_PER_MONTH = 730


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices in dollars. The defaults are for reading S3 within its region, a local disk, and a rented H100."""

    gpu_hour: float = 3.0
    producer_hour: float = 0.8
    thousand_gets: float = 0.0004
    gigabyte_egress: float = 0.0
    nvme_gigabyte_month: float = 0.08

    def dollars(
        self, *, gets: float, gigabytes: float, mirrored_gigabytes: float, hours: float, gpus: int, producers: int = 0
    ) -> dict[str, float]:
        """The dollars of reading and computing for some hours, by item."""
        return {
            "GPUs": gpus * self.gpu_hour * hours,
            "producers": producers * self.producer_hour * hours,
            "GETs": gets / 1000 * self.thousand_gets,
            "egress": gigabytes * self.gigabyte_egress,
            "NVMe": mirrored_gigabytes * self.nvme_gigabyte_month * hours / _HOURS_PER_MONTH,
        }


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rows per second at which each part of the machine could go, for all GPUs together. None: not a bound."""

    gpu: float
    link: float | None
    loading: float

    @property
    def rows_per_s(self) -> float:
        """The rate of the run."""
        return min(rate for rate in (self.gpu, self.link, self.loading) if rate is not None)

    @property
    def bound_by(self) -> str:
        """The part that sets the rate: `gpu`, `link` or `loading`."""
        rates = {name: rate for name, rate in dataclasses.asdict(self).items() if rate is not None}
        return min(rates, key=lambda name: float(rates[name]))


@dataclass(frozen=True, kw_only=True)
class EpochBill:
    """One epoch. `dollars` are by item."""

    rows_per_s: float
    bound_by: str
    gpu_wait_share: float
    hours: float
    gets: float
    gigabytes: float
    dollars: Mapping[str, float]

    @property
    def total_dollars(self) -> float:
        """The sum of all items."""
        return sum(self.dollars.values())


@dataclass(frozen=True, kw_only=True)
class Run(Prices):
    """A training run. Rates are per GPU, and the link is per machine.

    A GPU trains `gpu_rows_per_s` rows per second, or as many as its FLOPs allow: 6 per parameter and token, at the
    given share of its peak. The process of each GPU loads its rows, unless there are producers, machines without GPUs
    that load them all. With a mirror, only the first epoch reads from the store, and each machine mirrors the rows that
    it loads (`locality="machine"`).
    """

    rows: float
    epochs: int
    parameters: float
    tokens_per_row: float
    gpus: int
    machines: int
    mfu: float
    peak_tflops: float
    gpu_rows_per_s: float | None
    cold_rows_per_s: float
    warm_rows_per_s: float
    link_megabytes_per_s: float
    mirror: bool
    bytes_per_row: float
    gets_per_row: float
    mirror_bytes_per_row: float
    producers: int

    @property
    def gpu_rate(self) -> float:
        """Rows per second that one GPU could train."""
        if self.gpu_rows_per_s is not None:
            return self.gpu_rows_per_s
        return self.mfu * self.peak_tflops * 1e12 / (6 * self.parameters * self.tokens_per_row)

    def epoch(self, *, cold: bool) -> EpochBill:
        """The bill of an epoch that reads from the store, or of one that reads from the mirrors."""
        link = (self.producers or self.machines) * self.link_megabytes_per_s * 1e6 / self.bytes_per_row
        loading = (self.producers or self.gpus) * (self.cold_rows_per_s if cold else self.warm_rows_per_s)
        rates = Rates(gpu=self.gpus * self.gpu_rate, link=link if cold else None, loading=loading)
        hours = self.rows / rates.rows_per_s / 3600
        gets = self.rows * self.gets_per_row if cold else 0.0
        gigabytes = self.rows * self.bytes_per_row / 1e9 if cold else 0.0
        mirrored = self.rows * self.mirror_bytes_per_row / 1e9 if self.mirror else 0.0
        dollars = self.dollars(
            gets=gets,
            gigabytes=gigabytes,
            mirrored_gigabytes=mirrored,
            hours=hours,
            gpus=self.gpus,
            producers=self.producers,
        )
        return EpochBill(
            rows_per_s=rates.rows_per_s,
            bound_by=rates.bound_by,
            gpu_wait_share=1 - rates.rows_per_s / rates.gpu,
            hours=hours,
            gets=gets,
            gigabytes=gigabytes,
            dollars=dollars,
        )

    @property
    def n_cold(self) -> int:
        """The number of epochs that read from the store."""
        return 1 if self.mirror else self.epochs

    def totals(self) -> tuple[float, float]:
        """Hours and dollars of the whole run."""
        parts = [(self.n_cold, self.epoch(cold=True)), (self.epochs - self.n_cold, self.epoch(cold=False))]
        return sum(n * each.hours for n, each in parts), sum(n * each.total_dollars for n, each in parts)
