"""Draws how far producers scale: the figures that benchmarks/scale/run.py has simulated and written to scaling.json.

python -m benchmarks.scale.run --simulate --output docs/pictures/scaling.json
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
    """Rows/s by machines without mirrors, and reads with mirrors."""
    found = json.loads((HERE / "scaling.json").read_text())
    drawn: Figure = figure.draw(found)
    return drawn


if __name__ == "__main__":
    style.write(draw(), "scaling")
