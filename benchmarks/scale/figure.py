"""Draws the simulated figures of cluster.py, as docs/pictures/ does, too."""

from __future__ import annotations

from typing import Any

Figures = dict[str, Any]
# Of one prefix. S3 gives more only after a while (Amazon S3 User Guide, "Best practices design patterns").
S3_GETS_PER_S = 5500
WAYS = {"global": "global order", "parts": "parts"}


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
