"""The report of `zloader bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zloader.commands.bench_run import (
    KINDS,
    BenchEpoch,
    BenchQuality,
    BenchRun,
    Sample,
    commands_of,
    dollars,
    python_of,
)
from zloader.commands.charts import (
    COLD,
    LIGHT,
    WARM,
    Chart,
    Curve,
    Dots,
    draw_bars,
    draw_curves,
    draw_speeds,
    name_colours,
    rate_curve,
)
from zloader.commands.report import Report, Section, Table, machine, try_next
from zloader.common.messages import size

_COLOURS = {"cold": COLD, "mixed": LIGHT["purple"], "warm": WARM}
_MOST_BINS, _ALL_BINS = 80, 600  # of an epoch, and of all
_MOST_ROWS, _MOST_EPOCHS = 50, 20  # epochs in the table, and in the charts over time
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


def report(run: BenchRun, storage_options: Mapping[str, Any], flags: Sequence[str]) -> Report:
    """The report of a run. `storage_options` open the store, and `flags` are those of the commands that do."""
    drawn = charts(run)
    more = "" if len(run.epochs) <= _MOST_ROWS else f" The first {_MOST_ROWS} of {len(run.epochs):,} epochs."
    caption = f"{run.rows:,} rows x {run.genes:,} genes, minibatches of {run.batch_size:,}.{more}"
    epochs = Table(caption, _COLUMNS, [_row(run, each) for each in run.epochs[:_MOST_ROWS]])
    return Report(
        title=f"zloader bench: {', '.join(run.urls)}",
        verdict=run.sentences,
        text=run.caveats,
        tiles=_tiles(run),
        sections=[
            Section(title="Speed", charts=drawn[:2]),
            Section(title="Waiting and reading", charts=drawn[2:]),
            Section(title="Epochs", tables=[epochs]),
            Section(title="Dollars of an epoch", text=[_prices(run)], tables=[_dollars(run)]),
            *([] if run.quality is None else [_quality(run.quality)]),
            Section(title="What the words mean", terms=_TERMS),
            Section(title="The loader that was measured", code=python_of(run, storage_options)),
            try_next(commands_of(run, flags)),
            Section(title="Conditions", facts=_conditions(run)),
        ],
    )


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
        percent = f"{run.quality.measured.percent:.0f}%"
        found.append((percent, f"of the entropy of random minibatches, by {run.quality.label}"))
    return found


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


def _dollars(run: BenchRun) -> Table:
    """Items by kind of epoch."""
    of_kinds = {kind: run.dollars(run.of_kind(kind) or {}) for kind in run.paces}
    items = [item for item in next(iter(of_kinds.values())) if any(of_kinds[kind][item] for kind in of_kinds)]
    rows = [[item, *(dollars(each[item]) for each in of_kinds.values())] for item in items]
    rows.append(["in all", *(dollars(sum(each.values())) for each in of_kinds.values())])
    return Table("Per epoch. The NVMe disk is counted for the time of the epoch only.", ["", *of_kinds], rows)


def _quality(quality: BenchQuality) -> Section:
    measured = quality.measured
    return Section(
        title=f"Order: how well {quality.label} is mixed",
        text=[
            f"Minibatches have {measured.percent:.0f}% of the entropy of random ones, by {quality.label}. More than "
            "100% is possible, because strata spread the rows more evenly than chance does."
        ],
        facts={
            "entropy of minibatches": _bits(measured.entropy_bits, measured.entropy_sd_bits),
            "entropy of random minibatches": _bits(measured.random_entropy_bits, measured.random_entropy_sd_bits),
            "minibatches examined": f"{measured.minibatches:,}",
            "most neighbouring rows in a minibatch": f"{measured.longest_run:,}",
            "pairs of rows from one block": f"{measured.same_block_share:.2%}",
        },
    )


def _bits(mean: float, deviation: float) -> str:
    return f"{mean:.2f} bits, standard deviation {deviation:.2f}"


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
    return shown | machine()


def _link(run: BenchRun) -> str:
    if run.link_bytes_per_s is None:
        return "not measured"
    how = "as --link-speed states" if run.link_stated else "measured by reading without decoding"
    return f"{size(run.link_bytes_per_s)}/s, {how}"


# ---- charts


def charts(run: BenchRun) -> list[Chart]:
    """All charts for which there are figures."""
    drawn = [speed_chart(run), throughput_chart(run), waiting_chart(run)]
    if any(epoch.figures["bytes_read"] for epoch in run.epochs):
        drawn.append(reading_chart(run))
    if run.cache is not None:
        drawn.append(mirror_chart(run))
    return drawn


def speed_chart(run: BenchRun) -> Chart:
    """The rows/s of each kind of epoch, above what the link, decoding and the step alone would allow."""
    lines, steps = [], []
    for kind, pace in run.paces.items():
        measured = [epoch.figures["rows_per_s"] for epoch in run.epochs if epoch.kind == kind]
        lines.append(Dots(name=f"{kind} epochs", values=measured, colour=_COLOURS[kind]))
        limits = dict(pace.ceilings)
        steps += [_limit("limit: your step", limits.pop("your step"))] if "your step" in limits else []
        lines += [_limit(f"limit: {name}\n({kind})", ceiling) for name, ceiling in limits.items()]
    lines += steps[:1]
    return Chart(
        name="speed",
        title="Speed, and what would limit it",
        description="; ".join(
            f"{' '.join(line.name.split())}: {', '.join(f'{value:,.0f}' for value in line.values[:_MOST_EPOCHS])} rows "
            "per second"
            for line in lines
        ),
        caption="A circle is an epoch. A diamond is the speed that one part alone would allow, computed from the "
        "bytes, seconds and steps that were measured.",
        draw=lambda figure: draw_speeds(figure.subplots(), lines, "rows"),
    )


def _limit(name: str, ceiling: float) -> Dots:
    return Dots(name=name, values=[ceiling], colour=LIGHT["quiet"], marker="D")


def throughput_chart(run: BenchRun) -> Chart:
    """Rows/s over time."""
    return Chart(
        name="throughput",
        title="Speed over time",
        description=_epochs(run, lambda epoch: f"{epoch.figures['rows_per_s']:,.0f} rows per second"),
        caption=f"An epoch starts slowly while its first rows are read.{_left_out(run)}",
        draw=lambda figure: _draw_rates(figure, run, lambda sample: sample.rows, "rows per second"),
    )


def reading_chart(run: BenchRun) -> Chart:
    """Bytes/s read from the store over time, below the speed of the link."""
    link, name = run.link_bytes_per_s, "disk" if run.local else "link"
    known = f"{name} that --link-speed states" if run.link_stated else f"{name}, measured without decoding"
    limit = "" if link is None else f" The dotted line is the speed of the {known}, {size(link)}/s."

    def draw(figure: Any) -> None:
        axes = _draw_rates(figure, run, lambda sample: sample.bytes_read / 1e6, "read from the store (MB per second)")
        if link is not None and link / 1e6 < 3 * axes.get_ylim()[1]:
            axes.axhline(link / 1e6, color=LIGHT["quiet"], linestyle=":")
            axes.set_ylim(0, max(axes.get_ylim()[1], 1.05 * link / 1e6))

    return Chart(
        name="reading",
        title="Reading from the store over time",
        description=_epochs(
            run, lambda each: f"{size(each.figures['bytes_read'])} in {each.figures['gets']:,.0f} GETs"
        ),
        caption=f"Reads count when they begin, so that bytes in flight show up early.{limit}{_left_out(run)}",
        draw=draw,
    )


def _epochs(run: BenchRun, said: Callable[[BenchEpoch], str]) -> str:
    """What a chart over time shows, in words."""
    return "; ".join(f"epoch {epoch.epoch}, {epoch.kind}: {said(epoch)}" for epoch in run.epochs[:_MOST_EPOCHS])


def _draw_rates(figure: Any, run: BenchRun, of: Callable[[Sample], float], label: str) -> Any:
    """Draws the rate at which a total of the samples grew in each epoch."""
    shown = run.epochs[:_MOST_EPOCHS]
    most_bins = min(_MOST_BINS, _ALL_BINS // len(shown))
    curves = []
    for epoch in shown:
        totals = [0.0, *map(of, epoch.samples)]
        curves.append(rate_curve(epoch.epoch, _COLOURS[epoch.kind], _times(epoch), totals, most_bins))
    axes = _draw_over_time(figure, run, curves, label)
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter("{x:,.0f}" if axes.get_ylim()[1] > 10 else "{x:g}")
    return axes


def _draw_over_time(figure: Any, run: BenchRun, curves: Sequence[Curve], label: str) -> Any:
    axes = figure.subplots()
    draw_curves(axes, curves)
    axes.set_xlabel("time since the first epoch began (seconds)")
    axes.set_ylabel(label)
    of_kinds = {kind: [epoch.epoch for epoch in run.epochs[:_MOST_EPOCHS] if epoch.kind == kind] for kind in KINDS}
    name_colours(figure, {f"{kind}: {_numbers(found)}": _COLOURS[kind] for kind, found in of_kinds.items() if found})
    return axes


def _times(epoch: BenchEpoch) -> list[float]:
    """When the epoch began and its samples were taken, since the first epoch began."""
    return [epoch.began_s, *(epoch.began_s + sample.at_s for sample in epoch.samples)]


def _numbers(epochs: Sequence[int]) -> str:
    """
    >>> _numbers([0]), _numbers([1, 2, 3]), _numbers([0, 2, 4])
    ('epoch 0', 'epochs 1 to 3', '3 epochs')
    """
    if len(epochs) == 1:
        return f"epoch {epochs[0]}"
    together = epochs[-1] - epochs[0] == len(epochs) - 1
    return f"epochs {epochs[0]} to {epochs[-1]}" if together else f"{len(epochs)} epochs"


def _left_out(run: BenchRun) -> str:
    more = len(run.epochs) - _MOST_EPOCHS
    return f" The first {_MOST_EPOCHS} of {len(run.epochs):,} epochs." if more > 0 else ""


def waiting_chart(run: BenchRun) -> Chart:
    """How long an epoch of each kind waited for minibatches, and how long it did not."""
    bars = {kind: dict(_parts(run, kind)) for kind in run.paces}
    colours = [LIGHT["pink"], LIGHT["purple"], LIGHT["green"]]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        draw_bars(axes, {f"{kind} epoch": list(parts.values()) for kind, parts in bars.items()}, colours)
        axes.set_xlabel("time of an epoch (seconds)")
        name_colours(figure, dict(zip(next(iter(bars.values())), colours, strict=True)))

    return Chart(
        name="waiting",
        title="Where the time of an epoch went",
        description="; ".join(
            f"{kind} epoch: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
            for kind, parts in bars.items()
        ),
        caption="Only waiting can be saved by a faster loader, store or link."
        + (f" The steps were simulated: {1000 * run.step_s:g} ms of sleep each." if run.step_s else ""),
        draw=draw,
    )


def _parts(run: BenchRun, kind: str) -> Iterator[tuple[str, float]]:
    """The parts of the time of an epoch."""
    pace = run.paces[kind]
    later_s = max(0.0, pace.wait_s - pace.first_wait_s)
    first_s = min(pace.first_minibatch_s, pace.elapsed_s)
    yield "until the first minibatch", first_s
    yield "waiting for later ones", later_s
    yield "steps and making tensors" if run.step_s else "making tensors", max(0.0, pace.elapsed_s - first_s - later_s)


def mirror_chart(run: BenchRun) -> Chart:
    """The share of the chunks in the mirror over time."""
    shown, last = run.epochs[:_MOST_EPOCHS], run.epochs[-1].figures

    def draw(figure: Any) -> None:
        curves = []
        for epoch in shown:
            shares = [epoch.figures["mirrored_before"], *(sample.mirrored for sample in epoch.samples)]
            percents = [100 * share for share in shares]
            curves.append(Curve(epoch=epoch.epoch, colour=_COLOURS[epoch.kind], x=_times(epoch), y=percents))
        _draw_over_time(figure, run, curves, "chunks in the mirror (%)").set_ylim(0, 100)

    return Chart(
        name="mirror",
        title="The mirror filling",
        description="; ".join(
            f"epoch {epoch.epoch}: {epoch.figures['mirrored_before']:.0%} to {epoch.figures['mirrored_after']:.0%}"
            for epoch in shown
        ),
        caption=f"At the end it held {last['mirrored_after']:.0%} of the rows, {size(last['mirror_bytes'])}."
        f"{_left_out(run)}",
        draw=draw,
    )
