"""Draws entropy against speed: the table of sizes in docs/shuffling.md."""

import re

import style
from matplotlib.figure import Figure

HEADER = "| bits of random (stratified) blocks, rows/s at 400 MB/s |"
CELL = re.compile(r"([\d.]+) \(([\d.]+)\), ([\d ]+)")


def draw() -> Figure:
    """A line for each block size through its fetch factors. Circles are random blocks, dots stratified ones."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    (bits,) = re.findall(r"have ([\d.]+) bits\. Each cell", (style.DOCS / "shuffling.md").read_text())
    axes.axhline(float(bits), color=style.INK, linewidth=1, linestyle=":")
    axes.text(50, float(bits) + 0.03, "random rows", fontsize=9)
    for (size, *cells), colour in zip(style.table("shuffling", HEADER), style.COLOURS, strict=True):
        found = [CELL.fullmatch(cell.replace("*", "")).groups() for cell in cells]
        speeds = [style.number(speed) / 1000 for _, _, speed in found]
        axes.plot(speeds, [float(plain) for plain, _, _ in found], "o--", color=colour, markerfacecolor="white")
        stratified = [float(strata) for _, strata, _ in found]
        axes.plot(speeds, stratified, "o-", color=colour, label=f"blocks of {size.removeprefix('block_size ')} rows")
    axes.plot([], [], "o--", color=style.LINE, markerfacecolor="white", label="without strata")
    axes.set(xlabel="thousand rows per second through a link of 400 MB/s", ylabel="bits in a minibatch of 64")
    axes.set(xlim=(0, 110), ylim=(1.6, 3.85))
    axes.legend(frameon=False, loc="lower left")
    return figure


if __name__ == "__main__":
    style.write(draw(), "mixing")
