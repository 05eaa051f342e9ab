"""The cells that come with zloader, to try things out."""

from __future__ import annotations

import importlib.resources
import lzma
import os
from pathlib import Path

from zloader.caching.directory import draft_path
from zloader.common.errors import OptionError
from zloader.common.keywords import answers

NAME = "pancreas_human.h5ad"


@answers
def example_h5ad(path: str | os.PathLike[str] = NAME) -> Path:
    """Writes the cells that come with zloader to an .h5ad file, and returns its path.

    >>> path = zl.example_h5ad("pancreas.h5ad")
    >>> report = zl.convert(path, "pancreas.zarr", progress=False)
    >>> report.rows, report.genes
    (2142, 20125)

    They are 2 142 human pancreatic islet cells x 20 125 genes, raw UMI counts, with the obs columns `cell_type1`
    (14 types), `donor` and `library` (Baron et al. 2016, Cell Systems 3, 346-360; GEO GSE84133). The file has 17 MB.

    Does nothing if the file is there already. Raises OptionError if another file has that name.
    """
    target = Path(path)
    content = lzma.decompress((importlib.resources.files("zloader") / "data" / f"{NAME}.xz").read_bytes())
    if target.exists():
        if not target.is_file() or target.read_bytes() != content:
            raise OptionError(f"{target} exists and is not the example: choose another path")
        return target
    with draft_path(target) as draft:
        draft.write_bytes(content)
        draft.replace(target)
    return target
