"""Writes a small AnnData with the installed versions of anndata, pandas and zarr, to make the archives in tests/data.

    python tests/versions.py

adds `tests/data/anndata-VERSION.zip` with the results of `write_h5ad`, `write_zarr` and, if zloader is installed,
`zloader.convert`. If annbatch is installed, it instead adds `annbatch-VERSION.zip`, which also has annbatch's
collection. It runs on Python 3.9 and anndata 0.8 or newer, and imports nothing from the tests. Every value depends only
on its row and column, so `wanted` is the same for every version.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

N_ROWS, N_GENES = 20, 12
DATA = Path(__file__).parent / "data"


def x() -> sp.csr_matrix:
    """Counts with an empty first row."""
    row, gene = np.meshgrid(np.arange(N_ROWS), np.arange(N_GENES), indexing="ij")
    return sp.csr_matrix(((row * 7 + gene * 3) % 5 * ((row + gene) % 3 == 0) * (row > 0)).astype(np.float32))


def obs() -> dict[str, list]:
    """The values of every obs column, in the order of the columns, with None for missing values."""
    rows = range(N_ROWS)
    return {
        "text": [f"word {row % 3} ä" for row in rows],
        "label": [f"label {row % 3}" if row % 4 else None for row in rows],
        "integer label": [row % 3 if row % 4 else None for row in rows],
        "float label": [row % 3 / 2 if row % 4 else None for row in rows],
        "boolean label": [row % 3 == 0 if row % 4 else None for row in rows],
        "count": [row * row for row in rows],
        "share": [row / 7 for row in rows],
        "passed": [row % 5 > 1 for row in rows],
        "maybe count": [row if row % 4 else None for row in rows],
        "maybe passed": [row % 3 == 0 if row % 4 else None for row in rows],
        "string": [f"string {row % 3}" for row in rows],
        "some string": [f"string {row % 3}" if row % 4 else None for row in rows],
    }


def wanted() -> ad.AnnData:
    """The AnnData to write, in the dtypes of the installed pandas."""
    columns = {name: pd.Series(values) for name, values in obs().items()}
    for name in columns:
        if "label" in name:
            columns[name] = pd.Series(pd.Categorical(obs()[name]))
    columns["maybe count"] = columns["maybe count"].astype("Int32")
    columns["maybe passed"] = columns["maybe passed"].astype("boolean")
    if _has_nullable_strings():
        columns["string"] = columns["string"].astype("string")
        columns["some string"] = columns["some string"].astype("string")
    else:
        del columns["some string"]
    adata = ad.AnnData(
        x(),
        obs=pd.DataFrame(columns).set_axis([f"cell {row}" for row in range(N_ROWS)], axis=0),
        var=pd.DataFrame({"symbol": [f"s{gene}" for gene in range(N_GENES)]}, [f"g{gene}" for gene in range(N_GENES)]),
        layers={"dense": x().toarray() + 0.5},
        obsm={"X_pca": np.arange(N_ROWS * 3, dtype=np.float32).reshape(N_ROWS, 3)},
        uns={"text": "hello", "array": np.arange(4)},
    )
    adata.raw = adata[:, ::2].copy()
    return adata


def _has_nullable_strings() -> bool:
    return tuple(int(part) for part in ad.__version__.split(".")[:2]) >= (0, 11)


def write(directory: Path) -> str:
    """Writes every kind of store that is possible here. Returns the name of the archive."""
    adata = wanted()
    if hasattr(ad.settings if hasattr(ad, "settings") else None, "allow_write_nullable_strings"):
        ad.settings.allow_write_nullable_strings = True
    plain = {} if ad.__version__[:4] in ("0.8.", "0.9.", "0.10") else {"convert_strings_to_categoricals": False}
    adata.write_h5ad(directory / "a.h5ad", **plain)
    adata.write_zarr(directory / "a.zarr", **plain)
    if importlib.util.find_spec("zloader"):
        import zloader as zl

        zl.convert(directory / "a.h5ad", directory / "zloader.zarr", progress=False)
    if importlib.util.find_spec("annbatch"):
        import annbatch

        annbatch.DatasetCollection(directory / "annbatch.zarr").add_adatas([directory / "a.h5ad"], shuffle=False)
        return f"annbatch-{importlib.metadata.version('annbatch')}"
    return f"anndata-{ad.__version__}"


def main() -> None:
    """Writes the archive for the installed versions."""
    warnings.simplefilter("ignore")
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        archive = DATA / f"{write(Path(directory))}.zip"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
            for path in sorted(Path(directory).rglob("*")):
                if path.is_file():
                    name = zipfile.ZipInfo(path.relative_to(directory).as_posix())
                    target.writestr(name, path.read_bytes(), zipfile.ZIP_DEFLATED)
    print(f"{archive}: {archive.stat().st_size:,} bytes, Python {sys.version.split()[0]}, pandas {pd.__version__}")


if __name__ == "__main__":
    main()
