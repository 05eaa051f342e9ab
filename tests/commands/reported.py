"""Results of the demo and of bench, with round figures, for tests of what is said about them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from zloader.commands.bench_run import BenchEpoch, BenchQuality, BenchRun, Prices, Sample
from zloader.commands.demo_report import DemoRun, EpochFigures, LoadingFigures, Step
from zloader.commands.report import Report
from zloader.conversion.convert import ConversionReport
from zloader.insight.quality import Quality


def said(report: Report) -> list[str]:
    """Everything that a report has, without drawing its charts. test_reports.py checks that a page shows it all."""
    found = [
        report.title,
        *report.verdict,
        *report.text,
        report.code,
        *(word for tile in report.tiles for word in tile),
    ]
    for section in report.sections:
        found += [section.title, *section.text, *section.points, section.code]
        for chart in section.charts:
            found += [chart.title, chart.description, chart.caption]
        for named in (section.terms, section.facts, section.commands):
            found += [words for pair in named.items() for words in pair]
        for table in section.tables:
            found += [table.caption, " ".join(filter(None, table.header))]
            found += [" ".join(filter(None, row)) for row in table.rows]
    return [" ".join(words.split()) for words in found]


def to_copy(report: Report) -> list[str]:
    """The code and the commands of a report."""
    codes = [report.code, *(section.code for section in report.sections)]
    return [*filter(None, codes), *(command for section in report.sections for command in section.commands.values())]


ACCESS = {"anon": True, "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}}
FLAGS = ["--endpoint-url", "http://127.0.0.1:9", "--anon"]


# ---- demo


def figures(epoch: int, *, gets: int, started_s: float = 0.0) -> EpochFigures:
    return EpochFigures(
        epoch=epoch,
        started_s=started_s,
        seconds=0.5,
        rows=640,
        minibatches=10,
        rows_per_s=1280.0,
        gets=gets,
        bytes_read=gets * 1_000_000,
        wait_share=0.25 / epoch,
        loss=1.0 / epoch,
        held_out_rows=160,
        held_out_gets=0,
        held_out_bytes_read=0,
        held_out_accuracy=0.9,
    )


def loading(rows_per_s: float, gets: int = 0) -> LoadingFigures:
    seconds = 640 / rows_per_s
    return LoadingFigures(rows=640, seconds=seconds, rows_per_s=rows_per_s, gets=gets, bytes_read=gets * 1000)


def demo_run(n_epochs: int = 3, **changes: Any) -> DemoRun:
    epochs = [figures(n, gets=56 if n == 1 else 0, started_s=0.6 * (n - 1)) for n in range(1, n_epochs + 1)]
    steps = [
        Step(epoch=e.epoch, done_s=e.started_s + 0.05 * (k + 1), rows=64, loss=1 / (k + 10 * e.epoch))
        for e in epochs
        for k in range(10)
    ]
    conversion = ConversionReport(
        sources=["cells.h5ad"],
        destination="s3://zloader/cells.zarr",
        rows=900,
        genes=2000,
        values=180_000,
        bytes_in=3_000_000,
        bytes_out=1_000_000,
        dtypes_changed={"X/data": "float32 -> uint8"},
        rows_made_canonical={},
        dropped=[],
        seconds=1.5,
    )
    run = DemoRun(
        source="cells.h5ad",
        bundled=False,
        label="cell_type",
        categories=5,
        seed=0,
        conversion=conversion,
        train_rows=640,
        held_out_rows=160,
        unlabelled=100,
        guess_accuracy=0.3,
        block_size=16,
        batch_size=64,
        fetch_rows=512,
        opening_bytes=12_345,
        machine={"cores": "2", "Python": "3.11.7"},
        epochs=epochs,
        loading=[loading(4000, gets=56), loading(64_000)],
        steps=steps,
    )
    return dataclasses.replace(run, **changes)


# ---- bench

SETTINGS = {
    "join": None, "genes_by": None, "fetch_factor": 256, "block_size": 64, "in_flight_bytes": 64_000_000, "x": "X",
    "obs": ["cell_type"], "layout": "csr", "dtype": "float32",
}  # fmt: skip


def epoch(number: int, kind: str = "cold", *, began_s: float = 0.0, elapsed_s: float = 10.0) -> BenchEpoch:
    """An epoch of 6 400 rows, of which a hundredth is read, and mirrored, in each hundredth of the time."""
    wait_s = 0.9 * elapsed_s
    reads, share = kind != "warm", 0.0 if kind == "cold" else 1.0
    figures = {
        "rows": 6400.0, "minibatches": 100.0, "gets": 50.0 * reads, "bytes_read": 3e9 * reads, "elapsed_s": elapsed_s,
        "wait_s": wait_s, "first_wait_s": 0.4, "first_minibatch_s": 0.5, "decode_s": 6.0 * reads, "gather_s": 2.0,
        "cpu_s": 9.0, "loop_cpu_s": 1.0, "stepped_s": 0.0, "rows_per_s": 6400 / elapsed_s, "wait_share": 0.9,
        "bytes_read_per_s": 3e9 * reads / elapsed_s, "mirror_share": 0.4 if reads else 1.0,
        "mirrored_before": share, "mirrored_after": 1.0, "mirror_bytes": 7e9,
    }  # fmt: skip
    samples = [
        Sample(
            at_s=elapsed_s * k / 100,
            rows=64 * k,
            bytes_read=30_000_000 * k * reads,
            wait_s=0.9 * elapsed_s * k / 100,
            mirrored=1.0 if share else k / 100,
        )
        for k in range(1, 101)
    ]
    return BenchEpoch(epoch=number, kind=kind, complete=True, figures=figures, began_s=began_s, samples=samples)


def with_figures(epoch: BenchEpoch, **figures: float) -> BenchEpoch:
    return dataclasses.replace(epoch, figures={**epoch.figures, **figures})


def bench_run(epochs: list[BenchEpoch] | None = None, **changes: Any) -> BenchRun:
    kinds = [("cold", 10.0), ("warm", 2.0), ("warm", 2.0)]
    made = [epoch(k, kind, began_s=11.0 * k, elapsed_s=s) for k, (kind, s) in enumerate(kinds)]
    run = BenchRun(
        urls=["s3://b/atlas.zarr"],
        rows=6400,
        genes=2000,
        local=False,
        cache=Path("/nvme/zloader"),
        batch_size=64,
        step_s=0.0,
        cores=2,
        load=0.1,
        settings=SETTINGS,
        prices=Prices(gigabyte_egress=0.09),
        epochs=made if epochs is None else epochs,
        link_bytes_per_s=320e6,
    )
    return dataclasses.replace(run, **changes)


MIXING = BenchQuality(
    label="plate",
    measured=Quality(
        minibatches=100,
        entropy_bits=3.0,
        entropy_sd_bits=0.1,
        random_entropy_bits=4.0,
        random_entropy_sd_bits=0.2,
        l1_within=1.0,
        l1_across=None,
        longest_run=7,
        same_block_share=0.0123,
    ),
)
