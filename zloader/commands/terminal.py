"""The text and tables that the commands print."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zloader.common.messages import size

if TYPE_CHECKING:
    from zloader.caching.directory import MirrorEntry
    from zloader.caching.inspection import MirrorInspection
    from zloader.conversion.convert import ConversionReport
    from zloader.conversion.verify import Verification
    from zloader.insight.cost import EpochCosts
    from zloader.insight.summary import MatrixSummary, StoreSummary

_WIDTH = 120  # columns of output that does not go to a terminal


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; 120 columns wide if that is not a terminal."""
    plain: Any = {"stderr": stderr, "highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
    console = Console(**plain)
    return console if console.is_terminal else Console(**plain, width=_WIDTH)


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2, default=str))


def print_result(document: Any, show: Callable[[Console], None], *, as_json: bool) -> None:
    """Prints the result of a command on stdout: as one JSON document, or as the text that `show` prints."""
    if as_json:
        print_json(document)
    else:
        show(console())


def show_conversion(console: Console, done: ConversionReport) -> None:
    converted = f"converted {size(done.bytes_in)} to {size(done.bytes_out)} of Zarr in {done.seconds:.1f} s"
    if done.already_complete:
        converted = "already complete, converted from the same sources with the same options"
    console.print(f"{done.rows:,} rows x {done.genes:,} genes, {done.values:,} values: {converted}")
    for name, change in done.dtypes_changed.items():
        console.print(f"  {name}: {change}, without loss")
    for name, rows in done.rows_made_canonical.items():
        console.print(f"  {name}: {rows:,} rows sorted by gene or with repeated genes summed")
    if done.dropped:
        console.print(f"  left out, because sources cannot be joined on it: {', '.join(done.dropped)}")
    console.print(f"written to {done.destination}")


def show_verification(console: Console, verified: Verification) -> None:
    for problem in verified.problems:
        console.print(f"{problem.where}: {problem.what}")
    compared = f", and every value equals {', '.join(verified.against)}" if verified.against and verified.ok else ""
    console.print(
        f"{verified.url}: {verified.rows:,} rows x {verified.genes:,} genes; read {verified.values:,} values in "
        f"{verified.chunks:,} chunks of {verified.objects:,} objects ({size(verified.bytes_read)}) in "
        f"{verified.seconds:.1f} s: "
        + (f"no problems{compared}" if verified.ok else f"problems: {len(verified.problems)}"),
    )


def show_store(console: Console, summary: StoreSummary) -> None:
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, fact in (
        ("store", summary.url),
        ("rows x genes", f"{summary.rows:,} x {summary.genes:,}"),
        ("objects", f"{summary.objects:,}, {size(summary.stored_bytes)} in all"),
        ("other elements", ", ".join(summary.others)),
        ("fingerprint", summary.fingerprint),
    ):
        if fact:
            facts.add_row(Text(name, style="bold"), Text(fact))
    console.print(facts)
    obs = new_table("obs column", "kind", ">categories")
    for column in summary.obs:
        obs.add_row(column.name, column.kind, "" if column.categories is None else f"{column.categories:,}")
    if summary.obs:
        console.print(obs)
    for matrix in summary.matrices:
        _show_matrix(console, matrix)


def _show_matrix(console: Console, matrix: MatrixSummary) -> None:
    console.print(
        f"\n{matrix.name}: {matrix.encoding}, {matrix.rows:,} x {matrix.genes:,}, "
        f"{matrix.values:,} values ({matrix.density:.2%})"
        + (f", {matrix.bytes_per_value:.2f} bytes per value" if matrix.bytes_per_value else ""),
        style="bold",
    )
    if matrix.problem:
        console.print(matrix.problem)
        return
    table = new_table(
        "array", "dtype", ">values per chunk", ">chunks per shard", ">shards", ">stored", ">decoded", "codecs"
    )
    for array in matrix.arrays:
        narrowed = "" if array.dtype == array.original_dtype else f" (was {array.original_dtype})"
        table.add_row(
            array.path,
            array.dtype + narrowed,
            f"{array.chunk_elements:,} (~{array.rows_per_chunk:,.0f} rows)",
            f"{array.chunks_per_shard:,}",
            f"{array.shards:,}",
            size(array.stored_bytes),
            size(array.decoded_bytes),
            array.codecs,
        )
    console.print(table)
    about = "at most about" if matrix.at_most else "about"
    stored = sum(array.stored_bytes for array in matrix.arrays)
    forms = (f"{size(matrix.decoded_bytes)} decoded", f"{about} {size(matrix.compact_bytes)} compact")
    console.print(f"mirror: {', '.join(forms)}, {size(stored)} as stored")


def show_costs(console: Console, costs: EpochCosts, x: str, sizes: dict[str, int], order: str) -> None:
    fetch_rows = sizes["batch_size"] * sizes["fetch_factor"]
    console.print(
        f"\nEpoch over {x}: minibatches of {sizes['batch_size']:,} rows, fetches of {fetch_rows:,}, {order}",
        style="bold",
    )
    table = new_table("", ">GETs", ">bytes")
    first, every = costs.first_mirrored, costs.unmirrored
    about, at_most = ("", "") if every.exact else ("about ", "at most ")
    table.add_row("without a mirror, every epoch", f"{about}{every.gets:,}", f"{about}{size(every.bytes_read)}")
    table.add_row("with a mirror, the first epoch", f"{at_most}{first.gets:,}", f"{at_most}{size(first.bytes_read)}")
    table.add_row("with a mirror, each later epoch", "0", "0 B")
    console.print(table)
    console.print("Excludes metadata, indptr, and the columns of obs and obsm.", style="dim")


