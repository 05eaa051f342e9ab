"""Draws the mirror and the ranks of a machine, in a cold and in a warm epoch."""

import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

N_BLOCKS, RANKS = 10, 4


def panel(axes: Axes, left: float, name: str, held: int) -> None:
    """Bucket, mirror and ranks, with `held` blocks of the mirror filled. Coloured blocks are being read."""
    axes.text(left, 4.32, name, fontsize=12, fontweight="bold", va="center")
    style.box(axes, (left, 3.1), (3.6, 0.5), "white", style.INK)
    axes.text(left + 1.8, 3.35, "store in a bucket", ha="center", va="center")
    style.box(axes, (left, 1.65), (3.6, 0.62), "white", style.INK)
    axes.text(left + 0.08, 2.36, "mirror on the local disk", fontsize=8.5, va="bottom")
    for block in range(N_BLOCKS):
        reading = held < N_BLOCKS and held <= block < held + RANKS
        colour = style.COLOURS[block - held] if reading else style.LINE if block < held else style.PALE
        style.box(axes, (left + 0.12 + block * 0.338, 1.75), (0.31, 0.42), colour)
        if reading:
            middle = left + 0.275 + block * 0.338
            style.arrow(axes, (middle, 3.07), (middle, 2.2), style.COLOURS[block - held])
    for rank in range(RANKS):
        corner = left + rank * 0.92
        style.box(axes, (corner, 0.2), (0.84, 0.5), style.COLOURS[rank])
        axes.text(corner + 0.42, 0.45, f"rank {rank}", color="white", ha="center", va="center")
        style.arrow(axes, (corner + 0.42, 1.62), (corner + 0.42, 0.74), style.COLOURS[rank])


def draw() -> Figure:
    """Two panels, side by side."""
    figure, axes = style.canvas(8, 4.6)
    panel(axes, 0.15, "a cold epoch", held=4)
    panel(axes, 4.25, "a warm epoch", held=N_BLOCKS)
    axes.text(0.15, 3.95, "Each row is read and decoded once, by one rank.", fontsize=9, va="center")
    axes.text(4.25, 3.95, "Nothing is requested. Nothing is decoded.", fontsize=9, va="center")
    return figure


if __name__ == "__main__":
    style.write(draw(), "mirror")
