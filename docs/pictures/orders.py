"""Draws which rows come when, as zloader plans them: in order, in shuffled blocks, and at random."""

from types import SimpleNamespace

import numpy as np
import style
from matplotlib.figure import Figure

import zloader as zl
from zloader.order.plan import Plan

ROWS, BATCH_SIZE, FETCH_FACTOR = 384, 8, 8
SAMPLINGS = {
    "in order": zl.Streaming(),
    "blocks of 8 rows": zl.BlockShuffling(8, n_strata=8),
    "random rows": zl.BlockShuffling(1),
}


def order_of(sampling: zl.Sampling) -> np.ndarray:
    """The rows of an epoch, in the order in which minibatches have them."""
    order = sampling.order(SimpleNamespace(n_obs=ROWS), BATCH_SIZE, BATCH_SIZE * FETCH_FACTOR)
    plan = Plan(order=order, batch_size=BATCH_SIZE, fetch_factor=FETCH_FACTOR, epoch=0)
    fetches = [plan.fetch(number) for number in range(plan.n_fetches)]
    return np.concatenate([fetch.rows[fetch.order] for fetch in fetches])


def draw() -> Figure:
    """A panel for each sampling. Stripes are fetches."""
    figure = Figure(figsize=(8, 3.1), layout="constrained")
    for axes, (name, sampling) in zip(figure.subplots(1, 3, sharey=True), SAMPLINGS.items(), strict=True):
        for start in range(0, ROWS, 2 * BATCH_SIZE * FETCH_FACTOR):
            axes.axvspan(start, start + BATCH_SIZE * FETCH_FACTOR, color=style.PALE, linewidth=0)
        axes.plot(np.arange(ROWS), order_of(sampling), ".", markersize=2.5, color=style.COLOURS[0])
        axes.set(title=name, xlabel="position in the epoch", xlim=(0, ROWS), ylim=(0, ROWS), xticks=[], yticks=[])
    figure.axes[0].set_ylabel("row in the store")
    return figure


if __name__ == "__main__":
    style.write(draw(), "orders")
