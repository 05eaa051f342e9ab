"""The arithmetic of `zloader bill`: the figures of a training run, and what an epoch of it takes and costs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from zloader.commands.flags import price_option

_HOURS_PER_MONTH = 730
_model_option = functools.partial(typer.Option, rich_help_panel="Model and GPUs")
loading_option = functools.partial(typer.Option, rich_help_panel="Loading")


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices in dollars. The defaults are for reading S3 within its region, a local disk, and a rented H100."""

    gpu_hour: Annotated[float, price_option(help="A GPU for an hour.")] = 3.0
    thousand_gets: Annotated[float, price_option(help="1000 GETs.")] = 0.0004
    gigabyte_egress: Annotated[float, price_option(help="A GB read; 0 within a region.")] = 0.0
    nvme_gigabyte_month: Annotated[float, price_option(help="A GB of local disk for a month.")] = 0.08

    def dollars(
        self, *, gets: float, gigabytes: float, mirrored_gigabytes: float, hours: float, gpus: int
    ) -> dict[str, float]:
        """The dollars of reading and computing for some hours, by item, without producers."""
        return {
            "GPUs": gpus * self.gpu_hour * hours,
            "producers": 0.0,
            "GETs": gets / 1000 * self.thousand_gets,
            "egress": gigabytes * self.gigabyte_egress,
            "NVMe": mirrored_gigabytes * self.nvme_gigabyte_month * hours / _HOURS_PER_MONTH,
        }


@dataclass(frozen=True, kw_only=True)
class Setup(Prices):
    """The model, the machines and the prices of a run: what `zloader bench` does not measure."""

    epochs: Annotated[int, typer.Option(min=1, help="Epochs.")] = 3
    parameters: Annotated[float, _model_option(help="Parameters of the model.")] = 51e6
    tokens_per_row: Annotated[float, _model_option(help="Tokens per row.")] = 1024
    gpus: Annotated[int, _model_option(min=1, help="GPUs.")] = 8
    machines: Annotated[int, _model_option(min=1, help="Machines with GPUs.")] = 1
    mfu: Annotated[float, _model_option(help="Share of a GPU's peak that is used.")] = 0.35
    peak_tflops: Annotated[float, _model_option(help="Peak of a GPU: an H100 in bfloat16.")] = 989
    gpu_rows_per_s: Annotated[
        float | None, _model_option(help="Rows/s that one GPU trains, if measured.", show_default="from the FLOPs")
    ] = None
    mirror: Annotated[bool, loading_option(help="Whether later epochs read from a mirror.")] = True
    copies: Annotated[
        str,
        loading_option(
            metavar="parts|own|one",
            help="What the machines mirror: a part of the rows each, all that each of them reads in a global order, or "
            "one copy together (zr.cache).",
        ),
    ] = "parts"
    mirror_bytes_per_row: Annotated[float, loading_option(help="Bytes of the mirror per row.")] = 7_400
    producers: Annotated[int, loading_option(min=0, help="Machines without GPUs that load all rows.")] = 0
    producer_hour: Annotated[float, price_option(help="A producer for an hour.")] = 0.8


@dataclass(frozen=True, kw_only=True)
class EpochBill:
    """One epoch. `bound_by` is the part that sets the rate: `gpu`, `link`, `peers` or `loading`.

    `gigabytes` are read from the store, and `peer_gigabytes` from other machines. `dollars` are by item.
    """

    rows_per_s: float
    bound_by: str
    gpu_wait_share: float
    hours: float
    gets: float
    gigabytes: float
    peer_gigabytes: float
    dollars: Mapping[str, float]

    @property
    def total_dollars(self) -> float:
        """The sum of all items."""
        return sum(self.dollars.values())


@dataclass(frozen=True, kw_only=True)
class Run(Setup):
    """A training run. Rates are per GPU, and the link is per machine.

    A GPU trains `gpu_rows_per_s` rows per second, or as many as its FLOPs allow: 6 per parameter and token, at the
    given share of its peak. The process of each GPU loads its rows, unless there are producers, machines without GPUs
    that load them all. With a mirror, only the first epoch reads from the store, if each machine mirrors a part of the
    rows (`locality="machine"`), or all of them one copy. That copy is sent between machines at the speed of the link,
    and decoded in every epoch. If each machine mirrors what it reads in a global order, later epochs read what it has
    not met before.
    """

    rows: float
    cold_rows_per_s: float
    warm_rows_per_s: float
    link_megabytes_per_s: float
    bytes_per_row: float
    gets_per_row: float

    @property
    def gpu_rate(self) -> float:
        """Rows per second that one GPU could train."""
        if self.gpu_rows_per_s is not None:
            return self.gpu_rows_per_s
        return self.mfu * self.peak_tflops * 1e12 / (6 * self.parameters * self.tokens_per_row)

    @property
    def _loaders(self) -> int:
        return self.producers or self.machines

    def _share_of_store(self, number: int) -> float:
        """The share of the rows of an epoch that are read from the store."""
        if number == 0 or not self.mirror:
            return 1.0
        return (1 - 1 / self._loaders) ** number if self.copies == "own" else 0.0

    @property
    def _mirrored_gigabytes(self) -> float:
        """What all mirrors hold at the end of the run."""
        if not self.mirror:
            return 0.0
        if self.copies == "one":
            return self.rows * self.bytes_per_row / 1e9
        read = sum(self._share_of_store(number) for number in range(self.epochs)) if self.copies == "own" else 1.0
        return self.rows * self.mirror_bytes_per_row / 1e9 * read

    def epoch(self, number: int) -> EpochBill:
        """The bill of an epoch, counted from 0."""
        share, one_copy = self._share_of_store(number), self.mirror and self.copies == "one"
        from_peers = (1 - 1 / self._loaders) if one_copy else 0.0
        link = self._loaders * self.link_megabytes_per_s * 1e6 / self.bytes_per_row
        warm_rows_per_s = self.cold_rows_per_s if one_copy else self.warm_rows_per_s
        seconds_per_row = share / self.cold_rows_per_s + (1 - share) / warm_rows_per_s
        rates = {"gpu": self.gpus * self.gpu_rate, "loading": (self.producers or self.gpus) / seconds_per_row}
        rates |= {"link": link / share} if share else {}
        rates |= {"peers": link / from_peers} if from_peers else {}
        bound_by = min(rates, key=lambda part: rates[part])
        hours = self.rows / rates[bound_by] / 3600
        gets, gigabytes = self.rows * self.gets_per_row * share, self.rows * self.bytes_per_row / 1e9
        mirrored = self._mirrored_gigabytes
        dollars = self.dollars(
            gets=gets, gigabytes=gigabytes * share, mirrored_gigabytes=mirrored, hours=hours, gpus=self.gpus
        )
        dollars["producers"] = self.producers * self.producer_hour * hours
        return EpochBill(
            rows_per_s=rates[bound_by], bound_by=bound_by, gpu_wait_share=1 - rates[bound_by] / rates["gpu"],
            hours=hours, gets=gets, gigabytes=gigabytes * share, peer_gigabytes=gigabytes * from_peers, dollars=dollars,
        )  # fmt: skip

    def totals(self) -> tuple[float, float]:
        """Hours and dollars of the whole run."""
        epochs = [self.epoch(number) for number in range(self.epochs)]
        return sum(each.hours for each in epochs), sum(each.total_dollars for each in epochs)
