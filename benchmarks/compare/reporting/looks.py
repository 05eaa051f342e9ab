"""How a peer looks in every figure of the benchmark report: its colour, marker and line.

zloader is blue, five other tools have a colour of their own, and the rest are grey: with a colour blindness, no more
colours can be told apart. Nobody has to tell peers apart by colour alone, because each of the first 22 peers has a
marker of its own, and bars carry names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compare.reporting.charts import LIGHT
from benchmarks.compare.reporting.records import Limit
from benchmarks.compare.reporting.words import LIMITS, Figure, is_ours, number

_FAMILIES = (
    ("zloader", "blue"), ("annbatch", "vermilion"), ("scdataset", "forest"), ("slaf", "rose"), ("annloader", "sky"),
    ("bionemo", "olive"), ("anndatainmemory", "ink"),
)  # fmt: skip
_MARKERS = "osD^vP*X<>phd8" + "1234+x|_"
_LINES = ("-", "--", ":", "-.")
FARTHEST = 1.6  # times the largest value: limits farther away are not on the axis
OVER = {"facecolor": LIGHT["card"], "edgecolor": "none", "pad": 0.5}  # hides grid lines behind a label


@dataclass(frozen=True)
class Look:
    """The look of a peer. `size` is that of its markers."""

    colour: str
    marker: str
    line: str
    width: float
    size: float


def looks(peers: Sequence[str]) -> Mapping[str, Look]:
    """The look of every peer. Those of one tool share its colour and differ by line and marker."""
    found: dict[str, Look] = {}
    used: dict[str, int] = {}
    for place, peer in enumerate(peers):
        family, name = _family(peer)
        variant = used[family] = used.get(family, -1) + 1
        found[peer] = Look(
            colour=LIGHT[name],
            marker=_MARKERS[place % len(_MARKERS)],
            line=_LINES[variant % len(_LINES)],
            width=3 if family == "zloader" and not variant else 1.5,
            size=8 if is_ours(peer) else 6,
        )
    return found


def _family(peer: str) -> tuple[str, str]:
    """The tool of a peer, and the name of its colour."""
    name = re.sub(r"[^a-z]", "", peer.lower())
    return next((family for family in _FAMILIES if name.startswith(family[0])), (peer, "quiet"))


def plain_ticks(axis: Any, figure: Figure) -> None:
    """Writes the ticks of an axis as 200k, or as 1 GB if the figure is a size."""
    from matplotlib.ticker import EngFormatter, FuncFormatter

    axis.set_major_formatter(
        FuncFormatter(lambda value, _: figure.text(value)) if figure.is_size else EngFormatter(sep="")
    )


def draw_limits(axes: Any, limits: Sequence[Limit], most: float, *, upright: bool) -> list[Any]:
    """Limits as lines across the axes, named in the legend; those far beyond the values are only named.

    Returns the handles for the legend, and widens the axis so that the lines are on it.
    """
    handles = []
    for place, limit in enumerate(limits):
        speed = float(limit.rows_per_s or 0)
        label = f"limit: {LIMITS.get(limit.name, limit.name)}, {number(speed)}"
        style = {"color": LIGHT["ink"], "linestyle": _LINES[1 + place % 3], "linewidth": 1.4}
        if speed < FARTHEST * most:
            handles.append((axes.axvline if upright else axes.axhline)(speed, label=label, zorder=3.5, **style))
        else:
            handles += axes.plot([], [], label=f"{label} (beyond the axis)", **style)
    return handles


def slug(*words: str) -> str:
    """The words as a name that suits ids and files."""
    return re.sub(r"\W+", "-", "-".join(words).lower()).strip("-")
