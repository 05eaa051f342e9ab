"""What the charts of the demo and of `zloader bench` share: speeds on an axis, rates over time, labels of epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zloader.commands.page import LIGHT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

OVER = {"facecolor": LIGHT["card"], "edgecolor": "none", "pad": 1}  # hides grid lines behind a label
MOST_LABELLED_EPOCHS = 6  # more labels do not fit side by side
_LOG_RATIO = 8  # speeds that differ by more are drawn on a logarithmic axis


def scale_speeds(axes: Any, values: Sequence[float], what: str = "cells per second") -> None:
    """Makes the x axis logarithmic if the speeds differ much, otherwise one from 0."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    logarithmic = max(values) > _LOG_RATIO * min(values) > 0
    if logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 1.8, max(values) * 1.8)
        decades = max(values) / min(values) > 100
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if decades else (1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, 1.15 * max(values))
        axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20k
    axes.set_xlabel(what + (" (log scale)" if logarithmic else ""))


def rates(
    times: Sequence[float], totals: Sequence[float], most_bins: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The rate at which a total grew, in time bins of equal width: the edges in seconds, and the values per second."""
    import numpy as np

    edges = np.linspace(times[0], times[-1], 1 + max(1, most_bins))
    return edges, np.diff(np.interp(edges, times, totals)) / np.diff(edges)


def draw_rates(axes: Any, edges: NDArray[np.float64], values: NDArray[np.float64], colour: str) -> None:
    """Draws rates over time as a filled line of steps."""
    axes.stairs(values, edges, fill=True, color=colour, alpha=0.25, linewidth=0)
    axes.stairs(values, edges, color=colour, linewidth=1.8)


def label_epoch(axes: Any, n_epochs: int, epoch: int, x: float) -> None:
    """Writes the number of the epoch above the axes, where there are no grid lines, unless there are too many."""
    if n_epochs <= MOST_LABELLED_EPOCHS:
        axes.text(x, 1.02, f"epoch {epoch}", transform=axes.get_xaxis_transform(), ha="center", va="bottom")


def name_colours(figure: Any, names: Mapping[str, str]) -> None:
    """A legend of the names of colours, below the axes."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=2)
