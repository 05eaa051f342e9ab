"""The charts of `zloader bench`: speed and its limits, waiting, and reads and the mirror over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zloader.commands.bench_results import KINDS, BenchEpoch, BenchRun, Sample
from zloader.commands.page import COLD, LIGHT, OVER, WARM, Chart, draw_rates, name_colours, rates, scale_speeds
from zloader.common.messages import size

_COLOURS = {"cold": COLD, "mixed": LIGHT["purple"], "warm": WARM}
_MOST_EPOCHS = 20  # in the charts over time
_MOST_BINS = 80  # of an epoch
_ALL_BINS = 600
_LABELLED = 0.12  # share of the axis that an epoch needs for its label


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
    lines: list[tuple[str, Sequence[float], str, str]] = []
    for kind, pace in run.paces.items():
        measured = [epoch.figures["rows_per_s"] for epoch in run.epochs if epoch.kind == kind]
        lines.append((f"{kind} epochs", measured, _COLOURS[kind], "o"))
        for name, ceiling in pace.ceilings.items():
            if name != "your step":
                lines.append((f"limit: {name}\n({kind})", [ceiling], LIGHT["quiet"], "D"))
    step = next((pace.ceilings["your step"] for pace in run.paces.values() if "your step" in pace.ceilings), None)
    if step is not None:
        lines.append(("limit: your step", [step], LIGHT["quiet"], "D"))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.grid(visible=False)
        axes.grid(visible=True, axis="x")
        for place, (_, values, colour, marker) in enumerate(lines):
            axes.plot(values, [place] * len(values), marker, color=colour, markersize=7, alpha=0.8)
            middle = sorted(values)[len(values) // 2]
            axes.annotate(f"{middle:,.0f}", (middle, place), (0, 8), textcoords="offset points", ha="center", bbox=OVER)
        scale_speeds(axes, [value for _, values, *_ in lines for value in values], "rows per second")
        axes.set_yticks(range(len(lines)), [name for name, *_ in lines])
        axes.set_ylim(len(lines) - 0.5, -0.75)
        axes.tick_params(axis="y", length=0)

    return Chart(
        name="speed",
        title="Speed, and what would limit it",
        description="; ".join(
            f"{' '.join(name.split())}: {', '.join(f'{value:,.0f}' for value in values[:_MOST_EPOCHS])} rows per second"
            for name, values, *_ in lines
        ),
        caption="A circle is an epoch. A diamond is the speed that one part alone would allow, computed from the "
        "bytes, seconds and steps that were measured.",
        draw=draw,
    )


def throughput_chart(run: BenchRun) -> Chart:
    """Rows/s over time."""
    return _over_time(
        run,
        name="throughput",
        title="Speed over time",
        of=lambda sample: sample.rows,
        label="rows per second",
        caption="An epoch starts slowly while its first rows are read.",
        summary=lambda epoch: f"{epoch.figures['rows_per_s']:,.0f} rows per second",
    )


def reading_chart(run: BenchRun) -> Chart:
    """Bytes/s read from the store over time, below the speed of the link."""
    link = run.link_bytes_per_s
    return _over_time(
        run,
        name="reading",
        title="Reading from the store over time",
        of=lambda sample: sample.bytes_read / 1e6,
        label="read from the store (MB per second)",
        caption="Reads count when they begin, so that bytes in flight show up early."
        + ("" if link is None else f" The dotted line is the speed of the {_link(run)}, {size(link)}/s."),
        summary=lambda epoch: f"{size(epoch.figures['bytes_read'])} in {epoch.figures['gets']:,.0f} GETs",
        limit=None if link is None else link / 1e6,
    )


def _link(run: BenchRun) -> str:
    name = "disk" if run.local else "link"
    return f"{name} that --link-speed states" if run.link_stated else f"{name}, measured without decoding"


def _over_time(  # noqa: PLR0913 - words and a number for each chart
    run: BenchRun,
    *,
    name: str,
    title: str,
    of: Callable[[Sample], float],
    label: str,
    caption: str,
    summary: Callable[[BenchEpoch], str],
    limit: float | None = None,
) -> Chart:
    """A rate over the time of all epochs."""
    shown = run.epochs[:_MOST_EPOCHS]
    most_bins = min(_MOST_BINS, _ALL_BINS // len(shown))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for epoch in shown:
            times, totals = _series(epoch, of)
            edges, values = rates(times, totals, min(most_bins, len(totals) // 3))
            draw_rates(axes, edges, values, _COLOURS[epoch.kind])
        if limit is not None and limit < 3 * axes.get_ylim()[1]:
            axes.axhline(limit, color=LIGHT["quiet"], linestyle=":")
        axes.set_ylim(0)
        axes.yaxis.set_major_formatter("{x:,.0f}" if axes.get_ylim()[1] > 10 else "{x:g}")
        _finish_time_axis(axes, shown)
        axes.set_ylabel(label)
        name_colours(figure, _names(shown))

    return Chart(
        name=name,
        title=title,
        description="; ".join(f"epoch {epoch.epoch}, {epoch.kind}: {summary(epoch)}" for epoch in shown),
        caption=caption + _left_out(run),
        draw=draw,
    )


def _series(epoch: BenchEpoch, of: Callable[[Sample], float]) -> tuple[list[float], list[float]]:
    """The times of an epoch's samples since the first epoch began, and a total at each; both begin with the epoch."""
    times = [epoch.began_s, *(epoch.began_s + sample.at_s for sample in epoch.samples)]
    return times, [0.0, *map(of, epoch.samples)]


