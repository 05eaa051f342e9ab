"""Numbers in the text of pages stay on one line, with the groups of their digits and with their units."""

from __future__ import annotations

from typing import Any

from docutils import nodes

from zloader.commands.output import unbroken


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("doctree-read", _join)
    return {"parallel_read_safe": True}


def _join(app: Any, document: nodes.document) -> None:
    for text in list(document.findall(nodes.Text)):
        if not isinstance(text.parent, nodes.literal | nodes.FixedTextElement | nodes.raw):  # code is copied
            text.parent.replace(text, nodes.Text(unbroken(text)))
