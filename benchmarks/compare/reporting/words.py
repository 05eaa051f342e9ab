"""The words of the benchmark report: its scenarios, its figures with their units, its terms, and what is unfair."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.compare.reporting.records import Key, Measurement, Value
from zloader.common.messages import size

OURS = "zloader"
CEILING = "AnnData in memory"  # no loader: cells that are in memory already


def is_ours(peer: str) -> bool:
    """Whether this is zloader or one of its variants, such as `zloader, dense`."""
    return peer == OURS or peer.startswith(f"{OURS},")


# ---- figures of measurements


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of a measurement.

    `name` heads columns, `unit` follows figures, `axis` labels axes, and `against` heads the column of ratios.
    `of_prefetched` says that it also counts cells that were prefetched but not given out.

    >>> CELLS.text(1234.5)
    '1 230'
    """

    name: str
    axis: str
    of: Callable[[Measurement], float | None]
    text: Callable[[float], str]
    unit: str = ""
    against: str = ""
    higher_is_better: bool = False
    is_size: bool = False
    of_prefetched: bool = False


def number(value: float) -> str:
    """A number with three significant digits, and spaces between thousands.

    >>> number(123456), number(1.2345)
    ('123 000', '1.23')
    """
    if value >= 999.5:
        digits = len(str(int(value))) - 3
        return f"{round(value / 10**digits) * 10**digits:,}".replace(",", " ")
    return f"{value:.6f}".rstrip("0") if 1e-5 <= value < 1e-4 else f"{value:.3g}"  # not 5e-05


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"


def _per_row(measured: Measurement, figure: float | None, rows: float) -> float | None:
    """The figure for so many rows. Epochs may end early, so that totals of two tools cannot be compared."""
    return None if figure is None or not measured.rows else rows * figure / measured.rows


_FASTER = "zloader is … as fast"
CELLS = Figure(
    name="cells/s", unit=" cells/s", axis="cells per second", of=lambda m: m.rows_per_s, text=number, against=_FASTER,
    higher_is_better=True,
)  # fmt: skip
SECONDS = Figure(name="seconds", unit=" s", axis="time (seconds)", of=lambda m: m.seconds, text=number, against=_FASTER)
FIRST = Figure(
    name="s to the first minibatch", unit=" s", axis="time to the first minibatch (seconds)",
    of=lambda m: m.seconds if m.first_s is None else m.first_s, text=number, against=_FASTER,
)  # fmt: skip
PEAK = Figure(
    name="peak memory", axis="peak memory (bytes)", of=lambda m: m.peak_bytes, text=size, is_size=True,
    against="takes … as much as zloader",
)  # fmt: skip
CPU = Figure(
    name="CPU s / 100k cells", axis="CPU seconds per 100 000 cells",
    of=lambda m: None if m.cpu_s_per_row is None else 1e5 * m.cpu_s_per_row, text=number, of_prefetched=True,
)  # fmt: skip
_START_CPU = Figure(name="CPU s", axis="CPU seconds", of=lambda m: m.cpu_s, text=number)
ENTROPY = Figure(name="entropy, bits", axis="entropy (bits)", of=lambda m: m.entropy, text=lambda bits: f"{bits:.2f}")
_OTHERS = (
    PEAK,
    Figure(name="PSS", axis="", of=lambda m: m.pss_bytes, text=size),
    Figure(name=FIRST.name, axis=FIRST.axis, of=lambda m: m.first_s, text=number),
    Figure(name="waiting", axis="", of=lambda m: m.wait_share, text=_share),
    Figure(name="GETs / 1000 cells", axis="", of=lambda m: _per_row(m, m.gets, 1000), text=number, of_prefetched=True),
    Figure(name="read / cell", axis="", of=lambda m: _per_row(m, m.bytes, 1), text=size, of_prefetched=True),
    Figure(
        name="$ / million cells", axis="", of=lambda m: _per_row(m, m.dollars, 1e6), text=number, of_prefetched=True
    ),
    ENTROPY,
    Figure(name="load", axis="", of=lambda m: m.load, text=lambda load: f"{load:.1f}"),
)


def others(figure: Figure) -> tuple[Figure, ...]:
    """The other figures of a table that compares this one. The CPU seconds of a start are not divided by cells."""
    cpu = _START_CPU if figure in (FIRST, SECONDS) else CPU
    return tuple(each for each in (cpu, *_OTHERS) if each.name != figure.name)


