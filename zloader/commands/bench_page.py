"""The HTML page of `zloader bench`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zloader.commands import page
from zloader.commands.bench_advice import Pace
from zloader.commands.bench_charts import charts
from zloader.commands.bench_results import BenchEpoch, BenchQuality, BenchRun
from zloader.common.messages import size

_MOST_ROWS = 50  # of the table of epochs
_LEAST_DOLLARS = 0.0001
_LITTLE_FROM_MEMORY = 0.05
_COLUMNS = ("epoch", "kind", "rows/s", "time", "first minibatch after", "waiting", "GETs", "read from the store",
            "read rate", "chunks from the mirror", "dollars")  # fmt: skip
_TERMS = {
    "Cold, warm, mixed": "A cold epoch begins without a mirror or with an empty one, and reads every chunk from the "
    "store once at least. A warm epoch reads the mirror only. A mixed epoch begins with a part of the mirror.",
    "Waiting": "The share of the time that the loop spent waiting for minibatches, also for the first one.",
    "GETs, read": "Requests to the store, and the stored bytes that they returned.",
    "Limits": "The link, or the disk of a local store: bytes per row at its speed. Decoding on all cores: the seconds "
    "that decoding took, spread over all cores. Your step: --step-ms per minibatch. They ignore one another, so an "
    "epoch stays below the lowest.",
}


def render(run: BenchRun, storage_options: Mapping[str, Any], flags: Sequence[str]) -> str:
    """The page as HTML. `storage_options` open the store, and `flags` are those of the commands that do."""
    drawn = charts(run)
    parts = [
        *(page.verdict(sentence) for sentence in run.sentences),
        *(page.note(caveat) for caveat in _caveats(run)),
        page.tiles(_tiles(run)),
        page.section("Speed", page.charts(*drawn[:2])),
        page.section("Waiting and reading", page.charts(*drawn[2:])),
        page.section("Epochs", page.table(_caption(run), _COLUMNS, (_row(run, each) for each in _shown(run)))),
        page.section("Dollars of an epoch", page.note(_prices(run)), page.table(*_dollars(run))),
    ]
    if run.quality is not None:
        parts.append(page.section(f"Order: how well {run.quality.label} is mixed", *_quality(run.quality)))
    parts += [
        page.section("What the words mean", page.terms(_TERMS)),
        page.section("The loader that was measured", page.code(_python(run, storage_options))),
        page.try_next(_commands(run, flags)),
        page.section("Conditions", page.facts(_conditions(run))),
    ]
    return page.page(f"zloader bench: {', '.join(run.urls)}", *parts)


def dollars(amount: float) -> str:
    """Formats dollars.

    >>> dollars(0), dollars(0.000003), dollars(0.0123), dollars(1234.5)
    ('$0', 'under $0.0001', '$0.0123', '$1,234.50')
    """
    if not amount:
        return "$0"
    if amount < _LEAST_DOLLARS:
        return f"under ${_LEAST_DOLLARS}"
    return f"${amount:,.2f}" if amount >= 0.1 else f"${amount:.4f}"


def _shown(run: BenchRun) -> Sequence[BenchEpoch]:
    return run.epochs[:_MOST_ROWS]


def _caveats(run: BenchRun) -> list[str]:
    """What makes the figures doubtful."""
    found = []
    last = run.epochs[-1]
    if run.interrupted or not last.complete:
        found.append(f"The run was interrupted {'after' if last.complete else 'in'} epoch {last.epoch}.")
    if run.load > run.cores / 2:
        found.append(
            f"The machine was busy in the minute before the first epoch: its load was {run.load:.1f} with {run.cores} "
            "cores. If another program went on running, every figure is worse than it could be."
        )
    reading = [pace for pace in run.paces.values() if pace.bytes_read]
    if run.local and reading:
        found += _from_memory(reading[0])
    return found


def _from_memory(pace: Pace) -> list[str]:
    kept = "The store is local, and the system keeps files that were used lately in memory."
    if pace.disk_bytes is None:
        return [f"{kept} So {pace.kind} epochs may be faster than the disk."]
    if pace.from_memory < _LITTLE_FROM_MEMORY:
        return []
    share = f"{pace.from_memory:.0%} of what the {pace.kind} epoch read was there."
    if pace.link_bytes_per_s is None:
        return [f"{kept} {share}"]
    most = pace.rows * pace.link_bytes_per_s / pace.bytes_read
    return [f"{kept} {share} If all of it came from the disk, {most:,.0f} rows/s would be the most."]


def _tiles(run: BenchRun) -> list[tuple[str, str]]:
    found = []
    for kind in run.paces:
        figures = run.of_kind(kind) or {}
        found.append((f"{figures['rows_per_s']:,.0f}", f"rows/s, {kind}"))
        found.append((f"{figures['wait_share']:.0%}", f"of the time waiting, {kind}"))
        if figures["gets"]:
            read = f"{figures['gets']:,.0f} GETs, {dollars(sum(run.dollars(figures).values()))} an epoch"
            found.append((size(figures["bytes_read"]), f"read from the store, {kind}: {read}"))
    if run.quality is not None:
        found.append((f"{run.quality.percent:.0f}%", f"of the entropy of random minibatches, by {run.quality.label}"))
    return found


def _caption(run: BenchRun) -> str:
    more = "" if len(run.epochs) <= _MOST_ROWS else f" The first {_MOST_ROWS} of {len(run.epochs):,} epochs."
    return f"{run.rows:,} rows x {run.genes:,} genes, minibatches of {run.batch_size:,}.{more}"


def _row(run: BenchRun, epoch: BenchEpoch) -> list[str]:
    figures = epoch.figures
    return [
        str(epoch.epoch),
        epoch.kind + ("" if epoch.complete else ", interrupted"),
        f"{figures['rows_per_s']:,.0f}",
        f"{figures['elapsed_s']:.2f} s",
        f"{figures['first_minibatch_s']:.2f} s",
        f"{figures['wait_share']:.0%}",
        f"{figures['gets']:,.0f}",
        size(figures["bytes_read"]),
        f"{size(figures['bytes_read_per_s'])}/s",
        f"{figures['mirror_share']:.0%}",
        dollars(sum(run.dollars(figures).values())),
    ]


def _prices(run: BenchRun) -> str:
    prices = run.prices
    stated = f"${prices.thousand_gets:g} for 1000 GETs, ${prices.gigabyte_egress:g} for a GB read, and " \
        f"${prices.nvme_gigabyte_month:g} for a GB of local disk and month"  # fmt: skip
    gpu = f". A GPU costs ${prices.gpu_hour:g} for an hour" if run.step_s else ". The machine itself is not counted"
    local = " Reads of a local store cost nothing." if run.local else ""
    return f"Prices, which are all options: {stated}{gpu}.{local}"


def _dollars(run: BenchRun) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """The table: items by kind of epoch."""
    of_kinds = {kind: run.dollars(run.of_kind(kind) or {}) for kind in run.paces}
    items = [item for item in next(iter(of_kinds.values())) if any(of_kinds[kind][item] for kind in of_kinds)]
    rows = [[item, *(dollars(each[item]) for each in of_kinds.values())] for item in items]
    rows.append(["in all", *(dollars(sum(each.values())) for each in of_kinds.values())])
    return "Per epoch. The NVMe disk is counted for the time of the epoch only.", ["", *of_kinds], rows


def _quality(quality: BenchQuality) -> list[str]:
    measured = quality.measured
    entropy = f"{measured.entropy_bits:.2f} bits, standard deviation {measured.entropy_sd_bits:.2f}"
    return [
        page.note(
            f"Minibatches have {quality.percent:.0f}% of the entropy of random ones, by {quality.label}. More than "
            "100% is possible, because strata spread the rows more evenly than chance does."
        ),
        page.facts(
            {
                "entropy of minibatches": entropy,
                "entropy of random minibatches": f"{measured.random_entropy_bits:.2f} bits, standard deviation "
                f"{measured.random_entropy_sd_bits:.2f}",
                "minibatches examined": f"{measured.minibatches:,}",
                "most neighbouring rows in a minibatch": f"{measured.longest_run:,}",
                "pairs of rows from one block": f"{measured.same_block_share:.2%}",
            }
        ),
    ]


def _python(run: BenchRun, storage_options: Mapping[str, Any]) -> str:
    """How to make the loader that was measured."""
    from zloader.order.shuffling import stratified
    from zloader.training.loader import Loader

    given = run.settings
    url = run.urls[0] if len(run.urls) == 1 else list(run.urls)
    opening = {"cache": None if run.cache is None else str(run.cache), "join": given["join"]}
    words = [repr(url), *(f"{name}={value!r}" for name, value in opening.items() if value is not None)]
    named = [_names_of_genes(each) for each in given["genes_by"] or ()]
    if named:
        words.append(f"genes_by={named[0]}" if len(named) == 1 else f"genes_by=[{', '.join(named)}]")
    words += [f"storage_options={dict(storage_options)!r}"] if storage_options else []
    loading = {"batch_size": run.batch_size, "fetch_factor": given["fetch_factor"]}
    options = [f"{name}={value!r}" for name, value in loading.items()]
    options.append(f"sampling=zl.{stratified(given['block_size'])!r}")
    for name, default in (("x", Loader.x), ("obs", []), ("layout", Loader.layout), ("dtype", "float32")):
        if given[name] not in (default, None):
            options.append(f"{name}={given[name]!r}")
    imports = "import pandas as pd\n" if any("pd." in each for each in named) else ""
    return (
        f"{imports}import zloader as zl\n\n"
        f"dataset = zl.open_dataset({', '.join(words)})\n"
        f"loader = zl.Loader(dataset, {', '.join(options)})"
    )


def _names_of_genes(given: str) -> str:
    """The genes_by in Python for a --genes-by."""
    separator = {".csv": ",", ".tsv": "\t"}.get(Path(given).suffix.lower())
    if separator is None:
        return repr(None if given == "none" else given)
    return f"pd.read_csv({given!r}, sep={separator!r}, header=None, index_col=0)[1]"


def _commands(run: BenchRun, flags: Sequence[str]) -> Mapping[str, str]:
    """Commands that work where this one did."""
    bench = ["zloader", "bench", *run.urls, *flags]
    with_cache = bench if run.cache is None else [*bench, "--cache", str(run.cache)]
    commands = {}
    if run.cache is None:
        commands["Measure epochs that read from a mirror on this machine."] = shlex.join(
            [*bench, "--cache", "zloader-cache", "--report", "zloader-bench.html"]
        )
    commands["Measure with the time that your own training step takes, here 20 ms."] = shlex.join(
        [*with_cache, "--step-ms", "20", "--report", "zloader-bench.html"]
    )
    commands["Compute what a whole training run would cost from these rates."] = (
        f"{shlex.join([*with_cache, '--json'])} > bench.json\nzloader bill --measured bench.json"
    )
    return commands


def _conditions(run: BenchRun) -> dict[str, str]:
    shown = {
        "store": ", ".join(run.urls),
        "rows × genes": f"{run.rows:,} × {run.genes:,}",
        "cache": "none" if run.cache is None else str(run.cache),
        "minibatches": f"{run.batch_size:,} rows",
        "fetches": f"{run.settings['fetch_factor'] * run.batch_size:,} rows, in blocks of {run.settings['block_size']}",
        "memory for bytes in flight": size(run.settings["in_flight_bytes"]),
        "step": f"{1000 * run.step_s:g} ms of sleep per minibatch" if run.step_s else "none: loading alone",
        "disk" if run.local else "link": _link(run),
        "load of the machine before": f"{run.load:.1f}",
    }
    return shown | page.machine()


def _link(run: BenchRun) -> str:
    if run.link_bytes_per_s is None:
        return "not measured"
    how = "as --link-speed states" if run.link_stated else "measured by reading without decoding"
    return f"{size(run.link_bytes_per_s)}/s, {how}"