def show_converted(console: Console, now: float, converted: float) -> None:
    """How many bytes 'zloader convert' saves in an epoch without a mirror, and in the first epoch with one."""
    less = f", {now / converted:.1f} times fewer" if now > converted else ""
    console.print(
        f"'zloader convert' would store X in about {converted:.2f} bytes per value instead of {now:.2f}{less}, by its "
        "first 512 rows. Epochs that read from the store would read so much less; later epochs with a mirror are alike."
    )


def new_table(*columns: str) -> Table:
    """A table with these columns. A name that begins with > marks a right-aligned column."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def show_mirrors(console: Console, found: Sequence[tuple[MirrorEntry, MirrorInspection]]) -> None:
    """The mirrors of a cache with their sizes, their panels of genes, and the totals."""
    table = new_table("mirror", ">cached", ">share", ">on disk", "last used", "")
    table.columns[0].overflow = "fold"
    for entry, inspection in found:
        lines = [entry.directory.name, *_panels(inspection)]
        mirror = Text.assemble(entry.url, *((f"\n{line}", "dim") for line in lines))
        share = _share(inspection.share) if inspection.bytes_in_all else ""
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_s))
        sizes = (size(inspection.bytes_held), share, size(entry.allocated_bytes))
        table.add_row(mirror, *sizes, used, "stale" if entry.stale else "")
    held_bytes, in_all = (
        sum(getattr(inspection, name) for _, inspection in found) for name in ("bytes_held", "bytes_in_all")
    )
    on_disk = size(sum(entry.allocated_bytes for entry, _ in found))
    share = _share(held_bytes / in_all) if in_all else ""
    table.add_row(f"mirrors: {len(found)}", size(held_bytes), share, on_disk, "", "", style="bold")
    console.print(table)


def _panels(inspection: MirrorInspection) -> list[str]:
    """A line for each panel of genes, and for the rows of all genes, that a mirror keeps coded."""
    held = {name: array for name, array in inspection.arrays.items() if name.endswith(" (rows)")}
    return [f"{name}: {size(array.bytes_held)}, {_share(array.share)}" for name, array in held.items()]


# ---- bench


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _share(share: float) -> str:
    return f"{share:.0%}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s"


def _rate(bytes_per_s: float) -> str:
    return f"{size(bytes_per_s)}/s"


# In the order of the table. Missing figures are left out.
_FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "rows_per_s": ("rows/s", _count),
    "elapsed_s": ("elapsed", _seconds),
    "first_minibatch_s": ("first minibatch after", _seconds),
    "wait_share": ("waiting", _share),
    "gets": ("GETs", _count),
    "spans": ("spans", _count),
    "bytes_read": ("read from the store", size),
    "bytes_read_per_s": ("read rate", _rate),
    "in_flight_bytes": ("in flight now", size),
    "most_in_flight_bytes": ("peak in flight", size),
    "mirror_share": ("chunks from the mirror", _share),
    "bytes_from_mirror": ("read from the mirror", size),
    "decode_s": ("decoding, all threads", _seconds),
    "gather_s": ("gathering, all threads", _seconds),
    "cpu_s": ("processor, all threads", _seconds),
    "retries": ("retries", _count),
}
_IN_A_LINE = ("elapsed_s", "first_minibatch_s", "wait_share", "gets", "bytes_read", "mirror_share")


def _shown(name: str, figures: Mapping[str, float]) -> str:
    return _FIGURES[name][1](figures[name]) if name in figures else ""


def one_line(figures: Mapping[str, float]) -> str:
    """The main figures of an epoch."""
    return f"{_count(figures['rows_per_s'])} rows/s; " + ", ".join(
        f"{_FIGURES[name][0]} {_shown(name, figures)}" for name in _IN_A_LINE if name in figures
    )


def _figures_table(columns: Mapping[str, Mapping[str, float]]) -> Table:
    """One row per figure that any column has."""
    table = new_table("", *(f">{name}" for name in columns))
    for name, (label, _) in _FIGURES.items():
        if any(name in figures for figures in columns.values()):
            table.add_row(label, *(_shown(name, figures) for figures in columns.values()))
    return table


def show_figures(console: Console, columns: Mapping[str, Mapping[str, float]]) -> None:
    """Prints figures side by side, without those that matter only while an epoch runs."""
    ended = {
        column: {k: v for k, v in figures.items() if k != "in_flight_bytes"} for column, figures in columns.items()
    }
    console.print(_figures_table(ended))


@contextlib.contextmanager
def bench_view(console: Console, rows: int, figures: Callable[[], Mapping[str, float]]) -> Iterator[None]:
    """While the context lasts, shows the live figures of the current epoch if the console is a terminal."""
    if not console.is_terminal:
        yield
        return

    def render() -> RenderableType:
        now = figures()
        return _figures_table({f"epoch {now['epoch']:.0f}: {now['rows']:,.0f} of {rows:,} rows": now})

    with Live(console=console, get_renderable=render, refresh_per_second=8, transient=True):
        yield
