"""The charts that all pages share, and the check that their labels are readable."""

from __future__ import annotations

import pytest
from pages import drawn, labels_through_which_a_line_passes

from zloader.commands.page import LIGHT, Chart, charts, page


def chart(draw) -> Chart:
    return Chart(name="c", title="a $title$ <b>", description="a < b", caption="c > d", draw=draw)


@pytest.mark.parametrize(
    ("height", "box", "struck"),
    [
        (0.5, None, ["label"]),
        (0.75, None, []),
        (0.5, {"facecolor": LIGHT["card"], "edgecolor": "none"}, []),
        (0.5, {"facecolor": "none"}, ["label"]),
    ],
    ids=["on a line", "between lines", "on an opaque box", "on a transparent box"],
)
def test_a_label_on_a_grid_line_is_found(height, box, struck):
    def draw(figure):
        axes = figure.subplots()
        axes.set_yticks([0, 0.5, 1])
        axes.text(0.5, height, "label", va="center", bbox=box)

    assert labels_through_which_a_line_passes(drawn(chart(draw))) == struck


def test_a_page_escapes_text_and_replaces_every_colour():
    def draw(figure):
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=LIGHT["green"])
        axes.set_xlabel("$x$ < 細胞")

    text = page("1 < 2", charts(chart(draw)))
    assert "<h1>1 &lt; 2</h1>" in text
    assert "<h3>a $title$ &lt;b&gt;</h3>" in text
    assert "$x$ &lt; 細胞" in text
    assert "stroke: var(--green)" in text
    assert LIGHT["green"] not in text[text.index("<svg") :]
