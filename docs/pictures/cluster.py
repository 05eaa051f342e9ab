"""Draws many machines that train on one store: what benchmarks/scale/cluster.py has simulated, from cluster.json.

python -m benchmarks.scale.cluster --output docs/pictures/cluster.json
"""

import json
import sys
from pathlib import Path

import style
from matplotlib.figure import Figure

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1]))  # where the package benchmarks is

from benchmarks.scale import figure  # noqa: E402


def draw() -> Figure:
    """Rows/s by machines, with and without a limit of GETs, and the bytes from the bucket."""
    found = json.loads((HERE / "cluster.json").read_text())
    drawn: Figure = figure.draw_ways(found)
    return drawn


if __name__ == "__main__":
    style.write(draw(), "cluster")
