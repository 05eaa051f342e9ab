"""The data sets of run.py, and the figures that every epoch over them is checked against."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness.measuring import in_new_process

_WINDOW = 1 << 24  # values read at a time
SCREEN_SET = 64  # cells in a set of the drug screen


@dataclass(frozen=True, kw_only=True)
class Data:
    """An .h5ad file and its true figures. `total` is the sum of all values of X. `label` is a categorical obs column.

    For a drug screen, `rows` and `total` are those of the treated rows. `total` is None if nobody knows.
    """

    name: str
    path: Path
    rows: int
    genes: int
    values: int
    total: float | None
    label: str


def synthetic(path: Path, *, rows: int, genes: int, name: str = "synthetic") -> Data:
    """Counts that resemble Tahoe-100M (synthetic.py), always the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    in_new_process(_generate, path, rows, genes)
    return of_file(path, name)


def pancreas(path: Path) -> Data:
    """The cells of the human pancreas that come with zloader."""
    path.parent.mkdir(parents=True, exist_ok=True)
    in_new_process(_example, path)
    return of_file(path, "pancreas")


def screen(path: Path, *, cell_lines: int, drugs: int, genes: int) -> Data:
    """A drug screen (screens.py), with twice as many rows per group as cells in a set, so that all rows are in sets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    in_new_process(_write_screen, path, cell_lines, drugs, genes)
    return of_file(path, "screen", treated=True)


def own(path: Path) -> Data:
    """A file of the user's own. Its name is also that of a folder and of a bucket."""
    return of_file(path, "own-" + re.sub(r"[^A-Za-z0-9]+", "-", path.stem))


def of_file(path: Path, name: str, *, treated: bool = False) -> Data:
    """The figures of a file, counted in a process of its own. Exits if it cannot be used."""
    found = in_new_process(_counted, path, treated)
    if isinstance(found, str):
        sys.exit(f"{path}: {found}")
    return Data(name=name, path=path.absolute(), **found)


def panel(data: Data, n_genes: int) -> tuple[Data, list[int]]:
    """The most variable genes of a data set (seurat_v3): its figures with these genes alone, and their positions."""
    genes, values, total = in_new_process(_panel, data.path, n_genes)
    return replace(data, genes=len(genes), values=values, total=total), genes


def of_genes(data: Data, genes: list[int], path: Path) -> Data:
    """The rows of a data set with some genes alone, in a file of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    in_new_process(_write_genes, data.path, path, genes)
    return of_file(path, "panel")


def compressed(path: Path, compression: str) -> Path:
    """The same file as anndata writes it with a compression, beside it. It is kept for further runs."""
    target = path.with_name(f"{path.stem}-{compression}.h5ad")
    if not target.exists():
        in_new_process(_compress, path, target, compression)
    return target


def _compress(path: Path, target: Path, compression: str) -> None:
    import anndata

    anndata.read_h5ad(path).write_h5ad(target, compression=compression)


def _write_genes(path: Path, target: Path, genes: list[int]) -> None:
    import anndata

    anndata.read_h5ad(path)[:, genes].copy().write_h5ad(target)


def _generate(path: Path, rows: int, genes: int) -> None:
    from benchmarks.data import synthetic as model

    model.generate(path, rows=rows, genes=genes)


def _example(path: Path) -> None:
    import anndata
    import scipy.sparse

    import zloader as zl

    adata = anndata.read_h5ad(zl.example_h5ad(path))
    adata.X = scipy.sparse.csr_matrix(adata.X)
    adata.write_h5ad(path)


def _write_screen(path: Path, cell_lines: int, drugs: int, genes: int) -> None:
    from benchmarks.data import screens

    size = screens.Screen(cell_lines=cell_lines, drugs=drugs, genes=genes, rows_per_group=2 * SCREEN_SET)
    screens.write(path, size, obsm=True)


def _panel(path: Path, n_genes: int) -> tuple[list[int], int, float]:
    """The positions of the genes, ascending, and the number and the sum of their values."""
    import h5py
    import numpy as np

    import zloader as zl

    table = zl.open_dataset(path).highly_variable_genes(n_genes, flavor="seurat_v3", progress=False)
    chosen = table["highly_variable"].to_numpy()
    values, total = 0, 0.0
    with h5py.File(path) as file:
        for start in range(0, len(file["X/data"]), _WINDOW):
            here = slice(start, start + _WINDOW)
            window = file["X/data"][here][chosen[file["X/indices"][here]]]
            values, total = values + len(window), total + float(window.sum(dtype=np.float64))
    return np.flatnonzero(chosen).tolist(), values, total


def _counted(path: Path, treated: bool) -> dict[str, object] | str:
    """The figures, or the reason why the file cannot be used."""
    import anndata
    import h5py
    import numpy as np

    with h5py.File(path) as file:
        if file["X"].attrs.get("encoding-type") != "csr_matrix":
            return "X is not a CSR matrix, which most of the tools need"
        obs = anndata.io.read_elem(file["obs"])
        labels = [column for column in obs if obs[column].dtype == "category"]
        if not labels:
            return "obs has no categorical column to use as labels"
        indptr = file["X/indptr"][:]
        chosen = (obs["drug"] != "DMSO").to_numpy() if treated else np.ones(len(obs), bool)
        of_value = np.repeat(chosen, np.diff(indptr)) if treated else None
        total, values = 0.0, int(np.diff(indptr)[chosen].sum())
        for start in range(0, int(indptr[-1]), _WINDOW):
            here = slice(start, start + _WINDOW)
            window = file["X/data"][here].astype(np.float64)
            total += float(window.sum() if of_value is None else window[of_value[here]].sum())
        genes = int(file["X"].attrs["shape"][1])
    return {"rows": int(chosen.sum()), "genes": genes, "values": values, "total": total, "label": labels[0]}
