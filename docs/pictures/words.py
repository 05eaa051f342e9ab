"""Draws the words of an epoch: shard, chunk, block, fetch, minibatch."""

import style
from matplotlib.figure import Figure

CHOSEN = {3: 0, 9: 1, 14: 2, 20: 3}  # the blocks of the fetch, and their colours
N_BLOCKS, LEFT, WIDTH = 24, 1.75, 6.0
# A permutation of the 16 rows of a fetch of 4 blocks.
PERMUTED = [6, 13, 0, 11, 9, 2, 15, 4, 1, 8, 14, 7, 12, 5, 3, 10]


def draw() -> Figure:
    """The picture, from the objects of a store at the top to minibatches at the bottom."""
    figure, axes = style.canvas(8, 5.3)
    step = WIDTH / N_BLOCKS

    def label(height: float, word: str, meaning: str) -> None:
        axes.text(0.1, height + 0.14, word, fontsize=12, fontweight="bold", va="center")
        axes.text(0.1, height - 0.13, meaning, fontsize=8.5, va="center", linespacing=1.35)

    label(4.75, "shards", "objects in the bucket")
    for shard in range(3):
        style.box(axes, (LEFT + shard * 2.0, 4.5), (1.96, 0.5), "white", style.INK)
    label(3.95, "chunks", "the least that can\nbe decoded")
    for chunk in range(12):
        style.box(axes, (LEFT + chunk * 0.5, 3.7), (0.46, 0.5), style.PALE, style.LINE)
    label(3.05, "blocks", "neighbouring rows\nthat stay together")
    for block in range(N_BLOCKS):
        colour = style.COLOURS[CHOSEN[block]] if block in CHOSEN else style.PALE
        style.box(axes, (LEFT + block * step, 2.85), (step - 0.03, 0.5), colour)
    label(1.85, "fetch", "blocks that are\nloaded together")
    for block, colour in CHOSEN.items():
        left = LEFT + 0.6 + colour * 1.25
        style.arrow(axes, (LEFT + (block + 0.5) * step, 2.8), (left + 0.5, 2.2), style.COLOURS[colour])
        for row in range(4):
            style.box(axes, (left + row * 0.25, 1.65), (0.25, 0.5), style.COLOURS[colour])
    label(0.6, "minibatches", "rows of the fetch,\nshuffled and cut")
    style.arrow(axes, (LEFT + 3.0, 1.55), (LEFT + 3.0, 1.0))
    axes.text(LEFT + 3.12, 1.27, "shuffled in memory", fontsize=8.5, va="center")
    for place, row in enumerate(PERMUTED):
        left = LEFT + 0.35 + place * 0.25 + place // 4 * 0.45
        style.box(axes, (left, 0.4), (0.25, 0.5), style.COLOURS[row // 4])
    return figure


if __name__ == "__main__":
    style.write(draw(), "words")
