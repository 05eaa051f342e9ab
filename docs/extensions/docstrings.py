"""Docstrings and signatures for Sphinx: sections such as `Args:` become lists of terms."""

from __future__ import annotations

import re
from typing import Any

SECTIONS = {"Args:": "Arguments", "Attributes:": "Attributes", "Memory:": "Memory", "Reads:": "Reads"}
SECTIONS["Pace and failures:"] = "Pace and failures"
MADE_BY_FUNCTIONS = {"zloader.Dataset", "zloader.View"}  # nobody calls their constructors
TERM = re.compile(r"(\w+(?:, \w+)*): (.*)")


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _format)
    app.connect("autodoc-process-signature", _parsable)
    return {"parallel_read_safe": True}


def _format(app: Any, what: str, name: str, described: Any, options: Any, lines: list[str]) -> None:
    lines[:] = formatted(lines)


def _parsable(app: Any, what: str, name: str, described: Any, options: Any, *parts: str | None) -> Any:
    """The signature and the return annotation. The default of a factory has no form that Sphinx can parse."""
    signature, returned = parts
    if name in MADE_BY_FUNCTIONS:
        return "", None
    return signature and signature.replace("<factory>", "..."), returned


def formatted(lines: list[str]) -> list[str]:
    """The lines of a docstring with its sections as reStructuredText."""
    made, inside = [], False
    for line in lines:
        inside = line in SECTIONS or (inside and (not line or line.startswith(" ")))
        term = TERM.fullmatch(line[4:]) if inside else None
        if line in SECTIONS:
            made += ["", f".. rubric:: {SECTIONS[line]}", ""]
        elif term:
            made += [", ".join(f"``{each}``" for each in term[1].split(", ")), f"    {term[2]}"]
        else:
            made.append(line[4:] if inside else line)
    return made
