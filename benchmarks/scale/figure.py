"""Draws the simulated figures of run.py and cluster.py, as docs/pictures/ does, too. Needs no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Figures = dict[str, Any]
# Of one prefix. S3 gives more only after a while (Amazon S3 User Guide, "Best practices design patterns").
S3_GETS_PER_S = 5500
ANCHORS = {"SLAF, 32 producer nodes": 30_581.0, "protoplast, 100 M cells in 14.5 minutes": 115_000.0}
WAYS = {"global": "global order", "parts": "parts"}
_RATES = (20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000)  # ticks


def draw(found: Figures) -> Any:
    """Rows/s by machines, and the bytes that epochs with mirrors read, as a figure of matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(run["network"] for run in found["scale"]):
        runs = [run for run in found["scale"] if run["network"] == name]
        left.plot([run["machines"] for run in runs], [run["rows_per_s"] for run in runs], marker="o", label=name)
    promised = {f"{S3_GETS_PER_S} GETs/s, S3's promise": s3_rows_per_s(found)}
    for name, rate in (ANCHORS | promised).items():
        left.axhline(rate, color="gray", linestyle="--", linewidth=1)
        left.annotate(name, (1, rate), (-3, -3), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="right", va="top", fontsize=8, color="gray")  # fmt: skip
    left.set(xscale="log", yscale="log", xlabel="machines with producers", ylabel="rows/s of one trainer")
    left.set_title(f"without mirrors, {found['rows'] // 10**6} million rows", fontsize=10)
    ticks = sorted({run["machines"] for run in found["scale"]})
    left.set_xticks(ticks, [str(tick) for tick in ticks])
    left.set_yticks(_RATES, [f"{rate:,}".replace(",", " ") for rate in _RATES])
    left.minorticks_off()
    for name, numbers, shares in _mirror_lines(found["mirrors"]):
        alike = "machine'" in name  # as the line before it, which shows through
        right.plot(numbers, shares, "--" if alike else "-", marker="." if alike else "o", label=name)
    right.set(xlabel="epoch", ylabel="read from the bucket, of the first epoch", ylim=(0, 1.05), xticks=[0, 1, 2])
    right.set_title("with mirrors on the producers' machines", fontsize=10)
    for axes in (left, right):
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(-0.1, -0.14))
    return figure


def draw_ways(found: Figures) -> Any:
    """Rows/s of many machines, without and with the limit of GETs, and what three epochs read from the bucket."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    axes = figure.subplots(1, 3)
    runs = [run for run in found["ways"] if run["link"] == "25 Gbit/s"]
    last = max(run["epoch"] for run in runs)
    for number, way in enumerate(WAYS):
        for of, limit in zip(axes, (None, S3_GETS_PER_S), strict=False):
            for epoch, line in ((1, "--"), (last, "-")):
                same = [run for run in runs if (run["way"], run["limit"], run["epoch"]) == (way, limit, epoch)]
                rates = [run["rows_per_s"] for run in same]
                label = f"{WAYS[way]}, epoch {epoch}"
                of.plot([run["machines"] for run in same], rates, line, marker="o", color=f"C{number}", label=label)
        read: dict[int, float] = {}
        for run in runs:
            if (run["way"], run["limit"]) == (way, None):
                read[run["machines"]] = read.get(run["machines"], 0) + run["bucket_bytes"] / found["stored_bytes"]
        axes[2].plot(list(read), list(read.values()), marker="o", color=f"C{number}", label=WAYS[way])
    ticks = sorted({run["machines"] for run in runs})
    for each, title in zip(axes, ("any number of GETs", f"{S3_GETS_PER_S} GETs/s, S3's promise"), strict=False):
        each.set(yscale="log", ylabel="rows/s of all machines", ylim=(1e5, 5e7))
        each.set_title(f"the bucket answers {title}", fontsize=10)
    axes[2].set(ylim=(0, None), ylabel=f"bytes of {last} epochs from the bucket, of the store")
    axes[2].set_title("read from the bucket", fontsize=10)
    for each in axes:
        each.set(xscale="log", xlabel="machines")
        each.set_xticks(ticks, [str(tick) for tick in ticks])
        each.minorticks_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def s3_rows_per_s(found: Figures) -> float:
    """The rate at which an epoch without mirrors reaches the GETs per second of S3_GETS_PER_S."""
    return S3_GETS_PER_S * float(found["rows"]) / max(float(run["gets"]) for run in found["scale"])


def _mirror_lines(runs: Sequence[Figures]) -> Iterator[tuple[str, list[int], list[float]]]:
    for first in (run for run in runs if run["epoch"] == 0):
        same = [run for run in runs if (run["machines"], run["locality"]) == (first["machines"], first["locality"])]
        read = [run["bytes_read"] / first["bytes_read"] for run in same]
        yield f"machines: {first['machines']}, locality={first['locality']!r}", [run["epoch"] for run in same], read
