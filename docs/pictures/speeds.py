"""Draws cold and warm epochs: the cells per second of the table in docs/performance.md."""

import style
from matplotlib.figure import Figure


def draw() -> Figure:
    """A bar for each epoch of the table, on 16 cores."""
    rows = style.table("performance", "| epoch | cells/s, 16 cores |")
    names = [name.split(" (")[0] for name, *_ in rows]
    speeds = [style.number(row[1]) / 1000 for row in rows]
    colours = [style.COLOURS[0] if name.startswith("warm") else style.LINE for name in names]
    figure = Figure(figsize=(8, 0.36 * len(rows) + 0.7), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(names, speeds, color=colours)
    axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    axes.invert_yaxis()
    axes.set(xlabel="thousand cells per second, one process, 16 cores", xlim=(0, 1.12 * max(speeds)))
    axes.tick_params(left=False)
    return figure


if __name__ == "__main__":
    style.write(draw(), "speeds")