# ---- scenarios


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A scenario: its title, the question that it answers, and the figure by which the peers are compared.

    `limits` are drawn as lines. `of` completes sentences: `zloader loads 10 cells/s {of}`.
    """

    title: str
    question: str
    figure: Figure = CELLS
    limits: tuple[str, ...] = ()
    of: str = ""


SCENARIOS: Mapping[str, Scenario] = {
    "cold_warm_local": Scenario(
        title="Cold and warm epochs, local disk",
        question="How many cells per second does an epoch give when the store is on a disk of this machine? A cold "
        "epoch is the first one of a new process, with the store on the disk and not in memory; with zloader it also "
        "fills the mirror. A warm epoch is the one after it. Tools without a cache of their own decode the store again "
        "in every epoch.",
        limits=("memcpy", "decoding", "disk"),
        of="from a local disk",
    ),
    "cold_warm_cloud": Scenario(
        title="Cold and warm epochs, cloud",
        question="The same with the store in a simulated S3 bucket, behind a link with a latency and a bandwidth. In "
        "warm epochs zloader reads its copy on the local disk. Users of other tools can copy their store to the disk "
        "once, and then have the speeds of the section above. Every GET of a real bucket costs money, and bytes do "
        "when they leave its region.",
        limits=("link", "decoding"),
        of="from a simulated cloud",
    ),
    "real": Scenario(
        title="Cold and warm epochs, this store",
        question="How many cells per second does an epoch of this store give, read where it lies? A cold epoch is the "
        "first one of a new process; with zloader it also fills an empty mirror on the local disk, which warm epochs "
        "read. Tools without a cache of their own read the store again in every epoch.",
        limits=("link", "disk"),
        of="from this store",
    ),
    "in_place": Scenario(
        title="What you have: .h5ad",
        question="How fast are the same epochs when nothing was converted, and the .h5ad file itself is read from the "
        "disk? By how the file was compressed: not at all, which is anndata's default, with gzip, or with lzf.",
        limits=("memcpy", "disk"),
        of="from an .h5ad file",
    ),
    "order": Scenario(
        title="Speed and mixing",
        question="Loaders read blocks of neighbouring cells and mix the cells of several blocks in memory. Larger "
        "blocks load faster, and larger fetches mix better. Which speed and which mixing does each pair of sizes give? "
        "Mixing is the entropy of a label in a minibatch: higher is better, and random cells have the most.",
        of="in blocks",
    ),
    "minibatch": Scenario(
        title="Size of minibatches",
        question="How does the speed change with the number of cells in a minibatch? Small minibatches show the fixed "
        "cost of each one, large ones the speed of memory.",
        limits=("memcpy",),
        of="in minibatches",
    ),
    "random": Scenario(
        title="Perfectly random cells",
        question="How fast are minibatches of single cells drawn at random, without blocks? This is the best order for "
        "training and the worst for a disk.",
        limits=("memcpy",),
        of="in random order",
    ),
    "panel": Scenario(
        title="A panel of genes",
        question="How fast are warm epochs of the most variable genes alone, on which many models train? From the data "
        "of all genes, zloader keeps only the values of these genes in a mirror of its own; the other loaders read "
        "whole cells, and the genes are cut out of what they have read. The data set called panel has no other genes: "
        "it was written once for this panel, converted for each tool, and another panel needs another one.",
        of="of a panel of genes",
    ),
    "tokens": Scenario(
        title="Tokens",
        question="How fast are cells turned into tokens for a transformer?",
        of="as tokens",
    ),
    "sets": Scenario(
        title="Sets with controls",
        question="How fast are sets of cells with the same perturbation, each with matched control cells? "
        "Controls are not counted.",
        of="in sets with controls",
    ),
    "first": Scenario(
        title="Time to the first minibatch",
        question="How long after its start does a new process have its first minibatch? This includes starting Python, "
        "imports and opening the store. Caches are warm. Less is better.",
        figure=FIRST,
    ),
    "memory": Scenario(
        title="Memory over epochs",
        question="How much memory does a process take at most, and does it grow from epoch to epoch? Less is better.",
        figure=PEAK,
    ),
    "scaling": Scenario(
        title="Small and large stores",
        question="How do the time from the start of a process to its first minibatch, and its memory, grow with the "
        "number of cells in the store? The largest stores have metadata and only two values per cell, and are opened "
        "by zloader only: they show the cost of opening and planning. Less is better.",
        figure=SECONDS,
    ),
    "processes": Scenario(
        title="Several processes",
        question="How does the speed of all processes together grow with their number, on one machine?",
        limits=("memcpy",),
        of="in several processes",
    ),
    "conversion": Scenario(
        title="Conversion",
        question="How fast does each tool write its own store from an .h5ad file? Tools that read .h5ad need none. "
        "Starting Python and imports are not counted. annbatch's conversion shuffles the rows unless its line says "
        "otherwise; that of zloader where its line says so. A loop of ours writes the stores of HF Datasets and "
        "MosaicML Streaming row by row, because these libraries have no reader of AnnData.",
        of="converted",
    ),
}  # fmt: skip


def scenario(name: str) -> Scenario:
    """The scenario of this name. One that this report does not know is compared by cells/s."""
    return SCENARIOS.get(name, Scenario(title=f"Scenario: {name.replace('_', ' ')}", question=""))


def scenario_order(name: str) -> tuple[int, str]:
    """Sorts the scenarios as above, and others behind them."""
    known = list(SCENARIOS)
    return (known.index(name) if name in known else len(known), name)


AXES: Mapping[str, str] = {
    "epoch": "epoch",
    "block_rows": "block (cells)",
    "fetch_factor": "fetch (minibatches)",
    "batch_size": "minibatch (cells)",
    "rows": "cells in the store",
    "processes": "processes",
    "tokenizer": "tokenizer",
}


def axis_name(axis: str) -> str:
    return AXES.get(axis, axis.replace("_", " "))


def value_text(value: Value) -> str:
    return f"{value:,}".replace(",", " ") if isinstance(value, int) and not isinstance(value, bool) else str(value)


def case_text(key: Key) -> str:
    """The case in words, such as `cold` or `minibatch (cells): 64`."""
    return ", ".join(
        value_text(value) if isinstance(value, str) else f"{axis_name(axis)}: {value_text(value)}"
        for axis, value in key.case
    )


def case_order(key: Key) -> tuple[tuple[bool, float, str], ...]:
    """Sorts cases by their numbers; strings come last, in the order of the alphabet."""
    return tuple(
        (isinstance(value, str), 0.0 if isinstance(value, str) else float(value), str(value)) for _, value in key.case
    )


# ---- explanations

TERMS: Mapping[str, str] = {
    "Cell": "One row of the count matrix. Cells per second (cells/s) are counted from the request for an epoch to the "
    "end of the iterator or, if the epoch is ended early, to its last counted minibatch.",
    "Minibatch": "The cells of one training step.",
    "Block, fetch": "A block is neighbouring cells that stay together in an epoch. A fetch is the blocks that are "
    "loaded and mixed at the same time; its size is given in minibatches.",
    "Cold, warm": "In a cold epoch all values come from the store. In a warm epoch of zloader they come from its "
    "mirror, which holds decoded rows on the local disk.",
    "GET": "One request to the bucket.",
    "CPU seconds": "The time that all threads of a process spend on the processor, in user and in kernel mode.",
    "Peak memory": "The most memory that a process had at once (peak RSS), which includes Python and its libraries. "
    "Workers count by their private memory. In the scenario with several processes, the memory of all of them is "
    "added, so pages that they share, such as those of a mirror, count several times.",
    "PSS": "The memory of several processes without their workers, after an epoch. Pages that they share count once.",
    "Waiting": "The share of its time that a training loop waits for minibatches, after the first fetch. Each step "
    "sleeps for 3 ms, so the loader has all cores. It is measured in one epoch, in the first turn.",
    "Entropy": "How mixed the labels of a minibatch are, in bits: 0 if all cells have the same label.",
    "Load": "The load average of the machine over the last minute.",
    "Turn": "All tools run the same case once per turn. Figures are medians over turns. Ratios are taken within each "
    "turn, because other work on a machine slows down all tools of a turn; the median and the range are given.",
    "Limit": "The speed of one part of this machine by itself, measured in the same run: copying memory (memcpy; "
    "for CSR minibatches, 8 bytes per value), decoding zloader's store with all cores and nothing else (decoding), "
    "reading the disk (disk), and the link to the simulated cloud (link). A tool that moves fewer bytes per cell may "
    "exceed one.",
    CEILING: "All cells as one AnnData in the memory of the process. If your data fit, you need no loader for data on "
    "disk.",
}
LIMITS: Mapping[str, str] = {
    "memcpy": "copying CSR minibatches", "decoding": "decoding alone", "disk": "reading the disk", "link": "the link",
}  # fmt: skip

UNFAIR = (
    "We wrote zloader and this benchmark, and we know zloader's options best. Each other tool is set up as its "
    "documentation advises; the table of tools says how. A correction by its authors is welcome.",
    "A warm epoch of zloader reads a second, decoded copy of the data on the local disk. It takes disk space, about 4 "
    "bytes per stored value, that the other tools do not need.",
    "Where zloader reads blocks of 64 neighbouring cells, some tools read single random cells, which mixes better and "
    "is slower.",
    "All tools get fetches of the same size, zloader's default, except annbatch, which is also given chunks of 512. "
    "Some are faster with their own defaults: see Speed and mixing.",
    "The synthetic data are small, so an epoch has few fetches. A cold epoch of zloader is mostly the wait for its "
    "first minibatch, tools that give whole fetches to workers share them unevenly, and most tools start their workers "
    "in each epoch. The pancreas fits in one fetch: its figures show the cost of starting an epoch, and not a speed.",
    "The tools hand out different things: sparse or dense tensors, scipy matrices, or tokens. A model that needs dense "
    "minibatches has to convert sparse ones, which is not counted.",
    "In all but cold epochs, the store is in the page cache, which is in memory. A store that is larger than memory is "
    "slower with every tool.",
    "Peak memory counts pages of mapped files. The kernel can take those back, so zloader's mirror, and the mapped "
    "stores of HF Datasets and BioNeMo-SCDL, need less than it says.",
    "The latencies of the simulated link vary, but less than those of a real bucket, which answers some requests late.",
    "Nothing trains here. If a training step takes longer than loading its minibatch, a faster loader gains nothing.",
)
