"""The look of the pictures, and how they are written.

`python docs/pictures/words.py` draws `words.svg` anew; every other file here but this one does the same.
"""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

DOCS = Path(__file__).parent.parent
INK, PALE, LINE = "#333333", "#e7e9ec", "#9aa1a9"
COLOURS = ["#3b6fb6", "#d9822b", "#3f9d6d", "#a05195"]

# The same file on every run: no date, no random identifiers. Letters are outlines, so that no font is needed.
mpl.rcParams.update({"svg.hashsalt": "zloader", "svg.fonttype": "path", "font.size": 10, "text.color": INK})
mpl.rcParams.update({"axes.edgecolor": LINE, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK})
mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure in inches, and axes over all of it, whose unit is the inch and whose origin is at the bottom left."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, corner: tuple[float, float], size: tuple[float, float], colour: str, edge: str = "white") -> None:
    """A filled rectangle."""
    axes.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor=edge, linewidth=0.8))


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = LINE) -> None:
    """An arrow from start to end."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=colour, linewidth=1.2))


def table(page: str, header: str) -> list[list[str]]:
    """The cells of the table of a page of docs/ whose header begins in this way, row by row."""
    text = (DOCS / f"{page}.md").read_text()
    rows = text[text.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows]


def number(text: str) -> float:
    """A number as the pages write it, such as 231 000."""
    return float(text.replace(" ", ""))


def write(figure: Figure, name: str, folder: Path = Path(__file__).parent) -> Path:
    """Writes the figure as NAME.svg into a folder, and returns the path."""
    path = folder / f"{name}.svg"
    figure.savefig(path, facecolor="white", metadata={"Date": None, "Creator": None})
    return path