def _finish_time_axis(axes: Any, shown: Sequence[BenchEpoch]) -> None:
    """Limits, and the numbers of the epochs where there is room for them, above the axes."""
    spans = [(epoch, *_span(epoch)) for epoch in shown]
    first, last = spans[0][1], spans[-1][2]
    axes.set_xlim(first, last)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("time since the first epoch began (seconds)")
    for epoch, start, stop in spans:
        if stop - start >= _LABELLED * (last - first):
            axes.text((start + stop) / 2, 1.02, f"epoch {epoch.epoch}", transform=axes.get_xaxis_transform(),
                      ha="center", va="bottom")  # fmt: skip


def _span(epoch: BenchEpoch) -> tuple[float, float]:
    return epoch.began_s, epoch.began_s + epoch.samples[-1].at_s


def _names(shown: Sequence[BenchEpoch]) -> dict[str, str]:
    """The colour of each kind of epoch, by its name with the numbers of its epochs."""
    of_kinds = {kind: [epoch.epoch for epoch in shown if epoch.kind == kind] for kind in KINDS}
    return {f"{kind}: {_numbers(found)}": _COLOURS[kind] for kind, found in of_kinds.items() if found}


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
    bars = {kind: list(_times(run, kind)) for kind in run.paces}
    colours = [LIGHT["pink"], LIGHT["purple"], LIGHT["green"]]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.grid(visible=False)
        axes.grid(visible=True, axis="x")
        for place, times in enumerate(bars.values()):
            left = 0.0
            for (_, seconds), colour in zip(times, colours, strict=True):
                axes.barh(place, seconds, left=left, height=0.5, color=colour, alpha=0.75)
                left += seconds
        axes.set_yticks(range(len(bars)), [f"{kind} epoch" for kind in bars])
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlim(0)
        axes.locator_params(axis="x", nbins=5)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("time of an epoch (seconds)")
        name_colours(figure, dict(zip((name for name, _ in next(iter(bars.values()))), colours, strict=True)))

    return Chart(
        name="waiting",
        title="Where the time of an epoch went",
        description="; ".join(
            f"{kind} epoch: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times)
            for kind, times in bars.items()
        ),
        caption="Only waiting can be saved by a faster loader, store or link."
        + (f" The steps were simulated: {1000 * run.step_s:g} ms of sleep each." if run.step_s else ""),
        draw=draw,
    )


def _times(run: BenchRun, kind: str) -> Iterator[tuple[str, float]]:
    """The parts of the time of an epoch."""
    pace = run.paces[kind]
    later_s = max(0.0, pace.wait_s - pace.first_wait_s)
    first_s = min(pace.first_minibatch_s, pace.elapsed_s)
    yield "until the first minibatch", first_s
    yield "waiting for later ones", later_s
    yield "steps and making tensors" if run.step_s else "making tensors", max(0.0, pace.elapsed_s - first_s - later_s)


def mirror_chart(run: BenchRun) -> Chart:
    """The share of the chunks in the mirror over time."""
    shown = run.epochs[:_MOST_EPOCHS]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for epoch in shown:
            times, _ = _series(epoch, lambda sample: sample.mirrored)
            shares = [epoch.figures["mirrored_before"], *(sample.mirrored for sample in epoch.samples)]
            axes.fill_between(times, [100 * share for share in shares], color=_COLOURS[epoch.kind], alpha=0.25,
                              linewidth=0)  # fmt: skip
            axes.plot(times, [100 * share for share in shares], color=_COLOURS[epoch.kind], clip_on=False)
        axes.set_ylim(0, 100)
        _finish_time_axis(axes, shown)
        axes.set_ylabel("chunks in the mirror (%)")
        name_colours(figure, _names(shown))

    last = run.epochs[-1].figures
    return Chart(
        name="mirror",
        title="The mirror filling",
        description="; ".join(
            f"epoch {epoch.epoch}: {epoch.figures['mirrored_before']:.0%} to {epoch.figures['mirrored_after']:.0%}"
            for epoch in shown
        ),
        caption=f"At the end it held {last['mirrored_after']:.0%} of the chunks, {size(last['mirror_bytes'])} when "
        f"decoded.{_left_out(run)}",
        draw=draw,
    )
